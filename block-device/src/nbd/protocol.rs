//! The nbd protocol after its handshake (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md,
//! "Transmission"), and its translation to virtio-blk. Integers of nbd are big-endian.

use crate::frontend::{CONFIG_BYTES, Offer};

/// Bytes of a request, before the data of a write.
pub const REQUEST_BYTES: usize = 28;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const SECTOR_BYTES: u64 = 512;
/// Most bytes of a read or write that are taken: what Linux sends at most.
pub const DATA_BYTES_MAX: u32 = 32 << 20;
/// The write is durable when it is answered.
const COMMAND_FLAG_FUA: u16 = 1;

/// Features of virtio-blk that are used.
pub mod feature {
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const DISCARD: u64 = 1 << 13;
    pub const VERSION_1: u64 = 1 << 32;
    /// All of them.
    pub const USED: u64 = RO | BLK_SIZE | FLUSH | DISCARD | VERSION_1;
}

/// Types of virtio-blk requests (virtio 1.2, section 5.2.6).
pub mod request_type {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const DISCARD: u32 = 11;
}

/// Transmission flags (`NBD_FLAG_*`).
mod device_flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
}

/// Size, block size and transmission flags of an nbd device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// `NBD_FLAG_*`.
    pub flags: u16,
}

impl Geometry {
    /// Derived from the daemon's features and configuration space.
    pub fn of(offer: &Offer) -> Self {
        let has = |feature: u64| offer.features & feature != 0;
        let mut flags = device_flag::HAS_FLAGS;
        if has(feature::RO) {
            flags |= device_flag::READ_ONLY;
        }
        if has(feature::FLUSH) {
            flags |= device_flag::SEND_FLUSH | device_flag::SEND_FUA;
        }
        if has(feature::DISCARD) && !has(feature::RO) {
            flags |= device_flag::SEND_TRIM;
        }
        let block_bytes = match has(feature::BLK_SIZE) {
            true => word(&offer.config, 20),
            false => SECTOR_BYTES as u32,
        };
        Self {
            size_bytes: size_bytes(&offer.config),
            block_bytes,
            flags,
        }
    }
}

/// Capacity in bytes, from a configuration space (virtio 1.2, section 5.2.4).
pub fn size_bytes(config: &[u8; CONFIG_BYTES]) -> u64 {
    let sectors = u64::from(word(config, 0)) | u64::from(word(config, 4)) << 32;
    sectors * SECTOR_BYTES
}

/// Most bytes of a discard.
pub fn discard_bytes_max(config: &[u8; CONFIG_BYTES]) -> u32 {
    word(config, 36).min(u32::MAX / SECTOR_BYTES as u32) * SECTOR_BYTES as u32
}

fn word(config: &[u8; CONFIG_BYTES], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&config[at..at + 4]);
    u32::from_le_bytes(bytes)
}

/// Command type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write {
        /// Durable when it is answered.
        fua: bool,
    },
    /// The client closes the connection.
    Disconnect,
    Flush,
    Trim,
    /// Not supported.
    Unknown,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Command type.
    pub kind: Kind,
    /// Returned in the reply.
    pub cookie: [u8; 8],
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
}

impl Request {
    /// Reads a request. `None` if it is none: the socket cannot be used any more.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (flags, rest) = rest.split_first_chunk::<2>()?;
        let (kind, rest) = rest.split_first_chunk::<2>()?;
        let (cookie, rest) = rest.split_first_chunk::<8>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let (length, _) = rest.split_first_chunk::<4>()?;
        if u32::from_be_bytes(*magic) != REQUEST_MAGIC {
            return None;
        }
        let kind = match u16::from_be_bytes(*kind) {
            0 => Kind::Read,
            1 => Kind::Write {
                fua: u16::from_be_bytes(*flags) & COMMAND_FLAG_FUA != 0,
            },
            2 => Kind::Disconnect,
            3 => Kind::Flush,
            4 => Kind::Trim,
            _ => Kind::Unknown,
        };
        Some(Self {
            kind,
            cookie: *cookie,
            offset: u64::from_be_bytes(*offset),
            length: u32::from_be_bytes(*length),
        })
    }
}

/// The answer to a request, before the data of a read. `error` is zero or a number of errno(3).
pub fn answer(cookie: [u8; 8], error: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie);
    bytes
}

/// The header of a virtio-blk request.
pub fn header(request_type: u32, offset: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&request_type.to_le_bytes());
    bytes[8..].copy_from_slice(&(offset / SECTOR_BYTES).to_le_bytes());
    bytes
}

/// The segment of a virtio-blk discard.
pub fn discarded(offset: u64, length: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(offset / SECTOR_BYTES).to_le_bytes());
    bytes[8..12].copy_from_slice(&(length / SECTOR_BYTES as u32).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_linux_sends_it() {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&[0x25, 0x60, 0x95, 0x13]);
        bytes[5] = 1;
        bytes[7] = 1;
        bytes[8..16].copy_from_slice(b"a cookie");
        bytes[16..24].copy_from_slice(&(1_u64 << 40).to_be_bytes());
        bytes[24..].copy_from_slice(&4096_u32.to_be_bytes());
        let request = Request::parse(&bytes).unwrap();
        assert_eq!(request.kind, Kind::Write { fua: true });
        assert_eq!((request.offset, request.length), (1 << 40, 4096));
        let answer = answer(request.cookie, 5);
        assert_eq!(answer[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5]);
        assert_eq!(&answer[8..], b"a cookie");
        bytes[0] = 0;
        assert_eq!(Request::parse(&bytes), None);
    }

    #[test]
    fn the_kernel_is_told_what_the_daemon_offers() {
        let mut config = [0; CONFIG_BYTES];
        config[..8].copy_from_slice(&2048_u64.to_le_bytes());
        config[20..24].copy_from_slice(&4096_u32.to_le_bytes());
        config[36..40].copy_from_slice(&u32::MAX.to_le_bytes());
        let offer = |features| Offer {
            features,
            queues: 1,
            config,
        };
        let all = Geometry::of(&offer(feature::USED & !feature::RO));
        assert_eq!(
            (all.size_bytes, all.block_bytes, all.flags),
            (1 << 20, 4096, 0b10_1101)
        );
        let read_only = Geometry::of(&offer(feature::RO | feature::DISCARD));
        assert_eq!((read_only.block_bytes, read_only.flags), (512, 0b11));
        assert_eq!(discard_bytes_max(&config), u32::MAX / 512 * 512);
    }
}
