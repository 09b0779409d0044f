//! The requests that were taken off a packed ring, with their descriptors: an answer to another request may
//! be written over those in the ring.

use super::layout::Desc;

/// Ends the free list.
pub(crate) const NO_ENTRY: u16 = u16::MAX;

/// One descriptor; `last` and `count` are of the request that begins here.
#[derive(Debug, Clone, Copy)]
struct Entry {
    desc: Desc,
    next: u16,
    last: u16,
    count: u16,
    taken: bool,
}

/// As many entries as the ring has descriptors. A request is named by its first entry.
#[derive(Debug)]
pub(crate) struct Requests {
    entries: Box<[Entry]>,
    free_head: u16,
}

impl Requests {
    /// All entries are free, the first one first.
    pub(crate) fn new(size: u16) -> Self {
        let entry = Entry {
            desc: Desc::default(),
            next: NO_ENTRY,
            last: 0,
            count: 0,
            taken: false,
        };
        let mut requests = Self {
            entries: vec![entry; usize::from(size)].into_boxed_slice(),
            free_head: NO_ENTRY,
        };
        requests.link_free();
        requests
    }

    pub(crate) fn size(&self) -> u16 {
        self.entries.len() as u16
    }

    pub(crate) fn free_head(&self) -> u16 {
        self.free_head
    }

    /// Free entries in order, each with the one behind it.
    pub(crate) fn free_list(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        let mut at = self.free_head;
        std::iter::from_fn(move || {
            let entry = self.entries.get(usize::from(at))?;
            Some((std::mem::replace(&mut at, entry.next), entry.next))
        })
    }

    /// Puts a descriptor into a free entry, behind those of its request; returns the next free one.
    #[inline(always)]
    pub(crate) fn fill(&mut self, entry: u16, desc: Desc) -> Option<u16> {
        let entry = self.entries.get_mut(usize::from(entry))?;
        entry.desc = desc;
        Some(entry.next)
    }

    /// The first `count` free entries, filled up to `last`, become a request.
    #[inline(always)]
    pub(crate) fn take(&mut self, last: u16, count: u16) -> u16 {
        let head = self.free_head;
        self.free_head = self.entries[usize::from(last)].next;
        let first = &mut self.entries[usize::from(head)];
        (first.last, first.count) = (last, count);
        head
    }

    /// The entries of a request go to the front of the free list.
    #[inline(always)]
    pub(crate) fn free(&mut self, head: u16) {
        let last = self.last(head);
        self.entries[usize::from(last)].next = self.free_head;
        self.free_head = head;
    }

    /// Last entry of a request.
    #[inline(always)]
    pub(crate) fn last(&self, head: u16) -> u16 {
        self.entries[usize::from(head)].last
    }

    /// Descriptors of a request.
    #[inline(always)]
    pub(crate) fn count(&self, head: u16) -> u16 {
        self.entries[usize::from(head)].count
    }

    /// The driver's name of a request, which is in its last descriptor.
    #[inline(always)]
    pub(crate) fn buffer_id(&self, head: u16) -> u16 {
        self.entries[usize::from(self.last(head))].desc.id
    }

    /// Entries and descriptors of a request.
    #[inline(always)]
    pub(crate) fn descs(&self, head: u16) -> impl Iterator<Item = (u16, Desc)> + '_ {
        let mut at = head;
        (0..self.count(head)).map(move |_| {
            let entry = &self.entries[usize::from(at)];
            (std::mem::replace(&mut at, entry.next), entry.desc)
        })
    }

    /// Adds a request of an earlier daemon. False if it has no descriptors or an entry of another one.
    /// [`Self::link_free`] comes after the last.
    pub(crate) fn insert(&mut self, descs: &[(u16, Desc)]) -> bool {
        let (Some(&(head, _)), Some(&(last, _))) = (descs.first(), descs.last()) else {
            return false;
        };
        for (at, &(entry, desc)) in descs.iter().enumerate() {
            let entry = &mut self.entries[usize::from(entry)];
            if std::mem::replace(&mut entry.taken, true) {
                return false;
            }
            entry.desc = desc;
            entry.next = descs.get(at + 1).map_or(NO_ENTRY, |next| next.0);
        }
        let first = &mut self.entries[usize::from(head)];
        (first.last, first.count) = (last, descs.len() as u16);
        true
    }

    /// Makes a free list of all entries that no request has.
    pub(crate) fn link_free(&mut self) {
        self.free_head = NO_ENTRY;
        for (at, entry) in self.entries.iter_mut().enumerate().rev() {
            if !std::mem::take(&mut entry.taken) {
                entry.next = self.free_head;
                self.free_head = at as u16;
            }
        }
    }
}
