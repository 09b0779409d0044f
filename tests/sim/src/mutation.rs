//! Mistakes that others made, or that the rules of `docs/REPLICATION.md` exist to prevent, made on purpose: a
//! simulator that does not notice them proves nothing.
//!
//! They are made at the seams of the cores (what is handed to them, and what is done with what they want), so
//! that what ships has no switch for them, not even in a build of the whole workspace.

use std::collections::BTreeMap;

use fabric::proto::ids::LayerId;
use fabric::proto::message::BlockStamp;
use zerocopy::FromBytes;

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
}

impl Mutation {
    /// Devices that nodes need for it to show.
    pub fn devices(self) -> usize {
        match self {
            Self::ForgetIncoming => 2,
            _ => 1,
        }
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
