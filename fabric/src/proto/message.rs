//! Requests and replies as the cores see them.

use super::ids::{ChunkKey, Epoch, Generation, Incarnation, LayerId, PgId, Sequence};
use crate::store::device::IoVecs;

/// Pairs a reply with its request. Never reused while a reply may be on its way: the upper half counts the uses of a
/// slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

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
}

impl Command {
    /// The layer that the command touches.
    pub fn layer(&self) -> LayerId {
        match self {
            Self::Read { chunk, .. } | Self::Write { chunk, .. } | Self::Zero { chunk, .. } => {
                chunk.layer
            }
            Self::Flush { layer } => *layer,
        }
    }

    /// True if the command changes data.
    pub fn mutates(&self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Flush { .. })
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
    /// The write is to be sent again under a version drawn now: the replica asks for a newer one where it holds nothing, so it
    /// cannot tell that this write was overwritten. Its other blocks may have been stored.
    Renumber,
    /// No space left on the replica's devices.
    NoSpace,
    /// A block failed its checksum.
    Corrupt,
    /// The device returned this errno.
    Device(i32),
    /// The block to be restored is not as expected any more; nothing was done.
    Changed,
    /// The data do not fit their checksums: they changed on the way, or while the guest's buffer was being sent. Nothing was
    /// stored.
    Mismatch,
    /// The range leaves its chunk, or the request is malformed.
    Invalid,
    /// The replica did not answer: connection lost or time over. Made by the transport, never sent.
    Unreachable,
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
