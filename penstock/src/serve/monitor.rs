//! What a daemon watches by itself: since when something is wrong, and how fast work goes that has an end.
//! Every few seconds it also tells the leader how this node is, so that any node can tell, and forgets
//! devices that were being emptied and are empty.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::failure::Result;
use api::moment::Moment;
use meta::{DeviceId, DeviceReport, NodeReport, ProblemReport};
use service::found::{Found, Pace, Work};
use service::view::work;

use super::node::Node;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(5);
/// A node's word that does not reach the leader within this is said again later.
const TELL_WAIT_MAX: Duration = Duration::from_secs(2);
/// A rate is made of what was seen in this time.
const WINDOW: Duration = Duration::from_secs(300);
/// Work that did not move for this long has no rate.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// Work that did not move for this long is told: a large placement group takes minutes.
const STALL_TOLD_AFTER: Duration = Duration::from_secs(600);
/// Most looks that are remembered of one piece of work: those of the window.
const SAMPLES_MAX: usize = (WINDOW.as_secs() / PAUSE.as_secs()) as usize;

/// What is remembered between looks.
#[derive(Default)]
pub struct Monitor(Mutex<MonitorState>);

#[derive(Default)]
struct MonitorState {
    paces: BTreeMap<Work, MonitorPace>,
    /// When problems of these names were seen first.
    seen: BTreeMap<(String, String), Moment>,
    /// What was wrong with attachments when they were looked at last.
    served: Vec<Found>,
    /// What nodes said of their devices.
    devices: BTreeMap<DeviceId, DeviceReport>,
}

impl Monitor {
    fn lock(&self) -> MutexGuard<'_, MonitorState> {
        // What a panic leaves half done is a wrong estimate at worst.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pace of work.
    pub fn pace(&self, work: Work) -> Pace {
        let state = self.lock();
        let pace = state.paces.get(&work);
        pace.map_or(Pace::Unknown, |pace| pace.at(Instant::now()))
    }

    /// Takes what is left of all work there is.
    pub fn note(&self, left: &BTreeMap<Work, usize>, now: Instant) {
        let mut state = self.lock();
        state.paces.retain(|work, _| left.contains_key(work));
        for (work, left) in left {
            state.paces.entry(*work).or_default().push(*left, now);
        }
    }

    /// Keeps what nodes say of their devices.
    fn remember_devices(&self, words: BTreeMap<DeviceId, DeviceReport>) {
        self.lock().devices = words;
    }

    /// What nodes said of their devices when this one looked last. Waits for nobody.
    pub fn device_words(&self) -> BTreeMap<DeviceId, DeviceReport> {
        self.lock().devices.clone()
    }

    /// Keeps what is wrong with attachments, and gives it back.
    pub fn remember_served(&self, problems: Vec<Found>) -> Vec<Found> {
        self.lock().served.clone_from(&problems);
        problems
    }

    /// What was wrong with attachments when they were looked at last.
    pub fn served_before(&self) -> Vec<Found> {
        self.lock().served.clone()
    }

    /// Fills in since when problems are there that do not say it; forgets those that are not there any more.
    pub fn stamp<'a>(&self, found: impl Iterator<Item = &'a mut Found>, now: Moment) {
        let mut state = self.lock();
        let mut seen = BTreeMap::new();
        for one in found {
            let key = (one.problem.code.clone(), one.of.clone());
            let first = state.seen.get(&key).copied().unwrap_or(now);
            one.problem.since.get_or_insert(first);
            seen.insert(key, first);
        }
        state.seen = seen;
    }
}

/// How fast something becomes less.
#[derive(Debug, Default)]
struct MonitorPace {
    samples: VecDeque<(Instant, usize)>,
    /// The least that was ever left of this work, and when that became less. What only comes and goes is no
    /// progress.
    least: Option<usize>,
    moved: Option<Instant>,
    /// When less was left than before, or it began.
    fell: Option<Instant>,
}

impl MonitorPace {
    fn push(&mut self, left: usize, now: Instant) {
        let before = self.samples.back().map(|(_, left)| *left);
        // What begins anew was not finished before.
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

/// Watches for as long as the node lives.
pub fn keep(node: &Arc<Node>) {
    let node = Arc::downgrade(node);
    tokio::spawn(async move {
        let mut told = false;
        while let Some(node) = node.upgrade() {
            match node.look().await {
                Ok(()) => told = false,
                // Said once: it is looked again.
                Err(failure) if !told => {
                    told = true;
                    tracing::warn!(%failure, "look after the cluster");
                }
                Err(_) => {}
            }
            drop(node);
            tokio::time::sleep(PAUSE).await;
        }
    });
}

impl Node {
    async fn look(&self) -> Result<()> {
        let view = self.view_as_applied(self.leader_report().await)?;
        self.monitor.note(&work(&view), Instant::now());
        self.monitor.remember_devices(self.reported_space(&view));
        let local = self.health_of(&view).await.local;
        // Without a leader nothing is kept; that must not hold up what follows.
        let kept = tokio::time::timeout(TELL_WAIT_MAX, self.keep_notices(&view, &local)).await;
        if let Ok(Err(failure)) = kept {
            tracing::warn!(%failure, "keep what was noticed as events");
        }
        let problem = |found: Found| ProblemReport {
            code: found.problem.code,
            what: found.problem.what,
            since: found.problem.since.map(Moment::to_millis),
            doing: found.problem.doing,
        };
        let word = NodeReport {
            devices: self.device_words(&view.map),
            problems: local.into_iter().map(problem).collect(),
        };
        // Without a leader nobody would tell of it anyway.
        let _ = tokio::time::timeout(TELL_WAIT_MAX, self.meta.tell(word)).await;
        self.follow_on_full();
        let registered = self.register_added().await;
        self.forget_emptied(&view).await?;
        registered
    }
}

#[cfg(test)]
mod tests {
    use service::code::Code;

    use super::*;

    const STEP: Duration = Duration::from_secs(10);

    #[test]
    fn an_estimate_needs_a_rate_and_goes_when_the_work_stalls() {
        let mut now = Instant::now();
        let mut pace = MonitorPace::default();
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
        let mut pace = MonitorPace::default();
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
        let mut pace = MonitorPace::default();
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
        let mut pace = MonitorPace::default();
        let start = Instant::now();
        for step in 0..10 * SAMPLES_MAX {
            pace.push(100_000 - step, start + STEP * step as u32);
        }
        assert_eq!(pace.samples.len(), SAMPLES_MAX);
    }

    #[test]
    fn a_problem_keeps_its_beginning_until_it_is_gone() {
        let monitor = Monitor::default();
        let at = |ms: u64| Moment::from(meta::UnixMillis(ms));
        let stamped = |now| {
            let mut found = [Found::new(Code::NodeDown, "a", "what", "")];
            monitor.stamp(found.iter_mut(), now);
            found[0].problem.since
        };
        assert_eq!(stamped(at(1000)), Some(at(1000)));
        assert_eq!(stamped(at(2000)), Some(at(1000)));
        monitor.stamp([].iter_mut(), at(3000));
        assert_eq!(stamped(at(4000)), Some(at(4000)));
    }
}
