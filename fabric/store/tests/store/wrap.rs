//! The log turns from window to window many times, and its space comes back.

use fabric_store::api::StoreCore;
use rand::Rng;

use crate::model::{PLAIN, Range};
use crate::rig::Rig;
use crate::seeds::{self, for_each_seed};
use crate::shard::SMALL_DISK;
use crate::sim_disk::CrashKind;

/// Blocks that are overwritten all the time.
const HOT_BLOCKS: u32 = 300;

fn overwrite(rig: &mut Rig, rng: &mut rand_chacha::ChaCha8Rng, blocks: u64) {
    let mut written = 0;
    while written < blocks {
        let count = rng.random_range(1..=8);
        let block = rng.random_range(0..HOT_BLOCKS - count);
        rig.write(Range::blocks(PLAIN, 0, block, count), false);
        written += u64::from(count);
        while rig.in_flight() > 24 {
            rig.step();
        }
        if rng.random_bool(0.02) {
            rig.flush();
        }
    }
    rig.drain();
}

#[test]
fn overwriting_many_capacities_needs_no_explicit_checkpoint() {
    for_each_seed(1, |seed| {
        let mut rng = seeds::rng(seed, 0x3a);
        let mut rig = Rig::new_small(seed);
        overwrite(&mut rig, &mut rng, 12 * SMALL_DISK / 4096);
        let metrics = rig.metrics(0);
        assert!(
            metrics.checkpoints >= 10,
            "the log came round without checkpoints: {metrics:?}"
        );
        rig.check_last_state();
        rig = rig
            .crash(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed);
        rig.check_last_state();
    });
}

#[test]
fn the_log_comes_round_across_crashes() {
    for_each_seed(2, |seed| {
        let mut rng = seeds::rng(seed, 0x3b);
        let mut rig = Rig::new_small(seed);
        for life in 0..10 {
            overwrite(&mut rig, &mut rng, SMALL_DISK / 4096);
            let kind = [CrashKind::Process, CrashKind::Power][rng.random_range(0..2)];
            rig = rig.crash(kind, life).recover(kind, life);
            rig.check_last_state();
        }
        let space = rig.cores()[0].space();
        let live = u64::from(HOT_BLOCKS) * 4096;
        rig.checkpoint();
        rig.drain();
        rig.checkpoint();
        rig.drain();
        assert!(
            rig.cores()[0].space().used_bytes < live + space.total_bytes / 2,
            "{live} live bytes take {:?}",
            rig.cores()[0].space()
        );
    });
}
