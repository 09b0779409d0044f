//! Sizes of volumes.

use serde::{Deserialize, Serialize};

/// Sizes of volumes are multiples of this: the unit of checksum and allocation on devices. An other size is
/// rounded up.
pub const VOLUME_SIZE_STEP_BYTES: u64 = 4096;

/// Largest volume. A larger one is refused; the limit keeps chunk indices of a layer below 2^28.
pub const MAX_VOLUME_BYTES: u64 = 1 << 50;

/// A checked volume size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VolumeSize(u64);

/// Why a size is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum SizeError {
    /// No bytes at all.
    #[error("a volume of 0 bytes cannot be used: give a size such as 10G")]
    Zero,
    /// More than [`MAX_VOLUME_BYTES`].
    #[error(
        "a volume of {size_bytes} bytes is too large: give at most {MAX_VOLUME_BYTES} bytes (1 PiB)"
    )]
    TooLarge {
        /// The size asked for.
        size_bytes: u64,
    },
}

impl VolumeSize {
    /// Rounds up to a multiple of [`VOLUME_SIZE_STEP_BYTES`], so that a guest gets at least what was asked
    /// for.
    ///
    /// # Errors
    /// Zero, and more than [`MAX_VOLUME_BYTES`].
    pub fn round_up(size_bytes: u64) -> Result<Self, SizeError> {
        if size_bytes == 0 {
            return Err(SizeError::Zero);
        }
        if size_bytes > MAX_VOLUME_BYTES {
            return Err(SizeError::TooLarge { size_bytes });
        }
        Ok(Self(size_bytes.next_multiple_of(VOLUME_SIZE_STEP_BYTES)))
    }

    /// The size in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_and_never_down() {
        for (asked, got) in [
            (1, 4096),
            (512, 4096),
            (4096, 4096),
            (4097, 8192),
            (MAX_VOLUME_BYTES, MAX_VOLUME_BYTES),
        ] {
            assert_eq!(VolumeSize::round_up(asked).unwrap().bytes(), got);
        }
    }

    #[test]
    fn zero_and_huge_are_refused() {
        assert_eq!(VolumeSize::round_up(0), Err(SizeError::Zero));
        for size_bytes in [MAX_VOLUME_BYTES + 1, u64::MAX] {
            assert_eq!(
                VolumeSize::round_up(size_bytes),
                Err(SizeError::TooLarge { size_bytes })
            );
        }
    }
}
