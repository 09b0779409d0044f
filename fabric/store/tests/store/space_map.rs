//! A damaged space map: everything it says can be read off the chunk table and the map pages, so it costs
//! nothing but time.

use fabric_store::format::Geometry;
use fabric_types::block::BLOCK_BYTES;
use rand::Rng;

use crate::history;
use crate::map_pages::MapPages;
use crate::rig::{Moment, Rig};
use crate::seeds::{self, for_each_seed};
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::{CrashKind, IoKind};

const KINDS: [CrashKind; 2] = [CrashKind::Process, CrashKind::Power];

/// The only shard of [`SMALL_DISK`].
fn geometry() -> Geometry {
    let units = (SMALL_DISK / BLOCK_BYTES as u64 - 256 - 1) / 256 * 256;
    Geometry {
        shard: 0,
        units: units as u32,
        base: 256,
    }
}

/// Places of the space map: both slots of its page, both of its directory.
fn pages() -> [[u64; 2]; 2] {
    let geo = geometry();
    [
        [0, 1].map(|slot| geo.offset(geo.bitmap_slot(0, slot))),
        [0, 1].map(|slot| geo.offset(geo.bitmap_dir_slot(0, slot))),
    ]
}

/// A store whose last checkpoint lies some writes back.
fn crashed(kind: CrashKind, seed: u64) -> Moment {
    let mut rng = seeds::rng(seed, 0x5b);
    let mut rig = Rig::new_small(seed);
    history::prologue(&mut rig);
    history::run(&mut rig, &mut rng, 40);
    rig.checkpoint();
    history::run(&mut rig, &mut rng, 40);
    rig.flush();
    rig.drain();
    rig.crash(kind, seed)
}

/// Both slots are damaged: whichever is the newest.
fn damaged(moment: &Moment, which: usize, seed: u64) -> Moment {
    let mut rng = seeds::rng(seed, 0x5c);
    let mut found = moment.clone();
    for offset in pages()[which] {
        let byte = offset + rng.random_range(0..BLOCK_BYTES as u64);
        found.disk.flip_bit(byte, rng.random_range(0..8));
    }
    found
}

#[test]
fn a_damaged_space_map_is_made_anew_and_the_report_says_so() {
    for_each_seed(4, |seed| {
        for kind in KINDS {
            let crashed = crashed(kind, seed);
            let whole = crashed.clone().recover(kind, seed);
            assert!(!whole.report.to_string().contains("space map"));
            for which in 0..2 {
                let mut rig = damaged(&crashed, which, seed).recover(kind, seed);
                assert_eq!(rig.report.rebuilt_shards, 1);
                let line = rig.report.to_string();
                assert!(line.contains("space map of 1 shard"), "{line}");
                // Exactly the units that are in use: `check_last_state` compares.
                rig.check_last_state();
                assert_eq!(rig.report.used_bytes, whole.report.used_bytes);
                let mut rig = rig.reopen(seed + 1);
                assert_eq!(rig.report.rebuilt_shards, 0);
                rig.check_last_state();
            }
        }
    });
}

#[test]
fn a_closed_store_with_a_damaged_space_map_opens() {
    for_each_seed(2, |seed| {
        let closed = crashed(CrashKind::Process, seed);
        let closed = closed.recover(CrashKind::Process, seed).close();
        for which in 0..2 {
            let mut rig = damaged(&closed, which, seed).open(seed).expect("it opens");
            assert_eq!((rig.report.clean_shards, rig.report.rebuilt_shards), (1, 1));
            rig.check_last_state();
        }
    });
}

#[test]
fn a_space_map_in_sectors_that_cannot_be_read_is_made_anew() {
    for_each_seed(2, |seed| {
        let crashed = crashed(CrashKind::Power, seed);
        for slots in pages() {
            let mut spoilt = crashed.clone();
            slots.into_iter().for_each(|at| spoilt.disk.spoil(at));
            let mut rig = spoilt.recover(CrashKind::Power, seed);
            assert_eq!(rig.report.rebuilt_shards, 1);
            rig.check_last_state();
        }
    });
}

#[test]
fn crash_at_any_write_of_a_space_map_rebuild_loses_nothing() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0x5d);
        for kind in KINDS {
            for which in 0..2 {
                let found = damaged(&crashed(kind, seed), which, seed);
                let before = found.disk.counts().of(IoKind::Write);
                let mut rig = found.clone().recover(kind, seed);
                let writes = rig.now.disk.counts().of(IoKind::Write) - before;
                let shown = rig.read_everything();
                assert!(writes > 2, "the map and its superblock are written");
                for nth in 1..=writes {
                    let mut dying = found.clone();
                    dying.disk.set_fuse(nth);
                    let Err((dead, _)) = dying.try_open(seed) else {
                        panic!("opening went on without power");
                    };
                    let second = KINDS[rng.random_range(0..2)];
                    let mut rig = dead
                        .crashed(second, seed + nth)
                        .open(seed + 1)
                        .expect("it opens after a crash in its recovery");
                    if kind == CrashKind::Power {
                        assert!(rig.read_everything() == shown);
                    }
                    rig.check_after_crash(CrashKind::Power);
                    history::run(&mut rig, &mut rng, 12);
                    rig.crash(second, seed + 2)
                        .recover(second, seed + 2)
                        .check_last_state();
                }
            }
        }
    });
}

#[test]
fn crash_at_any_write_after_a_space_map_rebuild_loses_nothing() {
    for_each_seed(2, |seed| {
        let mut rng = seeds::rng(seed, 0x5e);
        let found = damaged(&crashed(CrashKind::Power, seed), seed as usize % 2, seed);
        let mut rig = found.recover(CrashKind::Power, seed);
        rig.record_moments();
        history::run(&mut rig, &mut rng, 20);
        rig.checkpoint();
        history::run(&mut rig, &mut rng, 20);
        rig.idle();
        for (n, moment) in rig.take_moments().iter().enumerate() {
            for kind in KINDS {
                let seed = seed * 1000 + n as u64;
                moment
                    .crashed(kind, seed)
                    .recover(kind, seed)
                    .check_last_state();
            }
        }
    });
}

#[test]
fn a_space_map_is_not_made_anew_from_a_damaged_chunk_table() {
    for_each_seed(2, |seed| {
        let closed = crashed(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed)
            .close();
        let found = damaged(&closed, 0, seed);
        let pages = MapPages::of(&found.disk);
        let (mut refused, mut opened, mut lost) = (0, 0, 0);
        for block in found.disk.written_blocks() {
            let offset = block * BLOCK_BYTES as u64;
            let geo = geometry();
            let fixed =
                offset < geo.offset(geo.first_free()) || offset >= geo.offset(geo.end_free());
            if fixed {
                continue;
            }
            let mut twice = found.clone();
            twice.disk.flip_bit(offset, 3);
            match twice.open(seed) {
                Ok(rig) => {
                    // Data, what nothing refers to, or a map page, whose blocks are bad then.
                    let is_leaf = pages.leaves.iter().any(|leaf| leaf.offset == offset);
                    assert_eq!(rig.report.lost_leaves, u32::from(is_leaf));
                    lost += rig.report.lost_leaves;
                    opened += u32::from(rig.report.rebuilt_shards == 1);
                }
                Err(error) => {
                    assert!(error.contains("table"), "{error}");
                    refused += 1;
                }
            }
        }
        assert!(
            refused >= 3 && opened > 3 && lost as usize == pages.leaves.len(),
            "{refused} refused, {opened} opened, {lost} map pages lost"
        );
    });
}

/// A device that gets two shards, whose space maps have many pages.
const TWO_SHARDS_DISK: u64 = 9 << 30;

#[test]
fn every_page_of_a_damaged_space_map_is_written_anew() {
    for_each_seed(1, |seed| {
        let mut rng = seeds::rng(seed, 0x5f);
        let mut rig = Rig::create(TWO_SHARDS_DISK, 2, small_params(), seed);
        history::prologue(&mut rig);
        for life in 0..6 {
            // Each start goes on elsewhere on the device.
            history::run(&mut rig, &mut rng, 40);
            rig = rig.reopen(seed + life);
        }
        let mut closed = rig.close();
        let units = (TWO_SHARDS_DISK / BLOCK_BYTES as u64 - 256 - 1) / 2 / 256 * 256;
        let geo = Geometry {
            shard: 0,
            units: units as u32,
            base: 256,
        };
        let written = closed.disk.written_blocks();
        let mut flipped = 0;
        // The first page changes at every start.
        for page in 1..geo.bitmap_pages() {
            for slot in 0..2 {
                let offset = geo.offset(geo.bitmap_slot(page, slot));
                if written
                    .binary_search(&(offset / BLOCK_BYTES as u64))
                    .is_ok()
                {
                    closed.disk.flip_bit(offset, 1);
                    flipped += 1;
                }
            }
        }
        assert!(flipped > 1, "{flipped} pages");
        let mut rig = closed.open(seed).expect("it opens");
        assert_eq!(rig.report.rebuilt_shards, 1, "{}", rig.report);
        rig.check_last_state();
        let mut rig = rig.reopen(seed);
        assert_eq!(rig.report.rebuilt_shards, 0, "{}", rig.report);
        rig.check_last_state();
    });
}
