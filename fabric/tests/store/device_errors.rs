//! A device that fails: the errors reach who asked, and nothing that was acknowledged is lost.

use fabric::store::api::{CoreParams, StoreError};
use fabric::store::device::SyncDevice;

use crate::factory;
use crate::history;
use crate::model::{PLAIN, Range};
use crate::rig::{Moment, Rig, SMALL_DISK, small_params};
use crate::seeds::{self, for_each_seed};
use crate::sim_disk::{CrashKind, IoKind, SimDisk};

/// A device that gets two shards.
const TWO_SHARDS_DISK: u64 = 33 << 30;

fn device_error(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Device(libc::EIO) | StoreError::ReadOnly(libc::EIO)
    )
}

fn some_blocks(rig: &mut Rig, from: u32, count: u32) {
    for block in from..from + count {
        rig.write(Range::blocks(PLAIN, 0, block, 1), false);
    }
}

#[test]
fn a_failed_write_is_reported_and_turns_the_shard_read_only() {
    for_each_seed(6, |seed| {
        let mut rig = Rig::new_small(seed);
        some_blocks(&mut rig, 0, 30);
        rig.idle();
        rig.keep_done();
        rig.tolerate = device_error;
        rig.now.disk.fail(IoKind::Write, seed % 3, libc::EIO);
        for block in 0..6 {
            rig.write(Range::blocks(PLAIN, 0, block * 3, 2), false);
            rig.drain();
        }
        let done = rig.take_done();
        assert!(
            done.iter().any(|d| d.result.is_err()),
            "nobody heard of the error"
        );
        assert_eq!(done[5].result, Err(StoreError::ReadOnly(libc::EIO)));
        // What the failed write touched may be old or new, and shows neither until recovery has settled it.
        let unreadable = rig.check_readable();
        assert!(
            unreadable.iter().all(|spot| spot.block < 9),
            "{unreadable:?}"
        );
        let crashed = rig.crash(CrashKind::Process, seed);
        let mut rig = crashed.recover(CrashKind::Process, seed);
        some_blocks(&mut rig, 0, 40);
        rig.drain();
        rig.check_settled();
    });
}

#[test]
fn a_failed_flush_is_never_taken_for_a_good_one() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::new_small(seed);
        some_blocks(&mut rig, 0, 10);
        rig.idle();
        rig.keep_done();
        rig.tolerate = device_error;
        some_blocks(&mut rig, 4, 10);
        rig.drain();
        rig.now.disk.fail(IoKind::Flush, 0, libc::EIO);
        rig.take_done();
        rig.flush();
        rig.drain();
        assert!(
            rig.take_done()[0].result.is_err(),
            "the flush failed and says it did not"
        );
        rig.flush();
        rig.drain();
        // The kernel may have dropped what it could not write: a second flush proves nothing about it.
        assert!(
            rig.take_done()[0].result.is_err(),
            "a second flush claims what the first could not"
        );
        rig.crash(CrashKind::Power, seed)
            .recover(CrashKind::Power, seed)
            .check_settled();
    });
}

#[test]
fn a_flush_of_the_whole_device_that_failed_is_never_taken_for_a_good_one() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::create(TWO_SHARDS_DISK, 2, small_params(), seed);
        let chunks: Vec<u32> = (0..8).collect();
        for &chunk in &chunks {
            rig.write(Range::blocks(PLAIN, chunk, 0, 4), false);
        }
        rig.drain();
        rig.tolerate = device_error;
        rig.now.disk.fail(IoKind::Flush, 0, libc::EIO);
        rig.flush_by_marks();
        rig.drain();
        assert_eq!(rig.last_flush, Some(Err(StoreError::Device(libc::EIO))));
        // The kernel tells of what it could not write once: the next flush of the device succeeds.
        for _ in 0..2 {
            rig.flush_by_marks();
            rig.drain();
            let refused = Some(Err(StoreError::ReadOnly(libc::EIO)));
            assert_eq!(rig.last_flush, refused, "a second flush was believed");
        }
        rig.keep_done();
        for &chunk in &chunks {
            rig.write(Range::blocks(PLAIN, chunk, 9, 1), true);
        }
        rig.drain();
        let refused = Err(StoreError::ReadOnly(libc::EIO));
        let done = rig.take_done();
        assert!(done.iter().all(|d| d.result == refused), "{done:?}");
        rig.crash(CrashKind::Power, seed)
            .recover(CrashKind::Power, seed)
            .check_settled();
    });
}

#[test]
fn a_flush_that_ends_well_after_another_failed_promises_nothing() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::new_small(seed);
        some_blocks(&mut rig, 0, 10);
        rig.drain();
        rig.tolerate = device_error;
        rig.flush_by_marks();
        rig.now.disk.fail(IoKind::Flush, 0, libc::EIO);
        rig.flush_by_marks();
        rig.drain();
        let refused = Some(Err(StoreError::ReadOnly(libc::EIO)));
        assert_eq!(rig.last_flush.map(|r| r.is_err()), Some(true));
        rig.flush_by_marks();
        assert_eq!(rig.last_flush, refused);
        rig.crash(CrashKind::Power, seed)
            .recover(CrashKind::Power, seed)
            .check_settled();
    });
}

#[test]
fn a_failed_read_fails_that_read_only() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::new_small(seed);
        some_blocks(&mut rig, 0, 10);
        let mut rig = rig.reopen(seed);
        rig.keep_done();
        rig.tolerate = device_error;
        // A read is tried twice.
        rig.now.disk.fail(IoKind::Read, 0, libc::EIO);
        rig.now.disk.fail(IoKind::Read, 1, libc::EIO);
        rig.read(Range::blocks(PLAIN, 0, 0, 2));
        rig.drain();
        assert_eq!(
            rig.take_done()[0].result,
            Err(StoreError::Device(libc::EIO))
        );
        rig.tolerate = |_| false;
        some_blocks(&mut rig, 2, 10);
        rig.drain();
        rig.check_settled();
    });
}

#[test]
fn a_partial_write_whose_old_block_cannot_be_read_fails_and_changes_nothing() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::new_small(seed);
        some_blocks(&mut rig, 0, 4);
        let mut rig = rig.reopen(seed);
        rig.read_everything();
        rig.keep_done();
        rig.tolerate = device_error;
        let model = rig.now.model.clone();
        // A read is tried twice.
        rig.now.disk.fail(IoKind::Read, 0, libc::EIO);
        rig.now.disk.fail(IoKind::Read, 1, libc::EIO);
        rig.write(
            Range {
                view: PLAIN,
                chunk: 0,
                sector: 9,
                sectors: 3,
            },
            false,
        );
        rig.drain();
        assert_eq!(
            rig.take_done()[0].result,
            Err(StoreError::Device(libc::EIO))
        );
        rig.now.model = model;
        rig.check_settled();
    });
}

#[test]
fn opening_reports_read_and_write_errors_and_harms_nothing() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0xde);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        history::run(&mut rig, &mut rng, 40);
        rig.drain();
        let crashed = rig.crash(CrashKind::Process, seed);
        for kind in [IoKind::Read, IoKind::Write, IoKind::Flush] {
            for nth in [0, 1, 2, 3, 5, 8, 13, 21] {
                let mut failing = crashed.clone();
                failing.disk.fail(kind, nth, libc::EIO);
                // With fewer requests than `nth` it opens.
                let after = match failing.try_open(seed) {
                    Err((moment, error)) => {
                        assert!(!error.is_empty());
                        moment.crashed(CrashKind::Process, seed)
                    }
                    Ok(rig) => rig.crash(CrashKind::Process, seed),
                };
                after.recover(CrashKind::Process, seed + 1).check_settled();
            }
        }
    });
}

#[test]
fn a_blank_a_foreign_and_a_short_device_are_refused() {
    let mut blank = SimDisk::new(SMALL_DISK, 1);
    assert!(factory::open(&mut blank, &small_params(), 1).is_err());
    let written = blank.counts().of(IoKind::Write);
    assert_eq!(
        written, 0,
        "something was written to a device that is not ours"
    );

    let foreign = CoreParams {
        cluster: Some([0xaa; 16]),
        ..small_params()
    };
    let moment = Moment::fresh(SMALL_DISK, 1, foreign, 1);
    assert!(
        moment.open(1).is_err(),
        "a device of another cluster was opened"
    );

    let mut short = Moment::fresh(SMALL_DISK, 1, small_params(), 1);
    short.disk.truncate(SMALL_DISK / 2);
    assert!(
        short.open(1).is_err(),
        "a device that lost half its length was opened"
    );

    let mut tiny = SimDisk::new(64 << 10, 1);
    assert!(
        factory::format(&mut tiny).is_err(),
        "no store fits {}",
        tiny.capacity_bytes()
    );
}
