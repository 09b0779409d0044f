//! How far the log is: its windows, the batches in flight, and what is done and durable of it.

use fabric_types::slab::Slab;

use super::super::api::FlushMark;
use super::super::log::Window;
use super::Loaded;

/// Log batches in flight; further writes gather in the next batch meanwhile.
pub(super) const BATCHES_MAX: usize = 32;

/// One change of the map that a batch makes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) part: u32,
    pub(super) first: u16,
    pub(super) count: u16,
    pub(super) unit: u32,
    pub(super) crc: u32,
    pub(super) kind: u32,
}

/// A log batch in flight.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) lsn: u64,
    pub(super) window: u64,
    pub(super) header: u32,
    pub(super) buffer: u32,
    pub(super) blocks: u32,
    pub(super) ios: u32,
    pub(super) errno: Option<i32>,
    pub(super) watermark: u64,
    pub(super) items: Vec<Item>,
    pub(super) parts: Vec<u32>,
    /// Map pages that it will make dirty at most.
    pub(super) leaves: u32,
    /// It could not be written, and an empty one takes its place.
    pub(super) cancelled: bool,
    /// Device requests to be made: unit, buffer block, blocks.
    pub(super) spans: Vec<(u32, u32, u32)>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) nonce: [u8; 16],
    pub(super) current: Window,
    /// Named by the durable superblock as the one that follows; `None` while a checkpoint runs.
    pub(super) next: Option<Window>,
    pub(super) batches: Slab<Batch>,
    /// Batches in flight by window number's parity.
    in_flight: [u32; 2],
    /// Map pages that they will make dirty at most.
    pending_leaves: u32,
    /// Closed until the superblock that names the window anew is durable.
    pub(super) hold: bool,
    next_lsn: u64,
    durable_lsn: u64,
    /// Batches done since opening, and how many of them were done before the newest good flush began.
    finished: u64,
    flushed: u64,
    /// Newest batch done, whether or not all before it are.
    newest_done: u64,
    /// Newest batch that holds more than a watermark.
    newest_content: u64,
    /// Newest watermark in a header on the device.
    watermark_written: u64,
}

impl Log {
    /// Closed until the first checkpoint has given it windows.
    pub(super) fn new(loaded: &Loaded) -> Self {
        Self {
            nonce: loaded.nonce,
            current: Window::new(loaded.window_id, Vec::new()),
            next: None,
            batches: Slab::new(BATCHES_MAX as u32, Batch::default),
            in_flight: [0; 2],
            pending_leaves: 0,
            hold: true,
            next_lsn: loaded.next_lsn,
            durable_lsn: loaded.next_lsn - 1,
            finished: 0,
            flushed: 0,
            newest_done: loaded.next_lsn - 1,
            newest_content: loaded.next_lsn - 1,
            watermark_written: loaded.next_lsn - 1,
        }
    }

    /// Whether a batch can be opened, as far as the log goes.
    pub(super) fn is_open(&self) -> bool {
        !self.hold && self.batches.free() > 0
    }

    /// Opens the next batch, whose header goes from a buffer block to a unit of the current window.
    pub(super) fn open_batch(&mut self, header: u32, buffer: u32) -> u32 {
        let slot = self.batches.take().expect("checked by the caller");
        let batch = &mut self.batches[slot];
        batch.lsn = self.next_lsn;
        batch.window = self.current.id;
        (batch.header, batch.buffer, batch.ios, batch.errno) = (header, buffer, 0, None);
        (batch.leaves, batch.cancelled) = (0, false);
        batch.watermark = self.durable_lsn;
        batch.items.clear();
        batch.parts.clear();
        batch.spans.clear();
        batch.spans.push((header, buffer, 1));
        self.next_lsn += 1;
        self.current.batches += 1;
        self.in_flight[(self.current.id & 1) as usize] += 1;
        slot
    }

    /// The batch will make so many map pages dirty that are not.
    pub(super) fn expect_leaves(&mut self, batch: u32, leaves: u32) {
        self.batches[batch].leaves += leaves;
        self.pending_leaves += leaves;
    }

    /// The batch goes to the device.
    pub(super) fn note_content(&mut self, batch: u32) {
        let batch = &self.batches[batch];
        if !batch.items.is_empty() {
            self.newest_content = batch.lsn;
        }
    }

    /// The last device write of the batch has ended; its slot is freed later.
    pub(super) fn note_done(&mut self, batch: u32) {
        let batch = &mut self.batches[batch];
        self.newest_done = self.newest_done.max(batch.lsn);
        self.pending_leaves -= std::mem::take(&mut batch.leaves);
        // Empty ones hold nothing that a flush would have to cover.
        self.finished += u64::from(!batch.items.is_empty());
        self.in_flight[(batch.window & 1) as usize] -= 1;
    }

    /// Map pages that the batches in flight will make dirty at most.
    pub(super) fn pending_leaves(&self) -> u32 {
        self.pending_leaves
    }

    /// Batches in flight that went to the window with this number, or to one of the same parity.
    pub(super) fn in_flight_of(&self, window: u64) -> u32 {
        self.in_flight[(window & 1) as usize]
    }

    /// Whether no batch is in flight.
    pub(super) fn is_quiet(&self) -> bool {
        self.in_flight == [0; 2]
    }

    pub(super) fn next_lsn(&self) -> u64 {
        self.next_lsn
    }

    pub(super) fn durable_lsn(&self) -> u64 {
        self.durable_lsn
    }

    /// Newest batch done, whether or not all before it are.
    pub(super) fn newest_done(&self) -> u64 {
        self.newest_done
    }

    /// Newest batch with all before it complete.
    pub(super) fn completed_lsn(&self) -> u64 {
        let under_way = self.batches.iter().map(|b| b.lsn).min();
        under_way.unwrap_or(self.next_lsn) - 1
    }

    /// Batches with content done since opening.
    pub(super) fn finished(&self) -> u64 {
        self.finished
    }

    /// Whether a flush would make anything durable.
    pub(super) fn has_unflushed(&self) -> bool {
        self.finished > self.flushed
    }

    /// What a flush that begins now will cover.
    pub(super) fn mark(&self) -> FlushMark {
        FlushMark {
            lsn: self.completed_lsn(),
            finished: self.finished,
        }
    }

    pub(super) fn note_flushed(&mut self, mark: FlushMark) {
        // Invariant *Durable*: only what was done before the flush began counts as flushed.
        assert!(mark.lsn < self.next_lsn && mark.finished <= self.finished);
        self.durable_lsn = self.durable_lsn.max(mark.lsn);
        self.flushed = self.flushed.max(mark.finished);
    }

    /// What the log should say to be durable: that of empty batches would not be worth a write.
    pub(super) fn to_record(&self) -> u64 {
        self.durable_lsn.min(self.newest_content)
    }

    /// A header or superblock on the device says so much to be durable.
    pub(super) fn note_recorded(&mut self, watermark: u64) {
        self.watermark_written = self.watermark_written.max(watermark);
    }

    /// Whether the device has it that all up to `lsn` is durable.
    pub(super) fn is_recorded(&self, lsn: u64) -> bool {
        self.watermark_written >= lsn
    }

    /// Newest watermark of the batches in flight.
    pub(super) fn watermark_under_way(&self) -> Option<u64> {
        self.batches.iter().map(|b| b.watermark).max()
    }
}
