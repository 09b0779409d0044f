//! What a replica has persisted about who may write a layer.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use crate::proto::ids::LayerId;
use crate::proto::{Epoch, Generation, Refusal, Request};

/// Oldest lease and map that a layer still accepts.
#[derive(Debug, Default)]
pub struct Fence {
    generation: AtomicU64,
    epoch: AtomicU64,
}

impl Fence {
    /// Invariant *One writer*: a write whose generation or epoch is older than what was persisted is refused. A read
    /// is refused for an older epoch only: data it returns from under a newer lease are newer, not wrong.
    #[inline]
    pub fn admit(&self, request: &Request) -> Result<(), Refusal> {
        let generation = Generation(self.generation.load(Ordering::Acquire));
        if request.generation < generation && request.command.mutates() {
            return Err(Refusal::StaleGeneration(generation));
        }
        let epoch = Epoch(self.epoch.load(Ordering::Acquire));
        if request.epoch < epoch {
            return Err(Refusal::StaleEpoch(epoch));
        }
        Ok(())
    }

    /// Raises both (never lowers either).
    pub fn raise(&self, generation: Generation, epoch: Epoch) {
        self.generation.fetch_max(generation.0, Ordering::AcqRel);
        self.epoch.fetch_max(epoch.0, Ordering::AcqRel);
    }

    /// The two.
    pub fn get(&self) -> (Generation, Epoch) {
        (
            Generation(self.generation.load(Ordering::Acquire)),
            Epoch(self.epoch.load(Ordering::Acquire)),
        )
    }
}

/// The fences of all layers of a node, shared by its data threads.
#[derive(Debug, Default)]
pub struct Fences {
    layers: RwLock<HashMap<LayerId, Arc<Fence>>>,
}

impl Fences {
    /// The fence of a layer; one that was never set admits everything.
    pub fn of(&self, layer: LayerId) -> Arc<Fence> {
        let known = self.layers.read().expect("no panic under this lock");
        if let Some(fence) = known.get(&layer) {
            return Arc::clone(fence);
        }
        drop(known);
        let mut layers = self.layers.write().expect("no panic under this lock");
        Arc::clone(layers.entry(layer).or_default())
    }

    /// Forgets a dropped layer.
    pub fn forget(&self, layer: LayerId) {
        let mut layers = self.layers.write().expect("no panic under this lock");
        layers.remove(&layer);
    }
}

/// Entries of a [`FenceCache`]: volumes that one data thread serves without asking the shared table.
const CACHE_ENTRIES: usize = 256;

type Entry = Option<(LayerId, Arc<Fence>)>;

/// One data thread's view of [`Fences`], without lock and hash. Two layers that share an entry displace each other.
#[derive(Debug)]
pub struct FenceCache {
    fences: Arc<Fences>,
    entries: Box<[Entry]>,
}

impl FenceCache {
    /// An empty cache over `fences`.
    pub fn new(fences: Arc<Fences>) -> Self {
        Self {
            fences,
            entries: (0..CACHE_ENTRIES).map(|_| None).collect(),
        }
    }

    /// The fence of a layer.
    #[inline]
    pub fn of(&mut self, layer: LayerId) -> &Arc<Fence> {
        let entry = &mut self.entries[(layer.0 as usize) % CACHE_ENTRIES];
        if !matches!(entry, Some((known, _)) if *known == layer) {
            *entry = None;
        }
        let (_, fence) = entry.get_or_insert_with(|| (layer, self.fences.of(layer)));
        fence
    }
}
