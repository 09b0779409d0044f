//! Chunks that lie where their placement group has no replica: a group that moved to other devices leaves its
//! chunks behind.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fabric_replication::groups::Groups;
use fabric_types::ids::ChunkKey;
use fabric_types::{Epoch, PgId, placement};

use super::{Fabric, FabricError, MAP_WAIT};

/// Most chunks freed by one call; the others are met once a checkpoint has forgotten these.
const STRAYS_MAX: usize = 1 << 16;

/// A chunk that may lie on a device in vain.
#[derive(Debug, Clone)]
pub(super) struct Stray {
    pub(super) device: u32,
    pub(super) chunk: ChunkKey,
    pg: PgId,
    groups: Arc<Groups>,
}

impl Stray {
    /// Whether its group is on this device after all, or coming to it.
    ///
    /// Asked under the shard's lock when the chunk is about to be freed: what is written to a group that
    /// comes back is admitted under that lock too, so it comes after, and is not lost.
    pub(super) fn is_at_home(&self) -> bool {
        // In this order: what comes may have come between the two looks.
        let replicas = [self.pg.incoming(), self.pg];
        let mut here = replicas.iter().filter_map(|pg| self.groups.get(*pg));
        here.any(|group| group.device() == self.device)
    }
}

impl Fabric {
    /// Gives back the space of chunks that lie on devices where their group has no replica; how many, those
    /// included that were freed since the last checkpoint. Only those of `complete`: groups that by the map
    /// of `epoch` have all their replicas in sync, so that nothing can need these chunks again.
    pub fn drop_strays(
        &self,
        epoch: Epoch,
        complete: &HashSet<PgId>,
    ) -> Result<usize, FabricError> {
        let Some(control) = &self.control else {
            return Ok(0);
        };
        let cluster = &self.shared.cluster;
        // By an older map a group may be elsewhere that has been placed here since.
        if !cluster.wait_for(epoch, MAP_WAIT) {
            return Ok(0);
        }
        let mut sizes: HashMap<u32, u32> = HashMap::new();
        for set in cluster.map().sets.iter() {
            // A pool's number has fewer bits.
            *sizes.entry((set.pg().0 >> 32) as u32).or_default() += 1;
        }
        let mut strays = Vec::new();
        control.each_chunk(|device, chunk| {
            let Some(groups) = sizes.get(&placement::pool_of(chunk.layer)) else {
                return;
            };
            let pg = placement::pg_of(chunk, *groups);
            let stray = Stray {
                device,
                chunk,
                pg,
                groups: Arc::clone(&cluster.groups),
            };
            if complete.contains(&pg) && strays.len() < STRAYS_MAX && !stray.is_at_home() {
                strays.push(stray);
            }
        });
        control.drop_strays(&strays)?;
        Ok(strays.len())
    }
}
