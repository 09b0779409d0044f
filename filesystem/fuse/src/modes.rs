//! Flags and modes of requests, as types that only hold what has a meaning.

use crate::bits::flag_set;
use crate::malformed::Malformed;

/// `__FMODE_EXEC`: the kernel opens the file to run it. It has no name for users of the kernel.
const FMODE_EXEC: u32 = 0x20;

/// Which directions an open file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMode {
    /// `O_RDONLY`
    Read,
    /// `O_WRONLY`
    Write,
    /// `O_RDWR`
    ReadWrite,
}

/// The flags of `open(2)`, as this machine's architecture numbers them: host and guest have the same.
///
/// The kernel takes `O_CREAT`, `O_EXCL` and `O_NOCTTY` out of OPEN. `O_TRUNC` it leaves in with
/// [`Features::ATOMIC_O_TRUNC`](crate::Features::ATOMIC_O_TRUNC).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFlags(u32);

impl OpenFlags {
    /// Checks the flags of a request.
    ///
    /// # Errors
    /// The access mode has no meaning for files.
    pub fn from_wire(flags: u32) -> Result<Self, Malformed> {
        let flags = Self(flags);
        // The fourth value of the two bits is for device drivers.
        if flags.has(libc::O_WRONLY) && flags.has(libc::O_RDWR) {
            return Err(field("flags", flags.0));
        }
        Ok(flags)
    }

    /// As on the wire.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Which directions the file is opened for.
    pub const fn access(self) -> AccessMode {
        if self.has(libc::O_RDWR) {
            AccessMode::ReadWrite
        } else if self.has(libc::O_WRONLY) {
            AccessMode::Write
        } else {
            AccessMode::Read
        }
    }

    /// Each write goes to the end of the file, wherever that is by then.
    pub const fn append(self) -> bool {
        self.has(libc::O_APPEND)
    }

    /// The file is emptied.
    pub const fn truncate(self) -> bool {
        self.has(libc::O_TRUNC)
    }

    /// CREATE fails if the name is there.
    pub const fn exclusive(self) -> bool {
        self.has(libc::O_EXCL)
    }

    /// A write is durable, with the metadata to read it, before it returns (`O_DSYNC` or `O_SYNC`).
    pub const fn data_sync(self) -> bool {
        self.has(libc::O_DSYNC)
    }

    /// A write is durable, with all metadata, before it returns (`O_SYNC`).
    pub const fn sync(self) -> bool {
        self.has(libc::O_SYNC)
    }

    /// The guest's page cache is passed by (`O_DIRECT`).
    pub const fn direct(self) -> bool {
        self.has(libc::O_DIRECT)
    }

    /// The file is opened to be run.
    pub const fn execute(self) -> bool {
        self.0 & FMODE_EXEC != 0
    }

    const fn has(self, flag: libc::c_int) -> bool {
        self.0 & flag as u32 == flag as u32
    }
}

/// What RENAME2 does if the new name is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameFlags {
    /// The new name's inode loses that name. RENAME always does this.
    Replace,
    /// It fails (EEXIST).
    NoReplace,
    /// The two names change places; both must be there.
    Exchange,
    /// The new name's inode loses that name, and a whiteout takes the old name: a character device with the
    /// number 0:0, by which an overlay filesystem hides a name of its lower layer.
    Whiteout {
        /// The rename fails if the new name is taken (EEXIST).
        no_replace: bool,
    },
}

impl RenameFlags {
    pub(crate) fn from_wire(flags: u32) -> Result<Self, Malformed> {
        const WHITEOUT_NO_REPLACE: u32 = libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE;
        match flags {
            0 => Ok(Self::Replace),
            libc::RENAME_NOREPLACE => Ok(Self::NoReplace),
            libc::RENAME_EXCHANGE => Ok(Self::Exchange),
            libc::RENAME_WHITEOUT => Ok(Self::Whiteout { no_replace: false }),
            WHITEOUT_NO_REPLACE => Ok(Self::Whiteout { no_replace: true }),
            // An exchange leaves no name free and replaces nothing.
            _ => Err(field("flags", flags)),
        }
    }
}

/// What FALLOCATE does with a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FallocateMode {
    /// Space for it is there afterwards; data stay.
    Allocate {
        /// The size stays even if the range ends beyond it.
        keep_size: bool,
    },
    /// It reads as zeroes and takes no space; the size stays.
    PunchHole,
    /// It reads as zeroes, with space for it.
    Zero {
        /// The size stays even if the range ends beyond it.
        keep_size: bool,
    },
}

impl FallocateMode {
    pub(crate) fn from_wire(mode: u32) -> Result<Self, Malformed> {
        const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
        const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
        const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;
        let keep_size = mode & KEEP_SIZE != 0;
        match mode & !KEEP_SIZE {
            0 => Ok(Self::Allocate { keep_size }),
            PUNCH_HOLE if keep_size => Ok(Self::PunchHole),
            ZERO_RANGE => Ok(Self::Zero { keep_size }),
            _ => Err(Malformed::FallocateMode(mode)),
        }
    }
}

/// What LSEEK looks for. Kernels compute other ways to seek themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whence {
    /// The first byte of data from the offset on.
    Data,
    /// The first byte of a hole from the offset on; the end of the file counts as one.
    Hole,
}

impl Whence {
    pub(crate) fn from_wire(whence: u32) -> Result<Self, Malformed> {
        const DATA: u32 = libc::SEEK_DATA as u32;
        const HOLE: u32 = libc::SEEK_HOLE as u32;
        match whence {
            DATA => Ok(Self::Data),
            HOLE => Ok(Self::Hole),
            _ => Err(field("whence", whence)),
        }
    }
}

/// Whether SETXATTR may make or change an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XattrMode {
    /// Both.
    Set,
    /// It must not be there (EEXIST).
    Create,
    /// It must be there (ENODATA).
    Replace,
}

impl XattrMode {
    pub(crate) fn from_wire(flags: u32) -> Result<Self, Malformed> {
        const CREATE: u32 = libc::XATTR_CREATE as u32;
        const REPLACE: u32 = libc::XATTR_REPLACE as u32;
        match flags {
            0 => Ok(Self::Set),
            CREATE => Ok(Self::Create),
            REPLACE => Ok(Self::Replace),
            _ => Err(field("flags", flags)),
        }
    }
}

/// Kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// None: the range is unlocked.
    Unlock,
}

impl LockKind {
    pub(crate) fn from_wire(kind: u32) -> Result<Self, Malformed> {
        const READ: u32 = libc::F_RDLCK as u32;
        const WRITE: u32 = libc::F_WRLCK as u32;
        const UNLOCK: u32 = libc::F_UNLCK as u32;
        match kind {
            READ => Ok(Self::Read),
            WRITE => Ok(Self::Write),
            UNLOCK => Ok(Self::Unlock),
            _ => Err(field("type", kind)),
        }
    }
}

flag_set! {
    /// What ACCESS asks for; none means whether the inode is there.
    AccessMask(u32) {
        /// `X_OK`: run a file, search a directory.
        EXECUTE = 0;
        /// `W_OK`
        WRITE = 1;
        /// `R_OK`
        READ = 2;
    }
}

impl AccessMask {
    pub(crate) fn from_wire(mask: u32) -> Result<Self, Malformed> {
        if mask > 7 {
            return Err(field("mask", mask));
        }
        Ok(Self::from_bits(mask))
    }
}

/// A field with a value that has no meaning.
pub(crate) fn field(field: &'static str, value: impl Into<u64>) -> Malformed {
    Malformed::Field {
        field,
        value: value.into(),
    }
}
