//! Newtypes for every identity and counter of the cluster's metadata. Those that the data path knows, too,
//! are its own.

use std::fmt;

pub use fabric_types::ids::{Epoch, Generation, Incarnation, LayerId, NodeId};
use fabric_types::placement;
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
    /// An attachment, numbered by meta.
    AttachmentId(u64)
}
counter! {
    /// A Raft group that keeps namespaces, numbered by meta. The cluster map's group has no number.
    NamespaceGroupId(u32)
}
counter! {
    /// Wall-clock time of the proposer in milliseconds since 1970. For people to read, never for decisions.
    UnixMillis(u64)
}

/// A number for this process: drawn anew by each call, so a process calls it once.
#[must_use]
pub fn draw_incarnation() -> Incarnation {
    // Random bits of a version 4 UUID; its fixed bits lie in the other half.
    let (_, low) = uuid::Uuid::new_v4().as_u64_pair();
    Incarnation(low)
}

impl PoolId {
    /// The last number of a pool. One may be made and deleted each day for almost three years; then no more
    /// are made.
    pub const MAX: Self = Self(placement::POOL_MAX);
}

impl VolumeId {
    /// The last number of a volume. A thousand may be made each hour for thirty years; then no more are made.
    pub const MAX: Self = Self(placement::FAMILY_MAX);
}

/// The layer with this number in the family of volumes that share their placement with `family`, the first of
/// them.
///
/// # Panics
/// Beyond `PoolId::MAX`, `VolumeId::MAX` or `placement::NUMBER_MAX`, which the state machine keeps to.
#[must_use]
pub(crate) fn layer_of(pool: PoolId, family: VolumeId, number: u32) -> LayerId {
    placement::layer_of(pool.0, family.0, number)
}

/// The first of the volumes that share their placement with the one whose layer this is.
#[must_use]
pub(crate) fn family_of(layer: LayerId) -> VolumeId {
    VolumeId(placement::family_of(layer))
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
        // The same number as in the test of `fabric_types::placement`.
        let layer = layer_of(PoolId(3), VolumeId(7), 1);
        assert_eq!(layer, LayerId(3 << 54 | 7 << 26 | 1));
        let last = layer_of(PoolId::MAX, VolumeId::MAX, placement::NUMBER_MAX);
        assert_eq!(last, LayerId(u64::MAX));
    }
}
