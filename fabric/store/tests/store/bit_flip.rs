//! One flipped bit anywhere on the device: right bytes or a reported error, never wrong bytes, never a panic.

use fabric_types::block::BLOCK_BYTES;
use rand::Rng;

use crate::history;
use crate::model::{Model, Spot};
use crate::rig::{Moment, Rig};
use crate::seeds::{self, for_each_seed};
use crate::sim_disk::CrashKind;

/// What became of the flips.
#[derive(Debug, Default)]
struct Outcome {
    flips: u32,
    refused: u32,
    reported: u32,
}

/// What a block may show after the flip.
type Check = fn(&mut Model, Spot, &[u8]) -> Result<(), String>;

/// All is as it was last written.
fn shows_last_state(model: &mut Model, spot: Spot, bytes: &[u8]) -> Result<(), String> {
    model.check_last_state(spot, bytes)
}

/// Whatever a flush covered is there.
fn flushed(model: &mut Model, spot: Spot, bytes: &[u8]) -> Result<(), String> {
    model.check_after_crash(spot, bytes, CrashKind::Power)
}

fn check_flip(
    found: &Moment,
    (byte, bit): (u64, u8),
    seed: u64,
    check: Check,
    outcome: &mut Outcome,
) {
    outcome.flips += 1;
    let mut flipped = found.clone();
    flipped.disk.flip_bit(byte, bit);
    let mut rig = match flipped.open(seed) {
        Ok(rig) => rig,
        Err(error) => {
            assert!(!error.contains("bitmap"), "what can be made anew: {error}");
            assert!(
                !error.contains("map page"),
                "what concerns some blocks: {error}"
            );
            outcome.refused += 1;
            return;
        }
    };
    let mut errors = 0;
    for (spot, bytes) in rig.read_everything() {
        let Some(bytes) = bytes else {
            errors += 1;
            continue;
        };
        let checked = check(&mut rig.now.model, spot, &bytes);
        checked.unwrap_or_else(|e| panic!("bit {bit} of byte {byte} flipped: {e}"));
    }
    outcome.reported += u32::from(errors > 0);
}

fn flip_everywhere(found: &Moment, seed: u64, check: Check) -> Outcome {
    let mut rng = seeds::rng(seed, 0xb1);
    let mut outcome = Outcome::default();
    for block in found.disk.written_blocks() {
        let start = block * BLOCK_BYTES as u64;
        // Half of the flips hit the first bytes, where headers have their fields.
        let within = match rng.random_bool(0.5) {
            true => rng.random_range(0..128),
            false => rng.random_range(0..BLOCK_BYTES as u64),
        };
        let place = (start + within, rng.random_range(0..8));
        check_flip(found, place, seed, check, &mut outcome);
    }
    outcome
}

fn history_of(seed: u64) -> Rig {
    let mut rng = seeds::rng(seed, 0xb2);
    let mut rig = Rig::new_small(seed);
    history::prologue(&mut rig);
    history::run(&mut rig, &mut rng, 40);
    rig.checkpoint();
    rig.drain();
    history::run(&mut rig, &mut rng, 40);
    rig.drain();
    rig
}

fn assert_noticed(outcome: &Outcome) {
    assert!(outcome.flips > 100, "too few blocks to flip: {outcome:?}");
    assert!(
        outcome.reported > 0,
        "no flipped data block was reported: {outcome:?}"
    );
}

#[test]
fn a_flipped_bit_in_a_closed_store_is_detected_or_harmless() {
    for_each_seed(2, |seed| {
        let closed = history_of(seed).close();
        assert_noticed(&flip_everywhere(&closed, seed, shows_last_state));
    });
}

#[test]
fn a_flipped_bit_in_a_crashed_store_is_detected_or_harmless() {
    for_each_seed(2, |seed| {
        let mut rig = history_of(seed);
        rig.flush();
        rig.idle();
        // The record of the flush is itself durable only with the next one.
        rig.flush();
        rig.drain();
        let crashed = rig.crash(CrashKind::Power, seed);
        assert_noticed(&flip_everywhere(&crashed, seed, shows_last_state));
    });
}

#[test]
fn flipped_bit_is_detected_after_a_kill_right_after_the_flush() {
    for_each_seed(4, |seed| {
        let mut rig = history_of(seed);
        let mut rng = seeds::rng(seed, 0xb3);
        // Older writes are under way when the flush begins, and when it ends.
        history::run(&mut rig, &mut rng, 12);
        if seed % 2 == 0 {
            rig.flush();
        } else {
            rig.flush_by_marks();
        }
        while rig.is_flushing() {
            assert!(rig.step(), "stuck in a flush");
        }
        let killed = rig.crash(CrashKind::Process, seed);
        assert_noticed(&flip_everywhere(&killed, seed, flushed));
    });
}
