//! Blocks: the unit of checksum, mapping and comparison.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Unit of checksum, mapping and allocation on a device, in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// Blocks of a leaf: one page of a store's map, and as many as replicas compare at a time.
pub const LEAF_BLOCKS: u32 = 256;

/// The data of a block, aligned as direct I/O needs it.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; BLOCK_BYTES]);

/// Whether a read that ends with this errno says that the blocks cannot be given, and not that the device, or
/// the way to it, is gone, slow or busy.
///
/// For a block device Linux names the errnos in `blk_errors` (block/blk-core.c): `ENODATA` is a medium error,
/// `EILSEQ` a failed protection check, and `EIO` whatever has no errno of its own, the error of most drives
/// and drivers among it. A file's file system adds what it finds itself: `EBADMSG` is a checksum of its own
/// that does not fit, `EUCLEAN` a map of the file that is damaged (`EFSBADCRC` and `EFSCORRUPTED` of ext4 and
/// XFS).
///
/// A device that dies as a whole may answer `EIO`, too, to everything. Who takes blocks for lost must bound
/// how many.
pub fn is_media_error(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO | libc::ENODATA | libc::EILSEQ | libc::EBADMSG | libc::EUCLEAN
    )
}

/// What a layer holds in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum Holds {
    /// Nothing: it reads as the layer below, or as zeroes.
    #[default]
    Nothing = 0,
    /// It reads as zeroes and hides the layers below.
    Zeroes = 1,
    /// Data.
    Data = 2,
}

/// A block of a layer as replicas compare it, see `docs/REPLICATION.md`. 16 bytes, little-endian in memory:
/// offset 0 version, 8 checksum, 12 [`Holds`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct BlockStamp {
    /// Version of the last write or discard. Where nothing is held it may be that of a neighbour.
    pub version: u64,
    /// CRC32C of the data; 0 without.
    pub crc: u32,
    /// One of [`Holds`].
    pub holds: u32,
}

impl BlockStamp {
    /// Of a block whose map page cannot be read: what it holds, and of which version, is not known here.
    /// Reading it fails as of a bad block, until it is written or restored. Any version is newer, so that
    /// nobody takes it for the newest. Whoever knows nothing of this finds a block that cannot be read.
    pub const UNKNOWN: Self = Self {
        version: 0,
        crc: 0,
        holds: Holds::Data as u32,
    };

    /// Whether it is [`UNKNOWN`](Self::UNKNOWN).
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::UNKNOWN
    }

    /// What is held.
    #[must_use]
    pub fn holds(&self) -> Holds {
        match self.holds {
            0 => Holds::Nothing,
            1 => Holds::Zeroes,
            _ => Holds::Data,
        }
    }

    /// Whether both replicas hold the same, so that nothing need be copied. Where they hold nothing versions
    /// mean little.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        self == other || (self.holds() == Holds::Nothing && other.holds() == Holds::Nothing)
    }
}
