//! The input as a source of choices. At its end all are zero.

use fabric_types::PgId;

/// See the module.
pub struct Input<'a> {
    data: &'a [u8],
}

impl<'a> Input<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Self { data }
    }

    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (taken, rest) = self.data.split_at(self.data.len().min(N));
        self.data = rest;
        let mut bytes = [0; N];
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    /// At most so many, as many as there are.
    pub fn rest(&mut self, most: usize) -> Vec<u8> {
        let (taken, rest) = self.data.split_at(self.data.len().min(most));
        self.data = rest;
        taken.to_vec()
    }

    pub fn byte(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    pub fn bit(&mut self) -> bool {
        self.byte() % 2 == 1
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    /// A small number, or any.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            255 => u64::from_le_bytes(self.bytes()),
            254 => u64::MAX,
            byte => u64::from(byte) << 36,
        }
    }

    /// What a block is filled with: few values, so that checksums of different messages match.
    pub fn filling(&mut self) -> u8 {
        self.byte() % 2
    }

    /// A group: two that the node may hold, one that it never does, or the incoming replica of one.
    pub fn group(&mut self) -> PgId {
        match self.byte() % 8 {
            0..=4 => PgId(0),
            5 => PgId(1),
            6 => PgId(2),
            _ => PgId(0).incoming(),
        }
    }
}
