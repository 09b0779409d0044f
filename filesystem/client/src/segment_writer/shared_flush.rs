//! One flush for all that wait for one.
//!
//! A flush covers the writes that had finished when it began. Whoever comes while one is under way waits for
//! the next, which begins when that one ends, for all that came until then.

use std::future::Future;
use std::sync::{Arc, Mutex};

use futures_channel::oneshot::{Sender, channel};

use crate::backend::DataError;
use crate::sync::lock;

type Flushed = Result<u64, DataError>;

#[derive(Clone, Default)]
pub(crate) struct SharedFlush(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Somebody flushes, or is about to.
    is_led: bool,
    waiting: Vec<Sender<Answer>>,
}

enum Answer {
    /// A flush that covers the waiter's writes.
    Flushed(Flushed),
    /// The waiter is to flush, for all that wait.
    Lead(Lead),
}

/// The right to flush. Dropping it passes it on.
struct Lead(SharedFlush);

impl SharedFlush {
    /// Completes after a flush that began after this call; `flush` does one if it falls to this caller.
    pub(crate) async fn flush<F>(&self, mut flush: impl FnMut() -> F) -> Flushed
    where
        F: Future<Output = Flushed>,
    {
        loop {
            let turn = {
                let mut state = lock(&self.0);
                match state.is_led {
                    false => {
                        state.is_led = true;
                        None
                    }
                    true => {
                        let (sender, receiver) = channel();
                        state.waiting.push(sender);
                        Some(receiver)
                    }
                }
            };
            let lead = match turn {
                None => Lead(self.clone()),
                Some(turn) => match turn.await {
                    Ok(Answer::Flushed(flushed)) => return flushed,
                    Ok(Answer::Lead(lead)) => lead,
                    // Whoever flushed for this caller stopped before it was done.
                    Err(_) => continue,
                },
            };
            let covered = std::mem::take(&mut lock(&self.0).waiting);
            let flushed = flush().await;
            for waiter in covered {
                // One that is gone needs no answer.
                drop(waiter.send(Answer::Flushed(flushed)));
            }
            drop(lead);
            return flushed;
        }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        let next = {
            let mut state = lock(&self.0.0);
            match state.waiting.is_empty() {
                true => {
                    state.is_led = false;
                    None
                }
                false => Some(state.waiting.remove(0)),
            }
        };
        if let Some(next) = next {
            // If nobody waits there any more, the lead is dropped here and goes to the one behind.
            drop(next.send(Answer::Lead(Self(self.0.clone()))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::pin::pin;

    use futures_util::{FutureExt, poll};

    use super::*;

    #[test]
    fn flushes_are_shared_by_all_that_wait_when_they_begin() {
        let (shared, running) = (SharedFlush::default(), RefCell::new(Vec::new()));
        let flush = || {
            let (sender, receiver) = channel::<Flushed>();
            running.borrow_mut().push(Some(sender));
            async { receiver.await.unwrap() }
        };
        let finish = |at: usize, flushed: Flushed| {
            let sender = running.borrow_mut()[at].take().unwrap();
            sender.send(flushed).unwrap();
        };
        let body = async {
            let mut first = pin!(shared.flush(flush));
            let mut second = pin!(shared.flush(flush));
            let mut third = pin!(shared.flush(flush));
            assert!(poll!(&mut first).is_pending());
            assert!(poll!(&mut second).is_pending());
            assert!(poll!(&mut third).is_pending());
            assert_eq!(running.borrow().len(), 1, "the others wait for the next");
            finish(0, Ok(7));
            assert_eq!((&mut first).await, Ok(7));
            assert!(poll!(&mut third).is_pending(), "not covered by the first");
            assert!(poll!(&mut second).is_pending());
            assert_eq!(running.borrow().len(), 2);
            let mut late = pin!(shared.flush(flush));
            assert!(poll!(&mut late).is_pending());
            finish(1, Err(DataError::Io));
            assert_eq!((&mut second).await, Err(DataError::Io));
            assert_eq!((&mut third).await, Err(DataError::Io));
            assert!(poll!(&mut late).is_pending());
            assert_eq!(running.borrow().len(), 3, "one flush for two");
            finish(2, Ok(8));
            assert_eq!(late.await, Ok(8));
        };
        body.now_or_never().unwrap();
        assert!(!lock(&shared.0).is_led);
    }

    #[test]
    fn whoever_stops_flushing_passes_it_on() {
        let (shared, begun) = (SharedFlush::default(), RefCell::new(0));
        let never = || {
            *begun.borrow_mut() += 1;
            std::future::pending::<Flushed>()
        };
        let body = async {
            let mut first = Box::pin(shared.flush(never));
            let mut second = Box::pin(shared.flush(never));
            let mut third = pin!(shared.flush(|| async { Ok(3) }));
            assert!(poll!(&mut first).is_pending());
            assert!(poll!(&mut second).is_pending());
            assert!(poll!(&mut third).is_pending());
            drop(first);
            assert!(poll!(&mut second).is_pending());
            assert_eq!(*begun.borrow(), 2);
            drop(second);
            assert_eq!(third.await, Ok(3));
        };
        body.now_or_never().unwrap();
    }
}
