//! What a command sends and receives besides its header, and what stands in the header of its frame.
//!
//! That is the [`RequestHeader`], followed by the two stamps of a restoration: they belong to the request,
//! and its payload stays whole blocks.

use fabric_types::block::{BLOCK_BYTES, BlockStamp};
use fabric_types::iov::{IoVecs, IovCursor};
use fabric_types::wire::{RequestHeader, WireError};
use fabric_types::{Command, Request};
use zerocopy::{FromBytes, IntoBytes};

use super::frame;

/// The parts of an exchange, as the side that asks has them.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// What goes along with the request.
    pub payload: Option<IoVecs>,
    /// Bytes of it.
    pub payload_len: u32,
    /// Where the reply's payload goes.
    pub destination: Option<IoVecs>,
    /// Most bytes of it.
    pub room: u32,
    /// A reply that says that all went well has just so many.
    pub exact: bool,
    /// Where in its block the payload, of either direction, begins.
    pub skip: u16,
}

impl Shape {
    /// What of a connection's credit in bytes the exchange takes.
    pub fn cost(&self) -> u32 {
        self.payload_len + self.room
    }
}

/// The shape of a command.
pub fn of(command: &Command) -> Shape {
    let none = Shape {
        payload: None,
        payload_len: 0,
        destination: None,
        room: 0,
        exact: true,
        skip: 0,
    };
    match *command {
        Command::Read {
            offset,
            buffers,
            len,
            ..
        } => Shape {
            destination: Some(buffers),
            room: len,
            skip: skip(offset),
            ..none
        },
        Command::Write {
            offset,
            buffers,
            len,
            ..
        } => Shape {
            payload: Some(buffers),
            payload_len: len,
            skip: skip(offset),
            ..none
        },
        Command::Inspect { buffers, len, .. }
        | Command::ListChunks { buffers, len, .. }
        | Command::Fence { buffers, len, .. }
        | Command::TellFence { buffers, len, .. } => Shape {
            destination: Some(buffers),
            room: len,
            ..none
        },
        Command::Restore { buffers, len, .. } => Shape {
            payload: Some(buffers),
            payload_len: len,
            ..none
        },
        Command::Zero { .. } | Command::Flush { .. } | Command::Join => none,
    }
}

/// Room for the longest header of a request.
pub const REQUEST_BYTES_MAX: usize = size_of::<RequestHeader>() + size_of::<[BlockStamp; 2]>();

const _: () = assert!(REQUEST_BYTES_MAX <= frame::HEADER_BYTES_MAX);

/// Writes a request's header to `room`; returns what is used of it.
pub fn encode<'a>(request: &Request, room: &'a mut [u8; REQUEST_BYTES_MAX]) -> &'a [u8] {
    let (header, stamps) = room.split_at_mut(size_of::<RequestHeader>());
    header.copy_from_slice(RequestHeader::encode(request).as_bytes());
    match &request.command {
        Command::Restore { stamps: both, .. } => {
            stamps.copy_from_slice(both.as_bytes());
            &room[..]
        }
        _ => &room[..size_of::<RequestHeader>()],
    }
}

/// Reads a request's header; its data are, or will be, in `buffers`.
pub fn decode(bytes: &[u8], buffers: IoVecs) -> Result<Request, WireError> {
    let mut request = RequestHeader::parse(bytes)?.decode(buffers)?;
    let rest = &bytes[size_of::<RequestHeader>()..];
    if let Command::Restore { .. } = request.command {
        let stamps = <[BlockStamp; 2]>::read_from_bytes(rest);
        let stamps = stamps.map_err(|_| WireError::Field("stamps"))?;
        request.command = request.command.with_stamps(stamps);
    } else if !rest.is_empty() {
        return Err(WireError::Field("header"));
    }
    Ok(request)
}

fn skip(offset: u32) -> u16 {
    (offset as usize % BLOCK_BYTES) as u16
}

/// Puts the CRC of each block of a payload into `crcs`.
///
/// # Safety
/// The list and the memory are valid. The memory may change meanwhile (it may be a guest's): that only spoils
/// a sum.
pub unsafe fn sums(list: &IoVecs, skip: u16, len: u32, crcs: &mut Vec<u32>) {
    crcs.clear();
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) };
    let mut cursor = IovCursor::default();
    for len in frame::block_lens(skip, len) {
        // SAFETY: the caller's promise.
        crcs.push(unsafe { cursor.crc(list, len) });
    }
}
