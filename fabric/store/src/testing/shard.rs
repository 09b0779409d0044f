//! One shard of a store on a simulated disk, driven one operation at a time.

use fabric_types::block::{BLOCK_BYTES, BlockStamp};
use fabric_types::ids::{ChunkKey, LayerId, Version};

use super::factory::{self, Core};
use super::map_pages::MapPages;
use super::sim_disk::{CrashKind, IoKind, SimDisk};
use crate::api::{
    CoreParams, OpId, ScrubFinding, ScrubStep, StoreCore, StoreError, StoreOp, StoreResult,
    Submitted,
};

/// A small store: everything happens often.
pub const SMALL_DISK: u64 = 12 << 20;

/// Bounds for small stores.
pub fn small_params() -> CoreParams {
    CoreParams {
        cluster: None,
        ops_max: 64,
        leaf_cache_bytes: 256 << 10,
        buffer_bytes: 4 << 20,
    }
}

/// The layer that a test uses.
pub const LAYER: LayerId = LayerId(1);
/// The chunk that it uses.
pub const CHUNK: u32 = 3;

/// A block's content.
pub type Block = [u8; BLOCK_BYTES];

/// A shard on a disk, driven one operation at a time.
pub struct Shard {
    /// The disk.
    pub disk: SimDisk,
    /// The shard.
    pub core: Core,
    /// The disk as it was when each write was handed out, once switched on.
    pub before_writes: Option<Vec<SimDisk>>,
}

impl Shard {
    /// A shard on an empty disk.
    ///
    /// # Panics
    /// Like all others here: if something is not as the test needs it.
    pub fn new(seed: u64) -> Self {
        let mut disk = SimDisk::new(SMALL_DISK, seed);
        factory::format(&mut disk).unwrap();
        Self::open(disk)
    }

    /// The shard on a disk.
    pub fn open(mut disk: SimDisk) -> Self {
        let (mut cores, _) = factory::open(&mut disk, &small_params(), 1).unwrap();
        let core = cores.remove(0);
        let before_writes = None;
        Self {
            disk,
            core,
            before_writes,
        }
    }

    /// What a crash now would leave, opened again.
    pub fn crashed(&self, kind: CrashKind, seed: u64) -> Self {
        Self::open(self.disk.crash(kind, seed))
    }

    /// Closes the shard, damages a map page, and opens it again.
    pub fn lose_map_page(&mut self, chunk: u32, leaf: u32) {
        self.one(StoreOp::Checkpoint { clean: true }).unwrap();
        let mut disk = self.disk.clone();
        let pages = MapPages::of(&disk).leaves;
        let mut pages = pages.iter();
        let page = pages.find(|page| (page.chunk, page.leaf) == (chunk, leaf));
        disk.flip_bit(page.expect("it is there").offset + 9, 2);
        *self = Self::open(disk);
    }

    /// Begins an operation; its buffers live until it has been run.
    pub fn submit(&mut self, id: u64, op: StoreOp<'_>) {
        // SAFETY: the callers keep the buffers until they have run the operation.
        let submitted = unsafe { self.core.submit(OpId(id), op) };
        assert_eq!(submitted, Submitted::Accepted);
    }

    /// Runs until everything submitted is done.
    pub fn run(&mut self) -> Vec<(u64, StoreResult)> {
        let mut done = Vec::new();
        loop {
            while let Some(action) = self.core.poll_action() {
                let before = self.disk.clone();
                let kind = self.disk.submit(0, action);
                if let (IoKind::Write, Some(all)) = (kind, &mut self.before_writes) {
                    all.push(before);
                }
            }
            while let Some((id, result)) = self.core.poll_completion() {
                done.push((id.0, result));
            }
            match self.disk.complete_any() {
                Some((key, result)) => self.core.on_device(key.id, result),
                None if self.core.in_flight() == 0 => return done,
                None => assert!(self.core.device_in_flight() == 0, "stuck"),
            }
        }
    }

    /// Runs one operation.
    pub fn one(&mut self, op: StoreOp<'_>) -> StoreResult {
        self.submit(7, op);
        let done = self.run();
        assert_eq!(done.len(), 1);
        done[0].1
    }

    /// Writes a block.
    pub fn write(&mut self, block: u32, version: u64, content: &Block) {
        let iovecs = [iovec(content)];
        let op = write_op(block, version, &iovecs);
        self.one(op).unwrap();
    }

    /// Makes what was written durable.
    pub fn flush(&mut self) {
        self.one(StoreOp::Flush).unwrap();
    }

    /// Reads a block.
    pub fn read(&mut self, block: u32) -> Block {
        self.try_read(block).unwrap()
    }

    /// Reads a block, if it can be read.
    ///
    /// # Errors
    /// What the store says when it cannot.
    pub fn try_read(&mut self, block: u32) -> Result<Block, StoreError> {
        let mut content = [0xee; BLOCK_BYTES];
        let iovecs = [iovec_mut(&mut content)];
        self.one(StoreOp::Read {
            layers: &[LAYER],
            chunk: CHUNK,
            offset: block * BLOCK_BYTES as u32,
            iovecs: &iovecs,
        })
        .map(|()| content)
    }

    /// Makes a block read as zeroes.
    ///
    /// # Errors
    /// What the store says.
    pub fn zero(&mut self, block: u32, version: u64) -> StoreResult {
        self.one(StoreOp::Zero {
            layers: &[LAYER],
            chunk: CHUNK,
            offset: block * BLOCK_BYTES as u32,
            len: BLOCK_BYTES as u32,
            version: Version(version),
            fua: false,
        })
    }

    /// What a pass of the scrubber finds.
    pub fn scrub(&mut self) -> Vec<ScrubFinding> {
        while self.core.scrub_step() != ScrubStep::PassDone {
            self.run();
        }
        std::iter::from_fn(|| self.core.poll_finding()).collect()
    }

    /// What blocks are.
    pub fn inspect(&mut self, block: u32, count: usize) -> Vec<BlockStamp> {
        self.inspect_chunk(CHUNK, block, count)
    }

    fn inspect_chunk(&mut self, chunk: u32, block: u32, count: usize) -> Vec<BlockStamp> {
        let mut stamps = vec![
            BlockStamp {
                version: 9,
                crc: 9,
                holds: 9
            };
            count
        ];
        let iovecs = [libc::iovec {
            iov_base: stamps.as_mut_ptr().cast(),
            iov_len: size_of_val(stamps.as_slice()),
        }];
        self.one(StoreOp::Inspect {
            layer: LAYER,
            chunk,
            block,
            iovecs: &iovecs,
        })
        .unwrap();
        stamps
    }

    /// Makes a block what another replica has; without content its data are lost.
    ///
    /// # Errors
    /// What the store says.
    pub fn restore(
        &mut self,
        block: u32,
        expect: BlockStamp,
        stamp: BlockStamp,
        content: Option<&Block>,
    ) -> StoreResult {
        self.restore_with(block, [expect, stamp], content, false)
    }

    /// The same as for a takeover.
    ///
    /// # Errors
    /// What the store says.
    pub fn restore_urgently(
        &mut self,
        block: u32,
        expect: BlockStamp,
        stamp: BlockStamp,
        content: Option<&Block>,
    ) -> StoreResult {
        self.restore_with(block, [expect, stamp], content, true)
    }

    fn restore_with(
        &mut self,
        block: u32,
        [expect, stamp]: [BlockStamp; 2],
        content: Option<&Block>,
        urgent: bool,
    ) -> StoreResult {
        let iovecs: Vec<_> = content.into_iter().map(iovec).collect();
        self.one(StoreOp::Restore {
            layer: LAYER,
            chunk: CHUNK,
            block,
            expect,
            stamp,
            iovecs: &iovecs,
            urgent,
        })
    }
}

/// A block to write.
pub fn iovec(content: &Block) -> libc::iovec {
    libc::iovec {
        iov_base: content.as_ptr().cast_mut().cast(),
        iov_len: BLOCK_BYTES,
    }
}

/// Where to read a block to.
pub fn iovec_mut(content: &mut Block) -> libc::iovec {
    libc::iovec {
        iov_base: content.as_mut_ptr().cast(),
        iov_len: BLOCK_BYTES,
    }
}

/// The write of a block.
pub fn write_op(block: u32, version: u64, iovecs: &[libc::iovec]) -> StoreOp<'_> {
    StoreOp::Write {
        layers: &[LAYER],
        chunk: CHUNK,
        offset: block * BLOCK_BYTES as u32,
        iovecs,
        version: Version(version),
        fua: false,
        urgent: false,
    }
}

impl Shard {
    /// Where on the disk the block lies.
    pub fn find(&self, content: &Block) -> u64 {
        let mut block = [0; BLOCK_BYTES];
        let offsets = self.disk.written_blocks().into_iter();
        let mut offsets = offsets.map(|block| block * BLOCK_BYTES as u64);
        let there = offsets.find(|&offset| {
            self.disk.peek(offset, &mut block);
            block == *content
        });
        there.expect("it is on the disk")
    }

    /// What the layer holds, block by block where there is anything.
    pub fn stamps(&mut self) -> Vec<(ChunkKey, u32, BlockStamp)> {
        let mut chunks: Vec<_> =
            std::iter::successors(self.core.next_chunk(0), |c| self.core.next_chunk(c.2))
                .map(|(layer, index, _)| ChunkKey { layer, index })
                .collect();
        chunks.sort_unstable();
        let mut found = Vec::new();
        for chunk in chunks {
            for leaf in 0..4 {
                let stamps = self.inspect_chunk(chunk.index, leaf * 256, 256);
                let mapped = stamps.into_iter().zip(leaf * 256..);
                let mapped = mapped.filter(|(s, _)| s.holds != 0);
                found.extend(mapped.map(|(s, block)| (chunk, block, s)));
            }
        }
        found
    }
}
