//! A part of the cache with a lock of its own: which pages are there, and which of them stay.
//!
//! Eviction is S3-FIFO (Yang et al., SOSP 2023): a new page goes into a small queue, a tenth of the room, and
//! from its end into the main queue only if it was read again meanwhile. One that went and soon comes back
//! goes into the main queue at once: keys of pages that went are remembered as ghosts. So reading much once
//! displaces little of what is read often.

use std::collections::{HashMap, HashSet, VecDeque};

use futures_channel::oneshot::{Receiver, Sender, channel};

use super::PageKey;
use super::pages::{Blocks, PAGE_OVERHEAD, Page, Run, Slice};

/// The small queue has this share of the room before it is evicted from.
const SMALL_SHARE: u64 = 10;

pub(super) struct Shard {
    capacity: u64,
    used: u64,
    /// Of which in the small queue.
    small_used: u64,
    pages: HashMap<PageKey, Page>,
    small: VecDeque<PageKey>,
    main: VecDeque<PageKey>,
    ghosts: Ghosts,
    claims: HashMap<PageKey, Vec<Claimed>>,
    last_claim: u64,
}

/// Blocks that somebody reads to put them.
struct Claimed {
    id: u64,
    blocks: Blocks,
    waiting: Vec<Sender<()>>,
}

/// What is known of some blocks of a page.
pub(super) enum Known {
    Cached(Slice),
    /// Nobody reads it: it is claimed for the caller.
    Claimed(u64),
    /// Somebody reads it. The receiver ends with the claim.
    UnderWay(Receiver<()>),
}

impl Shard {
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity,
            used: 0,
            small_used: 0,
            pages: HashMap::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: Ghosts::default(),
            claims: HashMap::new(),
            last_claim: 0,
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// What is known of these blocks, in order. Blocks that are neither there nor claimed are claimed.
    /// `is_read`: a guest reads them.
    pub(super) fn look(
        &mut self,
        key: PageKey,
        wanted: Blocks,
        is_read: bool,
    ) -> Vec<(Blocks, Known)> {
        let mut found = Vec::new();
        let mut present = 0;
        if let Some(page) = self.pages.get_mut(&key) {
            present = page.present() & wanted.mask();
            if is_read && present != 0 {
                page.note_read(present);
            }
            let slices = page.slices(wanted);
            found.extend(slices.map(|(blocks, slice)| (blocks, Known::Cached(slice))));
        }
        if present == wanted.mask() {
            return found;
        }
        let mut claimed = 0;
        for claim in self.claims.get_mut(&key).into_iter().flatten() {
            let under_way = claim.blocks.mask() & !present;
            claimed |= under_way;
            for blocks in wanted.runs_in(under_way) {
                let (sender, receiver) = channel();
                claim.waiting.push(sender);
                found.push((blocks, Known::UnderWay(receiver)));
            }
        }
        for blocks in wanted.runs_in(!(present | claimed)) {
            self.last_claim += 1;
            let id = self.last_claim;
            let claim = Claimed {
                id,
                blocks,
                waiting: Vec::new(),
            };
            self.claims.entry(key).or_default().push(claim);
            found.push((blocks, Known::Claimed(id)));
        }
        found.sort_unstable_by_key(|(blocks, _)| blocks.first);
        found
    }

    /// What is there of these blocks, if it is all.
    pub(super) fn cached(&mut self, key: PageKey, wanted: Blocks) -> Option<Vec<Slice>> {
        let page = self.pages.get(&key)?;
        let is_all = page.present() & wanted.mask() == wanted.mask();
        is_all.then(|| page.slices(wanted).map(|(_, slice)| slice).collect())
    }

    /// Ends a claim; who waited for it.
    pub(super) fn end_claim(&mut self, key: PageKey, id: u64) -> Vec<Sender<()>> {
        let Some(claims) = self.claims.get_mut(&key) else {
            return Vec::new();
        };
        let position = claims.iter().position(|claim| claim.id == id);
        let claim = position.map(|position| claims.swap_remove(position));
        if claims.is_empty() {
            self.claims.remove(&key);
        }
        claim.map_or_else(Vec::new, |claim| claim.waiting)
    }

    /// Puts blocks. `is_read`: a guest reads them right now. What went for that is returned, to be freed
    /// without the lock.
    pub(super) fn put(&mut self, key: PageKey, run: Run, is_read: bool) -> Vec<Page> {
        let mut gone = Vec::new();
        let runs = match self.pages.get(&key) {
            Some(page) => page.missing(&run),
            None => vec![run],
        };
        for run in runs {
            if !self.make_room(run.weight() + PAGE_OVERHEAD, &mut gone) {
                break;
            }
            self.add(key, run, is_read);
        }
        gone
    }

    /// Adds blocks that are missing, for which there is room.
    fn add(&mut self, key: PageKey, run: Run, is_read: bool) {
        let mut added = run.weight();
        let page = match self.pages.get_mut(&key) {
            Some(page) => page,
            None => {
                let is_main = self.ghosts.take(key.hash());
                let queue = match is_main {
                    true => &mut self.main,
                    false => &mut self.small,
                };
                queue.push_back(key);
                added += PAGE_OVERHEAD;
                self.pages.entry(key).or_insert(Page::new(is_main))
            }
        };
        if is_read {
            page.note_read(run.blocks.mask());
        }
        if !page.is_main {
            self.small_used += added;
        }
        self.used += added;
        page.add(run);
    }

    /// Evicts until there is room. False if there is not as much.
    fn make_room(&mut self, needed: u64, gone: &mut Vec<Page>) -> bool {
        if needed > self.capacity {
            return false;
        }
        while self.used + needed > self.capacity {
            let is_small = self.small_used > self.capacity / SMALL_SHARE || self.main.is_empty();
            let evicted = match is_small {
                true => self.evict_small(),
                false => self.evict_main(),
            };
            gone.extend(evicted);
        }
        true
    }

    /// Takes the first page of the small queue out, which goes to the main queue or away.
    fn evict_small(&mut self) -> Option<Page> {
        let key = self.small.pop_front();
        let key = key.expect("what is used has pages");
        let page = self.pages.get_mut(&key).expect("a queued page is there");
        self.small_used -= page.weight();
        if page.rereads > 0 {
            page.rereads = 0;
            page.is_main = true;
            self.main.push_back(key);
            return None;
        }
        self.ghosts.add(key.hash());
        self.remove(key)
    }

    /// The same for the main queue. A page stays as often as it was read again.
    fn evict_main(&mut self) -> Option<Page> {
        let key = self.main.pop_front()?;
        let page = self.pages.get_mut(&key).expect("a queued page is there");
        if page.rereads > 0 {
            page.rereads -= 1;
            self.main.push_back(key);
            return None;
        }
        self.remove(key)
    }

    fn remove(&mut self, key: PageKey) -> Option<Page> {
        let page = self.pages.remove(&key)?;
        self.used -= page.weight();
        self.ghosts.bound(self.pages.len());
        Some(page)
    }

    /// Forgets a filesystem.
    pub(super) fn forget(&mut self, filesystem: u64) {
        let is_kept = |key: &PageKey| key.filesystem != filesystem;
        self.pages.retain(|key, _| is_kept(key));
        self.small.retain(is_kept);
        self.main.retain(is_kept);
        self.used = self.pages.values().map(Page::weight).sum();
        let small = self.pages.values().filter(|page| !page.is_main);
        self.small_used = small.map(Page::weight).sum();
        self.ghosts.bound(self.pages.len());
    }

    /// Checks that all sums are right.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let sum = |is_main: bool| {
            let pages = self.pages.values().filter(|page| page.is_main == is_main);
            pages.map(Page::weight).sum::<u64>()
        };
        assert_eq!(self.small_used, sum(false));
        assert_eq!(self.used, sum(false) + sum(true));
        assert!(self.used <= self.capacity);
        assert_eq!(self.pages.len(), self.small.len() + self.main.len());
        assert!(self.ghosts.order.len() <= self.pages.len().max(GHOSTS_MIN));
        assert!(self.ghosts.known.len() <= self.ghosts.order.len());
    }

    #[cfg(test)]
    pub(super) fn claims(&self) -> usize {
        self.claims.len()
    }
}

/// Ghosts that are remembered however few pages there are.
const GHOSTS_MIN: usize = 16;

/// Pages that went a short while ago, by their hash.
#[derive(Default)]
struct Ghosts {
    known: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Ghosts {
    /// A page went.
    fn add(&mut self, page: u64) {
        if self.known.insert(page) {
            self.order.push_back(page);
        }
    }

    /// As many are remembered as there are pages.
    fn bound(&mut self, pages: usize) {
        while self.order.len() > pages.max(GHOSTS_MIN) {
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }

    /// Whether a page went; it is forgotten.
    fn take(&mut self, page: u64) -> bool {
        self.known.remove(&page)
    }
}
