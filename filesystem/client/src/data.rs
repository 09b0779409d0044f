//! The content of files.
//!
//! A write is answered after its data are in segments, flushed, and named by the file. Whole blocks replace
//! what was there; a block that is written in part is completed by what the file holds, and the commit then
//! says which state of the file that was. If another host changed the file in between, the commit is refused,
//! and the write looks again. On one host the changes of a file wait for each other instead, except that
//! writes of whole blocks go side by side.
//!
//! All of this is done past the buffer ([`crate::buffer`]), and after what is there is written back. Writes
//! to files that are held exclusively go into the buffer instead.
//!
//! Behind the end of a file its last block is zero. Every change here keeps that.

pub(crate) mod allocate;
pub(crate) mod copy;
pub(crate) mod read;
pub(crate) mod resize;
pub(crate) mod seek;
mod staging;
pub(crate) mod tries;
pub(crate) mod write;

use namespace::{BLOCK, Extent};

use crate::data_cache::Span;

/// Extents of one look at a file. As many as the blocks of a READ or WRITE at most.
pub(crate) const EXTENTS_MAX: u32 = namespace::ITEMS_MAX as u32;

/// The begin of the block that holds this offset.
pub(crate) fn block_begin(offset: u64) -> u64 {
    offset / BLOCK * BLOCK
}

/// The end of the block that ends at this offset or holds the byte before it. Offsets are below 2^63.
pub(crate) fn block_end(offset: u64) -> u64 {
    offset.next_multiple_of(BLOCK)
}

/// Where the blocks of a range are, by the extents that reach into it: the offset in the file, the addresses,
/// and the epoch to read these in.
pub(crate) fn spans_of(
    extents: &[Extent],
    (from, to): (u64, u64),
) -> impl Iterator<Item = (u64, Span, u64)> {
    extents.iter().filter_map(move |extent| {
        // Whole blocks, as they are stored.
        let begin = extent.offset.max(block_begin(from));
        let end = extent.end().min(block_end(to));
        let span = Span {
            segment: extent.segment,
            address: extent.address + begin.saturating_sub(extent.offset),
            length: end.saturating_sub(begin),
        };
        (begin < end).then_some((begin, span, extent.epoch))
    })
}
