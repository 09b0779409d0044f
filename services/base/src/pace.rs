//! How fast background work goes, and when it ends.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::found::{Pace, Work};

/// Pause between two checks of how much work is left.
pub const LOOK_PAUSE: Duration = Duration::from_secs(5);
/// A rate is made of what was seen in this time.
const WINDOW: Duration = Duration::from_secs(300);
/// Work that did not move for this long has no rate.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// Work without progress for this long is reported as stalled: a large placement group takes minutes.
const STALL_TOLD_AFTER: Duration = Duration::from_secs(600);
/// Most looks that are remembered of one piece of work: those of the window.
const SAMPLES_MAX: usize = (WINDOW.as_secs() / LOOK_PAUSE.as_secs()) as usize;

/// The pace of all background work.
#[derive(Debug, Default)]
pub struct Paces(Mutex<BTreeMap<Work, WorkPace>>);

impl Paces {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Work, WorkPace>> {
        // A panic leaves a wrong estimate at worst.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pace of work.
    pub fn of(&self, work: Work) -> Pace {
        let paces = self.lock();
        let pace = paces.get(&work);
        pace.map_or(Pace::Unknown, |pace| pace.at(Instant::now()))
    }

    /// Takes what is left of all work there is.
    pub fn note(&self, left: &BTreeMap<Work, usize>, now: Instant) {
        let mut paces = self.lock();
        paces.retain(|work, _| left.contains_key(work));
        for (work, left) in left {
            paces.entry(*work).or_default().push(*left, now);
        }
    }
}

/// How fast something becomes less.
#[derive(Debug, Default)]
struct WorkPace {
    samples: VecDeque<(Instant, usize)>,
    /// The least that was ever left of this work, and when that became less. What only comes and goes is no
    /// progress.
    least: Option<usize>,
    moved: Option<Instant>,
    /// When less was left than before, or it began.
    fell: Option<Instant>,
}

impl WorkPace {
    fn push(&mut self, left: usize, now: Instant) {
        let before = self.samples.back().map(|(_, left)| *left);
        // Work that begins again was not finished before.
        if before.is_none_or(|before| left < before || before == 0) {
            self.fell = Some(now);
        }
        match self.least {
            Some(least) if left < least => (self.least, self.moved) = (Some(left), Some(now)),
            // More work came: what was done before says nothing of how long this takes.
            Some(least) if left > 2 * least + 1 => {
                self.samples.clear();
                (self.least, self.moved, self.fell) = (Some(left), None, Some(now));
            }
            Some(_) => {}
            None => self.least = Some(left),
        }
        // The time before it began says nothing of how long it takes.
        if self
            .samples
            .front()
            .is_some_and(|(_, first)| *first <= left)
        {
            self.samples.clear();
        }
        self.samples.push_back((now, left));
        while self.samples.len() > SAMPLES_MAX {
            self.samples.pop_front();
        }
    }

    fn at(&self, now: Instant) -> Pace {
        let since = |then: Instant| now.saturating_duration_since(then);
        match (self.fell.map(since), self.moved.map(since)) {
            (Some(lasted), _) if lasted >= STALL_TOLD_AFTER => Pace::Stalled(lasted),
            (_, Some(lasted)) if lasted < STALLED_AFTER => {
                self.eta_s().map_or(Pace::Unknown, Pace::Left)
            }
            _ => Pace::Unknown,
        }
    }

    fn eta_s(&self) -> Option<u64> {
        let ((start, before), (end, left)) = (self.samples.front()?, self.samples.back()?);
        let done = before.checked_sub(*left).filter(|done| *done > 0)?;
        let took = end.saturating_duration_since(*start).as_secs_f64();
        Some((took * *left as f64 / done as f64).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::Code;
    use crate::found::Found;

    const STEP: Duration = Duration::from_secs(10);

    #[test]
    fn an_estimate_needs_a_rate_and_goes_when_the_work_stalls() {
        let mut now = Instant::now();
        let mut pace = WorkPace::default();
        pace.push(100, now);
        assert_eq!(pace.at(now).eta_s(), None);
        for left in [90, 80, 60] {
            now += STEP;
            pace.push(left, now);
        }
        // 40 in 30 s, so 60 take 45 s.
        assert_eq!(pace.at(now).eta_s(), Some(45));
        let moved = now;
        now += STALLED_AFTER;
        pace.push(60, now);
        assert_eq!(pace.at(now), Pace::Unknown);
        now = moved + STALL_TOLD_AFTER;
        pace.push(60, now);
        let stalled = pace.at(now);
        assert_eq!(stalled, Pace::Stalled(STALL_TOLD_AFTER));
        let found = Found::new(Code::PoolMoving, 1, "groups move", "wait").paced(stalled);
        assert_eq!(
            found.problem.doing,
            "wait; not progressing, or with very large placement groups: none was finished for 10 min"
        );
        // New work begins a new rate.
        pace.push(200, now);
        assert_eq!(pace.at(now), Pace::Unknown);
        now += STEP;
        pace.push(100, now);
        assert_eq!(pace.at(now).eta_s(), Some(10));
        now += STEP;
        pace.push(0, now);
        assert_eq!(pace.at(now).eta_s(), Some(0));
    }

    #[test]
    fn time_before_the_work_began_is_not_counted() {
        let mut now = Instant::now();
        let mut pace = WorkPace::default();
        // A node is away, then back.
        for left in [100, 100, 100, 100, 80, 60] {
            pace.push(left, now);
            now += STEP;
        }
        assert_eq!(pace.at(now).eta_s(), Some(30));
    }

    #[test]
    fn work_that_comes_and_goes_has_no_estimate() {
        let mut now = Instant::now();
        let mut pace = WorkPace::default();
        for left in [8, 4, 1] {
            now += STEP;
            pace.push(left, now);
        }
        assert!(pace.at(now).eta_s().is_some());
        for left in [2, 1].into_iter().cycle().take(20) {
            now += STEP;
            pace.push(left, now);
        }
        assert_eq!(pace.at(now).eta_s(), None);
        // Something is done all the time.
        for left in [2, 1].into_iter().cycle().take(200) {
            now += STEP;
            pace.push(left, now);
            assert_eq!(pace.at(now), Pace::Unknown);
        }
    }

    #[test]
    fn what_is_remembered_of_work_is_bounded() {
        let mut pace = WorkPace::default();
        let start = Instant::now();
        for step in 0..10 * SAMPLES_MAX {
            pace.push(100_000 - step, start + STEP * step as u32);
        }
        assert_eq!(pace.samples.len(), SAMPLES_MAX);
    }
}
