//! What a device says of the groups that it was in sync in.

use fabric::Evidence;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::{Epoch, Generation, PgId};

use super::rig::{Guest, MIB, Rig, params};
use crate::single_node::layer_of_pool_1;

fn marks(found: &Evidence) -> Vec<(u64, u64)> {
    found
        .in_sync
        .iter()
        .map(|(pg, epoch)| (pg.0, epoch.0))
        .collect()
}

#[test]
fn marks_only_grow_and_outlive_a_crash() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let device = fabric.devices()[0].label.device;
    assert_eq!(fabric.evidence(&device), Evidence::default());
    let (one, two) = (PgId(1 << 32), PgId(1 << 32 | 9));
    fabric
        .mark_in_sync(&device, &[(one, Epoch(4)), (two, Epoch(5))])
        .unwrap();
    fabric
        .mark_in_sync(&device, &[(one, Epoch(3)), (two, Epoch(8))])
        .unwrap();
    let expected = [(one.0, 4), (two.0, 8)];
    assert_eq!(marks(&fabric.evidence(&device)), expected);
    // Not closed, as after a crash; and once more after a checkpoint.
    drop(fabric);
    let fabric = rig.open();
    assert_eq!(marks(&fabric.evidence(&device)), expected);
    fabric.close().unwrap();
    drop(fabric);
    let fabric = rig.open();
    assert_eq!(marks(&fabric.evidence(&device)), expected);
    assert_eq!(fabric.evidence(&device).epoch, Epoch(8));
    assert!(fabric.layers().is_empty(), "a mark is no data");
    assert_eq!(
        fabric.evidence(&[9; 16]),
        Evidence::default(),
        "no such device"
    );
}

/// More groups than commands may wait.
#[test]
fn every_group_of_a_pool_is_marked() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let device = fabric.devices()[0].label.device;
    let all: Vec<(PgId, Epoch)> = (0..1000)
        .map(|pg| (PgId(2 << 32 | pg), Epoch(pg + 1)))
        .collect();
    fabric.mark_in_sync(&device, &all).unwrap();
    let found: Vec<_> = fabric.evidence(&device).in_sync.into_iter().collect();
    assert_eq!(found, all);
}

#[test]
fn layers_are_told_with_their_newest_lease() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let device = fabric.devices()[0].label.device;
    let volume = fabric
        .open_volume(&params(layer_of_pool_1(7), 3, 16 * MIB))
        .unwrap();
    let mut guest = Guest::new(&fabric, &volume);
    guest.write(0, &vec![7; BLOCK_BYTES]).unwrap();
    let found = fabric.evidence(&device);
    let layers: Vec<_> = found.layers.into_iter().collect();
    assert_eq!(
        layers,
        [(
            fabric_types::ids::LayerId(layer_of_pool_1(7)),
            Generation(3)
        )]
    );
    assert!(found.in_sync.is_empty());
}

#[test]
fn uses_of_a_device_outlive_a_crash_and_are_no_evidence() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let device = fabric.devices()[0].label.device;
    assert_eq!(fabric.uses(&device), 0);
    fabric.set_uses(&device, 7).unwrap();
    drop(fabric);
    let fabric = rig.open();
    assert_eq!((fabric.uses(&device), fabric.uses(&[9; 16])), (7, 0));
    fabric.set_uses(&device, 8).unwrap();
    fabric.close().unwrap();
    drop(fabric);
    let fabric = rig.open();
    assert_eq!(fabric.uses(&device), 8);
    assert_eq!(fabric.evidence(&device), Evidence::default());
}
