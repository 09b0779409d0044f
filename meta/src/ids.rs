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
    /// One generation of a volume's data, never used again: the key of chunks on devices. Its parts say where
    /// it lies, so that a replica needs to know no volume for that; `fabric::proto::placement` explains them
    /// bit by bit.
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
    /// Identity of one start of a node's process: drawn at random by it, never used again. 0 means that none
    /// is known.
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

    /// Whether there was such a process. A node that was let in and has yet to start has the default instead.
    #[must_use]
    pub fn has_begun(self) -> bool {
        self != Self::default()
    }
}

/// Bits of a layer's number in its family.
const LAYER_NUMBER_BITS: u32 = 26;
/// Bits of the number of the volume that a family is named by.
const LAYER_FAMILY_BITS: u32 = 28;
/// Bits of the number of a layer's pool.
const LAYER_POOL_BITS: u32 = 10;

impl PoolId {
    /// The last number of a pool. One may be made and deleted each day for almost three years; then no more
    /// are made.
    pub const MAX: Self = Self((1 << LAYER_POOL_BITS) - 1);
}

impl VolumeId {
    /// The last number of a volume. A thousand may be made each hour for thirty years; then no more are made.
    pub const MAX: Self = Self((1 << LAYER_FAMILY_BITS) - 1);
}

impl LayerId {
    /// The last number of a layer in its family.
    pub const NUMBER_MAX: u32 = (1 << LAYER_NUMBER_BITS) - 1;

    /// The layer with this number in the family of volumes that share their placement with `family`, the
    /// first of them.
    ///
    /// # Panics
    /// Beyond `PoolId::MAX`, `VolumeId::MAX` or `NUMBER_MAX`, which the state machine keeps to.
    #[must_use]
    pub fn new(pool: PoolId, family: VolumeId, number: u32) -> Self {
        assert!(pool <= PoolId::MAX && family <= VolumeId::MAX && number <= Self::NUMBER_MAX);
        let pool = u64::from(pool.0) << (LAYER_FAMILY_BITS + LAYER_NUMBER_BITS);
        Self(pool | family.0 << LAYER_NUMBER_BITS | u64::from(number))
    }

    /// The first of the volumes that share their placement with the one whose layer this is.
    #[must_use]
    pub fn family(self) -> VolumeId {
        VolumeId(self.0 >> LAYER_NUMBER_BITS & VolumeId::MAX.0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_layer_are_a_contract() {
        // The same number as in the test of `fabric::proto::placement`.
        let layer = LayerId::new(PoolId(3), VolumeId(7), 1);
        assert_eq!(layer, LayerId(3 << 54 | 7 << 26 | 1));
        let last = LayerId::new(PoolId::MAX, VolumeId::MAX, LayerId::NUMBER_MAX);
        assert_eq!(last, LayerId(u64::MAX));
    }
}
