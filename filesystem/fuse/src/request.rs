//! Requests: from bytes to an operation with checked arguments.

mod body;
mod operation;
mod parse;
mod reply_size;

use zerocopy::FromBytes;

use crate::errno::Errno;
use crate::ids::{NodeId, Unique};
use crate::init::Dialect;
use crate::malformed::Malformed;
use crate::opcode::Opcode;
use crate::wire;

pub use parse::XATTR_BYTES_MAX;

pub use operation::{
    CopyFileRange, Create, DirLayout, Fallocate, Forgets, Ioctl, Lock, Operation, Poll, Read,
    Release, SetXattr, Tmpfile, Write,
};

/// Most bytes that a request may have besides a payload; BATCH_FORGET may have more
/// ([`MAX_BATCH_FORGET_BYTES`]). A value of an extended attribute (64 KiB) with its name is the largest that
/// kernels make; beyond this a request is answered E2BIG.
pub const MAX_CONTROL_BYTES: usize = 128 << 10;

/// Most bytes of a BATCH_FORGET. The kernel fills the whole buffer that a reader of `/dev/fuse` offers
/// (`fuse_read_batch_forget` in `fs/fuse/dev.c`), which has room for a WRITE of 1 MiB and a page. A reader
/// must not offer more than this: a longer batch is refused, and since forgets have no reply, its lookups
/// would stay counted. On virtio-fs, kernels send each FORGET alone.
pub const MAX_BATCH_FORGET_BYTES: usize = (1 << 20) + 4096;

/// Bytes of `fuse_in_header`.
pub const HEADER_BYTES: usize = size_of::<wire::InHeader>();

/// What every request begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the whole request, with a payload.
    pub len: u32,
    /// Number of the operation, also of an unknown one.
    pub opcode: u32,
    /// Id of the request.
    pub unique: Unique,
    /// The inode it is about. Operations on no inode have 0.
    pub nodeid: NodeId,
    /// Who asks: file system user id.
    pub uid: u32,
    /// Who asks: file system group id.
    pub gid: u32,
    /// Who asks: process of the guest, 0 where that has no meaning here.
    pub pid: u32,
}

impl Header {
    /// Reads the header at the begin of `bytes`, which may be more.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let Ok((header, _)) = wire::InHeader::ref_from_prefix(bytes) else {
            return Err(Malformed::Truncated {
                needed: HEADER_BYTES,
                given: bytes.len(),
            });
        };
        if header.opcode.get() == wire::INIT_SWAPPED {
            return Err(Malformed::ByteOrder);
        }
        Ok(Self {
            len: header.len.get(),
            opcode: header.opcode.get(),
            unique: Unique(header.unique.get()),
            nodeid: NodeId(header.nodeid.get()),
            uid: header.uid.get(),
            gid: header.gid.get(),
            pid: header.pid.get(),
        })
    }

    /// How many bytes [`Request::parse`] needs: all but the payload of WRITE.
    ///
    /// [`Malformed::Length`] if there are less than the header, [`Malformed::TooLong`] beyond
    /// [`MAX_CONTROL_BYTES`], of BATCH_FORGET beyond [`MAX_BATCH_FORGET_BYTES`]; so a caller that copies this
    /// much never copies more than that.
    #[inline]
    pub fn control_bytes(&self) -> Result<usize, Malformed> {
        let len = self.len as usize;
        let control = if self.opcode == Opcode::Write.number() {
            len.min(Write::PAYLOAD_OFFSET)
        } else {
            len
        };
        let max = if self.opcode == Opcode::BatchForget.number() {
            MAX_BATCH_FORGET_BYTES
        } else {
            MAX_CONTROL_BYTES
        };
        if control < HEADER_BYTES {
            Err(Malformed::Length {
                header: self.len,
                given: HEADER_BYTES,
            })
        } else if control > max {
            Err(Malformed::TooLong(self.len))
        } else {
            Ok(control)
        }
    }

    /// Whether the kernel waits for a reply. Unknown operations are answered, with ENOSYS.
    #[inline]
    pub fn has_reply(&self) -> bool {
        Opcode::from_number(self.opcode).is_none_or(Opcode::has_reply)
    }
}

/// A request whose fields are checked. Names and values are borrowed from the bytes it was parsed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// Who asks, about which inode.
    pub header: Header,
    /// What is asked.
    pub operation: Operation<'a>,
}

/// A request that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed request: {reason}")]
pub struct Rejection {
    /// Its header, if that could be read.
    pub header: Option<Header>,
    /// What is wrong with it.
    #[source]
    pub reason: Malformed,
}

impl Rejection {
    /// The reply to give, if the kernel waits for one and could read it.
    pub fn reply(&self) -> Option<(Unique, Errno)> {
        let header = self.header.filter(Header::has_reply)?;
        Some((header.unique, self.reason.errno()))
    }
}

impl<'a> Request<'a> {
    /// Parses a request.
    ///
    /// `control` is the request without the payload of WRITE, or with it or any part of it; of other
    /// operations it is the whole request and ends with it. That the sender has as many bytes as
    /// [`Header::len`] says is for the caller to check where a payload is left out.
    pub fn parse(control: &'a [u8], dialect: Dialect) -> Result<Self, Rejection> {
        let header = Header::parse(control).map_err(|reason| Rejection {
            header: None,
            reason,
        })?;
        let operation = parse_body(&header, control, dialect).map_err(|reason| Rejection {
            header: Some(header),
            reason,
        })?;
        Ok(Self { header, operation })
    }
}

fn parse_body<'a>(
    header: &Header,
    control: &'a [u8],
    dialect: Dialect,
) -> Result<Operation<'a>, Malformed> {
    let control_bytes = header.control_bytes()?;
    if control.len() < control_bytes || control.len() > header.len as usize {
        return Err(Malformed::Length {
            header: header.len,
            given: control.len(),
        });
    }
    // Only kernels that agreed on extensions send them; before 7.38 the field was padding and zero.
    let extensions =
        wire::InHeader::ref_from_prefix(control).map_or(0, |(header, _)| header.total_extlen.get());
    if extensions != 0 {
        return Err(Malformed::Extensions);
    }
    parse::operation(header, &control[HEADER_BYTES..control_bytes], dialect)
}
