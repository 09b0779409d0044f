//! Polls futures in an order that a seed decides, on a clock of its own.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_channel::oneshot;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls of one run. A livelock ends the test.
const POLLS_MAX: u64 = 30_000_000;

/// Time and chance, shared by all that runs.
#[derive(Clone)]
pub struct Runtime(Arc<Mutex<State>>);

struct State {
    now: Duration,
    /// By time and order of arrival.
    timers: BTreeMap<(Duration, u64), Waker>,
    timers_made: u64,
    ready: Vec<usize>,
    new: Vec<Task>,
    random: ChaCha8Rng,
}

struct Wakes {
    task: usize,
    runtime: Runtime,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        let mut state = self.runtime.0.lock().unwrap();
        if !state.ready.contains(&self.task) {
            state.ready.push(self.task);
        }
    }
}

impl Runtime {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            now: Duration::ZERO,
            timers: BTreeMap::new(),
            timers_made: 0,
            ready: Vec::new(),
            new: Vec::new(),
            random: ChaCha8Rng::seed_from_u64(seed),
        })))
    }

    pub fn now(&self) -> Duration {
        self.0.lock().unwrap().now
    }

    /// A number below `end`.
    pub fn below(&self, end: u64) -> u64 {
        self.0.lock().unwrap().random.random_range(0..end)
    }

    /// True with this chance.
    pub fn happens(&self, chance: f64) -> bool {
        chance > 0.0 && self.0.lock().unwrap().random.random_bool(chance)
    }

    pub fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.lock().unwrap().random.fill_bytes(&mut bytes);
        bytes
    }

    pub async fn sleep(&self, duration: Duration) {
        // Its place among the timers.
        let mut place = None;
        std::future::poll_fn(|context| {
            let mut state = self.0.lock().unwrap();
            // Not even a sleep of no time ends at once: others have their turn.
            let is_first = place.is_none();
            let place = *place.get_or_insert_with(|| {
                state.timers_made += 1;
                (state.now + duration, state.timers_made)
            });
            if state.now >= place.0 && !is_first {
                return Poll::Ready(());
            }
            state.timers.insert(place, context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Runs a future beside the others; what it gives.
    pub fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (sender, receiver) = oneshot::channel();
        let task = async move {
            let _ = sender.send(future.await);
        };
        self.0.lock().unwrap().new.push(Box::pin(task));
        receiver
    }

    /// Runs until this future is done.
    pub fn run<T: Send + 'static>(&self, main: impl Future<Output = T> + Send + 'static) -> T {
        let mut result = self.spawn(main);
        let mut tasks: Vec<Option<(Task, Waker)>> = Vec::new();
        for _ in 0..POLLS_MAX {
            self.adopt(&mut tasks);
            let Some(next) = self.next_task() else {
                panic!("nothing goes on any more: a deadlock");
            };
            let Some((task, waker)) = tasks[next].as_mut() else {
                continue;
            };
            let is_done = task
                .as_mut()
                .poll(&mut Context::from_waker(waker))
                .is_ready();
            if is_done {
                tasks[next] = None;
            }
            if let Ok(Some(result)) = result.try_recv() {
                return result;
            }
        }
        panic!("it does not end: a livelock");
    }

    fn adopt(&self, tasks: &mut Vec<Option<(Task, Waker)>>) {
        let new = std::mem::take(&mut self.0.lock().unwrap().new);
        for task in new {
            let wakes = Wakes {
                task: tasks.len(),
                runtime: self.clone(),
            };
            self.0.lock().unwrap().ready.push(tasks.len());
            tasks.push(Some((task, Waker::from(Arc::new(wakes)))));
        }
    }

    /// A task that is ready; if there is none, time passes.
    fn next_task(&self) -> Option<usize> {
        loop {
            let waker = {
                let mut state = self.0.lock().unwrap();
                if !state.ready.is_empty() {
                    let count = state.ready.len();
                    let choice = state.random.random_range(0..count);
                    return Some(state.ready.swap_remove(choice));
                }
                let ((when, _), waker) = state.timers.pop_first()?;
                state.now = state.now.max(when);
                waker
            };
            waker.wake();
        }
    }
}
