//! Memory stays within its bounds however much is stored.

use fabric_store::api::{CoreParams, StoreCore};
use rand::Rng;

use crate::model::{PLAIN, Range};
use crate::rig::Rig;
use crate::seeds::{self, for_each_seed};
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::CrashKind;

/// Map pages that the test needs: one for each MiB that it touches.
const LEAVES: u32 = 600;
/// Map pages of a chunk.
const CHUNK_LEAVES: u32 = 4;
/// Blocks that a map page maps.
const LEAF_BLOCKS: u32 = 256;

fn place(leaf: u32) -> Range {
    Range::blocks(
        PLAIN,
        leaf / CHUNK_LEAVES,
        leaf % CHUNK_LEAVES * LEAF_BLOCKS + 7,
        1,
    )
}

fn assert_bounded(rig: &Rig) {
    let (ram, params) = (rig.metrics(0).ram, small_params());
    // The cache may hold its pages' index besides.
    let bound = params.leaf_cache_bytes + params.leaf_cache_bytes / 8;
    assert!(
        ram.leaf_cache <= bound,
        "map page cache above its bound: {ram:?}"
    );
    assert!(
        ram.leaves <= ram.leaf_cache && ram.map() > 0,
        "more held than the bound: {ram:?}"
    );
    assert!(
        ram.buffers <= params.buffer_bytes,
        "buffers above their bound: {ram:?}"
    );
    assert!(
        ram.total() < 2 * (params.leaf_cache_bytes + params.buffer_bytes),
        "{ram:?}"
    );
}

#[test]
fn more_map_pages_than_the_cache_holds_cost_reads_not_memory() {
    for_each_seed(1, |seed| {
        let held = small_params().leaf_cache_bytes / 4096;
        assert!(
            u64::from(LEAVES) > 4 * held,
            "the cache must be too small for the test"
        );
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        for leaf in 0..LEAVES {
            rig.write(place(leaf), false);
            while rig.in_flight() > 20 {
                rig.step();
                assert_bounded(&rig);
            }
        }
        rig.drain();
        assert_bounded(&rig);
        rig.check_last_state();
        assert!(rig.metrics(0).leaf_misses > 0, "{:?}", rig.metrics(0));
        let mut rig = rig.reopen(seed);
        for leaf in (0..LEAVES).rev().step_by(3) {
            rig.write(place(leaf), false);
            rig.read(place(LEAVES - 1 - leaf));
            while rig.in_flight() > 20 {
                rig.step();
                assert_bounded(&rig);
            }
        }
        rig.drain();
        rig.check_last_state();
        assert_bounded(&rig);
    });
}

#[test]
fn recovery_gives_back_the_memory_that_the_log_wanted() {
    for_each_seed(1, |seed| {
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        for leaf in 0..LEAVES {
            rig.write(place(leaf), false);
            while rig.in_flight() > 20 {
                rig.step();
            }
        }
        rig.drain();
        let mut rig = rig
            .crash(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed);
        assert_bounded(&rig);
        rig.check_last_state();
        for leaf in (0..LEAVES).step_by(5) {
            rig.write(place(leaf), false);
        }
        rig.drain();
        rig.check_last_state();
        assert_bounded(&rig);
    });
}

/// Operations of all kinds on far more map pages than there is room for, so many at once that they wait for
/// each other's pages, buffers and space.
#[test]
fn more_operations_at_once_than_map_pages_fit_all_end() {
    for_each_seed(2, |seed| {
        let mut rng = seeds::rng(seed, 0x3e);
        let params = CoreParams {
            ops_max: 512,
            ..small_params()
        };
        let mut rig = Rig::create(SMALL_DISK, 1, params, seed);
        for round in 0..12 {
            for _ in 0..700 {
                let leaf = rng.random_range(0..LEAVES);
                let mut range = place(leaf);
                // From a sector of its last block into the next map page: two parts with old content each.
                if leaf % CHUNK_LEAVES < 3 && rng.random_bool(0.3) {
                    range =
                        Range::blocks(PLAIN, range.chunk, (leaf % CHUNK_LEAVES + 1) * 256 - 1, 2);
                }
                if rng.random_bool(0.6) {
                    range.sector += 1;
                    range.sectors -= 2;
                }
                match rng.random_range(0..20) {
                    0..8 => drop(rig.write(range, false)),
                    8 => rig.checkpoint(),
                    _ => drop(rig.read(range)),
                }
                if rng.random_bool(0.05) {
                    rig.step();
                }
            }
            rig.checkpoint();
            rig.drain();
            if round % 4 == 3 {
                rig.check_last_state();
            }
        }
    });
}

#[test]
fn a_dropped_layer_leaves_nothing_behind_a_restart() {
    for_each_seed(3, |seed| {
        for discard_first in [false, true] {
            for clean in [false, true] {
                let mut rig = Rig::new_small(seed);
                rig.raise_fence(PLAIN);
                rig.drain();
                for chunk in 0..40 {
                    rig.write(Range::blocks(PLAIN, chunk, 0, 2), false);
                }
                rig.drain();
                if discard_first {
                    // The record of a chunk without data remembers the version of the discard.
                    for chunk in 0..20 {
                        rig.zero(Range::blocks(PLAIN, chunk, 0, 2), false);
                    }
                    rig.drain();
                    rig.checkpoint();
                }
                rig.drop_layer(PLAIN);
                rig = if clean {
                    rig.reopen(seed)
                } else {
                    rig.checkpoint();
                    rig.drain();
                    rig.crash(CrashKind::Process, seed)
                        .recover(CrashKind::Process, seed)
                };
                // Opening writes a checkpoint; what that unmaps goes with the next.
                rig.checkpoint();
                rig.drain();
                assert_eq!(rig.metrics(0).chunks, 0, "{discard_first} {clean}");
                rig.check_last_state();
            }
        }
    });
}

#[test]
fn operations_beyond_the_table_are_told_to_come_again() {
    for_each_seed(1, |seed| {
        let mut rig = Rig::new_small(seed);
        for round in 0..4 * small_params().ops_max {
            // `submit` turns the rig while the store says that it is busy.
            rig.write(Range::blocks(PLAIN, 0, round % 64, 1), false);
            assert!(rig.cores()[0].in_flight() <= small_params().ops_max as usize);
        }
        rig.drain();
        rig.check_last_state();
    });
}
