//! What a fabric is opened with, and why that may fail.

use crate::proto::{Incarnation, NodeId};

/// Where a node keeps chunks.
#[derive(Debug, Clone)]
pub enum StoreKind {
    /// Nowhere: writes are dropped, reads leave the buffers as they are. For benchmarks.
    Null,
}

/// What a fabric is opened with.
#[derive(Debug, Clone)]
pub struct FabricConfig {
    /// This node.
    pub node: NodeId,
    /// This start of it.
    pub incarnation: Incarnation,
    /// Where chunks are kept.
    pub store: StoreKind,
}

/// Why the fabric did not do it.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// More data threads than lanes.
    #[error("more than {0} data threads; configure fewer")]
    TooManyThreads(usize),
    /// More open volumes than slots.
    #[error("more than {0} volumes open on this node; detach some")]
    TooManyVolumes(u32),
    /// The size is not usable.
    #[error(
        "volume size {size_bytes} is not a multiple of {} bytes, or is above {max_bytes}",
        crate::io::SECTOR_BYTES
    )]
    VolumeSize {
        /// Asked for.
        size_bytes: u64,
        /// Largest possible.
        max_bytes: u64,
    },
    /// A lease generation does not fit a version.
    #[error(
        "lease generation {0} is above the largest possible; restore the volume under a new name"
    )]
    Generation(u64),
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Os {
        /// Verb and object.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}
