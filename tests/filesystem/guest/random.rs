//! Numbers of a seed.

/// xorshift64*: enough to make every byte depend on the seed and its place.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Seeds that are neighbours begin far from each other, and none with zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        (self.number() >> 16) % bound
    }

    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        let bound = all.len() as u64;
        (bound > 0).then(|| all[self.below(bound) as usize])
    }

    pub fn bytes(&mut self, count: u64) -> Vec<u8> {
        let mut bytes = vec![0; count as usize];
        for chunk in bytes.chunks_mut(8) {
            let word = self.number().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        bytes
    }
}
