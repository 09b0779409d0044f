//! What becomes of a write that a crash or an error interrupts.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::WriteRecord;
use super::image::{Image, SECTOR_BYTES};

/// Which sectors of a write survive.
#[derive(Clone, Copy)]
enum Fate {
    Whole,
    Lost,
    Before(usize),
    From(usize),
    Some,
}

impl Fate {
    /// `keep` is the share of writes that survive whole.
    fn draw(sectors: usize, keep: f64, rng: &mut ChaCha8Rng) -> Self {
        if rng.random_bool(keep) {
            return Self::Whole;
        }
        let cut = rng.random_range(0..=sectors);
        [Self::Lost, Self::Before(cut), Self::From(cut), Self::Some][rng.random_range(0..4)]
    }

    fn spares(self, sector: usize, rng: &mut ChaCha8Rng) -> bool {
        match self {
            Self::Whole => true,
            Self::Lost => false,
            Self::Before(cut) => sector < cut,
            Self::From(cut) => sector >= cut,
            Self::Some => rng.random_bool(0.5),
        }
    }
}

/// Applies a write, or some of its sectors, or nothing; tells what it applied.
pub(super) fn apply_with_luck(
    image: &mut Image,
    record: &WriteRecord,
    keep: f64,
    rng: &mut ChaCha8Rng,
) -> Vec<WriteRecord> {
    let fate = Fate::draw(record.bytes.len() / SECTOR_BYTES, keep, rng);
    let mut kept = Vec::new();
    for (sector, bytes) in record.bytes.chunks_exact(SECTOR_BYTES).enumerate() {
        if fate.spares(sector, rng) {
            let offset = record.offset + (sector * SECTOR_BYTES) as u64;
            image.write(offset, bytes);
            let bytes = bytes.into();
            kept.push(WriteRecord { offset, bytes });
        }
    }
    kept
}
