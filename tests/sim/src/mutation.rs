//! Mistakes that others made, or that the rules of `docs/REPLICATION.md` exist to prevent, made on purpose: a
//! simulator that does not notice them proves nothing.
//!
//! They are made at the seams of the cores (what is handed to them, and what is done with what they want), so
//! that what ships has no switch for them, not even in a build of the whole workspace.

use std::collections::BTreeMap;

use fabric_replication::fence::Grant;
use fabric_types::block::BlockStamp;
use fabric_types::ids::LayerId;
use fabric_types::{Command, Incarnation, NodeId, Request};
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
    /// A host uses its lease until it hears of a newer one.
    IgnoreEnd,
    /// The leader grants a lease before the last one has run out.
    GrantBeforeEnd,
    /// A returning replica takes blocks of equal versions for equal, whatever their checksums.
    CompareVersionsOnly,
    /// Disks answer flushes and keep in their caches what was written.
    IgnoreDeviceFlush,
    /// Replicas take zeroes that are to be durable for ordinary ones.
    IgnoreFuaOfZero,
    /// Replicas do not check the lease of a change.
    SkipLeaseCheck,
    /// Nodes do not check whether a layer is open to the sender.
    SkipReachCheck,
    /// Replicas take restored versions of generations that were not granted.
    SkipVersionCheck,
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
            Self::CountFromAnswer | Self::IgnoreDrift | Self::IgnoreEnd | Self::GrantBeforeEnd => {
                Pace::WITH_LEASES
            }
            _ => Pace::USUAL,
        }
    }

    /// Blocks of replicas that are not in sync that are forged, for it to show.
    pub fn forges(self) -> u32 {
        match self {
            Self::CompareVersionsOnly => 3,
            _ => 0,
        }
    }

    /// Returns whether the mutation shows only in runs with hostile hosts.
    pub fn needs_strangers(self) -> bool {
        matches!(
            self,
            Self::SkipLeaseCheck | Self::SkipReachCheck | Self::SkipVersionCheck
        )
    }

    /// Whether replicas take a change from a node of the cluster without looking at the lease, which is
    /// `granted`.
    pub fn skips_lease_check(self, node: NodeId, request: &Request, granted: Grant) -> bool {
        match self {
            // A comparison the wrong way round changes its source, which has no lease of it.
            Self::SkipLeaseCheck | Self::ResyncFromReturning => true,
            Self::SkipVersionCheck => {
                matches!(request.command, Command::Restore { .. })
                    && granted.holder == Some(node)
                    && granted.generation >= request.generation
            }
            _ => false,
        }
    }

    /// Whether it shows in one of forty seeds or fewer.
    pub fn is_rare(self) -> bool {
        matches!(
            self,
            Self::ForgetWatermark
                | Self::NoLeaseRecovery
                | Self::KeepQuietOfLoss
                | Self::KeepFenceInMemory
                | Self::AckFenceEarly
                | Self::PromoteEarly
                | Self::RenewWhileGranting
                | Self::CountFromAnswer
        )
    }

    /// Whether all volumes are in write-through mode, for it to show.
    pub fn writes_through(self) -> bool {
        self == Self::IgnoreFuaOfZero
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
                | Self::IgnoreDeviceFlush
                | Self::IgnoreFuaOfZero
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

/// A command that is not durable before its reply, where the mistake says so.
pub fn without_fua(mutation: Mutation, command: &mut Command) {
    match (mutation, command) {
        (Mutation::IgnoreFua, Command::Write { fua, .. } | Command::Zero { fua, .. })
        | (Mutation::IgnoreFuaOfZero, Command::Zero { fua, .. }) => *fua = false,
        _ => {}
    }
}

/// Newest version that a replica has stored of each layer.
pub type Newest = BTreeMap<LayerId, u64>;

/// The source's stamps as they are compared by who looks only at what was written since it left: what is not
/// newer counts as what it has itself.
pub fn only_newer(source: &[u8], here: &[u8], newest: u64) -> Vec<u8> {
    shown(source, here, |theirs, _| theirs.version <= newest)
}

/// The source's stamps as they are compared by who looks at versions alone: what has the version that it has
/// itself counts as the same.
pub fn by_version(source: &[u8], here: &[u8]) -> Vec<u8> {
    shown(source, here, |theirs, ours| theirs.version == ours.version)
}

/// The source's stamps, and in place of those that count as equal this side's.
fn shown(
    source: &[u8],
    here: &[u8],
    is_equal: impl Fn(&BlockStamp, &BlockStamp) -> bool,
) -> Vec<u8> {
    let stamp = size_of::<BlockStamp>();
    let read = |bytes| BlockStamp::read_from_bytes(bytes).expect("its size");
    let mut out = Vec::with_capacity(source.len());
    for (theirs, ours) in source.chunks_exact(stamp).zip(here.chunks_exact(stamp)) {
        let same = is_equal(&read(theirs), &read(ours));
        out.extend_from_slice(if same { ours } else { theirs });
    }
    out
}
