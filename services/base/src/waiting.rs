//! Threads for blocking calls, and waiting for slow work without such a thread.
//!
//! The runtime runs blocking calls on a pool of [`BLOCKING_THREADS_MAX`] threads; further calls queue. Raft
//! also writes its log there, so no call in the pool may wait for guests, other nodes or another call: the
//! ends of threads are polled ([`ended`]), and calls of helper processes have a separate limit
//! ([`HELPER_CALLS_MAX`]).

use std::thread::JoinHandle;
use std::time::Duration;

use api::failure::{Context, Failure, Kind, Result};
use tokio::sync::Semaphore;

/// Threads of the control plane: one that works and one that answers meanwhile.
pub const CONTROL_THREADS: usize = 2;
/// Threads of the runtime for blocking calls: reads and writes of RocksDB, device files. Further calls wait
/// in order of arrival. Each is short, so more threads would only compete for processors and devices.
pub const BLOCKING_THREADS_MAX: usize = 32;
/// Concurrent calls of one helper process, each of which may take minutes. Further calls wait. The two
/// helpers together leave half of the pool to other calls.
pub const HELPER_CALLS_MAX: usize = 8;
/// Pause between two checks of a condition that cannot wake a task.
const LOOK_PAUSE: Duration = Duration::from_millis(2);

const _: () = assert!(2 * HELPER_CALLS_MAX <= BLOCKING_THREADS_MAX / 2);

/// The control plane's runtime.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_name("control")
        .enable_all()
        .build()
        .context(|| "start the control plane".into())
}

/// Runs what waits for devices beside the control plane's own threads.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| Failure::plain(Kind::Failed, e))?
}

/// Waits until a thread has ended, however long that takes.
pub async fn ended<T>(thread: JoinHandle<T>) -> std::thread::Result<T> {
    until(|| thread.is_finished()).await;
    // The thread has ended, so this does not block.
    thread.join()
}

/// Waits until `is_so` returns true. It is called every two milliseconds and must not block.
pub async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Limit on the concurrent calls of a helper process.
#[derive(Debug)]
pub struct HelperCalls(Semaphore);

impl Default for HelperCalls {
    fn default() -> Self {
        Self(Semaphore::new(HELPER_CALLS_MAX))
    }
}

impl HelperCalls {
    /// Calls the helper when a permit is free.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let failed = |error: String| Failure::plain(Kind::Failed, error);
        let turn = self.0.acquire().await;
        let _turn = turn.map_err(|error| failed(error.to_string()))?;
        let answer = tokio::task::spawn_blocking(question).await;
        answer.map_err(|error| failed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn threads_for_blocking_calls_are_limited() {
        let runtime = runtime().unwrap();
        let (now, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        runtime.block_on(async {
            let calls = (0..4 * BLOCKING_THREADS_MAX).map(|_| {
                let (now, most) = (Arc::clone(&now), Arc::clone(&most));
                tokio::task::spawn_blocking(move || {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(5));
                    now.fetch_sub(1, Ordering::SeqCst);
                })
            });
            for call in calls.collect::<Vec<_>>() {
                call.await.unwrap();
            }
        });
        let most = most.load(Ordering::SeqCst);
        assert!(most <= BLOCKING_THREADS_MAX, "{most} threads");
    }

    #[tokio::test]
    async fn concurrent_calls_of_a_helper_are_limited() {
        let calls = Arc::new(HelperCalls::default());
        let (now, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let asked = (0..4 * HELPER_CALLS_MAX).map(|_| {
            let (calls, now, most) = (Arc::clone(&calls), Arc::clone(&now), Arc::clone(&most));
            tokio::spawn(async move {
                let question = move || {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(2));
                    now.fetch_sub(1, Ordering::SeqCst);
                };
                calls.ask(question).await
            })
        });
        for one in asked.collect::<Vec<_>>() {
            one.await.unwrap().unwrap();
        }
        let most = most.load(Ordering::SeqCst);
        assert!(most <= HELPER_CALLS_MAX, "{most} at once");
    }

    #[tokio::test]
    async fn waiting_for_threads_delays_no_blocking_call() {
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = Arc::new(std::sync::Mutex::new(ends));
        let waiting = (0..2 * BLOCKING_THREADS_MAX).map(|_| {
            let ends = Arc::clone(&ends);
            let thread = std::thread::spawn(move || ends.lock().unwrap().recv().is_err());
            tokio::spawn(ended(thread))
        });
        let waiting: Vec<_> = waiting.collect();
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        assert!(waiting.iter().all(|one| !one.is_finished()));
        drop(end);
        for one in waiting {
            assert!(one.await.unwrap().unwrap(), "the channel is closed");
        }
    }
}
