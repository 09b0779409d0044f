//! Counters of what a device did, kept per queue so that threads never share a line.

use std::sync::atomic::{AtomicU64, Ordering};

use fuse_codec::Opcode;
use vhost_backend::counter::add;

/// Declares the classes with their names in metrics.
macro_rules! classes {
    ($($(#[$doc:meta])* $class:ident = $name:literal,)*) => {
        /// What operations are told apart by.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub enum OpClass {
            $($(#[$doc])* $class,)*
        }

        impl OpClass {
            /// Every class.
            pub const ALL: &'static [Self] = &[$(Self::$class),*];

            /// Name in metrics.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$class => $name,)*
                }
            }
        }
    };
}

classes! {
    /// LOOKUP.
    Lookup = "lookup",
    /// GETATTR, STATX, ACCESS, READLINK, STATFS.
    Attributes = "attributes",
    /// SETATTR.
    SetAttributes = "set_attributes",
    /// SYMLINK, MKNOD, MKDIR, LINK, CREATE.
    Make = "make",
    /// UNLINK, RMDIR.
    Remove = "remove",
    /// RENAME, RENAME2.
    Rename = "rename",
    /// OPEN, OPENDIR, FLUSH, RELEASE, RELEASEDIR.
    Open = "open",
    /// READ.
    Read = "read",
    /// WRITE.
    Write = "write",
    /// READDIR, READDIRPLUS.
    List = "list",
    /// FSYNC, FSYNCDIR, SYNCFS.
    Sync = "sync",
    /// The calls on extended attributes.
    Xattr = "xattr",
    /// FALLOCATE, LSEEK, COPY_FILE_RANGE.
    Space = "space",
    /// FORGET, BATCH_FORGET.
    Forget = "forget",
    /// INIT, DESTROY, INTERRUPT, and what is not served.
    #[default]
    Other = "other",
}

const CLASSES: usize = OpClass::ALL.len();

impl OpClass {
    /// The class of an operation, also of an unknown one.
    pub fn of(opcode: u32) -> Self {
        use Opcode as O;
        match Opcode::from_number(opcode) {
            Some(O::Lookup) => Self::Lookup,
            Some(O::Getattr | O::Statx | O::Access | O::Readlink | O::Statfs) => Self::Attributes,
            Some(O::Setattr) => Self::SetAttributes,
            Some(O::Symlink | O::Mknod | O::Mkdir | O::Link | O::Create | O::Tmpfile) => Self::Make,
            Some(O::Unlink | O::Rmdir) => Self::Remove,
            Some(O::Rename | O::Rename2) => Self::Rename,
            Some(O::Open | O::Opendir | O::Flush | O::Release | O::Releasedir) => Self::Open,
            Some(O::Read) => Self::Read,
            Some(O::Write) => Self::Write,
            Some(O::Readdir | O::Readdirplus) => Self::List,
            Some(O::Fsync | O::Fsyncdir | O::Syncfs) => Self::Sync,
            Some(O::Setxattr | O::Getxattr | O::Listxattr | O::Removexattr) => Self::Xattr,
            Some(O::Fallocate | O::Lseek | O::CopyFileRange) => Self::Space,
            Some(O::Forget | O::BatchForget) => Self::Forget,
            _ => Self::Other,
        }
    }

    /// Histogram of its latencies. There is none of what has no reply and of what the guest does not wait
    /// for.
    #[inline]
    pub(crate) fn latency_class(self) -> Option<LatencyClass> {
        match self {
            Self::Read => Some(LatencyClass::Read),
            Self::Write => Some(LatencyClass::Write),
            Self::Sync => Some(LatencyClass::Sync),
            Self::Forget | Self::Other => None,
            _ => Some(LatencyClass::Metadata),
        }
    }
}

/// Operations whose latencies are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatencyClass {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// FSYNC, FSYNCDIR, SYNCFS.
    Sync,
    /// All others that have a reply.
    Metadata,
}

/// Number of [`LatencyClass`]es.
pub(crate) const LATENCY_CLASSES: usize = LatencyClass::ALL.len();

impl LatencyClass {
    /// All, in the order of their histograms.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Sync, Self::Metadata];

    /// Name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Sync => "sync",
            Self::Metadata => "metadata",
        }
    }
}

/// Sums at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FsCounters {
    finished: [u64; CLASSES],
    failed: [u64; CLASSES],
    /// Bytes of READ.
    pub read_bytes: u64,
    /// Bytes of WRITE.
    pub written_bytes: u64,
    /// Requests that were no requests: malformed, without room for their reply, before INIT. Those that are
    /// answered with an error number are among the failed ones, too.
    pub refused: u64,
    /// Times the guest was interrupted.
    pub interrupts: u64,
    /// Requests between the ring and their answer, now.
    pub in_flight: u64,
}

impl FsCounters {
    /// Operations of a class that are over, failed ones among them.
    pub fn finished(&self, class: OpClass) -> u64 {
        self.finished[class as usize]
    }

    /// Operations of a class that were answered with an error number. ENOENT of a LOOKUP is one.
    pub fn failed(&self, class: OpClass) -> u64 {
        self.failed[class as usize]
    }

    /// Both together.
    pub fn plus(&self, other: &Self) -> Self {
        let sum = |a: &[u64; CLASSES], b: &[u64; CLASSES]| {
            std::array::from_fn(|at| a[at].wrapping_add(b[at]))
        };
        Self {
            finished: sum(&self.finished, &other.finished),
            failed: sum(&self.failed, &other.failed),
            read_bytes: self.read_bytes.wrapping_add(other.read_bytes),
            written_bytes: self.written_bytes.wrapping_add(other.written_bytes),
            refused: self.refused.wrapping_add(other.refused),
            interrupts: self.interrupts.wrapping_add(other.interrupts),
            in_flight: self.in_flight.wrapping_add(other.in_flight),
        }
    }
}

/// Counters of one queue, on cache lines of their own. One thread writes, any may read.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCounters {
    finished: [AtomicU64; CLASSES],
    failed: [AtomicU64; CLASSES],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    refused: AtomicU64,
    interrupts: AtomicU64,
}

impl QueueCounters {
    /// The sums now, with so many requests in flight.
    pub fn snapshot(&self, in_flight: u64) -> FsCounters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FsCounters {
            finished: std::array::from_fn(|at| load(&self.finished[at])),
            failed: std::array::from_fn(|at| load(&self.failed[at])),
            read_bytes: load(&self.read_bytes),
            written_bytes: load(&self.written_bytes),
            refused: load(&self.refused),
            interrupts: load(&self.interrupts),
            in_flight,
        }
    }

    /// An operation is over.
    #[inline]
    pub(crate) fn finished(&self, class: OpClass) {
        add(&self.finished[class as usize], 1);
    }

    /// It was answered with an error number.
    #[inline]
    pub(crate) fn failed(&self, class: OpClass) {
        add(&self.failed[class as usize], 1);
    }

    #[inline]
    pub(crate) fn read(&self, bytes: u64) {
        add(&self.read_bytes, bytes);
    }

    #[inline]
    pub(crate) fn written(&self, bytes: u64) {
        add(&self.written_bytes, bytes);
    }

    #[cold]
    pub(crate) fn refused(&self) {
        add(&self.refused, 1);
    }

    pub(crate) fn interrupted(&self) {
        add(&self.interrupts, 1);
    }
}
