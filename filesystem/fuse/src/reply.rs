//! Replies: from results to bytes.
//!
//! A reply's length is in its header, and the kernel compares it with the bytes it got. On virtio-fs these
//! are the used length, which must be the same. Every function here gives that length.

use std::time::Duration;

use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::attr::{Attr, Entry, FsStats};
use crate::bits::flag_set;
use crate::errno::Errno;
use crate::ids::{Handle, Unique};
use crate::init::Agreed;
use crate::wire;

/// Bytes of `fuse_out_header`; all of a reply that is an error or has no body.
pub const REPLY_HEADER_BYTES: usize = size_of::<wire::OutHeader>();

/// Room for every reply whose body is one of the protocol's structures. Not bounded by it:
/// [`Encoder::bytes`].
pub const REPLY_BYTES_MAX: usize = REPLY_HEADER_BYTES + size_of::<wire::StatxOut>();

/// There is less room than the reply needs; nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a reply of {needed} bytes, and room for {room}")]
pub struct NoRoom {
    /// Bytes of the reply.
    pub needed: usize,
    /// Bytes of room.
    pub room: usize,
}

flag_set! {
    /// How the kernel treats a file or directory that it opened.
    OpenOptions(u32) {
        /// Reads and writes pass the page cache by.
        DIRECT_IO = 0;
        /// Pages in the cache stay.
        KEEP_CACHE = 1;
        /// There are no offsets.
        NONSEEKABLE = 2;
        /// The kernel keeps the listing.
        CACHE_DIR = 3;
        /// There are no offsets, and reads and writes do not wait for each other.
        STREAM = 4;
        /// FLUSH is not sent (from 7.35 on; older kernels send it).
        NOFLUSH = 5;
        /// Direct writes to one file run in parallel (from 7.38 on).
        PARALLEL_DIRECT_WRITES = 6;
    }
}

/// A file or directory that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// What later requests call it.
    pub handle: Handle,
    /// How the kernel treats it.
    pub options: OpenOptions,
}

impl Opened {
    fn to_wire(self) -> wire::OpenOut {
        wire::OpenOut {
            fh: self.handle.0.into(),
            open_flags: self.options.bits().into(),
            padding: 0.into(),
        }
    }
}

/// How a request is answered.
///
/// A reply that does not fit the operation is a fault of the service: the guest gets EIO.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reply<'a> {
    /// It failed. ENOSYS is for operations that are not served at all ([`Errno`]).
    Error(Errno),
    /// It is done, and there is nothing to tell. Also for operations without a reply, where it is ignored.
    Done,
    /// LOOKUP, SYMLINK, MKNOD, MKDIR, LINK.
    Entry(Entry),
    /// LOOKUP: there is no such name, which the kernel may go by for so long.
    NoEntry(Duration),
    /// GETATTR, SETATTR: attributes, and how long the kernel may go by them.
    Attr(Attr, Duration),
    /// STATX: the same.
    Statx(Attr, Duration),
    /// OPEN, OPENDIR.
    Opened(Opened),
    /// CREATE.
    Created(Entry, Opened),
    /// READ: so many bytes are in the room that the request had, from its begin on.
    Data(u32),
    /// WRITE, COPY_FILE_RANGE: so many bytes were written.
    Written(u32),
    /// STATFS.
    Stats(FsStats),
    /// GETXATTR and LISTXATTR with a size of 0: bytes that there would be.
    XattrSize(u32),
    /// READLINK, GETXATTR, LISTXATTR, READDIR ([`DirBuffer`](crate::DirBuffer)): bytes that follow the
    /// header.
    Bytes(&'a [u8]),
    /// LSEEK: what was found.
    Offset(u64),
}

/// Writes one reply to the begin of a buffer. Each function writes it whole and gives its length, or
/// [`NoRoom`]; an error always fits into [`REPLY_HEADER_BYTES`].
#[derive(Debug)]
pub struct Encoder<'a> {
    out: &'a mut [u8],
    unique: Unique,
}

impl<'a> Encoder<'a> {
    /// A reply to the request `unique`.
    pub fn new(out: &'a mut [u8], unique: Unique) -> Self {
        Self { out, unique }
    }

    /// Any operation failed.
    pub fn error(self, errno: Errno) -> Result<usize, NoRoom> {
        self.reply(-errno.raw(), &[])
    }

    /// An operation without a result is done.
    pub fn empty(self) -> Result<usize, NoRoom> {
        self.reply(0, &[])
    }

    /// The header alone, for a body of `body_bytes` that the caller puts behind it: data of READ, records of
    /// READDIR. The length that is given is the header's and the body's.
    ///
    /// # Panics
    /// If the reply's length does not fit into 32 bits.
    pub fn payload_header(self, body_bytes: usize) -> Result<usize, NoRoom> {
        self.header(0, body_bytes)?;
        Ok(REPLY_HEADER_BYTES + body_bytes)
    }

    /// LOOKUP, SYMLINK, MKNOD, MKDIR, LINK.
    pub fn entry(self, entry: &Entry) -> Result<usize, NoRoom> {
        self.body(&entry.to_wire())
    }

    /// LOOKUP of a name that is not there, which the kernel may go by for a while. Where it may not, the
    /// reply is an error: ENOENT.
    pub fn negative_entry(self, valid: Duration) -> Result<usize, NoRoom> {
        self.body(&wire::EntryOut {
            entry_valid: valid.as_secs().into(),
            entry_valid_nsec: valid.subsec_nanos().into(),
            ..wire::EntryOut::default()
        })
    }

    /// GETATTR, SETATTR.
    pub fn attr(self, attr: &Attr, valid: Duration) -> Result<usize, NoRoom> {
        self.body(&wire::AttrOut {
            attr_valid: valid.as_secs().into(),
            attr_valid_nsec: valid.subsec_nanos().into(),
            dummy: 0.into(),
            attr: attr.to_wire(),
        })
    }

    /// STATX.
    pub fn statx(self, attr: &Attr, valid: Duration) -> Result<usize, NoRoom> {
        self.body(&wire::StatxOut {
            attr_valid: valid.as_secs().into(),
            attr_valid_nsec: valid.subsec_nanos().into(),
            flags: 0.into(),
            spare: FromZeros::new_zeroed(),
            stat: attr.to_statx(),
        })
    }

    /// OPEN, OPENDIR.
    pub fn opened(self, opened: &Opened) -> Result<usize, NoRoom> {
        self.body(&opened.to_wire())
    }

    /// CREATE.
    pub fn created(self, entry: &Entry, opened: &Opened) -> Result<usize, NoRoom> {
        #[derive(IntoBytes, Immutable)]
        #[repr(C)]
        struct Created(wire::EntryOut, wire::OpenOut);
        self.body(&Created(entry.to_wire(), opened.to_wire()))
    }

    /// WRITE, COPY_FILE_RANGE: how many bytes were written.
    pub fn written(self, bytes: u32) -> Result<usize, NoRoom> {
        self.body(&wire::WriteOut {
            size: bytes.into(),
            padding: 0.into(),
        })
    }

    /// STATFS.
    pub fn statfs(self, stats: &FsStats) -> Result<usize, NoRoom> {
        self.body(&stats.to_wire())
    }

    /// GETXATTR, LISTXATTR with a size of 0: how many bytes there would be.
    pub fn xattr_size(self, bytes: u32) -> Result<usize, NoRoom> {
        self.body(&wire::GetxattrOut {
            size: bytes.into(),
            padding: 0.into(),
        })
    }

    /// READLINK: the target, without NUL. GETXATTR: the value. LISTXATTR: the names, each with a NUL.
    pub fn bytes(self, bytes: &[u8]) -> Result<usize, NoRoom> {
        self.reply(0, bytes)
    }

    /// LSEEK: what was found.
    pub fn lseek(self, offset: u64) -> Result<usize, NoRoom> {
        self.body(&wire::LseekOut {
            offset: offset.into(),
        })
    }

    /// INIT: what is agreed.
    pub fn init(self, agreed: &Agreed) -> Result<usize, NoRoom> {
        self.body(&agreed.to_wire())
    }

    /// INIT from a kernel of a later major version: ours.
    pub fn init_version(self) -> Result<usize, NoRoom> {
        self.body(&wire::InitOut {
            major: wire::VERSION_MAJOR.into(),
            minor: wire::VERSION_MINOR.into(),
            ..wire::InitOut::default()
        })
    }

    fn body<T: IntoBytes + Immutable>(self, body: &T) -> Result<usize, NoRoom> {
        self.reply(0, body.as_bytes())
    }

    fn reply(self, error: i32, body: &[u8]) -> Result<usize, NoRoom> {
        let needed = REPLY_HEADER_BYTES + body.len();
        if needed > self.out.len() {
            return Err(NoRoom {
                needed,
                room: self.out.len(),
            });
        }
        let room = self.header(error, body.len())?;
        room[..body.len()].copy_from_slice(body);
        Ok(needed)
    }

    /// Writes the header; gives what is behind it.
    fn header(self, error: i32, body_bytes: usize) -> Result<&'a mut [u8], NoRoom> {
        let room = self.out.len();
        let Some((head, rest)) = self.out.split_at_mut_checked(REPLY_HEADER_BYTES) else {
            return Err(NoRoom {
                needed: REPLY_HEADER_BYTES,
                room,
            });
        };
        let len = u32::try_from(REPLY_HEADER_BYTES + body_bytes).ok();
        let header = wire::OutHeader {
            len: len.expect("a reply below 4 GiB").into(),
            error: error.into(),
            unique: self.unique.0.into(),
        };
        head.copy_from_slice(header.as_bytes());
        Ok(rest)
    }
}
