//! At the end of a run nothing is left over: no memory for what is done, no space for what nobody can read.

use fabric_types::block::{BlockStamp, Holds, LEAF_BLOCKS};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey};
use fabric_types::placement;

use super::{Sim, layer_of};
use crate::node::DeviceAt;

const BLOCK: u64 = 4096;
/// Units that a store this small uses beside blocks of data and the pages that map them, at most: for its
/// table of chunks.
const OVERHEAD_UNITS: u64 = 3;
const NOTHING: BlockStamp = BlockStamp {
    version: 0,
    crc: 0,
    holds: 0,
};

impl Sim {
    /// Invariant *Bounded*, once all is well: what was kept for requests, comparisons and takeovers is not
    /// kept any more.
    pub(super) fn nothing_is_left_over(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let what = self.left_in_hosts().or_else(|| self.left_in_nodes());
        if let Some(what) = what {
            self.fail(format!("all is done, and {what}"));
        }
        for node in 0..self.nodes.len() {
            for device in 0..self.plan.devices {
                self.no_space_leaks(DeviceAt { node, device });
            }
        }
    }

    fn left_in_hosts(&self) -> Option<String> {
        if !self.takeovers.is_empty() || !self.held.is_empty() {
            return Some("a takeover or a message is under way".to_owned());
        }
        for (number, host) in self.hosts.iter().enumerate() {
            for lane in &host.lanes {
                let (requests, more) = (lane.client.in_flight(), lane.client.left_over());
                if requests > 0 || more > 0 || !lane.wire.sent.is_empty() {
                    return Some(format!(
                        "a client of host {number} holds {requests} requests, and {more} things for such"
                    ));
                }
            }
        }
        let waits = |conn: &&crate::host::Conn| conn.open && !conn.outstanding.is_empty();
        let conn = self.conns.iter().find(waits)?;
        Some(format!("host {} waits for node {}", conn.host, conn.node))
    }

    fn left_in_nodes(&self) -> Option<String> {
        // Each guest's writes are remembered until a later one tells that they are on all replicas, by each
        // data thread for itself; a write concerns two chunks at most, and a retry may have come by another
        // thread.
        let writes = (self.plan.volumes * self.plan.ops as usize * 2).max(64);
        let unresolved_max = writes * self.plan.replica_threads;
        for node in &self.nodes {
            let Some(process) = &node.process else {
                continue;
            };
            let kept = process.kept_by_groups(self.plan.groups);
            if kept > 0 {
                return Some(format!("{} keeps {kept} notes of comparisons", node.id));
            }
            let (unresolved, waiting) = (process.unresolved(), process.waiting());
            if unresolved > unresolved_max || waiting > 0 {
                return Some(format!(
                    "{} keeps {unresolved} unresolved writes, {waiting} requests wait for its stores",
                    node.id
                ));
            }
        }
        None
    }

    /// A store has chunks of volumes that exist, in groups that its device is or was a member of, and no more
    /// space is in use than they need. (What a device holds of a group that it has left stays there: freeing
    /// it is the daemon's, which is no part of this.)
    fn no_space_leaks(&mut self, at: DeviceAt) {
        let Some(process) = &self.nodes[at.node].process else {
            return;
        };
        let chunks = process.chunks(at.device);
        let used = process.space(at.device).used_bytes / BLOCK;
        let exists = |chunk: &ChunkKey| {
            let bytes = u64::from(chunk.index) * CHUNK_BYTES;
            // The volume of a hostile host has one chunk.
            let is_strange = self.plan.has_strangers && layer_of(self.plan.volumes) == chunk.layer;
            let of_guest = (0..self.plan.volumes).any(|volume| layer_of(volume) == chunk.layer);
            of_guest && bytes < self.plan.chunks * CHUNK_BYTES || is_strange && chunk.index == 0
        };
        let been = |chunk: &ChunkKey| {
            let pg = placement::pg_of(*chunk, self.plan.groups as u32);
            self.been_members.contains(&(pg, at))
        };
        if let Some(chunk) = chunks.iter().find(|c| !exists(c) || !been(c)) {
            let what = format!("{at} holds {chunk:?}, which is not its business");
            return self.fail(what);
        }
        let (mut data, mut pages) = (0, 0);
        for chunk in &chunks {
            match self.nodes[at.node].stamps(at.device, *chunk) {
                Ok(stamps) => {
                    let is_data = stamps.iter().filter(|s| s.holds() == Holds::Data);
                    data += is_data.count() as u64;
                    let is_mapped = |page: &&[BlockStamp]| page.iter().any(|s| *s != NOTHING);
                    pages += stamps
                        .chunks(LEAF_BLOCKS as usize)
                        .filter(is_mapped)
                        .count() as u64;
                }
                Err(error) => return self.fail(format!("{at} cannot read its map: {error}")),
            }
        }
        let most = data + pages + OVERHEAD_UNITS;
        if used + self.lost_on(at) < data || used > most {
            self.fail(format!(
                "{at} uses {used} units for {data} blocks and {pages} pages of their map"
            ));
        }
    }
}
