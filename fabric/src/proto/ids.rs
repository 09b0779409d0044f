//! Identities and counters of the cluster, one type each so that none is taken for another.

use std::fmt;

pub use crate::store::api::{CHUNK_BYTES, ChunkKey, LayerId, Version};

/// Defines a transparent `u64` newtype with the conversions that wire structs and logs need.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// One machine running `penstock serve`.
    NodeId,
    "node-"
);
id!(
    /// A placement group: a share of a pool's chunks with one replica set.
    PgId,
    "pg-"
);
id!(
    /// Version of the cluster map.
    Epoch,
    "e"
);
id!(
    /// How often the right to write a volume was granted; a newer holder fences the older.
    Generation,
    "g"
);
id!(
    /// Position of a write among the writes of its generation, starting at 1.
    Sequence,
    "s"
);
id!(
    /// Identity of one start of a storage process.
    Incarnation,
    "i"
);

impl Sequence {
    /// The last sequence of a generation. At a steady 100 000 writes/s a generation lasts four months;
    /// whoever holds the lease renews it before (see
    /// [`VolumeState::sequences_left`](crate::core::volume::VolumeState::sequences_left)), and a write past
    /// the end is refused as fenced.
    pub const MAX: Self = Self(Version::SEQUENCE_MAX);
}

impl Generation {
    /// The last generation. Each lease grant takes one: at one a minute they last thirty years.
    pub const MAX: Self = Self(Version::GENERATION_MAX as u64);
}

impl Version {
    /// Joins a lease's generation and a sequence in it.
    ///
    /// # Panics
    /// If one is past its `MAX`.
    #[inline]
    pub fn of(generation: Generation, sequence: Sequence) -> Self {
        let generation =
            u32::try_from(generation.0).expect("a lease has a generation of at most 24 bits");
        Self::new(generation, sequence.0)
    }

    /// The two parts as the protocol names them.
    #[inline]
    pub fn parts(self) -> (Generation, Sequence) {
        (
            Generation(u64::from(self.generation())),
            Sequence(self.sequence()),
        )
    }
}
