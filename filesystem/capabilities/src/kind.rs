//! Kinds of capabilities, ways in which operations touch inodes, and which of them conflict.

use namespace::Ino;
use serde::{Deserialize, Serialize};

/// What a session may do without asking the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Of a directory: its own attributes, its names and the absence of others may be cached. So may the
    /// attributes of a child that is no directory, has one name, and passes
    /// [`Manager::may_cache_child`](crate::Manager::may_cache_child).
    DirectoryRead,
    /// Of a file: attributes, extents and data may be cached.
    FileRead,
    /// Of a file: data, size and mtime may be buffered besides.
    FileExclusive,
}

impl Kind {
    /// Whether who holds this kind may do all that `other` allows.
    pub fn includes(self, other: Self) -> bool {
        self == other || (self, other) == (Self::FileExclusive, Self::FileRead)
    }

    /// What of this kind is left beside `want`.
    pub(crate) fn left_beside(self, want: Want) -> Option<Self> {
        [self, Self::FileRead]
            .into_iter()
            .find(|left| self.includes(*left) && !Want::Hold(*left).conflicts(want))
    }

    /// Whether an operation of the holder itself may go on because of it, whatever others hold: nobody else
    /// holds anything that conflicts.
    fn covers(self, access: Access) -> bool {
        match access {
            Access::ReadFile => self.includes(Self::FileRead),
            Access::ChangeFile | Access::MoveFile => self == Self::FileExclusive,
            Access::ChangeDirectory | Access::ChangeChild(_) => false,
        }
    }
}

/// How an operation touches an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Reads attributes, extents or data of a file: what others have buffered is flushed first.
    ReadFile,
    /// Changes attributes, extents or data of a file.
    ChangeFile,
    /// Changes which names a file has, and its attributes: link, unlink, rename. The directory that a waiting
    /// request named may be wrong afterwards, so requests for [`Kind::FileExclusive`] that wait meanwhile are
    /// refused with [`Refusal::Moved`](crate::Refusal::Moved).
    MoveFile,
    /// Changes names or attributes of a directory.
    ChangeDirectory,
    /// Changes attributes of a child of this directory that is no directory. Whoever holds the child as
    /// [`Kind::FileExclusive`] touches nothing by this: no directory-read covers the child's attributes
    /// meanwhile.
    ChangeChild(Ino),
}

/// An inode that an operation touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Touch {
    /// The inode.
    pub ino: Ino,
    /// How.
    pub access: Access,
}

/// What waits for an inode, or has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Want {
    Hold(Kind),
    Touch(Access),
}

impl Want {
    /// Whether two sessions may not have these of one inode at a time. Operations never conflict with each
    /// other: the log puts them in order.
    pub(crate) fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            (Self::Hold(one), Self::Hold(two)) => one != two || one == Kind::FileExclusive,
            (Self::Hold(kind), Self::Touch(access)) | (Self::Touch(access), Self::Hold(kind)) => {
                access != Access::ReadFile || kind == Kind::FileExclusive
            }
            (Self::Touch(_), Self::Touch(_)) => false,
        }
    }

    /// Whether whoever holds `kind` of the inode has or may do this already.
    pub(crate) fn is_covered_by(self, kind: Kind) -> bool {
        match self {
            Self::Hold(wanted) => kind.includes(wanted),
            Self::Touch(access) => kind.covers(access),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 3] = [Kind::DirectoryRead, Kind::FileRead, Kind::FileExclusive];

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        use Access::*;
        let hold = Want::Hold;
        assert!(!hold(Kind::FileRead).conflicts(hold(Kind::FileRead)));
        assert!(!hold(Kind::DirectoryRead).conflicts(hold(Kind::DirectoryRead)));
        for kind in KINDS {
            assert!(hold(Kind::FileExclusive).conflicts(hold(kind)));
            for access in [ChangeFile, MoveFile, ChangeDirectory, ChangeChild(Ino(9))] {
                assert!(hold(kind).conflicts(Want::Touch(access)));
                assert!(Want::Touch(access).conflicts(hold(kind)));
            }
        }
        assert!(!hold(Kind::FileRead).conflicts(Want::Touch(ReadFile)));
        assert!(hold(Kind::FileExclusive).conflicts(Want::Touch(ReadFile)));
    }

    #[test]
    fn of_exclusive_reading_is_left_beside_a_reader() {
        let left = |want| Kind::FileExclusive.left_beside(want);
        assert_eq!(left(Want::Hold(Kind::FileRead)), Some(Kind::FileRead));
        assert_eq!(left(Want::Touch(Access::ReadFile)), Some(Kind::FileRead));
        assert_eq!(left(Want::Touch(Access::ChangeFile)), None);
        assert_eq!(left(Want::Hold(Kind::FileExclusive)), None);
        let names = Kind::DirectoryRead.left_beside(Want::Touch(Access::ChangeDirectory));
        assert_eq!(names, None);
    }
}
