//! Frames byte by byte: what a connection is cut into. Little-endian.
//!
//! A frame is a [`FrameHeader`], the message's own header ([`fabric_types::wire`]), one CRC32C for each 4 KiB
//! block of the payload, and the payload. The frame header tells all lengths, so a kind of message that is
//! added needs nothing here.
//!
//! Two checksums stand in front: the first covers the lengths, so that none is acted upon that was damaged;
//! the second covers the message's header and the list of block CRCs. Into the first goes, unsent, the
//! sender's key for this direction (16 random bytes that were exchanged under TLS) and the frame's number. So
//! a frame that is lost, repeated, taken out of order or out of another connection is noticed, and whoever
//! cannot read the connection cannot slip one in. It is no protection against those who can read *and* change
//! the bytes: a CRC gives its key away. That is what `wire = "tls"` is for.

use fabric_types::block::BLOCK_BYTES;
use fabric_types::checksum::{Crc32c, crc32c};
use fabric_types::ids::CHUNK_BYTES;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"PSTF";

/// Longest header of a message; one that is longer is refused. Those of requests have 112 bytes at most,
/// those about queue pairs as many as a list of what is unanswered takes.
pub const HEADER_BYTES_MAX: usize = 2048;

/// Longest payload: a chunk. A longer one is refused.
pub const PAYLOAD_BYTES_MAX: u32 = CHUNK_BYTES as u32;

/// Most block CRCs: one more than blocks in the longest payload, for one that begins in the middle of a
/// block.
pub const CRCS_MAX: usize = (CHUNK_BYTES as usize) / BLOCK_BYTES + 1;

/// Most bytes of a frame before its payload.
pub const HEAD_BYTES_MAX: usize = FRAME_BYTES + HEADER_BYTES_MAX + 4 * CRCS_MAX;

/// Bytes of a block's CRC.
pub const CRC_BYTES: usize = 4;

/// Bytes of a [`FrameHeader`].
pub const FRAME_BYTES: usize = size_of::<FrameHeader>();

/// A direction's key.
pub type Key = [u8; 16];

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request, to the side that was connected to.
    Request,
    /// The answer to the request with the same number.
    Reply,
    /// A sign of life from a side that has been asked and has no answer yet. By a queue pair: what proves
    /// that it works, asked and answered once.
    Alive,
    /// About the queue pair beside the connection ([`crate::queue_pair::pairing`]).
    Pairing,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Request, Self::Reply, Self::Alive, Self::Pairing];

    fn code(self) -> u8 {
        self as u8 + 1
    }
}

/// Head of a frame.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | magic |
/// | 4 | 1 | kind: 1 request, 2 reply, 3 alive, 4 pairing |
/// | 5 | 1 | zero |
/// | 6 | 2 | bytes of the message's header |
/// | 8 | 8 | number that pairs a reply with its request |
/// | 16 | 4 | number of block CRCs |
/// | 20 | 4 | bytes of payload |
/// | 24 | 4 | most bytes of payload that the reply may have |
/// | 28 | 2 | where in its 4 KiB block the payload begins |
/// | 30 | 2 | zero |
/// | 32 | 4 | CRC32C of the message's header and the list of block CRCs |
/// | 36 | 4 | CRC32C of the key, the frame's number in its direction (8 bytes) and the 36 bytes before |
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    magic: [u8; 4],
    kind: u8,
    zero: u8,
    header_len: U16,
    pair: U64,
    crc_count: U32,
    payload_len: U32,
    room: U32,
    skip: U16,
    zero_too: U16,
    body_crc: U32,
    crc: U32,
}

const _: () = assert!(FRAME_BYTES == 40);

/// What is wrong with a frame. The peer, or something between, is broken: the connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes do not begin as a frame.
    #[error("not a frame")]
    NotOurs,
    /// A checksum does not match: damaged, lost, repeated or out of order.
    #[error("a frame failed its checksum, or is not the one that was due")]
    Checksum,
    /// A field has a value that no peer sends.
    #[error("frame field `{0}` has an impossible value")]
    Field(&'static str),
}

/// Numbers the frames of one direction and computes what their first checksum begins with.
#[derive(Debug, Clone)]
pub struct Stamp {
    key: Key,
    next: u64,
}

impl Stamp {
    /// For the first frame under this key.
    pub fn new(key: Key) -> Self {
        Self { key, next: 0 }
    }

    /// The checksum of the next frame's header.
    fn crc(&mut self, header: &FrameHeader) -> u32 {
        let mut bytes = [0; 16 + 8 + FRAME_BYTES - 4];
        bytes[..16].copy_from_slice(&self.key);
        bytes[16..24].copy_from_slice(&self.next.to_le_bytes());
        bytes[24..].copy_from_slice(&header.as_bytes()[..FRAME_BYTES - 4]);
        self.next += 1;
        crc32c(&bytes)
    }
}

/// A frame's head, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// What it carries.
    pub kind: Kind,
    /// Pairs a reply with its request.
    pub pair: u64,
    /// Bytes of the message's header.
    pub header_len: usize,
    /// Number of block CRCs.
    pub crc_count: usize,
    /// Bytes of payload.
    pub payload_len: u32,
    /// Most bytes of payload that the reply may have.
    pub room: u32,
    /// Where in its block the payload begins.
    pub skip: u16,
    body_crc: u32,
}

impl Head {
    /// Bytes of the frame before its payload.
    pub fn bytes(&self) -> usize {
        FRAME_BYTES + self.header_len + 4 * self.crc_count
    }

    /// Checks the header and the CRC list, once they are there, in one part or more.
    pub fn check_body(&self, parts: &[&[u8]]) -> Result<(), FrameError> {
        let mut crc = Crc32c::new();
        parts.iter().for_each(|part| crc.update(part));
        if crc.finish() == self.body_crc {
            Ok(())
        } else {
            Err(FrameError::Checksum)
        }
    }
}

/// What is to be sent, all but the payload itself.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// What it is.
    pub kind: Kind,
    /// Pairs a reply with its request.
    pub pair: u64,
    /// The message's header.
    pub header: &'a [u8],
    /// A CRC32C for each block of the payload.
    pub crcs: &'a [u32],
    /// Bytes of payload.
    pub payload_len: u32,
    /// Most bytes of payload that the reply may have.
    pub room: u32,
    /// Where in its block the payload begins.
    pub skip: u16,
}

impl Message<'_> {
    /// Appends the frame's head to `out`.
    ///
    /// # Panics
    /// If a part is longer than its bound: the sender's own mistake.
    pub fn encode(&self, stamp: &mut Stamp, out: &mut Vec<u8>) {
        assert!(self.header.len() <= HEADER_BYTES_MAX);
        assert!(self.payload_len <= PAYLOAD_BYTES_MAX);
        assert_eq!(self.crcs.len(), blocks(self.skip, self.payload_len));
        let mut body_crc = Crc32c::new();
        body_crc.update(self.header);
        let crcs_at = out.len() + FRAME_BYTES + self.header.len();
        let mut header = FrameHeader {
            magic: MAGIC,
            kind: self.kind.code(),
            zero: 0,
            header_len: (self.header.len() as u16).into(),
            pair: self.pair.into(),
            crc_count: (self.crcs.len() as u32).into(),
            payload_len: self.payload_len.into(),
            room: self.room.into(),
            skip: self.skip.into(),
            zero_too: 0.into(),
            body_crc: 0.into(),
            crc: 0.into(),
        };
        let at = out.len();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(self.header);
        for crc in self.crcs {
            out.extend_from_slice(&crc.to_le_bytes());
        }
        body_crc.update(&out[crcs_at..]);
        header.body_crc = body_crc.finish().into();
        header.crc = stamp.crc(&header).into();
        out[at..at + FRAME_BYTES].copy_from_slice(header.as_bytes());
    }
}

/// Reads a frame's head from the first [`FRAME_BYTES`] of `bytes`; the frame is counted if it is good.
pub fn parse(bytes: &[u8], stamp: &mut Stamp) -> Result<Head, FrameError> {
    let (header, _) = FrameHeader::ref_from_prefix(bytes).map_err(|_| FrameError::NotOurs)?;
    if header.magic != MAGIC {
        return Err(FrameError::NotOurs);
    }
    if stamp.crc(header) != header.crc.get() {
        return Err(FrameError::Checksum);
    }
    let known = Kind::ALL
        .into_iter()
        .find(|kind| kind.code() == header.kind);
    let kind = known.ok_or(FrameError::Field("kind"))?;
    let head = Head {
        kind,
        pair: header.pair.get(),
        header_len: usize::from(header.header_len.get()),
        crc_count: header.crc_count.get() as usize,
        payload_len: header.payload_len.get(),
        room: header.room.get(),
        skip: header.skip.get(),
        body_crc: header.body_crc.get(),
    };
    let fields = [
        ("header_len", head.header_len <= HEADER_BYTES_MAX),
        ("payload_len", head.payload_len <= PAYLOAD_BYTES_MAX),
        ("room", head.room <= PAYLOAD_BYTES_MAX),
        ("skip", usize::from(head.skip) < BLOCK_BYTES),
        (
            "crc_count",
            head.crc_count == blocks(head.skip, head.payload_len),
        ),
        ("zero", header.zero == 0 && header.zero_too.get() == 0),
    ];
    match fields.iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(FrameError::Field(field)),
        None => Ok(head),
    }
}

/// Number of blocks that a payload touches.
pub fn blocks(skip: u16, payload_len: u32) -> usize {
    match payload_len {
        0 => 0,
        len => (usize::from(skip) + len as usize).div_ceil(BLOCK_BYTES),
    }
}

/// Length of each part of a payload that has a CRC of its own, in order.
pub fn block_lens(skip: u16, payload_len: u32) -> impl Iterator<Item = usize> {
    let mut left = payload_len as usize;
    let mut room = BLOCK_BYTES - usize::from(skip);
    std::iter::from_fn(move || {
        let len = room.min(left);
        room = BLOCK_BYTES;
        left -= len;
        (len > 0).then_some(len)
    })
}

/// Takes the next frame that `bytes` describe, as far as they go, and appends it with checksums that fit;
/// returns how many bytes it took. So a fuzzer gets past the checksums.
#[cfg(any(test, feature = "fuzzing"))]
pub fn repair(bytes: &[u8], stamp: &mut Stamp, out: &mut Vec<u8>) -> Option<usize> {
    let (header, _) = FrameHeader::read_from_prefix(bytes).ok()?;
    let mut header = FrameHeader {
        magic: MAGIC,
        zero: 0,
        zero_too: 0.into(),
        ..header
    };
    let body = usize::from(header.header_len.get()) + 4 * header.crc_count.get() as usize;
    let body = &bytes[FRAME_BYTES..bytes.len().min(FRAME_BYTES.saturating_add(body))];
    let taken = FRAME_BYTES + body.len() + header.payload_len.get() as usize;
    let taken = taken.min(bytes.len());
    header.body_crc = crc32c(body).into();
    header.crc = stamp.crc(&header).into();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(&bytes[FRAME_BYTES..taken]);
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(header: &[u8]) -> Message<'_> {
        Message {
            kind: Kind::Request,
            pair: 7,
            header,
            crcs: &[],
            payload_len: 0,
            room: 4096,
            skip: 512,
        }
    }

    #[test]
    fn a_head_comes_back_as_it_was_sent() {
        let mut out = Vec::new();
        let crcs = [1, 2];
        let message = Message {
            crcs: &crcs,
            payload_len: 4096,
            ..message(b"01234567")
        };
        message.encode(&mut Stamp::new([1; 16]), &mut out);
        let head = parse(&out, &mut Stamp::new([1; 16])).unwrap();
        assert_eq!((head.kind, head.pair, head.room), (Kind::Request, 7, 4096));
        assert_eq!((head.header_len, head.crc_count), (8, 2));
        assert_eq!(head.bytes(), out.len());
        head.check_body(&[&out[FRAME_BYTES..]]).unwrap();
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let mut out = Vec::new();
        message(b"01234567").encode(&mut Stamp::new([1; 16]), &mut out);
        for bit in 0..out.len() * 8 {
            let mut bad = out.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let parsed = parse(&bad, &mut Stamp::new([1; 16]));
            let whole = parsed.and_then(|head| head.check_body(&[&bad[FRAME_BYTES..]]));
            assert!(whole.is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_frame_out_of_order_or_of_another_connection_is_noticed() {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let mut stamp = Stamp::new([1; 16]);
        message(b"").encode(&mut stamp, &mut first);
        message(b"").encode(&mut stamp, &mut second);
        assert_eq!(
            parse(&second, &mut Stamp::new([1; 16])),
            Err(FrameError::Checksum)
        );
        assert_eq!(
            parse(&first, &mut Stamp::new([2; 16])),
            Err(FrameError::Checksum)
        );
        let mut reader = Stamp::new([1; 16]);
        parse(&first, &mut reader).unwrap();
        assert_eq!(parse(&first, &mut reader), Err(FrameError::Checksum));
    }

    #[test]
    fn blocks_are_counted_from_where_the_payload_begins() {
        for (skip, len, lens) in [
            (0u16, 0u32, vec![]),
            (0, 4096, vec![4096]),
            (512, 4096, vec![3584, 512]),
            (3584, 512, vec![512]),
            (3584, 1024, vec![512, 512]),
        ] {
            assert_eq!(blocks(skip, len), lens.len());
            assert_eq!(block_lens(skip, len).collect::<Vec<_>>(), lens);
        }
    }
}
