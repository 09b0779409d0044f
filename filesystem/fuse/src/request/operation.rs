//! Operations and their arguments.

use zerocopy::FromBytes;

use crate::attr::{DeviceNumber, Kind, SetAttr};
use crate::ids::{Cookie, Handle, LockOwner, NodeId, Unique};
use crate::init::Offer;
use crate::malformed::Malformed;
use crate::modes::{
    AccessMask, FallocateMode, LockKind, OpenFlags, RenameFlags, Whence, XattrMode,
};
use crate::names::{LookupName, Name, Target, XattrName};
use crate::wire;

/// What a request asks. "The inode" is that of [`Header::nodeid`](crate::Header::nodeid); where an operation
/// has a name, that inode is the directory.
///
/// Permission bits are within [`PERMISSIONS_MASK`](crate::PERMISSIONS_MASK), and the kernel has applied the
/// umask to them, which is told all the same. Offsets and the ends of ranges are at most `i64::MAX`, but for
/// the end of READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation<'a> {
    /// The first request of a mount: what the kernel can do ([`negotiate`](crate::negotiate)).
    Init(Offer),
    /// The last request of a mount.
    Destroy,
    /// Another request should end early, with EINTR if it can. No reply.
    Interrupt {
        /// That request.
        unique: Unique,
    },
    /// Find an inode by its name; a success counts as one lookup of it.
    Lookup {
        /// The name.
        name: LookupName<'a>,
    },
    /// Take lookups of the inode back. No reply.
    Forget {
        /// How many.
        lookups: u64,
    },
    /// Take lookups of several inodes back. No reply.
    BatchForget(Forgets<'a>),
    /// Attributes of the inode.
    Getattr {
        /// The open file by which they are asked for.
        handle: Option<Handle>,
    },
    /// Change attributes of the inode.
    Setattr(SetAttr),
    /// Attributes of the inode, with the time of its creation.
    Statx {
        /// The open file by which they are asked for.
        handle: Option<Handle>,
        /// `AT_STATX_FORCE_SYNC`, `AT_STATX_DONT_SYNC` or neither.
        flags: u32,
        /// `STATX_*`: what is wanted. A reply may have more or less.
        mask: u32,
    },
    /// The target of a symlink.
    Readlink,
    /// Make a symlink.
    Symlink {
        /// Its name.
        name: Name<'a>,
        /// What it points at.
        target: Target<'a>,
    },
    /// Make a regular or special file without opening it.
    Mknod {
        /// Its name.
        name: Name<'a>,
        /// What it is; neither directory nor symlink.
        kind: Kind,
        /// Its permission bits.
        permissions: u32,
        /// The device that a special file names.
        device: DeviceNumber,
        /// The caller's umask.
        umask: u32,
    },
    /// Make a directory.
    Mkdir {
        /// Its name.
        name: Name<'a>,
        /// Its permission bits.
        permissions: u32,
        /// The caller's umask.
        umask: u32,
    },
    /// Remove a name that is not a directory's.
    Unlink {
        /// The name.
        name: Name<'a>,
    },
    /// Remove an empty directory.
    Rmdir {
        /// Its name.
        name: Name<'a>,
    },
    /// Move a name: RENAME and RENAME2.
    Rename {
        /// The name.
        name: Name<'a>,
        /// The directory it goes to.
        new_parent: NodeId,
        /// The name it gets.
        new_name: Name<'a>,
        /// What happens if that is taken.
        flags: RenameFlags,
    },
    /// Give an inode one more name.
    Link {
        /// That inode.
        inode: NodeId,
        /// The name.
        name: Name<'a>,
    },
    /// Open a file.
    Open {
        /// How.
        flags: OpenFlags,
        /// Truncation takes set-user-id and set-group-id away.
        kill_suidgid: bool,
    },
    /// Make a regular file, if the name is not there, and open it.
    Create(Create<'a>),
    /// Make a regular file without a name in the directory, and open it. LINK may give it its first name.
    Tmpfile(Tmpfile),
    /// Read from a file.
    Read(Read),
    /// Write to a file. The data stay where they are: [`Write::PAYLOAD_OFFSET`].
    Write(Write),
    /// A file descriptor is closed; others of the same open file may remain.
    Flush {
        /// The open file.
        handle: Handle,
        /// Whose POSIX locks end.
        lock_owner: LockOwner,
    },
    /// The last descriptor of an open file is gone.
    Release(Release),
    /// Make a file durable.
    Fsync {
        /// The open file.
        handle: Handle,
        /// Only its data and what is needed to read them.
        data_only: bool,
    },
    /// Open a directory.
    Opendir {
        /// How.
        flags: OpenFlags,
    },
    /// List a directory: READDIR and READDIRPLUS.
    Readdir {
        /// Which of the two.
        layout: DirLayout,
        /// The open directory.
        handle: Handle,
        /// Where to go on.
        cookie: Cookie,
        /// Most bytes of records that the reply may have.
        size: u32,
    },
    /// The last descriptor of an open directory is gone.
    Releasedir {
        /// The open directory.
        handle: Handle,
    },
    /// Make a directory durable.
    Fsyncdir {
        /// The open directory.
        handle: Handle,
        /// Only its entries.
        data_only: bool,
    },
    /// Set an extended attribute.
    Setxattr(SetXattr<'a>),
    /// The value of an extended attribute.
    Getxattr {
        /// Its name.
        name: XattrName<'a>,
        /// Room for the value in bytes; 0 asks for its size.
        size: u32,
    },
    /// The names of all extended attributes, each with a NUL.
    Listxattr {
        /// Room for the names in bytes; 0 asks for their size.
        size: u32,
    },
    /// Remove an extended attribute.
    Removexattr {
        /// Its name.
        name: XattrName<'a>,
    },
    /// State of the filesystem.
    Statfs,
    /// Whether the caller may do something with the inode.
    Access {
        /// What.
        mask: AccessMask,
    },
    /// Allocate, punch or zero a range of a file.
    Fallocate(Fallocate),
    /// Find data or holes of a file.
    Lseek {
        /// The open file.
        handle: Handle,
        /// Where to begin, in bytes.
        offset: u64,
        /// What to find.
        whence: Whence,
    },
    /// Copy a range of one file to another.
    CopyFileRange(CopyFileRange),
    /// Make everything of the filesystem durable.
    Syncfs,
    /// Whether a lock could be taken (GETLK). Not agreed, so no kernel sends it.
    Getlk(Lock),
    /// Take or drop a lock (SETLK, SETLKW). Not agreed, so no kernel sends it.
    Setlk {
        /// The lock.
        lock: Lock,
        /// Wait until it can be taken.
        wait: bool,
    },
    /// A device-specific call.
    Ioctl(Ioctl<'a>),
    /// Whether a file can be read or written at once.
    Poll(Poll),
    /// An operation that this crate does not know, by its number: answer ENOSYS.
    Unsupported(u32),
}

/// Inodes and how many of their lookups are taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forgets<'a>(&'a [wire::ForgetOne]);

impl<'a> Forgets<'a> {
    /// `bytes` are the records. There must be `count` of them.
    pub(super) fn new(count: u32, bytes: &'a [u8]) -> Result<Self, Malformed> {
        match <[wire::ForgetOne]>::ref_from_bytes(bytes) {
            Ok(list) if list.len() == count as usize => Ok(Self(list)),
            _ => Err(Malformed::Count {
                count: count.into(),
                given: bytes.len(),
            }),
        }
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// Each inode with the number of lookups; an inode may be there twice.
    pub fn iter(self) -> impl ExactSizeIterator<Item = (NodeId, u64)> + 'a {
        self.0
            .iter()
            .map(|one| (NodeId(one.nodeid.get()), one.nlookup.get()))
    }
}

/// Arguments of CREATE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Create<'a> {
    /// Name of the file.
    pub name: Name<'a>,
    /// How it is opened.
    pub flags: OpenFlags,
    /// Its permission bits, if it is new.
    pub permissions: u32,
    /// The caller's umask.
    pub umask: u32,
    /// Truncation takes set-user-id and set-group-id away.
    pub kill_suidgid: bool,
}

/// Arguments of TMPFILE. The kernel also sends a name, which has no meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tmpfile {
    /// How the file is opened. With `O_EXCL` the kernel never links it.
    pub flags: OpenFlags,
    /// Its permission bits.
    pub permissions: u32,
    /// The caller's umask.
    pub umask: u32,
}

/// Arguments of READ. A reply with fewer bytes means that the file ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// The open file.
    pub handle: Handle,
    /// First byte.
    pub offset: u64,
    /// Number of bytes, at most [`Dialect::io_bytes_max`](crate::Dialect).
    pub size: u32,
    /// Who reads, for mandatory locks.
    pub lock_owner: Option<LockOwner>,
    /// How the file is open.
    pub flags: OpenFlags,
}

/// Arguments of WRITE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// The open file. For a write from the page cache it is one that the kernel found, not the writer's.
    pub handle: Handle,
    /// First byte.
    pub offset: u64,
    /// Bytes of payload, at most [`Dialect::io_bytes_max`](crate::Dialect).
    pub size: u32,
    /// Who writes, for mandatory locks.
    pub lock_owner: Option<LockOwner>,
    /// How the file is open.
    pub flags: OpenFlags,
    /// It comes from the page cache: pages of a shared mapping.
    pub from_page_cache: bool,
    /// Set-user-id and set-group-id go, as the writer lacks `CAP_FSETID`.
    pub kill_suidgid: bool,
}

impl Write {
    /// Where the payload begins within the request; it goes to the request's end.
    pub const PAYLOAD_OFFSET: usize = size_of::<wire::InHeader>() + size_of::<wire::WriteIn>();
}

/// Arguments of RELEASE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The open file.
    pub handle: Handle,
    /// How it was open.
    pub flags: OpenFlags,
    /// Do first what FLUSH does.
    pub flush: bool,
    /// Whose BSD lock ends, if there is one.
    pub flock_unlock: Option<LockOwner>,
}

/// Which records a listing has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirLayout {
    /// READDIR: names, inode numbers and types.
    Plain,
    /// READDIRPLUS: each record begins with a reply of LOOKUP.
    Plus,
}

/// Arguments of SETXATTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetXattr<'a> {
    /// Name of the attribute.
    pub name: XattrName<'a>,
    /// Its value, at most 64 KiB.
    pub value: &'a [u8],
    /// Whether it may be made or changed.
    pub mode: XattrMode,
    /// Setting an access control list takes set-group-id away.
    pub kill_sgid: bool,
}

/// Arguments of FALLOCATE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fallocate {
    /// The open file.
    pub handle: Handle,
    /// First byte.
    pub offset: u64,
    /// Number of bytes, not 0.
    pub length: u64,
    /// What to do with them.
    pub mode: FallocateMode,
}

/// Arguments of COPY_FILE_RANGE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyFileRange {
    /// The open file to copy from; it is the inode's.
    pub from: Handle,
    /// First byte there.
    pub from_offset: u64,
    /// The inode to copy to.
    pub to_inode: NodeId,
    /// The open file to copy to.
    pub to: Handle,
    /// First byte there.
    pub to_offset: u64,
    /// Number of bytes: what was asked, cut to [`Self::MAX_BYTES`]. The kernel takes a short copy for what it
    /// is and asks again.
    pub length: u64,
}

impl CopyFileRange {
    /// Most bytes at a time: the reply counts them in 32 bits, and the kernel wants whole pages.
    pub const MAX_BYTES: u64 = (u32::MAX as u64 >> 16) << 16;
}

/// Arguments of GETLK, SETLK and SETLKW.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lock {
    /// The open file.
    pub handle: Handle,
    /// Whose lock.
    pub owner: LockOwner,
    /// First byte.
    pub start: u64,
    /// Last byte, `i64::MAX` for all that follow.
    pub end: u64,
    /// Shared, exclusive or none.
    pub kind: LockKind,
    /// Process of the guest.
    pub pid: u32,
    /// A BSD lock on the whole file, not a POSIX one.
    pub flock: bool,
}

/// Arguments of IOCTL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ioctl<'a> {
    /// The open file.
    pub handle: Handle,
    /// `FUSE_IOCTL_*`
    pub flags: u32,
    /// Number of the call.
    pub command: u32,
    /// Its argument.
    pub argument: u64,
    /// Bytes that the caller gives.
    pub input: &'a [u8],
    /// Room for bytes that the caller gets.
    pub output_bytes: u32,
}

/// Arguments of POLL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Poll {
    /// The open file.
    pub handle: Handle,
    /// What a notification would name.
    pub kernel_handle: u64,
    /// `FUSE_POLL_*`
    pub flags: u32,
    /// `POLL*`: what the caller waits for.
    pub events: u32,
}
