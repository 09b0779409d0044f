//! A bit set with a search for runs of clear bits.

/// A fixed number of bits.
#[derive(Debug, Clone)]
pub struct Bitmap {
    words: Vec<u64>,
    len: u32,
}

impl Bitmap {
    /// All bits clear.
    #[must_use]
    pub fn new(len: u32) -> Self {
        Self {
            words: vec![0; (len as usize).div_ceil(64)],
            len,
        }
    }

    /// Number of bits.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether bit `i` is set.
    #[must_use]
    pub fn get(&self, i: u32) -> bool {
        self.words[i as usize / 64] >> (i % 64) & 1 == 1
    }

    /// Sets bit `i`; returns whether it was clear.
    pub fn set(&mut self, i: u32) -> bool {
        let word = &mut self.words[i as usize / 64];
        let fresh = *word >> (i % 64) & 1 == 0;
        *word |= 1 << (i % 64);
        fresh
    }

    /// Clears bit `i`; returns whether it was set.
    pub fn clear(&mut self, i: u32) -> bool {
        let word = &mut self.words[i as usize / 64];
        let was = *word >> (i % 64) & 1 == 1;
        *word &= !(1 << (i % 64));
        was
    }

    /// Clear bits in `from..to`.
    #[must_use]
    pub fn count_clear(&self, from: u32, to: u32) -> u32 {
        let mut n = 0;
        let mut i = from;
        while i < to {
            let span = (64 - i % 64).min(to - i);
            let mask = if span == 64 {
                u64::MAX
            } else {
                ((1 << span) - 1) << (i % 64)
            };
            n += (!self.words[i as usize / 64] & mask).count_ones();
            i += span;
        }
        n
    }

    /// First bit at or after `from`, before `to`, that equals `value`.
    #[must_use]
    pub fn find(&self, value: bool, from: u32, to: u32) -> Option<u32> {
        let flip = if value { 0 } else { u64::MAX };
        let mut i = from;
        while i < to {
            let word = (self.words[i as usize / 64] ^ flip) >> (i % 64);
            if word != 0 {
                let at = i + word.trailing_zeros();
                return (at < to).then_some(at);
            }
            i += 64 - i % 64;
        }
        None
    }

    /// First run of clear bits at or after `from`, before `to`; its length is cut at `max`.
    #[must_use]
    pub fn clear_run(&self, from: u32, to: u32, max: u32) -> Option<(u32, u32)> {
        let start = self.find(false, from, to)?;
        let limit = to.min(start.saturating_add(max));
        let end = self.find(true, start, limit).unwrap_or(limit);
        Some((start, end - start))
    }

    /// The bits of words `first_word..` as bytes, for writing; at most `out.len()` bytes, the rest zero.
    pub fn write_bytes(&self, first_word: usize, out: &mut [u8]) {
        out.fill(0);
        let words = self.words[first_word..].iter().take(out.len() / 8);
        for (chunk, word) in out.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Replaces words from `first_word` on by the bytes read.
    pub fn read_bytes(&mut self, first_word: usize, bytes: &[u8]) {
        for (word, chunk) in self.words[first_word..]
            .iter_mut()
            .zip(bytes.chunks_exact(8))
        {
            *word = u64::from_le_bytes(chunk.try_into().expect("chunks of 8"));
        }
    }

    /// RAM held.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_clear_bits_are_found_across_words() {
        let mut bits = Bitmap::new(300);
        for i in (0..60).chain(130..140).chain(200..300) {
            assert!(bits.set(i));
        }
        assert_eq!(bits.clear_run(0, 300, 1000), Some((60, 70)));
        assert_eq!(bits.clear_run(0, 300, 9), Some((60, 9)));
        assert_eq!(bits.clear_run(130, 300, 1000), Some((140, 60)));
        assert_eq!(bits.clear_run(200, 300, 1), None);
        assert_eq!(bits.count_clear(0, 300), 130);
        assert_eq!(bits.count_clear(61, 66), 5);
        assert!(bits.clear(299) && !bits.clear(299));
        assert_eq!(bits.clear_run(200, 300, 5), Some((299, 1)));
    }
}
