//! The cleaner puts scattered data in order, changes nothing that can be seen, and comes to an end.

use fabric_store::api::{CoreParams, StoreCore, StoreError, StoreOp};
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::Version;
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::history;
use crate::model::{CHILD, OTHER, PLAIN, Range, Spot};
use crate::rig::Rig;
use crate::seeds::{self, for_each_seed};
use crate::shard::small_params;
use crate::sim_disk::{CrashKind, IoKind};

/// A disk of 32 regions, a few of which are fixed places and log windows.
const DISK: u64 = 33 << 20;
/// One of 200 regions.
const LARGER_DISK: u64 = 201 << 20;
/// Blocks of a chunk, and of a map page.
const CHUNK: u32 = 1024;
const LEAF: u32 = 256;
/// Steps within which the cleaner is done with a disk.
const STEPS_MAX: usize = 20_000;
/// Device reads for a map page's data that are left as they are, with up to 15 breaks, and on average: what
/// lies in one piece takes eight into unaligned memory.
const READS_MAX: u64 = 24;
const READS_MEAN: u64 = 4;

fn params() -> CoreParams {
    CoreParams {
        leaf_cache_bytes: 1 << 20,
        ..small_params()
    }
}

/// Chunks written in order, and then block by block in random order.
fn scattered(rig: &mut Rig, rng: &mut ChaCha8Rng, chunks: u32) {
    for chunk in 0..chunks {
        for leaf in 0..4 {
            rig.write(Range::blocks(PLAIN, chunk, leaf * LEAF, LEAF), false);
        }
        rig.drain();
    }
    let mut blocks: Vec<u32> = (0..chunks * CHUNK).collect();
    blocks.shuffle(rng);
    for block in blocks {
        let range = Range::blocks(PLAIN, block / CHUNK, block % CHUNK, 1);
        rig.write(range, false);
        while rig.in_flight() > 30 {
            rig.step();
        }
    }
    rig.idle();
}

/// Steps until the cleaner has nothing to do for a while.
fn clean_until_idle(rig: &mut Rig) {
    let mut rests = 0;
    for _ in 0..STEPS_MAX {
        rests = if rig.clean_step() { rests + 1 } else { 0 };
        rig.drain();
        if rests == 4 {
            return;
        }
    }
    panic!("the cleaner comes to no end: {:?}", rig.metrics(0));
}

/// Device reads for each map page's data, one after the other.
fn reads_by_leaf(rig: &mut Rig, chunks: u32) -> Vec<u64> {
    let mut reads = Vec::new();
    for leaf in 0..chunks * 4 {
        // A first read brings the map page in.
        for warm in [true, false] {
            let before = rig.metrics(0).device_reads;
            rig.read(Range::blocks(PLAIN, leaf / 4, leaf % 4 * LEAF, LEAF));
            rig.drain();
            if !warm {
                reads.push(rig.metrics(0).device_reads - before);
            }
        }
    }
    reads
}

/// Scatters that many chunks, cleans, and says how often the data were moved.
fn clean_and_check(disk: u64, seed: u64, chunks: u32) -> f64 {
    let mut rng = seeds::rng(seed, 0x70);
    let mut rig = Rig::create(disk, 1, params(), seed);
    scattered(&mut rig, &mut rng, chunks);
    clean_until_idle_and_check(&mut rig, chunks);
    let stored = u64::from(chunks * CHUNK) * BLOCK_BYTES as u64;
    rig.metrics(0).moved_bytes as f64 / stored as f64
}

fn clean_until_idle_and_check(rig: &mut Rig, chunks: u32) {
    let before = reads_by_leaf(rig, chunks);
    assert!(before.iter().all(|&n| n > 16), "not scattered: {before:?}");
    clean_until_idle(rig);
    let after = reads_by_leaf(rig, chunks);
    let mean = after.iter().sum::<u64>() / after.len() as u64;
    let in_order = after.iter().all(|&n| n <= READS_MAX) && mean <= READS_MEAN;
    assert!(in_order, "still in pieces: {after:?}");
    rig.check_last_state();
}

#[test]
fn cleaner_redoes_wasted_work_once_guests_are_idle() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0x79);
        let mut rig = Rig::create(LARGER_DISK, 1, params(), seed);
        rig.now.cleaning = true;
        for _ in 0..2 {
            scattered(&mut rig, &mut rng, 25);
        }
        rig.now.cleaning = false;
        clean_until_idle(&mut rig);
        let reads = reads_by_leaf(&mut rig, 25);
        assert!(
            reads.iter().all(|&n| n <= READS_MAX),
            "still in pieces: {reads:?}"
        );
        rig.check_last_state();
    });
}

#[test]
fn scattered_data_come_to_lie_side_by_side() {
    for_each_seed(2, |seed| {
        for (chunks, moved_max) in [(2, 1.2), (3, 1.3), (4, 1.6)] {
            let moved = clean_and_check(DISK, seed, chunks);
            assert!(
                moved < moved_max,
                "{chunks} chunks were moved {moved:.2} times"
            );
        }
    });
}

#[test]
fn a_store_that_is_nine_tenths_full_is_put_in_order_too() {
    for_each_seed(1, |seed| {
        for chunks in [38, 45] {
            let moved = clean_and_check(LARGER_DISK, seed, chunks);
            assert!(moved < 2.0, "{chunks} chunks were moved {moved:.2} times");
        }
    });
}

#[test]
fn a_clean_store_is_left_alone() {
    for_each_seed(2, |seed| {
        let mut rng = seeds::rng(seed, 0x71);
        let mut rig = Rig::create(DISK, 1, params(), seed);
        scattered(&mut rig, &mut rng, 3);
        clean_until_idle(&mut rig);
        rig.idle();
        let (moved, disk) = (rig.metrics(0).moved_bytes, rig.now.disk.counts().clone());
        for _ in 0..100 {
            assert!(rig.clean_step(), "nothing changed");
            rig.drain();
        }
        assert_eq!(rig.metrics(0).moved_bytes, moved);
        for kind in [IoKind::Read, IoKind::Write, IoKind::Flush] {
            assert_eq!(rig.now.disk.counts().of(kind), disk.of(kind), "{kind:?}");
        }
    });
}

#[test]
fn data_written_in_order_are_not_moved() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::create(DISK, 1, params(), seed);
        for _ in 0..3 {
            for leaf in 0..16 {
                rig.write(Range::blocks(PLAIN, leaf / 4, leaf % 4 * LEAF, LEAF), false);
                rig.drain();
            }
            clean_until_idle(&mut rig);
        }
        assert_eq!(rig.metrics(0).moved_bytes, 0);
    });
}

#[test]
fn what_is_moved_is_bounded_by_what_was_written() {
    for_each_seed(2, |seed| {
        let mut rng = seeds::rng(seed, 0x72);
        let mut rig = Rig::create(DISK, 1, params(), seed);
        scattered(&mut rig, &mut rng, 3);
        for _ in 0..40 {
            // Few blocks of each map page, always as many as it takes to put it in pieces.
            for leaf in 0..12 {
                for _ in 0..9 {
                    let block = leaf % 4 * LEAF + rng.random_range(0..LEAF);
                    rig.write(Range::blocks(PLAIN, leaf / 4, block, 1), false);
                }
                rig.drain();
            }
            clean_until_idle(&mut rig);
            let metrics = rig.metrics(0);
            assert!(
                metrics.moved_bytes <= 4 * metrics.write_op_bytes,
                "{metrics:?}"
            );
        }
        rig.check_last_state();
    });
}

#[test]
fn a_move_changes_no_version() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0x73);
        let mut rig = Rig::create(DISK, 1, params(), seed);
        scattered(&mut rig, &mut rng, 2);
        let spots: Vec<(u32, u32)> = (0..20)
            .map(|_| (rng.random_range(0..2), rng.random_range(0..CHUNK)))
            .collect();
        let before: Vec<u64> = spots.iter().map(|&s| version_of(&mut rig, s)).collect();
        clean_until_idle(&mut rig);
        assert!(rig.metrics(0).moved_bytes > 0);
        let after: Vec<u64> = spots.iter().map(|&s| version_of(&mut rig, s)).collect();
        assert_eq!(after, before);
        let kind = [CrashKind::Power, CrashKind::Process][(seed % 2) as usize];
        let mut rig = rig.crash(kind, seed).recover(kind, seed);
        let replayed: Vec<u64> = spots.iter().map(|&s| version_of(&mut rig, s)).collect();
        assert_eq!(replayed, before);
    });
}

/// The version of a block, as a write that is older than everything hears it.
fn version_of(rig: &mut Rig, (chunk, block): (u32, u32)) -> u64 {
    let data = vec![0u8; BLOCK_BYTES];
    let iovecs = [libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    }];
    let op = StoreOp::Write {
        layers: PLAIN.layers(),
        chunk,
        offset: block * BLOCK_BYTES as u32,
        iovecs: &iovecs,
        version: Version(0),
        fua: false,
        urgent: false,
    };
    match rig.run_raw(op) {
        Err(StoreError::Stale { newest }) => newest.0,
        other => panic!("a write of version 0 was answered {other:?}"),
    }
}

#[test]
fn a_bad_block_stays_where_it_is_and_is_reported() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0x74);
        let mut rig = Rig::create(DISK, 1, params(), seed);
        scattered(&mut rig, &mut rng, 2);
        let spot = Spot {
            view: PLAIN,
            chunk: rng.random_range(0..2),
            block: rng.random_range(0..CHUNK),
        };
        let at = rig.device_offset(spot);
        rig.now
            .disk
            .flip_bit(at + rng.random_range(0..BLOCK_BYTES as u64), 3);
        clean_until_idle(&mut rig);
        let found: Vec<_> = std::iter::from_fn(|| rig.cores()[0].poll_finding()).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].chunk, found[0].block), (spot.chunk, spot.block));
        assert_eq!(found[0].device_offset, at);
        let error = rig
            .read_raw(spot, 1)
            .expect_err("never rewritten with a sum that fits");
        assert!(
            matches!(error, StoreError::Corrupt { device_offset, .. } if device_offset == at),
            "{error:?}"
        );
        rig.write(Range::blocks(PLAIN, spot.chunk, spot.block, 1), false);
        rig.drain();
        clean_until_idle(&mut rig);
        rig.check_last_state();
    });
}

#[test]
fn guests_that_write_what_is_being_moved_win() {
    for_each_seed(6, |seed| {
        let mut rng = seeds::rng(seed, 0x75);
        let mut rig = Rig::create(DISK, 1, params(), seed);
        scattered(&mut rig, &mut rng, 1);
        rig.now.cleaning = true;
        for round in 0..12 {
            for _ in 0..150 {
                let block = rng.random_range(0..2 * LEAF);
                let blocks = rng.random_range(1..=4);
                let range = Range::blocks(PLAIN, 0, block, blocks);
                match rng.random_range(0..10) {
                    0 => rig.zero(range, false),
                    1..4 => rig.read(range),
                    _ => rig.write(range, false),
                };
                for _ in 0..rng.random_range(0..6) {
                    rig.step();
                }
            }
            if round % 4 == 3 {
                let kind = [CrashKind::Power, CrashKind::Process][(seed % 2) as usize];
                rig = rig.crash(kind, seed).recover(kind, seed + round);
            }
            rig.drain();
            rig.check_last_state();
        }
    });
}

#[test]
fn a_crash_at_any_write_of_the_cleaner_loses_nothing() {
    for_each_seed(2, |seed| {
        let mut rng = seeds::rng(seed, 0x76);
        let mut rig = Rig::create(DISK, 1, params(), seed);
        // So full that room must be made, and with little in each place beside it.
        scattered(&mut rig, &mut rng, 4);
        rig.record_moments();
        clean_until_idle(&mut rig);
        assert!(rig.metrics(0).moved_bytes > 0);
        let moments = rig.take_moments();
        assert!(moments.len() > 30, "only {} writes", moments.len());
        // Each takes a while: some of them, others for each seed.
        for moment in moments.iter().skip(seed as usize % 4).step_by(4) {
            for kind in [CrashKind::Process, CrashKind::Power] {
                let mut rig = moment.crashed(kind, seed).recover(kind, seed);
                rig.check_last_state();
            }
        }
    });
}

#[test]
fn every_write_of_a_small_move_may_be_the_last() {
    for_each_seed(6, |seed| {
        let mut rng = seeds::rng(seed, 0x77);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        rig.now.cleaning = false;
        for view in [PLAIN, OTHER, CHILD] {
            for _ in 0..80 {
                let range = Range::blocks(view, 0, rng.random_range(0..60), 1);
                rig.write(range, false);
                rig.drain();
            }
        }
        rig.record_moments();
        rig.now.cleaning = true;
        for _ in 0..4 {
            clean_until_idle(&mut rig);
            history::run(&mut rig, &mut rng, 6);
        }
        rig.drain();
        assert!(rig.metrics(0).moved_bytes > 0, "{:?}", rig.metrics(0));
        for moment in rig.take_moments() {
            for kind in [CrashKind::Process, CrashKind::Power] {
                let mut rig = moment.crashed(kind, seed).recover(kind, seed);
                rig.check_last_state();
            }
        }
    });
}

#[test]
fn a_full_store_is_not_made_fuller() {
    for_each_seed(3, |seed| {
        let stored = [false, true].map(|cleaning| fill(seed, cleaning));
        let lost = stored[0].abs_diff(stored[1]);
        assert!(
            lost <= stored[0] / 50,
            "with and without the cleaner: {stored:?}"
        );
    });
}

/// Overwrites and adds blocks until nothing fits any more, then discards; returns how many blocks were
/// stored.
fn fill(seed: u64, cleaning: bool) -> u32 {
    let mut rng = seeds::rng(seed, 0x78);
    let mut rig = Rig::new_small(seed);
    rig.tolerate = |error| matches!(error, StoreError::NoSpace { .. });
    rig.keep_done();
    rig.now.cleaning = cleaning;
    let mut stored = 0;
    for block in 0..4 * CHUNK {
        rig.write(Range::blocks(PLAIN, block / CHUNK, block % CHUNK, 1), false);
        let again = rng.random_range(0..=block);
        rig.write(Range::blocks(PLAIN, again / CHUNK, again % CHUNK, 1), false);
        rig.drain();
        if rig.take_done().iter().any(|done| done.result.is_err()) {
            break;
        }
        stored += 1;
    }
    assert!(stored < 4 * CHUNK - 1, "the disk is larger than that");
    rig.tolerate = |_| false;
    rig.zero(Range::blocks(PLAIN, 0, 0, CHUNK), false);
    rig.drain();
    rig.checkpoint();
    rig.drain();
    rig.write(Range::blocks(PLAIN, 0, 0, LEAF), false);
    rig.drain();
    rig.check_space();
    stored
}
