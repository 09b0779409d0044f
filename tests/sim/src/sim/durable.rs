//! Invariant *Durable*, for each member alone: what guests were told is durable is on the device of every
//! member in sync.
//!
//! A node that lost power is brought up to date by the others, which hides what its device had lost. So a
//! store is opened on a copy of the device after a simulated loss of power, and read. Damaged blocks are
//! left out: `docs/REPLICATION.md` says what a store can know of them.

use fabric_types::PgId;
use fabric_types::ids::ChunkKey;
use rand::Rng;

use super::disks::BLOCK_SECTORS;
use super::{Sim, layer_of};
use crate::checker::tags_of;
use crate::node::{DeviceAt, Left};
use crate::workload::CHUNK_SECTORS;

/// One acknowledged flush in this many is checked, by chance: a check opens one store for each member.
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
        for at in self.running_in_sync(pg) {
            if let Err(what) = self.check_member(pg, at, volume) {
                self.fail(format!(
                    "invariant Durable: {pg} is in sync on {at}, and after a loss of power there: {what}"
                ));
                return;
            }
        }
    }

    fn check_member(
        &mut self,
        pg: PgId,
        at: DeviceAt,
        volume: Option<usize>,
    ) -> Result<(), String> {
        let device = &self.nodes[at.node].devices[at.device];
        let is_sound = device.disk.spoilt().is_empty();
        let mut left = match device.after_power_loss(self.durable_rng.random()) {
            Ok(left) => left,
            // A disk that does not give its log keeps the store closed: then nothing is known.
            Err(_) if !is_sound => return Ok(()),
            Err(error) => return Err(format!("the store does not open: {error}")),
        };
        for guest in 0..self.guests.len() {
            let of = self.guests[guest].volume;
            if volume.is_none_or(|one| one == of) {
                for (chunk, range) in self.places_in(guest, pg) {
                    self.check_place(&mut left, of, chunk, range)?;
                }
            }
        }
        Ok(())
    }

    fn check_place(
        &mut self,
        left: &mut Left,
        volume: usize,
        index: u32,
        range: (u32, u32),
    ) -> Result<(), String> {
        let first = u64::from(index) * CHUNK_SECTORS + u64::from(range.0) / 512;
        let sectors = first..first + u64::from(range.1) / 512;
        let was_bad = |sector: u64| self.disks.was_bad_anywhere(volume, sector / BLOCK_SECTORS);
        let any_bad = sectors.clone().any(was_bad);
        let layer = layer_of(volume);
        let bytes = match left.peek(ChunkKey { layer, index }, range) {
            Ok(bytes) => bytes,
            Err(_) if any_bad => return Ok(()),
            Err(error) => return Err(format!("volume {volume} chunk {index}: {error}")),
        };
        let mut tags = Vec::new();
        match tags_of(&bytes, volume, first, &mut tags) {
            Ok(()) => {}
            Err(_) if any_bad => return Ok(()),
            Err(sector) => {
                return Err(format!(
                    "volume {volume} sector {sector} shows bytes that nobody wrote there"
                ));
            }
        }
        let mut checked = 0;
        for (tag, sector) in tags
            .iter()
            .zip(sectors)
            .filter(|(_, sector)| !was_bad(*sector))
        {
            let shown = self.checker.would_be_left(volume, sector, *tag);
            shown.map_err(|what| format!("volume {volume} sector {sector}: {what}"))?;
            checked += 1;
        }
        self.durable_sectors += checked;
        Ok(())
    }
}
