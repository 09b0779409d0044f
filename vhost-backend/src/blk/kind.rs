//! Kinds of requests.

use fabric_types::io::Op;

/// Number of [`RequestKind`]s.
pub(super) const KINDS: usize = 4;

/// What requests are told apart by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards and write-zeroes.
    Discard,
}

impl RequestKind {
    /// All, in the order of their histograms.
    pub const ALL: [Self; KINDS] = [Self::Read, Self::Write, Self::Flush, Self::Discard];

    /// The kind of an operation.
    #[inline]
    pub fn of(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard | Op::WriteZeroes { .. } => Self::Discard,
        }
    }
}
