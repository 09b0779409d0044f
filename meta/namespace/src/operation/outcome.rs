//! Replies to operations.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::ids::{Ino, SegmentId, SessionId, Time};
use crate::record::{Body, Inode, Kind};

/// The reply to a request.
pub type Reply = Result<Outcome, Error>;

/// Result of an operation that was granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It is done.
    Done,
    /// The session.
    Session(SessionId),
    /// The segment.
    Segment(SegmentId),
    /// The inode that was made or named.
    Inode(Attributes),
    /// The inode that was changed. Not done: the same operation, as a new request, goes on.
    Changed {
        /// Its attributes now.
        attributes: Attributes,
        /// True when all is done.
        done: bool,
    },
    /// A name was removed or moved; this inode lost a name.
    Removed(Option<Removed>),
    /// A bounded step. Not done: the same operation, as a new request, goes on.
    Step {
        /// True when all is done.
        done: bool,
    },
    /// Data were copied.
    Copied {
        /// Bytes, less than asked if the rest is for a new request, or behind the source's end.
        length: u64,
        /// The destination's attributes now.
        attributes: Attributes,
    },
}

/// An inode that lost a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// The inode.
    pub ino: Ino,
    /// Its links now.
    pub nlink: u32,
    /// True if its record is still there.
    pub kept: bool,
}

/// Attributes of an inode, as stat(2) has them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Its number.
    pub ino: Ino,
    /// Its kind.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u16,
    /// Links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Bytes of segments that it names.
    pub allocated: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of content or attributes.
    pub ctime: Time,
    /// Creation.
    pub btime: Time,
    /// Number of a device, else 0.
    pub rdev: u32,
    /// Grows with each change.
    pub change: u64,
}

impl Attributes {
    /// The attributes of an inode.
    pub fn of(ino: Ino, inode: &Inode) -> Self {
        let rdev = match inode.body {
            Body::CharacterDevice(number) | Body::BlockDevice(number) => number,
            _ => 0,
        };
        Self {
            ino,
            kind: inode.body.kind(),
            mode: inode.mode,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            size: inode.size,
            allocated: inode.allocated,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            btime: inode.btime,
            rdev,
            change: inode.change,
        }
    }
}
