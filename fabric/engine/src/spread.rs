//! Puts every chunk of a node that was alone on the device of its placement group, while nobody else works
//! on the stores. A node that is alone keeps a layer on one device as a whole, the one that has the layer's
//! fence; one of several looks for each chunk on the device that its group is on.
//!
//! First everything is copied ([`Spread::copy`]): what is where it was stays as it is, so that the node can
//! go on alone whatever happens. Once all copies are durable, and it is noted elsewhere that the node is one
//! of several, [`Spread::settle`] tells all devices. What lies on other devices than its group is freed
//! later, while the node serves, as after every move of a group (`strays.rs`). Both may be cut at any
//! moment, and are done again then.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use fabric_store::ShardCore;
use fabric_store::api::{Fence, OpId, StoreCore, StoreError, StoreOp, Submitted, shard_of};
use fabric_types::block::{BLOCK_BYTES, Block, BlockStamp, Holds, LEAF_BLOCKS};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId};
use fabric_types::{Epoch, PgId, placement};

use super::config::{DeviceConfig, FabricConfig, FabricError};
use super::open::open_devices;
use super::stores::OpenStore;

/// Chunks copied, or freed, before the devices are flushed.
const BATCH_CHUNKS: usize = 64;
/// A device is filled up to this share of its capacity, in percent: shards fill up unevenly.
const FILL_PERCENT: u64 = 90;
/// Fences set together.
const FENCES_MAX: usize = 256;
/// Blocks of a chunk.
const CHUNK_BLOCKS: u32 = (CHUNK_BYTES / BLOCK_BYTES as u64) as u32;

/// Identity of a device, as in its label.
pub type DeviceIdentity = [u8; 16];

/// A chunk that lies on another device than its group.
#[derive(Debug, Clone, Copy)]
struct Move {
    from: usize,
    to: usize,
    chunk: ChunkKey,
}

/// How far it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spreading {
    /// Chunks that are on the device of their group.
    pub copied: usize,
    /// Chunks that belong on another device than they were on.
    pub chunks: usize,
    /// Blocks that were not there yet.
    pub copied_blocks: u64,
}

/// The open stores, and what is to be copied between them.
pub struct Spread {
    stores: Vec<OpenStore>,
    moves: Vec<Move>,
    /// Bytes that each device receives by that.
    comes: Vec<u64>,
    /// Copies that are there already.
    copies: BTreeSet<(ChunkKey, usize)>,
    /// They are of an earlier try: whether they can be read is not known.
    are_copies_old: bool,
    /// Devices with operations that could not be ended, whose buffers are gone: they are left alone.
    stuck: BTreeSet<usize>,
    state: Spreading,
}

impl Spread {
    /// Opens all of the devices. Changes nothing.
    ///
    /// # Errors
    /// One cannot be opened.
    pub fn open(devices: &[DeviceConfig], config: &FabricConfig) -> Result<Self, FabricError> {
        // Without a network nothing may lack.
        let (stores, _) = open_devices(devices, config)?;
        Ok(Self {
            stores,
            moves: Vec::new(),
            comes: Vec::new(),
            copies: BTreeSet::new(),
            are_copies_old: true,
            stuck: BTreeSet::new(),
            state: Spreading::default(),
        })
    }

    /// The devices, and how often each was opened and closed (`Fabric::uses`).
    pub fn uses(&self) -> Vec<(PathBuf, DeviceIdentity, u64)> {
        let of = |store: &OpenStore| {
            let counts = store.cores.iter().flat_map(fences_of);
            let mut counts = counts
                .filter(|(layer, _)| placement::marked(*layer) == Some(placement::USES))
                .map(|(_, fence)| fence.epoch);
            let counted = counts.next().unwrap_or(0);
            let path = store.device.path().to_owned();
            (path, store.label.device, counts.fold(counted, u64::max))
        };
        self.stores.iter().map(of).collect()
    }

    /// A device that says of itself that it was in sync in a group, as only those of a node of several do.
    pub fn served_in_cluster(&self) -> Option<&Path> {
        let says = |store: &&OpenStore| {
            let mut fences = store.cores.iter().flat_map(fences_of);
            fences.any(|(layer, _)| placement::is_group_mark(layer))
        };
        let store = self.stores.iter().find(says)?;
        Some(store.device.path())
    }

    /// Finds what is to be copied. `home` tells the device that a chunk belongs on. Changes nothing. Returns
    /// how much each device receives, in bytes.
    ///
    /// # Errors
    /// A chunk belongs on no device or on one that is none of these, or two have the same layer.
    pub fn plan(
        &mut self,
        home: impl Fn(ChunkKey) -> Option<DeviceIdentity>,
    ) -> Result<Vec<(PathBuf, u64)>, FabricError> {
        let owners = self.owners()?;
        let indexes = self.indexes();
        (self.copies, self.state) = (BTreeSet::new(), Spreading::default());
        let mut by_way: BTreeMap<(usize, usize), Vec<Move>> = BTreeMap::new();
        let mut bytes = BTreeMap::new();
        for (from, store) in self.stores.iter().enumerate() {
            for (chunk, stored) in store.cores.iter().flat_map(chunks_of) {
                let Some(owner) = owners.get(&chunk.layer) else {
                    // Of a layer that was deleted: nobody reads it.
                    continue;
                };
                if *owner != from {
                    self.copies.insert((chunk, from));
                    continue;
                }
                let device = home(chunk).ok_or(FabricError::NoHome { layer: chunk.layer })?;
                let to = indexes.get(&device);
                let &to = to.ok_or(FabricError::HomeNotOpen { device })?;
                if to != from {
                    bytes.insert(chunk, stored);
                    let moves = by_way.entry((from, to)).or_default();
                    moves.push(Move { from, to, chunk });
                }
            }
        }
        self.moves = by_way.into_values().flatten().collect();
        self.state.chunks = self.moves.len();
        self.comes = vec![0; self.stores.len()];
        for one in &self.moves {
            if !self.copies.contains(&(one.chunk, one.to)) {
                self.comes[one.to] += bytes[&one.chunk];
            }
        }
        let paths = self.stores.iter().map(|one| one.device.path().to_owned());
        Ok(paths.zip(self.comes.iter().copied()).collect())
    }

    /// The device that has each layer: of a node that is alone, the one with its fence.
    fn owners(&self) -> Result<BTreeMap<LayerId, usize>, FabricError> {
        let mut owners = BTreeMap::new();
        let mut twice = BTreeMap::new();
        for (index, store) in self.stores.iter().enumerate() {
            let fences = store.cores.iter().flat_map(fences_of);
            for (layer, _) in fences.filter(|(layer, fence)| is_of_data(*layer, *fence)) {
                let known = *owners.entry(layer).or_insert(index);
                if known != index {
                    twice.insert(layer, (known, index));
                }
            }
        }
        if twice.is_empty() {
            return Ok(owners);
        }
        let chunks = self.stores.iter().flat_map(|store| &store.cores);
        for (chunk, _) in chunks.flat_map(chunks_of) {
            if let Some(&(one, other)) = twice.get(&chunk.layer) {
                let path = |index: usize| self.stores[index].device.path().to_owned();
                return Err(FabricError::TwoOwners {
                    layer: chunk.layer,
                    one: path(one),
                    other: path(other),
                });
            }
        }
        Ok(owners)
    }

    fn indexes(&self) -> BTreeMap<DeviceIdentity, usize> {
        let stores = self.stores.iter().enumerate();
        stores
            .map(|(index, store)| (store.label.device, index))
            .collect()
    }

    /// Copies what [`plan`](Self::plan) has found, and makes it durable. `tell` hears how far it is after
    /// each batch. If it fails, the copies are freed again.
    ///
    /// # Errors
    /// A device fails, is full or has too little room, or a block cannot be read. Nothing is lost.
    pub fn copy(&mut self, mut tell: impl FnMut(Spreading)) -> Result<Spreading, FabricError> {
        let moves = std::mem::take(&mut self.moves);
        let copied = self.copy_all(&moves, &mut tell);
        if copied.is_err()
            && let Err(error) = self.take_back(&moves)
        {
            tracing::warn!(%error, "copies of data stay on devices: the next try frees them");
        }
        copied
    }

    fn copy_all(
        &mut self,
        moves: &[Move],
        tell: &mut impl FnMut(Spreading),
    ) -> Result<Spreading, FabricError> {
        self.free_old_copies(moves)?;
        let mut devices = self.stores.iter().zip(&self.comes);
        devices.try_for_each(|(store, comes)| check_room(store, *comes))?;
        for batch in moves.chunks(BATCH_CHUNKS) {
            for one in batch {
                self.copy_chunk(*one)?;
            }
            self.flush(batch.iter().map(|one| one.to))?;
            self.state.copied += batch.len();
            tell(self.state);
        }
        Ok(self.state)
    }

    /// What an earlier try has copied and nobody wants any more: the chunk was discarded since, or its group
    /// is elsewhere.
    fn free_old_copies(&mut self, moves: &[Move]) -> Result<(), FabricError> {
        let wanted: BTreeSet<(ChunkKey, usize)> = match self.copies.is_empty() {
            true => BTreeSet::new(),
            false => moves.iter().map(|one| (one.chunk, one.to)).collect(),
        };
        let old: Vec<(ChunkKey, usize)> = self.copies.difference(&wanted).copied().collect();
        self.drop_chunks(&old)?;
        // Their room counts as used until then.
        let devices: BTreeSet<usize> = old.iter().map(|(_, index)| *index).collect();
        let mut devices = devices.into_iter();
        devices.try_for_each(|index| self.each_core(index, StoreOp::Checkpoint { clean: false }))
    }

    fn take_back(&mut self, moves: &[Move]) -> Result<(), FabricError> {
        let copies: Vec<(ChunkKey, usize)> = moves.iter().map(|one| (one.chunk, one.to)).collect();
        self.drop_chunks(&copies)
    }

    fn drop_chunks(&mut self, chunks: &[(ChunkKey, usize)]) -> Result<(), FabricError> {
        for batch in chunks.chunks(BATCH_CHUNKS) {
            for &(chunk, index) in batch {
                self.drop_chunk(index, chunk)?;
            }
            self.flush(batch.iter().map(|(_, index)| *index))?;
        }
        Ok(())
    }

    fn copy_chunk(&mut self, one: Move) -> Result<(), FabricError> {
        if self.copies.contains(&(one.chunk, one.to)) {
            if self.is_copied(one)? {
                return Ok(());
            }
            self.drop_chunk(one.to, one.chunk)?;
        }
        for first in pages() {
            match self.copy_blocks(one, first) {
                Err(error) if is_full(&error) => {
                    // What was freed can be used after a checkpoint.
                    self.each_core(one.to, StoreOp::Checkpoint { clean: false })?;
                    self.drop_chunk(one.to, one.chunk)?;
                    return pages().try_for_each(|first| self.copy_blocks(one, first));
                }
                copied => copied?,
            }
        }
        Ok(())
    }

    /// Whether the chunk has been copied as it is. Of an earlier try's copy, whether it can be read, too.
    fn is_copied(&mut self, one: Move) -> Result<bool, FabricError> {
        for first in pages() {
            let have = self.inspect(one.from, one.chunk, first)?;
            let there = self.inspect(one.to, one.chunk, first)?;
            let mut pairs = have.iter().zip(&there);
            if !pairs.all(|(have, there)| have.agrees_with(there)) {
                return Ok(false);
            }
            if !self.are_copies_old {
                continue;
            }
            let mut data = vec![Block([0; BLOCK_BYTES]); there.len()];
            for run in runs_of_data(&there) {
                let block = first + run.start as u32;
                if !self.read((one.to, one.chunk), block, &mut data[run])? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Copies the blocks of a map page to where nothing is.
    fn copy_blocks(&mut self, one: Move, first: u32) -> Result<(), FabricError> {
        let have = self.inspect(one.from, one.chunk, first)?;
        let blocks: Vec<usize> = (0..have.len())
            .filter(|at| have[*at].holds() != Holds::Nothing)
            .collect();
        if blocks.is_empty() {
            return Ok(());
        }
        if let Some(at) = have.iter().position(BlockStamp::is_unknown) {
            return Err(self.unreadable(one, first + at as u32));
        }
        let mut data = vec![Block([0; BLOCK_BYTES]); have.len()];
        for run in runs_of_data(&have) {
            let block = first + run.start as u32;
            if !self.read((one.from, one.chunk), block, &mut data[run])? {
                return Err(self.unreadable(one, block));
            }
        }
        let iovecs: Vec<libc::iovec> = data.iter_mut().map(|block| iovec(&mut block.0)).collect();
        let shard = self.shard(one.to, one.chunk);
        for &at in &blocks {
            let op = StoreOp::Restore {
                layer: one.chunk.layer,
                chunk: one.chunk.index,
                block: first + at as u32,
                expect: BlockStamp::default(),
                stamp: have[at],
                iovecs: match have[at].holds() {
                    Holds::Data => &iovecs[at..=at],
                    Holds::Zeroes | Holds::Nothing => &[],
                },
                urgent: false,
            };
            self.submit(shard, op)?;
        }
        self.finish(shard)?;
        self.state.copied_blocks += blocks.len() as u64;
        Ok(())
    }

    fn unreadable(&self, one: Move, block: u32) -> FabricError {
        let at = u64::from(one.chunk.index) * CHUNK_BYTES;
        FabricError::Unreadable {
            path: self.stores[one.from].device.path().to_owned(),
            layer: one.chunk.layer,
            offset: at + u64::from(block) * BLOCK_BYTES as u64,
        }
    }

    fn inspect(
        &mut self,
        index: usize,
        chunk: ChunkKey,
        block: u32,
    ) -> Result<Vec<BlockStamp>, FabricError> {
        let mut stamps = vec![BlockStamp::default(); LEAF_BLOCKS as usize];
        let iovecs = [libc::iovec {
            iov_base: stamps.as_mut_ptr().cast(),
            iov_len: size_of_val(stamps.as_slice()),
        }];
        let op = StoreOp::Inspect {
            layer: chunk.layer,
            chunk: chunk.index,
            block,
            iovecs: &iovecs,
        };
        let shard = self.shard(index, chunk);
        self.submit(shard, op)?;
        self.finish(shard)?;
        Ok(stamps)
    }

    /// Reads blocks that follow each other; false if one is damaged.
    fn read(
        &mut self,
        (index, chunk): (usize, ChunkKey),
        block: u32,
        into: &mut [Block],
    ) -> Result<bool, FabricError> {
        let iovecs = [libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: size_of_val(into),
        }];
        let op = StoreOp::Read {
            layers: &[chunk.layer],
            chunk: chunk.index,
            offset: block * BLOCK_BYTES as u32,
            iovecs: &iovecs,
        };
        let shard = self.shard(index, chunk);
        self.submit(shard, op)?;
        match self.finish(shard) {
            Ok(()) => Ok(true),
            Err(FabricError::Operation {
                source: StoreError::Corrupt { .. } | StoreError::Unreadable { .. },
                ..
            }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn drop_chunk(&mut self, index: usize, chunk: ChunkKey) -> Result<(), FabricError> {
        let op = StoreOp::DropChunk {
            layer: chunk.layer,
            chunk: chunk.index,
        };
        let shard = self.shard(index, chunk);
        self.submit(shard, op)?;
        self.finish(shard)
    }

    /// Has each device note which groups are on it, so that the node is not started alone again by old
    /// metadata, and gives all devices the fences of all layers: older leases are refused wherever a chunk
    /// is. Before that it copies what is not copied yet, which is nothing unless the metadata have changed.
    ///
    /// `home` and `groups` as the node's metadata have them now, `epoch` that of their map.
    ///
    /// # Errors
    /// As those of [`plan`](Self::plan) and [`copy`](Self::copy). Another try goes on.
    pub fn settle<G: IntoIterator<Item = PgId>>(
        &mut self,
        home: impl Fn(ChunkKey) -> Option<DeviceIdentity>,
        groups: impl Fn(&DeviceIdentity) -> G,
        epoch: Epoch,
    ) -> Result<(), FabricError> {
        // Once a device has a mark, fences no longer tell where a layer was; by then all is copied.
        if self.served_in_cluster().is_none() {
            self.are_copies_old = false;
            self.plan(home)?;
            let moves = std::mem::take(&mut self.moves);
            self.copy_all(&moves, &mut |_| ())?;
        }
        let fence = Fence {
            epoch: epoch.0,
            ..Fence::default()
        };
        for index in 0..self.stores.len() {
            let marks = groups(&self.stores[index].label.device).into_iter();
            let marks: Vec<(LayerId, Fence)> = marks
                .filter_map(|group| Some((placement::mark_of(group)?, fence)))
                .collect();
            self.set_fences((index, 0..1), &marks)?;
        }
        self.flush(0..self.stores.len())?;
        let fences: Vec<(LayerId, Fence)> = self.fences().into_iter().collect();
        for index in 0..self.stores.len() {
            let cores = 0..self.stores[index].cores.len();
            self.set_fences((index, cores), &fences)?;
        }
        self.flush(0..self.stores.len())
    }

    /// The newest fence of each layer.
    fn fences(&self) -> BTreeMap<LayerId, Fence> {
        let mut newest: BTreeMap<LayerId, Fence> = BTreeMap::new();
        for core in self.stores.iter().flat_map(|store| &store.cores) {
            for (layer, fence) in fences_of(core).filter(|(layer, one)| is_of_data(*layer, *one)) {
                let known = newest.entry(layer).or_default();
                known.generation = known.generation.max(fence.generation);
                known.epoch = known.epoch.max(fence.epoch);
            }
        }
        newest
    }

    fn set_fences(
        &mut self,
        (index, cores): (usize, Range<usize>),
        fences: &[(LayerId, Fence)],
    ) -> Result<(), FabricError> {
        for core in cores {
            for some in fences.chunks(FENCES_MAX) {
                for &(layer, fence) in some {
                    self.submit((index, core), StoreOp::SetFence { layer, fence })?;
                }
                self.finish((index, core))?;
            }
        }
        Ok(())
    }

    /// Closes the stores in order.
    ///
    /// # Errors
    /// A device fails.
    pub fn close(mut self) -> Result<(), FabricError> {
        let end = StoreOp::Checkpoint { clean: true };
        (0..self.stores.len()).try_for_each(|index| self.each_core(index, end))
    }

    fn flush(&mut self, devices: impl IntoIterator<Item = usize>) -> Result<(), FabricError> {
        let devices: BTreeSet<usize> = devices.into_iter().collect();
        let mut devices = devices.into_iter();
        devices.try_for_each(|index| self.each_core(index, StoreOp::Flush))
    }

    /// Runs an operation without buffers on all shards of a device.
    fn each_core(&mut self, index: usize, op: StoreOp<'static>) -> Result<(), FabricError> {
        for core in 0..self.stores[index].cores.len() {
            self.submit((index, core), op)?;
            self.finish((index, core))?;
        }
        Ok(())
    }

    /// The device, and the number of its shard that has a chunk.
    fn shard(&self, index: usize, chunk: ChunkKey) -> (usize, usize) {
        let cores = self.stores[index].cores.len();
        (index, shard_of(chunk.layer, chunk.index, cores))
    }

    /// Its buffers must stay until [`finish`](Self::finish) has returned.
    fn submit(
        &mut self,
        (index, core): (usize, usize),
        op: StoreOp<'_>,
    ) -> Result<(), FabricError> {
        if self.stuck.contains(&index) {
            return Err(failed(StoreError::Device(libc::EIO)));
        }
        // SAFETY: the callers keep the buffers until all operations of the shard are done, or it is stuck:
        // then nothing is done on it any more.
        match unsafe { self.stores[index].cores[core].submit(OpId(0), op) } {
            Submitted::Accepted => Ok(()),
            // A map page has fewer blocks than a shard has places for operations.
            Submitted::Busy => {
                self.stuck.insert(index);
                Err(failed(StoreError::OutOfRange))
            }
        }
    }

    /// Runs a shard until all that was submitted is done; the first error of it.
    fn finish(&mut self, (index, core): (usize, usize)) -> Result<(), FabricError> {
        let store = &mut self.stores[index];
        match store.cores[core].run_on(&mut store.device) {
            Ok(done) => {
                let mut results = done.into_iter().map(|(_, result)| result);
                results.try_for_each(|result| result).map_err(failed)
            }
            Err(error) => {
                self.stuck.insert(index);
                Err(failed(error))
            }
        }
    }
}

/// The first blocks of a chunk's map pages.
fn pages() -> impl Iterator<Item = u32> {
    (0..CHUNK_BLOCKS).step_by(LEAF_BLOCKS as usize)
}

/// Blocks with data that follow each other.
fn runs_of_data(stamps: &[BlockStamp]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, stamp) in stamps.iter().enumerate() {
        if stamp.holds() != Holds::Data {
            continue;
        }
        match runs.last_mut().filter(|run| run.end == at) {
            Some(run) => run.end += 1,
            None => runs.push(at..at + 1),
        }
    }
    runs
}

/// Whether a layer of data has a fence: marks of groups are each device's own, as is the count of its uses.
fn is_of_data(layer: LayerId, fence: Fence) -> bool {
    placement::marked(layer).is_none() && fence != Fence::default()
}

fn is_full(error: &FabricError) -> bool {
    let FabricError::Operation { source, .. } = error else {
        return false;
    };
    matches!(source, StoreError::NoSpace { .. })
}

/// The chunks of a shard, and the bytes that each stores; all that it may where that is not known.
fn chunks_of(core: &ShardCore) -> impl Iterator<Item = (ChunkKey, u64)> + '_ {
    let mut cursor = 0;
    std::iter::from_fn(move || {
        let (chunk, stored, next) = core.next_stored(cursor)?;
        cursor = next;
        Some((chunk, stored.unwrap_or(CHUNK_BYTES)))
    })
}

fn fences_of(core: &ShardCore) -> impl Iterator<Item = (LayerId, Fence)> + '_ {
    let mut cursor = 0;
    std::iter::from_fn(move || {
        let (layer, fence, next) = core.next_fence(cursor)?;
        cursor = next;
        Some((layer, fence))
    })
}

/// Refuses to begin what a device has too little room for.
fn check_room(store: &OpenStore, comes: u64) -> Result<(), FabricError> {
    let spaces = store.cores.iter().map(StoreCore::space);
    let (total, used) = spaces.fold((0, 0), |(total, used), space| {
        (total + space.total_bytes, used + space.used_bytes)
    });
    let fits = total / 100 * FILL_PERCENT;
    if comes == 0 || used + comes <= fits {
        return Ok(());
    }
    Err(FabricError::NoRoomToSpread {
        path: store.device.path().to_owned(),
        comes,
        lacks: used + comes - fits,
    })
}

fn iovec(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

fn failed(source: StoreError) -> FabricError {
    FabricError::Operation {
        verb: "copy data to the device of its placement group",
        source,
    }
}
