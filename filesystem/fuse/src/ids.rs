//! Numbers that name things, each a type of its own.

/// The id of a request, which its reply repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Unique(pub u64);

/// The id of an inode, as the server told it to the kernel. A forged one may be any number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The root of the mount.
    pub const ROOT: Self = Self(1);
}

/// An open file or directory, as the server told it to the kernel. A forged one may be any number. It is 0
/// where the kernel opened without asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// Who holds locks: one open file table of the guest, scrambled by its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockOwner(pub u64);

/// A place in a directory, from where a listing goes on: 0 is the begin, others are those of
/// [`DirRecord::cookie`](crate::DirRecord::cookie). At most `i64::MAX`, as the kernel takes it for a file
/// offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cookie(u64);

impl Cookie {
    /// The begin of every directory.
    pub const START: Self = Self(0);
    /// The largest one.
    pub const MAX: Self = Self(i64::MAX as u64);

    /// The cookie with this number, if the kernel can carry it.
    pub const fn new(raw: u64) -> Option<Self> {
        if raw <= Self::MAX.0 {
            Some(Self(raw))
        } else {
            None
        }
    }

    /// As on the wire.
    pub const fn raw(self) -> u64 {
        self.0
    }
}
