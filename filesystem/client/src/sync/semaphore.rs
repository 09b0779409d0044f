//! A bounded number of permits.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use futures_channel::oneshot::{Sender, channel};

use super::lock;

/// Gives out permits, and has others wait in order of arrival.
#[derive(Clone)]
pub(crate) struct Semaphore(Arc<Mutex<State>>);

struct State {
    free: usize,
    waiting: VecDeque<Sender<Permit>>,
}

/// Given back when it is dropped.
pub(crate) struct Permit(Semaphore);

impl Semaphore {
    pub(crate) fn new(permits: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            free: permits,
            waiting: VecDeque::new(),
        })))
    }

    pub(crate) async fn acquire(&self) -> Permit {
        loop {
            let turn = {
                let mut state = lock(&self.0);
                if state.free > 0 {
                    state.free -= 1;
                    return Permit(self.clone());
                }
                let (sender, receiver) = channel();
                state.waiting.push_back(sender);
                receiver
            };
            if let Ok(permit) = turn.await {
                return permit;
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let next = {
            let mut state = lock(&self.0.0);
            let next = state.waiting.pop_front();
            if next.is_none() {
                state.free += 1;
            }
            next
        };
        if let Some(next) = next {
            // If nobody waits there any more, the new permit is dropped here and goes to the one behind.
            drop(next.send(Self(self.0.clone())));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;
    use futures_util::poll;

    use super::*;

    #[test]
    fn permits_go_to_whoever_waits_longest_and_still_waits() {
        let semaphore = Semaphore::new(1);
        let first = semaphore.acquire().now_or_never().unwrap();
        let mut gone = Box::pin(semaphore.acquire());
        let mut second = pin!(semaphore.acquire());
        let mut third = pin!(semaphore.acquire());
        let body = async {
            assert!(poll!(&mut gone).is_pending());
            assert!(poll!(&mut second).is_pending());
            assert!(poll!(&mut third).is_pending());
            drop(gone);
            drop(first);
            let second = (&mut second).await;
            assert!(poll!(&mut third).is_pending());
            drop(second);
            drop((&mut third).await);
        };
        body.now_or_never().unwrap();
        assert!(semaphore.acquire().now_or_never().is_some());
    }
}
