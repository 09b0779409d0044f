//! A fabric with the map of a node without peers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fabric::{ClusterView, Fabric, FabricConfig, Grant, GroupView, VolumeHandle};
use fabric_types::ids::LayerId;
use fabric_types::membership::{Member, ReplicaState};
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId};

/// The node.
pub const NODE: NodeId = NodeId(1);
/// The start of its process.
pub const INCARNATION: Incarnation = Incarnation(1);
/// Pools, and the groups of each.
const POOLS: usize = 2;
const GROUPS: u64 = 8;
/// Layers that exist in pool 0, and in pool 1.
const LAYERS: u64 = 100;

/// The layer of a volume of pool 1, as metadata number them.
pub const fn layer_of_pool_1(volume: u64) -> u64 {
    1 << 54 | volume << 26 | 1
}

/// Opens a fabric and applies a map that spreads all groups over its devices.
pub fn open(config: FabricConfig) -> Fabric {
    let fabric = Fabric::open(config).unwrap();
    let layers = (0..LAYERS).chain((0..LAYERS).map(layer_of_pool_1));
    let grant = Grant {
        holder: Some(NODE),
        generation: Generation::MAX,
    };
    fabric.set_layers(layers.map(|layer| (LayerId(layer), grant)));
    // The null store has one device, which the fabric does not list.
    let devices = fabric.devices().len().max(1);
    let all: Vec<usize> = (0..devices).collect();
    place_on(&fabric, Epoch(1), [&all, &all]);
    fabric
}

/// Waits until a volume is taken over under its lease: before that no request is served.
///
/// # Panics
/// It is not within a minute.
pub fn wait_until_served(volume: &VolumeHandle) {
    let start = Instant::now();
    while !volume.is_recovered() {
        assert!(start.elapsed() < Duration::from_secs(60), "not taken over");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Applies a map that spreads the groups of each pool over these of the node's devices.
pub fn place_on(fabric: &Fabric, epoch: Epoch, pools: [&[usize]; POOLS]) {
    let devices_here = fabric.devices();
    let labels = devices_here.iter().map(|one| one.label.device);
    let labels = labels.chain(devices_here.is_empty().then_some([0; 16]));
    let group = |pool: usize, index: u64| GroupView {
        pg: PgId((pool as u64) << 32 | index),
        epoch,
        min_in_sync: 1,
        members: vec![Member {
            node: NODE,
            incarnation: INCARNATION,
            state: ReplicaState::InSync,
            since: Epoch(1),
        }],
        power_lost: Epoch(0),
        device: Some(pools[pool][index as usize % pools[pool].len()] as u64),
        incoming: None,
    };
    let groups = (0..POOLS).flat_map(|pool| (0..GROUPS).map(move |index| group(pool, index)));
    fabric.set_map(ClusterView {
        epoch,
        peers: HashMap::new(),
        members: HashMap::new(),
        groups: groups.collect(),
        own_devices: (0..).zip(labels).collect(),
    });
}
