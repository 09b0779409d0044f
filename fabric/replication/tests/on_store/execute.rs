//! What a node does with commands of the replication protocol, on one shard.

use fabric_replication::replica::store_op::{list_chunks, operation};
use fabric_store::api::{StoreCore, StoreError, StoreResult};
use fabric_types::ids::{ChunkKey, Version};
use fabric_types::{Command, Request};

use crate::shard::Shard;

/// Executes a command of the replication protocol on a shard, past all fences.
pub fn execute(shard: &mut Shard, command: &Command, version: Version) -> StoreResult {
    if let Command::ListChunks {
        cursor, buffers, ..
    } = command
    {
        let next = |cursor: u64| {
            let (layer, index, behind) = shard.core.next_chunk(cursor as u32)?;
            Some((ChunkKey { layer, index }, u64::from(behind)))
        };
        // SAFETY: the machine keeps the list and its memory until the answer.
        unsafe { list_chunks(*cursor, buffers, next) };
        return Ok(());
    }
    let (generation, sequence) = version.parts();
    let request = Request {
        generation,
        sequence,
        command: *command,
        ..Request::NOTHING
    };
    // SAFETY: the machine keeps the lists and their memory until the answer.
    let op = unsafe { operation(&request) };
    op.map_or(Err(StoreError::OutOfRange), |op| shard.one(op))
}
