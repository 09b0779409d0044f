//! Reads of the database on the runtime's threads for blocking calls.

use tokio::sync::Semaphore;
use tokio::task::JoinError;

/// Concurrent reads of all namespace groups together. Further reads wait. Guests and other nodes decide how
/// many callers there are: without a limit their reads would occupy all threads for blocking calls, on which
/// Raft writes its log.
const READS_MAX: usize = 8;

static READS: Semaphore = Semaphore::const_new(READS_MAX);

/// Runs a blocking read when a permit is free.
pub(super) async fn read<T: Send + 'static>(
    read: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let turn = READS
        .acquire()
        .await
        .expect("the semaphore is never closed");
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        read()
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn reads_beyond_the_limit_wait_and_complete() {
        let (now, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let reads = (0..16 * READS_MAX).map(|number| {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            tokio::spawn(read(move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                now.fetch_sub(1, Ordering::SeqCst);
                number
            }))
        });
        for (number, one) in reads.collect::<Vec<_>>().into_iter().enumerate() {
            assert_eq!(one.await.unwrap().unwrap(), number);
        }
        let most = most.load(Ordering::SeqCst);
        assert!(most <= READS_MAX, "{most} at once");
    }
}
