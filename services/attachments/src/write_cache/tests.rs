use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

const TOGGLES: u32 = 10_000;
/// Records that those may cause in ten seconds: nine at once and one each second, and what waits then.
const RECORDS_MAX: usize = 24;

/// What a guest relies on, and what meta has, with a clock of its own.
struct Model {
    record: ModeRecord,
    now: Instant,
    in_meta: bool,
    records: Vec<bool>,
}

impl Model {
    fn new(writeback: bool) -> Self {
        let now = Instant::now();
        Self {
            record: ModeRecord::new(writeback, now),
            now,
            in_meta: writeback,
            records: Vec::new(),
        }
    }

    fn carry_out(&mut self, step: Step) -> Option<Duration> {
        match step {
            Step::Nothing => None,
            Step::Wait(pause) => Some(pause),
            Step::Record { writeback } => {
                self.records.push(writeback);
                self.in_meta = writeback;
                self.record.done(writeback);
                None
            }
        }
    }

    /// The guest chooses, and is answered. From now on it relies on that, whatever happens to the daemon.
    fn choose(&mut self, writeback: bool) {
        let step = self.record.choose(writeback, self.now);
        self.carry_out(step);
        assert!(writeback || !self.in_meta, "a restart breaks a promise");
    }

    /// The task that records later has its way.
    fn rest(&mut self) {
        while let step @ (Step::Wait(_) | Step::Record { .. }) = self.record.step(self.now) {
            let pause = self.carry_out(step);
            self.now += pause.unwrap_or_default();
        }
    }
}

#[test]
fn toggles_cause_few_records_and_the_last_choice_stays() {
    for last in [false, true] {
        let mut model = Model::new(true);
        for toggle in 0..TOGGLES {
            model.choose((toggle % 2 == 0) != last);
            model.now += Duration::from_millis(1);
        }
        assert_eq!(model.record.wanted, last);
        model.rest();
        assert_eq!(model.in_meta, last);
        let count = model.records.len();
        assert!((3..=RECORDS_MAX).contains(&count), "{count} records");
    }
}

#[test]
fn a_pause_lets_a_guest_switch_as_often_again() {
    let mut model = Model::new(true);
    for _ in 0..3 {
        let before = model.records.len();
        for _ in 0..BURST {
            model.choose(false);
            model.choose(true);
        }
        assert_eq!(model.records.len() - before, 2 * BURST as usize);
        model.choose(false);
        model.choose(true);
        assert_eq!(model.records.len() - before, 2 * BURST as usize + 1);
        model.rest();
        assert!(model.in_meta);
        model.now += PAUSE * (BURST + 1);
    }
}

#[test]
fn a_mode_that_nobody_knows_is_recorded_again() {
    let mut model = Model::new(false);
    let now = model.now;
    assert_eq!(
        model.record.choose(true, now),
        Step::Record { writeback: true }
    );
    // That failed, and may be in meta all the same.
    assert_eq!(
        model.record.choose(false, now),
        Step::Record { writeback: false }
    );
    model.record.done(false);
    assert_eq!(model.record.choose(false, now), Step::Nothing);
}

/// Records in memory.
#[derive(Default)]
struct Memory {
    records: StdMutex<Vec<bool>>,
    refuses: AtomicBool,
}

impl Recorder for Arc<Memory> {
    async fn record(&self, writeback: bool) -> Result<(), String> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err("no".to_owned());
        }
        self.records.lock().unwrap().push(writeback);
        Ok(())
    }
}

impl Memory {
    fn all(&self) -> Vec<bool> {
        self.records.lock().unwrap().clone()
    }
}

fn keeper() -> (Arc<Memory>, Keeper<Arc<Memory>>) {
    let memory = Arc::new(Memory::default());
    (Arc::clone(&memory), Keeper::new(memory, true))
}

#[tokio::test]
async fn what_waits_is_recorded_when_the_daemon_stops() {
    let (memory, keeper) = keeper();
    for _ in 0..TOGGLES {
        keeper.choose(false).await.unwrap();
        keeper.choose(true).await.unwrap();
    }
    assert_eq!(memory.all().last(), Some(&false), "the safe one");
    assert!(memory.all().len() < 20);
    keeper.close().await;
    assert_eq!(memory.all().last(), Some(&true));
    let count = memory.all().len();
    keeper.close().await;
    assert_eq!(memory.all().len(), count, "once");
}

#[tokio::test]
async fn what_waits_is_recorded_later_without_another_choice() {
    let (memory, keeper) = keeper();
    for _ in 0..=BURST {
        keeper.choose(false).await.unwrap();
        keeper.choose(true).await.unwrap();
    }
    assert_eq!(memory.all().last(), Some(&false));
    while memory.all().last() == Some(&false) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(memory.all().len() as u32, 2 * (BURST + 1));
}

#[tokio::test]
async fn without_metadata_only_writeback_is_granted() {
    let (memory, keeper) = keeper();
    keeper.choose(false).await.unwrap();
    memory.refuses.store(true, Ordering::Relaxed);
    keeper.choose(true).await.unwrap();
    assert!(keeper.choose(false).await.is_err());
    memory.refuses.store(false, Ordering::Relaxed);
    keeper.close().await;
    assert_eq!(memory.all(), [false, true], "as the guest was told");
    keeper.choose(false).await.unwrap();
    assert_eq!(memory.all(), [false, true, false]);
}
