//! Changes that other nodes request, with the lease and without it.

use fabric_types::ids::Version;

use super::*;

/// Creates a replica that knows map 4 and holds a group.
fn in_cluster(fences: &Arc<Fences>) -> (Replica, Arc<Unresolved>) {
    let groups = Arc::new(Groups::default());
    groups.set(PgId(0), ReplicaState::InSync, Epoch(1));
    groups.applied(Epoch(4));
    let unresolved: Arc<Unresolved> = Arc::default();
    let peers = Peers {
        groups,
        unresolved: Arc::new([Arc::clone(&unresolved)]),
        lane: 0,
    };
    let replica = Replica::new(Incarnation(5), Arc::clone(fences), 4, peers);
    (replica, unresolved)
}

const HOLDER: NodeId = NodeId(3);
const OTHER: NodeId = NodeId(4);

/// All commands that change data or fences.
fn changes() -> [Command; 4] {
    let chunk = ChunkKey {
        layer: LAYER,
        index: 0,
    };
    let (buffers, len) = (IoVecs::NONE, 0);
    [
        Command::Write {
            chunk,
            offset: 0,
            buffers,
            len,
            fua: false,
            urgent: false,
        },
        Command::Zero {
            chunk,
            offset: 0,
            len: 4096,
            fua: false,
        },
        Command::Restore {
            chunk,
            block: 0,
            stamps: Default::default(),
            buffers,
            len,
        },
        Command::Fence {
            layer: LAYER,
            buffers,
            len,
        },
    ]
}

/// A replica with the given leases, and requests of other nodes to it.
struct Asked {
    fences: Arc<Fences>,
    replica: Replica,
    unresolved: Arc<Unresolved>,
    store: Scripted,
}

impl Asked {
    fn new() -> Self {
        let fences = Arc::new(Fences::default());
        let (replica, unresolved) = in_cluster(&fences);
        Self {
            fences,
            replica,
            unresolved,
            store: Scripted {
                answer: Some(Ok(())),
                asked: Vec::new(),
            },
        }
    }

    fn grant(&self, holder: Option<NodeId>, generation: u64) {
        let generation = Generation(generation);
        let grant = Grant { holder, generation };
        self.fences.set_layers([(LAYER, grant)].into());
    }

    fn ask(&mut self, node: NodeId, generation: u64, command: Command) -> Result<(), Refusal> {
        let request = Request {
            pg: PgId(0),
            command,
            ..write(1, generation, 4)
        };
        let from = (node, PeerId(1));
        let handled = self
            .replica
            .on_remote_request(from, &request, &mut self.store);
        match handled {
            Handled::Replied(reply) => reply.result,
            other => panic!("{other:?}"),
        }
    }

    /// Returns whether nothing was raised, remembered or stored.
    fn is_untouched(&self) -> bool {
        let fence = self.fences.of(LAYER).map(|fence| fence.get());
        let is_open = fence.is_none_or(|fence| fence == (Generation(0), Epoch(0)));
        is_open && self.unresolved.is_empty() && self.store.asked.is_empty()
    }
}

#[test]
fn one_writer_a_node_changes_only_layers_under_its_lease() {
    for command in changes() {
        let mut asked = Asked::new();
        asked.grant(Some(HOLDER), 7);
        // The victim's own generation, its neighbours, and the largest ones.
        for generation in [0, 1, 6, 7] {
            let newer = Generation(7.max(generation + 1));
            let lost = Err(Refusal::StaleGeneration(newer));
            assert_eq!(asked.ask(OTHER, generation, command), lost, "{command:?}");
        }
        for generation in [8, Generation::MAX.0 - 1, Generation::MAX.0] {
            let put_off = Err(Refusal::Behind(Epoch(4)));
            for node in [OTHER, HOLDER] {
                assert_eq!(asked.ask(node, generation, command), put_off, "{command:?}");
            }
        }
        assert!(asked.is_untouched(), "{command:?}");
        assert_eq!(asked.ask(HOLDER, 7, command), Ok(()));
        let fence = asked.fences.of(LAYER).unwrap().get();
        assert!(fence.0 <= Generation(7) && fence.1 <= Epoch(4), "{fence:?}");
    }
}

/// The client repeats the request: a lease that was granted a moment ago is never taken for a lost one.
#[test]
fn one_writer_a_lease_that_is_not_known_yet_is_put_off() {
    let [write, .., fence] = changes();
    let mut asked = Asked::new();
    let put_off = Err(Refusal::Behind(Epoch(4)));
    assert_eq!(asked.ask(HOLDER, 1, fence), put_off, "no layer yet");
    asked.grant(None, 0);
    assert_eq!(asked.ask(HOLDER, 1, fence), put_off, "nor a lease");
    assert!(asked.is_untouched());
    asked.grant(Some(HOLDER), 1);
    assert_eq!(asked.ask(HOLDER, 1, fence), Ok(()));
    assert_eq!(asked.ask(HOLDER, 1, write), Ok(()));
    // After another grant to the same node the older generation is valid until the newer one is used.
    asked.grant(Some(HOLDER), 2);
    assert_eq!(asked.ask(HOLDER, 1, write), Ok(()));
    assert_eq!(asked.ask(HOLDER, 2, fence), Ok(()));
    let stale = |generation| Err(Refusal::StaleGeneration(Generation(generation)));
    assert_eq!(asked.ask(HOLDER, 1, write), stale(2));
    // The lease is released, and then granted to another node.
    asked.grant(None, 2);
    assert_eq!(asked.ask(HOLDER, 2, write), stale(3));
    asked.grant(Some(OTHER), 3);
    assert_eq!(asked.ask(HOLDER, 2, write), stale(3));
    assert_eq!(asked.ask(OTHER, 3, fence), Ok(()));
}

#[test]
fn reads_need_no_lease_and_change_nothing() {
    let (chunk, buffers, len) = (
        ChunkKey {
            layer: LAYER,
            index: 0,
        },
        IoVecs::NONE,
        0,
    );
    let reads = [
        Command::Read {
            chunk,
            offset: 0,
            buffers,
            len,
        },
        Command::Inspect {
            chunk,
            block: 0,
            buffers,
            len,
        },
        Command::Flush { layer: LAYER },
    ];
    let mut asked = Asked::new();
    asked.grant(Some(HOLDER), 7);
    for command in reads {
        for generation in [0, 7, Generation::MAX.0] {
            assert_eq!(asked.ask(OTHER, generation, command), Ok(()));
        }
    }
    let fence = asked.fences.of(LAYER).unwrap().get();
    assert_eq!(fence, (Generation(0), Epoch(0)));
    assert!(asked.unresolved.is_empty());
}

/// Later holders could not overwrite a block with such a version: theirs would be older.
#[test]
fn one_writer_a_restored_version_is_not_newer_than_the_lease() {
    let mut asked = Asked::new();
    asked.grant(Some(HOLDER), 7);
    let mut restore = |generation: u32, sequence| {
        let mut command = changes()[2];
        if let Command::Restore { stamps, .. } = &mut command {
            stamps[1].version = Version::new(generation, sequence).0;
        }
        asked.ask(HOLDER, 7, command)
    };
    assert_eq!(restore(7, Version::SEQUENCE_MAX), Ok(()));
    assert_eq!(restore(1, 1), Ok(()));
    for newer in [8, Version::GENERATION_MAX] {
        assert_eq!(restore(newer, 0), Err(Refusal::Invalid));
    }
}

/// A grant that does not fit into the shared word goes to no node.
#[test]
fn grant_that_does_not_fit_goes_to_no_node() {
    let mut asked = Asked::new();
    let [write, ..] = changes();
    for (holder, generation) in [(1 << 40, 1), (u64::MAX, 1), (3, Generation::MAX.0 + 1)] {
        asked.grant(Some(NodeId(holder)), generation);
        let put_off = Err(Refusal::Behind(Epoch(4)));
        assert_eq!(asked.ask(NodeId(holder), 1, write), put_off);
    }
    let last = NodeId((1 << 40) - 1);
    asked.grant(Some(last), Generation::MAX.0);
    assert_eq!(asked.ask(last, Generation::MAX.0, write), Ok(()));
}
