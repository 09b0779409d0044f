//! Inspect, read, restore: the commands by which blocks are compared and copied between replicas, and the
//! memory that they use.
//!
//! Resync, lease recovery and repair make their requests here. Whom they ask, in which order, and what
//! follows from an answer is theirs: `docs/decisions/0017-block-copies.md`.

use std::ops::Range;

use fabric_types::Command;
use fabric_types::block::{BLOCK_BYTES, Block, BlockStamp, LEAF_BLOCKS};
use fabric_types::checksum::crc32c;
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::iov::IoVecs;

use crate::groups::LeafKey;

/// Blocks of a chunk, from one on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) chunk: ChunkKey,
    /// The first of them.
    pub(crate) block: u32,
}

impl Place {
    /// Before any blocks are named.
    pub(crate) const NONE: Self = Self {
        chunk: ChunkKey {
            layer: LayerId(0),
            index: 0,
        },
        block: 0,
    };

    /// The blocks of a map page.
    pub(crate) fn of(leaf: LeafKey) -> Self {
        Self {
            chunk: leaf.chunk_key(),
            block: leaf.leaf * LEAF_BLOCKS,
        }
    }
}

/// Memory that requests in flight point into; it stays where it is.
#[derive(Debug)]
struct Memory<const SIDES: usize, const STAMPS: usize, const RUN: usize> {
    stamps: [[BlockStamp; STAMPS]; SIDES],
    blocks: [Block; RUN],
    stamps_iovs: [libc::iovec; SIDES],
    run_iov: libc::iovec,
    block_iovs: [libc::iovec; RUN],
}

const NO_IOV: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// What `SIDES` replicas have of up to `STAMPS` blocks of a chunk, and the data of up to `RUN` of these.
/// Blocks are counted from the place on. While a command is in flight its memory is in use.
#[derive(Debug)]
pub(crate) struct BlockCopy<const SIDES: usize, const STAMPS: usize, const RUN: usize> {
    place: Place,
    memory: Box<Memory<SIDES, STAMPS, RUN>>,
}

// SAFETY: the iovecs point into memory that the machine owns.
unsafe impl<const SIDES: usize, const STAMPS: usize, const RUN: usize> Send
    for BlockCopy<SIDES, STAMPS, RUN>
{
}

impl<const SIDES: usize, const STAMPS: usize, const RUN: usize> BlockCopy<SIDES, STAMPS, RUN> {
    /// Of these blocks.
    pub(crate) fn new(place: Place) -> Self {
        let memory = Box::new(Memory {
            stamps: [[BlockStamp::default(); STAMPS]; SIDES],
            blocks: [Block([0; BLOCK_BYTES]); RUN],
            stamps_iovs: [NO_IOV; SIDES],
            run_iov: NO_IOV,
            block_iovs: [NO_IOV; RUN],
        });
        Self { place, memory }
    }

    /// Goes on with other blocks, with no command in flight.
    pub(crate) fn go_to(&mut self, place: Place) {
        self.place = place;
    }

    /// The chunk.
    pub(crate) fn chunk(&self) -> ChunkKey {
        self.place.chunk
    }

    /// Number of a block within the chunk.
    pub(crate) fn block(&self, at: usize) -> u32 {
        self.place.block + at as u32
    }

    /// What the sides have, by block.
    pub(crate) fn stamps(&self) -> &[[BlockStamp; STAMPS]; SIDES] {
        &self.memory.stamps
    }

    /// One side has what another has: these blocks were restored there.
    pub(crate) fn note_copied(&mut self, from: usize, to: usize, run: Range<usize>) {
        let stamps = &mut self.memory.stamps;
        for at in run {
            stamps[to][at] = stamps[from][at];
        }
    }

    /// What blocks are, to be asked of a side.
    pub(crate) fn inspect(&mut self, side: usize, run: Range<usize>) -> Command {
        let block = self.block(run.start);
        let memory = &mut *self.memory;
        let stamps = &mut memory.stamps[side][run];
        let iov_len = size_of_val(&*stamps);
        memory.stamps_iovs[side] = libc::iovec {
            iov_base: stamps.as_mut_ptr().cast(),
            iov_len,
        };
        Command::Inspect {
            chunk: self.place.chunk,
            block,
            buffers: IoVecs {
                ptr: &raw const self.memory.stamps_iovs[side],
                len: 1,
            },
            len: iov_len as u32,
        }
    }

    /// The data of blocks, to be asked of whoever has them.
    pub(crate) fn read(&mut self, run: Range<usize>) -> Command {
        let offset = self.block(run.start) * BLOCK_BYTES as u32;
        let memory = &mut *self.memory;
        let blocks = &mut memory.blocks[..run.len()];
        let iov_len = size_of_val(&*blocks);
        memory.run_iov = libc::iovec {
            iov_base: blocks.as_mut_ptr().cast(),
            iov_len,
        };
        Command::Read {
            chunk: self.place.chunk,
            offset,
            buffers: IoVecs {
                ptr: &raw const self.memory.run_iov,
                len: 1,
            },
            len: iov_len as u32,
        }
    }

    /// Whether the blocks that were read last are what a side has told that it has.
    pub(crate) fn is_as_inspected(&self, side: usize, run: Range<usize>) -> bool {
        let stamps = &self.memory.stamps[side][run];
        let blocks = self.memory.blocks.iter();
        stamps
            .iter()
            .zip(blocks)
            .all(|(s, b)| crc32c(&b.0) == s.crc)
    }

    /// Block `at` becomes the second of these stamps where it is the first, with the data of the `nth` block
    /// that was read last; or with `None` no data: the block has none, or they are lost.
    pub(crate) fn restore(
        &mut self,
        at: usize,
        stamps: [BlockStamp; 2],
        nth: Option<usize>,
    ) -> Command {
        let (block, has_data) = (self.block(at), nth.is_some());
        let (memory, nth) = (&mut *self.memory, nth.unwrap_or(0));
        memory.block_iovs[nth] = libc::iovec {
            iov_base: memory.blocks[nth].0.as_mut_ptr().cast(),
            iov_len: BLOCK_BYTES,
        };
        Command::Restore {
            chunk: self.place.chunk,
            block,
            stamps,
            buffers: IoVecs {
                ptr: &raw const self.memory.block_iovs[nth],
                len: u32::from(has_data),
            },
            len: if has_data { BLOCK_BYTES as u32 } else { 0 },
        }
    }
}
