//! A full store refuses writes, keeps what it has, and works again once data are discarded.

use fabric_store::api::{CoreParams, StoreCore, StoreError};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::model::{OTHER, PLAIN, Range, View};
use crate::rig::Rig;
use crate::seeds::{self, for_each_seed};
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::CrashKind;

/// Blocks per write.
const STEP: u32 = 4;
/// Blocks of a chunk.
const CHUNK_BLOCKS: u32 = 1024;
/// Blocks that the simulated device can hold at most.
const DEVICE_BLOCKS: u32 = (SMALL_DISK / 4096) as u32;

fn no_space(error: &StoreError) -> bool {
    matches!(error, StoreError::NoSpace { .. })
}

fn none(_: &StoreError) -> bool {
    false
}

fn range_at(view: View, at: u32) -> Range {
    Range::blocks(view, at / CHUNK_BLOCKS, at % CHUNK_BLOCKS, STEP)
}

/// Writes one after the other from block `from` on until one is refused, or `until`; returns the end of what
/// fitted.
fn fill(rig: &mut Rig, view: View, from: u32, until: u32) -> u32 {
    rig.tolerate = no_space;
    rig.keep_done();
    let mut at = from;
    while at < until {
        rig.write(range_at(view, at), false);
        rig.drain();
        if rig.take_done().iter().any(|done| done.result.is_err()) {
            break;
        }
        at += STEP;
    }
    rig.tolerate = none;
    at
}

fn discard(rig: &mut Rig, view: View, from: u32, until: u32) {
    for at in (from..until).step_by(STEP as usize) {
        rig.zero(range_at(view, at), false);
        rig.drain();
    }
}

fn full_store(seed: u64) -> (Rig, u32) {
    let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
    let end = fill(&mut rig, PLAIN, 0, DEVICE_BLOCKS);
    assert!(end < DEVICE_BLOCKS, "the store holds more than the device");
    assert!(
        end > DEVICE_BLOCKS / 2,
        "full with {end} of {DEVICE_BLOCKS} blocks"
    );
    (rig, end)
}

#[test]
fn a_full_store_keeps_what_it_acknowledged() {
    for_each_seed(2, |seed| {
        let (mut rig, _) = full_store(seed);
        rig.check_live();
        rig.flush();
        rig.drain();
        rig.check_live();
    });
}

#[test]
fn it_is_told_as_full_until_there_is_room_worth_telling() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        let is_full = |rig: &mut Rig| rig.cores()[0].space().is_full;
        let end = fill(&mut rig, PLAIN, 0, DEVICE_BLOCKS / 4);
        assert!(!is_full(&mut rig), "a quarter is in use");
        let end = fill(&mut rig, PLAIN, end, DEVICE_BLOCKS);
        assert!(is_full(&mut rig));
        assert!(rig.metrics(0).refused_for_room > 0);
        discard(&mut rig, PLAIN, 0, STEP);
        assert!(is_full(&mut rig), "a few blocks are no news");
        discard(&mut rig, PLAIN, STEP, end / 16);
        assert!(!is_full(&mut rig));
        fill(&mut rig, PLAIN, 0, STEP);
        assert!(!is_full(&mut rig));
    });
}

#[test]
fn what_the_host_has_left_is_not_for_writes() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        let end = fill(&mut rig, PLAIN, 0, DEVICE_BLOCKS / 4);
        rig.cores()[0].leave_host_space(true);
        assert!(rig.cores()[0].space().is_full);
        assert_eq!(fill(&mut rig, PLAIN, end, end + STEP), end, "it is refused");
        discard(&mut rig, PLAIN, 0, end / 2 / STEP * STEP);
        rig.flush();
        rig.drain();
        rig.check_live();
        rig.cores()[0].leave_host_space(false);
        assert!(!rig.cores()[0].space().is_full);
        assert_eq!(fill(&mut rig, PLAIN, end, end + STEP), end + STEP);
        rig.check_live();
    });
}

#[test]
fn discards_on_a_full_store_succeed_and_make_room() {
    for_each_seed(2, |seed| {
        let (mut rig, end) = full_store(seed);
        let half = end / 2 / STEP * STEP;
        discard(&mut rig, PLAIN, 0, half);
        rig.check_live();
        // Map pages of the new place need some of the room.
        let refilled = fill(&mut rig, OTHER, 0, half * 9 / 10);
        assert!(
            refilled >= half * 9 / 10,
            "{refilled} of {half} discarded blocks can be used again"
        );
        rig.check_live();
    });
}

#[test]
fn filling_and_discarding_again_and_again_loses_no_space() {
    for_each_seed(1, |seed| {
        let (mut rig, end) = full_store(seed);
        for _ in 0..4 {
            discard(&mut rig, PLAIN, 0, end + STEP);
            let again = fill(&mut rig, PLAIN, 0, DEVICE_BLOCKS);
            assert!(
                again + 64 >= end,
                "only {again} blocks fit after {end} were discarded"
            );
        }
        rig.check_live();
    });
}

#[test]
fn overwrites_on_a_full_store_are_done_or_refused_never_torn() {
    for_each_seed(2, |seed| {
        let (mut rig, end) = full_store(seed);
        rig.tolerate = no_space;
        for at in (0..end.min(400)).step_by(STEP as usize) {
            rig.write(range_at(PLAIN, at), false);
            rig.drain();
        }
        rig.check_live();
    });
}

/// Ends an operation; whether it was refused for want of room, with nothing stored.
fn is_refused_whole(rig: &mut Rig) -> bool {
    rig.drain();
    match rig.take_done().pop().expect("it has ended").result {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error, StoreError::NoSpace { untouched: true });
            true
        }
    }
}

#[test]
fn urgent_writes_use_a_part_of_the_reserve_and_plain_ones_none() {
    for_each_seed(4, |seed| {
        let (mut rig, end) = full_store(seed);
        rig.tolerate = no_space;
        rig.take_done();
        let mut urgent = 0;
        loop {
            rig.write(range_at(PLAIN, end), false);
            assert!(is_refused_whole(&mut rig), "{urgent} urgent ones fitted");
            rig.write_urgently(range_at(OTHER, urgent * STEP));
            if is_refused_whole(&mut rig) {
                break;
            }
            urgent += 1;
        }
        assert!(urgent > 0, "urgent writes find no room");
        rig.tolerate = none;
        rig.check_live();
        // What is left is enough for the way out.
        discard(&mut rig, PLAIN, 0, end / 2 / STEP * STEP);
        rig.write(range_at(PLAIN, 0), false);
        rig.drain();
        rig.check_live();
        let mut rig = rig
            .crash(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed);
        rig.check_last_state();
    });
}

#[test]
fn a_write_that_does_not_fit_as_a_whole_stores_nothing() {
    const LONG: u32 = 200;
    for_each_seed(4, |seed| {
        let (mut rig, end) = full_store(seed);
        // Room for half of it.
        discard(&mut rig, PLAIN, 0, LONG / 2);
        rig.tolerate = no_space;
        rig.take_done();
        let chunk = end / CHUNK_BLOCKS + 1;
        for block in [0, 256 - LONG / 2] {
            rig.write(Range::blocks(PLAIN, chunk, block, LONG), false);
            assert!(is_refused_whole(&mut rig));
        }
        rig.check_live();
        rig.write(Range::blocks(PLAIN, chunk, 0, LONG / 8), false);
        assert!(!is_refused_whole(&mut rig), "that fits");
        rig.check_live();
    });
}

/// Sectors from the middle of a block, and those around a block's end.
fn partial_range(rng: &mut ChaCha8Rng, blocks: u32) -> Range {
    let block = rng.random_range(0..blocks - 2);
    let sector = block % CHUNK_BLOCKS * 8 + rng.random_range(1..8);
    Range {
        view: PLAIN,
        chunk: block / CHUNK_BLOCKS,
        sector,
        sectors: rng.random_range(1..12).min(CHUNK_BLOCKS * 8 - sector),
    }
}

#[test]
fn partial_writes_on_a_full_store_end_and_discards_still_work() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xf2);
        let (mut rig, end) = full_store(seed);
        rig.tolerate = no_space;
        for _ in 0..300 {
            let range = partial_range(&mut rng, end);
            match rng.random_range(0..8) {
                0 => rig.read(range),
                _ => rig.write(range, false),
            };
            if rng.random_bool(0.1) {
                rig.drain();
            }
        }
        rig.drain();
        rig.check_live();
        rig.tolerate = none;
        discard(&mut rig, PLAIN, 0, end / 2 / STEP * STEP);
        for _ in 0..100 {
            let range = partial_range(&mut rng, end / 2);
            rig.write(range, false);
        }
        rig.drain();
        rig.check_live();
        rig.crash(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed)
            .check_last_state();
    });
}

/// Single blocks in map pages of their own, hundreds at a time: each costs a map page beside itself.
#[test]
fn deep_scattered_writes_and_discards_never_starve_a_checkpoint() {
    const LEAVES: u32 = 1400;
    let place = |leaf: u32| Range::blocks(PLAIN, leaf / 4, leaf % 4 * 256 + 9, 1);
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xf3);
        let params = CoreParams {
            ops_max: 512,
            leaf_cache_bytes: 8 << 20,
            ..small_params()
        };
        let mut rig = Rig::create(SMALL_DISK, 1, params, seed);
        for _ in 0..3 {
            rig.tolerate = no_space;
            for leaf in 0..LEAVES {
                rig.write(place(leaf), false);
                if rng.random_bool(0.02) {
                    rig.step();
                }
            }
            rig.drain();
            rig.tolerate = none;
            for leaf in 0..LEAVES {
                let mut range = place(leaf);
                // Parts of a block are written anew, the rest is freed.
                range.sectors -= u32::from(rng.random_bool(0.2));
                rig.zero(range, false);
            }
            rig.drain();
            rig.check_live();
            for leaf in 0..LEAVES {
                rig.zero(place(leaf), false);
            }
            rig.drain();
            rig.check_last_state();
        }
    });
}

#[test]
fn a_full_store_opens_again_and_takes_discards() {
    for_each_seed(2, |seed| {
        for crash in [None, Some(CrashKind::Process), Some(CrashKind::Power)] {
            let (mut rig, end) = full_store(seed);
            rig.flush();
            rig.drain();
            let mut rig = match crash {
                None => rig.reopen(seed),
                Some(kind) => rig.crash(kind, seed).recover(kind, seed),
            };
            rig.check_live();
            discard(&mut rig, PLAIN, 0, end / 2 / STEP * STEP);
            let refilled = fill(&mut rig, OTHER, 0, end / 4);
            assert!(
                refilled >= end / 4,
                "{refilled} blocks fit after half of {end} were discarded"
            );
            rig.check_live();
        }
    });
}

#[test]
fn dropping_a_layer_of_a_full_store_makes_room() {
    for_each_seed(1, |seed| {
        let (mut rig, end) = full_store(seed);
        rig.drop_layer(PLAIN);
        rig.check_live();
        let refilled = fill(&mut rig, OTHER, 0, end / 2);
        assert!(
            refilled >= end / 2,
            "{refilled} blocks fit after a layer of {end} was dropped"
        );
        rig.check_live();
    });
}

#[test]
fn freed_space_shows_at_once_and_is_reusable_soon_when_idle() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        let empty = rig.cores()[0].space().used_bytes;
        fill(&mut rig, PLAIN, 0, 1024);
        let filled = rig.cores()[0].space().used_bytes;
        assert!(filled >= empty + (1024 << 12), "{filled}");
        discard(&mut rig, PLAIN, 0, 1024);
        let used = rig.cores()[0].space().used_bytes;
        assert!(used <= empty + (32 << 12), "{used} of {empty}");
        assert!(rig.metrics(0).quarantined_units > 0);
        // Two seconds at the engine's pace, and the checkpoint.
        for _ in 0..12 {
            rig.idle();
        }
        assert_eq!(rig.metrics(0).quarantined_units, 0);
        let checkpoints = rig.metrics(0).checkpoints;
        for _ in 0..100 {
            rig.idle();
        }
        assert_eq!(rig.metrics(0).checkpoints, checkpoints, "one is enough");
        rig.check_last_state();
    });
}

/// The smallest store: what is freed is used again at once.
const TINY_DISK: u64 = 3200 << 10;
/// Blocks that are overwritten in it: about as many as it holds.
const TINY_BLOCKS: u32 = 340;

fn churn(rig: &mut Rig, rng: &mut ChaCha8Rng, ops: usize) {
    for _ in 0..ops {
        let count = rng.random_range(1..=4);
        let range = Range::blocks(PLAIN, 0, rng.random_range(0..TINY_BLOCKS - count), count);
        match rng.random_range(0..22) {
            20..22 => drop(rig.write(partial_range(rng, TINY_BLOCKS), false)),
            0..2 => drop(rig.zero(range, false)),
            2 => rig.flush(),
            3 => drop(rig.read(range)),
            _ => drop(rig.write(range, false)),
        }
        while rig.in_flight() > 12 || rng.random_bool(0.4) {
            if !rig.step() {
                break;
            }
        }
    }
}

#[test]
fn a_nearly_full_store_survives_crashes_anywhere() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0xf1);
        let mut rig = Rig::create(TINY_DISK, 1, small_params(), seed);
        fill(&mut rig, PLAIN, 0, TINY_BLOCKS);
        for life in 0..12 {
            rig.tolerate = no_space;
            rig.record_moments();
            churn(&mut rig, &mut rng, 60);
            let moments = rig.take_moments();
            for _ in 0..8 {
                let moment = &moments[rng.random_range(0..moments.len())];
                for kind in [CrashKind::Power, CrashKind::Process] {
                    let mut found = moment.crashed(kind, rng.random()).recover(kind, life);
                    found.check_last_state();
                }
            }
            rig = rig
                .crash(CrashKind::Power, life)
                .recover(CrashKind::Power, life);
            rig.check_last_state();
        }
    });
}
