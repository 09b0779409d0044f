//! Memory of an operation, cut up like a guest may cut it.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Bytes before the data at most, so that most addresses are unaligned.
const SHIFT_MAX: usize = 4096;
/// Pieces of one operation at most.
const PIECES_MAX: usize = 5;

/// Bytes in one allocation, and the iovecs that name them in order.
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
    iovecs: Vec<libc::iovec>,
}

impl Buffer {
    /// A buffer at a random address and cut at random bytes; half of them aligned and whole.
    pub fn new(len: usize, rng: &mut ChaCha8Rng) -> Self {
        let memory = vec![0xee; len + 2 * SHIFT_MAX];
        let aligned = memory.as_ptr().align_offset(SHIFT_MAX);
        let mut cuts = vec![0, len];
        let mut start = aligned;
        if rng.random_bool(0.5) {
            let step = [1, 4, 512][rng.random_range(0..3)];
            start += rng.random_range(0..SHIFT_MAX / step) * step;
            let cut = |rng: &mut ChaCha8Rng| rng.random_range(0..=len / step) * step;
            cuts.extend((1..rng.random_range(1..=PIECES_MAX)).map(|_| cut(rng)));
            cuts.sort_unstable();
            cuts.dedup();
        }
        let mut buffer = Self {
            memory,
            start,
            len,
            iovecs: Vec::new(),
        };
        let base = buffer.memory.as_mut_ptr();
        for pair in cuts.windows(2) {
            buffer.iovecs.push(libc::iovec {
                iov_base: base.wrapping_add(start + pair[0]).cast(),
                iov_len: pair[1] - pair[0],
            });
        }
        buffer
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }

    pub fn iovecs(&self) -> &[libc::iovec] {
        &self.iovecs
    }

    /// Whether the bytes around the buffer are as they were.
    pub fn surroundings_intact(&self) -> bool {
        let around = self.memory[..self.start]
            .iter()
            .chain(&self.memory[self.start + self.len..]);
        around.copied().all(|b| b == 0xee)
    }
}
