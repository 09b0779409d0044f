//! The writes of a layer that may not be on every replica: those above the client's watermark.
//!
//! Kept in memory only: a replica that restarts is compared as a whole before it counts again.

pub(crate) mod told;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId, Version};
use fabric_types::message::UnresolvedEntry;
use fabric_types::{Command, Generation, Request, Sequence};

/// Writes remembered of a layer one by one; beyond, those of a chunk are merged into one range. A client has
/// at most some thousands in flight per data thread.
const WRITES_MAX: usize = 16_384;
/// Ranges that such a merge may leave; with more the whole layer counts as unresolved, until the watermark
/// has passed the newest of them. Far enough below [`WRITES_MAX`] that merges stay rare whatever a client
/// writes.
const MERGED_MAX: usize = WRITES_MAX / 2;
/// Blocks of a chunk.
const CHUNK_BLOCKS: u32 = (CHUNK_BYTES / BLOCK_BYTES as u64) as u32;

/// A range of blocks in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    chunk: u32,
    first: u32,
    end: u32,
}

/// Room for writes that a layer keeps while it has far fewer: data threads do not allocate for each request.
const ROOM_KEPT: usize = 1024;

/// A write and the blocks that it changed in one chunk.
#[derive(Debug, Clone, Copy)]
struct Write {
    version: u64,
    range: Range,
}

impl Write {
    fn key(&self) -> (u64, u32) {
        (self.version, self.range.chunk)
    }
}

/// Unresolved writes of one layer.
#[derive(Debug, Default)]
struct Writes {
    /// Sorted by version and chunk, each pair once. Writes come nearly in this order, and leave at the front.
    writes: VecDeque<Write>,
    /// Every block may be unresolved until the watermark has passed this version: more was written than is
    /// remembered, or another replica said so, of which no watermark tells.
    everything: Option<Version>,
}

impl Writes {
    fn note(&mut self, version: Version, range: Range) {
        let new = Write {
            version: version.0,
            range,
        };
        let at = match self.writes.back() {
            Some(last) if last.key() >= new.key() => {
                self.writes.partition_point(|write| write.key() < new.key())
            }
            _ => self.writes.len(),
        };
        match self.writes.get_mut(at) {
            Some(known) if known.key() == new.key() => {
                known.range.first = known.range.first.min(range.first);
                known.range.end = known.range.end.max(range.end);
            }
            _ => self.writes.insert(at, new),
        }
        if self.writes.len() <= WRITES_MAX {
            return;
        }
        self.merge();
        if self.writes.len() > MERGED_MAX {
            let newest = self.writes.back().map(|write| Version(write.version));
            self.everything = self.everything.max(newest);
            self.writes.clear();
        }
    }

    /// One range for each chunk, under the newest version: nothing is forgotten, though more is recovered
    /// than needed.
    fn merge(&mut self) {
        let mut chunks: BTreeMap<u32, Write> = BTreeMap::new();
        for write in &self.writes {
            chunks
                .entry(write.range.chunk)
                .and_modify(|known| {
                    known.version = known.version.max(write.version);
                    known.range.first = known.range.first.min(write.range.first);
                    known.range.end = known.range.end.max(write.range.end);
                })
                .or_insert(*write);
        }
        let mut merged: Vec<Write> = chunks.into_values().collect();
        merged.sort_unstable_by_key(Write::key);
        self.writes = merged.into();
    }

    /// Writes below the watermark, those of older leases among them, are on every replica.
    fn prune(&mut self, below: Version) {
        self.everything = self.everything.filter(|newest| *newest >= below);
        while self
            .writes
            .front()
            .is_some_and(|oldest| oldest.version < below.0)
        {
            self.writes.pop_front();
        }
        let room = self.writes.capacity();
        if room > ROOM_KEPT && self.writes.len() < room / 8 {
            self.writes.shrink_to(ROOM_KEPT);
        }
    }
}

/// What is remembered of a layer.
#[derive(Debug, Default)]
struct Layer {
    /// What this replica was sent, and what it has taken over when it was compared.
    own: Writes,
    /// What others took for unresolved from whom it has taken single blocks since. Of these writes this
    /// replica has not said that it has them.
    copied: Writes,
}

impl Layer {
    fn prune(&mut self, below: Version) {
        self.own.prune(below);
        self.copied.prune(below);
    }
}

/// The newest write that any data thread remembers of a block, if others may still lack it.
pub fn newest(lanes: &[Arc<Unresolved>], chunk: ChunkKey, block: u32) -> Version {
    let newest = lanes.iter().map(|lane| lane.newest(chunk, block));
    newest.max().unwrap_or(Version(0))
}

/// The answer to a fence of `generation`: what any data thread remembers of older leases' writes, in at most
/// `room` entries. What does not fit is merged, at last into [`UnresolvedEntry::EVERYTHING`].
pub fn list(
    lanes: &[Arc<Unresolved>],
    layer: LayerId,
    generation: Generation,
    room: usize,
) -> Vec<UnresolvedEntry> {
    let mut all = Writes::default();
    for lane in lanes {
        lane.collect(layer, generation, &mut all);
    }
    if all.writes.len() > room {
        all.merge();
    }
    if all.everything.is_some() || all.writes.len() > room {
        return vec![UnresolvedEntry::EVERYTHING];
    }
    let entry = |write: &Write| UnresolvedEntry {
        version: write.version,
        chunk: write.range.chunk,
        block: write.range.first,
        count: write.range.end - write.range.first,
        reserved: 0,
    };
    all.writes.iter().map(entry).collect()
}

/// One data thread's share of what a node remembers.
#[derive(Debug, Default)]
pub struct Unresolved(Mutex<BTreeMap<LayerId, Layer>>);

impl Unresolved {
    /// A write was admitted and goes to the store.
    pub fn note(&self, request: &Request) {
        let (chunk, offset, len) = match request.command {
            Command::Write {
                chunk, offset, len, ..
            }
            | Command::Zero {
                chunk, offset, len, ..
            } => (chunk, offset, len),
            _ => return,
        };
        let block = BLOCK_BYTES as u32;
        let range = Range {
            chunk: chunk.index,
            first: offset / block,
            end: offset.saturating_add(len).div_ceil(block),
        };
        let mut layers = self.0.lock().expect("no panic under this lock");
        let layer = layers.entry(chunk.layer).or_default();
        // Right after a lease was renewed nothing is known to be resolved, neither under the new one nor
        // under the old.
        if request.watermark.0 > 0 {
            layer.prune(Version::of(request.generation, request.watermark));
        }
        let version = Version::of(request.generation, request.sequence);
        layer.own.note(version, range);
    }

    /// Another replica takes these for unresolved, and this one has them from there: all of them, for it was
    /// compared.
    ///
    /// They are forgotten with the writes that come later by the same data thread; until then a takeover
    /// recovers more than it has to.
    pub fn adopt(&self, layer: LayerId, told: &[UnresolvedEntry]) {
        self.take_in(layer, told, |layer| &mut layer.own);
    }

    /// The same of a replica from which this one takes a block over: it may have some of them from there.
    pub fn adopt_copied(&self, layer: LayerId, told: &[UnresolvedEntry]) {
        self.take_in(layer, told, |layer| &mut layer.copied);
    }

    fn take_in(
        &self,
        layer: LayerId,
        told: &[UnresolvedEntry],
        writes: fn(&mut Layer) -> &mut Writes,
    ) {
        if told.is_empty() {
            return;
        }
        let mut layers = self.0.lock().expect("no panic under this lock");
        let writes = writes(layers.entry(layer).or_default());
        for entry in told {
            if *entry == UnresolvedEntry::EVERYTHING {
                writes.everything = Some(Version(u64::MAX));
                continue;
            }
            // What a peer told is any bytes. A range without blocks would end the list that others are told.
            let end = entry.block.saturating_add(entry.count).min(CHUNK_BLOCKS);
            if entry.block < end && entry.chunk != u32::MAX {
                let range = Range {
                    chunk: entry.chunk,
                    first: entry.block,
                    end,
                };
                writes.note(Version(entry.version), range);
            }
        }
    }

    /// See [`newest`].
    fn newest(&self, chunk: ChunkKey, block: u32) -> Version {
        let layers = self.0.lock().expect("no panic under this lock");
        let Some(own) = layers.get(&chunk.layer).map(|layer| &layer.own) else {
            return Version(0);
        };
        let covers =
            |range: &Range| range.chunk == chunk.index && (range.first..range.end).contains(&block);
        let mut newest_first = own.writes.iter().rev();
        let found = newest_first.find(|write| covers(&write.range));
        let found = found.map(|write| Version(write.version));
        found.max(own.everything).unwrap_or(Version(0))
    }

    /// Adds what is unresolved of leases older than `generation`.
    fn collect(&self, layer: LayerId, generation: Generation, into: &mut Writes) {
        let layers = self.0.lock().expect("no panic under this lock");
        let before = Version::of(generation, Sequence(0));
        let Some(known) = layers.get(&layer) else {
            return;
        };
        for known in [&known.own, &known.copied] {
            into.everything = into.everything.max(known.everything);
            let writes = known.writes.iter();
            for write in writes.take_while(|write| write.version < before.0) {
                into.note(Version(write.version), write.range);
            }
        }
    }

    /// The layer is gone.
    pub fn forget(&self, layer: LayerId) {
        self.0
            .lock()
            .expect("no panic under this lock")
            .remove(&layer);
    }

    /// Writes remembered.
    pub fn len(&self) -> usize {
        let layers = self.0.lock().expect("no panic under this lock");
        let writes = |layer: &Layer| layer.own.writes.len() + layer.copied.writes.len();
        layers.values().map(writes).sum()
    }

    /// None is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests;
