//! The cleaner at work behind guests.

use std::time::{Duration, Instant};

use fabric::Fabric;
use fabric_store::metrics::StoreMetrics;
use fabric_types::block::BLOCK_BYTES;

use super::rig::{Guest, MIB, Rig};

/// Blocks of the volume, and a number without a common divisor.
const BLOCKS: u64 = 16 * MIB / BLOCK_BYTES as u64;
const STRIDE: u64 = 1237;
/// Time within which a few MiB are in order, however slow the machine.
const WAIT_MAX: Duration = Duration::from_secs(60);

fn sum(fabric: &Fabric, figure: fn(&StoreMetrics) -> u64) -> u64 {
    let devices = fabric.devices();
    devices.iter().flat_map(|d| &d.shards).map(figure).sum()
}

fn content(block: u64) -> Vec<u8> {
    let word = (block + 1).to_le_bytes();
    word.repeat(BLOCK_BYTES / word.len())
}

/// Writes every block, in an order that leaves none beside its neighbour.
fn scatter(guest: &mut Guest) {
    for nth in 0..BLOCKS {
        let block = nth * STRIDE % BLOCKS;
        let offset = block * BLOCK_BYTES as u64;
        guest.write(offset, &content(block)).unwrap();
    }
}

fn check(guest: &mut Guest) {
    for block in 0..BLOCKS {
        let found = guest.read_vec(block * BLOCK_BYTES as u64, BLOCK_BYTES);
        assert!(found == content(block), "block {block} changed");
    }
}

#[test]
fn scattered_data_are_put_in_order_behind_the_guest() {
    let rig = Rig::new(256 * MIB);
    let mut config = rig.config();
    config.clean.start_after_seconds = 0;
    let fabric = crate::single_node::open(config);
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    scatter(&mut guest);
    let start = Instant::now();
    while sum(&fabric, |m| m.leaves_to_clean) > 0 {
        assert!(start.elapsed() < WAIT_MAX, "{:?}", fabric.devices());
        std::thread::sleep(Duration::from_millis(50));
    }
    // Not all, if it began while the guest was writing: what came last lay in order then.
    assert!(sum(&fabric, |m| m.moved_bytes) >= 8 * MIB);
    check(&mut guest);
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);
    let fabric = rig.open();
    assert_eq!(fabric.devices()[0].report.clean_shards, 1);
    check(&mut Guest::open(&fabric, 1, 2, 16 * MIB));
}

#[test]
fn a_cleaner_that_is_switched_off_moves_nothing() {
    let rig = Rig::new(256 * MIB);
    let mut config = rig.config();
    config.clean.enabled = false;
    let fabric = crate::single_node::open(config);
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    scatter(&mut guest);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(sum(&fabric, |m| m.moved_bytes), 0);
    check(&mut guest);
}
