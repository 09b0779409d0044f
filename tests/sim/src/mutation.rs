//! Mistakes that others made, or that the rules of `docs/REPLICATION.md` exist to prevent, made on purpose: a
//! simulator that does not notice them proves nothing.
//!
//! They are made at the seams of the cores (what is handed to them, and what is done with what they want), so
//! that what ships has no switch for them, not even in a build of the whole workspace.

use std::collections::BTreeMap;

use fabric_types::block::BlockStamp;
use fabric_types::ids::LayerId;
use fabric_types::{Command, Incarnation};
use zerocopy::FromBytes;

use crate::pace::Pace;
use crate::queue::Span;

/// A mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Mutation {
    /// A write that a lost replica did not answer is acknowledged before the map has left that replica out.
    AckBeforeShrink,
    /// Clients say of writes in flight that they are resolved, so replicas forget them.
    ForgetWatermark,
    /// A replica that returns says that it lacks nothing, and is believed.
    TrustCleanFlag,
    /// Replicas do not look at the map that a write was made under.
    SkipEpochCheck,
    /// What the returning replica has is copied to the source.
    ResyncFromReturning,
    /// Of the source's blocks only those are compared that were written since the replica left.
    DeltaLogFromDeparture,
    /// A new lease leaves what its predecessor had in flight as it is.
    NoLeaseRecovery,
    /// Clients are not told that all replicas had lost power.
    KeepQuietOfLoss,
    /// A device that a group is coming to is not sent the writes meanwhile, and is said to have them.
    ForgetIncoming,
    /// Replicas answer flushes and do nothing.
    IgnoreFlush,
    /// Replicas answer flushes when they begin with them.
    AckFlushEarly,
    /// Of the replicas, those of one node alone flush.
    FlushOneNode,
    /// A flush ends with the first of a node's devices.
    FlushOneDevice,
    /// Replicas take writes that are to be durable for ordinary ones.
    IgnoreFua,
    /// A fence is remembered, and not persisted.
    KeepFenceInMemory,
    /// Replicas answer fences when they begin to persist them.
    AckFenceEarly,
    /// A replica that was brought up to date asks to be promoted without a flush.
    PromoteUnflushed,
    /// It does so when it begins to flush.
    PromoteEarly,
    /// Meta does not learn that a machine has lost its power, only that its process was started anew.
    ForgetBoot,
    /// A lease that was found to have run out is renewed before the next one is granted.
    RenewWhileGranting,
    /// A host counts a lease from when it heard that it was renewed.
    CountFromAnswer,
    /// Host and leader count a lease for equally long.
    IgnoreDrift,
}

impl Mutation {
    /// Devices that nodes need for it to show.
    pub fn devices(self) -> usize {
        match self {
            Self::ForgetIncoming | Self::FlushOneDevice => 2,
            _ => 1,
        }
    }

    /// The pace at which it is looked for.
    pub fn pace(self) -> Pace {
        match self {
            // A renewal has to come just before the next grant.
            Self::RenewWhileGranting => Pace {
                lease: Span::millis(30),
                ..Pace::WITH_LEASES
            },
            Self::CountFromAnswer | Self::IgnoreDrift => Pace::WITH_LEASES,
            _ => Pace::USUAL,
        }
    }

    /// Whether it is looked for with [`Plan::draw_outages`](crate::Plan::draw_outages).
    pub fn needs_outages(self) -> bool {
        matches!(
            self,
            Self::IgnoreFlush
                | Self::AckFlushEarly
                | Self::FlushOneNode
                | Self::FlushOneDevice
                | Self::IgnoreFua
                | Self::KeepFenceInMemory
                | Self::AckFenceEarly
                | Self::PromoteUnflushed
                | Self::PromoteEarly
                | Self::ForgetBoot
        )
    }

    /// What the store is not asked for, but answered at once.
    pub fn skips(self, command: &Command, incarnation: Incarnation, by: Asker) -> bool {
        let is_flush = matches!(command, Command::Flush { .. });
        match (self, by) {
            (Self::IgnoreFlush, Asker::Client) => is_flush,
            (Self::FlushOneNode, Asker::Client) => is_flush && incarnation.0 >> 32 != 0,
            (Self::KeepFenceInMemory, Asker::Client) => matches!(command, Command::Fence { .. }),
            (Self::PromoteUnflushed, Asker::Round) => is_flush,
            _ => false,
        }
    }

    /// What is answered when the store begins with it.
    pub fn answers_early(self, command: &Command, by: Asker) -> bool {
        let is_flush = matches!(command, Command::Flush { .. });
        match (self, by) {
            (Self::AckFlushEarly, Asker::Client) => is_flush,
            (Self::AckFenceEarly, Asker::Client) => matches!(command, Command::Fence { .. }),
            (Self::PromoteEarly, Asker::Round) => is_flush,
            _ => false,
        }
    }
}

/// Who asks a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// A client, by way of a replica.
    Client,
    /// A round of comparison.
    Round,
}

/// A command that is not durable before its reply.
pub fn without_fua(command: &mut Command) {
    if let Command::Write { fua, .. } | Command::Zero { fua, .. } = command {
        *fua = false;
    }
}

/// Newest version that a replica has stored of each layer.
pub type Newest = BTreeMap<LayerId, u64>;

/// The source's stamps as they are compared by who looks only at what was written since it left: what is not
/// newer counts as what it has itself.
pub fn only_newer(source: &[u8], here: &[u8], newest: u64) -> Vec<u8> {
    let stamp = size_of::<BlockStamp>();
    let mut out = Vec::with_capacity(source.len());
    for (theirs, ours) in source.chunks_exact(stamp).zip(here.chunks_exact(stamp)) {
        let read = BlockStamp::read_from_bytes(theirs).expect("its size");
        let shown = if read.version <= newest { ours } else { theirs };
        out.extend_from_slice(shown);
    }
    out
}
