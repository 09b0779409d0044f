//! The list of a placement group's chunks on this node.

use fabric_replication::replica::StoreFailure;
use fabric_replication::replica::store_op::{Listed, list_chunks};
use fabric_store::api::StoreCore;
use fabric_types::ids::ChunkKey;
use fabric_types::{Command, Request, placement};

use super::ShardPort;

/// Chunks of other groups passed over in one answer, so that a data thread with a store full of them is not
/// away for long.
const PASSED_MAX: u32 = 8192;

/// Bits of a cursor below the number of the device's shard.
const SHARD_SHIFT: u32 = 32;

impl ShardPort {
    /// Executes a [`Command::ListChunks`].
    pub(super) fn list_chunks(&mut self, request: &Request) -> Result<(), StoreFailure> {
        let group = self.groups.shared().get(request.pg);
        let (
            Command::ListChunks {
                cursor, buffers, ..
            },
            Some(group),
        ) = (request.command, group)
        else {
            return Err(StoreFailure::Invalid);
        };
        let device = self.stores.device(group.device());
        let of_groups = group.of_groups();
        let mut passed = 0;
        let mut next = |cursor: u64| {
            let mut nth = (cursor >> SHARD_SHIFT) as u32;
            let mut at = cursor as u32;
            while nth < device.shards {
                let state = self.stores.lock(device.first_shard + nth);
                while let Some((layer, index, behind)) = state.core.next_chunk(at) {
                    let chunk = ChunkKey { layer, index };
                    let behind_all = u64::from(nth) << SHARD_SHIFT | u64::from(behind);
                    if placement::pg_of(chunk, of_groups) == request.pg.base() {
                        return Listed::Chunk(chunk, behind_all);
                    }
                    passed += 1;
                    if passed > PASSED_MAX {
                        return Listed::Pause(behind_all);
                    }
                    at = behind;
                }
                (nth, at) = (nth + 1, 0);
            }
            Listed::End
        };
        // SAFETY: whoever asks keeps the list and its memory until the answer.
        unsafe { list_chunks(cursor, &buffers, &mut next) };
        Ok(())
    }
}
