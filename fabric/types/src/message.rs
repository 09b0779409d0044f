//! Requests and replies as the cores see them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ids::{ChunkKey, Epoch, Generation, Incarnation, LayerId, PgId, Sequence};
pub use crate::block::BlockStamp;
use crate::block::is_media_error;
use crate::iov::IoVecs;

/// Pairs a reply with its request. Never reused while a reply may be on its way: the upper half counts the
/// uses of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

/// Requests to replicas that a data thread has in flight for guests at most, each for one piece of a guest's
/// request. A guest's request that needs more than are free is answered busy.
pub const PIECES_MAX: u32 = 6144;

/// What a replica shall do.
#[derive(Debug, Clone, Copy)]
pub enum Command {
    /// Fill `buffers` from a chunk.
    Read {
        /// The chunk.
        chunk: ChunkKey,
        /// First byte inside the chunk.
        offset: u32,
        /// Destination; its lengths are what is read.
        buffers: IoVecs,
        /// Bytes in all.
        len: u32,
    },
    /// Store `buffers` into a chunk.
    Write {
        /// The chunk.
        chunk: ChunkKey,
        /// First byte inside the chunk.
        offset: u32,
        /// Source; its lengths are what is written.
        buffers: IoVecs,
        /// Bytes in all.
        len: u32,
        /// Durable before the reply.
        fua: bool,
        /// Other replicas have it already, or a part of it is stored: the replica may use a part of its
        /// store's reserve for it.
        urgent: bool,
    },
    /// Make a range of a chunk read as zeroes and give its space back (discard and write-zeroes).
    Zero {
        /// The chunk.
        chunk: ChunkKey,
        /// First byte inside the chunk.
        offset: u32,
        /// Bytes.
        len: u32,
        /// Durable before the reply.
        fua: bool,
    },
    /// Make every write answered before this request durable.
    Flush {
        /// The layer whose writes are meant; a replica may flush more.
        layer: LayerId,
    },
    /// Tell what some blocks of one map page are: fill `buffers`, one piece of memory, with a [`BlockStamp`]
    /// each.
    Inspect {
        /// The chunk.
        chunk: ChunkKey,
        /// First block inside the chunk.
        block: u32,
        /// Destination.
        buffers: IoVecs,
        /// Its bytes: 16 for each block.
        len: u32,
    },
    /// Make a block what another replica has, if it is as expected.
    Restore {
        /// The chunk.
        chunk: ChunkKey,
        /// Block inside the chunk.
        block: u32,
        /// What is there now, and what shall be.
        stamps: [BlockStamp; 2],
        /// Its data, 4096 bytes; none if it shall hold none.
        buffers: IoVecs,
        /// Bytes in all.
        len: u32,
    },
    /// Fill `buffers`, one piece of memory, with [`ChunkEntry`]s of the placement group's chunks, from a
    /// cursor on. The last entry says where to go on.
    ListChunks {
        /// 0, or the cursor of the last answer's last entry.
        cursor: u64,
        /// Destination.
        buffers: IoVecs,
        /// Its bytes: 24 for each entry.
        len: u32,
    },
    /// Refuse the layer's writes of older leases from now on, durably, and fill `buffers`, one piece of
    /// memory, with the writes that may be unresolved, an [`UnresolvedEntry`] each. An entry without blocks
    /// ends the list.
    Fence {
        /// The layer.
        layer: LayerId,
        /// Destination.
        buffers: IoVecs,
        /// Its bytes: 24 for each entry.
        len: u32,
    },
    /// Tell the fence of a layer, persisted or not: fill `buffers`, one piece of memory, with a
    /// [`FenceEntry`] and, as far as there is room for entries, with the writes of all leases that may be
    /// unresolved, as for [`Command::Fence`].
    TellFence {
        /// The layer.
        layer: LayerId,
        /// Destination.
        buffers: IoVecs,
        /// Its bytes: 16, or those and 24 for each entry.
        len: u32,
    },
    /// Refuse requests of older maps for this placement group from now on.
    Join,
}

/// A chunk in the answer to [`Command::ListChunks`]. 24 bytes, little-endian in memory.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct ChunkEntry {
    /// Layer.
    pub layer: u64,
    /// Where the list goes on behind this entry.
    pub cursor: u64,
    /// Chunk index.
    pub chunk: u32,
    /// One of [`chunk_entry`].
    pub kind: u32,
}

/// The answer to [`Command::TellFence`]. 16 bytes, little-endian in memory.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct FenceEntry {
    /// Oldest lease that may write; 0 for any.
    pub generation: u64,
    /// Oldest map that is acted under; 0 for any.
    pub epoch: u64,
}

impl FenceEntry {
    /// Reads what an answer filled: any bytes.
    #[must_use]
    pub fn from_memory(bytes: &[u8]) -> Self {
        Self::read_from_prefix(bytes).map_or_else(|_| Self::default(), |(entry, _)| entry)
    }

    /// The newer of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            generation: self.generation.max(other.generation),
            epoch: self.epoch.max(other.epoch),
        }
    }
}

/// Values of [`ChunkEntry::kind`].
pub mod chunk_entry {
    /// A chunk.
    pub const CHUNK: u32 = 0;
    /// No chunk: ask again from its cursor.
    pub const MORE: u32 = 1;
    /// No chunk: there are no more.
    pub const END: u32 = 2;
}

/// Blocks that an unresolved write touched, in the answer to [`Command::Fence`]. 24 bytes, little-endian in
/// memory.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct UnresolvedEntry {
    /// Newest version among them.
    pub version: u64,
    /// Chunk index.
    pub chunk: u32,
    /// First block.
    pub block: u32,
    /// Blocks; 0 ends the list.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

impl UnresolvedEntry {
    /// Stands for every block of the layer.
    pub const EVERYTHING: Self = Self {
        version: u64::MAX,
        chunk: u32::MAX,
        block: 0,
        count: 1,
        reserved: 0,
    };
}

impl Command {
    /// The layer that the command touches, if it is about one.
    #[inline]
    pub fn layer(&self) -> Option<LayerId> {
        match self {
            Self::Read { chunk, .. }
            | Self::Write { chunk, .. }
            | Self::Zero { chunk, .. }
            | Self::Inspect { chunk, .. }
            | Self::Restore { chunk, .. } => Some(chunk.layer),
            Self::Flush { layer } | Self::Fence { layer, .. } | Self::TellFence { layer, .. } => {
                Some(*layer)
            }
            Self::ListChunks { .. } | Self::Join => None,
        }
    }

    /// A restoration with the stamps that were read from the wire; any other command stays as it is.
    #[must_use]
    pub fn with_stamps(self, read: [BlockStamp; 2]) -> Self {
        match self {
            Self::Restore {
                chunk,
                block,
                buffers,
                len,
                ..
            } => Self::Restore {
                chunk,
                block,
                stamps: read,
                buffers,
                len,
            },
            other => other,
        }
    }

    /// True if the command changes data or who may.
    #[inline]
    pub fn mutates(&self) -> bool {
        match self {
            Self::Write { .. } | Self::Zero { .. } | Self::Restore { .. } | Self::Fence { .. } => {
                true
            }
            Self::Read { .. }
            | Self::Flush { .. }
            | Self::Inspect { .. }
            | Self::ListChunks { .. }
            | Self::TellFence { .. }
            | Self::Join => false,
        }
    }
}

/// One request of a client to one replica.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Comes back in the reply.
    pub id: RequestId,
    /// Placement group addressed.
    pub pg: PgId,
    /// The cluster map by which the client chose the replica.
    pub epoch: Epoch,
    /// The client's lease.
    pub generation: Generation,
    /// The write's position; that of the last write for a command that writes nothing.
    pub sequence: Sequence,
    /// Every write of this generation below it has been answered by every in-sync replica.
    pub watermark: Sequence,
    /// What to do.
    pub command: Command,
}

impl Request {
    /// What a table of requests holds where there is none.
    pub const NOTHING: Self = Self {
        id: RequestId(0),
        pg: PgId(0),
        epoch: Epoch(0),
        generation: Generation(0),
        sequence: Sequence(0),
        watermark: Sequence(0),
        command: Command::Flush { layer: LayerId(0) },
    };
}

/// Why a replica did not do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The lease is older than the one persisted.
    StaleGeneration(Generation),
    /// The map is older than the one persisted.
    StaleEpoch(Epoch),
    /// The request's map is newer than the replica's, which knows this one: ask again soon.
    Behind(Epoch),
    /// The write is to be sent again under a version drawn now: the replica asks for a newer one where it
    /// holds nothing, so it cannot tell that this write was overwritten. Its other blocks may have been
    /// stored.
    Renumber,
    /// No space left on the replica's devices.
    NoSpace {
        /// Nothing of it was stored.
        untouched: bool,
    },
    /// A block failed its checksum.
    Corrupt,
    /// The device returned this errno, to a read or a flush; `EROFS`: a write or a flush of it failed, now or
    /// earlier, and its store takes no more.
    Device(i32),
    /// The block to be restored is not as expected any more; nothing was done.
    Changed,
    /// The data do not fit their checksums: they changed on the way, or while the guest's buffer was being
    /// sent. Nothing was stored.
    Mismatch,
    /// The range leaves its chunk, or the request is malformed.
    Invalid,
    /// The replica did not answer: connection lost or time over. Made by the transport, never sent.
    Unreachable,
}

impl Refusal {
    /// Whether it says that the replica has a block and cannot read it: asking it again is of no use until
    /// the block is written again. To a write of a part of a block, of which the rest is to be read first,
    /// the answer is the same; it has stored nothing of the map page then.
    pub fn is_unreadable(self) -> bool {
        match self {
            Self::Corrupt => true,
            Self::Device(errno) => is_media_error(errno),
            _ => false,
        }
    }
}

/// A replica's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// Names the request.
    pub id: RequestId,
    /// Which start of the replica answered: one that restarted is not to be trusted as in-sync.
    pub incarnation: Incarnation,
    /// The outcome.
    pub result: Result<(), Refusal>,
}
