//! Scrubbing finds damage where it is, and nothing else.

use std::collections::BTreeSet;

use fabric_store::api::{ScrubFinding, ScrubStep, StoreCore};
use fabric_types::block::BLOCK_BYTES;
use rand::Rng;

use crate::history;
use crate::model::{PLAIN, Range, Spot};
use crate::rig::Rig;
use crate::seeds::{self, for_each_seed};

/// Steps within which a pass over a small store is done.
const STEPS_MAX: usize = 10_000;

fn findings(rig: &mut Rig) -> Vec<ScrubFinding> {
    let mut found = Vec::new();
    for core in rig.cores() {
        found.extend(std::iter::from_fn(|| core.poll_finding()));
    }
    found
}

/// One pass over shard 0, everything it found.
fn scrub_pass(rig: &mut Rig) -> Vec<ScrubFinding> {
    let mut found = Vec::new();
    for _ in 0..STEPS_MAX {
        let step = rig.cores()[0].scrub_step();
        rig.drain();
        found.extend(findings(rig));
        if step == ScrubStep::PassDone {
            return found;
        }
    }
    panic!("a pass has no end");
}

#[test]
fn scrub_reports_flipped_data_and_where_it_is() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0x5c);
        let mut rig = Rig::new_small(seed);
        for block in 0..100 {
            rig.write(Range::blocks(PLAIN, 3, block * 9, 2), false);
        }
        rig.idle();
        assert_eq!(scrub_pass(&mut rig), []);
        let mut damaged = BTreeSet::new();
        for _ in 0..5 {
            let block = rng.random_range(0..100) * 9;
            let spot = Spot {
                view: PLAIN,
                chunk: 3,
                block,
            };
            if damaged.iter().any(|(b, _)| *b == block) {
                continue;
            }
            let at = rig.device_offset(spot);
            let byte = at + rng.random_range(0..BLOCK_BYTES as u64);
            rig.now.disk.flip_bit(byte, rng.random_range(0..8));
            damaged.insert((block, at));
        }
        let found = scrub_pass(&mut rig);
        assert!(
            found
                .iter()
                .all(|f| f.chunk == 3 && f.layer == PLAIN.layers()[0])
        );
        let places: BTreeSet<(u32, u64)> =
            found.iter().map(|f| (f.block, f.device_offset)).collect();
        assert_eq!(places, damaged);
        assert_eq!(found.len(), damaged.len(), "a block was accused twice");
        assert!(rig.metrics(0).scrubbed_blocks >= 200);
        for (block, _) in &damaged {
            assert!(
                rig.read_raw(
                    Spot {
                        view: PLAIN,
                        chunk: 3,
                        block: *block
                    },
                    1
                )
                .is_err()
            );
            rig.write(Range::blocks(PLAIN, 3, *block, 1), false);
            rig.drain();
        }
        assert_eq!(scrub_pass(&mut rig), []);
        rig.check_last_state();
    });
}

#[test]
fn scrub_accuses_nothing_while_everything_is_overwritten() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0x5d);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        let mut passes = 0;
        for _ in 0..150 {
            history::run(&mut rig, &mut rng, 4);
            passes += u32::from(rig.cores()[0].scrub_step() == ScrubStep::PassDone);
        }
        rig.drain();
        assert_eq!(findings(&mut rig), []);
        assert!(passes > 0, "no pass came to its end");
        assert!(rig.metrics(0).scrubbed_blocks > 0);
        rig.check_last_state();
    });
}

#[test]
fn a_read_that_was_garbled_once_is_repeated() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.write(Range::blocks(PLAIN, 0, 0, 8), false);
        rig.idle();
        rig.now.disk.garble_next_read();
        rig.read(Range::blocks(PLAIN, 0, 0, 8));
        rig.drain();
        assert_eq!(rig.metrics(0).checksum_errors, 0);
        assert!(rig.metrics(0).checksum_retries > 0);
        rig.now.disk.garble_next_read();
        assert_eq!(scrub_pass(&mut rig), []);
    });
}
