//! The file system below a sparse device file runs full: requests fail for want of space, and go on when
//! there is some.

use fabric_store::api::{StoreCore, StoreError};
use rand::Rng;

use crate::history;
use crate::model::{PLAIN, Range};
use crate::rig::Rig;
use crate::seeds::{self, for_each_seed};
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::CrashKind;

fn no_space(error: &StoreError) -> bool {
    matches!(error, StoreError::NoSpace { .. })
}

fn none(_: &StoreError) -> bool {
    false
}

#[test]
fn full_host_refuses_writes_until_there_is_room_again() {
    for_each_seed(8, |seed| {
        let mut rig = Rig::new_small(seed);
        for block in 0..40 {
            rig.write(Range::blocks(PLAIN, 0, block, 1), false);
        }
        rig.drain();
        rig.now.disk.set_host_room(Some(seed % 9 * 5));
        rig.tolerate = no_space;
        rig.keep_done();
        for block in 0..200 {
            rig.write(Range::blocks(PLAIN, 0, block * 3, 2), false);
            if seed % 2 == 0 {
                rig.drain();
            }
        }
        rig.drain();
        let refused = rig.take_done().iter().filter(|d| d.result.is_err()).count();
        assert!(refused > 0, "everything fitted");
        rig.check_live();
        rig.checkpoint();
        rig.idle();
        assert!(
            rig.take_done().iter().all(|d| d.result.is_err()),
            "a checkpoint needs room"
        );
        // What was acknowledged can be flushed.
        rig.flush_by_marks();
        rig.drain();
        assert_eq!(rig.last_flush, Some(Ok(())));
        for kind in [CrashKind::Process, CrashKind::Power] {
            rig.now
                .crashed(kind, seed)
                .recover(kind, seed)
                .check_last_state();
        }
        rig.now.disk.set_host_room(None);
        rig.tolerate = none;
        if seed % 3 == 0 {
            rig.idle();
        }
        for block in 0..200 {
            rig.write(Range::blocks(PLAIN, 0, block * 3, 2), false);
        }
        rig.checkpoint();
        rig.drain();
        rig.check_last_state();
        rig.reopen(seed).check_last_state();
    });
}

#[test]
fn histories_on_an_occasionally_full_host_survive_crashes() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0x40f);
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        history::prologue(&mut rig);
        for life in 0..6 {
            rig.tolerate = no_space;
            for _ in 0..4 {
                let room = rng.random_bool(0.7).then(|| rng.random_range(0..60));
                rig.now.disk.set_host_room(room);
                rig.record_moments();
                history::run(&mut rig, &mut rng, 40);
                for moment in rig.take_moments().iter().step_by(9) {
                    for kind in [CrashKind::Process, CrashKind::Power] {
                        let mut found = moment.crashed(kind, rng.random()).recover(kind, life);
                        found.check_last_state();
                    }
                }
            }
            rig.drain();
            rig.check_live();
            rig.now.disk.set_host_room(None);
            rig.idle();
            rig.tolerate = none;
            history::run(&mut rig, &mut rng, 30);
            rig.drain();
            assert!(rig.cores()[0].flush_mark().is_ok());
            rig.check_live();
            let kind = [CrashKind::Process, CrashKind::Power][rng.random_range(0..2)];
            rig = rig.crash(kind, seed + life).recover(kind, seed + life);
        }
    });
}
