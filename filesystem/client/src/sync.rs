//! What tasks wait for, without a runtime: locks, permits, signals. All are fair: whoever waits longest is
//! next.
//!
//! A thing that is waited for is handed over through a channel. Whoever stopped waiting drops it unused, and
//! dropping passes it on.

mod keyed_locks;
mod semaphore;
mod signal;

pub(crate) use keyed_locks::{KeyedGuard, KeyedLocks, Mode};
pub(crate) use semaphore::{Permit, Semaphore};
pub(crate) use signal::Signal;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks what is consistent at any time, so that a panic of another task does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
