//! What a shard remembers of operations, their parts, device requests and the log.

use super::super::api::{BlockStamp, Fence, FlushMark, LAYER_CHAIN_MAX, LayerId, StoreError};
use super::super::format::{UNIT_BYTES, UNIT_UNMAPPED, UNIT_ZERO};
use super::super::log::Window;
use super::super::table::NONE;

/// What an operation is, once its parts are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum OpKind {
    #[default]
    Io,
    Flush,
    Fence(Fence),
    Drop,
    Checkpoint,
}

/// An operation in flight.
#[derive(Debug, Default)]
pub(super) struct Op {
    pub(super) id: u64,
    pub(super) kind: OpKind,
    pub(super) iovs: Vec<libc::iovec>,
    /// Every iovec can be handed to an `O_DIRECT` device.
    pub(super) aligned: bool,
    pub(super) layers: [u64; LAYER_CHAIN_MAX],
    pub(super) layer_count: usize,
    pub(super) chunk: u32,
    pub(super) offset: u32,
    pub(super) fua: bool,
    pub(super) parts_left: u32,
    pub(super) error: Option<StoreError>,
}

// SAFETY: the iovecs are descriptions of memory that the submitter keeps valid, see `StoreCore::submit`.
unsafe impl Send for Op {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum PartKind {
    #[default]
    Read,
    Write,
    Zero,
    Drop,
    Fence,
    FenceDrop,
    Scrub,
    Inspect,
    Restore,
    /// Looks at a leaf, and reads what the cleaner will move.
    LocateVictims,
    /// Logs it in its new place.
    Move,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum PartState {
    /// An earlier write overlaps.
    #[default]
    WaitHazard,
    /// Blocks are being looked up.
    Resolve,
    /// Device reads are being queued.
    Issue,
    /// Blocks with a bad checksum are read again.
    Retry,
    /// The old content of partly covered blocks is being fetched.
    Fetch,
    /// The leaf to be looked at is wanted.
    LocateVictims,
    /// What is to be moved is being read.
    Relocate,
    /// The leaf to be changed is wanted.
    Acquire,
    /// In the queue for a log batch, or in one.
    Logging,
}

/// Where a block of a part was found.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Found {
    /// Unit; `UNIT_UNMAPPED` while not resolved.
    pub(super) unit: u32,
    pub(super) crc: u32,
}

/// The piece of an operation that lies in one leaf.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) op: u32,
    pub(super) kind: PartKind,
    pub(super) state: PartState,
    /// Order of arrival; decides who waits for whom.
    pub(super) seq: u64,
    pub(super) layer: u64,
    pub(super) chunk: u32,
    pub(super) rec: u32,
    pub(super) leaf: u8,
    /// Byte range within the chunk.
    pub(super) start: u32,
    pub(super) end: u32,
    /// Block range within the leaf, and of those the fully covered ones.
    pub(super) first: u16,
    pub(super) count: u16,
    pub(super) version: u64,
    pub(super) map: Vec<Found>,
    pub(super) unresolved: u32,
    pub(super) chain_at: usize,
    pub(super) cursor: u32,
    pub(super) ios: u32,
    pub(super) retry: Vec<u16>,
    /// Buffers with the old content of partly covered blocks: (index in the part, buffer block).
    pub(super) old: [Option<(u16, u32)>; 2],
    /// Buffers promised to it for that.
    pub(super) old_promised: u32,
    /// Quarantine generation whose units it may read.
    pub(super) tag: Option<u8>,
    pub(super) pinned: bool,
    pub(super) linked: bool,
    pub(super) hazard_next: u32,
    pub(super) wait_next: u32,
    pub(super) batches: u32,
    pub(super) logged: bool,
    /// Newest version met that is newer than the part's.
    pub(super) stale: u64,
    /// One of those was at a block that holds nothing.
    pub(super) renumber: bool,
    /// What a restored block is now, and shall be.
    pub(super) restore: [BlockStamp; 2],
    pub(super) error: Option<StoreError>,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            op: NONE,
            kind: PartKind::Read,
            state: PartState::WaitHazard,
            seq: 0,
            layer: 0,
            chunk: 0,
            rec: NONE,
            leaf: 0,
            start: 0,
            end: 0,
            first: 0,
            count: 0,
            version: 0,
            map: Vec::new(),
            unresolved: 0,
            chain_at: 0,
            cursor: 0,
            ios: 0,
            retry: Vec::new(),
            old: [None; 2],
            old_promised: 0,
            tag: None,
            pinned: false,
            linked: false,
            hazard_next: NONE,
            wait_next: NONE,
            batches: 0,
            logged: false,
            stale: 0,
            renumber: false,
            restore: [BlockStamp::default(); 2],
            error: None,
        }
    }
}

impl Part {
    /// Nothing is looked up yet: every block of a read, and those that a write covers partly.
    pub(super) fn begin_resolve(&mut self) {
        let block = UNIT_BYTES as u32;
        let all = matches!(self.kind, PartKind::Read | PartKind::Scrub);
        let (head, tail) = (self.start % block != 0, self.end % block != 0);
        let last = self.count - 1;
        self.map.clear();
        self.map.extend((0..=last).map(|i| {
            let partial = (i == 0 && head) || (i == last && tail);
            let unit = if all || partial {
                UNIT_UNMAPPED
            } else {
                UNIT_ZERO
            };
            Found { unit, crc: 0 }
        }));
        let missing = self.map.iter().filter(|f| f.unit == UNIT_UNMAPPED);
        self.unresolved = missing.count() as u32;
        self.chain_at = 0;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum IoKind {
    #[default]
    Free,
    /// Blocks `first..first + count` of a part, into its memory or into buffer blocks.
    Read {
        part: u32,
        first: u16,
        count: u16,
        buffer: Option<u32>,
        second: bool,
    },
    /// Old content of a partly covered block.
    Fetch {
        part: u32,
        which: u8,
        second: bool,
    },
    Leaf {
        slot: u32,
    },
    /// Blocks of a leaf into the cleaner's buffer.
    Relocate {
        part: u32,
        first: u16,
        count: u16,
        second: bool,
    },
    Log {
        batch: u32,
    },
    /// Checkpoint pages; the pinned leaves are in the request's list.
    Pages {
        buffer: u32,
    },
    Superblock {
        buffer: u32,
    },
    Flush,
    CheckpointFlush,
}

/// How a device request ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct IoOutcome<'a> {
    pub(super) result: Result<(), i32>,
    /// Sums of the blocks of a read, if somebody took them already.
    pub(super) crcs: Option<&'a [u32]>,
}

impl IoOutcome<'_> {
    /// Whether block `i` arrived with this sum. `compute` takes it if nobody has.
    ///
    /// Invariant *Verified*: what this denies is never answered as good, be it data or a page that says where
    /// they are.
    pub(super) fn proves(&self, i: u16, crc: u32, compute: impl FnOnce() -> u32) -> bool {
        let found = match self.crcs {
            Some(crcs) => crcs[usize::from(i)],
            None => compute(),
        };
        self.result.is_ok() && found == crc
    }
}

/// A device request in flight.
#[derive(Debug, Default)]
pub(super) struct Io {
    pub(super) kind: IoKind,
    /// Where it goes, if it is a write.
    pub(super) unit: u32,
    /// Made again after it was put off.
    pub(super) retried: bool,
    pub(super) iovs: Vec<libc::iovec>,
    pub(super) leaves: Vec<u32>,
}

// SAFETY: as for `Op`; the other iovecs lie in memory that the shard owns.
unsafe impl Send for Io {}

/// Flush operations: at most one device flush at a time serves all that wait.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    pub(super) waiting: Vec<u32>,
    /// Newest batch that was done when somebody began to wait: older ones must be done before the flush
    /// begins.
    pub(super) after: u64,
    pub(super) running: Vec<u32>,
    pub(super) mark: FlushMark,
    pub(super) busy: bool,
    /// Operations that wait for all batches up to one to be done.
    pub(super) ordering: Vec<(u32, u64)>,
    /// Operations that wait for the log to say that it is durable up to a batch.
    pub(super) recording: Vec<(u32, u64)>,
}

/// The log's position.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) nonce: [u8; 16],
    pub(super) current: Window,
    /// Named by the durable superblock as the one that follows; `None` while a checkpoint runs.
    pub(super) next: Option<Window>,
    /// Batches in flight by window number's parity.
    pub(super) in_flight: [u32; 2],
    /// Closed until the superblock that names the window anew is durable.
    pub(super) hold: bool,
    pub(super) next_lsn: u64,
    pub(super) durable_lsn: u64,
    /// Batches done since opening, and how many of them were done before the newest good flush began.
    pub(super) finished: u64,
    pub(super) flushed: u64,
    /// Newest batch done, whether or not all before it are.
    pub(super) newest_done: u64,
    /// Newest batch that holds more than a watermark.
    pub(super) newest_content: u64,
    /// Newest watermark in a header on the device.
    pub(super) watermark_written: u64,
}

impl Log {
    /// Closed until the first checkpoint has given it windows.
    pub(super) fn new(loaded: &super::Loaded) -> Self {
        Self {
            nonce: loaded.nonce,
            current: Window::new(loaded.window_id, Vec::new()),
            next: None,
            in_flight: [0; 2],
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

    /// What the log should say to be durable: that of empty batches would not be worth a write.
    pub(super) fn to_record(&self) -> u64 {
        self.durable_lsn.min(self.newest_content)
    }
}

/// A layer being dropped.
#[derive(Debug)]
pub(super) struct Dropping {
    pub(super) op: u32,
    pub(super) layer: LayerId,
    pub(super) rec: u32,
    pub(super) leaf: usize,
    pub(super) parts: u32,
    pub(super) fence_sent: bool,
}
