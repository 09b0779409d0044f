//! The last look at map pages that could not be read, before a checkpoint replaces them.
//!
//! An error of the device may pass, and the page says of blocks where they are that nobody has changed since.
//! Once it is replaced nothing says so any more.

use fabric_types::checksum::crc32c;
use zerocopy::FromBytes;

use super::super::super::format::{LEAF_BLOCKS, MapEntry};
use super::super::super::leaf::{LeafState, StandIn};
use super::super::requests::{IoKind, IoOutcome};
use super::super::resources::Resources;
use super::pages::PageWriter;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Rereader {
    /// Cache slots before this one were looked at.
    cursor: u32,
}

impl Rereader {
    /// Queues reads of the pages that the running checkpoint would replace; `true` when all were read.
    pub(super) fn step(&mut self, writer: &mut PageWriter, res: &mut Resources) -> bool {
        while self.cursor < res.map.leaves.slots() {
            let slot = self.cursor;
            let meta = res.map.leaves.meta(slot);
            let is_ready = meta.state == LeafState::Ready && meta.dirty;
            if is_ready && matches!(meta.stand_in, StandIn::Unread { .. }) {
                let Some(buffer) = writer.buffer() else {
                    return false;
                };
                let Some(io) = res.device.take() else {
                    return false;
                };
                let unit = res.map.leaf_ptr(meta.rec, meta.leaf).unit;
                writer.read(io, unit, buffer, IoKind::Reread { slot, buffer }, res);
            }
            self.cursor += 1;
        }
        let is_done = !writer.is_busy();
        if is_done {
            self.cursor = 0;
        }
        is_done
    }
}

/// A page has been read, or not. Its leaf is dirty and stays in the cache.
pub(super) fn on_reread((slot, buffer): (u32, u32), outcome: IoOutcome<'_>, res: &mut Resources) {
    let meta = *res.map.leaves.meta(slot);
    let ptr = res.map.leaf_ptr(meta.rec, meta.leaf);
    let bytes = res.arena.buf().blocks(buffer, 1);
    if outcome.proves(0, ptr.crc, || crc32c(bytes)) {
        let page = <[MapEntry; LEAF_BLOCKS]>::read_from_bytes(bytes);
        res.take_reread(slot, &page.expect("a page holds 256 entries"));
        return;
    }
    let by_device = meta.stand_in.is_by_device();
    res.map.leaves.meta_mut(slot).stand_in = StandIn::GivenUp { by_device };
}
