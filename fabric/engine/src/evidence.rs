//! What devices say themselves about the groups and layers that they hold, for a cluster whose metadata are
//! restored from a backup: the map of that moment does not say who has been in sync since.
//!
//! A device keeps a mark for each group that it is in sync in: the epoch of the newest map that said so. Of
//! all devices the one with the newest mark lacks nothing that was flushed (docs/REPLICATION.md). A mark is
//! written a moment after its map is known, not before writes under that map are taken.

use std::collections::BTreeMap;

use fabric_types::ids::LayerId;
use fabric_types::{Epoch, Generation, PgId, placement};

use super::control::Control;
use super::{Fabric, FabricError};

/// What one device says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The newest epoch that it knows.
    pub epoch: Epoch,
    /// The epoch at which it was in sync last, of each group in which it ever was.
    pub in_sync: BTreeMap<PgId, Epoch>,
    /// Layers with data or a fence on the device, each with the newest lease generation that it knows.
    pub layers: BTreeMap<LayerId, Generation>,
}

impl Control {
    fn evidence(&self, device: u32) -> Evidence {
        let mut found = Evidence::default();
        self.each_chunk(|of, chunk| {
            if of == device {
                found.layers.entry(chunk.layer).or_default();
            }
        });
        self.each_fence(device, |layer, fence| {
            let epoch = Epoch(fence.epoch);
            if placement::marked(layer) == Some(placement::USES) {
                return;
            }
            found.epoch = epoch.max(found.epoch);
            if let Some(pg) = placement::marked(layer) {
                let newest = found.in_sync.entry(pg).or_default();
                *newest = epoch.max(*newest);
            } else {
                let newest = found.layers.entry(layer).or_default();
                *newest = Generation(u64::from(fence.generation)).max(*newest);
            }
        });
        found
    }
}

impl Fabric {
    /// How often a device was opened and closed, as its owner counted; 0 if it is not open.
    pub fn uses(&self, device: &[u8; 16]) -> u64 {
        let mut uses = 0;
        if let Some((control, index)) = self.control_of(device) {
            control.each_fence(index, |layer, fence| {
                if placement::marked(layer) == Some(placement::USES) {
                    uses = fence.epoch.max(uses);
                }
            });
        }
        uses
    }

    /// Has a device remember that number, which must be higher than before; returns once that is durable.
    ///
    /// # Errors
    /// As those of [`mark_in_sync`](Self::mark_in_sync).
    pub fn set_uses(&self, device: &[u8; 16], uses: u64) -> Result<(), FabricError> {
        self.mark_in_sync(device, &[(placement::USES, Epoch(uses))])
    }

    /// Has a device remember that it is in sync in these groups, by maps of these epochs; returns once that
    /// is durable.
    ///
    /// # Errors
    /// The device takes no writes, or has no room. Groups before the failed one may be marked.
    pub fn mark_in_sync(
        &self,
        device: &[u8; 16],
        groups: &[(PgId, Epoch)],
    ) -> Result<(), FabricError> {
        match self.control_of(device) {
            Some((control, index)) => control.mark(index, groups),
            None => Ok(()),
        }
    }

    /// Newest epoch that a device knows; 0 if it is not open.
    pub fn newest_epoch(&self, device: &[u8; 16]) -> Epoch {
        let mut newest = 0;
        if let Some((control, index)) = self.control_of(device) {
            control.each_fence(index, |layer, fence| {
                if placement::marked(layer) != Some(placement::USES) {
                    newest = fence.epoch.max(newest);
                }
            });
        }
        Epoch(newest)
    }

    /// What a device says; nothing if it is not open.
    pub fn evidence(&self, device: &[u8; 16]) -> Evidence {
        let found = self.control_of(device);
        found.map_or_else(Evidence::default, |(control, index)| {
            control.evidence(index)
        })
    }

    fn control_of(&self, device: &[u8; 16]) -> Option<(&Control, u32)> {
        let control = self.control.as_deref()?;
        Some((control, control.index_of(device)?))
    }
}
