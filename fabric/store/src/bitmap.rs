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

    /// Longest run of clear bits in `from..from + 256`, the first of those; its length is cut at `max`.
    /// `from` is a multiple of 64.
    #[must_use]
    pub fn longest_clear_run(&self, from: u32, max: u32) -> (u32, u32) {
        let first = from as usize / 64;
        let mut ends: [u64; 4] =
            std::array::from_fn(|i| self.words.get(first + i).map_or(0, |word| !word));
        if ends == [0; 4] || max == 0 {
            return (from, 0);
        }
        // After n rounds a bit stands for n + 1 clear bits of which it is the last.
        let mut len = 1;
        while len < max {
            let mut next = [0; 4];
            for i in 0..4 {
                let carry = if i == 0 { 0 } else { ends[i - 1] >> 63 };
                next[i] = ends[i] & (ends[i] << 1 | carry);
            }
            if next == [0; 4] {
                break;
            }
            ends = next;
            len += 1;
        }
        let word = ends.iter().position(|&w| w != 0).unwrap_or(0);
        let end = from + word as u32 * 64 + ends[word].trailing_zeros();
        (end + 1 - len, len)
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

    #[test]
    fn the_longest_run_of_a_region_is_found_wherever_it_lies() {
        let mut bits = Bitmap::new(512);
        assert_eq!(bits.longest_clear_run(256, 300), (256, 256));
        assert_eq!(bits.longest_clear_run(256, 10), (256, 10));
        for i in (256..300).chain(310..312).chain(400..512) {
            bits.set(i);
        }
        assert_eq!(bits.longest_clear_run(256, 256), (312, 88));
        assert_eq!(bits.longest_clear_run(256, 5), (300, 5));
        (312..400).for_each(|i| _ = bits.set(i));
        assert_eq!(bits.longest_clear_run(256, 256), (300, 10));
        (300..310).for_each(|i| _ = bits.set(i));
        assert_eq!(bits.longest_clear_run(256, 256).1, 0);
        bits.clear(511);
        assert_eq!(bits.longest_clear_run(256, 256), (511, 1));
        assert_eq!(bits.longest_clear_run(0, 256), (0, 256));
    }
}
