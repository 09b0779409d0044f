//! A part of an operation: what lies in one leaf.

use super::super::api::{BlockStamp, StoreError, Version};
use super::super::format::{UNIT_BYTES, UNIT_UNMAPPED, UNIT_ZERO};
use super::super::table::NONE;

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

    /// Whether it reads units that a checkpoint may free.
    pub(super) fn is_reader(&self) -> bool {
        self.tag.is_some()
    }

    /// The error of a write that was overtaken by newer ones, if this one was.
    pub(super) fn stale_error(&self) -> Option<StoreError> {
        let newest = Version(self.stale);
        (self.stale > self.version).then_some(match self.renumber {
            true => StoreError::Renumber { newest },
            false => StoreError::Stale { newest },
        })
    }
}
