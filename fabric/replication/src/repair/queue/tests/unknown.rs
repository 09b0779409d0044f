//! Blocks that this replica knows nothing of are taken over from others, and nothing is undone by that.

use fabric_types::ids::Version;
use fabric_types::message::{FenceEntry, UnresolvedEntry};
use fabric_types::{Generation, Request, Sequence};

use super::*;
use crate::replica::store_op::still_untouched;

const NOTHING: BlockStamp = BlockStamp {
    version: 9,
    crc: 0,
    holds: Holds::Nothing as u32,
};

fn newer() -> BlockStamp {
    BlockStamp {
        version: 10,
        ..stamp()
    }
}

/// A client's write of the block.
fn write(version: u64) -> Request {
    let version = Version(version);
    Request {
        pg: PG,
        epoch: Epoch(1),
        generation: Generation(u64::from(version.generation())),
        sequence: Sequence(version.sequence()),
        command: Command::Zero {
            chunk: BAD.chunk,
            offset: BAD.block * 4096,
            len: 4096,
            fua: false,
        },
        ..Request::NOTHING
    }
}

impl Bench {
    /// It cannot be read, and what it should be is not known here.
    fn find_unknown(&mut self) {
        let (call, _) = self.here();
        self.answer(call, Err(Refusal::Corrupt));
        let (call, inspect) = self.here();
        fill(&inspect, BlockStamp::UNKNOWN.as_bytes());
        self.answer(call, Ok(()));
    }

    /// A peer is asked what it has, and has this; which one.
    fn inspect_there(&mut self, stamp: BlockStamp) -> u64 {
        let (call, node, inspect) = self.there();
        assert!(matches!(inspect, Command::Inspect { block: 7, .. }));
        fill(&inspect, stamp.as_bytes());
        self.answer(call, Ok(()));
        node
    }

    /// A peer is asked what it takes for unresolved, and tells these.
    fn tell(&mut self, entries: &[UnresolvedEntry]) -> u64 {
        let (call, node, command) = self.there();
        let layer = BAD.chunk.layer;
        assert!(matches!(command, Command::TellFence { layer: l, .. } if l == layer));
        let fence = FenceEntry::default();
        fill(&command, &[fence.as_bytes(), entries.as_bytes()].concat());
        self.answer(call, Ok(()));
        node
    }

    /// It is to be made what the others have.
    fn restore(&mut self, stamp: BlockStamp) -> (u32, Command) {
        let (call, command) = self.here();
        let Command::Restore { stamps, len, .. } = command else {
            panic!("{command:?}");
        };
        assert_eq!(stamps, [BlockStamp::UNKNOWN, stamp]);
        assert_eq!(len > 0, stamp.holds() == Holds::Data);
        (call, command)
    }

    /// A client's write is admitted.
    fn on_write(&mut self, version: u64) {
        self.lanes[1].note(&write(version));
        self.groups.note(&write(version));
    }

    fn is_allowed(&self, restore: &Command) -> bool {
        still_untouched(PG, restore, &self.groups).is_ok()
    }

    /// Nothing is done about it now; it is tried again later.
    fn assert_put_off(&mut self) {
        self.assert_idle();
        assert_eq!(self.repairs.waiting(), 1);
        self.pass();
    }
}

#[test]
fn replica_that_does_not_know_what_it_has_takes_over_what_the_others_have() {
    for theirs in [stamp(), NOTHING] {
        let mut bench = Bench::new(&[IN, IN, IN]);
        bench.find(BAD);
        bench.find_unknown();
        assert_eq!(bench.inspect_there(theirs) + bench.inspect_there(theirs), 5);
        if theirs.holds() == Holds::Data {
            bench.fetch(&DATA);
        }
        // One of these may be what is taken over: who had it may be gone when the writer dies.
        let entry = UnresolvedEntry {
            version: 9,
            chunk: BAD.chunk.index,
            block: 7,
            count: 1,
            reserved: 0,
        };
        let from = NodeId(bench.tell(&[entry]));
        let remembered = unresolved::list(&bench.lanes, BAD.chunk.layer, Generation::MAX, 9);
        assert_eq!(remembered, [entry]);
        let (call, restore) = bench.restore(theirs);
        assert!(bench.is_allowed(&restore));
        bench.answer(call, Ok(()));
        // In place, and this replica stays in sync.
        assert_eq!(bench.outcome(), Outcome::Repaired { from });
        bench.assert_idle();
        assert!(!bench.is_allowed(&restore), "once");
        // What is copied is no write that only this replica may have.
        let newest = unresolved::newest(&bench.lanes, BAD.chunk, BAD.block);
        assert_eq!(newest, Version(0));
    }
}

#[test]
fn write_that_only_this_replica_may_have_is_not_undone() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.on_write(10);
    bench.find(BAD);
    bench.find_unknown();
    bench.inspect_there(stamp());
    bench.assert_put_off();
    // By now the other one has it as well.
    bench.find_unknown();
    bench.inspect_there(newer());
    bench.fetch(&DATA);
    bench.tell(&[]);
    let (call, restore) = bench.restore(newer());
    assert!(bench.is_allowed(&restore));
    bench.answer(call, Ok(()));
    assert_eq!(bench.outcome(), Outcome::Repaired { from: NodeId(2) });
}

#[test]
fn write_that_comes_meanwhile_is_not_undone() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.find(BAD);
    bench.find_unknown();
    bench.inspect_there(stamp());
    bench.fetch(&DATA);
    bench.tell(&[]);
    let (call, restore) = bench.restore(stamp());
    assert!(bench.is_allowed(&restore));
    let elsewhere = Request {
        command: Command::Zero {
            chunk: BAD.chunk,
            offset: (BAD.block + 1) * 4096,
            len: 4096,
            fua: false,
        },
        ..write(10)
    };
    bench.groups.note(&elsewhere);
    assert!(bench.is_allowed(&restore));
    bench.on_write(10);
    assert!(!bench.is_allowed(&restore));
    bench.answer(call, Err(Refusal::Changed));
    bench.assert_put_off();
    // The same if the group changes: a lease recovery may have begun that was not told of what is copied.
    bench.find_unknown();
    bench.inspect_there(newer());
    bench.fetch(&DATA);
    bench.tell(&[]);
    let (call, restore) = bench.restore(newer());
    assert!(bench.is_allowed(&restore));
    bench.groups.place(PG, 0, 1, Epoch(2));
    assert!(!bench.is_allowed(&restore));
    bench.map(2, &[IN, IN]);
    assert!(bench.poll().is_none(), "one after the other");
    bench.answer(call, Err(Refusal::Changed));
    bench.find_unknown();
}

#[test]
fn block_on_which_the_others_do_not_agree_is_left_alone() {
    for theirs in [[stamp(), newer()], [newer(), stamp()], [NOTHING, stamp()]] {
        let mut bench = Bench::new(&[IN, IN, IN]);
        bench.find(BAD);
        bench.find_unknown();
        for stamp in theirs {
            bench.inspect_there(stamp);
        }
        bench.assert_put_off();
    }
}

#[test]
fn all_others_in_sync_are_asked_and_one_that_does_not_know_decides_nothing() {
    let mut bench = Bench::new(&[IN, IN, IN, SYNCING]);
    bench.find(BAD);
    bench.find_unknown();
    bench.inspect_there(stamp());
    let (call, ..) = bench.there();
    bench.answer(call, Err(Refusal::Unreachable));
    bench.assert_put_off();
    bench.find_unknown();
    let first = bench.inspect_there(BlockStamp::UNKNOWN);
    let second = bench.inspect_there(stamp());
    assert_eq!(first + second, 5);
    assert_eq!(bench.fetch(&DATA), second);
    assert_eq!(bench.tell(&[]), second);
    let (call, _) = bench.restore(stamp());
    bench.answer(call, Ok(()));
    let from = NodeId(second);
    assert_eq!(bench.outcome(), Outcome::Repaired { from });
}

#[test]
fn content_comes_from_whoever_can_read_it() {
    let mut bench = Bench::new(&[IN, IN, IN]);
    bench.find(BAD);
    bench.find_unknown();
    bench.inspect_there(stamp());
    bench.inspect_there(stamp());
    let first = bench.fetch(&[0x77; 4096]);
    let second = bench.fetch(&DATA);
    assert_eq!(first + second, 5, "each once");
    assert_eq!(bench.tell(&[]), second);
    bench.restore(stamp());
}

#[test]
fn what_cannot_be_remembered_write_by_write_is_not_taken_over() {
    let mut bench = Bench::new(&[IN, IN]);
    bench.find(BAD);
    bench.find_unknown();
    bench.inspect_there(NOTHING);
    bench.tell(&[UnresolvedEntry::EVERYTHING]);
    bench.assert_put_off();
}

#[test]
fn block_that_no_other_knows_stays_bad_and_the_replica_in_sync() {
    let mut bench = Bench::new(&[IN, IN, IN]);
    bench.find(BAD);
    for tries in 1..=TRIES_REPORTED {
        bench.find_unknown();
        bench.inspect_there(BlockStamp::UNKNOWN);
        bench.inspect_there(BlockStamp::UNKNOWN);
        if tries == TRIES_REPORTED {
            assert_eq!(bench.outcome(), Outcome::Stuck);
        }
        bench.assert_put_off();
    }
}
