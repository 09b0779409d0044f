//! Counters of what a device did, kept per queue so that threads never share a line.

use std::sync::atomic::{AtomicU64, Ordering};

use fabric_types::io::Op;

use crate::counter::add;

/// Declares the counters once, for the atomic and the plain form.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Sums at one moment.
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
        pub struct BlkCounters { $($(#[$doc])* pub $name: u64),+ }

        /// Counters of one queue, on cache lines of their own. One thread writes, any may read.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct QueueCounters { $($name: AtomicU64),+ }

        impl BlkCounters {
            /// Both together.
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name.wrapping_add(other.$name)),+ }
            }
        }

        impl QueueCounters {
            /// The sums now.
            pub fn snapshot(&self) -> BlkCounters {
                BlkCounters { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }
    };
}

counters! {
    /// Reads completed.
    reads,
    /// Bytes read.
    read_bytes,
    /// Writes completed.
    writes,
    /// Bytes written.
    written_bytes,
    /// Flushes completed.
    flushes,
    /// Discard requests completed.
    discards,
    /// Write-zeroes requests completed.
    write_zeroes,
    /// Requests answered with an error.
    errors,
    /// Times the guest was interrupted.
    interrupts,
}

impl QueueCounters {
    /// A request was completed.
    #[inline]
    pub fn completed(&self, op: Op, bytes: u64) {
        match op {
            Op::Read => {
                add(&self.reads, 1);
                add(&self.read_bytes, bytes);
            }
            Op::Write { .. } => {
                add(&self.writes, 1);
                add(&self.written_bytes, bytes);
            }
            Op::Flush => add(&self.flushes, 1),
            Op::Discard => add(&self.discards, 1),
            Op::WriteZeroes { .. } => add(&self.write_zeroes, 1),
        }
    }

    /// A request was answered with an error.
    #[cold]
    pub fn failed(&self) {
        add(&self.errors, 1);
    }

    /// The guest was interrupted.
    pub fn interrupted(&self) {
        add(&self.interrupts, 1);
    }
}
