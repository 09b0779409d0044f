//! The configuration space of virtio-blk (virtio 1.2, section 5.2.4), field by field.

use fabric_types::io::SECTOR_BYTES;

use super::{BlkOptions, MAX_RANGE_SECTORS, PHYSICAL_BLOCK_BYTES};

/// Length of the configuration space: up to and including `write_zeroes_may_unmap` and its padding.
pub const CONFIG_BYTES: usize = 60;
/// Offset of the `writeback` byte.
pub const WRITEBACK_OFFSET: u32 = 32;

/// Logical sectors per physical block, as a power of two.
const PHYSICAL_BLOCK_EXP: u8 = (PHYSICAL_BLOCK_BYTES as u64 / SECTOR_BYTES).trailing_zeros() as u8;

/// Collects little-endian fields one after the other.
struct Fields {
    bytes: [u8; CONFIG_BYTES],
    at: usize,
}

impl Fields {
    fn put<const N: usize>(&mut self, field: [u8; N]) -> &mut Self {
        self.bytes[self.at..self.at + N].copy_from_slice(&field);
        self.at += N;
        self
    }
}

/// The configuration space of a volume of `size_bytes`.
pub(super) fn bytes(size_bytes: u64, options: &BlkOptions, writeback: bool) -> [u8; CONFIG_BYTES] {
    let block_sectors = 1u32 << PHYSICAL_BLOCK_EXP;
    let mut fields = Fields {
        bytes: [0; CONFIG_BYTES],
        at: 0,
    };
    fields
        .put((size_bytes / SECTOR_BYTES).to_le_bytes()) // capacity
        .put(options.size_max().to_le_bytes())
        .put(options.seg_max().to_le_bytes())
        .put([0; 4]) // geometry: not offered
        .put((SECTOR_BYTES as u32).to_le_bytes()) // blk_size
        .put([PHYSICAL_BLOCK_EXP])
        .put([0]) // alignment_offset
        .put((block_sectors as u16).to_le_bytes()) // min_io_size
        .put([0; 4]) // opt_io_size: none stated, since mkfs.xfs would take it for a stripe
        .put([u8::from(writeback)])
        .put([0])
        .put(options.queues.to_le_bytes())
        .put(MAX_RANGE_SECTORS.to_le_bytes()) // max_discard_sectors
        .put(options.ranges_max().to_le_bytes()) // max_discard_seg
        .put(block_sectors.to_le_bytes()) // discard_sector_alignment
        .put(MAX_RANGE_SECTORS.to_le_bytes()) // max_write_zeroes_sectors
        .put(options.ranges_max().to_le_bytes()) // max_write_zeroes_seg
        .put([1]) // write_zeroes_may_unmap
        .put([0; 3]);
    fields.bytes
}
