//! The end of a run: everything is repaired, and then everything must come to rest.

use fabric_types::PgId;
use fabric_types::block::BlockStamp;
use fabric_types::ids::ChunkKey;
use fabric_types::membership::Member;

use super::{Fault, Sim, layer_of};
use crate::node::DeviceAt;
use crate::queue::Span;
use crate::workload::CHUNK_SECTORS;

/// Within this time after all is repaired, all is well.
const WAIT_MAX: Span = Span::seconds(300);
/// Within this time the cluster repairs itself, unless something was lost.
const LOOK: Span = Span::seconds(40);
/// How often what is bad is looked for and read.
const REPAIRS_MAX: usize = 5;
/// Then nobody asks for anything for so long.
const REST: Span = Span::seconds(2);

impl Sim {
    /// Repairs everything and waits until every request of every guest is answered.
    pub fn heal(&mut self) {
        if self.failure.is_some() {
            return;
        }
        self.on_fault(Fault::Peace);
        let all_done = |sim: &Self| {
            let mut guests = sim.guests.iter();
            guests.all(|g| g.left == 0 && g.in_flight.is_empty() && !g.suspended)
                && sim.orphans.is_empty()
                && sim.takeovers.is_empty()
        };
        let done = self.run_until(WAIT_MAX, all_done);
        if !done && self.failure.is_none() {
            let waiting: Vec<usize> = self.guests.iter().map(|g| g.in_flight.len()).collect();
            let orphans = self.orphans.len();
            let takeovers: Vec<(usize, usize)> = self.takeovers.keys().copied().collect();
            let groups = self.meta.groups();
            self.fail(format!(
                "all is repaired, and guests still wait for {waiting:?} requests, {orphans} of guests that \
                 left have not ended, \
                 volumes are being taken over, by hosts: {takeovers:?}; map: {groups:?}"
            ));
        }
    }

    /// All replicas hold the same, and nothing is left over anywhere.
    pub fn converge(&mut self) {
        if self.failure.is_some() {
            return;
        }

        if self.plan.devices > 1 {
            // Devices that were to be emptied take data again: what moves for that has begun by then.
            self.run_until(REST, |_| false);
        }
        let rotten = self.has_rotten();
        let all_in_sync = |sim: &Self| {
            let mut groups = sim.meta.groups().iter();
            let runs = |m: &Member| sim.nodes[m.node.base().0 as usize].runs(m.incarnation);
            groups.all(|g| sim.meta.is_whole(g) && (!rotten || g.members.iter().all(runs)))
        };
        if rotten && !self.run_until(LOOK, all_in_sync) {
            self.repair_rot();
        }
        if !self.run_until(WAIT_MAX, all_in_sync) && self.failure.is_none() {
            let groups = self.meta.groups();
            self.fail(format!(
                "all is repaired, and a group stays degraded: {groups:?}"
            ));
        }
        let quiet = self.run_until(WAIT_MAX, |sim| {
            sim.nodes.iter().all(crate::node::Node::is_idle)
        });
        if !quiet && self.failure.is_none() {
            let busy = self.nodes.iter().filter(|node| !node.is_idle());
            let what: String = busy.map(crate::node::Node::unrest).collect();
            self.fail(format!(
                "all is repaired, and a store does not come to rest: {what}"
            ));
        }
        // Somebody may not know the newest map yet, and leave it to another to answer.
        for _ in 0..REPAIRS_MAX {
            if !rotten || !self.repair_rot() {
                break;
            }
            self.run_until(REST, |_| false);
            self.run_until(WAIT_MAX, all_in_sync);
        }
        // Stores fold in what is new, and free what is not needed any more, once they are idle for a while. A
        // report of before may take somebody out meanwhile.
        for _ in 0..REPAIRS_MAX {
            self.run_until(REST, |_| false);
            if all_in_sync(self) {
                break;
            }
            self.run_until(WAIT_MAX, all_in_sync);
        }
        self.nothing_is_left_over();
        self.no_later_version_is_stored();
        self.nothing_is_rotten();
        for pg in 0..self.plan.groups {
            self.replicas_agree(PgId(pg as u64));
        }
    }

    /// Reads every place where guests wrote from every in-sync member, and compares.
    fn replicas_agree(&mut self, pg: PgId) {
        let in_sync = self.running_in_sync(pg);
        for guest in 0..self.guests.len() {
            let volume = self.guests[guest].volume;
            for (chunk, range) in self.places_in(guest, pg) {
                self.agree_on(&in_sync, volume, chunk, range);
            }
            for chunk in 0..self.plan.chunks as u32 {
                if self.group_of(volume, chunk) == pg {
                    self.versions_agree(&in_sync, volume, chunk);
                }
            }
        }
    }

    /// Devices on which a group is in sync, of processes that run.
    pub(super) fn running_in_sync(&self, pg: PgId) -> Vec<DeviceAt> {
        let members = self.meta.groups()[pg.0 as usize].in_sync();
        members
            .filter(|(m, at)| self.nodes[at.node].runs(m.incarnation))
            .map(|(_, at)| at)
            .collect()
    }

    /// Where a guest writes in a group: chunks, and byte ranges (offset, length) of them.
    pub(super) fn places_in(&self, guest: usize, pg: PgId) -> Vec<(u32, (u32, u32))> {
        let guest = &self.guests[guest];
        let places = guest.spots.iter().flat_map(|first| pieces(*first));
        let is_in = |chunk: u32| {
            u64::from(chunk) < self.plan.chunks && self.group_of(guest.volume, chunk) == pg
        };
        places.filter(|(chunk, _)| is_in(*chunk)).collect()
    }

    fn agree_on(&mut self, devices: &[DeviceAt], volume: usize, index: u32, range: (u32, u32)) {
        let layer = layer_of(volume);
        let mut first: Option<(DeviceAt, Vec<u8>)> = None;
        for &at in devices {
            let node = &mut self.nodes[at.node];
            let process = node.process.as_ref().expect("it runs");
            if process.in_flight() > 0 {
                self.fail(format!(
                    "node {} is at work, and nobody asked for anything",
                    at.node
                ));
                return;
            }
            let bytes = match node.peek(at.device, ChunkKey { layer, index }, range) {
                Ok(bytes) => bytes,
                Err(error) => {
                    self.fail(format!(
                        "{at} is in sync and cannot read volume {volume} chunk {index}: {error}"
                    ));
                    return;
                }
            };
            match &first {
                None => first = Some((at, bytes)),
                Some((other, others)) if *others != bytes => {
                    let pairs = others.chunks(512).zip(bytes.chunks(512));
                    let sector = pairs.take_while(|(a, b)| a == b).count();
                    let tag = |bytes: &[u8]| {
                        let word = bytes[sector * 512..].first_chunk();
                        word.map_or(0, |word| u32::from_le_bytes(*word))
                    };
                    let of = u64::from(index) * CHUNK_SECTORS + u64::from(range.0) / 512;
                    self.fail(format!(
                        "{other} and {at} are in sync and differ: volume {volume} sector {}: tags {} and {}",
                        of + sector as u64, tag(others), tag(&bytes)
                    ));
                    return;
                }
                Some(_) => {}
            }
        }
    }

    /// The members have the same versions of all blocks of a chunk, so that none differs by luck, nor the
    /// next comparison copies it, and none keeps what the others have not.
    fn versions_agree(&mut self, devices: &[DeviceAt], volume: usize, index: u32) {
        let layer = layer_of(volume);
        let mut first: Option<(DeviceAt, Vec<BlockStamp>)> = None;
        for &at in devices {
            let node = &mut self.nodes[at.node];
            let Ok(stamps) = node.stamps(at.device, ChunkKey { layer, index }) else {
                self.fail(format!("{at} cannot read its map"));
                return;
            };
            let Some((other, known)) = &first else {
                first = Some((at, stamps));
                continue;
            };
            let differ = known
                .iter()
                .zip(&stamps)
                .position(|(a, b)| !a.agrees_with(b));
            if let Some(block) = differ {
                self.fail(format!(
                    "{other} and {at} are in sync, and volume {volume} chunk {index} block {block} is {:?} \
                     and {:?}",
                    known[block], stamps[block]
                ));
                return;
            }
        }
    }
}

/// A place where guests write, cut at chunks.
fn pieces(first: u64) -> impl Iterator<Item = (u32, (u32, u32))> {
    let end = first + 256;
    let chunks = first / CHUNK_SECTORS..=(end - 1) / CHUNK_SECTORS;
    chunks.map(move |chunk| {
        let base = chunk * CHUNK_SECTORS;
        let (from, to) = (first.max(base) - base, end.min(base + CHUNK_SECTORS) - base);
        (
            chunk as u32,
            ((from * 512) as u32, ((to - from) * 512) as u32),
        )
    })
}
