//! A lock for each of many things, there only while it is used.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use futures_channel::oneshot::{Sender, channel};

use super::lock;

/// How a thing is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// With others that share it.
    Shared,
    /// Alone.
    Exclusive,
}

/// The locks.
pub(crate) struct KeyedLocks<K: Copy + Eq + Hash>(Arc<Mutex<HashMap<K, Lock<K>>>>);

struct Lock<K: Copy + Eq + Hash> {
    holders: usize,
    mode: Mode,
    waiting: VecDeque<(Mode, Sender<KeyedGuard<K>>)>,
}

/// A locked thing; dropping it unlocks.
pub(crate) struct KeyedGuard<K: Copy + Eq + Hash> {
    locks: KeyedLocks<K>,
    key: K,
    /// Dropping it does not unlock: the caller does.
    is_disarmed: bool,
}

impl<K: Copy + Eq + Hash> Lock<K> {
    fn admits(&self, mode: Mode) -> bool {
        self.holders == 0 || self.mode == Mode::Shared && mode == Mode::Shared
    }

    fn admit(&mut self, mode: Mode) {
        self.holders += 1;
        self.mode = mode;
    }
}

impl<K: Copy + Eq + Hash> Default for KeyedLocks<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Copy + Eq + Hash> KeyedLocks<K> {
    /// Locks, in order of arrival: a sharer that comes behind a waiting exclusive one waits, too.
    pub(crate) async fn lock(&self, key: K, mode: Mode) -> KeyedGuard<K> {
        loop {
            let turn = {
                let mut table = lock(&self.0);
                let entry = table.entry(key).or_insert_with(|| Lock {
                    holders: 0,
                    mode,
                    waiting: VecDeque::new(),
                });
                if entry.waiting.is_empty() && entry.admits(mode) {
                    entry.admit(mode);
                    return self.guard(key);
                }
                let (sender, receiver) = channel();
                entry.waiting.push_back((mode, sender));
                receiver
            };
            if let Ok(guard) = turn.await {
                return guard;
            }
        }
    }

    fn guard(&self, key: K) -> KeyedGuard<K> {
        KeyedGuard {
            locks: Self(Arc::clone(&self.0)),
            key,
            is_disarmed: false,
        }
    }

    /// Ends one hold of a thing. Returns the waiters that hold it from now on.
    fn release(&self, key: K) -> Vec<Sender<KeyedGuard<K>>> {
        let mut admitted = Vec::new();
        let mut table = lock(&self.0);
        let entry = table.get_mut(&key);
        let entry = entry.expect("a locked thing is in the table");
        entry.holders -= 1;
        while let Some((mode, next)) = entry.waiting.pop_front() {
            if !entry.admits(mode) {
                entry.waiting.push_front((mode, next));
                break;
            }
            entry.admit(mode);
            admitted.push(next);
        }
        if entry.holders == 0 {
            table.remove(&key);
        }
        admitted
    }

    /// Things that are locked or waited for.
    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

impl<K: Copy + Eq + Hash> Drop for KeyedGuard<K> {
    fn drop(&mut self) {
        let mut holds = usize::from(!self.is_disarmed);
        while holds > 0 {
            holds -= 1;
            for next in self.locks.release(self.key) {
                // A waiter that is gone holds nothing. To drop its guard armed would recurse for each waiter
                // that is gone, and the stack may not have room for all of them.
                if let Err(mut guard) = next.send(self.locks.guard(self.key)) {
                    guard.is_disarmed = true;
                    holds += 1;
                }
            }
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
    fn locks_are_taken_in_order_of_arrival_and_go_when_unused() {
        let locks = KeyedLocks::default();
        let body = async {
            let first = locks.lock(1, Mode::Shared).await;
            let also = locks.lock(1, Mode::Shared).await;
            let mut writer = pin!(locks.lock(1, Mode::Exclusive));
            assert!(poll!(&mut writer).is_pending());
            let mut reader = pin!(locks.lock(1, Mode::Shared));
            assert!(poll!(&mut reader).is_pending(), "behind the writer");
            let other = locks.lock(2, Mode::Exclusive).await;
            drop(first);
            assert!(poll!(&mut writer).is_pending());
            drop(also);
            let writer = writer.await;
            assert!(poll!(&mut reader).is_pending());
            drop(writer);
            drop(reader.await);
            assert_eq!(locks.len(), 1);
            drop(other);
        };
        body.now_or_never().unwrap();
        assert_eq!(locks.len(), 0);
    }

    #[test]
    fn a_waiter_that_is_gone_is_passed_by() {
        let locks = KeyedLocks::default();
        let body = async {
            let first = locks.lock(1, Mode::Exclusive).await;
            let mut gone = Box::pin(locks.lock(1, Mode::Exclusive));
            let mut next = pin!(locks.lock(1, Mode::Exclusive));
            assert!(poll!(&mut gone).is_pending());
            assert!(poll!(&mut next).is_pending());
            drop(gone);
            drop(first);
            drop(next.await);
        };
        body.now_or_never().unwrap();
        assert_eq!(locks.len(), 0);
    }
    #[test]
    fn any_number_of_waiters_may_be_gone() {
        let locks = KeyedLocks::default();
        let body = async {
            let first = locks.lock(1, Mode::Exclusive).await;
            let lock = |_| Box::pin(locks.lock(1, Mode::Exclusive));
            let mut gone: Vec<_> = (0..100_000).map(lock).collect();
            for waiter in &mut gone {
                assert!(poll!(waiter).is_pending());
            }
            drop(gone);
            drop(first);
        };
        body.now_or_never().unwrap();
        assert_eq!(locks.len(), 0);
    }
}
