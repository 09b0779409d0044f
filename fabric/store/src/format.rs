//! The on-disk format, byte by byte, and why its writes are ordered as they are.
//!
//! Everything is little-endian, in *units* of 4 KiB. Within a shard a unit is named by a `u32` counted from
//! the start of the shard. Data and map pages are never overwritten in place; the only fixed places are the
//! label, the superblock slots and the two slots of each bitmap page.
//!
//! # Device
//! | units | content |
//! |---|---|
//! | 0 | [`Label`] |
//! | 256 .. 256 + shards × units per shard | the shards |
//! | last | copy of the [`Label`] |
//!
//! # Shard
//! | units | content |
//! |---|---|
//! | 0, 1 | [`Superblock`] slots A and B (checkpoint `n` goes to slot `n mod 2`) |
//! | 2 .. | bitmap pages, two slots each, then bitmap directory pages, two slots each |
//! | .. | data, map pages, log headers, wherever there is room |
//! | last two | second copies of slots A and B |
//!
//! # The map
//! ```text
//! Superblock ─ table root (≤ 512 pointers) ─ table directory (≤ 512) ─ table page (64 ChunkRecords)
//!      │                                                                      └ 4 leaves ─ data units
//!      └ ≤ 64 bitmap directories (≤ 512 pointers) ─ bitmap page (32768 bits)
//! ```
//! A [`Ptr`] carries the CRC32C of the unit it names, so whatever is read below the superblock is proved by
//! its parent. Both copies of a superblock carry their own CRC; one flipped bit cannot hide the newest
//! checkpoint, because the other copy has it.
//!
//! # The log
//! Between checkpoints the map changes in RAM and in the *log*: batches of one [`BatchHeader`] and the data
//! blocks it describes. The superblock names two *windows*, lists of 1 MiB regions: the current one, and the
//! one that takes over when the next checkpoint starts. A header lies at any free unit of its window's
//! regions; the data lie behind it, or wherever there was room (large writes do not use up the window). The
//! data's place in the log is their final home. A header is recognised by a nonce that is secret and new at
//! every open, the window's number and its own position, so that no guest can forge one inside its data and
//! no older header is taken for a new one. A batch for which the file system below a sparse device file had
//! no room is replaced, in its place, by one without entries.
//!
//! An entry may repeat what the map has, version and all, at another place: the cleaner has moved the block.
//! Of entries with the same version the later one holds, so replay needs to know nothing of it; and if a move
//! is cut short, the place before it still holds the block, for like all that is freed it is not used again
//! before the next checkpoint.
//!
//! # Why this order
//! 1. *A write is acknowledged when all device writes of its batch are done*, in whatever order they reached
//!    the device: then a header is found by scanning the regions, and everything it names is there. After
//!    power loss a header may be there without its data; so recovery reads the data of each batch above the
//!    durable watermark and takes only blocks whose CRC fits. Batches need not be dense above the watermark:
//!    each block stands for itself.
//! 2. *The watermark*: every header says up to which batch all were known to be durable. A missing or damaged
//!    header at or below the highest watermark is damage, not a torn tail, and opening fails. A flush is
//!    answered only when a header, if need be of an empty batch, has brought its watermark to the device.
//! 3. *A write changes the map (in RAM) only once its batch is done*, so a map page written by a checkpoint
//!    refers only to blocks whose batches were done before, and the flush that precedes the superblock makes
//!    them durable.
//! 4. *A checkpoint is fuzzy.* It starts by turning to the next window and waiting for the old window's
//!    batches. Then it writes leaves, table pages, directories and at last the bitmap, while writes go on. A
//!    page may be newer than the start of the checkpoint, never older; replaying the new window over it is
//!    idempotent, because every entry carries its version, and a bitmap page is taken after every leaf:
//!    replay sets what the log uses and clears what it replaces.
//! 5. *Flush, superblock, flush.* Pages are durable before the superblock names them; only after the second
//!    flush is anything reused that was freed before the checkpoint began. What is freed during it waits for
//!    the next one, since pages already written may still name it.
//! 6. *The bitmap is a shortcut*: what it says can be read off the tables and leaves. A bitmap page or
//!    directory that is damaged is therefore no reason to refuse: recovery reads all leaves and makes the
//!    bitmap anew (`recovery/space.rs`).
//! 7. *Recovery flushes before it writes*: what it saw in the log stays there until its own checkpoint is
//!    durable, so that a crash during recovery recovers to the same state.
//!
//! # A leaf that cannot be read
//! Nothing else says what it mapped. Who reads those blocks hears that they are bad; the page stays where it
//! is, for the device may give it once more. The first change to one of them needs a leaf to go to: one whose
//! entries are all [`MapEntry::UNKNOWN`] takes its place. The next checkpoint reads the page once more, and
//! takes from it what nobody has changed; if it still cannot, it writes the leaf. From then on nothing names
//! the units that the damaged one named. The bitmap still has them in use, so nobody gets them, and
//! [`Superblock::leaks`] says that there are such: the next opening makes the bitmap anew from what can be
//! reached.
//!
//! # Counts
//! A record says of each of its map pages how many blocks it maps to data, so that what a layer stores is
//! known without reading map pages ([`ChunkRecord::stored`]). Pointer and count are set together, by the
//! checkpoint that writes the page, and lie in the same record: whichever checkpoint a crash leaves, they fit
//! each other. A count that is 0 was never taken, for the page was written by a program that does not know of
//! counts. Such a program carries old counts along with new pointers; it also writes
//! [`Superblock::counted`] as 0, and an opening that finds this believes none of them.

mod record;

use std::mem::size_of;

use fabric_types::checksum::crc32c;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::device::BLOCK_BYTES;
pub use record::{ChunkRecord, record_kind, stored_blocks};

#[cfg(not(target_endian = "little"))]
compile_error!("the on-disk structures are read in place and little-endian");

/// Bytes of a unit.
pub const UNIT_BYTES: usize = BLOCK_BYTES;
/// Version of everything described here; a newer one is refused at open. 2 has lost blocks.
pub const FORMAT_VERSION: u32 = 2;
/// The oldest version that can be opened. Labels and superblocks are written as [`FORMAT_VERSION`] from then
/// on, so that a program that does not know of it leaves the device alone.
pub const FORMAT_VERSION_MIN: u32 = 1;
/// Units of a region, the granularity of log windows.
pub const REGION_UNITS: u32 = 256;
/// First unit of the first shard.
pub const SHARDS_START_UNIT: u64 = 256;
/// Blocks that one leaf maps.
pub const LEAF_BLOCKS: usize = fabric_types::block::LEAF_BLOCKS as usize;
/// Leaves of a chunk.
pub const CHUNK_LEAVES: usize = 4;
/// Blocks of a chunk.
pub const CHUNK_BLOCKS: u32 = (LEAF_BLOCKS * CHUNK_LEAVES) as u32;
/// Chunk records in a table page.
pub const PAGE_RECORDS: usize = UNIT_BYTES / size_of::<ChunkRecord>();
/// Pointers in a directory page.
pub const DIR_PTRS: usize = UNIT_BYTES / size_of::<Ptr>();
/// Bits in a bitmap page.
pub const BITMAP_PAGE_BITS: u32 = (UNIT_BYTES * 8) as u32;
/// Bitmap directories that the superblock has room for: 4 TiB, more than a shard may have.
pub const BITMAP_DIRS_MAX: usize = 64;
/// Regions that a window has room for in the superblock.
pub const WINDOW_REGIONS_MAX: usize = 256;
/// Units of a shard at most (1 TiB); larger devices get more shards.
pub const SHARD_UNITS_MAX: u32 = 1 << 28;
/// Units of a shard at least: room for fixed places, windows, the reserve and a little data.
pub const SHARD_UNITS_MIN: u32 = 512;
/// [`MapEntry::unit`] of a block that this layer does not map.
pub const UNIT_UNMAPPED: u32 = 0;
/// [`MapEntry::unit`] of a block that reads as zeroes whatever older layers hold. Unit 1 is a superblock
/// slot, never data.
pub const UNIT_ZERO: u32 = 1;
/// [`MapEntry::unit`] of a block whose data no replica could read when they were to be copied here: its
/// checksum and its version are known, and reading it fails. So it does of [`MapEntry::UNKNOWN`], of which
/// neither is: its version is 0. Unit 2 is a page of the bitmap, never data.
pub const UNIT_LOST: u32 = 2;

const LABEL_MAGIC: u64 = u64::from_le_bytes(*b"PENSTOCK");
const SUPERBLOCK_MAGIC: u64 = u64::from_le_bytes(*b"PENSTKSB");
const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"PENSTKLG");

/// One unit in memory, aligned for `O_DIRECT`.
#[repr(C, align(4096))]
#[derive(Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Page(pub [u8; UNIT_BYTES]);

impl Page {
    /// A page of zeroes.
    #[must_use]
    pub fn zeroed() -> Box<Self> {
        Box::new(Self([0; UNIT_BYTES]))
    }
}

/// Names a unit and proves its content.
#[repr(C)]
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub struct Ptr {
    /// Unit in the shard; 0 means nothing is there.
    pub unit: u32,
    /// CRC32C of the unit's 4096 bytes.
    pub crc: u32,
}

/// Where a block is, its checksum and its version.
#[repr(C)]
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub struct MapEntry {
    /// Unit in the shard, [`UNIT_UNMAPPED`], [`UNIT_ZERO`] or [`UNIT_LOST`].
    pub unit: u32,
    /// CRC32C of the block's 4096 bytes.
    pub crc: u32,
    /// Version of the last write or discard; a write with an older one is refused. Of a block that is not
    /// mapped it may be the record's floor.
    pub version: u64,
}

impl MapEntry {
    /// Of a block whose map page could not be read: whatever it held, and of which version, is not known.
    pub const UNKNOWN: Self = Self {
        unit: UNIT_LOST,
        crc: 0,
        version: 0,
    };

    /// The same of a block that was made so, because no replica knows it: what its map page said is not
    /// wanted any more, even if that page can be read after all.
    pub const UNKNOWN_FOR_GOOD: Self = Self {
        crc: 1,
        ..Self::UNKNOWN
    };

    /// Whether it is not known what the block holds, for whichever of the two reasons.
    #[must_use]
    pub const fn is_unknown(&self) -> bool {
        self.unit == UNIT_LOST && self.version == 0
    }
}

/// Whether a [`MapEntry::unit`] is a place with data.
#[must_use]
pub const fn is_place(unit: u32) -> bool {
    unit > UNIT_LOST
}

/// First and last unit of the device: offset 0 magic, 8 format version, 12 shards, 16 units per shard, 20
/// zero, 24 capacity in bytes, 32 cluster, 48 device, 4092 CRC32C of the bytes before it.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Label {
    /// `PENSTOCK`.
    pub magic: u64,
    /// [`FORMAT_VERSION`].
    pub version: u32,
    /// Shards on the device.
    pub shards: u32,
    /// Units of each shard.
    pub shard_units: u32,
    /// Zero.
    pub reserved: u32,
    /// Capacity when formatted.
    pub capacity_bytes: u64,
    /// Cluster that owns the device.
    pub cluster: [u8; 16],
    /// Identity of the device.
    pub device: [u8; 16],
}

/// Regions in which log headers are to be found.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct WindowRecord {
    /// Number of the window, never used twice in a shard.
    pub id: u64,
    /// Valid elements of `regions`.
    pub count: u64,
    /// Region numbers (unit / 256).
    pub regions: [u32; WINDOW_REGIONS_MAX],
}

/// Root of a checkpoint: offset 0 magic, 8 format version, 12 shard number, 16 checkpoint number, 24 clean
/// flag, 28 units, 32 nonce, 48 first batch of the log, 56 durable watermark, 64 table root, 72 table pages,
/// 80 current window, 1120 next window, 2160 bitmap directories, 2672 leaks, 2680 counted, 4092 CRC32C.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Superblock {
    /// `PENSTKSB`.
    pub magic: u64,
    /// [`FORMAT_VERSION`].
    pub version: u32,
    /// Which shard: a superblock of another shard is no superblock.
    pub shard: u32,
    /// Number of the checkpoint.
    pub checkpoint: u64,
    /// 1: closed, the log is empty.
    pub clean: u32,
    /// Units of the shard.
    pub units: u32,
    /// Secret of the log headers.
    pub nonce: [u8; 16],
    /// Sequence number of the first batch that the map does not contain.
    pub log_start: u64,
    /// All batches up to this one were durable before this superblock was written.
    pub watermark: u64,
    /// Table root page.
    pub table_root: Ptr,
    /// Table pages in all.
    pub table_pages: u64,
    /// Current and next window.
    pub windows: [WindowRecord; 2],
    /// Bitmap directory pages.
    pub bitmap_dirs: [Ptr; BITMAP_DIRS_MAX],
    /// 1: the bitmap has units in use that no page names. A program that does not know of this writes 0; then
    /// they stay in use until the bitmap is made anew for another reason.
    pub leaks: u64,
    /// 1: the counts in chunk records fit the map pages. A program that does not know of counts writes 0.
    pub counted: u64,
}

/// Start of a log header unit: offset 0 magic, 8 nonce, 24 window, 32 sequence number, 40 watermark, 48
/// checkpoint, 56 own unit, 60 bytes of entries, 64 entries, 4092 CRC32C of the bytes before it.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct BatchHeader {
    /// `PENSTKLG`.
    pub magic: u64,
    /// The superblock's nonce.
    pub nonce: [u8; 16],
    /// The window's number.
    pub window: u64,
    /// Sequence number of the batch (LSN), dense from the first batch of the shard.
    pub lsn: u64,
    /// All batches up to this one were durable when this header was made.
    pub watermark: u64,
    /// Newest durable checkpoint when this header was made.
    pub checkpoint: u64,
    /// Own position.
    pub unit: u32,
    /// Bytes of entries that follow.
    pub entry_bytes: u32,
}

/// What a [`BatchEntry`] does.
pub mod entry_kind {
    /// `count` blocks lie in consecutive units from `unit`; `count` CRCs follow, padded to 8 bytes.
    pub const DATA: u32 = 1;
    /// The blocks become unmapped.
    pub const UNMAP: u32 = 2;
    /// The blocks read as zeroes and hide older layers.
    pub const ZERO: u32 = 3;
    /// The blocks become unmapped whatever their version: their layer is dropped, or another replica has an
    /// older state.
    pub const DROP: u32 = 4;
    /// `version` is the fence's generation, 8 bytes with the epoch follow.
    pub const FENCE: u32 = 5;
    /// The layer's fence is forgotten.
    pub const FENCE_DROP: u32 = 6;
    /// The block's data are lost; `unit` is the CRC32C that they had.
    pub const LOST: u32 = 7;
}

/// One entry of a batch: offset 0 layer, 8 version, 16 chunk, 20 unit, 24 first block in the chunk, 26
/// blocks, 28 kind.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct BatchEntry {
    /// Layer.
    pub layer: u64,
    /// Version of the write.
    pub version: u64,
    /// Chunk index.
    pub chunk: u32,
    /// First unit of data; the checksum of a lost block.
    pub unit: u32,
    /// First block in the chunk.
    pub block: u16,
    /// Number of blocks.
    pub count: u16,
    /// See [`entry_kind`].
    pub kind: u32,
}

/// Offset of the CRC in sealed units.
pub const SEAL_OFFSET: usize = UNIT_BYTES - 4;
/// Where entries begin in a log header unit.
pub const ENTRIES_OFFSET: usize = size_of::<BatchHeader>();
/// Bytes of entries that fit a header.
pub const ENTRIES_BYTES_MAX: usize = SEAL_OFFSET - ENTRIES_OFFSET - 4;

const _: () = assert!(size_of::<Page>() == UNIT_BYTES);
const _: () = assert!(size_of::<Ptr>() == 8);
const _: () =
    assert!(size_of::<MapEntry>() == 16 && size_of::<MapEntry>() * LEAF_BLOCKS == UNIT_BYTES);
const _: () = assert!(size_of::<ChunkRecord>() == 64 && PAGE_RECORDS == 64);
const _: () = assert!(size_of::<Label>() == 64);
const _: () = assert!(size_of::<WindowRecord>() == 1040);
const _: () = assert!(size_of::<Superblock>() == 2688 && size_of::<Superblock>() < SEAL_OFFSET);
const _: () = assert!(size_of::<BatchHeader>() == 64);
const _: () = assert!(size_of::<BatchEntry>() == 32 && ENTRIES_BYTES_MAX % 8 == 0);
const _: () = assert!(SHARD_UNITS_MAX as u64 * UNIT_BYTES as u64 == 1 << 40);

/// Writes the CRC of a page into its last four bytes.
pub fn seal(page: &mut [u8]) {
    let crc = crc32c(&page[..SEAL_OFFSET]);
    page[SEAL_OFFSET..UNIT_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// Whether the page's last four bytes are its CRC.
#[must_use]
pub fn is_sealed(page: &[u8]) -> bool {
    crc32c(&page[..SEAL_OFFSET]).to_le_bytes() == page[SEAL_OFFSET..UNIT_BYTES]
}

impl Label {
    /// A label with magic and version filled in.
    #[must_use]
    pub fn new(
        shards: u32,
        shard_units: u32,
        capacity_bytes: u64,
        cluster: [u8; 16],
        device: [u8; 16],
    ) -> Self {
        let (magic, version) = (LABEL_MAGIC, FORMAT_VERSION);
        Self {
            magic,
            version,
            shards,
            shard_units,
            reserved: 0,
            capacity_bytes,
            cluster,
            device,
        }
    }

    /// Whether a unit claims to be a label, valid or not.
    #[must_use]
    pub fn has_magic(page: &[u8]) -> bool {
        page[..8] == LABEL_MAGIC.to_le_bytes()
    }

    /// Reads a label; `None` when the unit is none or damaged.
    #[must_use]
    pub fn read(page: &[u8]) -> Option<Self> {
        (Self::has_magic(page) && is_sealed(page))
            .then(|| Self::read_from_prefix(page).ok().map(|(l, _)| l))
            .flatten()
    }
}

/// Whether what is described here can read devices of this version.
#[must_use]
pub const fn is_known_version(version: u32) -> bool {
    FORMAT_VERSION_MIN <= version && version <= FORMAT_VERSION
}

impl Superblock {
    /// An empty superblock.
    #[must_use]
    pub fn new(shard: u32, units: u32, nonce: [u8; 16]) -> Self {
        let window = WindowRecord {
            id: 0,
            count: 0,
            regions: [0; WINDOW_REGIONS_MAX],
        };
        Self {
            magic: SUPERBLOCK_MAGIC,
            version: FORMAT_VERSION,
            shard,
            checkpoint: 0,
            clean: 0,
            units,
            nonce,
            log_start: 1,
            watermark: 0,
            table_root: Ptr::default(),
            table_pages: 0,
            windows: [window; 2],
            bitmap_dirs: [Ptr::default(); BITMAP_DIRS_MAX],
            leaks: 0,
            counted: 0,
        }
    }

    /// Reads the superblock of `shard`; `None` when the unit holds none or a damaged one.
    #[must_use]
    pub fn read(page: &[u8], shard: u32, units: u32) -> Option<Self> {
        let (sb, _) = Self::read_from_prefix(page).ok()?;
        let ours = sb.magic == SUPERBLOCK_MAGIC && is_known_version(sb.version);
        let fits = sb.shard == shard && sb.units == units;
        let sane = sb
            .windows
            .iter()
            .all(|w| w.count as usize <= WINDOW_REGIONS_MAX);
        (ours && fits && sane && is_sealed(page)).then_some(sb)
    }
}

impl BatchHeader {
    /// A header with its magic.
    #[must_use]
    pub fn new(
        nonce: [u8; 16],
        window: u64,
        lsn: u64,
        watermark: u64,
        checkpoint: u64,
        unit: u32,
    ) -> Self {
        Self {
            magic: HEADER_MAGIC,
            nonce,
            window,
            lsn,
            watermark,
            checkpoint,
            unit,
            entry_bytes: 0,
        }
    }

    /// Reads the header at `unit`; `None` when the unit holds none of this nonce and place, or a damaged one.
    #[must_use]
    pub fn read(page: &[u8], nonce: &[u8; 16], unit: u32) -> Option<Self> {
        let (header, _) = Self::read_from_prefix(page).ok()?;
        let ours = header.magic == HEADER_MAGIC && header.nonce == *nonce && header.unit == unit;
        let sane = header.entry_bytes as usize <= ENTRIES_BYTES_MAX;
        (ours && sane && is_sealed(page)).then_some(header)
    }
}

/// Fixed places of a shard.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// Number of the shard.
    pub shard: u32,
    /// Units of the shard.
    pub units: u32,
    /// Device unit where the shard begins.
    pub base: u64,
}

impl Geometry {
    /// Bitmap pages.
    #[must_use]
    pub fn bitmap_pages(&self) -> u32 {
        self.units.div_ceil(BITMAP_PAGE_BITS)
    }

    /// Bitmap directory pages.
    #[must_use]
    pub fn bitmap_dirs(&self) -> u32 {
        self.bitmap_pages().div_ceil(DIR_PTRS as u32)
    }

    /// Unit of slot 0 or 1 of a bitmap page.
    #[must_use]
    pub fn bitmap_slot(&self, page: u32, slot: u32) -> u32 {
        2 + page * 2 + slot
    }

    /// Unit of slot 0 or 1 of a bitmap directory page.
    #[must_use]
    pub fn bitmap_dir_slot(&self, dir: u32, slot: u32) -> u32 {
        2 + (self.bitmap_pages() + dir) * 2 + slot
    }

    /// First unit that may hold data.
    #[must_use]
    pub fn first_free(&self) -> u32 {
        self.bitmap_dir_slot(self.bitmap_dirs(), 0)
    }

    /// One past the last unit that may hold data.
    #[must_use]
    pub fn end_free(&self) -> u32 {
        self.units - 2
    }

    /// The two copies of a superblock slot.
    #[must_use]
    pub fn superblock_units(&self, checkpoint: u64) -> [u32; 2] {
        let slot = (checkpoint & 1) as u32;
        [slot, self.units - 2 + slot]
    }

    /// Byte offset of a unit on the device.
    #[must_use]
    pub fn offset(&self, unit: u32) -> u64 {
        (self.base + u64::from(unit)) * UNIT_BYTES as u64
    }
}
