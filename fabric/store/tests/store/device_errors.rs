//! A device that fails: the errors reach who asked, and nothing that was acknowledged is lost.

use fabric_store::api::{CoreParams, StoreError, StoreResult};
use fabric_store::device::SyncDevice;
use rand::Rng;

use crate::model::{PLAIN, Range};
use crate::rig::{Moment, Rig};
use crate::seeds::{self, for_each_seed};
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::{CrashKind, IoKind, SimDisk};
use crate::{factory, history};

/// A device that gets two shards.
const TWO_SHARDS_DISK: u64 = 9 << 30;

fn device_error(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Device(libc::EIO)
            | StoreError::Unreadable {
                errno: libc::EIO,
                ..
            }
            | StoreError::ReadOnly(libc::EIO)
    )
}

fn is_unreadable(result: &StoreResult) -> bool {
    matches!(result, Err(StoreError::Unreadable { errno, .. }) if *errno == libc::EIO)
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
        // Nobody is to take it for a block that cannot be read.
        let is_told = |result| matches!(result, Ok(()) | Err(StoreError::ReadOnly(libc::EIO)));
        assert!(done.iter().all(|d| is_told(d.result)), "{done:?}");
        // What the failed write touched may be old or new, and shows neither until recovery has decided.
        let unreadable = rig.check_readable();
        assert!(
            unreadable.iter().all(|spot| spot.block < 9),
            "{unreadable:?}"
        );
        let crashed = rig.crash(CrashKind::Process, seed);
        let mut rig = crashed.recover(CrashKind::Process, seed);
        some_blocks(&mut rig, 0, 40);
        rig.drain();
        rig.check_last_state();
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
            .check_last_state();
    });
}

#[test]
fn durable_write_with_failed_flush_is_not_reported_as_unstored() {
    let mut rig = Rig::new_small(1);
    rig.keep_done();
    rig.tolerate = device_error;
    rig.now.disk.fail(IoKind::Flush, 0, libc::EIO);
    rig.write(Range::blocks(PLAIN, 0, 0, 2), true);
    rig.drain();
    let done = rig.take_done();
    assert_eq!(done[0].result, Err(StoreError::ReadOnly(libc::EIO)));
}

#[test]
fn failed_device_flush_is_never_taken_for_a_success() {
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
            .check_last_state();
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
            .check_last_state();
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
        assert!(is_unreadable(&rig.take_done()[0].result));
        rig.tolerate = |_| false;
        some_blocks(&mut rig, 2, 10);
        rig.drain();
        rig.check_last_state();
    });
}

#[test]
fn partial_write_over_an_unreadable_block_changes_nothing() {
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
        assert!(is_unreadable(&rig.take_done()[0].result));
        rig.now.model = model;
        rig.check_last_state();
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
                after
                    .recover(CrashKind::Process, seed + 1)
                    .check_last_state();
            }
        }
    });
}

/// Bytes of the two labels, and of each superblock slot's two copies, on [`SMALL_DISK`].
const LABELS: [u64; 2] = [0, SMALL_DISK - 4096];
const SUPERBLOCKS: [[u64; 2]; 2] = [
    [256 * 4096, (256 + 2560 - 2) * 4096],
    [257 * 4096, (256 + 2560 - 1) * 4096],
];

#[test]
fn unreadable_sector_costs_one_copy_of_a_label_or_superblock() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::new_small(seed);
        some_blocks(&mut rig, 0, 30);
        rig.checkpoint();
        some_blocks(&mut rig, 20, 30);
        rig.flush();
        rig.drain();
        let crashed = rig.crash(CrashKind::Power, seed);
        for copy in LABELS.into_iter().chain(SUPERBLOCKS.concat()) {
            let mut spoilt = crashed.clone();
            spoilt.disk.spoil(copy);
            spoilt.recover(CrashKind::Power, seed).check_last_state();
        }
        for [a, b] in SUPERBLOCKS.into_iter().chain([LABELS]) {
            let mut spoilt = crashed.clone();
            spoilt.disk.spoil(a);
            spoilt.disk.spoil(b);
            // Which of the slots is the newer one cannot be told any more.
            let error = spoilt.open(seed).err().expect("no copy can be read");
            assert!(error.contains("os error 5"), "{error}");
        }
    });
}

#[test]
fn device_with_an_unreadable_label_is_not_taken_for_blank() {
    let mut blank = SimDisk::new(SMALL_DISK, 1);
    blank.spoil(LABELS[0]);
    let error = factory::open(&mut blank, &small_params(), 1).err();
    assert!(error.is_some_and(|e| e.contains("os error 5")));
    assert!(factory::format(&mut blank).is_err());
    let mut taken = Moment::fresh(SMALL_DISK, 1, small_params(), 1);
    taken.disk.spoil(LABELS[0]);
    let error = factory::format(&mut taken.disk).expect_err("there is a store");
    assert!(error.contains("already holds a store"), "{error}");
}

#[test]
fn map_page_that_a_checkpoint_failed_to_write_stays_readable() {
    const LEAVES: u32 = 150;
    let place = |leaf: u32| Range::blocks(PLAIN, leaf / 4, leaf % 4 * 256, 1);
    for_each_seed(8, |seed| {
        let mut rig = Rig::new_small(seed);
        for leaf in 0..LEAVES {
            rig.write(place(leaf), false);
            rig.drain();
        }
        rig.checkpoint();
        rig.drain();
        for leaf in 0..20 {
            rig.write(place(leaf * 3), false);
            rig.drain();
        }
        rig.tolerate = device_error;
        rig.now.disk.fail(IoKind::Write, seed % 3, libc::EIO);
        rig.checkpoint();
        rig.drain();
        // More than the cache holds, twice: whatever can be evicted is.
        for _ in 0..2 {
            rig.check_live();
        }
    });
}

#[test]
fn failing_device_answers_every_outstanding_operation() {
    const LEAVES: u32 = 400;
    for_each_seed(8, |seed| {
        let mut rng = seeds::rng(seed, 0xdf);
        let params = CoreParams {
            ops_max: 512,
            ..small_params()
        };
        let mut rig = Rig::create(SMALL_DISK, 1, params, seed);
        for leaf in 0..LEAVES {
            rig.write(Range::blocks(PLAIN, leaf / 4, leaf % 4 * 256, 1), false);
        }
        rig.drain();
        rig.tolerate = device_error;
        let nth = rng.random_range(0..300);
        rig.now.disk.fail(IoKind::Write, nth, libc::EIO);
        for _ in 0..800 {
            let leaf = rng.random_range(0..LEAVES);
            let range = Range {
                view: PLAIN,
                chunk: leaf / 4,
                sector: leaf % 4 * 2048 + rng.random_range(0..2),
                sectors: 6,
            };
            match rng.random_range(0..20) {
                0..12 => drop(rig.write(range, false)),
                12 => rig.checkpoint(),
                13 => rig.flush(),
                _ => drop(rig.read(range)),
            }
        }
        rig.drain();
        rig.crash(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed)
            .check_last_state();
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
