//! The bytes of a file, in blocks; a block that is not there is a hole.

use std::collections::BTreeMap;

use fuse_codec::Whence;

/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 4096;

type Block = Box<[u8; BLOCK_BYTES as usize]>;

fn zeroes() -> Block {
    Box::new([0; BLOCK_BYTES as usize])
}

/// A file's bytes.
#[derive(Debug, Default)]
pub struct Content {
    blocks: BTreeMap<u64, Block>,
    size: u64,
}

/// Parts of a range in each of its blocks: block, first byte within it, number of bytes.
fn parts(offset: u64, bytes: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let mut at = offset;
    let end = offset + bytes;
    std::iter::from_fn(move || {
        let inside = at % BLOCK_BYTES;
        let len = (BLOCK_BYTES - inside).min(end - at);
        let part = (at / BLOCK_BYTES, inside as usize, len as usize);
        at += len;
        (len > 0).then_some(part)
    })
}

impl Content {
    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes in memory.
    pub fn allocated_bytes(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK_BYTES
    }

    /// Appends up to `bytes` bytes from `offset` on to `out`, less at the end of the file.
    pub fn read(&self, offset: u64, bytes: u64, out: &mut Vec<u8>) {
        let bytes = self.size.saturating_sub(offset).min(bytes);
        for (block, from, len) in parts(offset, bytes) {
            match self.blocks.get(&block) {
                Some(block) => out.extend_from_slice(&block[from..from + len]),
                None => out.resize(out.len() + len, 0),
            }
        }
    }

    /// Writes bytes, and makes the file longer if they end beyond it.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for (block, from, len) in parts(offset, bytes.len() as u64) {
            let (now, later) = rest.split_at(len);
            let block = self.blocks.entry(block).or_insert_with(zeroes);
            block[from..from + len].copy_from_slice(now);
            rest = later;
        }
        if !bytes.is_empty() {
            self.size = self.size.max(offset + bytes.len() as u64);
        }
    }

    /// Cuts the file, or makes it longer by a hole.
    pub fn set_size(&mut self, size: u64) {
        if size < self.size {
            self.zero(size, self.size - size);
            self.blocks.split_off(&size.div_ceil(BLOCK_BYTES));
        }
        self.size = size;
    }

    /// Makes a range read as zeroes; whole blocks of it become holes. The size stays.
    pub fn zero(&mut self, offset: u64, bytes: u64) {
        let end = offset.saturating_add(bytes);
        let (first, behind) = (offset.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES);
        let whole: Vec<u64> = match first < behind {
            true => self
                .blocks
                .range(first..behind)
                .map(|(at, _)| *at)
                .collect(),
            false => Vec::new(),
        };
        for block in whole {
            self.blocks.remove(&block);
        }
        // At most one block at either end is left in part.
        let head = (first * BLOCK_BYTES).min(end);
        let tail = (behind * BLOCK_BYTES).max(head);
        for (from, to) in [(offset, head), (tail, end)] {
            for (block, inside, len) in parts(from, to.saturating_sub(from)) {
                if let Some(block) = self.blocks.get_mut(&block) {
                    block[inside..inside + len].fill(0);
                }
            }
        }
    }

    /// Takes memory for a range, at most so many blocks of it.
    pub fn allocate(&mut self, offset: u64, bytes: u64, blocks_max: u64) -> bool {
        let end = offset + bytes;
        let blocks = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        if blocks.end - blocks.start > blocks_max {
            return false;
        }
        for block in blocks {
            self.blocks.entry(block).or_insert_with(zeroes);
        }
        true
    }

    /// The first byte of data or of a hole from `offset` on, which is inside the file. None if only a hole
    /// follows.
    pub fn seek(&self, offset: u64, whence: Whence) -> Option<u64> {
        let first = offset / BLOCK_BYTES;
        match whence {
            Whence::Data => {
                let (block, _) = self.blocks.range(first..).next()?;
                Some((block * BLOCK_BYTES).max(offset)).filter(|at| *at < self.size)
            }
            Whence::Hole => {
                let mut hole = first;
                for (block, _) in self.blocks.range(first..) {
                    if *block != hole {
                        break;
                    }
                    hole += 1;
                }
                Some((hole * BLOCK_BYTES).max(offset).min(self.size))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_all(content: &Content) -> Vec<u8> {
        let mut out = Vec::new();
        content.read(0, content.size(), &mut out);
        out
    }

    proptest! {
        #[test]
        fn content_is_that_of_a_plain_array(
            steps in proptest::collection::vec((0u8..4, 0u64..20_000, 0u64..9_000), 1..30),
        ) {
            let (mut content, mut model) = (Content::default(), Vec::<u8>::new());
            for (fill, (kind, offset, bytes)) in (1u8..).zip(steps) {
                let (from, to) = (offset as usize, (offset + bytes) as usize);
                match kind {
                    0 => {
                        content.write(offset, &vec![fill; bytes as usize]);
                        if bytes > 0 {
                            model.resize(model.len().max(to), 0);
                            model[from..to].fill(fill);
                        }
                    }
                    1 => {
                        content.set_size(offset);
                        model.resize(from, 0);
                    }
                    2 => {
                        content.zero(offset, bytes);
                        let len = model.len();
                        model[from.min(len)..to.min(len)].fill(0);
                    }
                    _ => prop_assert!(content.allocate(offset, bytes, 100)),
                }
                prop_assert_eq!(&read_all(&content), &model);
            }
            for offset in (0..content.size()).step_by(777) {
                let data = content.seek(offset, Whence::Data).unwrap_or(content.size());
                let before = &model[offset as usize..data as usize];
                prop_assert!(before.iter().all(|byte| *byte == 0));
                let hole = content.seek(offset, Whence::Hole).unwrap();
                prop_assert!(hole >= offset && hole <= content.size());
            }
        }
    }
}
