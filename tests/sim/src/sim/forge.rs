//! Replicas with the versions of others and another content: a device that came back with what it never was
//! given, and a checksum that fits it.
//!
//! It happens to members that are not in sync when their process starts: before one is again it is compared
//! with one that is, and must take what that has. A member that has asked to be promoted is spared: it has
//! flushed all it has, and may be in sync before anybody knows that its process has ended.

use std::collections::BTreeSet;

use fabric_types::block::Holds;
use fabric_types::ids::ChunkKey;
use fabric_types::membership::Member;
use fabric_types::{Epoch, Incarnation, PgId};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::faults::ACTIVE;
use super::{Event, Fault, Sim, layer_of, rng_of};
use crate::node::{DeviceAt, Promotion};
use crate::queue::Span;

/// What is forged.
pub(super) struct Forging {
    /// For when, and which block.
    rng: ChaCha8Rng,
    /// Blocks that are to be.
    due: u32,
    /// Blocks that were.
    pub done: u32,
    /// Rounds whose members have asked to be promoted.
    asked: BTreeSet<(PgId, Incarnation, Epoch)>,
}

impl Forging {
    /// Nothing yet.
    pub fn new(rng: ChaCha8Rng) -> Self {
        Self {
            rng,
            due: 0,
            done: 0,
            asked: BTreeSet::new(),
        }
    }

    /// A member asks to be promoted.
    pub fn promotion_is_asked(&mut self, asked: &Promotion) {
        self.asked
            .insert((asked.pg, asked.incarnation, asked.since));
    }
}

impl Sim {
    /// Draws when blocks are forged. Beside blocks that cannot be read none is: who lies could not be told.
    pub(super) fn schedule_forges(&mut self, seed: u64) {
        self.forging.rng = rng_of(seed, 6);
        let plan = self.plan.faults;
        if plan.rots + plan.spoils > 0 {
            return;
        }
        for _ in 0..plan.forges {
            let at = self.now + Span(self.forging.rng.random_range(0..ACTIVE.0));
            self.at(at, Event::Fault(Fault::Forge));
        }
    }

    /// The next process that starts finds a block forged, if there is one that may be.
    pub(super) fn forge_at_start(&mut self) {
        self.forging.due += 1;
    }

    /// The process of a node has just started.
    pub(super) fn forge_if_due(&mut self, node: usize) {
        if self.forging.due == 0 {
            return;
        }
        let mut places = Vec::new();
        for device in 0..self.plan.devices {
            let at = DeviceAt { node, device };
            places.extend(
                self.forgeable_on(at)
                    .map(|(chunk, block)| (at, chunk, block)),
            );
        }
        if places.is_empty() {
            return;
        }
        let nth = self.forging.rng.random_range(0..places.len());
        let (at, chunk, block) = places[nth];
        let numbers = [
            43,
            node as u64,
            chunk.layer.0,
            u64::from(chunk.index),
            u64::from(block),
        ];
        self.trace.note(self.now, &numbers, || {
            format!("{at}: block {block} of {chunk:?} is another with the same version")
        });
        match self.nodes[node].forge(at.device, chunk, block) {
            Ok(true) => {
                self.forging.due -= 1;
                self.forging.done += 1;
            }
            // The device is full: another start may find one that is not.
            Ok(false) => {}
            Err(error) => self.fail(format!(
                "{at}: block {block} of {chunk:?} cannot be forged: {error}"
            )),
        }
    }

    /// Blocks with data on a device, in groups that it is a member of and not in sync in.
    fn forgeable_on(&mut self, at: DeviceAt) -> impl Iterator<Item = (ChunkKey, u32)> + use<> {
        let mut found = Vec::new();
        for pg in 0..self.plan.groups {
            let group = &self.meta.groups()[pg];
            let place = group.all.iter().find(|place| place.at == at);
            let Some(Member {
                incarnation, since, ..
            }) = place.map(|place| place.member)
            else {
                continue;
            };
            let asked = (PgId(pg as u64), incarnation, since);
            if self.forging.asked.contains(&asked) || group.in_sync().any(|(_, of)| of == at) {
                continue;
            }
            for volume in 0..self.plan.volumes {
                for index in 0..self.plan.chunks as u32 {
                    if self.group_of(volume, index) == PgId(pg as u64) {
                        let layer = layer_of(volume);
                        self.add_data_of(at, ChunkKey { layer, index }, &mut found);
                    }
                }
            }
        }
        found.into_iter()
    }

    fn add_data_of(&mut self, at: DeviceAt, chunk: ChunkKey, found: &mut Vec<(ChunkKey, u32)>) {
        let Ok(stamps) = self.nodes[at.node].stamps(at.device, chunk) else {
            return;
        };
        let data = (0..)
            .zip(&stamps)
            .filter(|(_, stamp)| stamp.holds() == Holds::Data);
        found.extend(data.map(|(block, _)| (chunk, block)));
    }
}
