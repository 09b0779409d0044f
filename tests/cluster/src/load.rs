//! A guest without a virtual machine: a thread that reads and writes a disk through its vhost-user socket,
//! knows what was acknowledged, and notices how long nothing was.

use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use guest_rig::process::wait_until;

use crate::ledger::{BLOCK, Ledger, Promise};

/// Requests in flight.
const DEPTH: usize = 8;
/// Requests between two flushes.
const FLUSH_EVERY: u64 = 100;
/// Pause after each look at the queue: the daemons share the machine's few processors with this thread.
const PACE: Duration = Duration::from_micros(500);
/// The last requests of a load are waited for as long as this; a cluster that is well answers at once.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
/// A single request outside of a load, likewise.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Longest single request outside of a load.
const LONGEST: usize = 256 << 10;
/// Marks the slot of a flush.
const FLUSH: usize = usize::MAX;

const RUN: u8 = 0;
const DRAIN: u8 = 1;
const ABANDON: u8 = 2;

/// The connection: a virtqueue and buffers.
struct Disk {
    // Before the device, which owns its memory.
    queue: Blkioq,
    _device: Blkio,
    buffers: *mut u8,
}

impl Disk {
    fn connect(socket: &Path) -> Result<Self> {
        Self::connect_with(socket, DEPTH * BLOCK)
    }

    fn connect_with(socket: &Path, buffer_bytes: usize) -> Result<Self> {
        let mut device = Blkio::new("virtio-blk-vhost-user")?;
        device.set_str("path", socket.to_str().context("the path is not UTF-8")?)?;
        device
            .connect()
            .with_context(|| format!("connect to {}", socket.display()))?;
        device.set_i32("num-queues", 1)?;
        let mut queues = device.start().context("start the disk's queue")?.queues;
        let queue = queues.pop().context("the disk has no queue")?;
        let region = device.alloc_mem_region(buffer_bytes)?;
        device.map_mem_region(&region)?;
        Ok(Self {
            queue,
            _device: device,
            buffers: region.addr as *mut u8,
        })
    }

    fn buffer(&mut self, slot: usize) -> &mut [u8] {
        assert!(slot < DEPTH);
        // SAFETY: the region has DEPTH blocks, lives as long as the device, and is borrowed through self
        // alone. A slot is looked at only while no request of it is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.buffers.add(slot * BLOCK), BLOCK) }
    }

    fn read(&mut self, offset: u64, slot: usize) {
        let buffer = self.buffer(slot).as_mut_ptr();
        self.queue
            .read(offset, buffer, BLOCK, slot, ReqFlags::empty());
    }

    fn write(&mut self, offset: u64, slot: usize) {
        let buffer = self.buffer(slot).as_mut_ptr();
        self.queue
            .write(offset, buffer, BLOCK, slot, ReqFlags::empty());
    }

    /// Submits what was queued and yields the slots of what is done. A request that failed is an error.
    fn poll(&mut self) -> Result<Vec<usize>> {
        let mut done = [const { MaybeUninit::<Completion>::uninit() }; DEPTH + 1];
        let count = self.queue.do_io(&mut done, 0, None, None)?;
        done[..count]
            .iter()
            .map(|completion| {
                // SAFETY: do_io has filled the first `count` elements.
                let completion = unsafe { completion.assume_init_ref() };
                ensure!(
                    completion.ret == 0,
                    "a request failed with {}",
                    std::io::Error::from_raw_os_error(-completion.ret)
                );
                Ok(completion.user_data)
            })
            .collect()
    }
}

/// A load that runs in a thread.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<(Ledger, Result<()>)>>,
}

#[derive(Debug)]
struct Shared {
    command: AtomicU8,
    completed: AtomicU64,
    gap: Mutex<Gap>,
    /// Somebody wants to see the ledger.
    asked: AtomicBool,
    seen: Mutex<Option<Ledger>>,
}

#[derive(Debug)]
struct Gap {
    last: Instant,
    longest: Duration,
}

impl Shared {
    fn completed(&self, count: u64) {
        self.completed.fetch_add(count, Ordering::Relaxed);
        let mut gap = self.gap.lock().unwrap_or_else(PoisonError::into_inner);
        gap.longest = gap.longest.max(gap.last.elapsed());
        gap.last = Instant::now();
    }
}

impl Load {
    /// Begins: seven writes to three reads, at random over the ledger's blocks, and a flush now and then.
    pub fn start(socket: &Path, ledger: Ledger) -> Self {
        let shared = Arc::new(Shared {
            command: AtomicU8::new(RUN),
            completed: AtomicU64::new(0),
            gap: Mutex::new(Gap {
                last: Instant::now(),
                longest: Duration::ZERO,
            }),
            asked: AtomicBool::new(false),
            seen: Mutex::default(),
        });
        let (socket, theirs) = (PathBuf::from(socket), Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            let mut run = Run::new(ledger);
            let result = run.go_on(&socket, &theirs);
            (run.ledger, result)
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Requests completed so far.
    pub fn completed(&self) -> u64 {
        self.shared.completed.load(Ordering::Relaxed)
    }

    /// Waits until `more` further requests are completed.
    pub fn progress(&self, more: u64, limit: Duration) -> Result<()> {
        let target = self.completed() + more;
        wait_until(limit, || {
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                bail!("the load has ended: a request failed");
            }
            Ok((self.completed() >= target).then_some(()))
        })
        .with_context(|| format!("{more} further requests of the load"))
    }

    /// The longest time without an answer since the last call, one that goes on included.
    pub fn take_gap(&self) -> Duration {
        let mut gap = self
            .shared
            .gap
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let longest = gap.longest.max(gap.last.elapsed());
        gap.longest = Duration::ZERO;
        longest
    }

    /// The ledger as it is now, requests in flight included: for who goes on elsewhere while these wait.
    pub fn ledger(&self) -> Result<Ledger> {
        let seen = || {
            self.shared
                .seen
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        self.shared.asked.store(true, Ordering::Release);
        wait_until(ANSWER_LIMIT, || Ok(seen().take())).context("look at the load's ledger")
    }

    /// Waits until a request fails; returns the ledger, and what failed.
    pub fn fails(self, limit: Duration) -> Result<(Ledger, anyhow::Error)> {
        wait_until(limit, || {
            let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            Ok(ended.then_some(()))
        })
        .context("no request of the load fails")?;
        match self.end(ABANDON)? {
            (ledger, Err(error)) => Ok((ledger, error)),
            (_, Ok(())) => bail!("the load has ended without an error"),
        }
    }

    /// Ends without waiting, whether a request failed or not.
    pub fn cut_short(self) -> Result<Ledger> {
        Ok(self.end(ABANDON)?.0)
    }

    /// Waits for the last requests. That any failed is an error.
    pub fn stop(self) -> Result<Ledger> {
        let (ledger, result) = self.end(DRAIN)?;
        result.map(|()| ledger)
    }

    /// Ends without waiting, as the daemon is gone.
    pub fn abandon(self) -> Result<Ledger> {
        let (ledger, result) = self.end(ABANDON)?;
        result.map(|()| ledger)
    }

    fn end(mut self, command: u8) -> Result<(Ledger, Result<()>)> {
        self.shared.command.store(command, Ordering::Relaxed);
        let thread = self.thread.take().context("the load has ended")?;
        thread.join().ok().context("the load's thread panicked")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.command.store(ABANDON, Ordering::Relaxed);
    }
}

/// What a slot is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    Reads(usize),
    Writes(usize),
}

struct Run {
    ledger: Ledger,
    slots: [Slot; DEPTH],
    /// What the flush in flight covers.
    flush: Option<Vec<u32>>,
    submitted: u64,
    random: u64,
}

impl Run {
    fn new(ledger: Ledger) -> Self {
        Self {
            random: 0x9E37_79B9_7F4A_7C15 ^ ledger.writes(),
            ledger,
            slots: [Slot::Free; DEPTH],
            flush: None,
            submitted: 0,
        }
    }

    fn go_on(&mut self, socket: &Path, shared: &Shared) -> Result<()> {
        let mut disk = Disk::connect(socket)?;
        let mut draining = None;
        loop {
            match shared.command.load(Ordering::Relaxed) {
                ABANDON => return Ok(()),
                DRAIN => {
                    let since = *draining.get_or_insert_with(Instant::now);
                    ensure!(
                        since.elapsed() < DRAIN_LIMIT,
                        "the last requests are not answered"
                    );
                }
                _ => self.submit(&mut disk),
            }
            if shared.asked.swap(false, Ordering::AcqRel) {
                let mut seen = shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
                *seen = Some(self.ledger.clone());
            }
            let done = disk.poll()?;
            if !done.is_empty() {
                shared.completed(done.len() as u64);
            }
            for slot in done {
                self.finish(&mut disk, slot)?;
            }
            let idle = self.flush.is_none() && self.slots.iter().all(|slot| *slot == Slot::Free);
            if draining.is_some() && idle {
                return Ok(());
            }
            std::thread::sleep(PACE);
        }
    }

    fn submit(&mut self, disk: &mut Disk) {
        for slot in 0..DEPTH {
            if self.slots[slot] != Slot::Free {
                continue;
            }
            let (draw, kind) = (self.draw(), self.draw());
            let block = (draw % self.ledger.len() as u64) as usize;
            if !self.ledger.take(block) {
                continue;
            }
            self.submitted += 1;
            let offset = self.ledger.offset(block);
            self.slots[slot] = if kind % 10 < 3 {
                disk.read(offset, slot);
                Slot::Reads(block)
            } else {
                self.ledger.send(block, disk.buffer(slot));
                disk.write(offset, slot);
                Slot::Writes(block)
            };
            if self.submitted % FLUSH_EVERY == 0 && self.flush.is_none() {
                self.flush = Some(self.ledger.covered());
                disk.queue.flush(FLUSH, ReqFlags::empty());
            }
        }
    }

    fn finish(&mut self, disk: &mut Disk, slot: usize) -> Result<()> {
        if slot == FLUSH {
            let covered = self.flush.take().context("a flush that was not sent")?;
            self.ledger.flushed(&covered);
            return Ok(());
        }
        match std::mem::replace(&mut self.slots[slot], Slot::Free) {
            Slot::Free => bail!("an answer to nothing"),
            Slot::Writes(block) => self.ledger.acknowledge(block),
            Slot::Reads(block) => self.ledger.check_read(block, disk.buffer(slot))?,
        }
        Ok(())
    }

    /// xorshift64*.
    fn draw(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 8
    }
}

/// Single requests, one after the other.
pub struct Requests(Disk);

impl Requests {
    /// Connects to a disk that no load uses.
    pub fn connect(socket: &Path) -> Result<Self> {
        Disk::connect(socket).map(Self)
    }

    /// The same for requests of up to 256 KiB.
    pub fn connect_long(socket: &Path) -> Result<Self> {
        Disk::connect_with(socket, LONGEST).map(Self)
    }

    /// Writes a block and waits for the answer.
    pub fn write(&mut self, offset: u64) -> Result<()> {
        self.0.buffer(0).fill(0x5A);
        self.0.write(offset, 0);
        self.answer()
    }

    /// Has a block of [`Self::write`]'s content written, and waits for nothing.
    pub fn begin_write(&mut self, offset: u64) {
        self.0.buffer(0).fill(0x5A);
        self.0.write(offset, 0);
    }

    /// Reads a block and waits for the answer.
    pub fn read(&mut self, offset: u64) -> Result<()> {
        self.0.read(offset, 0);
        self.answer()
    }

    /// Writes so many bytes, of the same value, and waits for the answer. If it is `restless`, the buffer
    /// changes all the while.
    ///
    /// # Panics
    /// If they are more than this was [connected](Self::connect_long) for.
    pub fn write_long(&mut self, offset: u64, len: usize, restless: bool) -> Result<()> {
        assert!(len <= LONGEST);
        let start = self.0.buffers;
        let fill = |value| {
            // SAFETY: the buffer is as long, lives as long as the device, and is reached by this pointer
            // only. Whoever reads it meanwhile gets what a guest gives that changes what it has not been told
            // is written.
            unsafe { start.write_bytes(value, len) };
        };
        fill(1);
        self.0.queue.write(offset, start, len, 0, ReqFlags::empty());
        let deadline = Instant::now() + ANSWER_LIMIT;
        let mut value = 1u8;
        while self.0.poll()?.is_empty() {
            ensure!(Instant::now() < deadline, "a write has no answer");
            value = value.wrapping_add(u8::from(restless));
            fill(value);
        }
        Ok(())
    }

    /// Reads so many bytes.
    ///
    /// # Panics
    /// If they are more than this was [connected](Self::connect_long) for.
    pub fn read_long(&mut self, offset: u64, len: usize) -> Result<Vec<u8>> {
        assert!(len <= LONGEST);
        let start = self.0.buffers;
        self.0.queue.read(offset, start, len, 0, ReqFlags::empty());
        self.answer()?;
        // SAFETY: the buffer is as long, and no request is under way.
        Ok(unsafe { std::slice::from_raw_parts(start, len) }.to_vec())
    }

    fn answer(&mut self) -> Result<()> {
        wait_until(ANSWER_LIMIT, || {
            Ok((!self.0.poll()?.is_empty()).then_some(()))
        })
        .context("a single request")
    }
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Requests").finish_non_exhaustive()
    }
}

/// Reads every block of a disk that no load uses and compares it with what was promised.
pub fn check(socket: &Path, ledger: &mut Ledger, promise: Promise) -> Result<()> {
    let mut disk = Disk::connect(socket)?;
    for first in (0..ledger.len()).step_by(DEPTH) {
        let count = DEPTH.min(ledger.len() - first);
        for slot in 0..count {
            disk.read(ledger.offset(first + slot), slot);
        }
        let mut answered = 0;
        wait_until(ANSWER_LIMIT, || {
            answered += disk.poll()?.len();
            Ok((answered == count).then_some(()))
        })
        .context("read the disk back")?;
        for slot in 0..count {
            ledger.observe(first + slot, disk.buffer(slot), promise)?;
        }
    }
    Ok(())
}
