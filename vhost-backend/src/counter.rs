//! Counters that one thread writes and any may read.

use std::sync::atomic::{AtomicU64, Ordering};

/// Adds without a locked instruction. Only one thread may write the counter.
#[inline]
pub fn add(counter: &AtomicU64, amount: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(amount),
        Ordering::Relaxed,
    );
}
