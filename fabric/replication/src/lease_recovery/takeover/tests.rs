use fabric_types::Command;
use fabric_types::block::{BlockStamp, Holds};
use fabric_types::membership::{Member, ReplicaState};
use fabric_types::message::UnresolvedEntry;
use zerocopy::IntoBytes;

use super::super::{AGAIN_TICKS, NO_SPACE_TICKS};
use super::*;

const LAYER: LayerId = LayerId(5);

fn member(node: u64, incarnation: u64, state: ReplicaState, since: u64) -> Member {
    Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        state,
        since: Epoch(since),
    }
}

fn set(pg: u64, epoch: u64, members: &[Member]) -> ReplicaSet {
    ReplicaSet::new(PgId(pg), Epoch(epoch), 1, members.to_vec())
}

fn in_sync(epoch: u64, nodes: &[u64]) -> ReplicaSet {
    let members: Vec<Member> = nodes
        .iter()
        .map(|&node| member(node, node * 10, ReplicaState::InSync, 1))
        .collect();
    set(0, epoch, &members)
}

fn takeover() -> Takeover {
    Takeover::new(LAYER, Generation(3), Epoch(4))
}

/// What it asks now.
fn asked(takeover: &mut Takeover) -> Vec<(Call, (u64, u64), Request)> {
    let next = || match takeover.poll()? {
        Action::Ask { call, to, request } => Some((call, (to.0.0, to.1.0), request)),
        other => panic!("{other:?}"),
    };
    std::iter::from_fn(next).collect()
}

fn to(asked: &[(Call, (u64, u64), Request)]) -> Vec<(u64, u64)> {
    asked.iter().map(|(_, to, _)| *to).collect()
}

#[test]
fn nobody_is_asked_under_a_map_older_than_the_grant() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(3), &[in_sync(3, &[1, 2])], 1 << 20);
    assert!(takeover.poll().is_none());
    takeover.on_map(Epoch(4), &[in_sync(3, &[1, 2])], 1 << 20);
    let asked = asked(&mut takeover);
    assert_eq!(to(&asked), [(1, 10), (2, 20)]);
    for (_, _, request) in &asked {
        assert!(matches!(request.command, Command::Fence { .. }));
        // Though the group's last change is older.
        assert_eq!(
            (request.epoch, request.generation),
            (Epoch(4), Generation(3))
        );
    }
}

#[test]
fn a_map_that_is_known_changes_nothing_and_asks_for_no_tick() {
    let mut takeover = takeover();
    for _ in 0..3 {
        takeover.on_map(Epoch(5), &[in_sync(5, &[1])], 1 << 20);
        assert!(asked(&mut takeover).len() <= 1);
        assert!(!takeover.needs_tick());
    }
    takeover.on_tick();
    assert!(takeover.poll().is_none());
}

#[test]
fn a_newer_map_begins_everything_anew_and_the_volume_goes_by_it() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(5), &[in_sync(5, &[1, 2])], 1 << 20);
    let first = asked(&mut takeover);
    takeover.on_reply(first[0].0, Ok(()));
    takeover.on_map(Epoch(6), &[in_sync(6, &[1])], 1 << 20);
    takeover.on_tick();
    assert!(takeover.poll().is_none(), "an answer is due");
    takeover.on_reply(first[1].0, Err(Refusal::Unreachable));
    assert!(takeover.needs_tick());
    takeover.on_tick();
    let second = asked(&mut takeover);
    assert_eq!(to(&second), [(1, 10)]);
    assert_eq!(second[0].2.epoch, Epoch(6));
    takeover.on_reply(second[0].0, Ok(()));
    assert!(matches!(takeover.poll(), Some(Action::Done(Epoch(6)))));
    assert!(takeover.is_over());
}

/// The last in-sync replica stays in the map whoever reports it: no newer map says when it is to be asked
/// again.
#[test]
fn a_replica_that_stays_in_the_map_is_asked_again_after_a_while() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(5), &[in_sync(5, &[1])], 1 << 20);
    let first = asked(&mut takeover);
    takeover.on_reply(first[0].0, Err(Refusal::Unreachable));
    assert!(matches!(takeover.poll(), Some(Action::ReportFailed { .. })));
    for _ in 0..AGAIN_TICKS {
        assert!(takeover.needs_tick());
        takeover.on_tick();
        assert!(takeover.poll().is_none(), "not yet");
    }
    takeover.on_tick();
    let again = asked(&mut takeover);
    assert_eq!(to(&again), [(1, 10)]);
    takeover.on_reply(again[0].0, Ok(()));
    assert!(matches!(takeover.poll(), Some(Action::Done(_))));
}

/// A node that has started anew is out of one group and has come back to another one.
#[test]
fn a_fence_is_for_the_newest_start_of_a_node_that_takes_writes() {
    let sets = [
        set(
            0,
            5,
            &[
                member(1, 10, ReplicaState::InSync, 1),
                member(2, 20, ReplicaState::Out, 4),
            ],
        ),
        set(
            1,
            6,
            &[
                member(1, 10, ReplicaState::InSync, 1),
                member(2, 21, ReplicaState::Syncing, 6),
            ],
        ),
    ];
    let mut takeover = takeover();
    takeover.on_map(Epoch(6), &sets, 1 << 20);
    assert_eq!(to(&asked(&mut takeover)), [(1, 10), (2, 21)]);
}

/// The replica that told of an unresolved write leaves before all have answered. Another one may have been
/// compared with it meanwhile: it has the write, and never noted it.
#[test]
fn what_a_replica_told_before_it_left_is_recovered() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(5), &[in_sync(5, &[1, 2, 3])], 1 << 20);
    let first = asked(&mut takeover);
    let Command::Fence { buffers, .. } = first[2].2.command else {
        panic!("{first:?}")
    };
    let unresolved = UnresolvedEntry {
        version: 7,
        chunk: 0,
        block: 9,
        count: 2,
        reserved: 0,
    };
    // SAFETY: the machine keeps the list and its memory until it is answered.
    let list = unsafe { buffers.first_mut() };
    list[..size_of::<UnresolvedEntry>()].copy_from_slice(unresolved.as_bytes());
    takeover.on_reply(first[2].0, Ok(()));
    takeover.on_map(Epoch(6), &[in_sync(6, &[1, 2])], 1 << 20);
    takeover.on_reply(first[0].0, Ok(()));
    takeover.on_reply(first[1].0, Ok(()));
    takeover.on_tick();
    for (call, ..) in asked(&mut takeover) {
        takeover.on_reply(call, Ok(()));
    }
    let inspected = asked(&mut takeover);
    assert_eq!(to(&inspected), [(1, 10), (2, 20)]);
    for (_, _, request) in &inspected {
        assert!(matches!(request.command, Command::Inspect { block: 9, .. }));
    }
}

/// Answers all but the restoration of the second one's block, which the first has. Returns that one.
fn until_restored(takeover: &mut Takeover) -> Call {
    let fences = asked(takeover);
    let Command::Fence { buffers, .. } = fences[0].2.command else {
        panic!("{fences:?}")
    };
    let unresolved = UnresolvedEntry {
        version: 7,
        chunk: 0,
        block: 9,
        count: 1,
        reserved: 0,
    };
    // SAFETY: the machine keeps the list and its memory until it is answered.
    let list = unsafe { buffers.first_mut() };
    list[..size_of::<UnresolvedEntry>()].copy_from_slice(unresolved.as_bytes());
    for (call, ..) in fences {
        takeover.on_reply(call, Ok(()));
    }
    for (call, (node, _), request) in asked(takeover) {
        let Command::Inspect { buffers, .. } = request.command else {
            panic!("{request:?}")
        };
        let stamp = BlockStamp {
            version: if node == 1 { 7 } else { 0 },
            crc: 0,
            holds: if node == 1 {
                Holds::Zeroes
            } else {
                Holds::Nothing
            } as u32,
        };
        // SAFETY: as above.
        let stamps = unsafe { buffers.first_mut() };
        stamps[..size_of::<BlockStamp>()].copy_from_slice(stamp.as_bytes());
        takeover.on_reply(call, Ok(()));
    }
    let restored = asked(takeover);
    assert_eq!(to(&restored), [(2, 20)]);
    assert!(matches!(restored[0].2.command, Command::Restore { .. }));
    restored[0].0
}

#[test]
fn a_full_replica_in_sync_is_asked_again_and_not_reported() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(5), &[in_sync(5, &[1, 2])], 1 << 20);
    for _ in 0..3 {
        let restored = until_restored(&mut takeover);
        takeover.on_reply(restored, Err(Refusal::NoSpace { untouched: true }));
        for _ in 0..NO_SPACE_TICKS {
            assert!(takeover.needs_tick());
            takeover.on_tick();
            assert!(takeover.poll().is_none(), "nobody is reported, nor asked");
        }
        takeover.on_tick();
    }
    let restored = until_restored(&mut takeover);
    takeover.on_reply(restored, Ok(()));
    assert!(matches!(takeover.poll(), Some(Action::Done(_))));
}

#[test]
fn a_full_replica_that_is_being_compared_is_reported() {
    let mut takeover = takeover();
    let members = [
        member(1, 10, ReplicaState::InSync, 1),
        member(2, 20, ReplicaState::Syncing, 1),
    ];
    takeover.on_map(Epoch(5), &[set(0, 5, &members)], 1 << 20);
    let restored = until_restored(&mut takeover);
    takeover.on_reply(restored, Err(Refusal::NoSpace { untouched: true }));
    let reported = takeover.poll();
    assert!(matches!(
        reported,
        Some(Action::ReportFailed {
            node: NodeId(2),
            ..
        })
    ));
}

#[test]
fn a_newer_lease_ends_it() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(5), &[in_sync(5, &[1])], 1 << 20);
    let first = asked(&mut takeover);
    takeover.on_reply(first[0].0, Err(Refusal::StaleGeneration(Generation(4))));
    assert!(matches!(takeover.poll(), Some(Action::Fenced)));
    assert!(takeover.is_over() && takeover.calls_due() == 0);
}

/// Replicas refuse requests for that chunk, and a takeover that sent them would have no end.
#[test]
fn the_number_that_is_no_chunk_is_not_recovered() {
    let mut takeover = takeover();
    takeover.on_map(Epoch(5), &[in_sync(5, &[1])], 1 << 20);
    let first = asked(&mut takeover);
    let Command::Fence { buffers, .. } = first[0].2.command else {
        panic!("{first:?}")
    };
    let told = UnresolvedEntry {
        version: 7,
        chunk: u32::MAX,
        block: 9,
        count: 2,
        reserved: 0,
    };
    // SAFETY: the machine keeps the list and its memory until it is answered.
    let list = unsafe { buffers.first_mut() };
    list[..size_of::<UnresolvedEntry>()].copy_from_slice(told.as_bytes());
    takeover.on_reply(first[0].0, Ok(()));
    assert!(matches!(takeover.poll(), Some(Action::Done(Epoch(5)))));
}
