//! Peers with a valid certificate that use layers without holding the lease.

use std::collections::{HashMap, HashSet};

use fabric::{MemberView, Reach};
use fabric_transport::hello::Wire;
use fabric_types::block::BlockStamp;
use fabric_types::ids::{ChunkKey, Version};
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Epoch, Generation, NodeId, Refusal, Request, RequestId, Sequence};

use super::peer::Peer;
use super::rig::*;

const CHUNK: ChunkKey = ChunkKey {
    layer: LAYER,
    index: 0,
};
/// The hostile node.
const HOST: u64 = 3;
const BLOCK: usize = 4096;

/// Node 1 with a guest, whose only replica is on node 2, and node 3, which only lends its certificate.
struct World {
    nodes: Vec<Node>,
    guest: Guest,
    ca: Authority,
}

impl World {
    fn new(reach: Reach) -> Self {
        let ca = Authority::new();
        let nodes = cluster(&ca, 2, Wire::Crc);
        let (three, view) = member(HOST);
        let hostile = (three, MemberView { reach, ..view });
        let world = nodes[1].world();
        let members = [member(1), member(2), hostile].into();
        world.lock().unwrap().members.insert(2, members);
        let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
        guest.write(0, &pattern(1, BLOCK)).unwrap();
        Self { nodes, guest, ca }
    }

    fn hostile(&self) -> Peer {
        Peer::connect(&self.ca, &self.nodes[1], HOST)
    }

    /// Opens the guest's layer to node 3, as a mounted filesystem would.
    fn open_to_hostile(&self) {
        let open = HashMap::from([(NodeId(HOST), HashSet::from([LAYER]))]);
        self.nodes[1].fabric.set_open_layers(open);
    }

    fn request(&self, generation: u64, command: Command) -> Request {
        Request {
            id: RequestId(1),
            pg: PG,
            epoch: self.nodes[1].fabric.map_epoch(),
            generation: Generation(generation),
            sequence: Sequence(1 << 30),
            watermark: Sequence(1),
            command,
        }
    }

    /// Checks that the guest reads what it wrote and can continue to write, also under its next lease.
    fn assert_unharmed(&mut self, what: &str) {
        assert_eq!(self.guest.read(0, BLOCK), pattern(1, BLOCK), "{what}");
        for seed in [2, 1] {
            let bytes = pattern(seed, BLOCK);
            self.guest
                .write(0, &bytes)
                .unwrap_or_else(|error| panic!("{what}: {error:?}"));
            self.guest.flush().unwrap();
            assert_eq!(self.guest.read(0, BLOCK), bytes, "{what}");
        }
    }
}

/// Buffer of a request.
struct Memory {
    bytes: Vec<u8>,
    list: [libc::iovec; 1],
}

impl Memory {
    fn new(bytes: Vec<u8>) -> Box<Self> {
        let mut memory = Box::new(Self {
            bytes,
            list: [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }],
        });
        memory.list[0] = libc::iovec {
            iov_base: memory.bytes.as_mut_ptr().cast(),
            iov_len: memory.bytes.len(),
        };
        memory
    }

    fn buffers(&self) -> IoVecs {
        IoVecs {
            ptr: self.list.as_ptr(),
            len: 1,
        }
    }
}

/// All commands that change a block or the fence. `memory` has 4096 bytes; `room` holds a fence's answer.
fn changes(memory: &Memory, room: &Memory) -> [(&'static str, Command); 4] {
    let (buffers, len) = (memory.buffers(), BLOCK as u32);
    let newest = BlockStamp {
        version: Version::new(Version::GENERATION_MAX - 1, 0).0,
        ..BlockStamp::default()
    };
    [
        (
            "write",
            Command::Write {
                chunk: CHUNK,
                offset: 0,
                buffers,
                len,
                fua: false,
                urgent: false,
            },
        ),
        (
            "zero",
            Command::Zero {
                chunk: CHUNK,
                offset: 0,
                len,
                fua: false,
            },
        ),
        (
            "restore",
            Command::Restore {
                chunk: CHUNK,
                block: 1,
                stamps: [BlockStamp::default(), newest],
                buffers: IoVecs::NONE,
                len: 0,
            },
        ),
        (
            "fence",
            Command::Fence {
                layer: LAYER,
                buffers: room.buffers(),
                len: room.bytes.len() as u32,
            },
        ),
    ]
}

/// Claims the victim's own generation and all above it: one fence with the largest generation would refuse
/// all further writes to the volume.
#[test]
fn one_writer_a_node_without_the_lease_changes_nothing_whatever_it_claims() {
    for reach in [Reach::OpenLayers, Reach::All] {
        let mut world = World::new(reach);
        world.open_to_hostile();
        let mut hostile = world.hostile();
        let own = world.guest.volume.generation().0;
        let (memory, room) = (Memory::new(pattern(9, BLOCK)), Memory::new(vec![0; 240]));
        for generation in [1, own, own + 1, Generation::MAX.0 - 1] {
            for (name, command) in changes(&memory, &room) {
                let what = format!("{name} of generation {generation}, {reach:?}");
                let answer = hostile.ask(&world.request(generation, command));
                let refused = match generation > own {
                    true => matches!(answer, Err(Refusal::Behind(_))),
                    false => matches!(answer, Err(Refusal::StaleGeneration(_))),
                };
                assert!(refused, "{what}: {answer:?}");
                world.assert_unharmed(&what);
            }
        }
    }
}

/// Node 3 has only an incoming attachment of the volume, which opens nothing.
#[test]
fn a_host_cannot_read_a_layer_that_is_not_open_to_it() {
    let mut world = World::new(Reach::OpenLayers);
    let mut hostile = world.hostile();
    let own = world.guest.volume.generation().0;
    let memory = Memory::new(vec![0xee; BLOCK]);
    let (buffers, len) = (memory.buffers(), BLOCK as u32);
    let reads = [
        Command::Read {
            chunk: CHUNK,
            offset: 0,
            buffers,
            len,
        },
        Command::Inspect {
            chunk: CHUNK,
            block: 0,
            buffers,
            len,
        },
        Command::TellFence {
            layer: LAYER,
            buffers,
            len: 16,
        },
        Command::Flush { layer: LAYER },
    ];
    for command in reads {
        for generation in [0, own, Generation::MAX.0] {
            let answer = hostile.ask(&world.request(generation, command));
            assert!(
                matches!(answer, Err(Refusal::Behind(_))),
                "{command:?}: {answer:?}"
            );
            assert!(memory.bytes.iter().all(|byte| *byte == 0xee), "{command:?}");
        }
    }
    world.assert_unharmed("reads");
}

/// The epoch is bounded like the generation: otherwise a later holder could not continue under the existing
/// maps.
#[test]
fn the_holder_of_a_lease_raises_no_fence_above_the_newest_map() {
    let mut world = World::new(Reach::OpenLayers);
    world.open_to_hostile();
    let granted = world.nodes[0].world().lock().unwrap().grant(HOST);
    let (generation, mut hostile) = (granted.0, world.hostile());
    let room = Memory::new(vec![0; 240]);
    let fence = Command::Fence {
        layer: LAYER,
        buffers: room.buffers(),
        len: room.bytes.len() as u32,
    };
    for epoch in [u64::MAX, 1 << 40, world.nodes[1].fabric.map_epoch().0 + 1] {
        let request = Request {
            epoch: Epoch(epoch),
            ..world.request(generation, fence)
        };
        let answer = hostile.ask(&request);
        assert!(
            matches!(answer, Err(Refusal::Behind(_))),
            "{epoch}: {answer:?}"
        );
    }
    let answer = hostile.ask(&world.request(generation, fence));
    assert_eq!(answer, Ok(()), "its own lease, by the newest map");
    // The victim takes its volume back.
    let set = set_of(&[1, 2], &[1], 1);
    world.guest = Guest::new(&world.nodes[0], set);
    world.assert_unharmed("after the fence");
}
