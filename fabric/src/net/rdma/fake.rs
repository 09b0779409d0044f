//! Queue pairs without a device, that fail as a test says: what stands above them runs as it does on verbs.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::event::{EventfdFlags, eventfd};

use super::pair::{Done, Pair, Port};
use super::pairing::End;
use super::slots::{HEAD_BYTES, RECEIVES, Slot, Slots};

/// A network card for both ends.
#[derive(Clone)]
pub struct FakeCard(Arc<Mutex<Card>>);

struct Card {
    rng: ChaCha8Rng,
    next: u32,
    ends: HashMap<u32, FakeEnd>,
    /// Messages that are on their way, in order: from whom, from which slot, and the bytes.
    flying: VecDeque<(u32, Slot, Vec<u8>)>,
}

struct FakeEnd {
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
    sends: Vec<(Slot, u32)>,
    fd: OwnedFd,
}

impl FakeCard {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Card {
            rng: ChaCha8Rng::seed_from_u64(seed),
            next: 1,
            ends: HashMap::new(),
            flying: VecDeque::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Card> {
        self.0.lock().unwrap()
    }

    /// Some time passes: messages arrive.
    pub fn pass(&self) {
        let card = &mut *self.lock();
        for _ in 0..card.rng.random_range(0..4) {
            card.deliver();
        }
    }

    /// All queue pairs end, in the middle of whatever they do. One of the two ends may notice it only when it sends.
    pub fn tear_all(&self) {
        let card = &mut *self.lock();
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
                nth <= forgets || matches!(done, Done::Received(..))
            });
        }
        // Somebody has to.
        if let Some(end) = card.ends.values_mut().find(|end| end.peer.is_some()) {
            end.failed = true;
        }
    }

    /// Queue pairs that are there.
    pub fn pairs(&self) -> usize {
        self.lock().ends.len()
    }
}

impl Card {
    fn deliver(&mut self) {
        let Some((from, slot, bytes)) = self.flying.pop_front() else {
            return;
        };
        let Some(to) = self.ends.get(&from).and_then(|end| end.peer) else {
            return;
        };
        let Some(end) = self.ends.get_mut(&to).filter(|end| !end.broken) else {
            self.fail(from);
            return;
        };
        let place = end.receives.pop_front();
        let place = place.expect("a message finds a receive posted: that is what credits are for");
        // SAFETY: it was posted, so that only the device writes there.
        unsafe {
            end.slots.set_head(place, &bytes[..HEAD_BYTES]);
            let payload = &bytes[HEAD_BYTES..];
            let to = end.slots.payload(place);
            to.copy_from(payload.as_ptr(), payload.len());
        }
        end.done
            .push_back(Done::Received(place, bytes.len() as u32));
        let from = self.ends.get_mut(&from).unwrap();
        from.done.push_back(Done::Sent(slot));
    }

    fn fail(&mut self, number: u32) {
        if let Some(end) = self.ends.get_mut(&number) {
            (end.broken, end.failed) = (true, true);
        }
    }
}

impl Port for FakeCard {
    fn open(&self, slots: &Arc<Slots>) -> Result<Box<dyn Pair>, String> {
        let card = &mut *self.lock();
        if card.rng.random_range(0..8) == 0 {
            return Err("no queue pair is left".to_owned());
        }
        let number = card.next;
        card.next += 1;
        let end = FakeEnd {
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
            sends: Vec::new(),
            fd: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        }))
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

    fn receive(&mut self, slot: Slot) {
        self.receives.push(slot);
    }

    fn send(&mut self, slot: Slot, payload_len: u32) {
        self.sends.push((slot, payload_len));
    }

    fn flush(&mut self) -> Result<(), String> {
        let card = &mut *self.card.lock();
        let end = card.ends.get_mut(&self.number).unwrap();
        if end.broken {
            end.failed = true;
            return Err("torn".to_owned());
        }
        end.receives.extend(self.receives.drain(..));
        for (slot, payload_len) in self.sends.drain(..) {
            // SAFETY: it was handed to the device, and nobody else writes there.
            let bytes = unsafe {
                let head = end.slots.head(slot);
                let payload = end.slots.payload(slot);
                let payload = std::slice::from_raw_parts(payload, payload_len as usize);
                [&head, payload].concat()
            };
            card.flying.push_back((self.number, slot, bytes));
        }
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
        card.flying.retain(|(from, ..)| *from != self.number);
        let end = card.ends.get_mut(&self.number).unwrap();
        (end.broken, end.failed) = (true, true);
        done.extend(end.done.drain(..));
        true
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
        card.flying.retain(|(from, ..)| *from != self.number);
    }
}
