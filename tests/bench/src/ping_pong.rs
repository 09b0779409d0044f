//! How far apart two cores are: the time a cache line takes from one to the other. Virtual processors move
//! between physical ones, and figures bound by memory follow; results are compared only within one state.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

use crate::clock::{Clock, ticks};

/// Round trips timed together.
const ROUNDS: u64 = 200;
/// Groups of round trips; the result is a low percentile of them, because the other core may be shared with a
/// back end that polls, and groups in which it was scheduled away say nothing.
const GROUPS: usize = 60;
/// Share of the groups below the result.
const PERCENTILE: usize = 20;
/// One-way time up to which the cores count as near; observed are about 55 ns near and 335 ns far.
const NEAR_NS_MAX: f64 = 140.0;

/// Whether the two cores share a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Tens of nanoseconds apart.
    Near,
    /// Hundreds of nanoseconds apart.
    Far,
}

impl State {
    /// The word for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Far => "far",
        }
    }

    fn of(ns: f64) -> Self {
        if ns <= NEAR_NS_MAX {
            Self::Near
        } else {
            Self::Far
        }
    }
}

/// One measurement.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Distance {
    /// One-way time.
    pub ns: f64,
    /// What it means.
    pub state: State,
}

/// Binds the calling thread to a core.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("pin to CPU {cpu}"))
}

/// Measures between the calling thread, which must be pinned, and `other`.
pub fn measure(clock: Clock, other: usize) -> Result<Distance> {
    let line = Line::default();
    let stop = AtomicBool::new(false);
    let mut groups = std::thread::scope(|scope| {
        let answering = scope.spawn(|| answer(&line, &stop, other));
        let groups: Vec<f64> = (0..GROUPS)
            .map(|group| time_group(clock, &line, group as u64))
            .collect();
        stop.store(true, Ordering::Release);
        answering
            .join()
            .expect("the answering thread does not panic")
            .map(|()| groups)
    })?;
    groups.sort_by(f64::total_cmp);
    let ns = groups[GROUPS * PERCENTILE / 100];
    Ok(Distance {
        ns,
        state: State::of(ns),
    })
}

/// A counter on a cache line of its own: odd is the caller's move, even the other's.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

fn time_group(clock: Clock, line: &Line, group: u64) -> f64 {
    let start = ticks();
    for round in 0..ROUNDS {
        let ball = (group * ROUNDS + round) * 2 + 1;
        line.0.store(ball, Ordering::Release);
        while line.0.load(Ordering::Acquire) != ball + 1 {
            std::hint::spin_loop();
        }
    }
    clock.ns(start, ticks()) as f64 / (2 * ROUNDS) as f64
}

fn answer(line: &Line, stop: &AtomicBool, cpu: usize) -> Result<()> {
    let pinned = pin(cpu);
    while !stop.load(Ordering::Acquire) {
        let ball = line.0.load(Ordering::Acquire);
        if ball % 2 == 1 {
            line.0.store(ball + 1, Ordering::Release);
        } else {
            std::hint::spin_loop();
        }
    }
    pinned
}
