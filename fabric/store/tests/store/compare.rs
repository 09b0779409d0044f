//! Compares what a store shows with what the model allows.

use std::collections::BTreeMap;

use fabric_store::api::{Fence, OpId, StoreCore, StoreError, StoreOp, StoreResult, Submitted};
use fabric_types::block::BLOCK_BYTES;

use crate::buffer::Buffer;
use crate::model::{Range, Spot};
use crate::rig::{Rig, TURNS_MAX};
use crate::sim_disk::CrashKind;

/// Blocks that one read of the comparison asks for.
const COMPARE_BLOCKS_MAX: usize = 64;

impl Rig {
    /// Reads every block ever touched, in runs; `None` where the store reported an error instead.
    pub fn read_everything(&mut self) -> Vec<(Spot, Option<Vec<u8>>)> {
        self.drain();
        let spots = self.now.model.spots();
        let mut runs: Vec<Vec<Spot>> = Vec::new();
        for spot in spots {
            match runs.last_mut() {
                Some(run) if follows(run, spot) => run.push(spot),
                _ => runs.push(vec![spot]),
            }
        }
        let mut found = Vec::new();
        for run in runs {
            let bytes = self.read_raw(run[0], run.len() as u32);
            match bytes {
                Ok(bytes) => {
                    let blocks = bytes.chunks_exact(BLOCK_BYTES).map(|b| Some(b.to_vec()));
                    found.extend(run.into_iter().zip(blocks));
                }
                Err(_) if run.len() > 1 => found.extend(run.into_iter().map(|spot| {
                    let bytes = self.read_raw(spot, 1).ok();
                    (spot, bytes)
                })),
                Err(_) => found.push((run[0], None)),
            }
        }
        found
    }

    /// Reads blocks, without the model.
    pub fn read_raw(&mut self, spot: Spot, blocks: u32) -> Result<Vec<u8>, StoreError> {
        let range = Range::blocks(spot.view, spot.chunk, spot.block, blocks);
        let mut buffer = Buffer::new(range.len() as usize, &mut self.rng);
        buffer.bytes_mut().fill(0xa5);
        let iovecs = buffer.iovecs().to_vec();
        let op = StoreOp::Read {
            layers: range.view.layers(),
            chunk: range.chunk,
            offset: range.offset(),
            iovecs: &iovecs,
        };
        self.run_raw(op).map(|()| buffer.bytes().to_vec())
    }

    /// Where on the device the current content of a block lies.
    pub fn device_offset(&mut self, spot: Spot) -> u64 {
        let content = self.read_raw(spot, 1).expect("an intact block can be read");
        let mut places = self.now.disk.written_blocks().into_iter().filter(|at| {
            let mut bytes = vec![0; BLOCK_BYTES];
            self.now.disk.peek(at * BLOCK_BYTES as u64, &mut bytes);
            bytes == content
        });
        places.next().expect("the content is on the device") * BLOCK_BYTES as u64
    }

    /// Runs an operation on an idle store, without the model.
    pub fn run_raw(&mut self, op: StoreOp<'_>) -> StoreResult {
        let shard = match op {
            StoreOp::Read { chunk, .. }
            | StoreOp::Write { chunk, .. }
            | StoreOp::Zero { chunk, .. } => self.shard(chunk),
            _ => 0,
        };
        let id = OpId(self.next_op);
        self.next_op += 1;
        // SAFETY: the operation is done, or the test over, before this returns.
        let submitted = unsafe { self.cores[shard].submit(id, op) };
        assert_eq!(submitted, Submitted::Accepted, "an idle store is not busy");
        for _ in 0..TURNS_MAX {
            let moved = self.pump();
            if let Some((done, result)) = self.cores[shard].poll_completion() {
                assert_eq!(done, id);
                return result;
            }
            let outcome = self.now.disk.complete_any();
            assert!(moved || outcome.is_some(), "an operation is stuck");
            outcome.into_iter().for_each(|o| self.deliver(o));
        }
        panic!("an operation takes for ever");
    }

    /// The space map says exactly what the map of blocks says, and all that is stored is counted.
    pub fn check_space(&mut self) {
        for core in &self.cores {
            core.check(&mut self.now.disk)
                .unwrap_or_else(|e| panic!("{e}"));
        }
        let unknown = self.stored().into_iter().find(|(_, bytes)| bytes.is_none());
        assert_eq!(unknown, None, "a chunk is not counted");
    }

    /// What each chunk stores; `None` for those that are not counted.
    pub fn stored(&self) -> BTreeMap<(u64, u32), Option<u64>> {
        let mut found = BTreeMap::new();
        for core in &self.cores {
            let mut cursor = 0;
            while let Some((chunk, bytes, next)) = core.next_stored(cursor) {
                found.insert((chunk.layer.0, chunk.index), bytes);
                cursor = next;
            }
        }
        found
    }

    /// Every block shows exactly its last state.
    pub fn check_last_state(&mut self) {
        for (spot, bytes) in self.read_everything() {
            let bytes = bytes.unwrap_or_else(|| panic!("{spot:?} cannot be read"));
            self.now
                .model
                .check_last_state(spot, &bytes)
                .unwrap_or_else(|e| panic!("{e}"));
        }
        self.check_fences();
        self.check_space();
    }

    /// Every block shows a state that is not older than the newest acknowledged one. For stores that refused
    /// writes.
    pub fn check_live(&mut self) {
        assert_eq!(self.check_readable(), [], "these cannot be read");
    }

    /// As `check_live`; returns the blocks that cannot be read.
    pub fn check_readable(&mut self) -> Vec<Spot> {
        let mut unreadable = Vec::new();
        for (spot, bytes) in self.read_everything() {
            let Some(bytes) = bytes else {
                unreadable.push(spot);
                continue;
            };
            let range = Range::blocks(spot.view, spot.chunk, spot.block, 1);
            let floors = self.now.model.floors(range);
            let checked = self.now.model.check_read(range, &bytes, &floors);
            checked.unwrap_or_else(|e| panic!("{e}"));
        }
        unreadable
    }

    /// Every block shows a state that the crash allows, and is pinned to it.
    pub fn check_after_crash(&mut self, kind: CrashKind) {
        for (spot, bytes) in self.read_everything() {
            let bytes = bytes.unwrap_or_else(|| panic!("{spot:?} cannot be read after a crash"));
            let checked = self.now.model.check_after_crash(spot, &bytes, kind);
            checked.unwrap_or_else(|e| panic!("after a {kind:?} crash: {e}"));
        }
        self.check_fences();
    }

    fn check_fences(&mut self) {
        for (layer, [least, asked]) in &mut self.now.fences {
            let found: Vec<Fence> = self.cores.iter().map(|core| core.fence(*layer)).collect();
            for fence in found {
                let fits = |bound: &Fence, fence: &Fence| {
                    bound.generation <= fence.generation && bound.epoch <= fence.epoch
                };
                assert!(
                    fits(least, &fence),
                    "{layer:?} lost its fence {least:?}: {fence:?}"
                );
                assert!(fits(&fence, asked), "{layer:?} invented a fence {fence:?}");
            }
        }
    }
}

fn follows(run: &[Spot], spot: Spot) -> bool {
    let last = run[run.len() - 1];
    let same = last.view == spot.view && last.chunk == spot.chunk;
    same && last.block + 1 == spot.block && run.len() < COMPARE_BLOCKS_MAX
}
