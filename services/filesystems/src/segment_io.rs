//! Reads and writes of segments: one thread with an engine of the fabric, and any number of requests under
//! way. An engine's io_uring belongs to the thread that made it.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use api::failure::{Context, Failure, Kind, Result};
use fabric::{Fabric, FabricEngine, FabricError};
use fabric_types::io::{Engine, IoError, IoResult, Op, Request, Submit, Tag};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use service::waiting::ended;
use tokio::sync::oneshot;

use storage::{Handle, fabric_failure};

/// Bytes of one request; a longer transfer is split.
const REQUEST_BYTES: usize = 1 << 20;
/// Requests that the engine has at once; the others wait here.
const UNDER_WAY_MAX: usize = 1024;
/// Pause before requests that found no room, no lease or no map are tried again.
const BUSY_PAUSE: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

/// A request with the memory that it fills or empties.
struct Job {
    volume: Handle,
    op: Op,
    offset: u64,
    /// Bytes of the range; of a read or write those of `data`.
    len: u64,
    data: Vec<u8>,
    done: oneshot::Sender<(IoResult, Vec<u8>)>,
}

impl Job {
    fn end(self, result: IoResult) {
        // Whoever asked may have gone away.
        let _ = self.done.send((result, self.data));
    }
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<Job>,
    is_closed: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // It can only refuse when its counter is full, and then the thread is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The thread, for anybody who reads or writes segments.
pub struct SegmentIo {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl SegmentIo {
    /// Starts the thread.
    pub async fn start(fabric: Fabric) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(io::Error::from);
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            wake: wake.context(|| "start the thread for segments".into())?,
        });
        let (opened, is_open) = oneshot::channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("segments".to_owned())
            .spawn(move || run(&fabric, &of_thread, opened))
            .context(|| "start the thread for segments".into())?;
        match is_open.await {
            Ok(Ok(())) => Ok(Self {
                shared,
                thread: Mutex::new(Some(thread)),
            }),
            Ok(Err(error)) => Err(fabric_failure(error)),
            Err(_) => Err(Failure::plain(
                Kind::Failed,
                "the thread for segments has ended",
            )),
        }
    }

    /// Reads `len` bytes at `offset`. Both are multiples of a block, as in everything here.
    pub async fn read(&self, volume: &Handle, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        if len <= REQUEST_BYTES {
            return self.ask(volume, Op::Read, offset, vec![0; len]).await;
        }
        let mut data = Vec::with_capacity(len);
        while data.len() < len {
            let part = vec![0; REQUEST_BYTES.min(len - data.len())];
            let at = offset + data.len() as u64;
            data.append(&mut self.ask(volume, Op::Read, at, part).await?);
        }
        Ok(data)
    }

    /// Writes `data` at `offset`.
    pub async fn write(&self, volume: &Handle, offset: u64, data: Vec<u8>) -> IoResult {
        let write = Op::Write { fua: false };
        if data.len() <= REQUEST_BYTES {
            return self.ask(volume, write, offset, data).await.map(drop);
        }
        let mut at = offset;
        for part in data.chunks(REQUEST_BYTES) {
            self.ask(volume, write, at, part.to_vec()).await?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes all durable that was written before.
    pub async fn flush(&self, volume: &Handle) -> IoResult {
        self.ask(volume, Op::Flush, 0, Vec::new()).await.map(drop)
    }

    /// Gives a range back.
    pub async fn discard(&self, volume: &Handle, offset: u64, len: u64) -> IoResult {
        self.send(volume, Op::Discard, (offset, len), Vec::new())
            .await
            .map(drop)
    }

    async fn ask(
        &self,
        volume: &Handle,
        op: Op,
        offset: u64,
        data: Vec<u8>,
    ) -> Result<Vec<u8>, IoError> {
        let len = data.len() as u64;
        self.send(volume, op, (offset, len), data).await
    }

    async fn send(
        &self,
        volume: &Handle,
        op: Op,
        (offset, len): (u64, u64),
        data: Vec<u8>,
    ) -> Result<Vec<u8>, IoError> {
        let (done, outcome) = oneshot::channel();
        let job = Job {
            volume: volume.clone(),
            op,
            offset,
            len,
            data,
            done,
        };
        {
            let mut inbox = self.shared.lock();
            if inbox.is_closed {
                return Err(IoError::Fenced);
            }
            inbox.jobs.push(job);
        }
        self.shared.wake();
        match outcome.await {
            Ok((result, data)) => result.map(|()| data),
            Err(_) => Err(IoError::Fenced),
        }
    }

    /// Ends the thread. What the engine has is waited for; what waits for a lease or a map is not done.
    pub async fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.wake();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(thread) = thread else { return };
        if ended(thread).await.is_err() {
            tracing::error!("the thread for segments panicked");
        }
    }
}

fn run(
    fabric: &Fabric,
    shared: &Shared,
    opened: oneshot::Sender<std::result::Result<(), FabricError>>,
) {
    let engine = match fabric.idle_engine() {
        Ok(engine) => engine,
        Err(error) => {
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    Worker {
        engine,
        waiting: VecDeque::new(),
        under_way: BTreeMap::new(),
        next_tag: 0,
    }
    .run(shared);
}

/// What the thread has.
struct Worker {
    engine: FabricEngine,
    /// Not taken by the engine yet.
    waiting: VecDeque<Job>,
    under_way: BTreeMap<u64, Job>,
    next_tag: u64,
}

impl Worker {
    fn run(mut self, shared: &Shared) {
        loop {
            let is_closed = {
                let mut inbox = shared.lock();
                self.waiting.extend(inbox.jobs.drain(..));
                inbox.is_closed
            };
            let started = self.start();
            if is_closed {
                self.waiting
                    .drain(..)
                    .for_each(|job| job.end(Err(IoError::Fenced)));
                if self.under_way.is_empty() {
                    return;
                }
            }
            self.engine.kick();
            if self.finish() == 0 && started == 0 {
                self.sleep(shared);
            }
        }
    }

    /// Hands waiting requests to the engine; how many went. One that finds no room, or whose volume has no
    /// lease for now, keeps no other from it.
    fn start(&mut self) -> usize {
        let mut started = 0;
        for _ in 0..self.waiting.len() {
            if self.under_way.len() >= UNDER_WAY_MAX {
                break;
            }
            let Some(mut job) = self.waiting.pop_front() else {
                break;
            };
            let buffer = [libc::iovec {
                iov_base: job.data.as_mut_ptr().cast(),
                iov_len: job.data.len(),
            }];
            let buffers = match job.data.is_empty() {
                true => &[][..],
                false => &buffer[..],
            };
            let tag = self.next_tag;
            let request = Request {
                tag: Tag(tag),
                op: job.op,
                offset: job.offset,
                len: job.len,
                buffers,
            };
            // SAFETY: the bytes are the job's, which is kept unchanged until the request is over; the engine
            // is dropped after, and waits for what it has.
            match unsafe { self.engine.submit(&job.volume, &request) } {
                Submit::Done(result) => job.end(result),
                Submit::Pending => {
                    self.next_tag += 1;
                    self.under_way.insert(tag, job);
                }
                // It would be busy for ever.
                Submit::Busy if job.volume.is_revoked() => job.end(Err(IoError::Fenced)),
                Submit::Busy => {
                    self.waiting.push_back(job);
                    continue;
                }
            }
            started += 1;
        }
        started
    }

    fn finish(&mut self) -> usize {
        let under_way = &mut self.under_way;
        self.engine.reap(&mut |tag, result| {
            let job = under_way.remove(&tag.0);
            job.expect("the engine reports what it has, once")
                .end(result);
        })
    }

    fn sleep(&mut self, shared: &Shared) {
        let limit = (!self.waiting.is_empty()).then_some(&BUSY_PAUSE);
        let engine = self.engine.wait_fd();
        let wake = shared.wake.as_fd();
        let mut fds = [
            PollFd::new(&engine, PollFlags::IN),
            PollFd::new(&wake, PollFlags::IN),
        ];
        // Interrupted or not, the next turn finds what there is.
        let _ = poll(&mut fds, limit);
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a panic: the memory of what the engine has must outlive it.
        if !self.under_way.is_empty() {
            tracing::error!("requests to segments were under way when their thread ended");
            std::process::abort();
        }
    }
}
