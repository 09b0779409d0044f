//! Formatting a device, and opening it after whatever happened to it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use zerocopy::{FromZeros, IntoBytes};

use super::alloc::Allocator;
use super::api::{CoreParams, DeviceLabel, RecoveryReport, StoreCore};
use super::device::SyncDevice;
use super::error::{OpenError, hex};
use super::format::{
    BITMAP_DIRS_MAX, ChunkRecord, DIR_PTRS, FORMAT_VERSION, Geometry, Label, PAGE_RECORDS, Page,
    Ptr, REGION_UNITS, SHARD_UNITS_MAX, SHARD_UNITS_MIN, SHARDS_START_UNIT, Superblock, UNIT_BYTES,
    is_known_version, seal,
};
use super::shard::{Loaded, REFUSED_LEAVES_MAX, ShardCore, records_max};
use super::table::Table;
use log::{LeafKey, Scan};
use pages::UnreadLeaf;

mod log;
mod pages;
mod space;

/// Shards opened at once. Each thread holds a few MiB for what it reads.
const OPEN_THREADS_MAX: u32 = 8;
/// Shards by size of the device: one for each of so many bytes, up to a number. They let threads work side by
/// side, and more would only scatter the log. Chunks are spread over shards by hash, and the first shard that
/// is full says `NoSpace`: with a thousand chunks in each, as here, that is 3 % early on average; smaller
/// shards would waste more. Devices too large for this get more shards only because a shard has a largest
/// size.
const SHARDS_TYPICAL: [(u64, u64); 2] = [(4 << 30, 4), (16 << 30, 8)];
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
    if !overwrite {
        refuse_formatted(dev)?;
    }
    let counts = SHARDS_TYPICAL.map(|(bytes, most)| (capacity / bytes).min(most));
    let typical = counts.into_iter().max().unwrap_or(1).max(1);
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
    let page = Page::zeroed();
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
            leaks: false,
            counted: true,
        };
        let small = CoreParams {
            leaf_cache_bytes: 0,
            buffer_bytes: 0,
            ops_max: 1,
            ..CoreParams::default()
        };
        ShardCore::new(loaded, &small).run_checkpoint(dev, true)?;
    }
    write_everywhere(dev, &label_offsets(capacity), &sealed(&label))
}

/// The labels say what is written from now on: superblocks, of which a program that does not know of this
/// version would take an older one for the newest.
fn upgrade(dev: &mut dyn SyncDevice, label: Label) -> Result<(), OpenError> {
    let label = Label {
        version: FORMAT_VERSION,
        ..label
    };
    let offsets = label_offsets(dev.capacity_bytes());
    write_everywhere(dev, &offsets, &sealed(&label))
}

fn sealed(label: &Label) -> Box<Page> {
    let mut page = Page::zeroed();
    page.0[..size_of::<Label>()].copy_from_slice(label.as_bytes());
    seal(&mut page.0);
    page
}

/// Writes copies of the label again that cannot be read, or are none; returns how many. The store works with
/// one copy, so that a failure is no reason not to open it. A copy that is a label is left alone, whatever it
/// says: nobody but a person can know how it came there.
fn mend_labels(dev: &mut dyn SyncDevice, label: Label) -> u32 {
    let mut mended = 0;
    for offset in label_offsets(dev.capacity_bytes()) {
        let mut page = Page::zeroed();
        let read = dev.read_at(offset, &mut page.0);
        if read.is_ok() && Label::read(&page.0).is_some() {
            continue;
        }
        match write_everywhere(dev, &[offset], &sealed(&label)) {
            Ok(()) => {
                tracing::warn!(
                    offset,
                    "a damaged copy of the device's label was written again"
                );
                mended += 1;
            }
            Err(error) => tracing::error!(
                offset, %error,
                "a copy of the device's label is damaged and cannot be written; replace the device"
            ),
        }
    }
    mended
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

/// A copy of the label that cannot be read may be that of a store: only the other one's can say so.
fn refuse_formatted(dev: &mut dyn SyncDevice) -> Result<(), OpenError> {
    let mut page = Page::zeroed();
    let mut unreadable = Ok(());
    for offset in label_offsets(dev.capacity_bytes()) {
        if let Err(error) = dev.read_at(offset, &mut page.0) {
            unreadable = Err(io_error("read the label", offset)(error));
        } else if let Some(label) = Label::read(&page.0) {
            return Err(OpenError::AlreadyFormatted {
                cluster: hex(&label.cluster),
            });
        }
    }
    unreadable
}

/// Reads the label of a device, from its second copy if the first is damaged or cannot be read.
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
    let mut unreadable = Ok(());
    for offset in label_offsets(capacity) {
        if let Err(error) = dev.read_at(offset, &mut page.0) {
            unreadable = Err(io_error("read the label", offset)(error));
            continue;
        }
        traces |= Label::has_magic(&page.0);
        let Some(label) = Label::read(&page.0) else {
            continue;
        };
        if !is_known_version(label.version) {
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
    // What cannot be read is not blank.
    unreadable?;
    Err(if traces {
        OpenError::LabelDamaged {
            last: label_offsets(capacity)[1],
        }
    } else {
        OpenError::NotFormatted
    })
}

/// Opens a formatted device: reads the last checkpoint, replays the log, and writes a checkpoint of the
/// outcome.
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
    let mended_labels = match label.version < FORMAT_VERSION {
        true => upgrade(dev, label).map(|()| 0)?,
        false => mend_labels(dev, label),
    };
    let opened = open_shards(dev, &label, &|dev, shard| {
        let mut opening = Opening {
            dev,
            geo: shard_geometry(&label, shard),
            report: RecoveryReport::default(),
        };
        let core = opening.run(params, nonce, label.shards)?;
        Ok((core, opening.report))
    })?;
    let mut report = RecoveryReport {
        shards: label.shards,
        mended_labels,
        ..RecoveryReport::default()
    };
    let cores = opened.into_iter().map(|(core, part)| {
        report.add(&part);
        core
    });
    Ok((cores.collect(), report))
}

type Opened = Result<(ShardCore, RecoveryReport), OpenError>;
type OpenShard<'a> = &'a (dyn Fn(&mut dyn SyncDevice, u32) -> Opened + Sync);

/// Opens the shards, several at a time if the device gives handles for that.
fn open_shards(
    dev: &mut dyn SyncDevice,
    label: &Label,
    open: OpenShard<'_>,
) -> Result<Vec<(ShardCore, RecoveryReport)>, OpenError> {
    let threads = label.shards.min(OPEN_THREADS_MAX);
    let handles: Vec<_> = (0..threads).map_while(|_| dev.handle()).collect();
    if handles.is_empty() {
        return (0..label.shards).map(|shard| open(dev, shard)).collect();
    }
    let next = &AtomicU32::new(0);
    let mut opened: Vec<(u32, Opened)> = Vec::new();
    std::thread::scope(|scope| {
        let work = |mut handle: Box<dyn SyncDevice + Send>| {
            let mut done = Vec::new();
            loop {
                let shard = next.fetch_add(1, Ordering::Relaxed);
                if shard >= label.shards {
                    return done;
                }
                done.push((shard, open(handle.as_mut(), shard)));
            }
        };
        let threads: Vec<_> = handles
            .into_iter()
            .map(|handle| scope.spawn(move || work(handle)))
            .collect();
        for thread in threads {
            opened.extend(thread.join().expect("opening a shard does not panic"));
        }
    });
    opened.sort_unstable_by_key(|(shard, _)| *shard);
    opened.into_iter().map(|(_, opened)| opened).collect()
}

struct Opening<'a> {
    dev: &'a mut dyn SyncDevice,
    geo: Geometry,
    report: RecoveryReport,
}

impl Opening<'_> {
    fn run(
        &mut self,
        params: &CoreParams,
        nonce: [u8; 16],
        shards: u32,
    ) -> Result<ShardCore, OpenError> {
        let sb = self.superblock()?;
        let table = self.table(&sb)?;
        let space = self.space(&sb, &table)?;
        let scan = if sb.clean == 1 {
            Scan::default()
        } else {
            self.scan(&sb)?
        };
        self.report.clean_shards += sb.clean;
        let leaves = scan.leaves();
        let last = scan
            .batches
            .last()
            .map_or(sb.log_start - 1, |b| b.lsn)
            .max(sb.watermark);
        let loaded = Loaded {
            geo: self.geo,
            alloc: space.alloc,
            table,
            bitmap_ptrs: space.ptrs,
            bitmap_dir_ptrs: sb.bitmap_dirs,
            table_root: sb.table_root,
            checkpoint: sb.checkpoint,
            window_id: sb.windows[1].id + 1,
            next_lsn: last + 1,
            nonce,
            shards,
            leaves_needed: (leaves.len() + space.lost.len()) as u32,
            leaks: space.leaks,
            counted: sb.counted == 1,
        };
        let mut core = ShardCore::new(loaded, params);
        let mut has_unread = false;
        for (rec, leaf) in space.lost {
            core.give_up_leaf(rec, leaf);
            has_unread = true;
        }
        has_unread |= self.load_leaves(&mut core, &leaves)?;
        self.replay(&mut core, &scan)?;
        if sb.counted != 1 {
            core.forget_counts();
        }
        // What was seen must stay until the checkpoint below is durable.
        self.dev.flush().map_err(io_error("flush", 0))?;
        core.run_checkpoint(self.dev, false)?;
        // Only now: the checkpoint has read once more what it was to replace.
        self.report.lost_leaves += core.metrics().lost_leaves as u32;
        if has_unread {
            core.report_unknown();
        }
        core.shrink_leaf_cache(params, shards);
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

    /// The newest superblock. Of each slot one copy must be readable: the other slot's is an older one, or
    /// not.
    fn superblock(&mut self) -> Result<Superblock, OpenError> {
        let mut page = Page::zeroed();
        let mut best: Option<Superblock> = None;
        for slot in [0, 1] {
            let mut unreadable = Ok(());
            let mut readable = 0;
            for unit in self.geo.superblock_units(slot) {
                if let Err(error) = self.read(unit, &mut page.0, "read a superblock") {
                    unreadable = Err(error);
                    continue;
                }
                readable += 1;
                let read = Superblock::read(&page.0, self.geo.shard, self.geo.units);
                let newest = best.as_ref().map_or(0, |best| best.checkpoint);
                best = read.filter(|sb| sb.checkpoint > newest).or(best);
            }
            if readable == 0 {
                unreadable?;
            }
        }
        let offset = self.geo.offset(0);
        best.ok_or(OpenError::SuperblockDamaged {
            shard: self.geo.shard,
            offset,
        })
    }

    fn damaged(&self, what: &'static str, unit: u32) -> OpenError {
        OpenError::Damaged {
            what,
            shard: self.geo.shard,
            offset: self.geo.offset(unit),
        }
    }

    /// Pointers in the pages that `dirs` name; none in those that name none.
    fn pointers(&mut self, dirs: &[Ptr], what: &'static str) -> Result<Vec<Ptr>, OpenError> {
        let mut ptrs = vec![Ptr::default(); dirs.len() * DIR_PTRS];
        self.pages(dirs, what, |dir, page| {
            ptrs[dir * DIR_PTRS..][..DIR_PTRS]
                .as_mut_bytes()
                .copy_from_slice(page);
        })?;
        Ok(ptrs)
    }

    fn table(&mut self, sb: &Superblock) -> Result<Table, OpenError> {
        let mut table = Table::new(records_max(self.geo.units));
        let pages = sb.table_pages as usize;
        table.dir_ptrs = self.pointers(&[sb.table_root], "table root")?;
        table.dir_ptrs.truncate(pages.div_ceil(DIR_PTRS));
        let mut ptrs = self.pointers(&table.dir_ptrs, "table directory")?;
        ptrs.truncate(pages);
        // A directory at a time, for the records are copied once more.
        for ptrs in ptrs.chunks(DIR_PTRS) {
            let mut records = vec![ChunkRecord::new_zeroed(); ptrs.len() * PAGE_RECORDS];
            self.pages(ptrs, "table page", |at, page| {
                records[at * PAGE_RECORDS..][..PAGE_RECORDS]
                    .as_mut_bytes()
                    .copy_from_slice(page);
            })?;
            for (&ptr, records) in ptrs.iter().zip(records.chunks(PAGE_RECORDS)) {
                if !table.load_page(ptr, records) {
                    return Err(self.damaged("table page", ptr.unit));
                }
            }
        }
        Ok(table)
    }

    /// Brings the map pages that the log changes into the cache; whether some cannot be read.
    fn load_leaves(
        &mut self,
        core: &mut ShardCore,
        leaves: &BTreeSet<LeafKey>,
    ) -> Result<bool, OpenError> {
        let stored: Vec<_> = leaves
            .iter()
            .filter_map(|&(layer, chunk, leaf)| core.stored_leaf(layer, chunk, leaf))
            .collect();
        let ptrs: Vec<Ptr> = stored.iter().map(|(_, _, ptr)| *ptr).collect();
        let refused_max = REFUSED_LEAVES_MAX as usize;
        let unread = self.leaves(&ptrs, refused_max, |at, page| {
            let (rec, leaf, _) = stored[at];
            core.put_leaf(rec, leaf, page);
        })?;
        let has_unread = !unread.is_empty();
        for UnreadLeaf { name, result } in unread {
            let (rec, leaf, _) = stored[name];
            let is_put = core.put_stand_in(rec, leaf, result);
            assert!(is_put, "no more were refused than may be");
        }
        Ok(has_unread)
    }
}
