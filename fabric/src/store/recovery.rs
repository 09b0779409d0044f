//! Formatting a device, and opening it after whatever happened to it.

use std::collections::HashSet;

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::alloc::Allocator;
use super::api::{CoreParams, DeviceLabel, RecoveryReport, StoreCore};
use super::arena::AlignedBuf;
use super::bitmap::Bitmap;
use super::core::{Loaded, Replay, ShardCore, records_max};
use super::device::SyncDevice;
use super::error::{OpenError, hex};
use super::format::{
    BITMAP_DIRS_MAX, BatchHeader, ChunkRecord, DIR_PTRS, FORMAT_VERSION, Geometry, LEAF_BLOCKS,
    Label, PAGE_RECORDS, Page, Ptr, REGION_UNITS, SHARD_UNITS_MAX, SHARD_UNITS_MIN,
    SHARDS_START_UNIT, Superblock, UNIT_BYTES, entry_kind, seal,
};
use super::log::{ReadEntry, read_entries};
use super::table::Table;

/// A shard for each of so many bytes, up to [`SHARDS_TYPICAL_MAX`]: more would only scatter the log.
const SHARD_BYTES: u64 = 16 << 30;
/// See [`SHARD_BYTES`]; larger devices get more shards only because a shard has a largest size.
const SHARDS_TYPICAL_MAX: u64 = 8;
/// Smallest device.
pub const DEVICE_BYTES_MIN: u64 =
    (SHARDS_START_UNIT + SHARD_UNITS_MIN as u64 + 1) * UNIT_BYTES as u64;

fn io_error(what: &'static str, offset: u64) -> impl FnOnce(std::io::Error) -> OpenError {
    move |source| OpenError::Io {
        what,
        offset,
        source,
    }
}

fn shard_geometry(label: &Label, shard: u32) -> Geometry {
    let base = SHARDS_START_UNIT + u64::from(shard) * u64::from(label.shard_units);
    Geometry {
        shard,
        units: label.shard_units,
        base,
    }
}

fn label_offsets(capacity_bytes: u64) -> [u64; 2] {
    [
        0,
        (capacity_bytes / UNIT_BYTES as u64 - 1) * UNIT_BYTES as u64,
    ]
}

/// Makes an empty store on the device. A device that holds one already is refused unless `overwrite`.
pub fn format(
    dev: &mut dyn SyncDevice,
    identity: DeviceLabel,
    overwrite: bool,
) -> Result<(), OpenError> {
    let capacity = dev.capacity_bytes();
    if capacity < DEVICE_BYTES_MIN {
        return Err(OpenError::TooSmall {
            bytes: capacity,
            least: DEVICE_BYTES_MIN,
        });
    }
    let mut page = Page::zeroed();
    for offset in label_offsets(capacity) {
        dev.read_at(offset, &mut page.0)
            .map_err(io_error("read the label", offset))?;
        if let (false, Some(label)) = (overwrite, Label::read(&page.0)) {
            return Err(OpenError::AlreadyFormatted {
                cluster: hex(&label.cluster),
            });
        }
    }
    let typical = (capacity / SHARD_BYTES).clamp(1, SHARDS_TYPICAL_MAX);
    let shards = typical.max(capacity.div_ceil(u64::from(SHARD_UNITS_MAX) * UNIT_BYTES as u64));
    let units = capacity / UNIT_BYTES as u64 - SHARDS_START_UNIT - 1;
    let region = u64::from(REGION_UNITS);
    let shard_units = (units / shards / region * region).min(u64::from(SHARD_UNITS_MAX)) as u32;
    let label = Label::new(
        shards as u32,
        shard_units,
        capacity,
        identity.cluster,
        identity.device,
    );

    // Labels go first and come last: in between the device is no store, whatever is left of an earlier one.
    page.0.fill(0);
    write_everywhere(dev, &label_offsets(capacity), &page)?;
    for shard in 0..label.shards {
        let geo = shard_geometry(&label, shard);
        let slots = [geo.superblock_units(0), geo.superblock_units(1)].concat();
        let offsets: Vec<u64> = slots.iter().map(|&unit| geo.offset(unit)).collect();
        write_everywhere(dev, &offsets, &page)?;
        let loaded = Loaded {
            geo,
            alloc: Allocator::new(&geo),
            table: Table::new(records_max(geo.units)),
            bitmap_ptrs: vec![Ptr::default(); geo.bitmap_pages() as usize],
            bitmap_dir_ptrs: [Ptr::default(); BITMAP_DIRS_MAX],
            table_root: Ptr::default(),
            checkpoint: 0,
            window_id: 1,
            next_lsn: 1,
            nonce: [0; 16],
            shards: label.shards,
            leaves_needed: 0,
        };
        let small = CoreParams {
            leaf_cache_bytes: 0,
            buffer_bytes: 0,
            ops_max: 1,
            ..CoreParams::default()
        };
        ShardCore::new(loaded, &small).run_checkpoint(dev, true)?;
    }
    page.0[..size_of::<Label>()].copy_from_slice(label.as_bytes());
    seal(&mut page.0);
    write_everywhere(dev, &label_offsets(capacity), &page)
}

fn write_everywhere(
    dev: &mut dyn SyncDevice,
    offsets: &[u64],
    page: &Page,
) -> Result<(), OpenError> {
    for &offset in offsets {
        dev.write_at(offset, &page.0)
            .map_err(io_error("write", offset))?;
    }
    dev.flush().map_err(io_error("flush", 0))
}

/// Reads the label of a device.
pub fn read_label(dev: &mut dyn SyncDevice) -> Result<Label, OpenError> {
    let capacity = dev.capacity_bytes();
    if capacity < DEVICE_BYTES_MIN {
        return Err(OpenError::TooSmall {
            bytes: capacity,
            least: DEVICE_BYTES_MIN,
        });
    }
    let mut page = Page::zeroed();
    let mut traces = false;
    for offset in label_offsets(capacity) {
        dev.read_at(offset, &mut page.0)
            .map_err(io_error("read the label", offset))?;
        traces |= Label::has_magic(&page.0);
        let Some(label) = Label::read(&page.0) else {
            continue;
        };
        if label.version != FORMAT_VERSION {
            return Err(OpenError::Version {
                found: label.version,
                known: FORMAT_VERSION,
            });
        }
        if label.capacity_bytes > capacity {
            return Err(OpenError::Shrunk {
                found: capacity,
                formatted: label.capacity_bytes,
            });
        }
        return Ok(label);
    }
    Err(if traces {
        OpenError::LabelDamaged {
            last: label_offsets(capacity)[1],
        }
    } else {
        OpenError::NotFormatted
    })
}

/// Opens a formatted device: reads the last checkpoint, replays the log, and writes a checkpoint of the outcome.
///
/// `nonce` is secret and random, and new for every open: it marks the log headers of this run.
pub fn open(
    dev: &mut dyn SyncDevice,
    params: &CoreParams,
    nonce: [u8; 16],
) -> Result<(Vec<ShardCore>, RecoveryReport), OpenError> {
    let label = read_label(dev)?;
    if let Some(expected) = params.cluster.filter(|c| *c != label.cluster) {
        return Err(OpenError::OtherCluster {
            found: hex(&label.cluster),
            expected: hex(&expected),
        });
    }
    let mut report = RecoveryReport {
        shards: label.shards,
        ..RecoveryReport::default()
    };
    let mut shards = Vec::new();
    for shard in 0..label.shards {
        let mut opening = Opening {
            dev: &mut *dev,
            geo: shard_geometry(&label, shard),
            report: &mut report,
        };
        shards.push(opening.run(params, nonce, label.shards)?);
    }
    Ok((shards, report))
}

/// A log batch found on the device.
struct Found {
    lsn: u64,
    unit: u32,
    entries: Vec<ReadEntry>,
}

/// What the windows hold.
#[derive(Default)]
struct Scan {
    batches: Vec<Found>,
    watermark: u64,
    checkpoint: u64,
    /// A unit that looks like a header and is damaged.
    suspect: Option<u32>,
}

struct Opening<'a> {
    dev: &'a mut dyn SyncDevice,
    geo: Geometry,
    report: &'a mut RecoveryReport,
}

impl Opening<'_> {
    fn run(
        &mut self,
        params: &CoreParams,
        nonce: [u8; 16],
        shards: u32,
    ) -> Result<ShardCore, OpenError> {
        let sb = self.superblock()?;
        let (table, bitmap_ptrs) = (self.table(&sb)?, self.bitmap_ptrs(&sb)?);
        let committed = self.bitmap(&bitmap_ptrs)?;
        let alloc = Allocator::from_committed(&self.geo, committed);
        let scan = if sb.clean == 1 {
            Scan::default()
        } else {
            self.scan(&sb)?
        };
        self.report.clean_shards += sb.clean;
        let mut leaves = HashSet::new();
        for read in scan.batches.iter().flat_map(|b| &b.entries) {
            leaves.insert((
                read.entry.layer,
                read.entry.chunk,
                usize::from(read.entry.block) / LEAF_BLOCKS,
            ));
        }
        let last = scan
            .batches
            .last()
            .map_or(sb.log_start - 1, |b| b.lsn)
            .max(sb.watermark);
        let loaded = Loaded {
            geo: self.geo,
            alloc,
            table,
            bitmap_ptrs,
            bitmap_dir_ptrs: sb.bitmap_dirs,
            table_root: sb.table_root,
            checkpoint: sb.checkpoint,
            window_id: sb.windows[1].id + 1,
            next_lsn: last + 1,
            nonce,
            shards,
            leaves_needed: leaves.len() as u32,
        };
        let mut core = ShardCore::new(loaded, params);
        self.replay(&mut core, &scan)?;
        // What was seen must stay until the checkpoint below is durable.
        self.dev.flush().map_err(io_error("flush", 0))?;
        core.run_checkpoint(self.dev, false)?;
        let space = core.space();
        self.report.chunks += core.metrics().chunks;
        self.report.used_bytes += space.used_bytes;
        self.report.total_bytes += space.total_bytes;
        Ok(core)
    }

    fn read(&mut self, unit: u32, buf: &mut [u8], what: &'static str) -> Result<(), OpenError> {
        let offset = self.geo.offset(unit);
        self.report.read_bytes += buf.len() as u64;
        self.dev
            .read_at(offset, buf)
            .map_err(io_error(what, offset))
    }

    fn superblock(&mut self) -> Result<Superblock, OpenError> {
        let mut page = Page::zeroed();
        let mut best: Option<Superblock> = None;
        for unit in [self.geo.superblock_units(0), self.geo.superblock_units(1)].concat() {
            self.read(unit, &mut page.0, "read a superblock")?;
            let read = Superblock::read(&page.0, self.geo.shard, self.geo.units);
            if let Some(sb) =
                read.filter(|sb| best.as_ref().is_none_or(|b| sb.checkpoint > b.checkpoint))
            {
                best = Some(sb);
            }
        }
        let offset = self.geo.offset(0);
        best.ok_or(OpenError::SuperblockDamaged {
            shard: self.geo.shard,
            offset,
        })
    }

    /// Reads and proves the unit that a pointer names.
    fn page(&mut self, ptr: Ptr, what: &'static str) -> Result<Box<Page>, OpenError> {
        let mut page = Page::zeroed();
        let damaged = OpenError::Damaged {
            what,
            shard: self.geo.shard,
            offset: self.geo.offset(ptr.unit),
        };
        if ptr.unit >= self.geo.units {
            return Err(damaged);
        }
        self.read(ptr.unit, &mut page.0, "read the map")?;
        if crc32c::crc32c(&page.0) == ptr.crc {
            Ok(page)
        } else {
            Err(damaged)
        }
    }

    /// Pointers in the page that `ptr` names; none when it names none.
    fn pointers(&mut self, ptr: Ptr, what: &'static str) -> Result<[Ptr; DIR_PTRS], OpenError> {
        let mut ptrs = [Ptr::default(); DIR_PTRS];
        if ptr.unit != 0 {
            ptrs.as_mut_bytes()
                .copy_from_slice(&self.page(ptr, what)?.0);
        }
        Ok(ptrs)
    }

    fn table(&mut self, sb: &Superblock) -> Result<Table, OpenError> {
        let mut table = Table::new(records_max(self.geo.units));
        let mut left = sb.table_pages as usize;
        for dir_ptr in self.pointers(sb.table_root, "table root")? {
            if left == 0 {
                break;
            }
            table.dir_ptrs.push(dir_ptr);
            for ptr in self
                .pointers(dir_ptr, "table directory")?
                .into_iter()
                .take(left)
            {
                left -= 1;
                let mut records = [ChunkRecord::new_zeroed(); PAGE_RECORDS];
                if ptr.unit != 0 {
                    records
                        .as_mut_bytes()
                        .copy_from_slice(&self.page(ptr, "table page")?.0);
                }
                if !table.load_page(ptr, &records) {
                    let offset = self.geo.offset(ptr.unit);
                    return Err(OpenError::Damaged {
                        what: "table page",
                        shard: self.geo.shard,
                        offset,
                    });
                }
            }
        }
        Ok(table)
    }

    fn bitmap_ptrs(&mut self, sb: &Superblock) -> Result<Vec<Ptr>, OpenError> {
        let pages = self.geo.bitmap_pages() as usize;
        let mut ptrs = Vec::with_capacity(pages);
        for dir in 0..self.geo.bitmap_dirs() as usize {
            let all = self.pointers(sb.bitmap_dirs[dir], "bitmap directory")?;
            ptrs.extend(all.into_iter().take(pages - ptrs.len()));
        }
        Ok(ptrs)
    }

    fn bitmap(&mut self, ptrs: &[Ptr]) -> Result<Bitmap, OpenError> {
        let mut bitmap = Bitmap::new(self.geo.units);
        for (i, ptr) in ptrs.iter().enumerate().filter(|(_, ptr)| ptr.unit != 0) {
            let page = self.page(*ptr, "bitmap page")?;
            bitmap.read_bytes(i * UNIT_BYTES / 8, &page.0);
        }
        Ok(bitmap)
    }

    /// Finds the batches in both windows and checks that none that was durable is missing.
    fn scan(&mut self, sb: &Superblock) -> Result<Scan, OpenError> {
        let mut scan = Scan {
            watermark: sb.watermark,
            ..Scan::default()
        };
        let mut regions: Vec<u32> = sb
            .windows
            .iter()
            .flat_map(|w| w.regions[..w.count as usize].iter().copied())
            .collect();
        regions.sort_unstable();
        regions.dedup();
        let mut buf = AlignedBuf::new(REGION_UNITS as usize);
        for &region in &regions {
            let first = region.saturating_mul(REGION_UNITS);
            if first + REGION_UNITS > self.geo.units {
                continue;
            }
            self.read(first, buf.blocks_mut(0, REGION_UNITS), "read the log")?;
            for i in 0..REGION_UNITS {
                scan.look_at(buf.blocks(i, 1), sb, first + i);
            }
        }
        scan.batches.sort_unstable_by_key(|b| b.lsn);
        let near = scan
            .suspect
            .or_else(|| regions.first().map(|r| r * REGION_UNITS))
            .unwrap_or(0);
        let offset = self.geo.offset(near);
        let damaged = |lsn| OpenError::LogDamaged {
            shard: self.geo.shard,
            lsn,
            offset,
        };
        let mut expected = sb.log_start;
        for batch in &scan.batches {
            if batch.lsn != expected && expected <= scan.watermark {
                return Err(damaged(expected));
            }
            expected = batch.lsn + 1;
        }
        if expected <= scan.watermark {
            return Err(damaged(expected));
        }
        if scan.checkpoint > sb.checkpoint {
            let offset = self.geo.offset(0);
            return Err(OpenError::SuperblockDamaged {
                shard: self.geo.shard,
                offset,
            });
        }
        Ok(scan)
    }

    fn replay(&mut self, core: &mut ShardCore, scan: &Scan) -> Result<(), OpenError> {
        let mut replay = Replay::default();
        for batch in &scan.batches {
            self.report.batches += 1;
            replay.touched.push(batch.unit);
            for read in &batch.entries {
                // Flushed data need no proof here: damage in it is for the reader to find, not to be undone.
                let good = self.proof(read, batch.lsn <= scan.watermark)?;
                core.replay(self.dev, read, &good, &mut replay)?;
            }
        }
        self.report.blocks += replay.blocks;
        core.settle(replay);
        Ok(())
    }

    /// Which data blocks of an entry are there.
    fn proof(&mut self, read: &ReadEntry, durable: bool) -> Result<Vec<bool>, OpenError> {
        let (first, count) = (read.entry.unit, u32::from(read.entry.count));
        if read.entry.kind != entry_kind::DATA {
            return Ok(Vec::new());
        }
        if first
            .checked_add(count)
            .is_none_or(|end| end > self.geo.end_free())
            || first < self.geo.first_free()
        {
            return Err(OpenError::Damaged {
                what: "log entry",
                shard: self.geo.shard,
                offset: self.geo.offset(0),
            });
        }
        if durable {
            return Ok(vec![true; count as usize]);
        }
        let mut buf = AlignedBuf::new(count as usize);
        self.read(first, buf.blocks_mut(0, count), "read logged data")?;
        let good: Vec<bool> = (0..count)
            .map(|i| crc32c::crc32c(buf.blocks(i, 1)) == read.crcs[i as usize])
            .collect();
        self.report.torn_blocks += good.iter().filter(|good| !**good).count() as u64;
        Ok(good)
    }
}

impl Scan {
    fn look_at(&mut self, page: &[u8], sb: &Superblock, unit: u32) {
        let Ok((raw, _)) = BatchHeader::read_from_prefix(page) else {
            return;
        };
        if raw.nonce != sb.nonce && raw.unit != unit {
            return;
        }
        let ours = |header: &BatchHeader| sb.windows.iter().any(|w| w.id == header.window);
        let Some(header) = BatchHeader::read(page, &sb.nonce, unit) else {
            if raw.nonce == sb.nonce {
                self.suspect = Some(unit);
            }
            return;
        };
        if !ours(&header) || header.lsn < sb.log_start {
            return;
        }
        self.watermark = self.watermark.max(header.watermark);
        self.checkpoint = self.checkpoint.max(header.checkpoint);
        match read_entries(page, &header) {
            Some(entries) => self.batches.push(Found {
                lsn: header.lsn,
                unit,
                entries,
            }),
            None => self.suspect = Some(unit),
        }
    }
}
