//! The chunk store on one of a node's devices.

use std::collections::VecDeque;

use fabric_store::ShardCore;
use fabric_store::api::{
    OpId, ScrubFinding, ScrubStep, StoreCore, StoreError, StoreOp, StoreResult, Submitted,
};
use fabric_store::device::DeviceAction;
use fabric_store::testing::sim_disk::{IoKey, IoKind, SimDisk};
use fabric_types::block::{BLOCK_BYTES, BlockStamp, LEAF_BLOCKS};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey};

use super::memory::Buffer;
use crate::pace::Upkeep;

/// Operations below this number are the replicas'.
const UPKEEP: u64 = 1 << 59;
/// Operations from this number on look in beside the data path.
const PEEK: u64 = 1 << 60;
/// Bytes of a forged block. No guest writes such.
const FORGED: u8 = 0xf0;

/// See the module.
pub struct Store {
    /// What ships.
    pub core: ShardCore,
    /// Requests that it has not taken yet.
    pub waiting: VecDeque<u64>,
}

impl Store {
    pub fn new(core: ShardCore) -> Self {
        Self {
            core,
            waiting: VecDeque::new(),
        }
    }

    /// Begins what maintenance does of its own accord. A store that is full does not.
    pub fn begin_upkeep(&mut self, upkeep: Upkeep) {
        let op = match upkeep {
            Upkeep::Checkpoint => StoreOp::Checkpoint { clean: false },
            Upkeep::Flush => StoreOp::Flush,
            Upkeep::Clean => {
                self.core.clean_step();
                while self.core.poll_finding().is_some() {}
                return;
            }
        };
        // SAFETY: neither has buffers.
        let _ = unsafe { self.core.submit(OpId(UPKEEP), op) };
    }

    /// Next operation that ended, but for those of maintenance, whose outcomes nobody waits for.
    pub fn poll_completion(&mut self) -> Option<(OpId, StoreResult)> {
        let mut all = std::iter::from_fn(|| self.core.poll_completion());
        all.find(|(id, _)| *id != OpId(UPKEEP))
    }

    /// Begins the next disk request that it wants.
    pub fn begin_next(&mut self, disk: &mut SimDisk) -> Option<(IoKey, IoKind)> {
        let action = self.core.poll_action()?;
        let id = match &action {
            DeviceAction::Read { id, .. }
            | DeviceAction::Write { id, .. }
            | DeviceAction::Flush { id }
            | DeviceAction::Discard { id, .. } => *id,
        };
        let kind = disk.submit(0, action);
        Some((IoKey { shard: 0, id }, kind))
    }

    /// Its chunks, each with the cursor behind it.
    pub fn chunks_from(&self, cursor: u32) -> impl Iterator<Item = (ChunkKey, u32)> {
        let first = self.core.next_chunk(cursor);
        let all = std::iter::successors(first, |(.., behind)| self.core.next_chunk(*behind));
        all.map(|(layer, index, behind)| (ChunkKey { layer, index }, behind))
    }

    /// Reads beside the data path, which must be idle.
    pub fn peek(
        &mut self,
        disk: &mut SimDisk,
        chunk: ChunkKey,
        (offset, len): (u32, u32),
    ) -> Result<Vec<u8>, String> {
        assert_eq!(self.core.in_flight(), 0, "only while the store is idle");
        let mut buffer = Buffer::new(len as usize, 0, true);
        let list = buffer.list();
        let op = StoreOp::Read {
            layers: &[chunk.layer],
            chunk: chunk.index,
            offset,
            iovecs: &*list,
        };
        // SAFETY: the memory is on this stack until the completion below.
        let taken = unsafe { self.core.submit(OpId(PEEK), op) };
        assert_eq!(taken, Submitted::Accepted, "an idle store has room");
        let result = self.run_alone(disk);
        result.map_err(|e| e.to_string())?;
        Ok(buffer.bytes().to_vec())
    }

    /// What the blocks of a chunk are, beside the data path.
    pub fn stamps(
        &mut self,
        disk: &mut SimDisk,
        chunk: ChunkKey,
    ) -> Result<Vec<BlockStamp>, String> {
        let mut stamps = vec![BlockStamp::default(); (CHUNK_BYTES as usize) / BLOCK_BYTES];
        for (nth, page) in stamps.chunks_mut(LEAF_BLOCKS as usize).enumerate() {
            let list = [libc::iovec {
                iov_base: page.as_mut_ptr().cast(),
                iov_len: size_of_val(page),
            }];
            let op = StoreOp::Inspect {
                layer: chunk.layer,
                chunk: chunk.index,
                block: nth as u32 * LEAF_BLOCKS,
                iovecs: &list,
            };
            // SAFETY: the memory is on this stack until the completion below.
            let taken = unsafe { self.core.submit(OpId(PEEK), op) };
            assert_eq!(taken, Submitted::Accepted, "an idle store has room");
            let result = self.run_alone(disk);
            result.map_err(|e| e.to_string())?;
        }
        Ok(stamps)
    }

    /// Gives a block another content with a checksum that fits, and the version that it has, beside the data
    /// path; false if there is no room for it.
    pub fn forge(
        &mut self,
        disk: &mut SimDisk,
        chunk: ChunkKey,
        block: u32,
    ) -> Result<bool, String> {
        let expect = self.stamps(disk, chunk)?[block as usize];
        let mut buffer = Buffer::new(BLOCK_BYTES, FORGED, true);
        let list = buffer.list();
        let stamp = BlockStamp {
            crc: fabric_types::checksum::crc32c(buffer.bytes()),
            ..expect
        };
        let op = StoreOp::Restore {
            layer: chunk.layer,
            chunk: chunk.index,
            block,
            expect,
            stamp,
            iovecs: &*list,
            urgent: false,
        };
        // SAFETY: the memory is on this stack until the completion below.
        let taken = unsafe { self.core.submit(OpId(PEEK), op) };
        assert_eq!(taken, Submitted::Accepted, "an idle store has room");
        match self.run_alone(disk) {
            Ok(()) => Ok(true),
            Err(StoreError::NoSpace { .. }) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Reads every block once beside the data path.
    pub fn scrub(&mut self, disk: &mut SimDisk) -> Vec<ScrubFinding> {
        assert_eq!(self.core.in_flight(), 0, "only while the store is idle");
        while self.core.scrub_step() != ScrubStep::PassDone {
            self.run_device(disk);
        }
        std::iter::from_fn(|| self.core.poll_finding()).collect()
    }

    fn run_device(&mut self, disk: &mut SimDisk) {
        while let Some((key, _)) = self.begin_next(disk) {
            let result = disk.complete(key).expect("it was begun just now");
            self.core.on_device(key.id, result);
        }
    }

    fn run_alone(&mut self, disk: &mut SimDisk) -> StoreResult {
        loop {
            self.run_device(disk);
            if let Some((_, result)) = self.core.poll_completion() {
                return result;
            }
        }
    }
}
