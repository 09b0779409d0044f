//! Disks that go bad and run full, as the seed says: when, where, what guests may then hear, and what is
//! repaired in the end.
//!
//! **Rot.** A bit of a stored block turns over. Whatever copy of the block the disk has at rest is hit, so
//! that the node cannot read it until it is written again. The plan leaves another replica in sync that can.
//! Later faults may take that one away: what guests may then hear is told by [`Sim::is_excused`].
//!
//! **Spoilt.** The same, but that the disk answers for the block with an error until it is written again.
//! When a process that starts cannot read its log for that, the sector reads again, and has rotted.
//!
//! **No room.** The device file lies on a file system that has no room for blocks that were never written
//! before, for a while.

use std::collections::{BTreeMap, BTreeSet};

use fabric_replication::repair::queue::BadBlock;
use fabric_types::PgId;
use fabric_types::io::{IoError, Op};
use fabric_types::membership::ReplicaSet;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Event, Fault, Sim, layer_of};
use crate::checker::{self, Tag, ZERO};
use crate::host::Lane;
use crate::metadata::Change;
use crate::node::{Device, DeviceAt};
use crate::queue::Span;
use crate::sim::faults::ACTIVE;
use crate::workload::{CHUNK_SECTORS, GuestOp, SPOT_SECTORS};

const BLOCK_BYTES: u64 = 4096;
pub(super) const BLOCK_SECTORS: u64 = 8;
/// Of a byte, the one that turns over.
const BIT: u8 = 3;
const CHUNK_BLOCKS: u64 = CHUNK_SECTORS / BLOCK_SECTORS;
/// Within this time after it was asked for a block is read and repaired.
const WAIT_MAX: Span = Span::seconds(60);
/// How often, and for how long, a lease that has run out is waited for.
const LEASE_WAITS: usize = 20;
const LEASE_WAIT: Span = Span::millis(500);

/// A block: its device, its volume, its number there.
type BlockAt = (DeviceAt, usize, u64);

/// What became of the disks so far.
#[derive(Debug, Default)]
pub struct BadDisks {
    /// Blocks that ever were damaged.
    rotten: BTreeSet<BlockAt>,
    /// Blocks that the disk ever refused to give, likewise.
    spoilt: BTreeSet<BlockAt>,
    /// Of the rotten ones, those that nobody could read when the node was brought up to date.
    lost: BTreeSet<BlockAt>,
    /// Devices that ever had no room.
    been_full: BTreeSet<DeviceAt>,
    /// Groups that ever had none but such for replicas in sync. Whoever wrote then may hear it, though others
    /// are in sync by then.
    without_room: BTreeSet<PgId>,
}

impl BadDisks {
    /// Whether a device ever was unable to give the block.
    fn was_bad(&self, block: &BlockAt) -> bool {
        self.rotten.contains(block) || self.spoilt.contains(block)
    }

    /// Whether a block of a volume was damaged on any device: others may have been brought up to date by it.
    pub(super) fn was_bad_anywhere(&self, volume: usize, block: u64) -> bool {
        let mut bad = self.rotten.iter().chain(&self.spoilt);
        bad.any(|(_, of, at)| (*of, *at) == (volume, block))
    }
}

/// What happens to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Harm {
    Rot,
    Spoil,
}

impl Sim {
    /// Draws when the plan's disk faults happen.
    pub(super) fn schedule_disk_faults(&mut self) {
        let plan = self.plan.faults;
        for _ in 0..plan.rots {
            let at = self.now + Span(self.disk_rng.random_range(0..2 * ACTIVE.0));
            self.at(at, Event::Fault(Fault::Rot));
        }
        for _ in 0..plan.full_disks {
            let node = self.disk_rng.random_range(0..self.plan.nodes);
            let at = self.now + Span(self.disk_rng.random_range(0..ACTIVE.0));
            let blocks = [0, 3, 40][self.disk_rng.random_range(0..3)];
            let device = self.any_device(node);
            self.at(at, Event::Fault(Fault::Full(device, blocks)));
            let again = at + Span(self.disk_rng.random_range(0..2_000_000));
            self.at(again, Event::Fault(Fault::FreeSpace(device)));
        }
    }

    /// Draws when disks begin not to give blocks. Nothing else that a seed draws changes with it.
    pub(super) fn schedule_spoils(&mut self) {
        for _ in 0..self.plan.faults.spoils {
            let at = self.now + Span(self.spoil_rng.random_range(0..2 * ACTIVE.0));
            let tie = self.spoil_rng.random();
            self.queue.push(at, tie, Event::Fault(Fault::Spoil));
        }
    }

    /// Some blocks of one place turn bad, on one node or several.
    pub(super) fn rot(&mut self) {
        let mut rng = self.disk_rng.clone();
        self.harm(Harm::Rot, &mut rng);
        self.disk_rng = rng;
    }

    /// Disks do not give some blocks of one place any more.
    pub(super) fn spoil(&mut self) {
        let mut rng = self.spoil_rng.clone();
        self.harm(Harm::Spoil, &mut rng);
        self.spoil_rng = rng;
    }

    fn harm(&mut self, harm: Harm, rng: &mut ChaCha8Rng) {
        let guest = &self.guests[rng.random_range(0..self.guests.len())];
        let volume = guest.volume;
        let first = guest.spots[rng.random_range(0..guest.spots.len())];
        for _ in 0..rng.random_range(1..=4) {
            let node = rng.random_range(0..self.nodes.len());
            // Without room the log cannot say what is durable, so that damage to that passes for a write that
            // was cut short.
            let device = self.any_device(node);
            if self.disks.been_full.contains(&device) {
                continue;
            }
            let found = self.stored_at_rest(device, volume, first / BLOCK_SECTORS);
            let mut blocks: Vec<u64> = found.keys().copied().collect();
            self.keep_spared(device, volume, &mut blocks);
            if blocks.is_empty() {
                continue;
            }
            let block = blocks[rng.random_range(0..blocks.len())];
            let places = &found[&block];
            let disk = &mut self.device(device).disk;
            let number = match harm {
                Harm::Rot => {
                    let byte = rng.random_range(0..BLOCK_BYTES);
                    places.iter().for_each(|at| disk.flip_bit(at + byte, BIT));
                    self.disks.rotten.insert((device, volume, block));
                    41
                }
                Harm::Spoil => {
                    places.iter().for_each(|at| disk.spoil(*at));
                    self.disks.spoilt.insert((device, volume, block));
                    42
                }
            };
            let numbers = [
                number,
                node as u64 | (device.device as u64) << 32,
                volume as u64,
                block,
                places.len() as u64,
            ];
            self.trace.note(self.now, &numbers, || {
                format!(
                    "{device}: block {block} of volume {volume} turns bad ({harm:?}), in {places:?}"
                )
            });
        }
    }

    /// A scenario has done so to a block of the first volume.
    pub(super) fn note_spoilt(&mut self, at: DeviceAt, block: u32) {
        self.disks.spoilt.insert((at, 0, u64::from(block)));
    }

    /// What a node's disks did not give reads again, and has rotted. False: they gave all.
    pub(super) fn let_spoilt_rot(&mut self, node: usize) -> bool {
        let mut any = false;
        for Device { disk, .. } in &mut self.nodes[node].devices {
            for place in disk.spoilt() {
                disk.repair(place);
                disk.flip_bit(place, BIT);
                any = true;
            }
        }
        let spoilt = self.disks.spoilt.iter().copied();
        let here = spoilt.filter(|(at, ..)| at.node == node);
        self.disks.rotten.extend(here);
        any
    }

    /// A replica that was started anew is the authority. Of what turned bad on it before, a store cannot tell
    /// what nobody had flushed from a write that was cut short (`docs/REPLICATION.md`), nor, if it
    /// `lost_power`, what only the last flush before that made durable: what its log said of that was in the
    /// device's cache.
    pub(crate) fn lose_rotten(&mut self, change: &Change, lost_power: bool) {
        for (at, volume, block) in self.disks.rotten.clone() {
            let chunk = (block / CHUNK_BLOCKS) as u32;
            if at == change.at && self.group_of(volume, chunk) == change.pg {
                let is_hit = |sector: u64| sector / BLOCK_SECTORS == block;
                self.checker.lose_unknown(volume, lost_power, is_hit);
            }
        }
    }

    /// A node takes over that nobody can read a block.
    pub(super) fn note_lost(&mut self, node: usize, bad: BadBlock) {
        let BadBlock { chunk, block, .. } = bad;
        let volume = (0..self.plan.volumes).find(|v| layer_of(*v) == chunk.layer);
        let volume = volume.expect("hostile hosts store nothing that can be lost");
        let block = u64::from(chunk.index) * CHUNK_BLOCKS + u64::from(block);
        let numbers = [40, node as u64, volume as u64, block];
        self.trace.note(self.now, &numbers, || {
            format!("node {node}: block {block} of volume {volume} is lost")
        });
        let device = bad.device as usize;
        let at = DeviceAt { node, device };
        self.disks.rotten.insert((at, volume, block));
        self.disks.lost.insert((at, volume, block));
    }

    /// Whether nobody could read a block, and somebody was brought up to date without it.
    pub(super) fn has_lost(&self) -> bool {
        !self.disks.lost.is_empty()
    }

    /// Blocks that a device's store knows or knew to be lost, at most: they need no space.
    pub(super) fn lost_on(&self, device: DeviceAt) -> u64 {
        let lost = self.disks.lost.iter();
        lost.filter(|(at, ..)| *at == device).count() as u64
    }

    /// Where a device has the blocks of a place at rest, whether its store uses them or not: known by what
    /// they show.
    fn stored_at_rest(&self, at: DeviceAt, volume: usize, first: u64) -> BTreeMap<u64, Vec<u64>> {
        let disk = &self.nodes[at.node].devices[at.device].disk;
        let mut found: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        let (mut bytes, mut tags) = (vec![0; BLOCK_BYTES as usize], Vec::new());
        for at in disk.written_blocks() {
            let place = at * BLOCK_BYTES;
            disk.peek(place, &mut bytes);
            for block in first..first + SPOT_SECTORS / BLOCK_SECTORS {
                let shows = checker::tags_of(&bytes, volume, block * BLOCK_SECTORS, &mut tags);
                let is_named = tags.iter().any(|tag| *tag != ZERO);
                if shows.is_ok() && is_named && disk.is_flushed(place) {
                    found.entry(block).or_default().push(place);
                }
            }
        }
        found
    }

    /// Leaves those blocks of which another replica in sync, which runs, has a copy at rest, and never had a
    /// bad one.
    fn keep_spared(&self, device: DeviceAt, volume: usize, blocks: &mut Vec<u64>) {
        let Some(&first) = blocks.first() else {
            return;
        };
        let mut at_rest = BTreeMap::new();
        blocks.retain(|&block| {
            let pg = self.group_of(volume, (block / CHUNK_BLOCKS) as u32);
            let mut in_sync = self.meta.groups()[pg.0 as usize].in_sync();
            in_sync.any(|(member, at)| {
                let stored = at_rest
                    .entry(at)
                    .or_insert_with(|| self.stored_at_rest(at, volume, first));
                at.node != device.node
                    && self.nodes[at.node].runs(member.incarnation)
                    && !self.disks.was_bad(&(at, volume, block))
                    && stored.contains_key(&block)
            })
        });
    }

    /// The file system below a device has no more room than for so many blocks; `None`: for all.
    pub(super) fn set_room(&mut self, at: DeviceAt, blocks: Option<u64>) {
        if blocks.is_some() {
            self.disks.been_full.insert(at);
        }
        self.device(at).is_full = blocks.is_some();
        self.device(at).disk.set_host_room(blocks);
        self.note_room();
    }

    /// Notes which groups have no room. To be called when the map or the room has changed.
    pub(super) fn note_room(&mut self) {
        if self.disks.been_full.is_empty() {
            return;
        }
        for (pg, group) in (0..).zip(self.meta.groups()) {
            let mut devices = group.in_sync().map(|(_, at)| at);
            if devices.all(|at| self.disks.been_full.contains(&at)) {
                self.disks.without_room.insert(PgId(pg));
            }
        }
    }

    /// Whether what happened to disks explains that a guest hears this error.
    ///
    /// Invariant *Verified*: a read fails only if there is a block that no replica in sync can read. A write
    /// of a part of a block fails if each of them lacks what it would have to complete, be it not the same
    /// block.
    pub(super) fn is_excused(
        &self,
        host: usize,
        volume: usize,
        op: &GuestOp,
        err: IoError,
    ) -> bool {
        let in_sync = |set: &ReplicaSet| -> Vec<usize> {
            let members = set.in_sync().iter().map(|at| set.members()[at]);
            members.map(|member| member.node.0 as usize).collect()
        };
        // A host does not know on which of a node's devices a group is.
        let any_device = |node: usize, block: u64, is: &dyn Fn(&BlockAt) -> bool| {
            let mut devices = (0..self.plan.devices).map(|device| DeviceAt { node, device });
            devices.any(|at| is(&(at, volume, block)))
        };
        let was_bad = |node, block| any_device(node, block, &|at| self.disks.was_bad(at));
        let has_been_full = |node: usize| {
            let mut devices = (0..self.plan.devices).map(|device| DeviceAt { node, device });
            devices.any(|at| self.disks.been_full.contains(&at))
        };
        let of_kind = |node: usize, block| match err {
            IoError::Corrupt => any_device(node, block, &|at| self.disks.rotten.contains(at)),
            _ => any_device(node, block, &|at| self.disks.spoilt.contains(at)),
        };
        let (first, end) = (op.first, op.first + op.sectors);
        let (first, end) = (first / BLOCK_SECTORS, end.div_ceil(BLOCK_SECTORS));
        let blocks_in = |set: &ReplicaSet| {
            let pg = set.pg();
            let is_in =
                move |block: &u64| self.group_of(volume, (block / CHUNK_BLOCKS) as u32) == pg;
            (first..end).filter(is_in)
        };
        let is_hit = |set: &ReplicaSet| {
            let nodes = in_sync(set);
            let mut blocks = blocks_in(set);
            match (err, op.op) {
                (IoError::NoSpace, _) => {
                    // Who was full before is asked alone, and the others have nothing of what it refuses.
                    let is_full = nodes.iter().any(|node| has_been_full(*node));
                    let is_full = is_full || self.disks.without_room.contains(&set.pg());
                    is_full && blocks.next().is_some()
                }
                (IoError::Corrupt | IoError::Device(libc::EIO), Op::Read) => {
                    blocks.any(|block| nodes.iter().all(|&node| was_bad(node, block)))
                }
                (IoError::Corrupt | IoError::Device(libc::EIO), _) => {
                    let blocks: Vec<u64> = blocks.collect();
                    let any = |node, is: &dyn Fn(usize, u64) -> bool| {
                        blocks.iter().any(|&block| is(node, block))
                    };
                    nodes.iter().all(|&node| any(node, &was_bad))
                }
                _ => false,
            }
        };
        // What it heard of replicas it may have heard by an older map.
        let host = &self.hosts[host];
        let past = host.past.iter().filter(|(until, _)| *until >= op.since);
        let known = past.map(|(_, sets)| sets).chain([&host.sets]);
        let mut known = known.flatten();
        // The error is of the gravest kind that was met: a disk's own. It may have been met on one that is
        // out since, in another block than the one that nobody can read (71096771).
        let is_met = |set: &ReplicaSet| {
            let nodes = in_sync(set);
            blocks_in(set).any(|block| nodes.iter().any(|&node| of_kind(node, block)))
        };
        let is_right_error = err == IoError::NoSpace || known.clone().any(is_met);
        is_right_error && known.any(is_hit)
    }

    /// Whether blocks were damaged. One that nobody in sync can read keeps whoever lacks it from coming back.
    pub(super) fn has_rotten(&self) -> bool {
        !self.disks.rotten.is_empty() || !self.disks.spoilt.is_empty()
    }

    /// What is still bad on replicas in sync is found by scrubbing, and repaired by being read; what nobody
    /// can read any more is written again. False: nothing was bad.
    pub(super) fn repair_rot(&mut self) -> bool {
        let mut any = false;
        for node in 0..self.nodes.len() {
            self.run_until(WAIT_MAX, |sim| sim.nodes[node].is_idle());
            let bad = self.scrubbed(node);
            if bad.is_empty() || self.failure.is_some() {
                continue;
            }
            any = true;
            self.prefer(node);
            for (volume, block) in bad {
                self.read_again(node, volume, block);
            }
        }
        any
    }

    /// After that nothing is bad any more, anywhere.
    pub(super) fn nothing_is_rotten(&mut self) {
        for node in 0..self.nodes.len() {
            let bad = self.scrubbed(node);
            if !bad.is_empty() {
                self.fail(format!(
                    "node {node} has been read, and blocks {bad:?} are not repaired"
                ));
            }
        }
    }

    /// Blocks that a node's scrubber finds bad, of groups that it is in sync in.
    fn scrubbed(&mut self, at: usize) -> BTreeSet<(usize, u64)> {
        let process = self.nodes[at].process.as_ref();
        if process.is_some_and(|process| process.in_flight() > 0) {
            return BTreeSet::new();
        }
        let findings = self.nodes[at].find_bad();
        let block_of = |bad: &BadBlock| {
            let (chunk, device) = (bad.chunk, bad.device as usize);
            let volume = (0..self.plan.volumes).find(|v| layer_of(*v) == chunk.layer)?;
            let pg = self.group_of(volume, chunk.index);
            let group = &self.meta.groups()[pg.0 as usize];
            let here = DeviceAt { node: at, device };
            let is_in = group.in_sync().any(|(_, at)| at == here);
            is_in.then_some((
                volume,
                u64::from(chunk.index) * CHUNK_BLOCKS + u64::from(bad.block),
            ))
        };
        findings.iter().filter_map(block_of).collect()
    }

    /// From now on hosts read from this node first, if it is in sync.
    fn prefer(&mut self, node: usize) {
        let sets = self.meta.sets();
        let turned = sets.iter().map(|set| {
            let mut members = set.members().to_vec();
            members.sort_by_key(|member| member.node.0 as usize != node);
            let turned = ReplicaSet::new(set.pg(), set.epoch(), set.min_in_sync(), members);
            turned.with_power_lost(set.power_lost())
        });
        let turned: Vec<ReplicaSet> = turned.collect();
        for host in 0..self.hosts.len() {
            self.close_conns_of(host);
            self.hosts[host].life += 1;
            let nodes = self.plan.nodes;
            let plan = &self.plan;
            let lanes = (0..plan.lanes).map(|lane| Lane::new(lane, turned.clone(), plan));
            self.hosts[host].lanes = lanes.collect();
            for lane in 0..self.plan.lanes {
                for node in 0..nodes {
                    self.connect(host, lane, node);
                }
            }
        }
    }

    fn read_again(&mut self, node: usize, volume: usize, block: u64) {
        let errors = self.ops.1;
        self.ask_end(volume, Op::Read, block);
        if self.ops.1 > errors {
            self.trace.note(self.now, &[39, block], || {
                format!("nobody can read block {block} of volume {volume}, nor can node {node}")
            });
            self.ask_end(volume, Op::Write { fua: false }, block);
        }
    }

    /// Has a guest ask for one block, and waits until nothing of it is left.
    fn ask_end(&mut self, volume: usize, op: Op, block: u64) {
        let guest = self.guests.iter().position(|g| g.volume == volume);
        let guest = guest.expect("each volume has a guest");
        // Where leases end by time this one may have, until it is renewed.
        let is_taken = |sim: &mut Self| {
            let tag = Tag(sim.next_tag);
            sim.next_tag += 1;
            let asked = GuestOp {
                op,
                first: block * BLOCK_SECTORS,
                sectors: BLOCK_SECTORS,
                tag,
                begun: None,
                since: sim.now,
                lane: 0,
                memory: vec![0; BLOCK_BYTES as usize].into(),
            };
            sim.submit(guest, asked).is_some()
        };
        let mut taken = is_taken(self);
        for _ in 0..LEASE_WAITS {
            if taken || !self.has_lease_time() {
                break;
            }
            self.run_until(LEASE_WAIT, |_| false);
            taken = is_taken(self);
        }
        if !taken {
            return self.fail("a client without requests is busy");
        }
        let done = self.run_until(WAIT_MAX, |sim| {
            let lanes = sim.hosts.iter().flat_map(|host| &host.lanes);
            let mut left = lanes.map(|lane| lane.client.left_over());
            sim.guests[guest].in_flight.is_empty() && left.all(|left| left == 0)
        });
        if !done {
            self.fail(format!(
                "{op:?} of block {block} of volume {volume} does not end"
            ));
        }
    }
}
