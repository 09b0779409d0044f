//! What a replica has persisted about who may write a layer.
//!
//! A node of several keeps fences only of layers that exist, by the newest metadata that it has heard
//! ([`Fences::set_layers`]). A change of any other layer is put off ([`Refusal::Behind`]): the layer may have
//! been created a moment ago, and this node hears of it soon. So a peer that invents layers can neither fill
//! the table nor have anything stored for them. What reads only is answered as of a layer without a fence,
//! and leaves no trace.
//!
//! With each layer comes its newest lease ([`Grant`]). A fence is the lower bound of the generations that a
//! replica accepts. The grant is the upper bound, and names the node that may use them
//! ([`Fence::admit_change_of`]). A peer's claim alone never raises a fence above what metadata have granted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use fabric_types::ids::{LayerId, Version};
use fabric_types::{Command, Epoch, Generation, NodeId, Refusal, Request};

use crate::thread_cache::ThreadCache;

/// Newest lease of a layer in the metadata that this node has applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Grant {
    /// Holder of the lease; `None` after a release.
    pub holder: Option<NodeId>,
    /// Number of grants so far.
    pub generation: Generation,
}

impl Grant {
    /// Bits of a packed grant that hold the generation, as in a [`Version`].
    const GENERATION_BITS: u32 = 24;

    /// Packs holder and generation into one word, so that threads read both consistently without a lock. A
    /// node or generation that does not fit gets no grant: metadata number both from one and never reach such
    /// values.
    fn pack(self) -> u64 {
        let holder = self.holder.map_or(0, |node| node.0);
        let fits = holder.leading_zeros() >= Self::GENERATION_BITS;
        match fits && self.generation <= Generation::MAX {
            true => holder << Self::GENERATION_BITS | self.generation.0,
            false => 0,
        }
    }

    fn unpack(word: u64) -> Self {
        let holder = word >> Self::GENERATION_BITS;
        Self {
            holder: (holder != 0).then_some(NodeId(holder)),
            generation: Generation(word & Generation::MAX.0),
        }
    }
}

/// Oldest lease and map that a layer still accepts, and the newest granted lease.
#[derive(Debug, Default)]
pub struct Fence {
    generation: AtomicU64,
    epoch: AtomicU64,
    /// See [`Grant::pack`].
    grant: AtomicU64,
}

impl Fence {
    /// Invariant *One writer*: a write whose generation or epoch is older than what was persisted is refused.
    /// A read is refused for an older epoch only: data it returns from under a newer lease are newer, not
    /// wrong.
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

    /// Invariant *One writer*: a change by another node is executed only if that node holds the newest lease,
    /// and only under a generation that was granted. An older generation of the same node is left to
    /// [`admit`](Self::admit): the node may not use its newer lease yet.
    ///
    /// A generation above the newest grant known here is put off, because the grant may be on its way;
    /// `known` is the newest map here. A generation that another node holds, or that was released, is stale.
    #[inline]
    pub fn admit_change_of(
        &self,
        node: NodeId,
        request: &Request,
        known: Epoch,
    ) -> Result<(), Refusal> {
        let grant = Grant::unpack(self.grant.load(Ordering::Acquire));
        if request.generation > grant.generation {
            return Err(Refusal::Behind(known));
        }
        if grant.holder != Some(node) {
            let newer = Generation(request.generation.0 + 1);
            return Err(Refusal::StaleGeneration(grant.generation.max(newer)));
        }
        match request.command {
            // A takeover or a repair restores blocks that were written under this lease or an older one. A
            // newer version would hide the writes of later holders.
            Command::Restore {
                stamps: [_, stamp], ..
            } if u64::from(Version(stamp.version).generation()) > request.generation.0 => {
                Err(Refusal::Invalid)
            }
            _ => Ok(()),
        }
    }

    fn set_grant(&self, grant: Grant) {
        self.grant.store(grant.pack(), Ordering::Release);
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

/// Layers of which a fence is kept though metadata do not know them, at most. They come of rounds of
/// comparison: the source has data of a layer that was created a moment ago, or deleted and not dropped there
/// yet. With one more the round fails and begins again later.
pub const UNKNOWN_LAYERS_MAX: usize = 4096;

/// The fences of all layers of a node, shared by its data threads. No layer exists until
/// [`set_layers`](Self::set_layers) names it.
#[derive(Debug, Default)]
pub struct Fences {
    table: RwLock<Table>,
    /// How often layers were removed, for caches to notice.
    removals: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    fences: HashMap<LayerId, Arc<Fence>>,
    /// The existing layers with their leases.
    layers: HashMap<LayerId, Grant>,
}

impl Table {
    fn is_known(&self, layer: LayerId) -> bool {
        self.layers.contains_key(&layer)
    }

    fn grant_of(&self, layer: LayerId) -> Grant {
        self.layers.get(&layer).copied().unwrap_or_default()
    }

    /// Returns the fence of a layer, and creates it if necessary.
    fn fence_of(&mut self, layer: LayerId) -> Arc<Fence> {
        let grant = self.grant_of(layer);
        let fence = self.fences.entry(layer).or_insert_with(|| {
            let fence = Fence::default();
            fence.set_grant(grant);
            Arc::new(fence)
        });
        Arc::clone(fence)
    }

    /// Fences of layers that metadata do not know.
    fn unknown(&self) -> usize {
        let layers = self.fences.keys();
        layers.filter(|layer| !self.is_known(**layer)).count()
    }
}

impl Fences {
    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().expect("no panic under this lock")
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().expect("no panic under this lock")
    }

    /// Replaces the set of existing layers and their leases. Removes the fences of layers that no longer
    /// exist.
    pub fn set_layers(&self, layers: HashMap<LayerId, Grant>) {
        let mut table = self.table_mut();
        let old = std::mem::replace(&mut table.layers, layers);
        let Table { fences, layers } = &mut *table;
        let before = fences.len();
        fences.retain(|layer, fence| {
            let grant = layers.get(layer);
            fence.set_grant(grant.copied().unwrap_or_default());
            grant.is_some() || !old.contains_key(layer)
        });
        if fences.len() != before {
            // Counted under the lock: a thread that sees the new number also finds the new table.
            self.removals.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// These layers have these leases now. One that does not exist is left out. The time that this takes does
    /// not depend on the number of other layers.
    pub fn set_grants(&self, grants: impl IntoIterator<Item = (LayerId, Grant)>) {
        let mut table = self.table_mut();
        let Table { fences, layers } = &mut *table;
        for (layer, grant) in grants {
            let Some(known) = layers.get_mut(&layer) else {
                continue;
            };
            *known = grant;
            if let Some(fence) = fences.get(&layer) {
                fence.set_grant(grant);
            }
        }
    }

    /// The fence of a layer; one that was never set admits everything. `None`: there is no such layer, as far
    /// as this node has heard.
    pub fn of(&self, layer: LayerId) -> Option<Arc<Fence>> {
        let table = self.table();
        if let Some(fence) = table.fences.get(&layer) {
            return Some(Arc::clone(fence));
        }
        if !table.is_known(layer) {
            return None;
        }
        drop(table);
        let mut table = self.table_mut();
        // It may have gone in between.
        table.is_known(layer).then(|| table.fence_of(layer))
    }

    /// Raises the fence of a layer, whether it is known or not; returns what it is then. `None`: there are
    /// too many of unknown layers.
    pub fn raise(
        &self,
        layer: LayerId,
        generation: Generation,
        epoch: Epoch,
    ) -> Option<(Generation, Epoch)> {
        let fence = self.of(layer).or_else(|| {
            let mut table = self.table_mut();
            let has_room = table.unknown() < UNKNOWN_LAYERS_MAX;
            has_room.then(|| table.fence_of(layer))
        })?;
        fence.raise(generation, epoch);
        Some(fence.get())
    }

    /// Forgets a dropped layer.
    pub fn forget(&self, layer: LayerId) {
        self.table_mut().fences.remove(&layer);
        self.removals.fetch_add(1, Ordering::AcqRel);
    }

    /// Fences in memory.
    pub fn len(&self) -> usize {
        self.table().fences.len()
    }

    /// None is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One data thread's view of [`Fences`], without lock and hash.
#[derive(Debug)]
pub struct FenceCache {
    fences: Arc<Fences>,
    known: ThreadCache<LayerId, Fence>,
}

impl FenceCache {
    /// An empty cache over `fences`.
    pub fn new(fences: Arc<Fences>) -> Self {
        Self {
            known: ThreadCache::new(fences.removals.load(Ordering::Acquire)),
            fences,
        }
    }

    /// The fence of a layer, as [`Fences::of`].
    #[inline]
    pub fn of(&mut self, layer: LayerId) -> Option<&Arc<Fence>> {
        let removals = self.fences.removals.load(Ordering::Acquire);
        self.known
            .get(layer, layer.0, removals, || self.fences.of(layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: LayerId = LayerId(7);

    fn layers(of: impl IntoIterator<Item = u64>) -> HashMap<LayerId, Grant> {
        let layers = of.into_iter().map(LayerId);
        layers.map(|layer| (layer, Grant::default())).collect()
    }

    #[test]
    fn only_layers_that_metadata_know_have_fences() {
        let fences = Fences::default();
        assert!(fences.of(LAYER).is_none(), "nothing was told yet");
        fences.set_layers(layers([7, 8]));
        assert!(fences.of(LAYER).is_some());
        for invented in 1000..2000 {
            assert!(fences.of(LayerId(invented)).is_none());
        }
        assert_eq!(fences.len(), 1);
    }

    #[test]
    fn the_fence_of_a_layer_is_forgotten_with_it() {
        let fences = Arc::new(Fences::default());
        fences.set_layers(layers([7, 8]));
        let mut cache = FenceCache::new(Arc::clone(&fences));
        for layer in [LAYER, LayerId(8)] {
            fences.raise(layer, Generation(3), Epoch(4));
            assert!(cache.of(layer).is_some());
        }
        fences.set_layers(layers([8, 9]));
        assert!(cache.of(LAYER).is_none() && fences.of(LAYER).is_none());
        let kept = cache.of(LayerId(8)).map(|fence| fence.get());
        assert_eq!(kept, Some((Generation(3), Epoch(4))));
        fences.forget(LayerId(8));
        let anew = cache.of(LayerId(8)).map(|fence| fence.get());
        assert_eq!(anew, Some((Generation(0), Epoch(0))), "dropped here");
    }

    #[test]
    fn a_lease_that_changes_leaves_other_layers_as_they_are() {
        let fences = Fences::default();
        let held = |node, generation| Grant {
            holder: Some(NodeId(node)),
            generation: Generation(generation),
        };
        let grant_of = |layer| {
            let fence = fences.of(LayerId(layer)).expect("the layer exists");
            Grant::unpack(fence.grant.load(Ordering::Acquire))
        };
        fences.set_layers([7, 8, 9].map(|layer| (LayerId(layer), held(1, 1))).into());
        assert_eq!(grant_of(7), held(1, 1));
        // Layer 8 has no fence yet, layer 1000 does not exist.
        fences.set_grants([7, 8, 1000].map(|layer| (LayerId(layer), held(2, 5))));
        assert_eq!(
            [7, 8, 9].map(grant_of),
            [held(2, 5), held(2, 5), held(1, 1)]
        );
        assert!(fences.of(LayerId(1000)).is_none());
    }

    /// A round of comparison may hear of a layer before metadata do.
    #[test]
    fn bounded_unknown_layers_have_fences_up_to_a_limit() {
        let fences = Fences::default();
        let raised = Some((Generation(2), Epoch(3)));
        let raise = |layer| fences.raise(LayerId(layer), Generation(2), Epoch(3));
        let last = UNKNOWN_LAYERS_MAX as u64 - 1;
        for layer in 0..=last {
            assert_eq!(raise(layer), raised);
        }
        assert_eq!(raise(last + 1), None);
        assert_eq!(raise(last), raised, "it is there already");
        // Metadata hear of one of them, whose fence stays, and there is room for another.
        fences.set_layers(layers([last]));
        assert_eq!(fences.of(LayerId(last)).map(|fence| fence.get()), raised);
        assert_eq!(raise(last + 1), raised);
        assert_eq!(raise(last + 2), None);
    }
}
