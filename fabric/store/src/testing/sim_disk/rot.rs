//! Silent corruption, and blocks that another program has written.

use fabric_types::block::BLOCK_BYTES;

use super::SimDisk;

impl SimDisk {
    /// Damages the content; no reader is told.
    pub fn flip_bit(&mut self, byte: u64, bit: u8) {
        self.current.flip_bit(byte, bit);
        self.durable.flip_bit(byte, bit);
    }

    /// Puts other bytes in a block, durably.
    pub fn replace(&mut self, offset: u64, block: &[u8; BLOCK_BYTES]) {
        self.current.write(offset, block);
        self.durable.write(offset, block);
    }

    /// Whether the block at this byte is at rest: a loss of power would leave there what is there now.
    pub fn is_flushed(&self, byte: u64) -> bool {
        let (mut now, mut then) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        self.current.read(byte, &mut now);
        self.durable.read(byte, &mut then);
        now == then
    }
}
