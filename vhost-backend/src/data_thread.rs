//! Data threads: a fixed set of threads that carry requests between guest rings and engines.
//!
//! Each thread owns its queues and one engine; queues of all devices are spread over the threads. A request
//! is finished by the thread that took it off its ring, without a lock, a channel or an allocation. The
//! control plane reaches a thread through a bounded mailbox, and every command is answered.

pub(crate) mod handle;
mod poller;
pub(crate) mod queue;
mod sched;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::device::{DeviceEngine, DeviceOf};
use crate::dirty::DirtyLog;
use crate::inflight::InflightRecord;
use crate::memory::{GuestAddr, GuestMemory};
use crate::ring::RingError;

use handle::{Command, Port};
pub use handle::{Ping, QueueHandle};

/// Most data threads; more are refused.
pub const MAX_THREADS: usize = 256;
/// Most queues on one thread, a bound of the tags; one more is refused.
pub const MAX_THREAD_QUEUES: usize = 16 * 1024;
/// How long a thread spins after work by default before it sleeps, in microseconds.
pub const SPIN_US_DEFAULT: u32 = 50;
/// Longest spin that can be asked for: an idle core is given back within a millisecond. A longer one is cut
/// to this.
pub const SPIN_US_MAX: u32 = 500;

/// When a data thread sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PollMode {
    /// Spin for a while after work, up to `spin_us` and less where that found nothing, then sleep.
    Adaptive {
        /// Longest spin in microseconds, at most [`SPIN_US_MAX`].
        spin_us: u32,
    },
    /// Never sleep while a queue is running.
    Always,
    /// Sleep as soon as there is nothing to do.
    Never,
}

impl Default for PollMode {
    fn default() -> Self {
        Self::Adaptive {
            spin_us: SPIN_US_DEFAULT,
        }
    }
}

/// How to start the threads.
#[derive(Debug, Clone, Default)]
pub struct ThreadOptions {
    /// How many, at least 1.
    pub threads: usize,
    /// When they sleep.
    pub poll: PollMode,
    /// Processors to pin them to, used in turn; not pinned if absent.
    pub pin: Option<Vec<usize>>,
}

/// Why the threads could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// None, or more than [`MAX_THREADS`].
    #[error("{0} data threads are not possible: give 1 to {MAX_THREADS}")]
    Count(usize),
    /// The processor does not exist or is not ours.
    #[error("cannot pin data thread {thread} to processor {cpu}")]
    Pin {
        /// Which thread.
        thread: usize,
        /// Which processor.
        cpu: usize,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The engine of a thread could not be made.
    #[error("cannot make the I/O engine of data thread {thread}")]
    Engine {
        /// Which thread.
        thread: usize,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// The system refused a thread or a file descriptor.
    #[error("cannot start data thread {thread}")]
    Start {
        /// Which thread.
        thread: usize,
        /// What it said.
        #[source]
        source: io::Error,
    },
}

/// Why a command on a queue failed.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The data thread has ended.
    #[error("the data thread has ended")]
    ThreadGone,
    /// The queue has been stopped already.
    #[error("the queue is stopped")]
    Stopped,
    /// The device has no such queue.
    #[error("queue {index} of a device with {queues}")]
    Index {
        /// Asked for.
        index: u16,
        /// Queues of the device.
        queues: u16,
    },
    /// The in-flight record has fewer entries than the queue.
    #[error("in-flight record of {record} entries for a queue of {size}")]
    InflightSize {
        /// Entries of the record.
        record: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// The in-flight record is one of the other kind of rings.
    #[error("in-flight record of the other kind of rings")]
    InflightLayout,
    /// Every data thread has [`MAX_THREAD_QUEUES`].
    #[error("no room for another queue: data threads have {MAX_THREAD_QUEUES} each")]
    Full,
    /// The ring cannot be used as configured.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A file descriptor cannot be watched.
    #[error("cannot watch the kick descriptor")]
    Kick(#[source] io::Error),
}

/// Everything a data thread needs to serve a queue.
#[derive(Debug)]
pub struct QueueConfig {
    /// Index in the device.
    pub index: u16,
    /// Entries.
    pub size: u16,
    /// Descriptor table, or the whole of a packed ring.
    pub desc: GuestAddr,
    /// Available ring, or the driver's event suppression structure.
    pub avail: GuestAddr,
    /// Used ring, or the device's event suppression structure.
    pub used: GuestAddr,
    /// Where to go on, as SET_VRING_BASE gives it. With an in-flight record the place follows from the record
    /// instead.
    pub base: u32,
    /// Negotiated virtio features.
    pub features: u64,
    /// Readable when the guest added requests; without it the thread has to poll.
    pub kick: Option<OwnedFd>,
    /// Written to interrupt the guest.
    pub call: Option<OwnedFd>,
    /// Written when the queue broke.
    pub err: Option<OwnedFd>,
    /// Record of requests in flight.
    pub inflight: Option<InflightRecord>,
    /// Dirty log of a migration under way.
    pub log: Option<Arc<DirtyLog>>,
    /// Where the used ring is logged, if it is.
    pub used_log: Option<GuestAddr>,
    /// Guest memory.
    pub memory: Arc<GuestMemory>,
}

/// A running set of data threads.
#[derive(Debug)]
pub struct Threads<E: DeviceEngine> {
    ports: Vec<Arc<Port<DeviceOf<E>>>>,
    joins: Mutex<Vec<JoinHandle<()>>>,
}

impl<E: DeviceEngine> Threads<E> {
    /// Starts the threads. `make_engine` runs once on each of them.
    pub fn start(
        options: &ThreadOptions,
        make_engine: impl Fn(usize) -> io::Result<E> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, ThreadError> {
        if options.threads == 0 || options.threads > MAX_THREADS {
            return Err(ThreadError::Count(options.threads));
        }
        let make_engine = Arc::new(make_engine);
        let mut threads = Self {
            ports: Vec::new(),
            joins: Mutex::default(),
        };
        for thread in 0..options.threads {
            let cpu = options
                .pin
                .as_ref()
                .and_then(|cpus| cpus.get(thread % cpus.len().max(1)).copied());
            let make = Arc::clone(&make_engine);
            let (port, join) = worker::spawn(thread, options.poll, cpu, move || make(thread))?;
            threads.ports.push(port);
            threads
                .joins
                .get_mut()
                .unwrap_or_else(|e| e.into_inner())
                .push(join);
        }
        Ok(Arc::new(threads))
    }

    /// Starts to serve a queue, on the thread that has the fewest.
    pub fn start_queue(
        &self,
        device: &Arc<DeviceOf<E>>,
        config: QueueConfig,
    ) -> Result<QueueHandle<DeviceOf<E>>, QueueError> {
        let port = self
            .ports
            .iter()
            .min_by_key(|port| port.load())
            .ok_or(QueueError::ThreadGone)?;
        QueueHandle::start(port, device, config)
    }

    /// Asks each thread whether its loop still turns. A thread that waits for a device answers; one that
    /// hangs does not. Never waits itself.
    pub fn ping(&self) -> Vec<Ping> {
        self.ports.iter().map(|port| port.ping()).collect()
    }

    /// Drains and stops all queues and ends the threads. Queues that were not stopped before are then gone.
    pub fn shutdown(&self) {
        for port in &self.ports {
            // A thread that is gone already has nothing left to drain.
            let _ = port.send(Command::Shutdown);
        }
        let joins = std::mem::take(&mut *self.joins.lock().unwrap_or_else(|e| e.into_inner()));
        for join in joins {
            // One that panics while it has queues aborts the process.
            if join.join().is_err() {
                tracing::error!("data thread panicked at its end");
            }
        }
    }
}

impl<E: DeviceEngine> Drop for Threads<E> {
    fn drop(&mut self) {
        self.shutdown();
    }
}

#[cfg(test)]
mod tests;
