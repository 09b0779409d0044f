use fabric_types::block::BlockStamp;
use fabric_types::iov::IoVecs;
use fabric_types::{Generation, Sequence};

use super::*;

const PG: PgId = PgId(7);
const CHUNK: ChunkKey = ChunkKey {
    layer: LayerId(2),
    index: 3,
};
const BLOCK: u32 = BLOCK_BYTES as u32;
const NO_BUFFERS: IoVecs = IoVecs {
    ptr: std::ptr::null(),
    len: 0,
};

fn request(epoch: u64, command: Command) -> Request {
    Request {
        pg: PG,
        epoch: Epoch(epoch),
        generation: Generation(1),
        sequence: Sequence(5),
        command,
        ..Request::NOTHING
    }
}

fn write(offset: u32, len: u32) -> Command {
    Command::Write {
        chunk: CHUNK,
        offset,
        buffers: NO_BUFFERS,
        len,
        fua: false,
        urgent: false,
    }
}

fn inspect() -> Command {
    Command::Inspect {
        chunk: CHUNK,
        block: 0,
        buffers: NO_BUFFERS,
        len: 16,
    }
}

fn read() -> Command {
    Command::Read {
        chunk: CHUNK,
        offset: 0,
        buffers: NO_BUFFERS,
        len: 4096,
    }
}

fn list() -> Command {
    Command::ListChunks {
        cursor: 0,
        buffers: NO_BUFFERS,
        len: 24,
    }
}

fn restore(block: u32) -> Command {
    Command::Restore {
        chunk: CHUNK,
        block,
        stamps: [BlockStamp::default(); 2],
        buffers: NO_BUFFERS,
        len: 0,
    }
}

fn page(leaf: u32) -> LeafKey {
    leaf_of(CHUNK, leaf * LEAF_BLOCKS)
}

/// A node that is a member with this state since map 4, and knows map 6.
fn groups(state: ReplicaState) -> Groups {
    let groups = Groups::default();
    groups.set(PG, state, Epoch(4));
    groups.applied(Epoch(6));
    // It is known who may write: what is tested is something else.
    groups.get(PG).unwrap().fenced(CHUNK.layer);
    groups
}

#[test]
fn only_requests_of_maps_that_the_node_knows_are_taken() {
    let groups = groups(ReplicaState::InSync);
    let admit = |epoch| groups.admit(&request(epoch, write(0, BLOCK)));
    assert_eq!(admit(6), Ok(()));
    assert_eq!(admit(7), Err(Refusal::Behind(Epoch(6))));
    groups.applied(Epoch(7));
    assert_eq!(admit(7), Ok(()));
    groups.applied(Epoch(5));
    assert_eq!(groups.known(), Epoch(7), "a map that came late");
    groups.forget(PG);
    assert_eq!(admit(7), Err(Refusal::StaleEpoch(Epoch(7))));
}

#[test]
fn lease_fence_is_admitted_under_any_group_but_not_beyond_the_newest_map() {
    let fence = Command::Fence {
        layer: CHUNK.layer,
        buffers: NO_BUFFERS,
        len: 24,
    };
    let groups = Groups::default();
    groups.applied(Epoch(9));
    assert_eq!(groups.admit(&request(9, fence)), Ok(()), "no member of it");
    for epoch in [10, 1 << 40, u64::MAX] {
        // A fence of epoch 9 would refuse requests under all earlier maps.
        let put_off = Err(Refusal::Behind(Epoch(9)));
        assert_eq!(groups.admit(&request(epoch, fence)), put_off);
    }
}

#[test]
fn no_trust_on_return_a_replica_is_read_only_when_it_is_in_sync() {
    let taken = |state: ReplicaState| {
        let groups = groups(state);
        let all = [
            read(),
            list(),
            Command::Join,
            write(0, BLOCK),
            inspect(),
            restore(0),
        ];
        all.map(|command| groups.admit(&request(6, command)).is_ok())
    };
    assert_eq!(taken(ReplicaState::InSync), [true; 6]);
    let of_syncing = [false, false, false, true, true, true];
    assert_eq!(taken(ReplicaState::Syncing), of_syncing);
    assert_eq!(taken(ReplicaState::Out), [false; 6]);
}

#[test]
fn a_join_refuses_older_maps_and_never_newer_ones() {
    let groups = groups(ReplicaState::InSync);
    let admit = |epoch| groups.admit(&request(epoch, write(0, BLOCK)));
    assert_eq!(admit(3), Ok(()), "nobody has joined yet");
    groups.join(PG, Epoch(5));
    assert_eq!(admit(4), Err(Refusal::StaleEpoch(Epoch(5))));
    assert_eq!(admit(5), Ok(()));
    groups.join(PG, Epoch(4));
    assert_eq!(admit(4), Err(Refusal::StaleEpoch(Epoch(5))));
    groups.join(PgId(8), Epoch(6));
    assert_eq!(admit(5), Ok(()), "another group");
}

/// A write may be noted before the promotion and done after it.
#[test]
fn nothing_is_kept_for_a_comparison_after_it() {
    let groups = groups(ReplicaState::Syncing);
    let group = groups.get(PG).unwrap();
    let first = request(5, write(0, 2 * BLOCK));
    let since = groups.note(&first).unwrap();
    assert!(group.kept() > 0);
    groups.set(PG, ReplicaState::InSync, since);
    groups.stored(PG, &first.command, since);
    assert_eq!(group.kept(), 0);
}

#[test]
fn what_was_sent_before_a_period_does_not_count_in_it() {
    let groups = groups(ReplicaState::Syncing);
    let group = groups.get(PG).unwrap();
    let first = request(4, write(0, 2 * BLOCK));
    assert_eq!(groups.note(&first), Some(Epoch(4)));
    groups.stored(PG, &first.command, Epoch(4));
    let touched = group.touched(page(0));
    assert!(touched.is_noted(1) && touched.is_stored(1) && !touched.is_noted(2));
    group.compared(page(0));
    groups.set(PG, ReplicaState::Syncing, Epoch(4));
    assert_eq!(group.touched(page(0)), touched, "the same receiving period");
    groups.set(PG, ReplicaState::Syncing, Epoch(3));
    assert_eq!(group.touched(page(0)), touched, "a map that came late");
    groups.set(PG, ReplicaState::Syncing, Epoch(6));
    assert_eq!(group.touched(page(0)), Touched::NOTHING);
    // It was admitted before, and is refused when its turn comes.
    assert_eq!(groups.note(&first), None);
    groups.stored(PG, &first.command, Epoch(4));
    assert_eq!(group.touched(page(0)), Touched::NOTHING);
    let refused = groups.admit(&first);
    assert_eq!(refused, Err(Refusal::StaleEpoch(Epoch(6))));
    let part = request(6, write(512, 512));
    let waits = groups.admit(&part);
    assert_eq!(waits, Err(Refusal::Behind(Epoch(6))), "not compared yet");
}

#[test]
fn nothing_is_noted_of_a_replica_that_is_not_being_compared() {
    for state in [ReplicaState::InSync, ReplicaState::Out] {
        let groups = groups(state);
        assert_eq!(groups.note(&request(6, write(0, BLOCK))), None);
    }
    let groups = groups(ReplicaState::Syncing);
    assert!(groups.note(&request(6, restore(300))).is_some());
    let group = groups.get(PG).unwrap();
    assert!(group.touched(page(1)).is_noted(300 - LEAF_BLOCKS as usize));
    assert_eq!(groups.note(&request(6, inspect())), None);
    // Promoted: what was noted is let go.
    groups.set(PG, ReplicaState::InSync, Epoch(4));
    assert_eq!(group.touched(page(1)), Touched::NOTHING);
}

#[test]
fn a_part_of_a_block_counts_as_touched_and_not_as_stored() {
    let groups = groups(ReplicaState::Syncing);
    let group = groups.get(PG).unwrap();
    group.all_compared();
    // The end of block 0, block 1, the beginning of block 2.
    let parts = request(6, write(512, 2 * BLOCK));
    let since = groups.note(&parts).unwrap();
    groups.stored(PG, &parts.command, since);
    let touched = group.touched(page(0));
    let bits = (0..4).map(|i| (touched.is_noted(i), touched.is_stored(i)));
    let expected = [(true, false), (true, true), (true, false), (false, false)];
    assert!(bits.eq(expected));
    // Less than a block covers none.
    let part = request(6, write(5 * BLOCK + 512, 512));
    groups.note(&part);
    groups.stored(PG, &part.command, since);
    let touched = group.touched(page(0));
    assert!(touched.is_noted(5) && !touched.is_stored(5) && !touched.is_stored(4));
}

#[test]
fn parts_of_blocks_wait_for_their_pages_and_whole_blocks_do_not() {
    let groups = groups(ReplicaState::Syncing);
    let group = groups.get(PG).unwrap();
    let admit = |command| groups.admit(&request(6, command));
    let put_off = Err(Refusal::Behind(Epoch(6)));
    assert_eq!(admit(write(BLOCK, 600 * BLOCK)), Ok(()));
    assert_eq!(admit(restore(0)), Ok(()));
    assert_eq!(group.take_wanted(), None);
    // From the middle of a block of the first page into the middle of one of the third.
    let long = write(512, 600 * BLOCK);
    assert_eq!(admit(long), put_off);
    assert_eq!(admit(long), put_off);
    assert_eq!(group.take_wanted(), Some(page(0)));
    assert_eq!(group.take_wanted(), Some(page(2)));
    assert_eq!(group.take_wanted(), None, "asked for once");
    group.compared(page(0));
    assert_eq!(admit(long), put_off);
    assert_eq!(group.take_wanted(), Some(page(2)));
    group.compared(page(2));
    assert_eq!(admit(long), Ok(()));
    let zeroes = |offset, len| Command::Zero {
        chunk: CHUNK,
        offset,
        len,
        fua: false,
    };
    assert_eq!(admit(zeroes(300 * BLOCK, 512)), put_off);
    group.all_compared();
    assert_eq!(admit(zeroes(300 * BLOCK, 512)), Ok(()));
    assert_eq!(group.take_wanted(), None);
}

#[test]
fn bounded_pages_wanted_beyond_the_limit_are_asked_for_again() {
    let groups = groups(ReplicaState::Syncing);
    let group = groups.get(PG).unwrap();
    let ask = |index: u32| {
        let chunk = ChunkKey {
            layer: CHUNK.layer,
            index,
        };
        let part = Command::Zero {
            chunk,
            offset: 512,
            len: 512,
            fua: false,
        };
        groups.admit(&request(6, part))
    };
    let all = WANTED_MAX as u32 + 5;
    assert!((0..all).all(|index| ask(index) == Err(Refusal::Behind(Epoch(6)))));
    let wanted = std::iter::from_fn(|| group.take_wanted()).count();
    assert_eq!(wanted, WANTED_MAX);
    assert!(ask(all - 1).is_err());
    assert_eq!(group.take_wanted().map(|leaf| leaf.chunk), Some(all - 1));
}

#[test]
fn incoming_replica_is_separate_until_it_replaces_the_old_one() {
    let (old, new) = (0, 1);
    let groups = groups(ReplicaState::InSync);
    groups.place(PG, old, 8, Epoch(4));
    let coming = PG.incoming();
    groups.place(coming, new, 8, Epoch(6));
    groups.set(coming, ReplicaState::Syncing, Epoch(6));
    groups.get(coming).unwrap().fenced(CHUNK.layer);
    let to = |pg, epoch, command| {
        let request = request(epoch, command);
        groups.admit(&Request { pg, ..request })
    };
    assert_eq!(to(PG, 6, read()), Ok(()));
    assert!(to(coming, 6, read()).is_err(), "it has not been compared");
    assert_eq!(to(coming, 6, write(0, BLOCK)), Ok(()));
    let noted = Request {
        pg: coming,
        ..request(6, write(0, BLOCK))
    };
    assert!(groups.note(&noted).is_some());
    // A returning replica of another node counts on the old one, and so on whatever takes its place.
    groups.join(PG, Epoch(7));
    // The old device is gone before the new one has everything: its receiving period goes on.
    groups.place(PG, new, 8, Epoch(8));
    groups.set(PG, ReplicaState::Syncing, Epoch(6));
    groups.keep(&[PG]);
    groups.applied(Epoch(8));
    let group = groups.get(PG).unwrap();
    assert_eq!(group.device(), new);
    assert!(group.touched(page(0)).is_noted(0));
    assert!(groups.get(coming).is_none());
    assert_eq!(
        to(PG, 7, inspect()),
        Err(Refusal::StaleEpoch(Epoch(8))),
        "it was meant for the old one, which had everything"
    );
    assert_eq!(to(PG, 8, inspect()), Ok(()));
    groups.set(PG, ReplicaState::InSync, Epoch(6));
    assert_eq!(to(PG, 8, read()), Ok(()));
    assert_eq!(
        to(coming, 8, write(0, BLOCK)),
        Err(Refusal::StaleEpoch(Epoch(8)))
    );
}

#[test]
fn replica_moved_to_an_unannounced_device_starts_empty() {
    let groups = groups(ReplicaState::Syncing);
    assert!(groups.note(&request(6, write(0, BLOCK))).is_some());
    groups.place(PG, 1, 8, Epoch(7));
    groups.set(PG, ReplicaState::Out, Epoch(7));
    groups.set(PG, ReplicaState::Syncing, Epoch(8));
    let group = groups.get(PG).unwrap();
    assert_eq!(group.touched(page(0)), Touched::NOTHING);
    assert!(groups.admit(&request(6, write(0, BLOCK))).is_err());
}
