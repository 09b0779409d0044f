//! What is said of an inode: kinds, attributes, times, and their form on the wire.

use std::time::Duration;

use crate::ids::{Handle, LockOwner, NodeId};
use crate::wire;

/// Bits of a mode that say what the inode is.
const FORMAT_MASK: u32 = libc::S_IFMT;
/// Bits of a mode that may be set: set-user-id, set-group-id, sticky, and the nine permissions.
pub const PERMISSIONS_MASK: u32 = 0o7777;
/// Unit of `st_blocks`, whatever the block size.
const STAT_BLOCK_BYTES: u64 = 512;
/// `STATX_BASIC_STATS`: all that `stat` has.
const STATX_BASIC_STATS: u32 = libc::STATX_BASIC_STATS;

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Regular,
        Self::Directory,
        Self::Symlink,
        Self::CharDevice,
        Self::BlockDevice,
        Self::Fifo,
        Self::Socket,
    ];

    /// The kind's bits of a mode (`S_IFREG`, …).
    pub const fn mode_bits(self) -> u32 {
        match self {
            Self::Regular => libc::S_IFREG,
            Self::Directory => libc::S_IFDIR,
            Self::Symlink => libc::S_IFLNK,
            Self::CharDevice => libc::S_IFCHR,
            Self::BlockDevice => libc::S_IFBLK,
            Self::Fifo => libc::S_IFIFO,
            Self::Socket => libc::S_IFSOCK,
        }
    }

    /// The kind that a mode names; `None` for modes without a kind and for kinds that do not exist.
    pub fn from_mode(mode: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.mode_bits() == mode & FORMAT_MASK)
    }

    /// The `d_type` of directory entries (`DT_REG`, …).
    pub const fn dirent_type(self) -> u32 {
        // Linux defines it so (`IFTODT`).
        self.mode_bits() >> 12
    }
}

/// A point in time as inodes have it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Seconds since 1970, negative before.
    pub secs: i64,
    /// Nanoseconds after `secs`: below 1,000,000,000.
    pub nanos: u32,
}

impl Timestamp {
    /// Nanoseconds of a second.
    pub const NANOS_PER_SEC: u32 = 1_000_000_000;

    fn to_statx(self) -> wire::SxTime {
        wire::SxTime {
            tv_sec: self.secs.into(),
            tv_nsec: self.nanos.into(),
            reserved: 0.into(),
        }
    }
}

/// The number of a device that a special file names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// Major number: 12 bits on the wire.
    pub major: u32,
    /// Minor number: 20 bits on the wire.
    pub minor: u32,
}

impl DeviceNumber {
    /// From the kernel's 32-bit form (`new_decode_dev`).
    pub const fn from_wire(raw: u32) -> Self {
        Self {
            major: (raw >> 8) & 0xfff,
            minor: (raw & 0xff) | ((raw >> 12) & 0xfff00),
        }
    }

    /// The kernel's 32-bit form (`new_encode_dev`); bits beyond 12 and 20 are lost.
    pub const fn to_wire(self) -> u32 {
        (self.minor & 0xff) | ((self.major & 0xfff) << 8) | ((self.minor & 0xfff00) << 12)
    }
}

/// Attributes of an inode.
///
/// The kernel calls an inode bad for ever (EIO) whose size is above `i64::MAX`, or whose kind differs from
/// what it was told before under the same node id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Inode number, as `stat` shows it.
    pub ino: u64,
    /// What the inode is.
    pub kind: Kind,
    /// Permission bits, within [`PERMISSIONS_MASK`]; others are not sent.
    pub permissions: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device of a special file, else 0:0.
    pub rdev: DeviceNumber,
    /// Length in bytes. Of a symlink it is its target's length: kernels that cache targets cut them there.
    pub size: u64,
    /// Bytes that are stored for it: holes count nothing. `st_blocks` is this in units of 512 bytes, rounded
    /// up.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the data.
    pub mtime: Timestamp,
    /// Last change of data or attributes.
    pub ctime: Timestamp,
    /// Creation, where known. Only STATX tells it.
    pub btime: Option<Timestamp>,
    /// Preferred size of I/O in bytes (`st_blksize`): a power of two from 512 on.
    pub block_bytes: u32,
}

impl Attr {
    /// Kind and permissions, as `st_mode` has them.
    pub const fn mode(&self) -> u32 {
        self.kind.mode_bits() | (self.permissions & PERMISSIONS_MASK)
    }

    /// `st_blocks`: units of 512 bytes that are stored, the last one perhaps in part.
    pub const fn stat_blocks(&self) -> u64 {
        self.allocated_bytes.div_ceil(STAT_BLOCK_BYTES)
    }

    pub(crate) fn to_wire(self) -> wire::Attr {
        wire::Attr {
            ino: self.ino.into(),
            size: self.size.into(),
            blocks: self.stat_blocks().into(),
            atime: (self.atime.secs as u64).into(),
            mtime: (self.mtime.secs as u64).into(),
            ctime: (self.ctime.secs as u64).into(),
            atimensec: self.atime.nanos.into(),
            mtimensec: self.mtime.nanos.into(),
            ctimensec: self.ctime.nanos.into(),
            mode: self.mode().into(),
            nlink: self.nlink.into(),
            uid: self.uid.into(),
            gid: self.gid.into(),
            rdev: self.rdev.to_wire().into(),
            blksize: self.block_bytes.into(),
            // Bits for submounts and DAX. We have neither.
            flags: 0.into(),
        }
    }

    pub(crate) fn to_statx(self) -> wire::Statx {
        let btime = match self.btime {
            Some(_) => libc::STATX_BTIME,
            None => 0,
        };
        wire::Statx {
            mask: (STATX_BASIC_STATS | btime).into(),
            blksize: self.block_bytes.into(),
            nlink: self.nlink.into(),
            uid: self.uid.into(),
            gid: self.gid.into(),
            mode: (self.mode() as u16).into(),
            ino: self.ino.into(),
            size: self.size.into(),
            blocks: self.stat_blocks().into(),
            atime: self.atime.to_statx(),
            btime: self.btime.unwrap_or_default().to_statx(),
            ctime: self.ctime.to_statx(),
            mtime: self.mtime.to_statx(),
            rdev_major: self.rdev.major.into(),
            rdev_minor: self.rdev.minor.into(),
            ..wire::Statx::default()
        }
    }
}

/// An inode that a name leads to. A reply with one counts as one lookup of the inode, which the kernel gives
/// back by FORGET.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// What later requests call the inode. Numbers are never reused, so the generation that goes with it is
    /// always 0.
    pub nodeid: NodeId,
    /// How long the kernel may go by the name without asking.
    pub entry_valid: Duration,
    /// How long the kernel may go by the attributes without asking.
    pub attr_valid: Duration,
    /// The inode's attributes.
    pub attr: Attr,
}

impl Entry {
    pub(crate) fn to_wire(self) -> wire::EntryOut {
        wire::EntryOut {
            nodeid: self.nodeid.0.into(),
            generation: 0.into(),
            entry_valid: self.entry_valid.as_secs().into(),
            attr_valid: self.attr_valid.as_secs().into(),
            entry_valid_nsec: self.entry_valid.subsec_nanos().into(),
            attr_valid_nsec: self.attr_valid.subsec_nanos().into(),
            attr: self.attr.to_wire(),
        }
    }
}

/// A time that SETATTR sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// To the server's clock.
    Now,
    /// To this time.
    At(Timestamp),
}

/// What SETATTR changes: all of it, or nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits, within [`PERMISSIONS_MASK`].
    pub permissions: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes, at most `i64::MAX`.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the data.
    pub mtime: Option<SetTime>,
    /// Last change of the attributes. Kernels send it only with the writeback cache, which is never agreed.
    pub ctime: Option<Timestamp>,
    /// The open file by which it is changed (`ftruncate`).
    pub handle: Option<Handle>,
    /// Who truncates, for mandatory locks.
    pub lock_owner: Option<LockOwner>,
    /// Set-user-id and set-group-id go as well, as the caller lacks `CAP_FSETID`.
    pub kill_suidgid: bool,
}

/// State of a filesystem, for `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsStats {
    /// Size in blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks that a user other than root may take.
    pub blocks_available: u64,
    /// Number of inodes there can be.
    pub inodes: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Longest name in bytes.
    pub name_bytes_max: u32,
}

impl FsStats {
    pub(crate) fn to_wire(self) -> wire::StatfsOut {
        wire::StatfsOut {
            blocks: self.blocks.into(),
            bfree: self.blocks_free.into(),
            bavail: self.blocks_available.into(),
            files: self.inodes.into(),
            ffree: self.inodes_free.into(),
            bsize: self.block_bytes.into(),
            namelen: self.name_bytes_max.into(),
            frsize: self.block_bytes.into(),
            ..wire::StatfsOut::default()
        }
    }
}
