//! Newtypes for every identity and counter of the cluster's metadata.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

counter! {
    /// A node of the cluster; also its Raft identity. Chosen by whoever adds the node, never used again.
    NodeId(u64)
}
counter! {
    /// A device, numbered by meta in the order of registration.
    DeviceId(u64)
}
counter! {
    /// A pool, numbered by meta.
    PoolId(u32)
}
counter! {
    /// Index of a placement group within its pool.
    PgIndex(u32)
}
counter! {
    /// A volume, numbered by meta, never used again: what replicas and leases speak of.
    VolumeId(u64)
}
counter! {
    /// One generation of a volume's data, numbered by meta, never used again: the key of chunks on devices.
    LayerId(u64)
}
counter! {
    /// An attachment, numbered by meta.
    AttachmentId(u64)
}
counter! {
    /// Counts the grants of one volume's lease. Only ever grows; 0 means that it was never granted.
    Generation(u64)
}
counter! {
    /// Version of the cluster map: grows with every change of nodes, devices, pools or placement.
    Epoch(u64)
}
counter! {
    /// Identity of one start of a node's process: drawn at random by it, never used again. 0 means that none is known.
    Incarnation(u64)
}
counter! {
    /// Wall-clock time of the proposer in milliseconds since 1970. For people to read, never for decisions.
    UnixMillis(u64)
}

impl Incarnation {
    /// Of this process: drawn anew by each call, so a process calls it once.
    #[must_use]
    pub fn draw() -> Self {
        // Random bits of a version 4 UUID; its fixed bits lie in the other half.
        let (_, low) = uuid::Uuid::new_v4().as_u64_pair();
        Self(low)
    }
}

impl Generation {
    /// The generation of the next grant.
    ///
    /// # Panics
    /// After 2^64 grants of one volume.
    #[must_use]
    pub fn next(self) -> Self {
        Self(
            self.0
                .checked_add(1)
                .expect("a volume's lease is not granted 2^64 times"),
        )
    }
}

impl UnixMillis {
    /// The proposer's clock. Only clients of the state machine call this, never the state machine.
    #[must_use]
    pub fn now() -> Self {
        let since_epoch = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Self(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
    }
}
