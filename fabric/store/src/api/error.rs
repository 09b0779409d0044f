//! Why operations fail.

use super::{LayerId, ScrubFinding, Version};

/// Why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The range leaves the chunk, is not a multiple of 512 bytes, or a list is empty or too long.
    #[error("operation outside its chunk, unaligned, or with a list that is empty or too long")]
    OutOfRange,
    /// No space left on the device, even after reclaiming.
    #[error("no space left on the device; discard data, delete volumes or add a device")]
    NoSpace {
        /// Nothing of the operation was stored, nor will be found after a crash.
        untouched: bool,
    },
    /// A block or its map page failed its checksum, twice.
    #[error(
        "checksum mismatch in chunk {chunk} of layer {layer:?}, block {block}, at byte {device_offset} of \
         the device"
    )]
    Corrupt {
        /// Layer.
        layer: LayerId,
        /// Chunk index.
        chunk: u32,
        /// First affected block in the chunk.
        block: u32,
        /// Where on the device.
        device_offset: u64,
    },
    /// The device refuses to read a block or its map page. Of an operation that writes it is the read of what
    /// a partly covered block held before: nothing of that map page was written.
    #[error(
        "device error {errno} reading chunk {chunk} of layer {layer:?}, block {block}, at byte \
         {device_offset} of the device"
    )]
    Unreadable {
        /// Layer.
        layer: LayerId,
        /// Chunk index.
        chunk: u32,
        /// First affected block in the chunk.
        block: u32,
        /// Where on the device.
        device_offset: u64,
        /// What the device answered.
        errno: i32,
    },
    /// The device answered a flush of all its shards with this errno.
    #[error("device error {0}")]
    Device(i32),
    /// A device write or flush failed, this operation's or an earlier one's; the shard refuses writes until
    /// it is opened again, reads go on.
    #[error(
        "read-only since a device write failed with errno {0}; replace the device or restart to retry"
    )]
    ReadOnly(i32),
    /// Some blocks hold a newer version; those were left alone, the others were written.
    #[error("superseded by version {newest}")]
    Stale {
        /// Newest version met.
        newest: Version,
    },
    /// Some blocks hold nothing and demand a newer version all the same: those were left alone, the others
    /// were written. The store does not know whether a later discard of the block asks for it or one of its
    /// neighbours, whose version outlives them; or the operation covers a part of a block, and the newer one
    /// may have been another part. Number the operation anew and submit it again.
    #[error("number it anew: versions up to {newest} are refused here")]
    Renumber {
        /// Newest version met.
        newest: Version,
    },
    /// The block is not as expected any more; nothing was done.
    #[error("the block has changed since it was inspected")]
    Changed,
    /// The bytes given do not have the checksum given; nothing was done.
    #[error("the data do not fit their checksum")]
    Mismatch,
    /// The layer's fence refuses this generation; nothing was done.
    #[error("fenced: generation {generation} is needed")]
    Fenced {
        /// Least generation that may write.
        generation: u32,
    },
}

impl StoreError {
    /// The place on the device that could not be read, if that is why.
    #[must_use]
    pub fn finding(&self) -> Option<ScrubFinding> {
        match *self {
            Self::Corrupt {
                layer,
                chunk,
                block,
                device_offset,
            }
            | Self::Unreadable {
                layer,
                chunk,
                block,
                device_offset,
                ..
            } => Some(ScrubFinding {
                layer,
                chunk,
                block,
                version: Version(0),
                device_offset,
            }),
            _ => None,
        }
    }
}
