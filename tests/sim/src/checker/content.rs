//! What sectors hold, so that what is read tells which write it is of.

use fabric_types::io::SECTOR_BYTES;

use super::{Tag, ZERO};

/// Fills sectors with what `tag` means there.
pub fn fill(buffer: &mut [u8], volume: usize, first: u64, tag: Tag) {
    for (bytes, sector) in buffer.chunks_exact_mut(SECTOR_BYTES as usize).zip(first..) {
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&content(volume, sector, tag, index).to_le_bytes());
        }
    }
}

fn content(volume: usize, sector: u64, tag: Tag, index: usize) -> u64 {
    if tag == ZERO {
        return 0;
    }
    let place = (volume as u64) << 56 ^ sector << 16 ^ index as u64;
    let mixed = (place ^ u64::from(tag.0) << 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ mixed >> 29) & !0xffff_ffff | u64::from(tag.0)
}

/// The tags of sectors; the number of the first one whose content nobody ever wrote there.
pub fn tags_of(bytes: &[u8], volume: usize, first: u64, out: &mut Vec<Tag>) -> Result<(), u64> {
    out.clear();
    for (sector, number) in bytes.chunks_exact(SECTOR_BYTES as usize).zip(first..) {
        let tag = Tag(u32::from_le_bytes(
            sector[..4].try_into().expect("a sector has 4 bytes"),
        ));
        let words = sector.chunks_exact(8).enumerate();
        for (index, word) in words {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            if word != content(volume, number, tag, index) {
                return Err(number);
            }
        }
        out.push(tag);
    }
    Ok(())
}
