//! The FUSE protocol as a kernel speaks it to a server, from bytes to operations and from results to bytes.
//!
//! A virtio-fs device takes requests from a guest's queues, a mount of the node itself takes them from
//! `/dev/fuse`; both are the same bytes. This crate knows neither. It has no I/O, no state and no allocation:
//! it borrows what it is given.
//!
//! # Where to begin
//!
//! - [`Header::parse`] and [`Header::control_bytes`] say how much of a request has to be copied out of guest
//!   memory. The payload of WRITE never is: it begins at [`Write::PAYLOAD_OFFSET`].
//! - [`Request::parse`] makes an [`Operation`] of it, or a [`Rejection`] with the error to answer.
//! - [`negotiate`] decides how INIT is answered; what is agreed gives the [`Dialect`] of later requests. The
//!   module [`init`] says which features are wanted and why.
//! - [`Reply`] is what an operation is answered with. [`Encoder`] writes it, [`DirBuffer`] listings of
//!   directories.
//! - [`wire`] has the structures, for whoever plays the kernel's part in a test.
//!
//! # Invariants
//!
//! - Whatever the bytes are, parsing ends with an operation or an error: it neither panics nor reads beyond
//!   them. A request is looked at once, front to back, and at no byte of a payload.
//! - What an [`Operation`] has is checked as far as that goes without a filesystem: names can be entries of a
//!   directory, lengths agree with the request's size, offsets and modes have a meaning. Node ids and handles
//!   may be forged; whoever looks them up answers ESTALE or EBADF.
//! - A request has exactly the bytes its operation needs. More or less is EIO, which no kernel gets to see.
//! - Names are bytes, never text.
//! - A reply is written whole or not at all, and its header's length is what the caller is told.
//! - Nothing is agreed that the kernel did not offer; `WRITEBACK_CACHE` never is ([`init`]).
//!
//! # Replies
//!
//! FORGET, BATCH_FORGET and INTERRUPT have none ([`Opcode::has_reply`]); on virtio-fs their chain is given
//! back with a used length of 0. An operation that is not served is answered ENOSYS, which many operations
//! take for the whole mount ([`Errno`]). BMAP, the mappings of DAX and what later kernels add are
//! such: [`Operation::Unsupported`].
//!
//! Sources: `include/uapi/linux/fuse.h` and `fs/fuse` of Linux 5.4 to 6.9, and section 5.11 of the virtio
//! specification 1.2.

mod attr;
mod bits;
mod directory;
mod errno;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod ids;
pub mod init;
mod malformed;
mod modes;
mod names;
mod opcode;
mod reply;
mod request;
#[cfg(test)]
mod tests;
pub mod wire;

pub use attr::{
    Attr, DeviceNumber, Entry, FsStats, Kind, PERMISSIONS_MASK, SetAttr, SetTime, Timestamp,
};
pub use directory::{DirBuffer, DirRecord};
pub use errno::Errno;
pub use ids::{Cookie, Handle, LockOwner, NodeId, Unique};
pub use init::{Agreed, Dialect, Features, Negotiation, Offer, Wanted, negotiate};
pub use malformed::Malformed;
pub use modes::{
    AccessMask, AccessMode, FallocateMode, LockKind, OpenFlags, RenameFlags, Whence, XattrMode,
};
pub use names::{LookupName, NAME_BYTES_MAX, Name, TARGET_BYTES_MAX, Target, XattrName};
pub use opcode::Opcode;
pub use reply::{Encoder, NoRoom, OpenOptions, Opened, REPLY_BYTES_MAX, REPLY_HEADER_BYTES, Reply};
pub use request::{
    CopyFileRange, Create, DirLayout, Fallocate, Forgets, HEADER_BYTES, Header, Ioctl, Lock,
    MAX_BATCH_FORGET_BYTES, MAX_CONTROL_BYTES, Operation, Poll, Read, Rejection, Release, Request,
    SetXattr, Tmpfile, Write, XATTR_BYTES_MAX,
};
