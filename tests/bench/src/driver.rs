//! The load: libblkio's virtio-blk driver over vhost-user, polling, from the calling thread.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::clock::{Clock, ticks};

/// Entries of each virtqueue: room for the deepest load with three descriptors for each request.
const QUEUE_SIZE: i32 = 512;
/// Deepest load for each queue.
pub const DEPTH_MAX: usize = 128;
/// Largest request.
pub const BLOCK_MAX: usize = 1 << 20;
/// Bytes of buffers for any load: queues times depth times block never exceeds it.
const BUFFER_BYTES: usize = 64 << 20;
/// At depths above one, every so many requests is timed: two readings of the counter for each would show in
/// the result. A power of two.
const SAMPLE_EVERY: u64 = 8;
/// Written blocks are counted in this unit.
const COUNTED_BLOCK: u64 = 4096;
/// Latencies above this count as this.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// Direction of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
}

/// Order of a load's offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Uniform over the disk.
    Random,
    /// One after the other.
    Sequential,
    /// One after the other, on a disk that was overwritten at random since it was last written in order.
    Scattered,
    /// Likewise, once the back end has put it in order in the background.
    Compacted,
}

/// What to do to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Load {
    /// Reads or writes.
    pub direction: Direction,
    /// Where.
    pub order: Order,
    /// Bytes of a request.
    pub block: usize,
    /// Requests in flight on each queue.
    pub depth: usize,
}

impl Load {
    /// What tables call it.
    pub fn name(&self) -> String {
        let order = match self.order {
            Order::Random => "random",
            Order::Sequential => "sequential",
            Order::Scattered => "scattered sequential",
            Order::Compacted => "compacted sequential",
        };
        let direction = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        format!(
            "{} KiB {order} {direction} x{}",
            self.block >> 10,
            self.depth
        )
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Sample {
    /// Requests completed.
    pub requests: u64,
    /// From the first submission to the last completion.
    pub elapsed: Duration,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

/// A connection to a vhost-user-blk socket.
pub struct Driver {
    // The queues go before the device, which owns their memory.
    queues: Vec<Blkioq>,
    device: Blkio,
    buffers: *mut u8,
    buffer_bytes: usize,
    capacity: u64,
    clock: Clock,
    seed: u64,
    /// Blocks written since [`Driver::count_written`], one bit each.
    written: Option<Vec<u64>>,
}

/// The state of one queue during a run.
struct Lane {
    /// Counter at each slot's submission; 0 for a request that is not timed.
    started: [u64; DEPTH_MAX],
    in_flight: usize,
}

/// The state of a run.
struct Progress {
    load: Load,
    /// Places on the disk.
    blocks: u64,
    /// A request is timed when its number has none of these bits.
    sample_mask: u64,
    submitted: u64,
    done: u64,
    latency: Histogram<u64>,
}

impl Driver {
    /// Connects with `queues` polled queues and buffers for any load.
    pub fn connect(socket: &Path, queues: u16, clock: Clock) -> Result<Self> {
        Self::connect_with(socket, queues, BUFFER_BYTES, clock)
    }

    /// As [`Driver::connect`], with `buffer_bytes` of buffers.
    pub fn connect_with(
        socket: &Path,
        queues: u16,
        buffer_bytes: usize,
        clock: Clock,
    ) -> Result<Self> {
        let mut device = Blkio::new("virtio-blk-vhost-user")?;
        device.set_str(
            "path",
            socket.to_str().context("the socket's path is not UTF-8")?,
        )?;
        device
            .connect()
            .with_context(|| format!("connect to {}", socket.display()))?;
        let capacity = device.get_u64("capacity")?;
        device.set_i32("num-queues", 0)?;
        device.set_i32("num-poll-queues", i32::from(queues))?;
        device.set_i32("queue-size", QUEUE_SIZE)?;
        let queues = device
            .start()
            .context("start the disk's queues")?
            .poll_queues;
        let region = device.alloc_mem_region(buffer_bytes)?;
        device.map_mem_region(&region)?;
        let buffers = region.addr as *mut u8;
        for page in (0..buffer_bytes).step_by(8) {
            // SAFETY: the region is `buffer_bytes` of mapped, writable, 8-byte aligned memory, and nothing
            // uses it yet.
            unsafe {
                buffers
                    .add(page)
                    .cast::<u64>()
                    .write(page as u64 ^ 0x9E37_79B9_7F4A_7C15)
            };
        }
        Ok(Self {
            queues,
            device,
            buffers,
            buffer_bytes,
            capacity,
            clock,
            seed: 0x2545_F491_4F6C_DD1D,
            written: None,
        })
    }

    /// From now on it is known which blocks are written.
    pub fn count_written(&mut self) {
        let blocks = self.capacity.div_ceil(COUNTED_BLOCK);
        self.written = Some(vec![0; blocks.div_ceil(64) as usize]);
    }

    /// Bytes of all blocks written since [`Driver::count_written`], each counted once.
    pub fn written_bytes(&self) -> u64 {
        let words = self.written.iter().flatten();
        words.map(|word| u64::from(word.count_ones())).sum::<u64>() * COUNTED_BLOCK
    }

    /// Writes the whole disk once, in order.
    pub fn fill(&mut self) -> Result<()> {
        let load = Load {
            direction: Direction::Write,
            order: Order::Sequential,
            block: BLOCK_MAX,
            depth: 8,
        };
        let requests = self.capacity / BLOCK_MAX as u64;
        self.drive(&load, 1, |done, _| done >= requests).map(|_| ())
    }

    /// Runs a load on all queues for a time.
    pub fn run(&mut self, load: &Load, time: Duration) -> Result<Sample> {
        let limit = self.clock.ticks_in(time);
        let queues = self.queues.len();
        self.drive(load, queues, |_, elapsed| elapsed >= limit)
    }

    fn drive(
        &mut self,
        load: &Load,
        queues: usize,
        enough: impl Fn(u64, u64) -> bool,
    ) -> Result<Sample> {
        ensure!(
            load.depth <= DEPTH_MAX && queues * load.depth * load.block <= self.buffer_bytes,
            "the load is too large"
        );
        let blocks = self.capacity / load.block as u64;
        ensure!(blocks > 0, "the disk is smaller than one request");
        let mut progress = Progress {
            load: *load,
            blocks,
            sample_mask: if load.depth == 1 { 0 } else { SAMPLE_EVERY - 1 },
            submitted: 0,
            done: 0,
            latency: Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)
                .context("make a histogram")?,
        };
        let mut lanes: Vec<Lane> = (0..queues)
            .map(|_| Lane {
                started: [0; DEPTH_MAX],
                in_flight: load.depth,
            })
            .collect();
        let start = ticks();
        for (index, lane) in lanes.iter_mut().enumerate() {
            for slot in 0..load.depth {
                self.submit(&mut progress, lane, index, slot);
            }
        }
        let mut stopping = false;
        while lanes.iter().any(|lane| lane.in_flight > 0) {
            stopping = stopping || enough(progress.submitted, ticks().wrapping_sub(start));
            for (index, lane) in lanes.iter_mut().enumerate() {
                self.reap(&mut progress, lane, index, stopping)?;
            }
        }
        let elapsed = Duration::from_nanos(self.clock.ns(start, ticks()));
        Ok(Sample {
            requests: progress.done,
            elapsed,
            latency: progress.latency,
        })
    }

    /// Takes what one queue has finished and, unless the run is `stopping`, submits as much again.
    fn reap(
        &mut self,
        progress: &mut Progress,
        lane: &mut Lane,
        index: usize,
        stopping: bool,
    ) -> Result<()> {
        let mut completions: [MaybeUninit<Completion>; DEPTH_MAX] =
            [const { MaybeUninit::uninit() }; DEPTH_MAX];
        let reaped = self.queues[index].do_io(&mut completions[..lane.in_flight], 0, None, None)?;
        for completion in &completions[..reaped] {
            // SAFETY: do_io has filled the first `reaped` elements.
            let completion = unsafe { completion.assume_init_ref() };
            ensure!(
                completion.ret == 0,
                "a request failed with {}",
                completion.ret
            );
            let slot = completion.user_data;
            if lane.started[slot] != 0 {
                progress
                    .latency
                    .saturating_record(self.clock.ns(lane.started[slot], ticks()).max(1));
            }
            progress.done += 1;
            if stopping {
                lane.in_flight -= 1;
            } else {
                self.submit(progress, lane, index, slot);
            }
        }
        Ok(())
    }

    fn submit(&mut self, progress: &mut Progress, lane: &mut Lane, index: usize, slot: usize) {
        let load = progress.load;
        let block = match load.order {
            Order::Sequential | Order::Scattered | Order::Compacted => {
                progress.submitted % progress.blocks
            }
            Order::Random => self.random() % progress.blocks,
        };
        let offset = block * load.block as u64;
        // SAFETY: `drive` checked that all queues' slots lie within the buffers.
        let buffer = unsafe { self.buffers.add((index * load.depth + slot) * load.block) };
        lane.started[slot] = if progress.submitted & progress.sample_mask == 0 {
            ticks()
        } else {
            0
        };
        progress.submitted += 1;
        if let (Some(written), Direction::Write) = (&mut self.written, load.direction) {
            let end = offset + load.block as u64;
            for block in offset / COUNTED_BLOCK..end.div_ceil(COUNTED_BLOCK) {
                written[(block / 64) as usize] |= 1 << (block % 64);
            }
        }
        let queue = &mut self.queues[index];
        match load.direction {
            Direction::Read => queue.read(offset, buffer, load.block, slot, ReqFlags::empty()),
            Direction::Write => queue.write(offset, buffer, load.block, slot, ReqFlags::empty()),
        }
    }

    /// xorshift64*.
    fn random(&mut self) -> u64 {
        self.seed ^= self.seed >> 12;
        self.seed ^= self.seed << 25;
        self.seed ^= self.seed >> 27;
        self.seed.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("state", &self.device.state())
            .field("queues", &self.queues.len())
            .finish()
    }
}
