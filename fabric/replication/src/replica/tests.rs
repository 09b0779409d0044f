use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::membership::ReplicaState;
use fabric_types::{Command, Epoch, Generation, PgId, Sequence};

use super::*;
use crate::fence::Grant;
use crate::groups::leaf_of;

mod leases;

const LAYER: LayerId = LayerId(3);

/// A store that answers as told, or later.
struct Scripted {
    answer: Option<Result<(), StoreFailure>>,
    asked: Vec<(StoreKey, Request)>,
}

impl StorePort for Scripted {
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        self.asked.push((key, *request));
        self.answer
    }
}

fn write(id: u64, generation: u64, epoch: u64) -> Request {
    Request {
        id: RequestId(id),
        pg: PgId(0),
        epoch: Epoch(epoch),
        generation: Generation(generation),
        sequence: Sequence(1),
        watermark: Sequence(1),
        command: Command::Zero {
            chunk: ChunkKey {
                layer: LAYER,
                index: 0,
            },
            offset: 0,
            len: 512,
            fua: false,
        },
    }
}

/// A replica of one group, in sync.
fn replica(slots: u32) -> (Replica, Arc<Fences>) {
    let groups = Arc::new(Groups::default());
    groups.set(PgId(0), ReplicaState::InSync, Epoch(1));
    groups.applied(Epoch(10));
    replica_of(groups, slots)
}

/// A replica of these groups, to which metadata have named [`LAYER`].
fn replica_of(groups: Arc<Groups>, slots: u32) -> (Replica, Arc<Fences>) {
    let fences = Arc::new(Fences::default());
    fences.set_layers([(LAYER, Grant::default())].into());
    let peers = Peers {
        groups,
        unresolved: Arc::new([Arc::default()]),
        lane: 0,
    };
    let replica = Replica::new(Incarnation(5), Arc::clone(&fences), slots, peers);
    (replica, fences)
}

fn reply(id: u64, result: Result<(), Refusal>) -> Reply {
    Reply {
        id: RequestId(id),
        incarnation: Incarnation(5),
        result,
    }
}

#[test]
fn one_writer_stale_generation_or_epoch_never_reaches_the_store() {
    let (mut replica, fences) = replica(4);
    let mut store = Scripted {
        answer: Some(Ok(())),
        asked: Vec::new(),
    };
    let mut ask = |generation, epoch| match replica.on_request(
        PeerId(0),
        &write(1, generation, epoch),
        &mut store,
    ) {
        Handled::Replied(reply) => reply.result,
        other => panic!("{other:?}"),
    };
    assert_eq!(ask(1, 1), Ok(()), "no fence yet");
    fences.raise(LAYER, Generation(4), Epoch(9));
    let stale_generation = Err(Refusal::StaleGeneration(Generation(4)));
    assert_eq!(ask(3, 9), stale_generation);
    assert_eq!(ask(4, 8), Err(Refusal::StaleEpoch(Epoch(9))));
    assert_eq!(ask(3, 8), stale_generation);
    assert_eq!(ask(4, 9), Ok(()));
    assert_eq!(ask(5, 10), Ok(()));
    fences.raise(LAYER, Generation(2), Epoch(3));
    assert_eq!(ask(3, 9), stale_generation, "a fence is never lowered");
    assert_eq!(store.asked.len(), 3);
}

#[test]
fn reads_and_flushes_are_fenced_by_the_epoch_only() {
    let (mut replica, fences) = replica(4);
    fences.raise(LAYER, Generation(4), Epoch(9));
    let mut store = Scripted {
        answer: Some(Ok(())),
        asked: Vec::new(),
    };
    for (generation, epoch, expected) in
        [(3, 9, Ok(())), (3, 8, Err(Refusal::StaleEpoch(Epoch(9))))]
    {
        let flush = Request {
            command: Command::Flush { layer: LAYER },
            ..write(7, generation, epoch)
        };
        let handled = replica.on_request(PeerId(0), &flush, &mut store);
        assert_eq!(handled, Handled::Replied(reply(7, expected)));
    }
}

#[test]
fn a_held_request_is_answered_to_its_peer_once() {
    let (mut replica, _) = replica(2);
    let mut store = Scripted {
        answer: None,
        asked: Vec::new(),
    };
    for id in [10, 11] {
        let handled = replica.on_request(PeerId(id as u32), &write(id, 1, 1), &mut store);
        assert_eq!(handled, Handled::Held);
    }
    let full = replica.on_request(PeerId(3), &write(12, 1, 1), &mut store);
    assert_eq!(full, Handled::Full);
    let [(first_key, first_request), (second_key, second_request)] = store.asked[..] else {
        panic!("two are held");
    };
    let full = StoreFailure::NoSpace { untouched: true };
    let second = replica.on_store(second_key, &second_request, Err(full));
    let full = Refusal::NoSpace { untouched: true };
    assert_eq!(second, Some((PeerId(11), reply(11, Err(full)))));
    assert_eq!(replica.on_store(second_key, &second_request, Ok(())), None);
    let first = replica.on_store(first_key, &first_request, Ok(()));
    assert_eq!(first, Some((PeerId(10), reply(10, Ok(())))));
    assert_eq!(replica.in_flight(), 0);
}

#[test]
fn an_overwritten_write_of_the_same_lease_counts_as_done() {
    let (mut replica, _) = replica(1);
    let mut store = Scripted {
        answer: Some(Err(StoreFailure::Stale)),
        asked: Vec::new(),
    };
    let handled = replica.on_request(PeerId(0), &write(1, 1, 1), &mut store);
    assert_eq!(handled, Handled::Replied(reply(1, Ok(()))));
}

/// A write of so many bytes to a group, under the first map.
fn to_group(pg: PgId, offset: u32, len: u32) -> Request {
    let chunk = ChunkKey {
        layer: LAYER,
        index: 0,
    };
    let zero = Command::Zero {
        chunk,
        offset,
        len,
        fua: false,
    };
    Request {
        pg,
        command: zero,
        ..write(1, 1, 1)
    }
}

#[test]
fn syncing_replica_counts_only_fully_stored_blocks_as_written() {
    let pg = PgId(2);
    let groups = syncing(pg);
    groups.get(pg).unwrap().fenced(LAYER);
    let (mut replica, _) = replica_of(Arc::clone(&groups), 4);
    let mut store = Scripted {
        answer: None,
        asked: Vec::new(),
    };
    let touched = || {
        let group = groups.get(pg).unwrap();
        let touched = group.touched(leaf_of(
            ChunkKey {
                layer: LAYER,
                index: 0,
            },
            0,
        ));
        (touched.noted[0], touched.stored[0])
    };
    assert_eq!(
        replica.on_request(PeerId(1), &to_group(pg, 0, 8192), &mut store),
        Handled::Held
    );
    assert_eq!(touched(), (0b11, 0));
    let (key, request) = store.asked[0];
    replica.on_store(key, &request, Err(StoreFailure::Mismatch));
    assert_eq!(touched(), (0b11, 0), "it may still hold what it held");
    replica.on_request(PeerId(1), &to_group(pg, 0, 8192), &mut store);
    let (key, request) = store.asked[1];
    replica.on_store(key, &request, Ok(()));
    assert_eq!(touched(), (0b11, 0b11));
    // At once, and under a map that is none any more when the store answers.
    store.answer = Some(Ok(()));
    replica.on_request(PeerId(1), &to_group(pg, 8192, 4096), &mut store);
    assert_eq!(touched(), (0b111, 0b111));
    store.answer = None;
    replica.on_request(PeerId(1), &to_group(pg, 16384, 4096), &mut store);
    let (last, request) = *store.asked.last().unwrap();
    groups.set(pg, ReplicaState::Syncing, Epoch(4));
    groups.applied(Epoch(4));
    replica.on_store(last, &request, Ok(()));
    assert_eq!(touched(), (0, 0), "a new receiving period");
}

#[test]
fn syncing_replica_takes_partial_writes_only_once_compared() {
    let pg = PgId(2);
    let groups = syncing(pg);
    groups.get(pg).unwrap().fenced(LAYER);
    let (mut replica, _) = replica_of(Arc::clone(&groups), 4);
    let mut store = Scripted {
        answer: Some(Ok(())),
        asked: Vec::new(),
    };
    let part = to_group(pg, 512, 512);
    let put_off = reply(1, Err(Refusal::Behind(Epoch(1))));
    assert_eq!(
        replica.on_request(PeerId(1), &part, &mut store),
        Handled::Replied(put_off)
    );
    assert!(store.asked.is_empty());
    let group = groups.get(pg).unwrap();
    let wanted = group.take_wanted().expect("the round is asked for it");
    assert_eq!(group.take_wanted(), None);
    group.compared(wanted);
    let done = Handled::Replied(reply(1, Ok(())));
    assert_eq!(replica.on_request(PeerId(1), &part, &mut store), done);
}

fn syncing(pg: PgId) -> Arc<Groups> {
    let groups = Arc::new(Groups::default());
    groups.set(pg, ReplicaState::Syncing, Epoch(1));
    groups.applied(Epoch(1));
    groups
}

/// While it was away the lease may have been given to another, and nobody told it: the older holder's writes,
/// which the source refuses, would stay here.
#[test]
fn syncing_replica_takes_writes_only_once_it_knows_the_fence() {
    let pg = PgId(2);
    let groups = syncing(pg);
    let (mut replica, fences) = replica_of(Arc::clone(&groups), 4);
    let mut store = Scripted {
        answer: Some(Ok(())),
        asked: Vec::new(),
    };
    let whole = to_group(pg, 0, 4096);
    let mut answer = || match replica.on_request(PeerId(1), &whole, &mut store) {
        Handled::Replied(reply) => reply.result,
        other => panic!("{other:?}"),
    };
    assert_eq!(answer(), Err(Refusal::Behind(Epoch(1))));
    assert_eq!(answer(), Err(Refusal::Behind(Epoch(1))));
    let group = groups.get(pg).unwrap();
    assert_eq!(
        group.take_to_fence(),
        Some(LAYER),
        "the round is asked for it"
    );
    assert_eq!(group.take_to_fence(), None, "once");
    // The source knows a newer lease.
    let newer = Generation(whole.generation.0 + 1);
    fences.raise(LAYER, newer, Epoch(1));
    group.fenced(LAYER);
    assert_eq!(answer(), Err(Refusal::StaleGeneration(newer)));
    assert_eq!(
        group
            .touched(leaf_of(
                ChunkKey {
                    layer: LAYER,
                    index: 0
                },
                0
            ))
            .noted[0],
        0
    );
}

/// Else a takeover under an older map could be over without the replica that has joined, which would go on
/// taking the older lease's writes.
#[test]
fn takeover_under_a_map_older_than_a_join_is_refused() {
    let groups = Groups::default();
    let pg = PgId(2);
    groups.set(pg, ReplicaState::InSync, Epoch(1));
    groups.applied(Epoch(9));
    let fence = |epoch| Request {
        epoch: Epoch(epoch),
        command: Command::Fence {
            layer: LAYER,
            buffers: IoVecs::NONE,
            len: 0,
        },
        ..Request::NOTHING
    };
    assert_eq!(groups.admit(&fence(3)), Ok(()));
    groups.join(pg, Epoch(5));
    assert_eq!(groups.admit(&fence(4)), Err(Refusal::StaleEpoch(Epoch(5))));
    assert_eq!(groups.admit(&fence(5)), Ok(()));
    let other_pool = Request {
        command: Command::Fence {
            layer: LayerId(1 << 54),
            buffers: IoVecs::NONE,
            len: 0,
        },
        ..fence(4)
    };
    assert_eq!(groups.admit(&other_pool), Ok(()));
}

/// Whoever asks tries again, as under a map that this node has yet to hear of: the layer may have been
/// created a moment ago.
#[test]
fn changes_of_a_layer_that_metadata_do_not_know_are_put_off() {
    let fences = Arc::new(Fences::default());
    let pg = PgId(2);
    let groups = Arc::new(Groups::default());
    groups.set(pg, ReplicaState::InSync, Epoch(1));
    groups.applied(Epoch(4));
    let unresolved: Arc<Unresolved> = Arc::default();
    let peers = Peers {
        groups,
        unresolved: Arc::new([Arc::clone(&unresolved)]),
        lane: 0,
    };
    let mut replica = Replica::new(Incarnation(5), Arc::clone(&fences), 4, peers);
    let mut store = Scripted {
        answer: Some(Ok(())),
        asked: Vec::new(),
    };
    let mut ask = |layer: u64, command: fn(LayerId) -> Command| {
        let request = Request {
            pg,
            command: command(LayerId(layer)),
            ..write(1, 1, 1)
        };
        match replica.on_request(PeerId(1), &request, &mut store) {
            Handled::Replied(reply) => reply.result,
            other => panic!("{other:?}"),
        }
    };
    let zero = |layer| Command::Zero {
        chunk: ChunkKey { layer, index: 0 },
        offset: 0,
        len: 4096,
        fua: false,
    };
    let fence = |layer| Command::Fence {
        layer,
        buffers: IoVecs::NONE,
        len: 0,
    };
    let put_off = Err(Refusal::Behind(Epoch(4)));
    for invented in 0..10_000 {
        assert_eq!(ask(invented, fence), put_off);
        assert_eq!(ask(invented, zero), put_off);
    }
    // What reads only leaves no trace either, and comparisons of layers that are being deleted go on.
    assert_eq!(ask(7, |layer| Command::Flush { layer }), Ok(()));
    assert!(fences.is_empty() && unresolved.is_empty());
    fences.set_layers([(LayerId(7), Grant::default())].into());
    assert_eq!(ask(7, fence), Ok(()));
    assert_eq!(ask(7, zero), Ok(()));
    assert_eq!(ask(8, zero), put_off);
    // Deleted: nobody has a lease of it.
    fences.set_layers([].into());
    assert_eq!(ask(7, zero), put_off);
    assert!(fences.is_empty());
}
