//! Identities and counters of the cluster, one type each so that none is taken for another.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes of a chunk. An operation never crosses a chunk.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// Names a chunk: the layer, and which of its 4 MiB pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey {
    /// Layer.
    pub layer: LayerId,
    /// Byte offset in the layer divided by [`CHUNK_BYTES`].
    pub index: u32,
}

/// Version of a write: the lease generation under which it was made (24 bits), and its sequence number in
/// that generation (40 bits). Ordered. A writer that runs out of sequence numbers takes a new generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Version(pub u64);

impl Version {
    /// Largest generation.
    pub const GENERATION_MAX: u32 = (1 << 24) - 1;
    /// Largest sequence number within a generation.
    pub const SEQUENCE_MAX: u64 = (1 << 40) - 1;

    /// Joins the two parts.
    ///
    /// # Panics
    /// If a part is out of its range: the caller counts both and must stop before.
    #[must_use]
    pub fn new(generation: u32, sequence: u64) -> Self {
        assert!(generation <= Self::GENERATION_MAX && sequence <= Self::SEQUENCE_MAX);
        Self(u64::from(generation) << 40 | sequence)
    }

    /// Lease generation.
    #[must_use]
    pub fn generation(self) -> u32 {
        (self.0 >> 40) as u32
    }

    /// Sequence number within the generation.
    #[must_use]
    pub fn sequence(self) -> u64 {
        self.0 & Self::SEQUENCE_MAX
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation(), self.sequence())
    }
}

/// Defines a transparent `u64` newtype. It is shown as its number, after the prefix if there is one.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($prefix)?;
                self.0.fmt(f)
            }
        }

        impl From<u64> for $name {
            fn from(value: u64) -> Self {
                Self(value)
            }
        }
    };
}

id!(
    /// One machine running `penstock serve`; also its Raft identity. Chosen by whoever adds the node, never
    /// used again.
    NodeId,
    ""
);
id!(
    /// A placement group: a share of a pool's chunks with one replica set.
    PgId,
    "pg-"
);
id!(
    /// Version of the cluster map: grows with every change of nodes, devices, pools or placement.
    Epoch,
    ""
);
id!(
    /// Counts the grants of one volume's lease; a newer holder fences the older. Only ever grows; 0 means
    /// that it was never granted.
    Generation,
    ""
);
id!(
    /// Position of a write among the writes of its generation, starting at 1.
    Sequence,
    ""
);
id!(
    /// One start of a node's process: drawn at random by it, never used again. 0 means that none is known.
    Incarnation,
    ""
);
id!(
    /// One generation of a volume's data (or a file's), never used again: the key of chunks on devices. Its
    /// parts say where it lies, so that a replica needs to know no volume for that; [`placement`] explains
    /// them bit by bit.
    ///
    /// [`placement`]: crate::placement
    LayerId,
    ""
);

/// A peer of the replica; the transport gives and interprets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PeerId(pub u32);

impl Sequence {
    /// The last sequence of a generation. At a steady 100 000 writes/s a generation lasts four months;
    /// whoever holds the lease renews it before (see
    /// `fabric_replication::volume::VolumeState::sequences_left`), and a write past
    /// the end is refused as fenced.
    pub const MAX: Self = Self(Version::SEQUENCE_MAX);
}

impl Incarnation {
    /// Whether there was such a process. A node that was let in and has yet to start has the default instead.
    #[must_use]
    pub fn has_begun(self) -> bool {
        self != Self::default()
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
