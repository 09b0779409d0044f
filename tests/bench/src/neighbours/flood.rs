//! The guest that asks for everything: its queues are always full, and all its requests use the same memory.

use std::mem::MaybeUninit;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

use super::FloodKind;

/// Queues of the disk.
pub const QUEUES: u16 = 4;
/// Entries of each: a request takes three.
const QUEUE_SIZE: i32 = 1024;
/// Answers taken at a time.
const REAPED_MAX: usize = 32;

/// The connection.
pub struct Flood {
    // The queues go before the device, which owns their memory.
    queues: Vec<Blkioq>,
    _device: Blkio,
    buffer: *mut u8,
    kind: FloodKind,
    submitted: u64,
    bytes: u64,
}

/// Connects with polled queues.
pub fn connect(socket: &Path, queues: u16, size: i32) -> Result<(Blkio, Vec<Blkioq>)> {
    let mut device = Blkio::new("virtio-blk-vhost-user")?;
    let path = socket.to_str().context("the socket's path is not UTF-8")?;
    device.set_str("path", path)?;
    device
        .connect()
        .with_context(|| format!("connect to {}", socket.display()))?;
    device.set_i32("num-queues", 0)?;
    device.set_i32("num-poll-queues", i32::from(queues))?;
    device.set_i32("queue-size", size)?;
    let started = device.start().context("start the disk's queues")?;
    Ok((device, started.poll_queues))
}

impl FloodKind {
    /// Bytes of a request.
    fn block(self) -> usize {
        match self {
            Self::OverlappingWrites => 16 << 20,
            Self::LongReads => 63 << 20,
            Self::StuckWrites => 4096,
        }
    }

    /// Requests in flight on each queue.
    fn depth(self) -> usize {
        match self {
            Self::OverlappingWrites | Self::StuckWrites => 256,
            Self::LongReads => 64,
        }
    }
}

impl Flood {
    pub fn connect(socket: &Path, kind: FloodKind) -> Result<Self> {
        let (mut device, queues) = connect(socket, QUEUES, QUEUE_SIZE)?;
        let region = device.alloc_mem_region(kind.block())?;
        device.map_mem_region(&region)?;
        Ok(Self {
            queues,
            _device: device,
            buffer: region.addr as *mut u8,
            kind,
            submitted: 0,
            bytes: 0,
        })
    }

    /// Fills the queues.
    pub fn fill(&mut self) -> Result<()> {
        for queue in 0..self.queues.len() {
            for slot in 0..self.kind.depth() {
                self.submit(queue, slot);
            }
        }
        self.turn()
    }

    /// Asks again for what was answered.
    pub fn turn(&mut self) -> Result<()> {
        let mut done = [const { MaybeUninit::<Completion>::uninit() }; REAPED_MAX];
        for queue in 0..self.queues.len() {
            let reaped = self.queues[queue].do_io(&mut done, 0, None, None)?;
            for completion in &done[..reaped] {
                // SAFETY: do_io has filled the first `reaped` elements.
                let completion = unsafe { completion.assume_init_ref() };
                let ret = completion.ret;
                ensure!(ret == 0, "a request of the flood failed with {ret}");
                self.bytes += self.kind.block() as u64;
                let slot = completion.user_data;
                self.submit(queue, slot);
            }
        }
        Ok(())
    }

    /// Bytes answered so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn submit(&mut self, queue: usize, slot: usize) {
        let block = self.kind.block();
        let nth = self.submitted;
        self.submitted += 1;
        let queue = &mut self.queues[queue];
        let none = ReqFlags::empty();
        match self.kind {
            // Each begins a block behind another one, and lies over all of them.
            FloodKind::OverlappingWrites => {
                queue.write(nth % 64 * 4096, self.buffer, block, slot, none);
            }
            FloodKind::LongReads => queue.read(0, self.buffer, block, slot, none),
            FloodKind::StuckWrites => {
                queue.write(nth % 4096 * 4096, self.buffer, block, slot, none)
            }
        }
    }
}
