//! Crashes at every device write of short histories, and at random points of long ones.

use fabric::store::api::StoreCore;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::history::{Op, apply, generate};
use crate::rig::Rig;

const DISK: usize = 8 << 20;

fn run_until_crash(ops: &[Op], seed: u64, crash_at: u64) -> Rig {
    let mut rig = Rig::new(DISK, seed);
    rig.crash_at = Some(crash_at);
    for &op in ops {
        if rig.crashed() {
            break;
        }
        apply(&mut rig, op);
    }
    if !rig.crashed() {
        rig.drain();
    }
    rig
}

fn crash_everywhere(power: bool) {
    for seed in 0..5u64 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let ops: Vec<Op> = (0..40)
            .map(|_| generate(&mut rng, 2, 160, seed == 2))
            .collect();
        let mut crash_at = 0;
        loop {
            let mut rig = run_until_crash(&ops, seed, crash_at);
            let over = !rig.crashed();
            if power {
                rig.power_loss()
            } else {
                rig.process_crash()
            };
            // Life goes on, and another crash finds everything again.
            rig.write(0, 3, 50, false);
            rig.drain();
            rig.flush();
            rig.drain();
            rig.power_loss();
            rig.compare_all();
            if over {
                break;
            }
            crash_at += 1;
        }
        assert!(
            crash_at > 10,
            "a history without device writes shows nothing"
        );
    }
}

#[test]
fn flushed_data_survive_power_loss_at_every_device_write() {
    crash_everywhere(true);
}

#[test]
fn acknowledged_data_survive_a_process_crash_at_every_device_write() {
    crash_everywhere(false);
}

#[test]
fn long_histories_survive_crashes_at_random_points() {
    for seed in 100..106u64 {
        let mut rig = Rig::new(12 << 20, seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..25 {
            rig.crash_at = Some(rig.device_writes_done + rng.random_range(1..120));
            for _ in 0..120 {
                if rig.crashed() {
                    break;
                }
                let op = generate(&mut rng, 3, 1200, true);
                apply(&mut rig, op);
            }
            if rng.random_bool(0.5) {
                rig.power_loss()
            } else {
                rig.process_crash()
            };
        }
        rig.compare_all();
    }
}

/// A crash while recovery writes its own checkpoint leads to the same state.
#[test]
fn recovery_itself_may_crash() {
    for seed in 200..206u64 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let ops: Vec<Op> = (0..60).map(|_| generate(&mut rng, 2, 400, true)).collect();
        let mut rig = run_until_crash(&ops, seed, u64::MAX);
        rig.drain();
        rig.flush();
        rig.drain();
        let disk = rig.disk.process_crash();
        for writes in 1..20 {
            let mut trial = disk.clone();
            trial.fail_from_write = Some(writes);
            let opened = fabric::store::open(&mut trial, &crate::rig::params(), [77; 16]);
            if opened.is_ok() {
                break;
            }
            trial.fail_from_write = None;
            let again = trial.power_loss(&mut rng, &[]);
            rig.reopen_on(again);
            rig.compare_all();
        }
    }
}

#[test]
fn a_clean_close_leaves_nothing_to_replay() {
    use fabric::store::api::StoreOp;
    let mut rig = Rig::new(DISK, 1);
    rig.write(0, 0, 800, false);
    rig.drain();
    rig.other(StoreOp::Checkpoint { clean: true });
    rig.drain();
    let report = rig.power_loss();
    assert_eq!((report.clean_shards, report.batches), (1, 0));
    assert!(report.to_string().starts_with("closed cleanly"));
    rig.compare_all();
    // A write after the promise makes another checkpoint first.
    rig.other(StoreOp::Checkpoint { clean: true });
    rig.drain();
    rig.write(0, 0, 8, true);
    rig.drain();
    let report = rig.power_loss();
    assert_eq!(report.clean_shards, 0);
    rig.compare_all();
    assert_eq!(rig.core.in_flight(), 0);
}
