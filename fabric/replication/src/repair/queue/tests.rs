//! Invariant *Verified*: what the scrubber finds is repaired from a replica that has it, and from no other.

use fabric_types::Epoch;
use fabric_types::block::{BlockStamp, Holds};
use fabric_types::checksum::crc32c;
use fabric_types::ids::LayerId;
use fabric_types::membership::ReplicaState;
use zerocopy::IntoBytes;

use super::*;

mod unknown;

const ME: (NodeId, Incarnation) = (NodeId(1), Incarnation(10));
const PG: PgId = PgId(0);
const DATA: [u8; 4096] = [0x5a; 4096];
const BAD: BadBlock = BadBlock {
    device: 0,
    chunk: ChunkKey {
        layer: LayerId(5),
        index: 2,
    },
    block: 7,
};
const IN: ReplicaState = ReplicaState::InSync;
const SYNCING: ReplicaState = ReplicaState::Syncing;
const OUT: ReplicaState = ReplicaState::Out;

fn stamp() -> BlockStamp {
    BlockStamp {
        version: 9,
        crc: crc32c(&DATA),
        holds: Holds::Data as u32,
    }
}

/// Nodes 1, 2, …, the first of which is this one.
fn set(epoch: u64, states: &[ReplicaState]) -> ReplicaSet {
    let member = |(nth, state): (u64, &ReplicaState)| Member {
        node: NodeId(nth),
        incarnation: Incarnation(nth * 10),
        state: *state,
        since: Epoch(1),
    };
    let members = (1..).zip(states).map(member).collect();
    ReplicaSet::new(PG, Epoch(epoch), 1, members)
}

/// The same while the group is coming to another device of this node.
fn coming(epoch: u64, states: &[ReplicaState]) -> Vec<ReplicaSet> {
    let mut members = set(epoch, states).members().to_vec();
    members.push(Member {
        node: ME.0.incoming(),
        state: SYNCING,
        ..members[0]
    });
    Vec::from([ReplicaSet::new(PG, Epoch(epoch), 1, members)])
}

struct Bench {
    repairs: Repairs,
    groups: Arc<Groups>,
    lanes: Arc<[Arc<Unresolved>]>,
    sets: Vec<ReplicaSet>,
    now_us: u64,
}

impl Bench {
    fn new(states: &[ReplicaState]) -> Self {
        let groups = Arc::new(Groups::default());
        let lanes: Arc<[Arc<Unresolved>]> = Arc::new([Arc::default(), Arc::default()]);
        let mut bench = Self {
            repairs: Repairs::new(ME, Arc::clone(&groups), Arc::clone(&lanes)),
            groups,
            lanes,
            sets: Vec::new(),
            now_us: 5,
        };
        bench.map(1, states);
        bench
    }

    fn map(&mut self, epoch: u64, states: &[ReplicaState]) {
        self.groups.set(PG, states[0], Epoch(epoch));
        self.sets = vec![set(epoch, states)];
        self.repairs.on_map(&self.sets, self.now_us);
    }

    fn find(&mut self, bad: BadBlock) {
        self.repairs.on_found(&[bad], &self.sets, self.now_us);
    }

    /// Time passes until something is due.
    fn pass(&mut self) {
        let wake = self.repairs.wake_at().expect("something is due");
        assert!(wake > self.now_us, "it would spin");
        self.now_us = wake;
        self.repairs.on_time(wake);
    }

    fn poll(&mut self) -> Option<RepairAction> {
        self.repairs.poll(self.now_us)
    }

    fn here(&mut self) -> (u32, Command) {
        match self.poll() {
            Some(RepairAction::Local(call, PG, command)) => (call, command),
            other => panic!("{other:?}"),
        }
    }

    fn there(&mut self) -> (u32, u64, Command) {
        match self.poll() {
            Some(RepairAction::Ask(call, (node, incarnation), PG, command)) => {
                assert_eq!(incarnation.0, node.0 * 10);
                (call, node.0, command)
            }
            other => panic!("{other:?}"),
        }
    }

    fn answer(&mut self, call: u32, result: Result<(), Refusal>) {
        self.repairs.on_answer(call, result);
    }

    /// It cannot be read, and should be what `stamp` says.
    fn probe_and_inspect(&mut self) {
        let (call, probe) = self.here();
        assert!(matches!(probe, Command::Read { offset: 28672, .. }));
        self.answer(call, Err(Refusal::Corrupt));
        let (call, inspect) = self.here();
        assert!(matches!(inspect, Command::Inspect { block: 7, .. }));
        fill(&inspect, stamp().as_bytes());
        self.answer(call, Ok(()));
    }

    /// A peer is asked for it and gives these bytes; which one.
    fn fetch(&mut self, bytes: &[u8]) -> u64 {
        let (call, node, read) = self.there();
        fill(&read, bytes);
        self.answer(call, Ok(()));
        node
    }

    fn outcome(&mut self) -> Outcome {
        match self.poll() {
            Some(RepairAction::Tell(BAD, outcome)) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn assert_idle(&mut self) {
        assert!(self.poll().is_none());
        assert!(self.repairs.is_idle());
    }
}

/// Fills the memory that a command names, its first bytes.
fn fill(command: &Command, bytes: &[u8]) {
    let (Command::Read { buffers, .. }
    | Command::Inspect { buffers, .. }
    | Command::TellFence { buffers, .. }) = command
    else {
        panic!("{command:?} fills nothing");
    };
    // SAFETY: the job keeps its memory until the answer.
    let buffer = unsafe { buffers.first_mut() };
    buffer[..bytes.len()].copy_from_slice(bytes);
}

#[test]
fn a_bad_block_is_written_again_with_what_another_replica_has() {
    for unreadable in [Refusal::Corrupt, Refusal::Device(libc::EIO)] {
        let mut bench = Bench::new(&[IN, IN, SYNCING]);
        bench.find(BAD);
        let (call, _) = bench.here();
        bench.answer(call, Err(unreadable));
        let (call, inspect) = bench.here();
        fill(&inspect, stamp().as_bytes());
        bench.answer(call, Ok(()));
        assert_eq!(bench.fetch(&DATA), 2, "the only other one in sync");
        let (call, restore) = bench.here();
        let Command::Restore { block, stamps, .. } = restore else {
            panic!("{restore:?}");
        };
        assert_eq!((block, stamps), (7, [stamp(); 2]));
        assert!(!bench.repairs.is_idle());
        bench.answer(call, Ok(()));
        assert_eq!(bench.outcome(), Outcome::Repaired { from: NodeId(2) });
        assert_eq!(bench.repairs.waiting(), 0);
        bench.assert_idle();
        assert_eq!(bench.repairs.wake_at(), None);
    }
}

#[test]
fn a_replica_that_cannot_give_it_is_followed_by_the_next() {
    let cases = [
        Err(Refusal::Corrupt),
        Err(Refusal::Unreachable),
        Err(Refusal::Behind(Epoch(1))),
        // Another version.
        Ok(()),
    ];
    for answer in cases {
        let mut bench = Bench::new(&[IN, IN, IN]);
        bench.find(BAD);
        bench.probe_and_inspect();
        let (call, first, read) = bench.there();
        fill(&read, &[0x77; 4096]);
        bench.answer(call, answer);
        let second = bench.fetch(&DATA);
        assert_eq!(first + second, 5, "each once");
        let (call, restore) = bench.here();
        assert!(matches!(restore, Command::Restore { .. }));
        bench.answer(call, Ok(()));
        let from = NodeId(second);
        assert_eq!(bench.outcome(), Outcome::Repaired { from });
        bench.assert_idle();
    }
}

#[test]
fn unrepairable_block_is_retried_with_backoff_and_reported_once() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.find(BAD);
    let mut pauses = Vec::new();
    for _ in 0..20 {
        bench.probe_and_inspect();
        bench.fetch(&[0x77; 4096]);
        let told = bench.poll();
        let stuck = matches!(told, Some(RepairAction::Tell(BAD, Outcome::Stuck)));
        assert_eq!(stuck, pauses.len() as u32 + 1 == TRIES_REPORTED, "{told:?}");
        bench.assert_idle();
        let before = bench.now_us;
        bench.pass();
        pauses.push(bench.now_us - before);
    }
    assert_eq!(
        pauses[..3],
        [PAUSE_MIN_US, 2 * PAUSE_MIN_US, 4 * PAUSE_MIN_US]
    );
    assert_eq!(pauses[19], PAUSE_MAX_US);
    assert_eq!(bench.repairs.waiting(), 1);
    // The scrubber comes across it again.
    let (call, _) = bench.here();
    bench.find(BAD);
    assert!(bench.poll().is_none(), "it is at it");
    bench.answer(call, Err(Refusal::Unreachable));
    bench.find(BAD);
    let (call, _) = bench.here();
    // Somebody has written it by now.
    bench.answer(call, Ok(()));
    assert_eq!(bench.outcome(), Outcome::Readable);
    bench.assert_idle();
}

#[test]
fn what_is_written_meanwhile_is_left_alone() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.find(BAD);
    bench.probe_and_inspect();
    bench.fetch(&DATA);
    let (call, _) = bench.here();
    bench.answer(call, Err(Refusal::Changed));
    bench.assert_idle();
    bench.pass();
    let (call, _) = bench.here();
    bench.answer(call, Err(Refusal::Corrupt));
    let (call, inspect) = bench.here();
    let nothing = BlockStamp {
        version: 11,
        ..BlockStamp::default()
    };
    fill(&inspect, nothing.as_bytes());
    bench.answer(call, Ok(()));
    assert_eq!(bench.outcome(), Outcome::Readable, "it was discarded");
    bench.assert_idle();
}

#[test]
fn repair_waits_until_this_replica_and_another_are_in_sync() {
    let mut bench = Bench::new(&[SYNCING, IN]);
    bench.find(BAD);
    bench.assert_idle();
    assert_eq!(bench.repairs.wake_at(), None, "only a map changes it");
    bench.map(2, &[OUT, IN]);
    bench.map(3, &[IN, SYNCING]);
    bench.map(4, &[IN, OUT, OUT]);
    bench.assert_idle();
    assert_eq!(bench.repairs.wake_at(), None);
    bench.map(5, &[IN, IN]);
    bench.probe_and_inspect();
    // What the map says of an earlier start of this node does not hold for it.
    let mut bench = Bench::new(&[IN, IN]);
    bench.repairs.me.1 = Incarnation(11);
    bench.find(BAD);
    bench.assert_idle();
}

#[test]
fn a_repair_ends_with_its_map_and_begins_anew() {
    let mut bench = Bench::new(&[IN, IN, IN]);
    bench.find(BAD);
    bench.probe_and_inspect();
    let (old, first, read) = bench.there();
    // A map that says the same changes nothing.
    bench.repairs.on_map(&bench.sets, bench.now_us);
    assert!(bench.poll().is_none());
    let mut states = [IN, IN, IN];
    states[first as usize - 1] = OUT;
    bench.map(2, &states);
    let (call, probe) = bench.here();
    assert!(matches!(probe, Command::Read { .. }));
    // Its memory stayed in use until now.
    fill(&read, &DATA);
    assert_eq!(bench.repairs.calls_due(), 2);
    bench.answer(old, Ok(()));
    assert_eq!(bench.repairs.calls_due(), 1);
    assert!(bench.poll().is_none());
    bench.map(3, &[SYNCING, IN, IN]);
    bench.answer(call, Err(Refusal::Corrupt));
    bench.assert_idle();
    assert_eq!(bench.repairs.wake_at(), None);
}

#[test]
fn a_round_is_told_what_its_replica_cannot_give() {
    let mut bench = Bench::new(&[SYNCING, IN]);
    assert!(bench.repairs.known(PG).is_empty());
    bench.find(BAD);
    bench.find(BadBlock { block: 300, ..BAD });
    let keys = [7, 300].map(|block| (leaf_of(BAD.chunk, block), block % LEAF_BLOCKS));
    assert_eq!(bench.repairs.known(PG), BTreeSet::from(keys));
    // The device that the group is coming to has nothing of it so far.
    bench.groups.place(PG.incoming(), 1, 1, Epoch(1));
    assert!(bench.repairs.known(PG.incoming()).is_empty());
}

#[test]
fn a_block_whose_group_moved_away_is_forgotten() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.find(BAD);
    bench.probe_and_inspect();
    let (call, ..) = bench.there();
    bench.groups.forget(PG);
    let other = Member {
        node: NodeId(9),
        incarnation: Incarnation(90),
        state: IN,
        since: Epoch(7),
    };
    bench.sets = Vec::from([ReplicaSet::new(PG, Epoch(7), 1, vec![other])]);
    bench.repairs.on_map(&bench.sets, bench.now_us);
    assert_eq!(bench.outcome(), Outcome::Left);
    assert!(!bench.repairs.is_idle());
    bench.answer(call, Ok(()));
    bench.assert_idle();
    // Or it is another device's.
    let mut bench = Bench::new(&[IN, IN]);
    bench.groups.place(PG, 1, 1, Epoch(1));
    bench.find(BAD);
    assert_eq!(bench.outcome(), Outcome::Left);
    bench.assert_idle();
}

#[test]
fn bad_block_on_an_incoming_device_waits_until_it_is_in_sync() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.groups.place(PG.incoming(), 1, 1, Epoch(2));
    bench.groups.set(PG.incoming(), SYNCING, Epoch(2));
    bench.sets = coming(2, &[IN, IN]);
    let bad = BadBlock { device: 1, ..BAD };
    bench.find(bad);
    bench.assert_idle();
    assert_eq!(
        (bench.repairs.waiting(), bench.repairs.wake_at()),
        (1, None)
    );
    // It has come.
    bench.groups.place(PG, 1, 1, Epoch(3));
    bench.map(3, &[IN, IN]);
    bench.probe_and_inspect();
    assert_eq!(bench.fetch(&DATA), 2);
    let (call, _) = bench.here();
    bench.answer(call, Ok(()));
    let told = bench.poll();
    let from = NodeId(2);
    assert!(
        matches!(
            told,
            Some(RepairAction::Tell(told, Outcome::Repaired { from: f })) if (told, f) == (bad, from)
        ),
        "{told:?}"
    );
}

#[test]
fn a_block_of_the_only_copy_is_told_while_that_moves_too() {
    let mut bench = Bench::new(&[IN]);
    bench.sets = coming(2, &[IN]);
    bench.find(BAD);
    assert_eq!(bench.outcome(), Outcome::Stuck);
    bench.assert_idle();
}

#[test]
fn a_block_that_is_found_before_the_first_map_waits_for_it() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.repairs.on_found(&[BAD], &[], bench.now_us);
    bench.assert_idle();
    bench.repairs.on_map(&bench.sets, bench.now_us);
    bench.probe_and_inspect();
}

#[test]
fn a_block_of_a_group_with_one_replica_is_told_at_once() {
    let mut bench = Bench::new(&[IN]);
    bench.find(BAD);
    assert_eq!(bench.outcome(), Outcome::Stuck);
    bench.assert_idle();
}

#[test]
fn few_blocks_are_repaired_at_a_time_and_not_any_number_waits() {
    let mut bench = Bench::new(&[IN, IN]);
    for block in 0..=QUEUE_MAX as u32 {
        bench.find(BadBlock { block, ..BAD });
    }
    assert_eq!(bench.repairs.waiting(), QUEUE_MAX);
    let mut calls: VecDeque<u32> = (0..JOBS_MAX).map(|_| bench.here().0).collect();
    assert!(bench.poll().is_none());
    assert_eq!(bench.repairs.wake_at(), None, "those under way come first");
    while let Some(call) = calls.pop_front() {
        bench.answer(call, Ok(()));
        while let Some(action) = bench.poll() {
            match action {
                RepairAction::Local(call, ..) => calls.push_back(call),
                RepairAction::Tell(_, outcome) => assert_eq!(outcome, Outcome::Readable),
                RepairAction::Ask(..) => panic!("{action:?}"),
            }
        }
    }
    assert_eq!(bench.repairs.waiting(), 0);
    bench.assert_idle();
}
