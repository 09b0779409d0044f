//! Crashes at every device write of short histories, and anywhere in long ones.

use fabric_store::device::SyncDevice;
use rand::Rng;

use crate::history;
use crate::model::{PLAIN, Range, Spot};
use crate::rig::{Moment, Rig};
use crate::seeds::{self, for_each_seed};
use crate::sim_disk::{CrashKind, IoKind};

const KINDS: [CrashKind; 2] = [CrashKind::Process, CrashKind::Power];

/// A device whose log windows have several regions.
const MANY_REGIONS_DISK: u64 = 200 << 20;
/// A device that gets two shards.
const TWO_SHARDS_DISK: u64 = 9 << 30;

type Content = Vec<(Spot, Option<Vec<u8>>)>;

fn either(seed: u64) -> CrashKind {
    KINDS[(seed % 2) as usize]
}

fn worse(a: CrashKind, b: CrashKind) -> CrashKind {
    if a == CrashKind::Process { b } else { a }
}

/// Recovery that dies in one of its own writes leaves what the next recovery needs.
fn check_crash_in_recovery(
    found: &Moment,
    kind: CrashKind,
    writes: u64,
    seed: u64,
    shown: &Content,
) {
    if writes == 0 {
        return;
    }
    let mut dying = found.clone();
    dying.disk.set_fuse(1 + seed % writes);
    let Err((dead, _)) = dying.try_open(seed) else {
        panic!("recovery went on without power");
    };
    let second = either(seed / 7);
    let mut rig = dead
        .crashed(second, seed)
        .recover(worse(kind, second), seed + 1);
    if kind == CrashKind::Power {
        assert!(
            rig.read_everything() == *shown,
            "a crash in recovery changed what was recovered"
        );
    }
}

/// Recovers from one crash; then again; then goes on working and crashes again.
fn check_crash(moment: &Moment, kind: CrashKind, seed: u64) {
    let found = moment.crashed(kind, seed);
    let writes_before = found.disk.counts().of(IoKind::Write);
    let opened = found.clone().open(seed);
    let rig = opened.unwrap_or_else(|e| panic!("a store opens after a {kind:?} crash: {e}"));
    let writes = rig.now.disk.counts().of(IoKind::Write) - writes_before;
    drop(rig);
    let mut rig = found.clone().recover(kind, seed);
    let shown = rig.read_everything();
    match seed % 3 {
        0 => check_crash_in_recovery(&found, kind, writes, seed, &shown),
        1 => {
            let mut again = rig
                .now
                .crashed(CrashKind::Power, seed + 1)
                .recover(CrashKind::Power, seed);
            assert!(
                again.read_everything() == shown,
                "the second recovery shows something else"
            );
        }
        _ => {
            let mut rng = seeds::rng(seed, 0x60);
            history::run(&mut rig, &mut rng, 12);
            let kind = either(seed / 3);
            rig.crash(kind, seed + 2)
                .recover(kind, seed + 2)
                .check_last_state();
        }
    }
}

fn crash_at_every_write(seed: u64, ops: usize) {
    let mut rng = seeds::rng(seed, 0xc0);
    let mut rig = Rig::new_small(seed);
    history::prologue(&mut rig);
    rig.record_moments();
    history::run(&mut rig, &mut rng, ops);
    rig.checkpoint();
    history::run(&mut rig, &mut rng, ops);
    rig.idle();
    let moments = rig.take_moments();
    assert!(
        moments.len() > ops / 4,
        "a history of {} writes is no history",
        moments.len()
    );
    for moment in &moments {
        for kind in KINDS {
            check_crash(moment, kind, rng.random_range(0..1 << 40));
        }
    }
}

#[test]
fn every_write_of_a_short_history_may_be_the_last() {
    for_each_seed(3, |seed| crash_at_every_write(seed, 24));
}

#[test]
fn a_crash_while_closing_loses_nothing_that_was_flushed() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xc1);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        history::run(&mut rig, &mut rng, 20);
        rig.idle();
        rig.record_moments();
        let moments = rig.close_recording();
        assert!(!moments.is_empty(), "closing after writes writes");
        for moment in &moments {
            for kind in KINDS {
                check_crash(moment, kind, rng.random_range(0..1 << 40));
            }
        }
    });
}

#[test]
fn long_histories_survive_crashes_anywhere() {
    for_each_seed(12, |seed| {
        let mut rng = seeds::rng(seed, 0xc2);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        for life in 0..12 {
            let ops = rng.random_range(1..120);
            history::run(&mut rig, &mut rng, ops);
            let life_seed = seed * 1000 + life;
            rig = match rng.random_range(0..4) {
                0 => rig.reopen(life_seed),
                n => {
                    let kind = either(n);
                    rig.crash(kind, life_seed).recover(kind, life_seed)
                }
            };
            rig.check_last_state();
        }
    });
}

#[test]
fn histories_on_a_disk_with_many_regions_survive_crashes() {
    for_each_seed(3, |seed| {
        let mut rng = seeds::rng(seed, 0xc6);
        let mut rig = Rig::create(MANY_REGIONS_DISK, 1, crate::shard::small_params(), seed);
        history::prologue(&mut rig);
        for life in 0..6 {
            let ops = rng.random_range(50..400);
            history::run(&mut rig, &mut rng, ops);
            let kind = either(rng.random_range(0..2));
            rig = rig.crash(kind, seed + life).recover(kind, seed + life);
            rig.check_last_state();
        }
    });
}

#[test]
fn several_shards_survive_crashes_together() {
    for_each_seed(1, |seed| {
        let mut rng = seeds::rng(seed, 0xc3);
        let mut rig = Rig::create(TWO_SHARDS_DISK, 2, crate::shard::small_params(), seed);
        history::prologue(&mut rig);
        for life in 0..6 {
            history::run(&mut rig, &mut rng, 60);
            let kind = either(rng.random_range(0..2));
            rig = rig.crash(kind, seed + life).recover(kind, seed + life);
            rig.check_last_state();
        }
    });
}

#[test]
fn flush_waits_for_older_writes_and_covers_acknowledged_ones() {
    for_each_seed(16, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.keep_done();
        rig.write(Range::blocks(PLAIN, 0, 0, 4), false);
        rig.drain();
        rig.flush_by_marks();
        rig.drain();
        // Two rounds: in the second a flush waits already.
        let slow = rig.write(Range::blocks(PLAIN, 0, 64, 48), false);
        rig.pump();
        let slow_writes = rig.now.disk.in_flight();
        for round in 0..2 {
            rig.take_done();
            let commit = rig.write(Range::blocks(PLAIN, 0, round, 1), false);
            rig.pump();
            while rig.now.disk.in_flight() > slow_writes {
                let outcome = rig.now.disk.complete_newest(IoKind::Write);
                rig.deliver(outcome.expect("a write is under way"));
            }
            rig.reap();
            let done = rig.take_done();
            assert_eq!(done.iter().map(|d| d.id).collect::<Vec<_>>(), [commit]);
            rig.flush_by_marks();
            rig.pump();
            let early = rig.now.disk.complete_kind(IoKind::Flush);
            assert!(early.is_none(), "one number cannot say what it covers");
        }
        while rig.is_flushing() {
            assert!(rig.step(), "stuck in a flush");
        }
        assert_eq!(rig.last_flush.take(), Some(Ok(())));
        assert!(rig.take_done().iter().any(|d| d.id == slow));
        rig.crash(CrashKind::Power, seed)
            .recover(CrashKind::Power, seed)
            .check_last_state();
    });
}

#[test]
fn a_flush_with_nothing_to_flush_costs_no_device_flush() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.write(Range::blocks(PLAIN, 0, 0, 4), false);
        rig.drain();
        rig.flush_by_marks();
        rig.drain();
        let flushes = rig.now.disk.counts().of(IoKind::Flush);
        rig.flush_by_marks();
        rig.drain();
        assert_eq!(rig.last_flush, Some(Ok(())));
        assert_eq!(rig.now.disk.counts().of(IoKind::Flush), flushes);
    });
}

#[test]
fn a_closed_store_needs_no_flush_to_survive_power_loss() {
    for_each_seed(6, |seed| {
        let mut rng = seeds::rng(seed, 0xc4);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        history::run(&mut rig, &mut rng, 60);
        let closed = rig.close();
        let capacity = closed.disk.capacity_bytes();
        let lost = closed.crashed(CrashKind::Power, seed);
        assert_eq!(lost.disk.capacity_bytes(), capacity);
        let mut rig = lost
            .open(seed)
            .expect("a closed store opens after power loss");
        assert_eq!(rig.report.clean_shards, rig.report.shards);
        rig.check_last_state();
    });
}

#[test]
fn a_write_after_the_promise_to_write_no_more_is_as_safe_as_any() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xc5);
        let mut rig = Rig::new_small(seed);
        history::prologue(&mut rig);
        for kind in KINDS {
            rig.promise_quiet();
            history::run(&mut rig, &mut rng, 10);
            rig = rig.crash(kind, seed).recover(kind, seed);
            rig.check_last_state();
        }
    });
}

#[test]
fn a_blank_store_survives_crashes() {
    for_each_seed(4, |seed| {
        let rig = Rig::new_small(seed);
        for kind in KINDS {
            let mut again = rig.now.crashed(kind, seed).recover(kind, seed);
            history::prologue(&mut again);
            again.check_last_state();
        }
    });
}
