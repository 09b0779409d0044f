//! A part of an operation: what lies in one leaf.

use super::super::api::{BlockStamp, LayerId, StoreError, Version};
use super::super::arena::Arena;
use super::super::format::{
    LEAF_BLOCKS, MapEntry, UNIT_BYTES, UNIT_LOST, UNIT_UNMAPPED, UNIT_ZERO,
};
use super::super::table::NONE;
use super::damage::BlockKey;
use super::map::LEAF_BYTES;
use super::waiting::Waiting;

const BLOCK_BYTES: u32 = UNIT_BYTES as u32;

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

impl PartKind {
    /// Whether it changes the map of its blocks.
    pub(super) fn is_writer(self) -> bool {
        matches!(
            self,
            Self::Write | Self::Zero | Self::Drop | Self::Restore | Self::Move
        )
    }

    /// Whether it reads the content of all its blocks.
    pub(super) fn is_read(self) -> bool {
        matches!(self, Self::Read | Self::Scrub)
    }
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

/// Which blocks a part is about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) layer: LayerId,
    pub(super) chunk: u32,
    /// The chunk's record, [`NONE`] if it has none or the part waits for no write in flight.
    pub(super) rec: u32,
    pub(super) leaf: u8,
    /// Byte range within the chunk.
    pub(super) start: u32,
    pub(super) end: u32,
    /// Block range within the leaf.
    pub(super) first: u16,
    pub(super) count: u16,
}

impl Place {
    /// A byte range within one leaf.
    pub(super) fn new((layer, chunk, rec): (LayerId, u32, u32), (start, end): (u32, u32)) -> Self {
        let (first, last) = (start / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        Self {
            layer,
            chunk,
            rec,
            leaf: (start / LEAF_BYTES) as u8,
            start,
            end,
            first: (first % LEAF_BLOCKS as u32) as u16,
            count: (last - first) as u16,
        }
    }

    pub(super) fn range(&self) -> (u32, u32) {
        (self.start, self.end)
    }

    /// Number in the chunk of a block of the leaf.
    pub(super) fn in_chunk(&self, block: u16) -> u16 {
        u16::from(self.leaf) * LEAF_BLOCKS as u16 + block
    }

    /// The part's block `i`, by which others know it.
    pub(super) fn key(&self, i: u16) -> BlockKey {
        let block = self.in_chunk(self.first + i);
        (self.layer, self.chunk, u32::from(block))
    }

    /// Byte range of block `i` that the operation covers, in the chunk.
    pub(super) fn covered(&self, i: u32) -> (u32, u32) {
        let begin = (self.start / BLOCK_BYTES + i) * BLOCK_BYTES;
        (begin.max(self.start), (begin + BLOCK_BYTES).min(self.end))
    }

    /// Whether the operation touches only a part of block `i`.
    pub(super) fn is_partly_covered(&self, i: u32) -> bool {
        let (from, to) = self.covered(i);
        to - from < BLOCK_BYTES
    }

    /// Whether the operation touches only a part of some block.
    pub(super) fn is_unaligned(&self) -> bool {
        self.start % BLOCK_BYTES != 0 || self.end % BLOCK_BYTES != 0
    }

    /// The fully covered blocks, in the leaf.
    pub(super) fn whole_blocks(&self) -> (u16, u16) {
        let first = self.first + u16::from(self.start % BLOCK_BYTES != 0);
        let end = self.first + self.count - u16::from(self.end % BLOCK_BYTES != 0);
        (first, end.max(first))
    }

    /// Whether both have a block of a leaf of the same record.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        other.leaf == self.leaf
            && other.first < self.first + self.count
            && self.first < other.first + other.count
    }
}

/// A part's place in the list of its record, see [`Parts`](super::parts::Parts).
#[derive(Debug)]
pub(super) struct HazardLink {
    /// Order of arrival; decides who waits for whom.
    pub(super) seq: u64,
    pub(super) is_linked: bool,
    pub(super) next: u32,
    /// What the part goes on with when it has waited for an earlier write.
    pub(super) resume: PartState,
}

impl HazardLink {
    fn new(seq: u64) -> Self {
        Self {
            seq,
            is_linked: false,
            next: NONE,
            resume: PartState::WaitHazard,
        }
    }
}

/// Where a block of a part was found.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Found {
    /// Unit; `UNIT_UNMAPPED` while not resolved.
    pub(super) unit: u32,
    pub(super) crc: u32,
}

/// Looking the part's blocks up, layer by layer from the newest.
#[derive(Debug, Default)]
pub(super) struct Lookup {
    found: Vec<Found>,
    unresolved: u32,
    layer: usize,
}

impl Lookup {
    /// Nothing is looked up yet: every block of a read, and those that a write covers partly.
    pub(super) fn begin(&mut self, kind: PartKind, place: &Place) {
        let is_wanted = |i: u32| kind.is_read() || place.is_partly_covered(i);
        self.found.clear();
        self.found.extend((0..u32::from(place.count)).map(|i| {
            let unit = if is_wanted(i) {
                UNIT_UNMAPPED
            } else {
                UNIT_ZERO
            };
            Found { unit, crc: 0 }
        }));
        let missing = self.found.iter().filter(|f| f.unit == UNIT_UNMAPPED);
        self.unresolved = missing.count() as u32;
        self.layer = 0;
    }

    /// Blocks that were in no layer so far.
    pub(super) fn unresolved(&self) -> u32 {
        self.unresolved
    }

    /// The layer to look at, by its place in the chain.
    pub(super) fn layer(&self) -> usize {
        self.layer
    }

    pub(super) fn next_layer(&mut self) {
        self.layer += 1;
    }

    /// What the layer's leaf has of the blocks. What is there of the write `own` that was lost itself stays
    /// as it is, see `fill_blocks`: nothing has to be fetched. In an older layer such a version is another
    /// write's.
    pub(super) fn resolve(&mut self, entries: &[MapEntry], own: Option<u64>) {
        let own = own.filter(|_| self.layer == 0);
        for (found, entry) in self.found.iter_mut().zip(entries) {
            if found.unit == UNIT_UNMAPPED && entry.unit != UNIT_UNMAPPED {
                let is_lost = entry.unit == UNIT_LOST && !entry.is_unknown();
                let is_this = is_lost && own == Some(entry.version);
                *found = Found {
                    unit: if is_this { UNIT_ZERO } else { entry.unit },
                    crc: entry.crc,
                };
                self.unresolved -= 1;
            }
        }
    }

    /// What no layer has reads as zeroes.
    pub(super) fn zero_rest(&mut self) {
        if self.unresolved > 0 {
            let rest = self.found.iter_mut().filter(|f| f.unit == UNIT_UNMAPPED);
            rest.for_each(|f| f.unit = UNIT_ZERO);
        }
    }

    pub(super) fn found(&self, i: u16) -> Found {
        self.found[usize::from(i)]
    }

    /// Blocks from `at` on that lie side by side.
    pub(super) fn run_from(&self, at: u32) -> u32 {
        let rest = &self.found[at as usize..];
        let breaks = |&i: &usize| rest[i].unit != rest[0].unit + i as u32;
        (1..rest.len()).find(breaks).unwrap_or(rest.len()) as u32
    }
}

/// How far a part is in its present state.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What comes next, by a number of the state's own.
    pub(super) cursor: u32,
    /// Device requests in flight.
    pub(super) ios: u32,
    /// Blocks to be read once more.
    pub(super) retry: Vec<u16>,
}

/// The old content of partly covered blocks, the first and the last of a part.
#[derive(Debug, Default)]
pub(super) struct OldBlocks {
    /// Where it is: index in the part, buffer block.
    pub(super) buffers: [Option<(u16, u32)>; 2],
    /// Buffers promised for that.
    promised: u32,
}

impl OldBlocks {
    /// Sets buffers aside for what is to be fetched; `false` if the part has to wait for some.
    pub(super) fn promise(&mut self, buffers: u32, waiting: &mut Waiting) -> bool {
        if self.promised > 0 {
            return true;
        }
        let is_promised = waiting.promise_old(buffers);
        if is_promised {
            self.promised = buffers;
        }
        is_promised
    }

    /// The buffer with the old content of block `i`.
    pub(super) fn buffer_of(&self, i: u32) -> Option<u32> {
        let mut buffers = self.buffers.iter().flatten();
        let old = buffers.find(|(index, _)| u32::from(*index) == i);
        old.map(|(_, buffer)| *buffer)
    }

    pub(super) fn count(&self) -> u32 {
        self.buffers.iter().flatten().count() as u32
    }

    /// Gives back everything.
    pub(super) fn release(&mut self, arena: &mut Arena, waiting: &mut Waiting) {
        for (_, buffer) in self.buffers.iter_mut().filter_map(Option::take) {
            arena.give_back(buffer, 1);
        }
        waiting.return_old(std::mem::take(&mut self.promised));
    }
}

/// The log batches that a part is in.
#[derive(Debug, Default)]
pub(super) struct InLog {
    batches: u32,
    /// Nothing of it is left for another batch.
    is_whole: bool,
}

impl InLog {
    pub(super) fn join(&mut self) {
        self.batches += 1;
    }

    pub(super) fn leave(&mut self) {
        self.batches -= 1;
    }

    /// No further batch is needed.
    pub(super) fn complete(&mut self) {
        self.is_whole = true;
    }

    /// Whether all of it has been through.
    pub(super) fn is_done(&self) -> bool {
        self.is_whole && self.batches == 0
    }
}

/// How the part ends.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    error: Option<StoreError>,
    /// Newest version met that is newer than the part's.
    newest: u64,
    /// One of those was at a block that holds nothing.
    renumber: bool,
}

impl Outcome {
    /// Something went wrong; the first error counts.
    pub(super) fn fail(&mut self, error: StoreError) {
        self.error.get_or_insert(error);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// A version was met; [`error`](Self::error) compares it with the part's own. `renumber` if it does not
    /// mean that the part was overwritten.
    pub(super) fn note_version(&mut self, version: u64, renumber: bool) {
        self.newest = self.newest.max(version);
        self.renumber |= renumber;
    }

    /// The error of a part with this version, also if newer ones have overtaken it.
    pub(super) fn error(&self, version: u64) -> Option<StoreError> {
        let newest = Version(self.newest);
        let stale = (self.newest > version).then_some(match self.renumber {
            true => StoreError::Renumber { newest },
            false => StoreError::Stale { newest },
        });
        self.error.or(stale)
    }
}

/// The piece of an operation that lies in one leaf.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) op: u32,
    pub(super) kind: PartKind,
    pub(super) state: PartState,
    pub(super) place: Place,
    pub(super) version: u64,
    pub(super) hazard: HazardLink,
    /// Next of those that wait for the same leaf to be read.
    pub(super) wait_next: u32,
    pub(super) lookup: Lookup,
    pub(super) progress: Progress,
    pub(super) old: OldBlocks,
    /// Quarantine generation whose units it may read.
    pub(super) reader: Option<u8>,
    /// It keeps its leaf in the cache.
    pub(super) pinned: bool,
    pub(super) in_log: InLog,
    /// What a restored block is now, and shall be.
    pub(super) restore: [BlockStamp; 2],
    pub(super) outcome: Outcome,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            op: NONE,
            kind: PartKind::Read,
            state: PartState::WaitHazard,
            place: Place::new((LayerId(0), 0, NONE), (0, 0)),
            version: 0,
            hazard: HazardLink::new(0),
            wait_next: NONE,
            lookup: Lookup::default(),
            progress: Progress::default(),
            old: OldBlocks::default(),
            reader: None,
            pinned: false,
            in_log: InLog::default(),
            restore: [BlockStamp::default(); 2],
            outcome: Outcome::default(),
        }
    }
}

impl Part {
    /// Makes a new part of this one, which keeps nothing but its allocations.
    pub(super) fn renew(&mut self, op: u32, kind: PartKind, place: Place, version: u64, seq: u64) {
        let (mut found, mut retry) = (
            std::mem::take(&mut self.lookup.found),
            std::mem::take(&mut self.progress.retry),
        );
        found.clear();
        retry.clear();
        *self = Self {
            op,
            kind,
            place,
            version,
            hazard: HazardLink::new(seq),
            ..Self::default()
        };
        (self.lookup.found, self.progress.retry) = (found, retry);
        self.state = match kind {
            PartKind::Read | PartKind::Scrub => PartState::Resolve,
            // What is there of a block that it covers partly is needed.
            PartKind::Write | PartKind::Zero if place.is_unaligned() => PartState::Resolve,
            PartKind::Write
            | PartKind::Zero
            | PartKind::Drop
            | PartKind::Inspect
            | PartKind::Restore
            | PartKind::Move => PartState::Acquire,
            PartKind::LocateVictims => PartState::LocateVictims,
            PartKind::Fence | PartKind::FenceDrop => PartState::Logging,
        };
        if self.state == PartState::Resolve {
            self.begin_resolve();
        }
    }

    /// Nothing is looked up yet.
    pub(super) fn begin_resolve(&mut self) {
        self.lookup.begin(self.kind, &self.place);
    }

    /// Whether it waits for its leaf only to change what that says, whatever it is.
    pub(super) fn changes_leaf(&self) -> bool {
        let is_change = self.kind.is_writer() && self.kind != PartKind::Move;
        is_change && self.state == PartState::Acquire
    }

    /// Whether it reads units that a checkpoint may free.
    pub(super) fn is_reader(&self) -> bool {
        self.reader.is_some()
    }
}
