//! Queue pairs without a device, that fail as a test says: what stands above them runs as it does on verbs.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use fabric_types::registrar::Registered;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::event::{EventfdFlags, eventfd};

use super::message::Window;
use super::pair::{Body, Done, Pair, Port, Reach, Side, WINDOWS_MAX};
use super::pairing::End;
use super::regions::{RegionCounts, Regions, View};
use super::slots::{HEAD_BYTES, RECEIVES, Slot, Slots};

/// Work that an end may have on its way.
const ROOM: usize = 4 * WINDOWS_MAX;
/// Windows that an end may have open.
const WINDOWS: usize = 24;

/// What is wrong with a card for as long as a test wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// Nothing gets anywhere, and nobody is told.
    Silent,
    /// The same, and what is ended does not tell what had happened.
    Dead,
    /// Nobody is told of what has arrived.
    Deaf,
    /// This byte of each message to this side arrives as another one.
    Damages(Side, usize),
}

/// A network card for both ends.
#[derive(Clone)]
pub struct FakeCard(Arc<Mutex<Card>>);

struct Card {
    rng: ChaCha8Rng,
    next: u32,
    ends: HashMap<u32, FakeEnd>,
    /// What is on its way, in order: of whom, and what.
    flying: VecDeque<(u32, Work)>,
    /// What is open, by its key.
    open: HashMap<u32, Open>,
    regions: Arc<Regions<()>>,
    fault: Fault,
}

/// Memory of an end that its peer may use.
struct Open {
    owner: u32,
    start: usize,
    bytes: usize,
    reach: Reach,
}

/// One piece of memory here and one there.
#[derive(Clone, Copy)]
struct Piece {
    here: usize,
    there: Window,
}

enum Work {
    /// A message: from which slot, its bytes and the places of more of them, and the key of the peer's that
    /// it closes.
    Send(Slot, Vec<u8>, Vec<(usize, usize)>, Option<u32>),
    Read(Vec<Piece>, u32),
    Write(Vec<Piece>),
    Close(Vec<u32>, u32),
}

struct FakeEnd {
    side: Side,
    slots: Arc<Slots>,
    peer: Option<u32>,
    receives: VecDeque<Slot>,
    done: VecDeque<Done>,
    /// It has noticed that it is over.
    failed: bool,
    /// It is over.
    broken: bool,
}

/// One queue pair.
struct FakePair {
    card: FakeCard,
    number: u32,
    receives: Vec<Slot>,
    staged: Vec<Work>,
    /// Keys, by their token.
    tokens: HashMap<u32, Vec<u32>>,
    view: View<()>,
    fd: OwnedFd,
}

impl FakeCard {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Card {
            rng: ChaCha8Rng::seed_from_u64(seed),
            next: 1,
            ends: HashMap::new(),
            flying: VecDeque::new(),
            open: HashMap::new(),
            regions: Arc::default(),
            fault: Fault::None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Card> {
        self.0.lock().unwrap()
    }

    /// Some time passes: work is done.
    pub fn pass(&self) {
        let card = &mut *self.lock();
        if matches!(card.fault, Fault::Silent | Fault::Dead) {
            return;
        }
        for _ in 0..card.rng.random_range(0..4) {
            card.carry_out();
        }
    }

    /// All queue pairs end, in the middle of whatever they do. One of the two ends may notice it only when it
    /// sends.
    pub fn tear_all(&self) {
        let card = &mut *self.lock();
        card.do_half();
        card.flying.clear();
        let mut numbers: Vec<u32> = card.ends.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            let notices: bool = card.rng.random();
            let end = card.ends.get_mut(&number).unwrap();
            end.broken = true;
            end.failed |= notices;
            let forgets = card.rng.random_range(0..=end.done.len());
            // Arrived is arrived; that something was sent may never be known.
            let mut nth = 0;
            end.done.retain(|done| {
                nth += 1;
                nth <= forgets || matches!(done, Done::Received { .. })
            });
        }
        // Somebody has to.
        if let Some(end) = card.ends.values_mut().find(|end| end.peer.is_some()) {
            end.failed = true;
        }
    }

    /// What is wrong from now on.
    pub fn set_fault(&self, fault: Fault) {
        self.lock().fault = fault;
    }

    /// Queue pairs that are there.
    pub fn pairs(&self) -> usize {
        self.lock().ends.len()
    }

    /// Windows that are open.
    pub fn open_windows(&self) -> usize {
        self.lock().open.len()
    }

    /// Whether a part of this memory is open to a peer.
    pub fn has_open(&self, start: usize, bytes: usize) -> bool {
        let meets = |open: &Open| open.start < start + bytes && start < open.start + open.bytes;
        self.lock().open.values().any(meets)
    }
}

impl Card {
    fn carry_out(&mut self) {
        let Some((from, work)) = self.flying.pop_front() else {
            return;
        };
        let Some(to) = self.ends.get(&from).and_then(|end| end.peer) else {
            return;
        };
        let done = match work {
            // Nothing of the peer is needed for that.
            Work::Close(keys, token) => {
                keys.iter().for_each(|key| self.close(*key));
                Some(Done::Closed(token))
            }
            _ if self.ends.get(&to).is_none_or(|end| end.broken) => {
                self.fail(from);
                return;
            }
            Work::Send(slot, mut bytes, parts, closes) => {
                for (start, len) in parts {
                    // SAFETY: the promise to `send`.
                    let part = unsafe { std::slice::from_raw_parts(start as *const u8, len) };
                    bytes.extend_from_slice(part);
                }
                closes.into_iter().for_each(|key| self.close(key));
                self.deliver(to, &mut bytes, closes);
                Some(Done::Sent(slot))
            }
            Work::Read(pieces, token) => {
                self.copy(to, &pieces, Reach::Read);
                Some(Done::Read(token))
            }
            Work::Write(pieces) => {
                self.copy(to, &pieces, Reach::Write);
                None
            }
        };
        self.ends.get_mut(&from).unwrap().done.extend(done);
    }

    /// What is on its way ends in its middle.
    fn do_half(&mut self) {
        let Some((from, Work::Read(pieces, _) | Work::Write(pieces))) = self.flying.front() else {
            return;
        };
        let (from, half) = (*from, pieces[..pieces.len() / 2].to_vec());
        let reach = match self.flying.front() {
            Some((_, Work::Read(..))) => Reach::Read,
            _ => Reach::Write,
        };
        if let Some(to) = self.ends.get(&from).and_then(|end| end.peer) {
            self.copy(to, &half, reach);
        }
    }

    fn deliver(&mut self, to: u32, bytes: &mut [u8], closed: Option<u32>) {
        match self.fault {
            Fault::Deaf => return,
            Fault::Damages(side, at) if self.ends[&to].side == side => bytes[at] ^= 1,
            Fault::Damages(..) | Fault::None | Fault::Silent | Fault::Dead => {}
        }
        let end = self.ends.get_mut(&to).unwrap();
        let slot = end.receives.pop_front();
        let slot = slot.expect("a message finds a receive posted: that is what credits are for");
        // SAFETY: it was posted, so that only the device writes there.
        unsafe {
            end.slots.set_head(slot, &bytes[..HEAD_BYTES]);
            end.slots.set_page(slot, &bytes[HEAD_BYTES..]);
        }
        let len = bytes.len() as u32;
        end.done.push_back(Done::Received { slot, len, closed });
    }

    /// A real card, or its driver, may go down with a key that is closed twice.
    fn close(&mut self, key: u32) {
        let open = self.open.remove(&key);
        assert!(open.is_some(), "what is closed was open");
    }

    fn copy(&self, owner: u32, pieces: &[Piece], reach: Reach) {
        for Piece { here, there } in pieces {
            let open = self.open.get(&there.key);
            let open = open.expect("only what is open is asked for");
            let from = there.address as usize;
            let lies_within =
                open.start <= from && from + there.len as usize <= open.start + open.bytes;
            assert!(lies_within && open.owner == owner && open.reach == reach);
            let (here, there, len) = (*here as *mut u8, from as *mut u8, there.len as usize);
            // SAFETY: what is open is valid, and what is on its way here, too, by the promises to `open`,
            // `read` and `write`.
            unsafe {
                match reach {
                    Reach::Read => here.copy_from(there, len),
                    Reach::Write => there.copy_from(here, len),
                }
            }
        }
    }

    fn fail(&mut self, number: u32) {
        if let Some(end) = self.ends.get_mut(&number) {
            (end.broken, end.failed) = (true, true);
        }
    }
}

impl Port for FakeCard {
    fn open(&self, slots: &Arc<Slots>, side: Side) -> Result<Box<dyn Pair>, String> {
        let card = &mut *self.lock();
        if card.rng.random_range(0..8) == 0 {
            return Err("no queue pair is left".to_owned());
        }
        let number = card.next;
        card.next += 1;
        let end = FakeEnd {
            side,
            slots: Arc::clone(slots),
            peer: None,
            receives: Slot::receives().collect(),
            done: VecDeque::new(),
            failed: false,
            broken: false,
        };
        card.ends.insert(number, end);
        Ok(Box::new(FakePair {
            card: self.clone(),
            number,
            receives: Vec::new(),
            staged: Vec::new(),
            tokens: HashMap::new(),
            view: View::new(&card.regions),
            fd: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        }))
    }

    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Registered, String> {
        let regions = Arc::clone(&self.lock().regions);
        let opened = regions.insert(start.addr().get(), bytes, ());
        Ok(Registered::new(opened.ok_or("it is registered")?))
    }

    fn counts(&self) -> RegionCounts {
        self.lock().regions.counts()
    }
}

impl FakePair {
    /// A place here for each of the peer's windows.
    fn pieces(at: NonNull<u8>, len: u32, windows: &[Window]) -> Vec<Piece> {
        let (mut here, mut left) = (at.addr().get(), len);
        let piece = |window: &Window| {
            let len = window.len.min(left);
            let there = Window { len, ..*window };
            let piece = Piece { here, there };
            (here, left) = (here + len as usize, left - len);
            piece
        };
        windows.iter().map(piece).collect()
    }
}

impl Pair for FakePair {
    fn end(&self) -> End {
        End {
            queue_pair: self.number,
            psn: 1,
            gid: [1; 16],
            lid: 0,
            mtu: 3,
            reads_served: 1,
            reads_wanted: 1,
            receives: RECEIVES,
            key: [0; 16],
        }
    }

    fn connect(&mut self, peer: &End) -> Result<(), String> {
        let card = &mut *self.card.lock();
        if card.rng.random_range(0..8) == 0 {
            return Err("no route".to_owned());
        }
        let end = card.ends.get_mut(&self.number).unwrap();
        end.peer = Some(peer.queue_pair);
        Ok(())
    }

    fn room(&self) -> usize {
        let card = self.card.lock();
        let ours = card.flying.iter().filter(|(from, _)| *from == self.number);
        ROOM.saturating_sub(ours.count() + self.staged.len())
    }

    fn is_busy(&self) -> bool {
        let card = self.card.lock();
        card.flying.iter().any(|(from, _)| *from == self.number)
    }

    fn reaches(&mut self, part: &libc::iovec) -> bool {
        let found = self.view.find(part.iov_base.addr(), part.iov_len);
        found.is_some()
    }

    fn receive(&mut self, slot: Slot) {
        self.receives.push(slot);
    }

    unsafe fn send(&mut self, slot: Slot, body: Body<'_>, closes: Option<u32>) {
        let card = self.card.lock();
        let slots = &card.ends[&self.number].slots;
        // SAFETY: it was handed to the device, and nobody else writes there.
        let (mut bytes, page) = unsafe { (slots.head(slot).to_vec(), slots.page(slot)) };
        let mut places = Vec::new();
        match body {
            Body::Page(len) => bytes.extend_from_slice(&page[..len as usize]),
            Body::Parts(parts) => {
                for part in parts {
                    let place = (part.iov_base.addr(), part.iov_len);
                    assert!(self.view.find(place.0, place.1).is_some());
                    places.push(place);
                }
            }
        }
        self.staged.push(Work::Send(slot, bytes, places, closes));
    }

    unsafe fn open(
        &mut self,
        parts: &[libc::iovec],
        reach: Reach,
        token: u32,
        windows: &mut Vec<Window>,
    ) -> bool {
        let card = &mut *self.card.lock();
        let ours = card.open.values().filter(|open| open.owner == self.number);
        if ours.count() + parts.len() > WINDOWS {
            return false;
        }
        let keys = self.tokens.entry(token).or_default();
        assert!(keys.is_empty(), "a token is used once at a time");
        for part in parts {
            let (start, bytes) = (part.iov_base.addr(), part.iov_len);
            assert!(self.view.find(start, bytes).is_some());
            let key = card.next;
            card.next += 1;
            let open = Open {
                owner: self.number,
                start,
                bytes,
                reach,
            };
            card.open.insert(key, open);
            keys.push(key);
            windows.push(Window {
                address: start as u64,
                key,
                len: bytes as u32,
            });
        }
        true
    }

    fn close(&mut self, token: u32, closed: Option<u32>) -> Result<bool, String> {
        let keys = self.tokens.remove(&token).unwrap_or_default();
        assert_eq!(keys.first().copied(), closed, "the peer closes the first");
        if keys.len() > 1 {
            self.staged.push(Work::Close(keys[1..].to_vec(), token));
        }
        Ok(keys.len() <= 1)
    }

    unsafe fn read(&mut self, to: NonNull<u8>, windows: &[Window], token: u32) {
        let pieces = Self::pieces(to, u32::MAX, windows);
        self.staged.push(Work::Read(pieces, token));
    }

    unsafe fn write(&mut self, from: NonNull<u8>, len: u32, windows: &[Window]) {
        let pieces = Self::pieces(from, len, windows);
        self.staged.push(Work::Write(pieces));
    }

    fn flush(&mut self) -> Result<(), String> {
        let card = &mut *self.card.lock();
        let end = card.ends.get_mut(&self.number).unwrap();
        if end.broken {
            end.failed = true;
            return Err("torn".to_owned());
        }
        end.receives.extend(self.receives.drain(..));
        let staged = self.staged.drain(..).map(|work| (self.number, work));
        card.flying.extend(staged);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        let card = &mut *self.card.lock();
        let end = card.ends.get_mut(&self.number).unwrap();
        done.extend(end.done.drain(..));
        match end.failed {
            true => Err("torn".to_owned()),
            false => Ok(()),
        }
    }

    fn end_all(&mut self, done: &mut Vec<Done>) -> bool {
        let card = &mut *self.card.lock();
        card.flying.retain(|(from, _)| *from != self.number);
        let end = card.ends.get_mut(&self.number).unwrap();
        (end.broken, end.failed) = (true, true);
        done.extend(end.done.drain(..));
        card.fault != Fault::Dead
    }

    fn arm(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn heard(&mut self) {}

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for FakePair {
    fn drop(&mut self) {
        let card = &mut *self.card.lock();
        card.ends.remove(&self.number);
        card.flying.retain(|(from, _)| *from != self.number);
        card.open.retain(|_, open| open.owner != self.number);
    }
}
