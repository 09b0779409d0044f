//! A new lease makes three stores agree on what the old one left behind.

use std::sync::Arc;

use fabric_replication::fence::{Fences, Grant};
use fabric_replication::groups::Groups;
use fabric_replication::lease_recovery::{Action, Call, LeaseRecovery, PlaceOf};
use fabric_replication::replica::store_op::{failure, still_untouched};
use fabric_replication::replica::{Handled, Peers, Replica, StoreFailure, StoreKey, StorePort};
use fabric_replication::unresolved::Unresolved;
use fabric_store::api::StoreError;
use fabric_types::block::{BLOCK_BYTES, BlockStamp};
use fabric_types::ids::{ChunkKey, PeerId, Version};
use fabric_types::iov::IoVecs;
use fabric_types::membership::{Member, ReplicaSet, ReplicaState};
use fabric_types::message::UnresolvedEntry;
use fabric_types::{
    Command, Epoch, Generation, Incarnation, NodeId, PgId, Refusal, Request, RequestId, Sequence,
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use zerocopy::IntoBytes;

use crate::execute::execute;
use crate::seeds::{self, for_each_seed};
use crate::shard::{Block, CHUNK, LAYER, Shard, iovec};

const PG: PgId = PgId(0);

struct OnePlace;

impl PlaceOf for OnePlace {
    fn set_of(&self, _: ChunkKey) -> usize {
        0
    }
}

/// A store that answers in place, but for fences: those it keeps.
struct Port<'a>(&'a mut Shard, Option<StoreKey>);

impl StorePort for Port<'_> {
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        let version = Version::of(request.generation, request.sequence);
        if let Command::Fence { .. } = request.command {
            self.1 = Some(key);
            return None;
        }
        let done = execute(self.0, &request.command, version);
        Some(done.map_err(|error| failure(error, request)))
    }
}

struct Node {
    replica: Replica,
    shard: Shard,
    groups: Arc<Groups>,
    /// It has forgotten which writes are unresolved: all may be.
    forgetful: bool,
}

impl Node {
    fn new(seed: u64, state: ReplicaState) -> Self {
        let groups = Arc::new(Groups::default());
        groups.set(PG, state, Epoch(1));
        groups.get(PG).unwrap().fenced(LAYER);
        groups.applied(Epoch(1));
        let peers = Peers {
            groups: Arc::clone(&groups),
            unresolved: Arc::new([Arc::new(Unresolved::default())]),
            lane: 0,
        };
        let fences = Arc::new(Fences::default());
        fences.set_layers([(LAYER, Grant::default())].into());
        Self {
            replica: Replica::new(Incarnation(1), fences, 16, peers),
            shard: Shard::new(seed),
            groups,
            forgetful: false,
        }
    }

    fn request(&mut self, request: &Request) -> Result<(), Refusal> {
        let mut port = Port(&mut self.shard, None);
        match self.replica.on_request(PeerId(1), request, &mut port) {
            Handled::Replied(reply) => reply.result,
            Handled::Held => {
                let key = port.1.expect("only fences are held");
                let (_, reply) = self
                    .replica
                    .on_store(key, request, Ok(()))
                    .expect("it is held");
                if let Command::Fence { buffers, .. } = request.command
                    && self.forgetful
                {
                    // SAFETY: the machine keeps the list and its memory until the answer.
                    let list = unsafe { buffers.first_mut() };
                    let everything = UnresolvedEntry::EVERYTHING;
                    list[..size_of::<UnresolvedEntry>()].copy_from_slice(everything.as_bytes());
                }
                reply.result
            }
            Handled::Full => panic!("one request at a time"),
        }
    }
}

fn content(version: u64) -> Block {
    let mut block = [0x11; BLOCK_BYTES];
    block[..8].copy_from_slice(&version.to_le_bytes());
    block
}

fn write(block: u32, sequence: u64, watermark: u64, iov: &libc::iovec) -> Request {
    Request {
        id: RequestId(1),
        pg: PG,
        epoch: Epoch(1),
        generation: Generation(1),
        sequence: Sequence(sequence),
        watermark: Sequence(watermark),
        command: Command::Write {
            chunk: ChunkKey {
                layer: LAYER,
                index: CHUNK,
            },
            offset: block * BLOCK_BYTES as u32,
            buffers: IoVecs { ptr: iov, len: 1 },
            len: BLOCK_BYTES as u32,
            fua: false,
            urgent: false,
        },
    }
}

fn set(epoch: u64, states: &[ReplicaState]) -> ReplicaSet {
    let members = states.iter().zip(1..).map(|(&state, node)| Member {
        node: NodeId(node),
        incarnation: Incarnation(1),
        state,
        since: Epoch(1),
    });
    ReplicaSet::new(PG, Epoch(epoch), 1, members.collect())
}

/// Runs the machine against the nodes; `dead` do not answer and leave the map when reported.
fn recover(
    nodes: &mut [Node],
    states: &[ReplicaState],
    dead: &[usize],
    rng: &mut ChaCha8Rng,
) -> LeaseRecovery {
    recover_while(nodes, states, |node| !dead.contains(&node), rng)
}

/// The same; `answers` is asked for each request to a node.
fn recover_while(
    nodes: &mut [Node],
    states: &[ReplicaState],
    mut answers: impl FnMut(usize) -> bool,
    rng: &mut ChaCha8Rng,
) -> LeaseRecovery {
    let mut states = states.to_vec();
    let mut epoch = 1;
    let mut machine = LeaseRecovery::new(LAYER, 64 << 20, vec![set(epoch, &states)]);
    let mut asked: Vec<(Call, usize, Request)> = Vec::new();
    for _ in 0..10_000 {
        while let Some(action) = machine.poll() {
            match action {
                Action::Ask {
                    call,
                    to,
                    pg,
                    epoch,
                    command,
                } => asked.push((
                    call,
                    to.0.0 as usize - 1,
                    Request {
                        id: RequestId(0),
                        pg,
                        epoch,
                        generation: Generation(2),
                        sequence: Sequence(0),
                        watermark: Sequence(0),
                        command,
                    },
                )),
                Action::ReportFailed { node, .. } => {
                    states[node.0 as usize - 1] = ReplicaState::Out;
                    epoch += 1;
                    for node in nodes.iter_mut() {
                        node.groups.applied(Epoch(epoch));
                    }
                    machine.on_map(&[set(epoch, &states)]);
                }
                Action::Done => return machine,
                Action::Fenced => panic!("there is no newer lease"),
            }
        }
        if asked.is_empty() {
            machine.on_tick();
            continue;
        }
        let (call, node, request) = asked.swap_remove(rng.random_range(0..asked.len()));
        let result = match answers(node) {
            false => Err(Refusal::Unreachable),
            true => nodes[node].request(&request),
        };
        machine.on_reply(call, result, &OnePlace);
    }
    panic!("no end");
}

/// Writes that reached only some replicas. Returns how many did not reach all.
fn leave_behind(nodes: &mut [Node], rng: &mut ChaCha8Rng, writes: u64) -> u64 {
    let mut partial = 0;
    for sequence in 1..=writes {
        let data = content(sequence);
        let iov = iovec(&data);
        let request = write(rng.random_range(0..300), sequence, 0, &iov);
        let reached: Vec<bool> = nodes.iter().map(|_| rng.random_bool(0.7)).collect();
        partial += u64::from(reached.contains(&false));
        for (node, _) in nodes
            .iter_mut()
            .zip(reached)
            .filter(|(_, reached)| *reached)
        {
            node.request(&request).unwrap();
        }
    }
    partial
}

fn assert_equal(nodes: &mut [Node], which: &[usize]) {
    let first = nodes[which[0]].shard.stamps();
    for &node in &which[1..] {
        assert_eq!(nodes[node].shard.stamps(), first, "node {node}");
    }
}

const IN: ReplicaState = ReplicaState::InSync;

#[test]
fn after_a_takeover_all_replicas_agree() {
    for_each_seed(10, |seed| {
        let mut rng = seeds::rng(seed, 0xf1);
        let states = [IN, IN, IN];
        let mut nodes = states.map(|s| Node::new(seed, s));
        assert!(leave_behind(&mut nodes, &mut rng, 40) > 0);
        let machine = recover(&mut nodes, &states, &[], &mut rng);
        assert!(machine.recovered_blocks() > 0);
        assert_equal(&mut nodes, &[0, 1, 2]);
        // The old holder's late write is refused.
        let data = content(99);
        let iov = iovec(&data);
        for node in &mut nodes {
            let late = node.request(&write(0, 99, 0, &iov));
            assert_eq!(late, Err(Refusal::StaleGeneration(Generation(2))));
        }
    });
}

#[test]
fn a_syncing_replica_is_recovered_and_does_not_decide() {
    for_each_seed(10, |seed| {
        let mut rng = seeds::rng(seed, 0xf2);
        let states = [IN, IN, ReplicaState::Syncing];
        let mut nodes = states.map(|s| Node::new(seed, s));
        let data = content(500);
        let iov = iovec(&data);
        // Newer than anything, and on the syncing replica only.
        nodes[2].request(&write(7, 500, 0, &iov)).unwrap();
        leave_behind(&mut nodes, &mut rng, 40);
        recover(&mut nodes, &states, &[], &mut rng);
        assert_equal(&mut nodes, &[0, 1, 2]);
        let newest = nodes[0]
            .shard
            .stamps()
            .into_iter()
            .map(|(_, _, s)| s.version)
            .max();
        assert!(newest < Some(Version::new(1, 500).0));
    });
}

/// A returning replica that agrees with the newest may be compared at the same time with one that does not
/// yet: it would give up the block for what that one had, and nobody would look again.
#[test]
fn syncing_replica_keeps_data_that_its_source_is_about_to_get() {
    let mut rng = seeds::rng(1, 0xf8);
    let states = [IN, IN, ReplicaState::Syncing];
    let mut nodes = states.map(|s| Node::new(1, s));
    let data = content(3);
    let iov = iovec(&data);
    nodes[0].request(&write(5, 3, 0, &iov)).unwrap();
    // From before this receiving period: nothing is noted.
    nodes[2].shard.write(5, Version::new(1, 3).0, &data);
    let round = Command::Restore {
        chunk: ChunkKey {
            layer: LAYER,
            index: CHUNK,
        },
        block: 5,
        stamps: [BlockStamp::default(); 2],
        buffers: IoVecs::NONE,
        len: 0,
    };
    assert_eq!(still_untouched(PG, &round, &nodes[2].groups), Ok(()));
    recover(&mut nodes, &states, &[], &mut rng);
    assert_equal(&mut nodes, &[0, 1, 2]);
    let refused = still_untouched(PG, &round, &nodes[2].groups);
    assert_eq!(refused, Err(Refusal::Changed));
}

#[test]
fn a_replica_that_dies_in_between_is_left_out() {
    for_each_seed(10, |seed| {
        let mut rng = seeds::rng(seed, 0xf3);
        let states = [IN, IN, IN];
        let mut nodes = states.map(|s| Node::new(seed, s));
        leave_behind(&mut nodes, &mut rng, 40);
        recover(&mut nodes, &states, &[1], &mut rng);
        assert_equal(&mut nodes, &[0, 2]);
    });
}

#[test]
fn what_every_replica_has_is_not_looked_at() {
    let mut rng = seeds::rng(1, 0xf4);
    let states = [IN, IN, IN];
    let mut nodes = states.map(|s| Node::new(1, s));
    for sequence in 1..=20 {
        let data = content(sequence);
        let iov = iovec(&data);
        for node in &mut nodes {
            node.request(&write(sequence as u32, sequence, sequence, &iov))
                .unwrap();
        }
    }
    let machine = recover(&mut nodes, &states, &[], &mut rng);
    assert_eq!(machine.recovered_blocks(), 0);
}

#[test]
fn same_version_conflict_takes_data_of_the_first_in_sync() {
    for_each_seed(5, |seed| {
        let mut rng = seeds::rng(seed, 0xf5);
        let states = [ReplicaState::Syncing, IN, IN];
        let mut nodes = states.map(|s| Node::new(seed, s));
        // The guest changed its buffer between two sendings of the write, and the host died.
        for (node, tag) in nodes.iter_mut().zip(1..) {
            let data = content(tag);
            let iov = iovec(&data);
            node.request(&write(5, 9, 0, &iov)).unwrap();
        }
        let machine = recover(&mut nodes, &states, &[], &mut rng);
        assert_eq!(machine.recovered_blocks(), 1);
        assert_equal(&mut nodes, &[0, 1, 2]);
        assert!(nodes[0].shard.read(5) == content(2));
    });
}

/// How a block goes bad.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Harm {
    /// A bit turns over.
    Rots,
    /// The device refuses to give it.
    Spoils,
}

impl Node {
    fn harm(&mut self, content: &Block, harm: Harm) {
        let place = self.shard.find(content);
        match harm {
            Harm::Rots => self.shard.disk.flip_bit(place + 100, 2),
            Harm::Spoils => self.shard.disk.spoil(place),
        }
    }
}

/// Seed 1000976 of the simulator: each replica in sync kept a version of its own, so that the one that came
/// back with the newest could not repair the other.
#[test]
fn replicas_agree_on_a_block_that_none_in_sync_can_read() {
    use Harm::{Rots, Spoils};
    let harms = [
        [Rots, Rots],
        [Spoils, Spoils],
        [Rots, Spoils],
        [Spoils, Rots],
    ];
    for_each_seed(8, |seed| {
        let harms = harms[seed as usize % 4];
        let mut rng = seeds::rng(seed, 0xf8);
        let states = [IN, IN, ReplicaState::Syncing];
        let mut nodes = states.map(|s| Node::new(seed, s));
        // The newer one reached only some, then the bits of both turned over.
        let (older, newer) = (content(1), content(2));
        for (node, data, version) in [(0, &older, 1), (1, &newer, 2), (2, &newer, 2)] {
            let iov = iovec(data);
            nodes[node].request(&write(5, version, 0, &iov)).unwrap();
        }
        nodes[0].harm(&older, harms[0]);
        nodes[1].harm(&newer, harms[1]);
        let machine = recover(&mut nodes, &states, &[], &mut rng);
        assert_eq!(machine.recovered_blocks(), 1);
        assert_equal(&mut nodes, &[0, 1, 2]);
        let unreadable = nodes[0].shard.try_read(5);
        assert!(
            matches!(unreadable, Err(StoreError::Corrupt { .. })),
            "{unreadable:?}"
        );
        // The data that had been the newest stay where they are, readable or not.
        let unreadable = nodes[1].shard.try_read(5);
        match harms[1] {
            Rots => assert!(matches!(unreadable, Err(StoreError::Corrupt { .. }))),
            Spoils => assert!(matches!(unreadable, Err(StoreError::Unreadable { .. }))),
        }
        assert!(nodes[2].shard.read(5) == newer, "who has it keeps it");
    });
}

#[test]
fn unreadable_block_is_taken_from_another_replica_and_rewritten() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xf9);
        let states = [IN, IN, IN];
        let mut nodes = states.map(|s| Node::new(seed, s));
        let (older, newer) = (content(1), content(2));
        for (node, data, version) in [(0, &older, 1), (1, &newer, 2), (2, &older, 1)] {
            let iov = iovec(data);
            nodes[node].request(&write(5, version, 0, &iov)).unwrap();
        }
        nodes[1].harm(&newer, Harm::Spoils);
        // Nobody is taken out.
        let answers = |_| true;
        let machine = recover_while(&mut nodes, &states, answers, &mut rng);
        assert_eq!(machine.recovered_blocks(), 1);
        assert_equal(&mut nodes, &[0, 1, 2]);
        for node in &mut nodes {
            assert!(node.shard.read(5) == older);
        }
    });
}

/// The only replica in sync gives nothing any more, and one that comes back lacks all of it.
#[test]
fn dead_device_is_not_written_off_block_by_block() {
    const BLOCKS: u32 = 300;
    let states = [IN, ReplicaState::Syncing];
    let mut nodes = states.map(|s| Node::new(1, s));
    for block in 0..BLOCKS {
        let version = u64::from(block) + 1;
        let data = content(version);
        nodes[0]
            .shard
            .write(block, Version::new(1, version).0, &data);
        nodes[0].harm(&data, Harm::Spoils);
    }
    nodes[0].forgetful = true;
    let mut machine = LeaseRecovery::new(LAYER, 64 << 20, vec![set(1, &states)]);
    let (mut lost, mut reports) = (0, 0);
    let mut turn = |nodes: &mut [Node], machine: &mut LeaseRecovery| match machine.poll() {
        Some(Action::Ask {
            call,
            to,
            pg,
            epoch,
            command,
        }) => {
            let request = Request {
                pg,
                epoch,
                generation: Generation(2),
                command,
                ..Request::NOTHING
            };
            let result = nodes[to.0.0 as usize - 1].request(&request);
            lost += u32::from(matches!(command, Command::Restore { len: 0, .. }));
            machine.on_reply(call, result, &OnePlace);
            false
        }
        // Meta keeps the last one.
        Some(Action::ReportFailed { .. }) => {
            reports += 1;
            false
        }
        Some(Action::Done) => true,
        Some(Action::Fenced) => panic!("there is no newer lease"),
        None => {
            machine.on_tick();
            false
        }
    };
    let ended = (0..20_000).any(|_| turn(&mut nodes, &mut machine));
    assert!(!ended, "it waits for the device");
    // It does give them after all.
    for place in nodes[0].shard.disk.spoilt() {
        nodes[0].shard.disk.repair(place);
    }
    let ended = (0..20_000).any(|_| turn(&mut nodes, &mut machine));
    assert!(ended);
    assert_eq!((lost, reports), (256, 1));
    assert_equal(&mut nodes, &[0, 1]);
    for block in 0..BLOCKS {
        assert!(nodes[0].shard.read(block) == content(u64::from(block) + 1));
        assert_eq!(nodes[1].shard.try_read(block).is_ok(), block >= 256);
    }
}

#[test]
fn replica_without_unresolved_records_forces_a_full_comparison() {
    let mut rng = seeds::rng(1, 0xf6);
    let states = [IN, IN, IN];
    for forgetful in [false, true] {
        let mut nodes = states.map(|s| Node::new(1, s));
        nodes[1].forgetful = forgetful;
        // Nobody lists these.
        for (block, version) in [(0, 3), (300, 4), (1023, 5)] {
            nodes[2]
                .shard
                .write(block, Version::new(1, version).0, &content(version));
        }
        let machine = recover(&mut nodes, &states, &[], &mut rng);
        assert_eq!(machine.recovered_blocks(), if forgetful { 3 } else { 0 });
        if forgetful {
            assert_equal(&mut nodes, &[0, 1, 2]);
            assert!(nodes[0].shard.read(1023) == content(5));
        }
    }
}

#[test]
fn replica_lost_at_any_moment_is_left_out_and_the_rest_agree() {
    for_each_seed(30, |seed| {
        let mut rng = seeds::rng(seed, 0xf7);
        let states = [IN, IN, IN];
        let mut nodes = states.map(|s| Node::new(seed, s));
        leave_behind(&mut nodes, &mut rng, 20);
        // Some of the newest are on the one that goes only, some on the others only.
        let goes = rng.random_range(0..3);
        let mut left: u32 = rng.random_range(1..40);
        let answers = |node: usize| {
            left = left.saturating_sub(u32::from(node == goes));
            node != goes || left > 0
        };
        recover_while(&mut nodes, &states, answers, &mut rng);
        let stay: Vec<usize> = (0..3).filter(|node| *node != goes).collect();
        assert_equal(&mut nodes, &stay);
    });
}

#[test]
fn lost_map_page_decides_nothing_and_is_filled_by_what_others_know() {
    for_each_seed(6, |seed| {
        let mut rng = seeds::rng(seed, 0xfd);
        let states = [IN, IN, IN];
        let mut nodes = states.map(|s| Node::new(seed, s));
        leave_behind(&mut nodes, &mut rng, 60);
        let lost = rng.random_range(0..3);
        nodes[lost].shard.lose_map_page(CHUNK, 0);
        // Nobody remembers what is unresolved, so that all that may be is recovered.
        nodes.iter_mut().for_each(|node| node.forgetful = true);
        let before: Vec<_> = (0..3)
            .filter(|node| *node != lost)
            .flat_map(|node| nodes[node].shard.stamps())
            .collect();
        recover(&mut nodes, &states, &[], &mut rng);
        assert_equal(&mut nodes, &[0, 1, 2]);
        let after = nodes[lost].shard.stamps();
        assert!(after.iter().all(|(_, _, stamp)| !stamp.is_unknown()));
        for (chunk, block, stamp) in before {
            let found = after.iter().find(|(c, b, _)| (*c, *b) == (chunk, block));
            assert!(found.is_some_and(|(_, _, found)| found.version >= stamp.version));
        }
    });
}

/// Who is in sync alone has lost the page, and one that is being compared has the block. Nobody can tell
/// whether that is from before it left: it is not replaced, and does not decide.
#[test]
fn what_is_not_known_in_sync_replaces_nothing_that_another_replica_knows() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xfe);
        let states = [IN, ReplicaState::Syncing];
        let mut nodes = states.map(|s| Node::new(seed, s));
        let (older, newer) = (content(1), content(2));
        for (node, data, version) in [(0, &older, 1), (1, &newer, 2)] {
            let iov = iovec(data);
            nodes[node].request(&write(5, version, 0, &iov)).unwrap();
        }
        nodes[0].shard.lose_map_page(CHUNK, 0);
        nodes[0].forgetful = seed % 2 == 0;
        let (before, unknown) = (nodes[1].shard.stamps(), nodes[0].shard.inspect(0, 256));
        assert!(unknown.iter().all(BlockStamp::is_unknown));
        // It begins a new receiving period, and the takeover ends without it.
        let machine = recover(&mut nodes, &states, &[], &mut rng);
        assert_eq!(machine.recovered_blocks(), 0);
        assert_eq!(nodes[1].shard.stamps(), before);
        assert!(nodes[1].shard.read(5) == newer);
        assert_eq!(nodes[0].shard.inspect(0, 256), unknown);
    });
}
