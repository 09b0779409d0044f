//! What guests were told is durable is so on every member in sync: now and then each of them loses power in
//! the mind of the simulator, and what would be left is read.
//!
//! A loss of power that happens to one node hides what it did not have: it is brought up to date by the
//! others. This looks at each member as if it were the only one that is left. Blocks that turned bad on a
//! device are left out: what a store can know of these is told in `docs/REPLICATION.md`.

use fabric::proto::PgId;
use fabric::proto::ids::ChunkKey;
use rand::Rng;

use super::disks::BLOCK_SECTORS;
use super::end::pieces;
use super::{Sim, layer_of};
use crate::checker::tags_of;
use crate::node::DeviceAt;
use crate::workload::CHUNK_SECTORS;

/// One of so many acknowledged flushes is checked: each opens a store for every member.
const ONE_FLUSH_IN: u32 = 8;

impl Sim {
    /// A flush of a volume was acknowledged.
    pub(super) fn check_flushed(&mut self, volume: usize) {
        if !self.durable_rng.random_ratio(1, ONE_FLUSH_IN) {
            return;
        }
        for pg in 0..self.plan.groups {
            self.check_members(PgId(pg as u64), Some(volume));
        }
    }

    /// A member of a group is in sync from now on.
    pub(super) fn check_promoted(&mut self, pg: PgId) {
        self.check_members(pg, None);
    }

    /// Checks all members of a group that run and are in sync; of one volume, or of all.
    fn check_members(&mut self, pg: PgId, volume: Option<usize>) {
        let group = &self.meta.groups()[pg.0 as usize];
        let members: Vec<DeviceAt> = group
            .in_sync()
            .filter(|(m, at)| self.nodes[at.node].runs(m.incarnation))
            .map(|(_, at)| at)
            .collect();
        for at in members {
            self.check_durable(pg, at, volume);
        }
    }

    fn check_durable(&mut self, pg: PgId, at: DeviceAt, volume: Option<usize>) {
        let seed = self.durable_rng.random();
        // A disk that does not give its log keeps the store closed: then nothing is known.
        let Some(mut left) = self.nodes[at.node].devices[at.device].after_power_loss(seed) else {
            return;
        };
        let mut tags = Vec::new();
        for guest in 0..self.guests.len() {
            let of = self.guests[guest].volume;
            if volume.is_some_and(|one| one != of) {
                continue;
            }
            for first in self.guests[guest].spots.clone() {
                for (chunk, range) in pieces(first) {
                    if u64::from(chunk) >= self.plan.chunks || self.group_of(of, chunk) != pg {
                        continue;
                    }
                    let key = ChunkKey {
                        layer: layer_of(of),
                        index: chunk,
                    };
                    let sector = u64::from(chunk) * CHUNK_SECTORS + u64::from(range.0) / 512;
                    // Bad blocks are for others to find.
                    let Ok(bytes) = left.peek(key, range) else {
                        continue;
                    };
                    if tags_of(&bytes, of, sector, &mut tags).is_err() {
                        continue;
                    }
                    for (tag, sector) in tags.iter().zip(sector..) {
                        if self.disks.was_bad_anywhere(of, sector / BLOCK_SECTORS) {
                            continue;
                        }
                        if let Err(what) = self.checker.would_be_left(of, sector, *tag) {
                            self.fail(format!(
                                "invariant Durable: {pg} is in sync on {at}, which would lose what was \
                                 flushed with its power: volume {of} sector {sector}: {what}"
                            ));
                            return;
                        }
                        self.durable_sectors += 1;
                    }
                }
            }
        }
    }
}
