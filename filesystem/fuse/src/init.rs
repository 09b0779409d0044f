//! INIT: what kernel and server agree on for the life of a mount.
//!
//! [`negotiate`] is a pure function of what the kernel offers and what the server wants. What is agreed is
//! the intersection; nothing is ever asked of a kernel that did not offer it.
//!
//! # What is wanted, and what never
//!
//! Always wanted, each where the kernel has it:
//! - `ASYNC_READ`, `ASYNC_DIO`, `BIG_WRITES`, `MAX_PAGES`: many and large requests in flight.
//! - `ATOMIC_O_TRUNC`: OPEN truncates, without a SETATTR behind it.
//! - `AUTO_INVAL_DATA`: a read asks for attributes that are no longer valid and drops cached pages if size or
//!   mtime changed. Another host changes files without this kernel being told, so this is what makes cached
//!   pages follow. Its counterpart `EXPLICIT_INVAL_DATA` needs notifications, which virtio-fs has not.
//! - `DO_READDIRPLUS`, `READDIRPLUS_AUTO`: attributes come with names where the caller seems to want them.
//! - `PARALLEL_DIROPS`: lookups and listings of one directory at a time.
//! - `HANDLE_KILLPRIV_V2`: the server takes set-user-id and set-group-id away, within the same operation.
//! - `SETXATTR_EXT`: the longer form of SETXATTR.
//! - `DIRECT_IO_ALLOW_MMAP`: files that are opened to append, which go past the page cache, can be mapped as
//!   shared.
//! - `CACHE_SYMLINKS`: the kernel keeps the target of an inode as long as it knows the inode. A target never
//!   changes and inode numbers are never reused, so what is kept is never stale; a symlink that is replaced
//!   is another inode, which the kernel finds by looking the name up again. The inode's size must be the
//!   target's length.
//!
//! Wanted where it applies:
//! - `EXPORT_SUPPORT`, if node ids are inode numbers: the guest's NFS server finds inodes again by number
//!   after they left its cache, by looking up `.` and `..`.
//! - `NO_OPEN_SUPPORT`, `NO_OPENDIR_SUPPORT`, for read-only attachments: ENOSYS to OPEN and OPENDIR then ends
//!   them, and RELEASE and RELEASEDIR, for the mount; ENOSYS to FLUSH ends that. The kernel then keeps pages
//!   and listings at an open, so they follow changes by `AUTO_INVAL_DATA` alone, by size and mtime: a rewrite
//!   of equal size whose mtime was put back is not seen while the pages stay in the cache.
//!
//! Never wanted:
//! - `WRITEBACK_CACHE`: the kernel would keep written data and trust its own size and mtime until it likes to
//!   write back. Linux's virtio-fs driver has no notification queue, so it could not be told to flush when
//!   another host reads the file.
//! - `POSIX_LOCKS`, `FLOCK_LOCKS`: locks are local to the guest, and its kernel keeps them itself.
//! - `SUBMOUNTS`: one attachment is one filesystem. `DONT_MASK`, `POSIX_ACL`: there are no access control
//!   lists, so the guest applies its umask.

use crate::bits::flag_set;
use crate::errno::Errno;
use crate::wire;

/// Bytes of a page as `max_pages` counts them. Guests with larger pages count theirs, and may then send
/// READs above [`Dialect::io_bytes_max`], which are refused.
const PAGE_BYTES: u32 = 4096;
/// What kernels take if no maximum is agreed.
const MAX_PAGES_DEFAULT: u16 = 32;
/// Times are kept to the nanosecond.
const TIME_GRANULARITY_NS: u32 = 1;

flag_set! {
    /// Flags of INIT, those of `flags2` from bit 32 on.
    Features(u64) {
        /// Several READs of one file at a time.
        ASYNC_READ = 0;
        /// POSIX locks are sent.
        POSIX_LOCKS = 1;
        /// OPEN may carry `O_TRUNC`.
        ATOMIC_O_TRUNC = 3;
        /// LOOKUP of `.` and `..` works for every inode.
        EXPORT_SUPPORT = 4;
        /// WRITE may have more than 4 KiB.
        BIG_WRITES = 5;
        /// The server applies the umask.
        DONT_MASK = 6;
        /// BSD locks are sent.
        FLOCK_LOCKS = 10;
        /// Cached pages are dropped when size or mtime turn out to have changed.
        AUTO_INVAL_DATA = 12;
        /// READDIRPLUS is used.
        DO_READDIRPLUS = 13;
        /// READDIRPLUS is used only where it seems to pay.
        READDIRPLUS_AUTO = 14;
        /// Direct I/O is sent in parallel.
        ASYNC_DIO = 15;
        /// Writes are kept by the kernel.
        WRITEBACK_CACHE = 16;
        /// ENOSYS to OPEN means that files need not be opened.
        NO_OPEN_SUPPORT = 17;
        /// Lookups and listings of one directory run in parallel.
        PARALLEL_DIROPS = 18;
        /// The first form of `HANDLE_KILLPRIV_V2`.
        HANDLE_KILLPRIV = 19;
        /// Access control lists are the server's.
        POSIX_ACL = 20;
        /// `max_pages` of the reply is valid.
        MAX_PAGES = 22;
        /// Targets of symlinks are cached.
        CACHE_SYMLINKS = 23;
        /// ENOSYS to OPENDIR means that directories need not be opened.
        NO_OPENDIR_SUPPORT = 24;
        /// Cached pages are dropped on notifications only.
        EXPLICIT_INVAL_DATA = 25;
        /// Some directories are mounts of their own.
        SUBMOUNTS = 27;
        /// The server takes set-user-id and set-group-id away.
        HANDLE_KILLPRIV_V2 = 28;
        /// SETXATTR has its longer form.
        SETXATTR_EXT = 29;
        /// `flags2` is valid.
        INIT_EXT = 30;
        /// A security context comes with what makes inodes.
        SECURITY_CTX = 32;
        /// Files that are opened for direct I/O may be mapped as shared.
        DIRECT_IO_ALLOW_MMAP = 36;
    }
}

/// What the kernel offers by INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Its major version.
    pub major: u32,
    /// Its minor version.
    pub minor: u32,
    /// Most bytes it reads ahead.
    pub max_readahead_bytes: u32,
    /// What it can do.
    pub features: Features,
}

/// What the server wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The attachment is read-only.
    pub read_only: bool,
    /// Node ids are inode numbers, so that any inode is found by its number at any time.
    pub nodeids_are_inodes: bool,
    /// Most bytes of a WRITE, from 4 KiB on.
    pub max_write_bytes: u32,
    /// Most pages of a request, from 1 on. The kernel also keeps below the size of the request queue, less
    /// 4.
    pub max_pages: u16,
    /// Most bytes to read ahead.
    pub max_readahead_bytes: u32,
    /// Most requests in the background (read-ahead, write-back, asynchronous I/O) at a time. Kernels take 12
    /// if this is 0.
    pub max_background: u16,
    /// Requests in the background from which the kernel counts the device as congested.
    pub congestion_threshold: u16,
}

impl Wanted {
    /// The features to ask for.
    pub fn features(&self) -> Features {
        [
            Features::ASYNC_READ,
            Features::ASYNC_DIO,
            Features::BIG_WRITES,
            Features::MAX_PAGES,
            Features::ATOMIC_O_TRUNC,
            Features::AUTO_INVAL_DATA,
            Features::DO_READDIRPLUS,
            Features::READDIRPLUS_AUTO,
            Features::PARALLEL_DIROPS,
            Features::HANDLE_KILLPRIV_V2,
            Features::SETXATTR_EXT,
            Features::CACHE_SYMLINKS,
            Features::INIT_EXT,
            Features::DIRECT_IO_ALLOW_MMAP,
        ]
        .into_iter()
        .fold(Features::NONE, Features::with)
        .with_if(self.nodeids_are_inodes, Features::EXPORT_SUPPORT)
        .with_if(self.read_only, Features::NO_OPEN_SUPPORT)
        .with_if(self.read_only, Features::NO_OPENDIR_SUPPORT)
    }
}

/// What requests look like: the part of an agreement that parsing needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dialect {
    /// SETXATTR has its longer form.
    pub setxattr_ext: bool,
    /// Most bytes of one READ, WRITE or READDIR; more is refused.
    pub io_bytes_max: u32,
}

impl Dialect {
    /// Before INIT, when nothing is read or written.
    pub const BEFORE_INIT: Self = Self {
        setxattr_ext: false,
        io_bytes_max: 0,
    };
}

/// What holds for a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    minor: u32,
    features: Features,
    max_write_bytes: u32,
    max_pages: u16,
    max_readahead_bytes: u32,
    max_background: u16,
    congestion_threshold: u16,
}

/// How INIT is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Negotiation {
    /// By this ([`Encoder::init`](crate::Encoder::init)).
    Agreed(Agreed),
    /// The kernel speaks a later major version: by our version alone
    /// ([`Encoder::init_version`](crate::Encoder::init_version)). It then sends INIT again in that.
    Again,
    /// The kernel is too old: by this error, and its mount fails.
    Refused(Errno),
}

/// Decides how INIT is answered.
///
/// A kernel below 7.31 is refused by EPROTO. By the protocol a server would go down to the kernel's version;
/// this one has no older structures, and no such kernel has virtio-fs.
pub fn negotiate(offer: &Offer, wanted: &Wanted) -> Negotiation {
    if offer.major > wire::VERSION_MAJOR {
        return Negotiation::Again;
    }
    if offer.major < wire::VERSION_MAJOR || offer.minor < wire::VERSION_MINOR_MIN {
        return Negotiation::Refused(Errno::EPROTO);
    }
    let features = offer.features.intersection(wanted.features());
    assert!(!features.contains(Features::WRITEBACK_CACHE));
    let max_pages = if features.contains(Features::MAX_PAGES) {
        wanted.max_pages.max(1)
    } else {
        MAX_PAGES_DEFAULT
    };
    let request_bytes_max = u32::from(max_pages) * PAGE_BYTES;
    Negotiation::Agreed(Agreed {
        minor: offer.minor.min(wire::VERSION_MINOR),
        features,
        // Kernels take at least one page, whatever they are told.
        max_write_bytes: wanted.max_write_bytes.clamp(PAGE_BYTES, request_bytes_max),
        max_pages,
        max_readahead_bytes: offer.max_readahead_bytes.min(wanted.max_readahead_bytes),
        max_background: wanted.max_background,
        congestion_threshold: wanted.congestion_threshold,
    })
}

impl Agreed {
    /// The minor version that both sides have.
    pub const fn minor(&self) -> u32 {
        self.minor
    }

    /// What both sides do.
    pub const fn features(&self) -> Features {
        self.features
    }

    /// Whether sync(2) and syncfs(2) come as SYNCFS: from Linux 5.14 on. Older kernels end them by
    /// themselves.
    pub const fn passes_sync_on(&self) -> bool {
        self.minor >= wire::VERSION_MINOR_SYNCFS
    }

    /// Most bytes of a WRITE.
    pub const fn max_write_bytes(&self) -> u32 {
        self.max_write_bytes
    }

    /// Whether ENOSYS to OPEN ends OPEN and RELEASE without failing it.
    pub const fn zero_message_open(&self) -> bool {
        self.features.contains(Features::NO_OPEN_SUPPORT)
    }

    /// Whether ENOSYS to OPENDIR ends OPENDIR and RELEASEDIR without failing it.
    pub const fn zero_message_opendir(&self) -> bool {
        self.features.contains(Features::NO_OPENDIR_SUPPORT)
    }

    /// How later requests are parsed.
    pub fn dialect(&self) -> Dialect {
        Dialect {
            setxattr_ext: self.features.contains(Features::SETXATTR_EXT),
            io_bytes_max: u32::from(self.max_pages) * PAGE_BYTES,
        }
    }

    pub(crate) fn to_wire(self) -> wire::InitOut {
        let max_pages = if self.features.contains(Features::MAX_PAGES) {
            self.max_pages
        } else {
            0
        };
        wire::InitOut {
            major: wire::VERSION_MAJOR.into(),
            // The kernel takes the smaller of both versions, as this side did.
            minor: wire::VERSION_MINOR.into(),
            max_readahead: self.max_readahead_bytes.into(),
            flags: (self.features.bits() as u32).into(),
            max_background: self.max_background.into(),
            congestion_threshold: self.congestion_threshold.into(),
            max_write: self.max_write_bytes.into(),
            time_gran: TIME_GRANULARITY_NS.into(),
            max_pages: max_pages.into(),
            flags2: ((self.features.bits() >> 32) as u32).into(),
            ..wire::InitOut::default()
        }
    }
}
