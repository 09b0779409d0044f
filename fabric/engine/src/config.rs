//! What a fabric is opened with, and why that may fail.

use std::path::PathBuf;

use fabric_store::api::{CoreParams, StoreError};
use fabric_store::error::OpenError;
use fabric_store::file::{Allocation, DeviceError, OpenedAhead};
use fabric_transport::control::NetConfig;
use fabric_types::ids::LayerId;
use fabric_types::{Epoch, Generation, Incarnation, NodeId};

/// Where a node keeps chunks.
#[derive(Debug, Clone)]
pub enum StoreKind {
    /// Nowhere: writes are dropped, reads leave the buffers as they are. For benchmarks.
    Null,
    /// On devices, at least one. The cluster map assigns each placement group to one of them.
    Devices(Vec<DeviceConfig>),
}

/// A device of the node.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// Block device or file.
    pub path: PathBuf,
    /// What to do if there is no store on it.
    pub missing: Missing,
}

/// What to do if there is no store at a device's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Refuse to start, or go without it: [`FabricConfig::may_lack`].
    Refuse,
    /// Nothing at the path: create a file and format it. Anything there that is not a store is refused.
    CreateFile {
        /// Its size.
        size_bytes: u64,
        /// How it gets its space.
        allocation: Allocation,
    },
    /// An existing block device or file whose first bytes are all zero: format it. Other content is refused.
    FormatBlank,
}

/// How eagerly stored blocks are verified in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubConfig {
    /// Off if false.
    pub enabled: bool,
    /// Read bandwidth per device that it may take. A step reads up to 1 MiB, so less is bursty.
    pub bytes_per_second: u64,
    /// Rest after everything has been read once.
    pub pause_seconds: u64,
    /// Rest before the first pass: a node that starts has other things to do.
    pub start_after_seconds: u64,
}

impl Default for ScrubConfig {
    /// On: 16 MiB/s, a pass a day. 1 TiB stored takes 18 hours.
    fn default() -> Self {
        Self {
            enabled: true,
            bytes_per_second: 16 << 20,
            pause_seconds: 24 * 3600,
            start_after_seconds: 60,
        }
    }
}

/// How eagerly scattered data are put in order in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CleanConfig {
    /// Off if false.
    pub enabled: bool,
    /// Bytes per second and device that are moved while guests are at work. A step moves up to 1 MiB, so less
    /// is bursty.
    pub bytes_per_second: u64,
    /// The same while they are not.
    pub idle_bytes_per_second: u64,
    /// Rest before the first pass: a node that starts has other things to do.
    pub start_after_seconds: u64,
}

impl Default for CleanConfig {
    /// On: 16 MiB/s beside guests at work, 512 MiB/s else.
    fn default() -> Self {
        Self {
            enabled: true,
            bytes_per_second: 16 << 20,
            idle_bytes_per_second: 512 << 20,
            start_after_seconds: 5,
        }
    }
}

/// How fast this node's replicas are brought up to date.
#[derive(Debug, Clone, Copy)]
pub struct ResyncConfig {
    /// Bytes read from other replicas in a second while guests' requests reach this node.
    pub bytes_per_second: u64,
    /// The same while none do.
    pub idle_bytes_per_second: u64,
}

impl Default for ResyncConfig {
    /// 16 MiB/s beside guests at work, 1 GiB/s else.
    fn default() -> Self {
        Self {
            bytes_per_second: 16 << 20,
            idle_bytes_per_second: 1 << 30,
        }
    }
}

/// What a fabric is opened with.
#[derive(Debug, Clone)]
pub struct FabricConfig {
    /// This node.
    pub node: NodeId,
    /// This start of it.
    pub incarnation: Incarnation,
    /// The cluster; a device of another one is refused.
    pub cluster: [u8; 16],
    /// Where chunks are kept.
    pub store: StoreKind,
    /// Bounds of each store; `cluster` in it is ignored.
    pub params: CoreParams,
    /// Background verification.
    pub scrub: ScrubConfig,
    /// Background ordering.
    pub clean: CleanConfig,
    /// Background copying from other replicas.
    pub resync: ResyncConfig,
    /// The way to other nodes, if there are any.
    pub net: Option<NetConfig>,
    /// Devices with [`Missing::Refuse`] that cannot be opened are gone without, be they all: other nodes have
    /// replicas. Needs `net`.
    pub may_lack: bool,
    /// Devices that are open already.
    pub opened: OpenedAhead,
}

impl FabricConfig {
    /// A node with default bounds.
    pub fn new(
        node: NodeId,
        incarnation: Incarnation,
        cluster: [u8; 16],
        store: StoreKind,
    ) -> Self {
        Self {
            node,
            incarnation,
            cluster,
            store,
            params: CoreParams::default(),
            scrub: ScrubConfig::default(),
            clean: CleanConfig::default(),
            resync: ResyncConfig::default(),
            net: None,
            may_lack: false,
            opened: OpenedAhead::default(),
        }
    }
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
        fabric_types::io::SECTOR_BYTES
    )]
    VolumeSize {
        /// Asked for.
        size_bytes: u64,
        /// Largest possible.
        max_bytes: u64,
    },
    /// A lease generation does not fit a version.
    #[error("lease generation {0} is above the largest possible; copy the volume to a new one")]
    Generation(u64),
    /// A volume was opened with a lease that is not newer than the last one. Its writes would be taken for
    /// old ones.
    #[error(
        "lease {given} of {layer:?} is not newer than {persisted}, under which it was last open; take a new \
         lease"
    )]
    StaleLease {
        /// The layer.
        layer: LayerId,
        /// Given to `open_volume`.
        given: Generation,
        /// Persisted on the devices.
        persisted: Generation,
    },
    /// The map under which a lease was granted has not come.
    #[error(
        "cluster map {needed} has not reached this node, which knows {known}; look whether it reaches the \
         metadata service"
    )]
    NoMap {
        /// Of the lease.
        needed: Epoch,
        /// The newest here.
        known: Epoch,
    },
    /// No device was configured.
    #[error("no device configured; name at least one")]
    NoDevice,
    /// More devices than a node has.
    #[error("more than {0} devices; configure fewer")]
    TooManyDevices(usize),
    /// All device indexes have been used since the fabric was opened.
    #[error(
        "this daemon has had {0} devices since it was started, and takes no more; restart it: those that \
         were removed do not count then"
    )]
    NoPlace(usize),
    /// There is no store that a device could be added to.
    #[error("the null store has no devices; start the daemon without it")]
    NullStore,
    /// A device could not be opened or created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device has content that is not a store.
    #[error("device {} is not blank and holds no Penstock store; wipe it (`wipefs -a`) if its data are not \
        needed, or name another", .0.display())]
    NotBlank(PathBuf),
    /// The store on a device could not be opened.
    #[error("cannot open the store on {}: {source}", .path.display())]
    Store {
        /// Where.
        path: PathBuf,
        /// What is wrong and how to fix it.
        source: OpenError,
    },
    /// An operation on stored data failed.
    #[error("cannot {verb}: {source}")]
    Operation {
        /// Verb and object.
        verb: &'static str,
        /// Why.
        source: StoreError,
    },
    /// A request to a volume failed.
    #[error("cannot {verb}: {source}")]
    Request {
        /// Verb and object.
        verb: &'static str,
        /// Why.
        source: fabric_types::io::IoError,
    },
    /// Closing while data threads are at work.
    #[error("{0} data threads still have the fabric open; stop them first")]
    InUse(usize),
    /// The fabric was closed.
    #[error("the fabric is closed")]
    Closed,
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Os {
        /// Verb and object.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl FabricError {
    /// For `map_err` on system calls.
    pub(super) fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Os {
            what,
            source: source.into(),
        }
    }
}
