//! A node that was alone with several devices becomes the first of a cluster.

use fabric_types::ids::ChunkKey;

use super::*;
use crate::first::Layout;
use crate::ids::LayerId;
use crate::map::ClusterMap;

fn groups(world: &World) -> Vec<PlacementGroup> {
    tables::PLACEMENT_GROUPS.all(&world.records).unwrap()
}

fn homes(layout: &Layout, layer: LayerId) -> Vec<Option<[u8; 16]>> {
    let home = |index| layout.device_of(ChunkKey { layer, index });
    (0..200).map(home).collect()
}

fn map(world: &World) -> ClusterMap {
    ClusterMap::load(&world.records).unwrap()
}

#[test]
fn each_group_is_on_the_device_where_it_was_placed_last() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let layer = tables::VOLUMES.all(&world.records).unwrap()[0].top_layer();
    // Nothing moves on a node that is alone: the groups of the new device wait for ever.
    let second = world.device(1);
    let third = world.device(1);
    let is_waiting = |group: &PlacementGroup| {
        let mut members = group.members.iter();
        group.members.len() == 2 && members.any(|member| member.state == Out)
    };
    let waiting = groups(&world)
        .iter()
        .filter(|group| is_waiting(group))
        .count();
    assert!(waiting > 0);
    let before = homes(&Layout::planned(&map(&world), NodeId(1)), layer);
    for device in [DeviceId(1), second, third] {
        let uuid = tables::DEVICES
            .get(&world.records, &device)
            .unwrap()
            .unwrap()
            .uuid;
        assert!(before.contains(&Some(*uuid.as_bytes())), "{device}");
    }

    let settle = Command::SettleGroups {
        node: NodeId(1),
        at: AT,
    };
    world.run(&settle).unwrap();
    for layout in [Layout::planned, Layout::of] {
        assert_eq!(homes(&layout(&map(&world), NodeId(1)), layer), before);
    }
    for group in groups(&world) {
        let [member] = group.members.as_slice() else {
            panic!("{group:?}");
        };
        assert!(member.is_in_sync() && !member.leaving, "{group:?}");
    }
    // Nothing is done twice.
    let once = groups(&world);
    world.run(&settle).unwrap();
    assert_eq!(groups(&world), once);
}

#[test]
fn nothing_is_known_of_chunks_of_unknown_pools() {
    let world = World::ready();
    let layout = Layout::of(&map(&world), NodeId(1));
    let chunk = ChunkKey {
        layer: fabric_types::placement::layer_of(700, 1, 1),
        index: 0,
    };
    assert_eq!(layout.device_of(chunk), None);
    assert_eq!(layout.groups_on(&[9; 16]).count(), 0);
    let known = layout.devices[0].uuid;
    assert_eq!(
        layout.groups_on(known.as_bytes()).count(),
        groups(&world).len()
    );
}
