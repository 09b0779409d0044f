//! CRC32C (Castagnoli, RFC 3720 appendix B.4), the checksum of blocks and of all that the store writes about
//! them.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C of one piece of memory.
#[inline]
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC32C of memory in several pieces.
#[derive(Debug)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// Of nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Takes in the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of all pieces.
    #[must_use]
    pub fn finish(self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_the_vectors_of_rfc_3720() {
        let rising: Vec<u8> = (0..32).collect();
        let vectors: [(&[u8], u32); 4] = [
            (&[0; 32], 0x8A91_36AA),
            (&[0xFF; 32], 0x62A8_AB43),
            (&rising, 0x46DD_794E),
            (b"123456789", 0xE306_9283),
        ];
        for (bytes, expected) in vectors {
            assert_eq!(crc32c(bytes), expected);
        }
    }

    #[test]
    fn pieces_make_the_same_checksum_as_the_whole() {
        let bytes: Vec<u8> = (0..4096u32).map(|i| (i * 31) as u8).collect();
        for cut in [0, 1, 7, 64, 512, 4095, 4096] {
            let mut crc = Crc32c::new();
            crc.update(&bytes[..cut]);
            crc.update(&bytes[cut..]);
            assert_eq!(crc.finish(), crc32c(&bytes), "cut at {cut}");
        }
    }
}
