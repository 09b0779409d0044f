//! A group with a replica that is being brought up to date, and its round.

use fabric_types::Epoch;
use fabric_types::membership::{Member, ReplicaSet};

use super::{PAUSE_MAX_US, PAUSE_MIN_US};
use crate::resync::Resync;

/// A round under way.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) source: Member,
    pub(super) machine: Resync,
    /// It has ended well: when meta was asked.
    pub(super) asked_us: Option<u64>,
}

/// A group in which a replica of this node is syncing; one that the group is coming to has a [name of its
/// own](fabric_types::incoming).
#[derive(Debug)]
pub(super) struct SyncingGroup {
    pub(super) set: ReplicaSet,
    pub(super) since: Epoch,
    pub(super) round: Option<Round>,
    pub(super) failures: u32,
    /// No round begins before.
    pub(super) begin_us: u64,
    /// When a round last took something over or got further than those before, or the first one was to begin.
    pub(super) progress_us: u64,
    /// Blocks that the round has taken over, as far as they were counted.
    pub(super) counted_blocks: u64,
    /// Pages that a round has compared, the most.
    pub(super) leaves_max: u64,
}

impl SyncingGroup {
    /// The in-sync replicas that it can be compared with.
    pub(super) fn sources(&self) -> impl Iterator<Item = Member> {
        let members = self.set.members();
        self.set.in_sync().iter().map(|i| members[i])
    }

    /// Whether the round goes on by the map: whoever it is compared with is still what it was. Once meta has
    /// been asked that does not matter any more.
    pub(super) fn may_go_on(&self, round: &Round) -> bool {
        let source = round.source;
        let same = |m: Member| {
            (m.node, m.incarnation, m.since) == (source.node, source.incarnation, source.since)
        };
        round.machine.since() == self.since
            && (round.asked_us.is_some() || self.sources().any(same))
    }

    /// Whether a round is to begin, now or later.
    pub(super) fn is_due(&self) -> bool {
        self.round.is_none() && !self.set.in_sync().is_empty()
    }

    /// Whether meta has been asked to promote the replica.
    pub(super) fn has_ended_well(&self) -> bool {
        let asked_us = self.round.as_ref().and_then(|round| round.asked_us);
        asked_us.is_some()
    }

    /// Looks how far the round is. That it compares pages is progress only where none before it did: a round
    /// that always fails on the same block compares all others each time.
    pub(super) fn note_progress(&mut self, now_us: u64) {
        let Some(round) = &self.round else {
            return;
        };
        let done = round.machine.progress();
        if done.blocks > self.counted_blocks || done.leaves > self.leaves_max {
            self.progress_us = now_us;
        }
        self.counted_blocks = self.counted_blocks.max(done.blocks);
        self.leaves_max = self.leaves_max.max(done.leaves);
    }

    pub(super) fn pause(&mut self, now_us: u64) {
        let pause = PAUSE_MIN_US << self.failures.min(8);
        self.begin_us = now_us + pause.min(PAUSE_MAX_US);
        self.failures = self.failures.saturating_add(1);
    }
}
