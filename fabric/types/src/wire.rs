//! Requests and replies byte by byte. Everything is little-endian; every header is a multiple of 8 bytes
//! long.
//!
//! A request is one [`RequestHeader`], then [`RequestHeader::crc_count`] × 4 bytes of CRC32C, one per 4 KiB
//! block of the data in order (a first or last partial block has the CRC of its part), then for a write `len`
//! bytes of data unless the transport fetches them itself. A reply is one [`ReplyHeader`], then for a
//! successful read the CRCs and the data likewise.
//!
//! A host computes the CRCs once, before the data leave it; a replica accepts only bytes that match. The
//! `mem` transport never makes this form: both ends see the same memory, so a second checksum would protect
//! nothing, and the store takes the one CRC.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ids::{CHUNK_BYTES, ChunkKey, Epoch, Generation, Incarnation, LayerId, PgId, Sequence};
use super::message::{
    BlockStamp, ChunkEntry, Command, FenceEntry, Refusal, Reply, Request, RequestId,
    UnresolvedEntry,
};
use crate::block::BLOCK_BYTES;
use crate::iov::IoVecs;

/// First bytes of every header.
pub const MAGIC: [u8; 4] = *b"PSTK";
/// Version of this format; another one is refused.
pub const VERSION: u8 = 1;

/// The two stamps that the data of a `RESTORE` begin with.
pub const STAMPS_BYTES: u32 = 2 * size_of::<BlockStamp>() as u32;
/// Blocks of a chunk.
const CHUNK_BLOCKS: u64 = CHUNK_BYTES / BLOCK_BYTES as u64;
/// Longest list that a request may ask for.
pub const LIST_BYTES_MAX: u32 = 64 << 10;

/// Bit of [`RequestHeader::flags`]: a write or zero is durable before its reply.
pub const FLAG_FUA: u16 = 1;
/// Bit of [`RequestHeader::flags`]: a write may use a part of the reserve of a store that is full.
pub const FLAG_URGENT: u16 = 2;

/// `detail` of [`status::NO_SPACE`]: nothing was stored.
const UNTOUCHED: u64 = 1;

/// Values of [`RequestHeader::kind`].
pub mod kind {
    /// `Command::Read`
    pub const READ: u8 = 1;
    /// `Command::Write`
    pub const WRITE: u8 = 2;
    /// `Command::Zero`
    pub const ZERO: u8 = 3;
    /// `Command::Flush`
    pub const FLUSH: u8 = 4;
    /// `Command::Inspect`; the header's offset is the block.
    pub const INSPECT: u8 = 5;
    /// `Command::Restore`; the header's offset is the block. The data begin with the two stamps, 32 bytes.
    pub const RESTORE: u8 = 6;
    /// `Command::ListChunks`; the cursor takes the place of the layer.
    pub const LIST_CHUNKS: u8 = 7;
    /// `Command::Fence`
    pub const FENCE: u8 = 8;
    /// `Command::Join`
    pub const JOIN: u8 = 9;
    /// `Command::TellFence`
    pub const TELL_FENCE: u8 = 10;
}

/// Values of [`ReplyHeader::status`]; `detail` carries what is named in brackets.
pub mod status {
    /// Done.
    pub const OK: u16 = 0;
    /// `Refusal::StaleGeneration` [the persisted generation]
    pub const STALE_GENERATION: u16 = 1;
    /// `Refusal::StaleEpoch` [the persisted epoch]
    pub const STALE_EPOCH: u16 = 2;
    /// `Refusal::NoSpace` [1: nothing was stored; 0: a part may be]
    pub const NO_SPACE: u16 = 3;
    /// `Refusal::Corrupt`
    pub const CORRUPT: u16 = 4;
    /// `Refusal::Device` [errno]
    pub const DEVICE: u16 = 5;
    /// `Refusal::Invalid`
    pub const INVALID: u16 = 6;
    /// `Refusal::Renumber`
    pub const RENUMBER: u16 = 7;
    /// `Refusal::Changed`
    pub const CHANGED: u16 = 8;
    /// `Refusal::Mismatch`
    pub const MISMATCH: u16 = 9;
    /// `Refusal::Behind` [the replica's epoch]
    pub const BEHIND: u16 = 10;
}

/// Head of a request.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | magic |
/// | 4 | 1 | version |
/// | 5 | 1 | kind |
/// | 6 | 2 | flags |
/// | 8 | 8 | request id |
/// | 16 | 8 | placement group |
/// | 24 | 8 | epoch |
/// | 32 | 8 | generation |
/// | 40 | 8 | sequence |
/// | 48 | 8 | watermark |
/// | 56 | 8 | layer |
/// | 64 | 4 | chunk index |
/// | 68 | 4 | offset in the chunk |
/// | 72 | 4 | length |
/// | 76 | 4 | number of block CRCs that follow |
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RequestHeader {
    /// [`MAGIC`]
    pub magic: [u8; 4],
    /// [`VERSION`]
    pub version: u8,
    /// One of [`kind`].
    pub kind: u8,
    /// [`FLAG_FUA`], [`FLAG_URGENT`]
    pub flags: U16,
    /// [`Request::id`]
    pub request: U64,
    /// [`Request::pg`]
    pub pg: U64,
    /// [`Request::epoch`]
    pub epoch: U64,
    /// [`Request::generation`]
    pub generation: U64,
    /// [`Request::sequence`]
    pub sequence: U64,
    /// [`Request::watermark`]
    pub watermark: U64,
    /// Layer of the chunk.
    pub layer: U64,
    /// Chunk index; 0 for a flush.
    pub chunk: U32,
    /// Offset in the chunk; 0 for a flush.
    pub offset: U32,
    /// Length in bytes; 0 for a flush.
    pub len: U32,
    /// Block CRCs that follow.
    pub crc_count: U32,
}

/// Head of a reply.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | magic |
/// | 4 | 1 | version |
/// | 5 | 1 | zero |
/// | 6 | 2 | status |
/// | 8 | 8 | request id |
/// | 16 | 8 | incarnation |
/// | 24 | 8 | detail of the status |
/// | 32 | 4 | number of block CRCs that follow |
/// | 36 | 4 | bytes of data that follow |
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ReplyHeader {
    /// [`MAGIC`]
    pub magic: [u8; 4],
    /// [`VERSION`]
    pub version: u8,
    /// Zero.
    pub reserved: u8,
    /// One of [`status`].
    pub status: U16,
    /// [`Reply::id`]
    pub request: U64,
    /// [`Reply::incarnation`]
    pub incarnation: U64,
    /// See [`status`].
    pub detail: U64,
    /// Block CRCs that follow.
    pub crc_count: U32,
    /// Bytes of data that follow.
    pub len: U32,
}

const _: () = assert!(size_of::<RequestHeader>() == 80);
const _: () = assert!(size_of::<ReplyHeader>() == 40);

/// Why a header was refused. The peer broke the protocol: the connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Too short, or the magic is wrong.
    #[error("not a Penstock message")]
    NotOurs,
    /// Another version of the format.
    #[error(
        "message format version {0} (this node speaks {VERSION}); run the same release on all nodes"
    )]
    Version(u8),
    /// A field has a value that no version-1 peer sends.
    #[error("message field `{0}` has an impossible value")]
    Field(&'static str),
}

/// Number of 4 KiB blocks that a range touches, which is the number of its CRCs.
pub fn blocks_touched(offset: u32, len: u32) -> u32 {
    if len == 0 {
        return 0;
    }
    let block = BLOCK_BYTES as u64;
    let first = u64::from(offset) / block;
    let last = (u64::from(offset) + u64::from(len) - 1) / block;
    u32::try_from(last - first + 1).expect("a u32 range has fewer blocks than bytes")
}

impl RequestHeader {
    /// The wire form of `request`, announcing one CRC per block of a write.
    pub fn encode(request: &Request) -> Self {
        let (kind, chunk, offset, len, flags) = match request.command {
            Command::Read {
                chunk, offset, len, ..
            } => (kind::READ, chunk.index, offset, len, 0),
            Command::Write {
                chunk,
                offset,
                len,
                fua,
                urgent,
                ..
            } => {
                let flags = flag(fua, FLAG_FUA) | flag(urgent, FLAG_URGENT);
                (kind::WRITE, chunk.index, offset, len, flags)
            }
            Command::Zero {
                chunk,
                offset,
                len,
                fua,
            } => (kind::ZERO, chunk.index, offset, len, flag(fua, FLAG_FUA)),
            Command::Flush { .. } => (kind::FLUSH, 0, 0, 0, 0),
            Command::Inspect {
                chunk, block, len, ..
            } => (kind::INSPECT, chunk.index, block, len, 0),
            Command::Restore {
                chunk, block, len, ..
            } => (kind::RESTORE, chunk.index, block, STAMPS_BYTES + len, 0),
            Command::ListChunks { len, .. } => (kind::LIST_CHUNKS, 0, 0, len, 0),
            Command::Fence { len, .. } => (kind::FENCE, 0, 0, len, 0),
            Command::TellFence { len, .. } => (kind::TELL_FENCE, 0, 0, len, 0),
            Command::Join => (kind::JOIN, 0, 0, 0, 0),
        };
        let crc_count = if kind == kind::WRITE {
            blocks_touched(offset, len)
        } else {
            0
        };
        let layer = match request.command {
            Command::ListChunks { cursor, .. } => cursor,
            command => command.layer().map_or(0, |layer| layer.0),
        };
        Self {
            magic: MAGIC,
            version: VERSION,
            kind,
            flags: flags.into(),
            request: request.id.0.into(),
            pg: request.pg.0.into(),
            epoch: request.epoch.0.into(),
            generation: request.generation.0.into(),
            sequence: request.sequence.0.into(),
            watermark: request.watermark.0.into(),
            layer: layer.into(),
            chunk: chunk.into(),
            offset: offset.into(),
            len: len.into(),
            crc_count: crc_count.into(),
        }
    }

    /// Reads a header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<&Self, WireError> {
        let (header, _) = Self::ref_from_prefix(bytes).map_err(|_| WireError::NotOurs)?;
        check_start(header.magic, header.version)?;
        Ok(header)
    }

    /// The request, its data in `buffers` (ignored by commands that have none).
    ///
    /// Every field is checked: `buffers` must have been sized by this header's own `len`. Of a `RESTORE` they
    /// are what follows the stamps, which the caller puts in with [`Command::with_stamps`].
    pub fn decode(&self, buffers: IoVecs) -> Result<Request, WireError> {
        self.check()?;
        Ok(Request {
            id: RequestId(self.request.get()),
            pg: PgId(self.pg.get()),
            epoch: Epoch(self.epoch.get()),
            generation: Generation(self.generation.get()),
            sequence: Sequence(self.sequence.get()),
            watermark: Sequence(self.watermark.get()),
            command: self.command(buffers)?,
        })
    }

    /// Refuses what no peer sends, but for an unknown kind.
    fn check(&self) -> Result<(), WireError> {
        let known = match self.kind {
            kind::WRITE => FLAG_FUA | FLAG_URGENT,
            kind::ZERO => FLAG_FUA,
            _ => 0,
        };
        if self.flags.get() & !known != 0 {
            return Err(WireError::Field("flags"));
        }
        let crcs = match self.kind {
            kind::WRITE => blocks_touched(self.offset.get(), self.len.get()),
            _ => 0,
        };
        if self.crc_count.get() != crcs {
            return Err(WireError::Field("crc_count"));
        }
        self.check_range()?;
        self.check_counters()
    }

    /// Refuses a place in a chunk, or a length, that the kind of request cannot have.
    fn check_range(&self) -> Result<(), WireError> {
        let (offset, len) = (self.offset.get(), self.len.get());
        let names_chunk = matches!(
            self.kind,
            kind::READ | kind::WRITE | kind::ZERO | kind::INSPECT | kind::RESTORE
        );
        // The last number is none of a chunk: the store keeps fences under it, and in a list it stands for
        // all chunks.
        if names_chunk && self.chunk.get() == u32::MAX {
            return Err(WireError::Field("chunk"));
        }
        let is_list_of = |entry: usize| (entry as u32..=LIST_BYTES_MAX).contains(&len);
        let stamp = size_of::<BlockStamp>() as u32;
        let blocks = u64::from(len / stamp);
        let is_len_possible = match self.kind {
            kind::READ | kind::WRITE | kind::ZERO => {
                len > 0 && u64::from(offset) + u64::from(len) <= CHUNK_BYTES
            }
            // The offset is a block, and the length one of a list.
            kind::INSPECT => {
                len > 0 && len % stamp == 0 && u64::from(offset) + blocks <= CHUNK_BLOCKS
            }
            kind::LIST_CHUNKS => is_list_of(size_of::<ChunkEntry>()),
            kind::FENCE => is_list_of(size_of::<UnresolvedEntry>()),
            kind::TELL_FENCE => is_list_of(size_of::<FenceEntry>()),
            kind::RESTORE => [STAMPS_BYTES, STAMPS_BYTES + BLOCK_BYTES as u32].contains(&len),
            _ => len == 0,
        };
        if !is_len_possible {
            return Err(WireError::Field("len"));
        }
        if self.kind == kind::RESTORE && u64::from(offset) >= CHUNK_BLOCKS {
            return Err(WireError::Field("offset"));
        }
        Ok(())
    }

    /// Refuses counters that do not fit into a [`Version`](super::ids::Version), and changes under the last
    /// generation: a node keeps it for its own rounds of comparison (`core::replica::store_op::ROUND`), which
    /// change nothing on other nodes.
    fn check_counters(&self) -> Result<(), WireError> {
        let generation = Generation(self.generation.get());
        let changes = matches!(
            self.kind,
            kind::WRITE | kind::ZERO | kind::RESTORE | kind::FENCE
        );
        if generation > Generation::MAX || (changes && generation == Generation::MAX) {
            return Err(WireError::Field("generation"));
        }
        if self.sequence.get() > Sequence::MAX.0 {
            return Err(WireError::Field("sequence"));
        }
        if self.watermark.get() > Sequence::MAX.0 {
            return Err(WireError::Field("watermark"));
        }
        Ok(())
    }

    /// What is asked for, by a header that was checked.
    fn command(&self, buffers: IoVecs) -> Result<Command, WireError> {
        let (offset, len) = (self.offset.get(), self.len.get());
        let layer = LayerId(self.layer.get());
        let index = self.chunk.get();
        let chunk = ChunkKey { layer, index };
        let fua = self.flags.get() & FLAG_FUA != 0;
        Ok(match self.kind {
            kind::READ => Command::Read {
                chunk,
                offset,
                buffers,
                len,
            },
            kind::WRITE => Command::Write {
                chunk,
                offset,
                buffers,
                len,
                fua,
                urgent: self.flags.get() & FLAG_URGENT != 0,
            },
            kind::ZERO => Command::Zero {
                chunk,
                offset,
                len,
                fua,
            },
            kind::FLUSH => Command::Flush { layer },
            kind::INSPECT => Command::Inspect {
                chunk,
                block: offset,
                buffers,
                len,
            },
            kind::RESTORE => Command::Restore {
                chunk,
                block: offset,
                stamps: [BlockStamp::default(); 2],
                buffers,
                len: len - STAMPS_BYTES,
            },
            kind::LIST_CHUNKS => Command::ListChunks {
                cursor: layer.0,
                buffers,
                len,
            },
            kind::FENCE => Command::Fence {
                layer,
                buffers,
                len,
            },
            kind::TELL_FENCE => Command::TellFence {
                layer,
                buffers,
                len,
            },
            kind::JOIN => Command::Join,
            _ => return Err(WireError::Field("kind")),
        })
    }
}

impl ReplyHeader {
    /// The wire form of `reply`, followed by `len` bytes of data and `crc_count` CRCs.
    pub fn encode(reply: &Reply, len: u32, crc_count: u32) -> Self {
        let (status, detail) = match reply.result {
            Ok(()) => (status::OK, 0),
            Err(Refusal::StaleGeneration(g)) => (status::STALE_GENERATION, g.0),
            Err(Refusal::StaleEpoch(e)) => (status::STALE_EPOCH, e.0),
            Err(Refusal::Renumber) => (status::RENUMBER, 0),
            Err(Refusal::Behind(e)) => (status::BEHIND, e.0),
            Err(Refusal::Changed) => (status::CHANGED, 0),
            Err(Refusal::Mismatch) => (status::MISMATCH, 0),
            Err(Refusal::NoSpace { untouched }) => (status::NO_SPACE, u64::from(untouched)),
            Err(Refusal::Corrupt) => (status::CORRUPT, 0),
            Err(Refusal::Device(errno)) => (status::DEVICE, u64::from(errno.unsigned_abs())),
            // A replica that cannot reach itself does not exist; to the peer both are a malformed exchange.
            Err(Refusal::Invalid | Refusal::Unreachable) => (status::INVALID, 0),
        };
        Self {
            magic: MAGIC,
            version: VERSION,
            reserved: 0,
            status: status.into(),
            request: reply.id.0.into(),
            incarnation: reply.incarnation.0.into(),
            detail: detail.into(),
            crc_count: crc_count.into(),
            len: len.into(),
        }
    }

    /// Reads a reply header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<&Self, WireError> {
        let (header, _) = Self::ref_from_prefix(bytes).map_err(|_| WireError::NotOurs)?;
        check_start(header.magic, header.version)?;
        Ok(header)
    }

    /// The reply.
    pub fn decode(&self) -> Result<Reply, WireError> {
        if self.reserved != 0 {
            return Err(WireError::Field("reserved"));
        }
        let detail = self.detail.get();
        let result = match self.status.get() {
            status::OK => Ok(()),
            status::STALE_GENERATION if detail > Generation::MAX.0 => {
                return Err(WireError::Field("detail"));
            }
            status::STALE_GENERATION => Err(Refusal::StaleGeneration(Generation(detail))),
            status::STALE_EPOCH => Err(Refusal::StaleEpoch(Epoch(detail))),
            status::RENUMBER => Err(Refusal::Renumber),
            status::BEHIND => Err(Refusal::Behind(Epoch(detail))),
            status::CHANGED => Err(Refusal::Changed),
            status::MISMATCH => Err(Refusal::Mismatch),
            status::NO_SPACE => Err(Refusal::NoSpace {
                untouched: detail == UNTOUCHED,
            }),
            status::CORRUPT => Err(Refusal::Corrupt),
            status::DEVICE => {
                let errno = i32::try_from(detail).map_err(|_| WireError::Field("detail"))?;
                Err(Refusal::Device(errno))
            }
            status::INVALID => Err(Refusal::Invalid),
            _ => return Err(WireError::Field("status")),
        };
        Ok(Reply {
            id: RequestId(self.request.get()),
            incarnation: Incarnation(self.incarnation.get()),
            result,
        })
    }
}

fn flag(is_set: bool, bit: u16) -> u16 {
    if is_set { bit } else { 0 }
}

fn check_start(magic: [u8; 4], version: u8) -> Result<(), WireError> {
    if magic != MAGIC {
        return Err(WireError::NotOurs);
    }
    if version != VERSION {
        return Err(WireError::Version(version));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
