//! Numbers of filesystems, inodes, sessions and segments, and points in time.

use serde::{Deserialize, Serialize};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($number:ty);)*) => {$(
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        pub struct $name(pub $number);
    )*};
}
ids! {
    /// A filesystem of a metadata group.
    FilesystemId(u32);
    /// An inode number, which is also its FUSE nodeid: 15 bits of shard below the sign bit, below
    /// them 48 bits of the filesystem's counter. Never used again.
    Ino(u64);
    /// A session of a host. Never used again.
    SessionId(u64);
    /// A segment: an append-only layer that one session writes. Never used again.
    SegmentId(u64);
}

impl Ino {
    /// The root directory of every filesystem.
    pub const ROOT: Self = Self(1);
    /// Bits of the shard. The topmost bit is 0, so that numbers stay positive as signed ones too.
    const SHARD_BITS: u32 = 15;
    /// Bits below the shard.
    const COUNTER_BITS: u32 = 48;

    /// The inode of a shard's counter.
    pub(crate) fn new(shard: u16, counter: u64) -> Self {
        assert!(
            shard < 1 << Self::SHARD_BITS,
            "a shard has {} bits",
            Self::SHARD_BITS
        );
        assert!(
            counter < 1 << Self::COUNTER_BITS,
            "a counter leaves the shard's bits alone"
        );
        Self(u64::from(shard) << Self::COUNTER_BITS | counter)
    }

    /// The shard that keeps this inode's records.
    pub fn shard(self) -> u16 {
        (self.0 >> Self::COUNTER_BITS) as u16
    }
}

impl SessionId {
    /// No session: what the leader itself requests. Sessions are counted from 1.
    pub const NONE: Self = Self(0);
}

/// A point in time since the epoch of Unix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Time {
    /// Seconds; negative before 1970.
    pub seconds: i64,
    /// Nanoseconds of that second, below 1,000,000,000.
    pub nanoseconds: u32,
}

impl Time {
    pub(crate) fn is_valid(self) -> bool {
        self.nanoseconds < 1_000_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_shard_and_counter_make_the_largest_number() {
        let largest = Ino::new(0x7fff, (1 << 48) - 1);
        assert_eq!(largest, Ino(i64::MAX as u64));
        assert_eq!(largest.shard(), 0x7fff);
    }

    #[test]
    #[should_panic(expected = "a shard has 15 bits")]
    fn a_shard_has_15_bits() {
        Ino::new(0x8000, 1);
    }
}
