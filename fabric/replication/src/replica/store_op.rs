//! What a request means to a shard of the store, and the last look at whether it may still be executed: the
//! same for every shell around the [`Replica`](super::Replica) machine.

use fabric_store::api::{Fence, StoreError, StoreOp};
use fabric_types::ids::{ChunkKey, Version};
use fabric_types::iov::IoVecs;
use fabric_types::message::{ChunkEntry, FenceEntry, chunk_entry};
use fabric_types::{Command, Epoch, Generation, PgId, Refusal, Request};
use zerocopy::IntoBytes;

use super::StoreFailure;
use crate::fence::Fence as LayerFence;
use crate::groups::{GroupCache, Groups};

/// The shard's operation that executes the request. `None` where none does: a join, a look at a fence
/// ([`tell_fence`]), and the list of a group's chunks ([`list_chunks`]). A flush and a fence concern every
/// shard; their operations are for one.
///
/// # Safety
/// The request's list of buffers and their memory are valid for as long as the operation is in use.
#[inline]
pub unsafe fn operation(request: &Request) -> Option<StoreOp<'_>> {
    let version = Version::of(request.generation, request.sequence);
    Some(match &request.command {
        Command::Read {
            chunk,
            offset,
            buffers,
            ..
        } => StoreOp::Read {
            layers: std::slice::from_ref(&chunk.layer),
            chunk: chunk.index,
            offset: *offset,
            // SAFETY: the caller's promise.
            iovecs: unsafe { slice_of(buffers) },
        },
        Command::Write {
            chunk,
            offset,
            buffers,
            fua,
            urgent,
            ..
        } => StoreOp::Write {
            layers: std::slice::from_ref(&chunk.layer),
            chunk: chunk.index,
            offset: *offset,
            // SAFETY: the caller's promise.
            iovecs: unsafe { slice_of(buffers) },
            version,
            fua: *fua,
            urgent: *urgent,
        },
        Command::Zero {
            chunk,
            offset,
            len,
            fua,
        } => StoreOp::Zero {
            layers: std::slice::from_ref(&chunk.layer),
            chunk: chunk.index,
            offset: *offset,
            len: *len,
            version,
            fua: *fua,
        },
        Command::Flush { .. } => StoreOp::Flush,
        Command::Fence { layer, .. } => StoreOp::SetFence {
            layer: *layer,
            fence: Fence {
                generation: version.generation(),
                epoch: request.epoch.0,
            },
        },
        command @ (Command::Inspect { .. } | Command::Restore { .. }) => {
            // SAFETY: the caller's promise.
            return unsafe { operation_on_blocks(command, request.generation) };
        }
        Command::ListChunks { .. } | Command::TellFence { .. } | Command::Join => return None,
    })
}

/// The same of commands by which replicas are compared and made equal; `None` of others.
///
/// # Safety
/// As for [`operation`].
unsafe fn operation_on_blocks(command: &Command, generation: Generation) -> Option<StoreOp<'_>> {
    // SAFETY: the caller's promise.
    let list = |buffers| unsafe { slice_of(buffers) };
    Some(match command {
        Command::Inspect {
            chunk,
            block,
            buffers,
            ..
        } => StoreOp::Inspect {
            layer: chunk.layer,
            chunk: chunk.index,
            block: *block,
            iovecs: list(buffers),
        },
        Command::Restore {
            chunk,
            block,
            stamps: [expect, stamp],
            buffers,
            len,
        } => StoreOp::Restore {
            layer: chunk.layer,
            chunk: chunk.index,
            block: *block,
            expect: *expect,
            stamp: *stamp,
            iovecs: if *len > 0 { list(buffers) } else { &[] },
            // A volume cannot be used until its takeover is over. A round can begin again.
            urgent: generation != ROUND,
        },
        _ => return None,
    })
}

/// # Safety
/// The list is valid for as long as the slice is in use.
#[inline]
unsafe fn slice_of(list: &IoVecs) -> &[libc::iovec] {
    if list.len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) }
}

/// Fills the memory that a [`Command::TellFence`] names with the newest of the fences that shards have
/// persisted. The replica machine adds what is not persisted yet.
///
/// # Safety
/// The list and its memory are valid, and nobody else uses them.
pub unsafe fn tell_fence(buffers: &IoVecs, persisted: impl Iterator<Item = Fence>) {
    let newest = persisted
        .map(|fence| FenceEntry {
            generation: u64::from(fence.generation),
            epoch: fence.epoch,
        })
        .fold(FenceEntry::default(), FenceEntry::max);
    // SAFETY: the caller's promise.
    let out = unsafe { buffers.first_mut() };
    // What is not written goes to the peer, too, and the memory was another request's.
    out.fill(0);
    if let Some(place) = out.first_chunk_mut::<{ size_of::<FenceEntry>() }>() {
        place.copy_from_slice(newest.as_bytes());
    }
}

/// What comes next in a list of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listed {
    /// A chunk, and the cursor behind it.
    Chunk(ChunkKey, u64),
    /// Enough for now: the list goes on from this cursor.
    Pause(u64),
    /// Nothing.
    End,
}

impl From<Option<(ChunkKey, u64)>> for Listed {
    fn from(found: Option<(ChunkKey, u64)>) -> Self {
        found.map_or(Self::End, |(chunk, behind)| Self::Chunk(chunk, behind))
    }
}

/// Fills the memory that a [`Command::ListChunks`] names. `next` looks for the first of the group's chunks at
/// or after a cursor.
///
/// # Safety
/// The list and its memory are valid, and nobody else uses them.
pub unsafe fn list_chunks<N: Into<Listed>>(
    mut cursor: u64,
    buffers: &IoVecs,
    mut next: impl FnMut(u64) -> N,
) {
    // SAFETY: the caller's promise.
    let out = unsafe { buffers.first_mut() };
    // What is not written goes to the peer, too, and the memory was another request's.
    out.fill(0);
    let mut places = out.chunks_exact_mut(size_of::<ChunkEntry>()).peekable();
    while let Some(place) = places.next() {
        // The last place says where to go on.
        let listed = match places.peek() {
            None => Listed::Pause(cursor),
            Some(_) => next(cursor).into(),
        };
        let mut entry = ChunkEntry {
            cursor,
            kind: chunk_entry::END,
            ..ChunkEntry::default()
        };
        match listed {
            Listed::Chunk(chunk, behind) => {
                (entry.layer, entry.chunk) = (chunk.layer.0, chunk.index);
                (entry.cursor, entry.kind) = (behind, chunk_entry::CHUNK);
            }
            Listed::Pause(at) => (entry.cursor, entry.kind) = (at, chunk_entry::MORE),
            Listed::End => {}
        }
        cursor = entry.cursor;
        place.copy_from_slice(entry.as_bytes());
        if !matches!(listed, Listed::Chunk(..)) {
            return;
        }
    }
}

/// The lease under which a node's own rounds of comparison have their commands executed: none that is granted
/// reaches it.
pub const ROUND: Generation = Generation::MAX;

/// The last look at a request, at its turn: in the moment in which its shard takes it, with nothing in
/// between that could raise a fence. The replica machine has looked before, but a request may have waited
/// since, and whoever raised a fence (a new lease, a returning replica's join) was told that older requests
/// are refused from then on.
///
/// `fence` is that of the request's layer, if it has one (and the layer was not deleted meanwhile); without
/// `groups` the node is alone. A command of a round ([`ROUND`]) on this node's own store is looked at as
/// [`still_untouched`] says.
#[inline]
pub fn still_admitted(
    request: &Request,
    fence: Option<&LayerFence>,
    groups: &mut GroupCache,
) -> Result<(), Refusal> {
    if let Some(fence) = fence {
        fence.admit(request)?;
    }
    if let Command::Fence { .. } = request.command {
        // It holds since it was admitted; what is left is to persist it.
        return Ok(());
    }
    groups.admit(request)?;
    match request.generation {
        ROUND => still_untouched(request.pg, &request.command, groups.shared()),
        _ => Ok(()),
    }
}

/// The last look at a command of a round of comparison on this node's own store, in the same moment. No fence
/// concerns it; but a block is restored only if no client's write to it has been admitted since this replica
/// began to be sent every write: one that left no trace, a discard where nothing is mapped, would be undone.
/// The same holds of a block that a replica in sync does not know, since it began to
/// [watch](crate::groups::Group::watch) it.
pub fn still_untouched(pg: PgId, command: &Command, groups: &Groups) -> Result<(), Refusal> {
    let Command::Restore {
        chunk,
        block,
        stamps: [expect, _],
        ..
    } = *command
    else {
        return Ok(());
    };
    let is_unknown = expect.is_unknown();
    let group = groups.get(pg);
    match group.is_some_and(|group| group.may_restore(chunk, block, is_unknown)) {
        true => Ok(()),
        false => Err(Refusal::Changed),
    }
}

/// What the replica machine is told of an operation that failed.
#[cold]
pub fn failure(error: StoreError, request: &Request) -> StoreFailure {
    match error {
        StoreError::Stale { .. } => StoreFailure::Stale,
        StoreError::Renumber { .. } => StoreFailure::Renumber,
        StoreError::NoSpace { untouched } => StoreFailure::NoSpace { untouched },
        StoreError::Changed => StoreFailure::Changed,
        StoreError::Mismatch => StoreFailure::Mismatch,
        StoreError::OutOfRange => StoreFailure::Invalid,
        StoreError::Device(errno) | StoreError::Unreadable { errno, .. } => {
            StoreFailure::Device(errno)
        }
        // Not the errno of the write that failed: it would pass for a block that cannot be read.
        StoreError::ReadOnly(_) => StoreFailure::Device(libc::EROFS),
        StoreError::Corrupt { .. } => {
            tracing::error!(%error, "read refused");
            StoreFailure::Corrupt
        }
        StoreError::Fenced { generation } => {
            let generation = Generation(u64::from(generation));
            StoreFailure::Fenced(if generation > request.generation {
                Refusal::StaleGeneration(generation)
            } else {
                // The client asks for a map newer than the one it used.
                Refusal::StaleEpoch(Epoch(request.epoch.0.saturating_add(1)))
            })
        }
    }
}

#[cfg(test)]
mod tests;
