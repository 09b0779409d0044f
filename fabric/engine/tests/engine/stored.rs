//! What layers store on the devices of a node.

use std::collections::BTreeMap;

use fabric::Fabric;
use fabric_types::ids::LayerId;

use super::rig::{Guest, MIB, Rig};

const SIZE: u64 = 64 * MIB;

/// Bytes of each layer; all of them are counted.
fn stored(fabric: &Fabric) -> BTreeMap<u64, u64> {
    let layers = fabric.stored(|_, _| true).into_iter();
    let layers = layers.inspect(|(_, stored)| assert_eq!(stored.uncounted_chunks, 0));
    layers
        .map(|(layer, stored)| (layer.0, stored.bytes))
        .collect()
}

#[test]
fn what_layers_store_is_known_at_once_and_after_a_crash() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    assert_eq!(stored(&fabric), BTreeMap::new());
    let mut first = Guest::open(&fabric, 1, 1, SIZE);
    let mut second = Guest::open(&fabric, 2, 1, SIZE);
    let data = vec![0x5a; MIB as usize];
    for at in 0..10 {
        first.write(at * 5 * MIB, &data).unwrap();
    }
    second.write(3 * MIB, &data[..8192]).unwrap();
    second.write(3 * MIB, &data[..512]).unwrap();
    assert_eq!(stored(&fabric), BTreeMap::from([(1, 10 * MIB), (2, 8192)]));
    first.discard(0, 7 * MIB).unwrap();
    first.flush().unwrap();
    let right = BTreeMap::from([(1, 8 * MIB), (2, 8192)]);
    assert_eq!(stored(&fabric), right);
    drop((first, second));
    drop(fabric);
    let fabric = rig.open();
    assert_eq!(
        fabric.devices()[0].report.clean_shards,
        0,
        "it was not closed"
    );
    assert_eq!(stored(&fabric), right);
    fabric.delete_volume(LayerId(1)).unwrap();
    let left: BTreeMap<u64, u64> = stored(&fabric).into_iter().filter(|l| l.1 > 0).collect();
    assert_eq!(left, BTreeMap::from([(2, 8192)]));
}

#[test]
fn only_chunks_that_count_on_their_device_are_added() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, SIZE);
    for chunk in 0..8 {
        guest.write(chunk * 4 * MIB, &[1; 4096]).unwrap();
    }
    let own = fabric.devices()[0].label.device;
    let odd = fabric.stored(|device, chunk| *device == own && chunk.index % 2 == 1);
    assert_eq!(odd[&LayerId(1)].bytes, 4 * 4096);
    assert!(fabric.stored(|device, _| *device != own).is_empty());
}
