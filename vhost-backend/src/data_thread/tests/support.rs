//! What the tests share.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use fabric_testing::{Completion, MemEngine, MemVolume};
use fabric_types::io::{Engine, IoResult, Op, Request, Submit, Tag};

use crate::blk::{BlkDevice, BlkOptions};
use crate::data_thread::{PollMode, QueueHandle, ThreadOptions, Threads};
use crate::testing::{FakeGuest, FakeQueue, QueueOptions};

pub(super) const DISK_BYTES: u64 = 4 << 20;
pub(super) const IN: u32 = 0;
pub(super) const OUT: u32 = 1;
pub(super) const FLUSH: u32 = 4;
pub(super) const GET_ID: u32 = 8;
pub(super) const DISCARD: u32 = 11;
pub(super) const WRITE_ZEROES: u32 = 13;
pub(super) const OK: u8 = 0;
pub(super) const IOERR: u8 = 1;
pub(super) const UNSUPP: u8 = 2;

/// What an engine was asked: the operation, offset and length of each request it accepted, in order.
pub(super) type Script = Arc<Mutex<Vec<(Op, u64, u64)>>>;

/// A [`MemEngine`] that writes down what it is asked.
pub(super) struct Recorder {
    inner: MemEngine,
    script: Script,
}

impl Engine for Recorder {
    type Volume = MemVolume;

    unsafe fn submit(&mut self, volume: &MemVolume, request: &Request<'_>) -> Submit {
        // SAFETY: the caller's promise is passed on.
        let outcome = unsafe { self.inner.submit(volume, request) };
        if outcome != Submit::Busy {
            self.script
                .lock()
                .unwrap()
                .push((request.op, request.offset, request.len));
        }
        outcome
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        self.inner.reap(done)
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.inner.wait_fd()
    }
}

pub(super) type TestThreads = Arc<Threads<Recorder>>;
pub(super) type TestDevice = Arc<BlkDevice<MemVolume>>;

/// How the thread and its engine behave.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) poll: PollMode,
    pub(super) completion: Completion,
    pub(super) in_flight_max: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            poll: PollMode::default(),
            completion: Completion::Queued,
            in_flight_max: 1024,
        }
    }
}

pub(super) fn threads(setup: Setup) -> (TestThreads, Script) {
    let options = ThreadOptions {
        threads: 1,
        poll: setup.poll,
        pin: None,
    };
    let script = Script::default();
    let shared = Arc::clone(&script);
    let threads = Threads::start(&options, move |_| {
        let inner = MemEngine::with_limit(setup.completion, setup.in_flight_max)?;
        Ok(Recorder {
            inner,
            script: Arc::clone(&shared),
        })
    });
    (threads.unwrap(), script)
}

pub(super) fn device(options: BlkOptions) -> TestDevice {
    BlkDevice::new(MemVolume::new(DISK_BYTES), options).unwrap()
}

/// One queue of one device on one thread.
pub(super) struct Rig {
    pub(super) threads: TestThreads,
    pub(super) script: Script,
    pub(super) device: TestDevice,
    pub(super) queue: FakeQueue,
    pub(super) handle: QueueHandle<BlkDevice<MemVolume>>,
}

impl Rig {
    pub(super) fn new(setup: Setup) -> Self {
        Self::with(setup, BlkOptions::default(), QueueOptions::default())
    }

    pub(super) fn with(setup: Setup, blk: BlkOptions, options: QueueOptions) -> Self {
        let (threads, script) = threads(setup);
        let device = device(blk);
        let queue = FakeQueue::new(&Arc::new(FakeGuest::new(8 << 20)), options);
        let handle = threads.start_queue(&device, queue.config(0)).unwrap();
        Self {
            threads,
            script,
            device,
            queue,
            handle,
        }
    }

    pub(super) fn inline() -> Self {
        Self::new(Setup {
            completion: Completion::Inline,
            ..Setup::default()
        })
    }

    pub(super) fn guest(&self) -> Arc<FakeGuest> {
        Arc::clone(self.queue.guest())
    }

    pub(super) fn disk(&self) -> &MemVolume {
        self.device.volume()
    }

    pub(super) fn script(&self) -> Vec<(Op, u64, u64)> {
        self.script.lock().unwrap().clone()
    }
}

/// Bytes that differ from place to place.
pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

/// Ranges of a discard or write-zeroes request: sector, sectors, flags.
pub(super) fn ranges(list: &[(u64, u32, u32)]) -> Vec<u8> {
    let one = |r: &(u64, u32, u32)| {
        [
            &r.0.to_le_bytes()[..],
            &r.1.to_le_bytes(),
            &r.2.to_le_bytes(),
        ]
        .concat()
    };
    list.iter().flat_map(one).collect()
}
