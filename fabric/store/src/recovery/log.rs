//! Finding the log, proving what of it is there, and replaying it.

use std::collections::BTreeSet;

use fabric_types::checksum::crc32c;
use zerocopy::FromBytes;

use super::super::error::OpenError;
use super::super::format::{
    BatchEntry, BatchHeader, LEAF_BLOCKS, REGION_UNITS, Superblock, UNIT_BYTES, entry_kind,
};
use super::super::log::{ReadEntry, read_entries};
use super::super::shard::{Replay, ShardCore};
use super::Opening;
use super::pages::Wanted;

/// Layer, chunk and leaf.
pub(super) type LeafKey = (u64, u32, u8);

/// An entry of a batch.
struct Entry {
    read: ReadEntry,
    /// Which data blocks are there; `None` while nobody has looked.
    good: Option<Vec<bool>>,
}

/// A log batch found on the device.
pub(super) struct Found {
    pub(super) lsn: u64,
    unit: u32,
    entries: Vec<Entry>,
}

/// What the windows hold.
#[derive(Default)]
pub(super) struct Scan {
    pub(super) batches: Vec<Found>,
    watermark: u64,
    checkpoint: u64,
    /// A unit that looks like a header and is damaged.
    suspect: Option<u32>,
}

impl Opening<'_> {
    /// Finds the batches in both windows, checks that none that was durable is missing, and proves the
    /// others' data.
    pub(super) fn scan(&mut self, sb: &Superblock) -> Result<Scan, OpenError> {
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
        let within = |&region: &u32| {
            let end = region.saturating_mul(REGION_UNITS) + REGION_UNITS;
            end <= self.geo.units
        };
        let wanted = regions.iter().copied().filter(within).map(|region| Wanted {
            start: region * REGION_UNITS,
            len: REGION_UNITS,
            name: region as usize,
        });
        self.ranges(wanted.collect(), "read the log", |region, bytes| {
            let first = region as u32 * REGION_UNITS;
            for unit in first..first + REGION_UNITS {
                scan.look_at(bytes, sb, first, unit);
            }
        })?;
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
        self.prove(&mut scan)?;
        Ok(scan)
    }

    /// Determines which data blocks are there.
    fn prove(&mut self, scan: &mut Scan) -> Result<(), OpenError> {
        let watermark = scan.watermark;
        let (mut wanted, mut places) = (Vec::new(), Vec::new());
        for (b, batch) in scan.batches.iter_mut().enumerate() {
            for (e, entry) in batch.entries.iter_mut().enumerate() {
                let (first, count) = (entry.read.entry.unit, u32::from(entry.read.entry.count));
                if entry.read.entry.kind != entry_kind::DATA {
                    continue;
                }
                let end = first.checked_add(count);
                if end.is_none_or(|end| end > self.geo.end_free())
                    || first < self.geo.first_free()
                    || !(1..=LEAF_BLOCKS as u32).contains(&count)
                {
                    return Err(self.damaged("log entry", 0));
                }
                if batch.lsn <= watermark {
                    // Flushed data need no proof here: damage in it is for the reader to find, not to be
                    // undone.
                    entry.good = Some(vec![true; count as usize]);
                } else if entry.good.is_none() {
                    let name = places.len();
                    places.push((b, e));
                    wanted.push(Wanted {
                        start: first,
                        len: count,
                        name,
                    });
                }
            }
        }
        self.ranges(wanted, "read logged data", |name, bytes| {
            let (b, e) = places[name];
            let entry = &mut scan.batches[b].entries[e];
            entry.good = Some(proof(&entry.read, bytes));
        })?;
        let unflushed = scan.batches.iter().filter(|b| b.lsn > watermark);
        let blocks = unflushed
            .flat_map(|b| &b.entries)
            .flat_map(|e| e.good.iter().flatten());
        self.report.torn_blocks += blocks.filter(|good| !**good).count() as u64;
        Ok(())
    }

    pub(super) fn replay(&mut self, core: &mut ShardCore, scan: &Scan) -> Result<(), OpenError> {
        let mut replay = Replay::default();
        for batch in &scan.batches {
            self.report.batches += 1;
            replay.touched.push(batch.unit);
            for (at, Entry { read, good }) in batch.entries.iter().enumerate() {
                if lacks_data(&read.entry, &batch.entries[at + 1..]) {
                    replay.keep(&read.entry);
                    continue;
                }
                core.replay(read, good.as_deref().unwrap_or_default(), &mut replay)?;
            }
        }
        self.report.blocks += replay.blocks;
        core.finish_replay(replay);
        Ok(())
    }
}

/// Whether the entry makes room in a block for data that follow it in its batch, and these are not there.
///
/// After power loss a header may be there without its data. What the block held is then not given up either:
/// it would read as if it had never been written.
fn lacks_data(dropped: &BatchEntry, rest: &[Entry]) -> bool {
    let place = |entry: &BatchEntry| (entry.layer, entry.chunk);
    let block_in = |entry: &BatchEntry| {
        let nth = dropped.block.checked_sub(entry.block)?;
        (place(entry) == place(dropped) && nth < entry.count).then_some(usize::from(nth))
    };
    let next = || {
        rest.iter()
            .find_map(|e| Some((e, block_in(&e.read.entry)?)))
    };
    let is_torn = |(entry, nth): (&Entry, usize)| {
        let good = entry.good.as_ref();
        entry.read.entry.kind == entry_kind::DATA && good.is_some_and(|good| !good[nth])
    };
    dropped.kind == entry_kind::DROP && next().is_some_and(is_torn)
}

/// Which of an entry's data blocks `bytes` holds.
fn proof(read: &ReadEntry, bytes: &[u8]) -> Vec<bool> {
    let blocks = bytes.chunks_exact(UNIT_BYTES);
    let whole = |(block, &crc): (&[u8], &u32)| crc32c(block) == crc;
    blocks.zip(&read.crcs).map(whole).collect()
}

impl Scan {
    /// The map pages that the log changes, in an order that is the same each time: simulators count on it.
    pub(super) fn leaves(&self) -> BTreeSet<LeafKey> {
        let entries = self.batches.iter().flat_map(|b| &b.entries);
        entries
            .map(|entry| entry.read.entry)
            .filter(|entry| !matches!(entry.kind, entry_kind::FENCE | entry_kind::FENCE_DROP))
            .map(|entry| {
                let leaf = usize::from(entry.block) / LEAF_BLOCKS;
                (entry.layer, entry.chunk, leaf as u8)
            })
            .collect()
    }

    /// Takes the unit if it is a header of the log. `region` is what was read from unit `first` on.
    fn look_at(&mut self, region: &[u8], sb: &Superblock, first: u32, unit: u32) {
        let page = &region[(unit - first) as usize * UNIT_BYTES..][..UNIT_BYTES];
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
        let Some(entries) = read_entries(page, &header) else {
            self.suspect = Some(unit);
            return;
        };
        let durable = header.lsn <= self.watermark;
        let entries = entries.into_iter().map(|read| {
            // Small writes lie behind their header: what is here need not be read once more.
            let good = if durable || read.entry.kind != entry_kind::DATA {
                None
            } else {
                let start = read.entry.unit.checked_sub(first);
                let data = start.and_then(|start| {
                    let len = usize::from(read.entry.count) * UNIT_BYTES;
                    region.get(start as usize * UNIT_BYTES..)?.get(..len)
                });
                data.map(|data| proof(&read, data))
            };
            Entry { read, good }
        });
        self.batches.push(Found {
            lsn: header.lsn,
            unit,
            entries: entries.collect(),
        });
    }
}
