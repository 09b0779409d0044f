//! Bytes of a disk, copied on write, so that a crash test can keep hundreds of states of one disk.

use std::sync::Arc;

use fabric_types::block::BLOCK_BYTES;

/// What a disk writes in one piece.
pub const SECTOR_BYTES: usize = 512;

type Block = [u8; BLOCK_BYTES];

/// Blocks that are shared, or copied, together.
const GROUP_BLOCKS: usize = 128;

type Group = Vec<Option<Arc<Block>>>;

/// See the module. Blocks never written read as zeroes.
#[derive(Clone)]
pub struct Image {
    groups: Vec<Arc<Group>>,
}

impl Image {
    /// An image of zeroes.
    pub fn new(capacity_bytes: u64) -> Self {
        let groups = (capacity_bytes as usize / BLOCK_BYTES).div_ceil(GROUP_BLOCKS);
        let empty = Arc::new(vec![None; GROUP_BLOCKS]);
        Self {
            groups: vec![empty; groups],
        }
    }

    /// Blocks that were ever written, by number.
    pub fn written_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        let all = self.groups.iter().flat_map(|group| group.iter());
        all.enumerate()
            .filter(|(_, block)| block.is_some())
            .map(|(at, _)| at as u64)
    }

    /// Whether the block was ever written.
    pub fn is_written(&self, block: u64) -> bool {
        self.block(block as usize).is_some()
    }

    fn block(&self, at: usize) -> Option<&Arc<Block>> {
        self.groups[at / GROUP_BLOCKS][at % GROUP_BLOCKS].as_ref()
    }

    fn block_mut(&mut self, at: usize) -> &mut Block {
        let group = Arc::make_mut(&mut self.groups[at / GROUP_BLOCKS]);
        let block = group[at % GROUP_BLOCKS].get_or_insert_with(|| Arc::new([0; BLOCK_BYTES]));
        Arc::make_mut(block)
    }

    /// Fills `buf` from byte `offset`, which may lie anywhere.
    pub fn read(&self, offset: u64, buf: &mut [u8]) {
        let mut done = 0;
        while done < buf.len() {
            let at = offset as usize + done;
            let within = at % BLOCK_BYTES;
            let len = (BLOCK_BYTES - within).min(buf.len() - done);
            let part = &mut buf[done..done + len];
            match self.block(at / BLOCK_BYTES) {
                Some(block) => part.copy_from_slice(&block[within..within + len]),
                None => part.fill(0),
            }
            done += len;
        }
    }

    /// Writes `bytes` at a sector.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset as usize + done;
            let within = at % BLOCK_BYTES;
            let len = (BLOCK_BYTES - within).min(bytes.len() - done);
            let block = self.block_mut(at / BLOCK_BYTES);
            block[within..within + len].copy_from_slice(&bytes[done..done + len]);
            done += len;
        }
    }

    /// Damages a byte.
    pub fn flip_bit(&mut self, byte: u64, bit: u8) {
        let at = byte as usize;
        self.block_mut(at / BLOCK_BYTES)[at % BLOCK_BYTES] ^= 1 << bit;
    }
}
