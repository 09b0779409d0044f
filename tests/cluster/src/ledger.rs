//! What a disk must hold: for each block the versions that were sent, acknowledged and flushed.

use anyhow::{Result, ensure};

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// What a block must hold when it is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Everything acknowledged: no power was lost.
    Acknowledged,
    /// Everything that a flush covered.
    Flushed,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    sent: u32,
    acknowledged: u32,
    flushed: u32,
    busy: bool,
}

/// The blocks of a disk that a load uses, spread over all of it.
#[derive(Debug, Clone)]
pub struct Ledger {
    entries: Vec<Entry>,
    stride: u64,
}

impl Ledger {
    /// `blocks` blocks, evenly spread over a disk of `disk_bytes` that nobody has written to.
    pub fn new(blocks: u32, disk_bytes: u64) -> Self {
        let stride = disk_bytes / u64::from(blocks) / BLOCK as u64 * BLOCK as u64;
        assert!(stride > 0, "more blocks than the disk has");
        Self {
            entries: vec![Entry::default(); blocks as usize],
            stride,
        }
    }

    /// Blocks.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Where a block lies on the disk.
    pub fn offset(&self, block: usize) -> u64 {
        block as u64 * self.stride
    }

    /// Takes a block for a request of its own, unless another has it.
    pub(crate) fn take(&mut self, block: usize) -> bool {
        !std::mem::replace(&mut self.entries[block].busy, true)
    }

    /// Fills `buffer` with the block's next version, which is sent now.
    pub(crate) fn send(&mut self, block: usize, buffer: &mut [u8]) -> u32 {
        let entry = &mut self.entries[block];
        entry.sent += 1;
        let word = word(block, entry.sent);
        for chunk in buffer.chunks_exact_mut(8) {
            chunk.copy_from_slice(&word);
        }
        entry.sent
    }

    /// The block's latest write was acknowledged.
    pub(crate) fn acknowledge(&mut self, block: usize) {
        let entry = &mut self.entries[block];
        entry.acknowledged = entry.sent;
        entry.busy = false;
    }

    /// A read of a block that nothing else was done to: it must be what was acknowledged last.
    pub(crate) fn check_read(&mut self, block: usize, bytes: &[u8]) -> Result<()> {
        let found = version(block, bytes)?;
        let entry = &mut self.entries[block];
        ensure!(
            found == entry.acknowledged,
            "block {block} read as version {found}, acknowledged was {}",
            entry.acknowledged
        );
        entry.busy = false;
        Ok(())
    }

    /// What a flush that is sent now covers.
    pub(crate) fn covered(&self) -> Vec<u32> {
        self.entries
            .iter()
            .map(|entry| entry.acknowledged)
            .collect()
    }

    /// That flush was acknowledged.
    pub(crate) fn flushed(&mut self, covered: &[u32]) {
        for (entry, version) in self.entries.iter_mut().zip(covered) {
            entry.flushed = entry.flushed.max(*version);
        }
    }

    /// Looks at a block after a crash. What is found holds from now on: what was read once never changes
    /// back.
    pub fn observe(&mut self, block: usize, bytes: &[u8], promise: Promise) -> Result<()> {
        let found = version(block, bytes)?;
        let entry = &mut self.entries[block];
        let least = match promise {
            Promise::Acknowledged => entry.acknowledged,
            Promise::Flushed => entry.flushed,
        };
        ensure!(
            (least..=entry.sent).contains(&found),
            "block {block} is of version {found}; promised ({promise:?}) was {least}, sent {}",
            entry.sent
        );
        *entry = Entry {
            sent: entry.sent,
            acknowledged: found,
            flushed: found,
            busy: false,
        };
        Ok(())
    }

    /// Acknowledged writes in all.
    pub fn writes(&self) -> u64 {
        self.entries
            .iter()
            .map(|entry| u64::from(entry.acknowledged))
            .sum()
    }
}

fn word(block: usize, version: u32) -> [u8; 8] {
    ((block as u64) << 32 | u64::from(version)).to_le_bytes()
}

/// The version that a block's bytes are; zero for one that was never written.
fn version(block: usize, bytes: &[u8]) -> Result<u32> {
    let (first, _) = bytes.split_at(8);
    ensure!(
        bytes.chunks_exact(8).all(|chunk| chunk == first),
        "block {block} is torn"
    );
    let value = u64::from_le_bytes(first.try_into()?);
    ensure!(
        value == 0 || value >> 32 == block as u64,
        "block {block} holds block {}",
        value >> 32
    );
    Ok(value as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ledger of two blocks; block 1 was sent in three versions, of which two were acknowledged and one was
    /// flushed.
    fn ledger() -> (Ledger, Vec<Vec<u8>>) {
        let mut ledger = Ledger::new(2, 1 << 20);
        let mut versions = vec![vec![0; BLOCK]];
        for version in 1..=3 {
            let mut buffer = vec![0; BLOCK];
            assert_eq!(ledger.send(1, &mut buffer), version);
            versions.push(buffer);
            if version < 3 {
                ledger.acknowledge(1);
            }
            if version == 1 {
                let covered = ledger.covered();
                ledger.flushed(&covered);
            }
        }
        (ledger, versions)
    }

    #[test]
    fn flushed_data_survives_power_loss_and_acked_data_a_kill() {
        for (promise, allowed) in [
            (Promise::Flushed, [false, true, true, true]),
            (Promise::Acknowledged, [false, false, true, true]),
        ] {
            for (version, allowed) in allowed.into_iter().enumerate() {
                let (mut ledger, versions) = ledger();
                let observed = ledger.observe(1, &versions[version], promise);
                assert_eq!(observed.is_ok(), allowed, "{promise:?} {version}");
            }
        }
    }

    #[test]
    fn what_was_read_once_does_not_change_back() {
        let (mut ledger, versions) = ledger();
        ledger.observe(1, &versions[3], Promise::Flushed).unwrap();
        assert!(ledger.observe(1, &versions[2], Promise::Flushed).is_err());
        assert!(ledger.check_read(1, &versions[2]).is_err());
        assert!(ledger.check_read(1, &versions[3]).is_ok());
    }

    #[test]
    fn torn_and_misplaced_blocks_are_noticed() {
        let (mut ledger, mut versions) = ledger();
        assert!(ledger.observe(0, &versions[3], Promise::Flushed).is_err());
        versions[3][4095] ^= 1;
        assert!(ledger.observe(1, &versions[3], Promise::Flushed).is_err());
    }
}
