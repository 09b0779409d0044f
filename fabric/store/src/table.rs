//! The chunk table: every chunk of the shard and every fence, in RAM, in the layout of the table pages.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use zerocopy::IntoBytes;

use super::api::{ChunkKey, Fence, LayerId, Version};
use super::bitmap::Bitmap;
use super::format::{CHUNK_LEAVES, ChunkRecord, DIR_PTRS, PAGE_RECORDS, Ptr, record_kind};

/// "None" among `u32` indices.
pub const NONE: u32 = u32::MAX;
/// Chunk index of a fence record.
const FENCE_INDEX: u32 = u32::MAX;

/// Mixes the 12 bytes of a key. Keys are the store's own numbers, not a guest's choice.
#[derive(Debug, Default, Clone, Copy)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 29);
    }
}

/// What is known of a record in RAM only.
#[derive(Debug, Clone, Copy)]
pub struct Runtime {
    /// Cache slot of each leaf, [`NONE`] when not cached.
    pub leaf_slots: [u32; CHUNK_LEAVES],
    /// Newest operation part in the chunk's list of writes in flight and waiting parts.
    pub hazards: u32,
    /// Newest version that was mapped in the chunk since the store was opened, the log included.
    pub newest: u64,
}

impl Default for Runtime {
    fn default() -> Self {
        Self {
            leaf_slots: [NONE; CHUNK_LEAVES],
            hazards: NONE,
            newest: 0,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Table {
    records: Vec<ChunkRecord>,
    runtime: Vec<Runtime>,
    index: HashMap<ChunkKey, u32, BuildHasherDefault<KeyHasher>>,
    free: Vec<u32>,
    records_max: u32,
    /// Where each table page is on the device.
    pub page_ptrs: Vec<Ptr>,
    /// Where each directory page is.
    pub dir_ptrs: Vec<Ptr>,
    dirty_pages: Bitmap,
    dirty_dirs: Bitmap,
    dirty_count: u32,
    /// Records without a leaf, to be reaped when a checkpoint begins.
    empty: Vec<u32>,
}

impl Table {
    /// An empty table for at most `records_max` records.
    #[must_use]
    pub fn new(records_max: u32) -> Self {
        let pages = records_max.div_ceil(PAGE_RECORDS as u32);
        Self {
            records: Vec::new(),
            runtime: Vec::new(),
            index: HashMap::default(),
            free: Vec::new(),
            records_max,
            page_ptrs: Vec::new(),
            dir_ptrs: Vec::new(),
            dirty_pages: Bitmap::new(pages),
            dirty_dirs: Bitmap::new(pages.div_ceil(DIR_PTRS as u32)),
            dirty_count: 0,
            empty: Vec::new(),
        }
    }

    /// Appends a page read from the device. Returns `false` when it holds a key twice or an unknown kind.
    pub fn load_page(&mut self, ptr: Ptr, records: &[ChunkRecord]) -> bool {
        self.page_ptrs.push(ptr);
        for record in records {
            let slot = self.records.len() as u32;
            self.records.push(*record);
            self.runtime.push(Runtime::default());
            match record.kind {
                record_kind::FREE => self.free.push(slot),
                record_kind::CHUNK | record_kind::FENCE => {
                    let key = ChunkKey {
                        layer: LayerId(record.layer),
                        index: record.index,
                    };
                    if self.index.insert(key, slot).is_some() {
                        return false;
                    }
                }
                _ => return false,
            }
        }
        true
    }

    /// Record of a chunk.
    #[must_use]
    pub fn find(&self, layer: LayerId, index: u32) -> Option<u32> {
        self.index.get(&ChunkKey { layer, index }).copied()
    }

    /// Record of a chunk, made when there is none; `None` when the table is full.
    pub fn find_or_create(&mut self, layer: LayerId, index: u32) -> Option<u32> {
        match self.find(layer, index) {
            Some(slot) => Some(slot),
            None => self.create(layer, index, record_kind::CHUNK),
        }
    }

    fn create(&mut self, layer: LayerId, index: u32, kind: u32) -> Option<u32> {
        if self.free.is_empty() {
            let start = self.records.len() as u32;
            if start >= self.records_max {
                return None;
            }
            self.records
                .resize(start as usize + PAGE_RECORDS, ChunkRecord::default());
            self.runtime
                .resize(start as usize + PAGE_RECORDS, Runtime::default());
            self.free.extend((start..start + PAGE_RECORDS as u32).rev());
            self.page_ptrs.push(Ptr::default());
        }
        let slot = self.free.pop()?;
        self.records[slot as usize] = ChunkRecord {
            layer: layer.0,
            index,
            kind,
            ..ChunkRecord::default()
        };
        self.runtime[slot as usize] = Runtime::default();
        self.index.insert(ChunkKey { layer, index }, slot);
        self.touch(slot);
        Some(slot)
    }

    /// The record, to read.
    #[must_use]
    pub fn record(&self, slot: u32) -> &ChunkRecord {
        &self.records[slot as usize]
    }

    /// The record, to change: its page becomes dirty.
    pub fn record_mut(&mut self, slot: u32) -> &mut ChunkRecord {
        self.touch(slot);
        &mut self.records[slot as usize]
    }

    /// Of the page that a record names for a leaf: how many blocks it maps to data. The next checkpoint
    /// writes it if it `is_kept`; else it is written with the next change of its table page.
    pub fn set_stored(&mut self, slot: u32, leaf: usize, stored: u32, is_kept: bool) {
        if is_kept {
            self.touch(slot);
        }
        self.records[slot as usize].set_stored(leaf, Some(stored));
    }

    /// Forgets all such counts, in memory; returns the table pages that had some.
    pub fn forget_counts(&mut self) -> Vec<u32> {
        let mut pages = Vec::new();
        for (slot, record) in (0_u32..).zip(&mut self.records) {
            if record.kind != record_kind::CHUNK || record.epoch == 0 {
                continue;
            }
            record.epoch = 0;
            let page = slot / PAGE_RECORDS as u32;
            if pages.last() != Some(&page) {
                pages.push(page);
            }
        }
        pages
    }

    /// Has the next checkpoint write these table pages.
    pub fn touch_pages(&mut self, pages: &[u32]) {
        for page in pages {
            self.touch(page * PAGE_RECORDS as u32);
        }
    }

    /// RAM-only part of the record.
    #[must_use]
    pub fn runtime(&self, slot: u32) -> &Runtime {
        &self.runtime[slot as usize]
    }

    /// RAM-only part of the record, to change.
    pub fn runtime_mut(&mut self, slot: u32) -> &mut Runtime {
        &mut self.runtime[slot as usize]
    }

    fn touch(&mut self, slot: u32) {
        let page = slot / PAGE_RECORDS as u32;
        self.dirty_count += u32::from(self.dirty_pages.set(page));
    }

    /// Slots, free ones included.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.records.len() as u32
    }

    /// Chunks and fences known.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.index.len() as u32
    }

    /// Table pages that the next checkpoint writes.
    #[must_use]
    pub fn dirty_count(&self) -> u32 {
        self.dirty_count
    }

    /// Has the next checkpoint write the table pages and directories that lie where `is_there` says anew.
    pub fn rewrite_pages(&mut self, is_there: impl Fn(u32) -> bool) {
        for page in 0..self.page_ptrs.len() as u32 {
            let dir = self.dir_ptrs.get(page as usize / DIR_PTRS);
            let of_dir = page % DIR_PTRS as u32 == 0 && dir.is_some_and(|dir| is_there(dir.unit));
            if is_there(self.page_ptrs[page as usize].unit) || of_dir {
                self.touch(page * PAGE_RECORDS as u32);
            }
        }
    }

    /// Next dirty table page at or after `from`; it counts as clean from now on.
    pub fn next_dirty_page(&mut self, from: u32) -> Option<u32> {
        let page = self
            .dirty_pages
            .find(true, from, self.page_ptrs.len() as u32)?;
        self.dirty_pages.clear(page);
        self.dirty_count -= 1;
        Some(page)
    }

    /// Records where table page `page` was written, for its directory; returns where it was.
    pub fn set_page_ptr(&mut self, page: u32, ptr: Ptr) -> Ptr {
        self.dirty_dirs.set(page / DIR_PTRS as u32);
        std::mem::replace(&mut self.page_ptrs[page as usize], ptr)
    }

    /// Content of a table page.
    #[must_use]
    pub fn page_bytes(&self, page: u32) -> &[u8] {
        let start = page as usize * PAGE_RECORDS;
        self.records[start..start + PAGE_RECORDS].as_bytes()
    }

    /// Next dirty directory page at or after `from`; it counts as clean from now on.
    pub fn next_dirty_dir(&mut self, from: u32) -> Option<u32> {
        let dirs = self.page_ptrs.len().div_ceil(DIR_PTRS) as u32;
        let dir = self.dirty_dirs.find(true, from, dirs)?;
        self.dirty_dirs.clear(dir);
        Some(dir)
    }

    /// Pointers of a directory page.
    #[must_use]
    pub fn dir_bytes(&self, dir: u32) -> &[u8] {
        let start = dir as usize * DIR_PTRS;
        let end = (start + DIR_PTRS).min(self.page_ptrs.len());
        self.page_ptrs[start..end].as_bytes()
    }

    /// Records where directory `dir` was written; returns where it was.
    pub fn set_dir_ptr(&mut self, dir: u32, ptr: Ptr) -> Ptr {
        let dir = dir as usize;
        if self.dir_ptrs.len() <= dir {
            self.dir_ptrs.resize(dir + 1, Ptr::default());
        }
        std::mem::replace(&mut self.dir_ptrs[dir], ptr)
    }

    /// A leaf of the record was dropped: when it was the last one the record can go at the next checkpoint.
    pub fn note_empty(&mut self, slot: u32) {
        self.empty.push(slot);
    }

    /// After opening: finds the records that can go at the next checkpoint because nothing is left of their
    /// chunk or fence. The version that such a chunk remembers is of use as long as a write of its generation
    /// may come.
    pub fn note_bare(&mut self) {
        for slot in 0..self.slots() {
            let record = self.record(slot);
            let bare = match record.kind {
                record_kind::CHUNK => {
                    let fence = self.fence(LayerId(record.layer)).generation;
                    let remembered = Version(record.floor).generation();
                    // With no fence the layer was dropped: whoever writes to one has a fence first.
                    let moot =
                        record.floor == 0 || remembered < fence || (fence == 0 && remembered > 0);
                    moot && record.leaves.iter().all(|p| p.unit == 0)
                }
                record_kind::FENCE => record.floor == 0 && record.epoch == 0,
                _ => false,
            };
            if bare {
                self.empty.push(slot);
            }
        }
    }

    /// Removes the records that have nothing on disk, in cache or in flight. Only when a checkpoint begins:
    /// later a key might end up in two pages of one checkpoint.
    pub fn reap(&mut self) {
        let mut empty = std::mem::take(&mut self.empty);
        for slot in empty.drain(..) {
            let record = &self.records[slot as usize];
            let runtime = &self.runtime[slot as usize];
            let bare = record.leaves.iter().all(|p| p.unit == 0)
                && runtime.leaf_slots.iter().all(|&s| s == NONE);
            let chunk = record.kind == record_kind::CHUNK && bare && runtime.hazards == NONE;
            let fence = record.kind == record_kind::FENCE && record.floor == 0 && record.epoch == 0;
            if chunk || fence {
                self.remove(slot);
            }
        }
        self.empty = empty;
    }

    fn remove(&mut self, slot: u32) {
        let record = &mut self.records[slot as usize];
        self.index.remove(&ChunkKey {
            layer: LayerId(record.layer),
            index: record.index,
        });
        *record = ChunkRecord::default();
        self.free.push(slot);
        self.touch(slot);
    }

    /// The layer's fence.
    #[must_use]
    pub fn fence(&self, layer: LayerId) -> Fence {
        self.find(layer, FENCE_INDEX)
            .map_or_else(Fence::default, |slot| {
                let record = self.record(slot);
                Fence {
                    generation: record.floor as u32,
                    epoch: record.epoch,
                }
            })
    }

    /// Raises the layer's fence; `false` when the table is full.
    pub fn raise_fence(&mut self, layer: LayerId, fence: Fence) -> bool {
        let found = self
            .find(layer, FENCE_INDEX)
            .or_else(|| self.create(layer, FENCE_INDEX, record_kind::FENCE));
        let Some(slot) = found else { return false };
        let record = self.record_mut(slot);
        record.floor = record.floor.max(u64::from(fence.generation));
        record.epoch = record.epoch.max(fence.epoch);
        true
    }

    /// Forgets the layer's fence. The record goes when the next checkpoint begins.
    pub fn drop_fence(&mut self, layer: LayerId) {
        if let Some(slot) = self.find(layer, FENCE_INDEX) {
            let record = self.record_mut(slot);
            (record.floor, record.epoch) = (0, 0);
            self.empty.push(slot);
        }
    }

    /// RAM held.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        let per_slot = size_of::<ChunkRecord>() + size_of::<Runtime>();
        let index = self.index.capacity() * (size_of::<(ChunkKey, u32)>() + 1);
        let ptrs = (self.page_ptrs.capacity() + self.dir_ptrs.capacity()) * size_of::<Ptr>();
        let lists = (self.free.capacity() + self.empty.capacity()) * 4;
        (self.records.capacity() * per_slot + index + ptrs + lists) as u64
            + self.dirty_pages.ram_bytes()
            + self.dirty_dirs.ram_bytes()
    }
}
