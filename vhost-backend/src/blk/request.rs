//! Parsing of virtio-blk requests.
//!
//! A request is a stream of bytes to read (header, then data) and a stream of bytes to write (data, then one
//! status byte); how either is cut into descriptors means nothing, as legacy-free drivers may lay it out in
//! any way.

use fabric_types::io::{Op, SECTOR_BYTES};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_BARRIER,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::{MAX_RANGE_SECTORS, MAX_RANGES, MAX_REQUEST_BYTES};
use crate::ring::{Chain, RingError, read_bytes, read_scattered};

/// Bytes of the request header: type, reserved, sector.
const HEADER_BYTES: usize = 16;
/// Bytes of one range of a discard or write-zeroes request: sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;
/// The one flag of a range: a write-zeroes may give the space back.
const RANGE_F_UNMAP: u32 = 1;

/// What the guest reads in the status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = VIRTIO_BLK_S_OK as u8,
    /// Failed.
    IoErr = VIRTIO_BLK_S_IOERR as u8,
    /// Not a request of this device.
    Unsupported = VIRTIO_BLK_S_UNSUPP as u8,
}

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Size of the volume now.
    pub size_bytes: u64,
    /// Refuse to change anything.
    pub read_only: bool,
    /// Writes must be durable before they are answered.
    pub fua: bool,
}

/// One range of a discard or write-zeroes request, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// What to do with it.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Length.
    pub len: u64,
}

/// What to do for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// One request to the engine; for reads and writes the chain holds its buffers.
    Submit(Range),
    /// Several requests: the ranges are in [`Ranges`].
    SubmitRanges,
    /// Copy the serial into the writable part.
    GetId,
    /// Nothing is left to do but to answer.
    Answer(Status),
}

/// Ranges of one request, checked, in memory of our own.
#[derive(Debug)]
pub struct Ranges {
    list: [Range; MAX_RANGES as usize],
    len: usize,
}

impl Default for Ranges {
    fn default() -> Self {
        Self {
            list: [Range {
                op: Op::Discard,
                offset: 0,
                len: 0,
            }; MAX_RANGES as usize],
            len: 0,
        }
    }
}

impl Ranges {
    /// The ranges that are not empty.
    pub fn as_slice(&self) -> &[Range] {
        &self.list[..self.len]
    }
}

/// Takes header and status off the chain, which then holds the data alone, and says what to do and where the
/// status byte goes. An error means that there is no status byte to answer with, or no header.
#[inline]
pub fn parse(
    chain: &mut Chain,
    limits: &Limits,
    ranges: &mut Ranges,
) -> Result<(Action, *mut u8), RingError> {
    let header = take_header(chain)?;
    let status = take_status(chain)?;
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
    let action = match word(0) & !VIRTIO_BLK_T_BARRIER {
        VIRTIO_BLK_T_IN => transfer(Op::Read, sector, chain.writable_bytes, limits),
        VIRTIO_BLK_T_OUT => write(sector, chain.readable_bytes, limits),
        VIRTIO_BLK_T_FLUSH => Action::Submit(Range {
            op: Op::Flush,
            offset: 0,
            len: 0,
        }),
        VIRTIO_BLK_T_GET_ID => Action::GetId,
        VIRTIO_BLK_T_DISCARD => parse_ranges(chain, limits, ranges, false),
        VIRTIO_BLK_T_WRITE_ZEROES => parse_ranges(chain, limits, ranges, true),
        _ => Action::Answer(Status::Unsupported),
    };
    Ok((action, status))
}

#[inline]
fn take_header(chain: &mut Chain) -> Result<[u8; HEADER_BYTES], RingError> {
    if chain.readable_bytes < HEADER_BYTES as u64 {
        return Err(RingError::Incomplete);
    }
    let mut header = [0; HEADER_BYTES];
    match chain.readable.first_mut() {
        Some(first) if first.iov_len >= HEADER_BYTES => {
            // SAFETY: the piece was translated and has at least as many bytes.
            unsafe { read_bytes(first.iov_base.cast(), &mut header) };
            advance(first, HEADER_BYTES);
        }
        _ => take_split_header(chain, &mut header),
    }
    chain.readable_bytes -= HEADER_BYTES as u64;
    let used_up = chain
        .readable
        .iter()
        .take_while(|piece| piece.iov_len == 0)
        .count();
    if used_up == chain.readable.len() {
        chain.readable.clear();
    } else if used_up > 0 {
        chain.readable.drain(..used_up);
    }
    Ok(header)
}

/// A header in several pieces.
#[cold]
fn take_split_header(chain: &mut Chain, header: &mut [u8; HEADER_BYTES]) {
    let mut at = 0;
    for piece in &mut chain.readable {
        let len = piece.iov_len.min(HEADER_BYTES - at);
        // SAFETY: the piece was translated and has at least `len` bytes.
        unsafe { read_bytes(piece.iov_base.cast(), &mut header[at..at + len]) };
        advance(piece, len);
        at += len;
        if at == HEADER_BYTES {
            break;
        }
    }
}

fn advance(piece: &mut libc::iovec, len: usize) {
    piece.iov_base = piece.iov_base.wrapping_byte_add(len);
    piece.iov_len -= len;
}

/// The status byte is the last that the device may write.
#[inline]
fn take_status(chain: &mut Chain) -> Result<*mut u8, RingError> {
    let last = chain.writable.last_mut().ok_or(RingError::Incomplete)?;
    last.iov_len -= 1;
    let status = last.iov_base.wrapping_byte_add(last.iov_len).cast::<u8>();
    if last.iov_len == 0 {
        chain.writable.pop();
    }
    chain.writable_bytes -= 1;
    Ok(status)
}

#[inline]
fn write(sector: u64, len: u64, limits: &Limits) -> Action {
    if limits.read_only {
        return Action::Answer(Status::IoErr);
    }
    transfer(Op::Write { fua: limits.fua }, sector, len, limits)
}

#[inline]
fn transfer(op: Op, sector: u64, len: u64, limits: &Limits) -> Action {
    match checked_range(op, sector, len, limits) {
        Some(range) if len > 0 && len <= MAX_REQUEST_BYTES => Action::Submit(range),
        Some(_) if len == 0 => Action::Answer(Status::Ok),
        _ => Action::Answer(Status::IoErr),
    }
}

/// The range in bytes, if it is whole sectors inside the volume.
#[inline]
fn checked_range(op: Op, sector: u64, len: u64, limits: &Limits) -> Option<Range> {
    let offset = sector.checked_mul(SECTOR_BYTES)?;
    let end = offset.checked_add(len)?;
    (len % SECTOR_BYTES == 0 && end <= limits.size_bytes).then_some(Range { op, offset, len })
}

#[cold]
fn parse_ranges(chain: &Chain, limits: &Limits, ranges: &mut Ranges, zeroes: bool) -> Action {
    let count = chain.readable_bytes / RANGE_BYTES as u64;
    let whole = chain.readable_bytes == count * RANGE_BYTES as u64;
    if limits.read_only || !whole || count == 0 || count > u64::from(MAX_RANGES) {
        return Action::Answer(Status::IoErr);
    }
    let mut bytes = [0; RANGE_BYTES * MAX_RANGES as usize];
    let bytes = &mut bytes[..chain.readable_bytes as usize];
    // SAFETY: the pieces were translated.
    unsafe { read_scattered(&chain.readable, bytes) };
    ranges.len = 0;
    for entry in bytes.chunks_exact(RANGE_BYTES) {
        match parse_range(entry, limits, zeroes) {
            Ok(range) if range.len == 0 => {}
            Ok(range) => {
                ranges.list[ranges.len] = range;
                ranges.len += 1;
            }
            Err(status) => return Action::Answer(status),
        }
    }
    if ranges.len == 0 {
        Action::Answer(Status::Ok)
    } else {
        Action::SubmitRanges
    }
}

fn parse_range(entry: &[u8], limits: &Limits, zeroes: bool) -> Result<Range, Status> {
    let word =
        |at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
    let (sector, sectors, flags) = (
        u64::from(word(0)) | u64::from(word(4)) << 32,
        word(8),
        word(12),
    );
    let unmap = flags & RANGE_F_UNMAP != 0;
    if flags & !RANGE_F_UNMAP != 0 || (unmap && !zeroes) {
        return Err(Status::Unsupported);
    }
    if sectors > MAX_RANGE_SECTORS {
        return Err(Status::IoErr);
    }
    let op = if zeroes {
        Op::WriteZeroes { unmap }
    } else {
        Op::Discard
    };
    checked_range(op, sector, u64::from(sectors) * SECTOR_BYTES, limits).ok_or(Status::IoErr)
}
