//! The records.

use serde::{Deserialize, Serialize};

use crate::ids::{Ino, SegmentId, SessionId, Time};
use crate::operation::Reply;

/// A filesystem: the numbers to give out next, which only grow, and its statistics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// Counter of the next inode.
    pub next_inode: u64,
    /// The next session.
    pub next_session: u64,
    /// The next segment.
    pub next_segment: u64,
    /// What it holds.
    pub statistics: Statistics,
    /// It is being removed, and nothing else is done any more: records with smaller keys than this one are
    /// gone. So no step looks at the places of those again.
    pub removed_below: Option<Vec<u8>>,
}

/// Inodes, sessions and segments that may have been made unseen, since the last entry of a log.
const INODES_UNSEEN: u64 = 1 << 32;
const SESSIONS_UNSEEN: u64 = 1 << 16;
const SEGMENTS_UNSEEN: u64 = 1 << 16;

impl Filesystem {
    /// Leaves out the numbers that may have been given unseen.
    pub(crate) fn raise_numbers(&mut self) {
        self.next_inode += INODES_UNSEEN;
        self.next_session += SESSIONS_UNSEEN;
        self.next_segment += SEGMENTS_UNSEEN;
    }
}

/// What a filesystem holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Inodes, the root and orphans included.
    pub inodes: u64,
    /// Bytes of segments that extents name. What several extents name is counted once.
    pub named_bytes: u64,
    /// Bytes of segments that nothing names any more, to be given back.
    pub freed_bytes: u64,
}

/// An inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    /// Permission bits with set-user-id, set-group-id and sticky: 12 bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names; of a directory, 2 and its subdirectories. 0: an orphan.
    pub nlink: u32,
    /// The directory that has its only name, of what is no directory. None if it has no name, or has or once
    /// had several: the directories of these are not recorded. Who caches what a directory holds learns by
    /// this which inodes' changes concern the directory.
    pub parent: Option<Ino>,
    /// Length in bytes of a file's content or a symbolic link's target, else 0.
    pub size: u64,
    /// Last access, as hosts say.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the content or of this record.
    pub ctime: Time,
    /// Creation.
    pub btime: Time,
    /// Grows with each change of the content or of this record.
    pub change: u64,
    /// Sum of the lengths of its extents, in bytes.
    pub allocated: u64,
    /// Bytes of the names of its extended attributes, each with a 0. 0: it has none.
    pub xattr_list_bytes: u32,
    /// Bytes of their values.
    pub xattr_value_bytes: u32,
    /// The fields of its kind.
    pub body: Body,
}

/// The fields that depend on the kind of an inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A regular file.
    File(Content),
    /// A directory.
    Directory(Directory),
    /// A symbolic link and its target.
    Symlink(#[serde(with = "crate::bytes")] Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A socket of the Unix domain.
    Socket,
    /// A character device and its number.
    CharacterDevice(u32),
    /// A block device and its number.
    BlockDevice(u32),
}

/// A file's extents. One alone lies in the inode, so that a small file is opened by one lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// No extent.
    Empty,
    /// One extent.
    Inline(Extent),
    /// So many, at least two, in the table of extents.
    Table(u64),
}

/// A directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// The directory that it lies in; its own number for the root.
    pub parent: Ino,
    /// Names in it.
    pub entries: u64,
    /// The cookie of its next name.
    pub next_cookie: u64,
}

/// Kind of an inode, as entries of directories say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket of the Unix domain.
    Socket,
    /// A character device.
    CharacterDevice,
    /// A block device.
    BlockDevice,
}

impl Body {
    /// The kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::File(_) => Kind::File,
            Self::Directory(_) => Kind::Directory,
            Self::Symlink(_) => Kind::Symlink,
            Self::Fifo => Kind::Fifo,
            Self::Socket => Kind::Socket,
            Self::CharacterDevice(_) => Kind::CharacterDevice,
            Self::BlockDevice(_) => Kind::BlockDevice,
        }
    }
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dentry {
    /// The inode.
    pub ino: Ino,
    /// Its kind.
    pub kind: Kind,
    /// Its place in the order of readdir.
    pub cookie: u64,
}

/// A name at its place in the order of readdir.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CookieEntry {
    /// The name.
    #[serde(with = "crate::bytes")]
    pub name: Vec<u8>,
    /// The inode.
    pub ino: Ino,
    /// Its kind.
    pub kind: Kind,
}

/// The value of an extended attribute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xattr(#[serde(with = "crate::bytes")] pub Vec<u8>);

/// A piece of a file, in bytes; each number is a multiple of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Where it begins in the file.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// The segment that holds its data.
    pub segment: SegmentId,
    /// Where its data begin in the segment.
    pub address: u64,
    /// Epoch of the cluster map in which its data were flushed. Reading needs a map that is not older. Of
    /// data that were flushed in several epochs, the latest.
    pub epoch: u64,
}

impl Extent {
    /// The offset after its last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// The part of it within these offsets, which it reaches into.
    pub(crate) fn within(&self, from: u64, to: u64) -> Self {
        let (offset, end) = (self.offset.max(from), self.end().min(to));
        assert!(offset < end, "an extent is cut where it is");
        Self {
            offset,
            length: end - offset,
            segment: self.segment,
            address: self.address + (offset - self.offset),
            epoch: self.epoch,
        }
    }
}

/// An extent in its table, whose key says its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Bytes.
    pub length: u64,
    /// The segment that holds its data.
    pub segment: SegmentId,
    /// Where its data begin in the segment.
    pub address: u64,
    /// Epoch of the cluster map in which its data were flushed.
    pub epoch: u64,
}

/// An inode without a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Orphan {
    /// These sessions have it open, in the order of their numbers.
    Held(Vec<SessionId>),
    /// Nobody has it open: it is being emptied, and then goes.
    Emptying,
    /// It never had a name. The session that made it holds it, and may link it.
    Temporary(SessionId),
}

/// A session of a host with a filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// The node.
    pub node: u64,
    /// Identity of one start of the node's daemon.
    pub incarnation: u128,
    /// When it was opened.
    pub opened_at: Time,
    /// It is being ended, and nothing more is done for it.
    pub ending: bool,
    /// The segments that it may write.
    pub open_segments: Vec<SegmentId>,
}

/// The last request of a slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Its sequence number.
    pub sequence: u64,
    /// Its reply.
    pub reply: Reply,
}

/// An append-only layer that one session writes, each address once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The session that made it.
    pub session: SessionId,
    /// Whether it is written.
    pub state: SegmentState,
    /// The end of what was named or freed in it, in bytes.
    pub written: u64,
    /// Bytes that extents name.
    pub live: u64,
}

/// Whether a segment is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SegmentState {
    /// Its session writes it. Commits come in any order: these address ranges below the written length were
    /// not named yet, each as (begin, end), in ascending order.
    Open(Vec<(u64, u64)>),
    /// Never written again.
    Sealed,
}

/// Space that several extents name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// Bytes.
    pub length: u64,
    /// How many extents name each byte of it, besides one.
    pub others: u32,
}
