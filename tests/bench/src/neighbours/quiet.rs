//! The quiet guest: 4 KiB at random places, read and written in turn, one request at a time.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use hdrhistogram::Histogram;

use crate::clock::{Clock, ticks};

const BLOCK: usize = 4096;
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// The connection.
pub struct Quiet {
    // The queue goes before the device, which owns its memory.
    queue: Blkioq,
    _device: Blkio,
    buffer: *mut u8,
    blocks: u64,
    clock: Clock,
    seed: u64,
    requests: u64,
}

impl Quiet {
    pub fn connect(socket: &Path, clock: Clock) -> Result<Self> {
        let (mut device, mut queues) = super::flood::connect(socket, 1, 64)?;
        let blocks = device.get_u64("capacity")? / BLOCK as u64;
        let region = device.alloc_mem_region(BLOCK)?;
        device.map_mem_region(&region)?;
        Ok(Self {
            queue: queues.pop().context("the disk has no queue")?,
            _device: device,
            buffer: region.addr as *mut u8,
            blocks,
            clock,
            seed: 0x2545_F491_4F6C_DD1D,
            requests: 0,
        })
    }

    /// Asks for so long; returns the 99th percentile of the latencies in microseconds. `beside` is called
    /// between two looks at the queue.
    pub fn run(&mut self, time: Duration, mut beside: impl FnMut() -> Result<()>) -> Result<f64> {
        let limit = self.clock.ticks_in(time);
        let mut latency = Histogram::<u64>::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
        let start = ticks();
        while ticks().wrapping_sub(start) < limit {
            let submitted = ticks();
            self.submit();
            loop {
                let mut done = [const { MaybeUninit::<Completion>::uninit() }; 1];
                let reaped = self.queue.do_io(&mut done, 0, None, None)?;
                if reaped > 0 {
                    // SAFETY: do_io has filled the first element.
                    let ret = unsafe { done[0].assume_init_ref() }.ret;
                    ensure!(ret == 0, "a request of the quiet guest failed with {ret}");
                    break;
                }
                beside()?;
            }
            let ns = self.clock.ns(submitted, ticks());
            latency.saturating_record(ns.max(1));
        }
        Ok(latency.value_at_quantile(0.99) as f64 / 1e3)
    }

    fn submit(&mut self) {
        self.seed ^= self.seed >> 12;
        self.seed ^= self.seed << 25;
        self.seed ^= self.seed >> 27;
        let block = self.seed.wrapping_mul(0x2545_F491_4F6C_DD1D) % self.blocks;
        let offset = block * BLOCK as u64;
        self.requests += 1;
        match self.requests % 2 == 0 {
            true => self
                .queue
                .read(offset, self.buffer, BLOCK, 0, ReqFlags::empty()),
            false => self
                .queue
                .write(offset, self.buffer, BLOCK, 0, ReqFlags::empty()),
        }
    }
}
