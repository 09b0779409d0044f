//! Chunks are put on the devices of their placement groups, when a node that was alone is to be one of
//! several.

use std::cell::Cell;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use fabric::spread::{DeviceIdentity, Spread};
use fabric::{DeviceConfig, Fabric, FabricConfig, FabricError, Missing, StoreKind};
use fabric_store::file::Allocation;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::{CHUNK_BYTES, ChunkKey};
use fabric_types::placement::layer_of;
use fabric_types::{Epoch, PgId};

use super::rig::{Guest, MIB, Rig, params};

const CHUNKS: u64 = 40;
const SIZE: u64 = CHUNKS * CHUNK_BYTES;
const VOLUMES: [u64; 3] = [1, 2, 3];
/// Of the test's writes: later ones have another.
const FIRST: u64 = 5;
/// Of the map by which groups are where they are.
const EPOCH: Epoch = Epoch(9);

fn layer(family: u64) -> u64 {
    layer_of(1, family, 1).0
}

/// A node that is alone with devices of these sizes.
struct Node {
    rig: Rig,
    sizes: Vec<u64>,
}

impl Node {
    fn new(sizes: &[u64]) -> Self {
        Self {
            rig: Rig::new(sizes[0]),
            sizes: sizes.to_vec(),
        }
    }

    /// A node with `devices` devices and all volumes written.
    fn with_volumes(devices: usize) -> Self {
        let node = Self::new(&vec![512 * MIB; devices]);
        let fabric = node.open();
        write_all(&fabric);
        fabric.close().unwrap();
        drop(fabric);
        node
    }

    fn path(&self, index: usize) -> PathBuf {
        self.rig.device.with_extension(index.to_string())
    }

    fn devices(&self) -> Vec<DeviceConfig> {
        let device = |(index, size): (usize, &u64)| DeviceConfig {
            path: self.path(index),
            missing: Missing::CreateFile {
                size_bytes: *size,
                allocation: Allocation::Sparse,
            },
        };
        self.sizes.iter().enumerate().map(device).collect()
    }

    fn config(&self, devices: &[DeviceConfig]) -> FabricConfig {
        let mut config = self.rig.config();
        config.store = StoreKind::Devices(devices.to_vec());
        config
    }

    /// Alone, with all devices.
    fn open(&self) -> Fabric {
        Fabric::open(self.config(&self.devices())).unwrap()
    }

    /// Alone, as if it only had this device.
    fn open_one(&self, index: usize) -> Fabric {
        Fabric::open(self.config(&self.devices()[index..=index])).unwrap()
    }

    fn ids(&self) -> Vec<DeviceIdentity> {
        let fabric = self.open();
        let found = fabric.devices();
        let id = |index: usize| {
            let mut found = found.iter();
            let one = found.find(|one| one.path == self.path(index));
            one.unwrap().label.device
        };
        let ids = (0..self.sizes.len()).map(id).collect();
        fabric.close().unwrap();
        ids
    }

    fn used(&self) -> Vec<u64> {
        let fabric = self.open();
        let used = fabric.devices().iter().map(|one| one.used_bytes).collect();
        fabric.close().unwrap();
        used
    }

    fn spread(&self) -> Spread {
        let devices = self.devices();
        Spread::open(&devices, &self.config(&devices)).unwrap()
    }

    fn copy(&self, home: impl Fn(ChunkKey) -> Option<DeviceIdentity>) -> Result<u64, FabricError> {
        let mut spread = self.spread();
        spread.plan(home)?;
        let done = spread.copy(|_| ());
        spread.close().unwrap();
        Ok(done?.copied_blocks)
    }
}

fn groups(device: &DeviceIdentity) -> [PgId; 1] {
    [PgId(1 << 32 | u64::from(device[0]))]
}

/// What is at the beginning of a chunk of a volume, written under a lease.
fn content(family: u64, chunk: u64, lease: u64) -> Vec<u8> {
    let word = family << 32 | chunk << 8 | lease << 48 | 0x5a;
    word.to_le_bytes().repeat(2 * BLOCK_BYTES / 8)
}

/// Where that is.
fn place(chunk: u64) -> u64 {
    chunk * CHUNK_BYTES + (chunk % 3) * MIB
}

fn write_all(fabric: &Fabric) {
    for family in VOLUMES {
        let mut guest = Guest::open(fabric, layer(family), FIRST, SIZE);
        for chunk in 0..CHUNKS {
            guest
                .write(place(chunk), &content(family, chunk, FIRST))
                .unwrap();
            if chunk % 4 == 1 {
                guest.discard(place(chunk), BLOCK_BYTES as u64).unwrap();
            }
        }
        guest.flush().unwrap();
    }
}

/// What a chunk is to have there.
fn written(family: u64, chunk: u64) -> Vec<u8> {
    let mut expected = content(family, chunk, FIRST);
    if chunk % 4 == 1 {
        expected[..BLOCK_BYTES].fill(0);
    }
    expected
}

/// Reads the first part of each chunk, which must have what `expected` says, if it does, and zeroes around
/// it.
fn check(fabric: &Fabric, lease: u64, expected: impl Fn(u64, u64) -> Option<Vec<u8>>) {
    for family in VOLUMES {
        let mut guest = Guest::open(fabric, layer(family), lease, SIZE);
        for chunk in 0..CHUNKS {
            let Some(there) = expected(family, chunk) else {
                continue;
            };
            let found = guest.read_vec(chunk * CHUNK_BYTES, 3 * MIB as usize);
            let begin = (place(chunk) % CHUNK_BYTES) as usize;
            let (before, rest) = found.split_at(begin);
            let (data, after) = rest.split_at(2 * BLOCK_BYTES);
            assert!(data == there, "volume {family}, chunk {chunk}");
            let mut around = before.iter().chain(after);
            assert!(
                around.all(|byte| *byte == 0),
                "volume {family}, chunk {chunk}"
            );
        }
    }
}

fn write_one(fabric: &Fabric, family: u64, chunk: u64, lease: u64) {
    let mut guest = Guest::open(fabric, layer(family), lease, SIZE);
    guest
        .write(place(chunk), &content(family, chunk, lease))
        .unwrap();
    guest.flush().unwrap();
}

#[test]
fn each_chunk_comes_to_its_device_also_after_cuts() {
    let node = Node::with_volumes(3);
    let ids = node.ids();
    let home_of = |chunk: ChunkKey| (chunk.index as usize + chunk.layer.0 as usize) % 3;
    let home = |chunk: ChunkKey| Some(ids[home_of(chunk)]);

    let mut spread = node.spread();
    assert!(spread.served_in_cluster().is_none());
    let comes = spread.plan(home).unwrap();
    assert!(comes.iter().any(|(_, bytes)| *bytes > 0), "{comes:?}");
    let copied = Cell::new((0, 0));
    let cut = catch_unwind(AssertUnwindSafe(|| {
        spread.copy(|state| {
            copied.set((state.copied, state.chunks));
            panic!("the power goes");
        })
    }));
    let (before, all) = copied.get();
    assert!(
        cut.is_err() && before > 0 && before < all,
        "{before} of {all}"
    );
    drop(spread);

    // It goes on alone. What was copied is overwritten or discarded.
    let fabric = node.open();
    check(&fabric, 6, |family, chunk| Some(written(family, chunk)));
    const LATER: u64 = 7;
    for family in VOLUMES {
        let mut guest = Guest::open(&fabric, layer(family), LATER, SIZE);
        for chunk in (0..CHUNKS).filter(|chunk| chunk % 5 == 2) {
            let data = content(family, chunk, LATER);
            guest.write(place(chunk), &data).unwrap();
        }
        for chunk in (0..CHUNKS).filter(|chunk| chunk % 5 == 3) {
            guest.discard(chunk * CHUNK_BYTES, CHUNK_BYTES).unwrap();
        }
        guest.flush().unwrap();
    }
    fabric.close().unwrap();
    drop(fabric);
    let changed = |family: u64, chunk: u64| match chunk % 5 {
        2 => content(family, chunk, LATER),
        3 => vec![0; 2 * BLOCK_BYTES],
        _ => written(family, chunk),
    };

    let first = node.copy(home).unwrap();
    assert!(first > 0);
    assert_eq!(node.copy(home).unwrap(), 0, "it is all there");
    let fabric = node.open();
    check(&fabric, 8, |family, chunk| Some(changed(family, chunk)));
    fabric.close().unwrap();
    drop(fabric);

    // Telling the devices is cut after it has begun, and done by the next start.
    let mut spread = node.spread();
    let told = Cell::new(0);
    let cut = catch_unwind(AssertUnwindSafe(|| {
        let groups = |device: &DeviceIdentity| {
            told.set(told.get() + 1);
            assert!(told.get() < 3, "the power goes");
            groups(device)
        };
        spread.settle(home, groups, EPOCH)
    }));
    assert!(cut.is_err());
    drop(spread);
    let mut spread = node.spread();
    assert!(
        spread.served_in_cluster().is_some(),
        "not to be started alone"
    );
    spread.settle(home, groups, EPOCH).unwrap();
    spread.close().unwrap();
    for index in 0..3 {
        let fabric = node.open_one(index);
        let stale = fabric.open_volume(&params(layer(1), FIRST, SIZE));
        assert!(matches!(stale, Err(FabricError::StaleLease { .. })));
        check(&fabric, 9, |family, chunk| {
            let key = ChunkKey {
                layer: layer_of(1, family, 1),
                index: chunk as u32,
            };
            (home_of(key) == index).then(|| changed(family, chunk))
        });
        fabric.close().unwrap();
    }
}

#[test]
fn nothing_is_changed_while_a_block_cannot_be_read() {
    let node = Node::with_volumes(2);
    let ids = node.ids();
    let (family, chunk) = (2, 6);
    let wanted = content(family, chunk, FIRST);
    let mut flipped = Vec::new();
    for index in 0..2 {
        let bytes = std::fs::read(node.path(index)).unwrap();
        let blocks = bytes.chunks(BLOCK_BYTES).enumerate();
        let mut found = blocks.filter(|(_, block)| *block == &wanted[..BLOCK_BYTES]);
        if let Some((at, _)) = found.next() {
            let file = OpenOptions::new().write(true).open(node.path(index));
            let at = (at * BLOCK_BYTES + 9) as u64;
            file.unwrap().write_all_at(&[0xff], at).unwrap();
            flipped.push(index);
        }
    }
    let &[index] = flipped.as_slice() else {
        panic!("{flipped:?}");
    };
    let home = |_| Some(ids[1 - index]);
    let used = node.used();
    let told = node.copy(home).unwrap_err();
    let offset_wanted = place(chunk);
    assert!(
        matches!(told, FabricError::Unreadable { offset, .. } if offset == offset_wanted),
        "{told}"
    );
    assert_eq!(node.used(), used, "the copies are freed");
    let fabric = node.open();
    write_one(&fabric, family, chunk, 6);
    fabric.close().unwrap();
    drop(fabric);
    node.copy(home).unwrap();
    let mut spread = node.spread();
    spread.settle(home, groups, EPOCH).unwrap();
    spread.close().unwrap();
    let fabric = node.open_one(1 - index);
    check(&fabric, 7, |of, at| {
        Some(match (of, at) == (family, chunk) {
            true => content(family, chunk, 6),
            false => written(of, at),
        })
    });
}

#[test]
fn a_device_that_fills_up_gives_back_what_was_copied() {
    const PAGES: u64 = 16_000;
    let node = Node::new(&[512 * MIB, 128 * MIB]);
    let ids = node.ids();
    let fabric = node.open();
    // A block in each map page: that takes twice as much as the data.
    let mut guest = Guest::open(&fabric, layer(1), FIRST, PAGES * MIB);
    let block = |page: u64| (page + 1).to_le_bytes().repeat(BLOCK_BYTES / 8);
    for page in 0..PAGES {
        guest.write(page * MIB, &block(page)).unwrap();
    }
    guest.flush().unwrap();
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);
    let full = node
        .used()
        .iter()
        .position(|used| *used < 16 * MIB)
        .unwrap();
    assert_eq!(full, 1, "the layer is on the larger one");
    let told = node.copy(|_| Some(ids[1])).unwrap_err();
    assert!(told.to_string().contains("no space"), "{told}");
    // Some regions of the device may still be open.
    assert!(node.used()[1] < MIB);
    let fabric = node.open();
    let mut guest = Guest::open(&fabric, layer(1), 6, PAGES * MIB);
    for page in (0..PAGES).step_by(97) {
        assert!(
            guest.read_vec(page * MIB, BLOCK_BYTES) == block(page),
            "{page}"
        );
    }
}

#[test]
fn nothing_begins_without_room_or_without_a_device() {
    let node = Node::new(&[512 * MIB, 128 * MIB]);
    let ids = node.ids();
    let fabric = node.open();
    let mut guest = Guest::open(&fabric, layer(1), FIRST, SIZE);
    for at in 0..SIZE / MIB {
        guest
            .write(at * MIB, &vec![at as u8 | 1; MIB as usize])
            .unwrap();
    }
    guest.flush().unwrap();
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);
    let told = node.copy(|_| Some(ids[1])).unwrap_err();
    assert!(matches!(told, FabricError::NoRoomToSpread { .. }), "{told}");
    assert!(told.to_string().contains("too little room"), "{told}");
    let told = node.copy(|_| Some([9; 16])).unwrap_err();
    assert!(matches!(told, FabricError::HomeNotOpen { .. }), "{told}");
    let told = node.copy(|_| None).unwrap_err();
    assert!(matches!(told, FabricError::NoHome { .. }), "{told}");
    // A device that is not there is not made anew.
    std::fs::rename(node.path(1), node.path(1).with_extension("away")).unwrap();
    let there: Vec<DeviceConfig> = (0..2)
        .map(|index| DeviceConfig {
            path: node.path(index),
            missing: Missing::Refuse,
        })
        .collect();
    let told = Spread::open(&there, &node.config(&there)).err().unwrap();
    assert!(matches!(told, FabricError::Device(_)), "{told}");
}

#[test]
fn a_layer_of_two_devices_is_refused() {
    let node = Node::new(&[128 * MIB; 2]);
    let ids = node.ids();
    for (index, lease) in [(0, FIRST), (1, 6)] {
        let fabric = node.open_one(index);
        write_one(&fabric, 1, 3, lease);
        fabric.close().unwrap();
    }
    let told = node.copy(|_| Some(ids[0])).unwrap_err();
    assert!(matches!(told, FabricError::TwoOwners { .. }), "{told}");
}
