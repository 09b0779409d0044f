//! A daemon that dies anywhere, and the next one, against a model: whatever was taken and not shown to be
//! answered is done again, in its order, and nothing else.

use proptest::prelude::*;

use super::*;
use crate::inflight::{InflightRecord, InflightRegion, RingLayout};

/// How far publishing gets before the daemon dies.
const STEPS: u8 = 5;
/// After so many steps the guest has the answers.
const STEPS_TO_SHOW: u8 = 3;

#[derive(Debug, Clone)]
enum Op {
    /// The driver adds a request of so many descriptors.
    Add { descs: u8, indirect: bool },
    /// The device takes what is there.
    Take,
    /// The device puts the last one back.
    Untake,
    /// The device answers one of those in flight.
    Answer { which: u8 },
    /// The device shows its answers.
    Publish,
    /// It dies after so many steps of showing them.
    Die { steps: u8 },
    /// The driver looks for answers, at most so many.
    Look { count: u8 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1..5_u8, any::<bool>()).prop_map(|(descs, indirect)| Op::Add { descs, indirect }),
        4 => Just(Op::Take),
        1 => Just(Op::Untake),
        4 => any::<u8>().prop_map(|which| Op::Answer { which }),
        3 => Just(Op::Publish),
        2 => (0..=STEPS).prop_map(|steps| Op::Die { steps }),
        3 => (0..4_u8).prop_map(|count| Op::Look { count }),
    ]
}

/// A request as the test knows it: the device's name, the driver's name, and its first length, which tells it
/// from all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    id: u16,
    buffer: u16,
    len: u32,
}

struct World {
    rig: Rig,
    region: Arc<InflightRegion>,
    serial: u32,
    /// Added and not taken: the driver's name and the length.
    waiting: Vec<(u16, u32)>,
    /// Taken and not answered, in order.
    in_flight: Vec<Known>,
    /// Answered, not yet shown.
    answered: Vec<Known>,
    /// Shown, not yet seen by the driver.
    shown: Vec<u16>,
    can_untake: bool,
}

impl World {
    fn new() -> Self {
        let region = InflightRegion::create(RingLayout::Packed, 1, 16).unwrap().0;
        let mut world = Self {
            rig: rig(),
            region,
            serial: 0,
            waiting: Vec::new(),
            in_flight: Vec::new(),
            answered: Vec::new(),
            shown: Vec::new(),
            can_untake: false,
        };
        world.restart();
        world
    }

    /// The next daemon. Its base is the one of the very beginning: a front end that lost a daemon knows no
    /// better.
    fn restart(&mut self) {
        let Some(InflightRecord::Packed(record)) = self.region.queue(0) else {
            panic!("the record is one of packed rings");
        };
        let config = config(&self.rig.queue, EVENT_IDX | INDIRECT);
        let made = PackedRing::new(config, BASE_AT_START, Some(record), &mut self.rig.view);
        let (ring, replay) = made.unwrap();
        self.rig.ring = ring;
        self.can_untake = false;
        let lens: Vec<u64> = replay.iter().map(|&id| self.len(id)).collect();
        let expected = self.in_flight.iter().map(|known| u64::from(known.len));
        assert_eq!(lens, expected.collect::<Vec<_>>());
        for (known, id) in self.in_flight.iter_mut().zip(replay) {
            known.id = id;
        }
    }

    fn len(&mut self, id: u16) -> u64 {
        let Rig {
            ring, view, chain, ..
        } = &mut self.rig;
        ring.walk(id, view, chain).unwrap();
        chain.readable_bytes
    }

    fn add(&mut self, descs: u8, indirect: bool) {
        let at = self.rig.data();
        let mut buffers: Vec<Buffer> = vec![(at, self.serial + 1, false)];
        buffers.extend((1..descs).map(|_| (at, 1, true)));
        let room = if indirect { 1 } else { usize::from(descs) };
        if !self.rig.queue.has_room(room) {
            return;
        }
        self.serial += 1;
        let buffer = match indirect {
            true => self.rig.queue.add_indirect(&buffers),
            false => self.rig.queue.add(&buffers),
        };
        self.rig.queue.publish();
        self.waiting.push((buffer, self.serial));
    }

    fn take(&mut self) {
        let ready = self.rig.ring.available().unwrap();
        assert_eq!(ready == 0, self.waiting.is_empty());
        for _ in 0..ready {
            let id = self.rig.ring.take().unwrap();
            let (buffer, len) = self.waiting.remove(0);
            assert_eq!(self.len(id), u64::from(len));
            self.in_flight.push(Known { id, buffer, len });
            self.can_untake = true;
        }
    }

    fn untake(&mut self) {
        if self.can_untake
            && let Some(known) = self.in_flight.pop()
        {
            self.rig.ring.untake();
            self.waiting.insert(0, (known.buffer, known.len));
        }
        self.can_untake = false;
    }

    fn answer(&mut self, which: u8) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = usize::from(which) % self.in_flight.len();
        self.can_untake &= at + 1 < self.in_flight.len();
        let known = self.in_flight.remove(at);
        self.rig.ring.answer(known.id, known.len);
        self.answered.push(known);
    }

    fn die(&mut self, steps: u8) {
        let ring = &mut self.rig.ring;
        let all: [fn(&mut PackedRing); STEPS as usize] = [
            PackedRing::record_answers,
            |ring| ring.write_others(),
            |ring| ring.write_first(),
            // The marks of half a batch.
            |ring| {
                let half = ring.answers.len() / 2;
                let heads = ring.answers[..half].iter().map(|answer| answer.head);
                if let Some(record) = &mut ring.record {
                    record.clear_marks(heads);
                }
            },
            PackedRing::forget_answers,
        ];
        all.iter()
            .take(usize::from(steps))
            .for_each(|step| step(ring));
        let answered = std::mem::take(&mut self.answered);
        if steps >= STEPS_TO_SHOW {
            self.shown.extend(answered.iter().map(|known| known.buffer));
        } else {
            self.in_flight.extend(answered);
            self.in_flight.sort_by_key(|known| known.len);
        }
    }

    fn look(&mut self, count: usize) {
        for _ in 0..count.min(self.shown.len()) {
            let buffer = self.shown.remove(0);
            assert_eq!(self.rig.queue.next_used().map(|used| used.0), Some(buffer));
            self.rig.queue.recycle(buffer);
        }
        if self.shown.is_empty() {
            assert_eq!(self.rig.queue.next_used(), None);
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Add { descs, indirect } => self.add(descs, indirect),
            Op::Take => self.take(),
            Op::Untake => self.untake(),
            Op::Answer { which } => self.answer(which),
            Op::Publish => {
                self.rig.ring.publish();
                self.shown
                    .extend(self.answered.drain(..).map(|known| known.buffer));
            }
            Op::Die { steps } => {
                self.die(steps);
                // The driver lives on, and may look and add before the next daemon is there.
                self.look(usize::from(steps));
                self.add(1 + steps % 3, steps % 2 == 0);
                self.restart();
            }
            Op::Look { count } => self.look(usize::from(count)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn a_kill_anywhere_loses_and_repeats_nothing(ops in proptest::collection::vec(op(), 0..200)) {
        let mut world = World::new();
        for op in &ops {
            world.apply(op);
        }
        // All that was added is answered in the end, once.
        world.apply(&Op::Die { steps: 0 });
        while !(world.waiting.is_empty() && world.in_flight.is_empty()) {
            world.take();
            while !world.in_flight.is_empty() {
                world.answer(0);
            }
            world.apply(&Op::Publish);
        }
        world.look(usize::MAX);
        prop_assert!(world.rig.ring.is_at_rest());
    }
}

#[test]
fn a_record_made_up_by_the_other_side_is_refused_or_bounded() {
    let (region, file) = InflightRegion::create(RingLayout::Packed, 1, 16).unwrap();
    let rig = rig();
    let config = config(&rig.queue, INDIRECT);
    let mut state = 7_u64;
    let (mut refused, mut taken) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = vec![0_u8; region.mmap_size() as usize];
        for byte in &mut bytes {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = match state >> 56 {
                0..=2 => (state >> 40) as u8,
                3..=60 => (state >> 40) as u8 % 9,
                _ => 0,
            };
        }
        bytes[8..10].copy_from_slice(&[1, 0]);
        rustix::io::pwrite(&file, &bytes, 0).unwrap();
        let Some(InflightRecord::Packed(record)) = region.queue(0) else {
            panic!("the record is one of packed rings");
        };
        let mut view = MemoryView::new(Arc::clone(rig.guest.memory()));
        match PackedRing::new(config, BASE_AT_START, Some(record), &mut view) {
            Ok((mut ring, replay)) => {
                let mut chain = Chain::default();
                for id in replay {
                    // An error or a chain in the guest's memory.
                    let _ = ring.walk(id, &mut view, &mut chain);
                    ring.answer(id, 1);
                    taken += 1;
                }
                ring.publish();
            }
            Err(error) => {
                assert_eq!(error, RingError::Record);
                refused += 1;
            }
        }
    }
    assert!(
        refused > 20 && taken > 20,
        "{refused} refused, {taken} taken"
    );
}
