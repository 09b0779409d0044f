//! Replies on their way into guest memory.

use fuse_codec::{Encoder, Errno, NoRoom, REPLY_BYTES_MAX, REPLY_HEADER_BYTES, Unique};

use crate::pieces::write_behind;
use crate::service::Reply;

/// Where a reply goes.
#[derive(Clone, Copy)]
pub(crate) struct Destination<'a> {
    pub(crate) unique: Unique,
    /// Pieces with at least `bytes` bytes.
    pub(crate) pieces: &'a [libc::iovec],
    /// Bytes of the reply at most, without the data of READ.
    pub(crate) bytes: usize,
    /// Bytes of the data of READ at most, which are behind the header already.
    pub(crate) data_bytes: usize,
}

impl Destination<'_> {
    /// Writes a reply; returns its length, which is that in its header.
    ///
    /// # Safety
    /// The pieces are mapped.
    #[inline]
    pub(crate) unsafe fn write(&self, reply: &Reply<'_>) -> Result<u32, NoRoom> {
        match *reply {
            Reply::Data(bytes) if bytes as usize <= self.data_bytes => {
                // SAFETY: by the caller's promise.
                unsafe { self.header(bytes as usize) }
            }
            Reply::Bytes(bytes) => {
                let needed = REPLY_HEADER_BYTES + bytes.len();
                if needed > self.bytes {
                    let room = self.bytes;
                    return Err(NoRoom { needed, room });
                }
                // SAFETY: by the caller's promise.
                let len = unsafe { self.header(bytes.len()) }?;
                // SAFETY: the same.
                unsafe { write_behind(self.pieces, REPLY_HEADER_BYTES, bytes) };
                Ok(len)
            }
            // SAFETY: by the caller's promise.
            _ => unsafe { self.encode(|encoder| encode(encoder, reply)) },
        }
    }

    /// Writes an error.
    ///
    /// # Safety
    /// The pieces are mapped, and have room for a header.
    pub(crate) unsafe fn error(&self, errno: Errno) -> u32 {
        // SAFETY: by the caller's promise.
        let written = unsafe { self.encode(|encoder| encoder.error(errno)) };
        written.expect("room for a header")
    }

    /// Writes what an encoder writes, which is all of the reply; returns its length.
    ///
    /// # Safety
    /// The pieces are mapped.
    #[inline]
    pub(crate) unsafe fn encode(
        &self,
        with: impl FnOnce(Encoder<'_>) -> Result<usize, NoRoom>,
    ) -> Result<u32, NoRoom> {
        let mut buffer = [0; REPLY_BYTES_MAX];
        let out = &mut buffer[..self.bytes.min(REPLY_BYTES_MAX)];
        let len = with(Encoder::new(out, self.unique))?;
        // SAFETY: by the caller's promise.
        unsafe { write_behind(self.pieces, 0, &out[..len]) };
        Ok(len as u32)
    }

    /// Writes the header of a reply whose body is elsewhere.
    ///
    /// # Safety
    /// The pieces are mapped.
    #[inline]
    unsafe fn header(&self, body_bytes: usize) -> Result<u32, NoRoom> {
        let mut header = [0; REPLY_HEADER_BYTES];
        let len = Encoder::new(&mut header, self.unique).payload_header(body_bytes)?;
        // SAFETY: by the caller's promise.
        unsafe { write_behind(self.pieces, 0, &header) };
        Ok(len as u32)
    }
}

fn encode(encoder: Encoder<'_>, reply: &Reply<'_>) -> Result<usize, NoRoom> {
    match reply {
        Reply::Error(errno) => encoder.error(*errno),
        Reply::Done => encoder.empty(),
        Reply::Entry(entry) => encoder.entry(entry),
        Reply::NoEntry(valid) => encoder.negative_entry(*valid),
        Reply::Attr(attr, valid) => encoder.attr(attr, *valid),
        Reply::Statx(attr, valid) => encoder.statx(attr, *valid),
        Reply::Opened(opened) => encoder.opened(opened),
        Reply::Created(entry, opened) => encoder.created(entry, opened),
        Reply::Written(bytes) => encoder.written(*bytes),
        Reply::Stats(stats) => encoder.statfs(stats),
        Reply::XattrSize(bytes) => encoder.xattr_size(*bytes),
        Reply::Offset(offset) => encoder.lseek(*offset),
        // More data than were asked for.
        Reply::Data(bytes) => Err(NoRoom {
            needed: *bytes as usize,
            room: 0,
        }),
        Reply::Bytes(bytes) => encoder.bytes(bytes),
    }
}
