//! What a device with a volatile write cache holds: a backing file, and the blocks written since the last
//! flush.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;

/// The unit that survives a cut of power or does not. A block torn inside is not imitated.
pub(crate) const BLOCK: usize = 4096;
/// Blocks that the cache holds. Beyond that all are written to the backing file, as a device does that runs
/// out of cache.
const CACHED_MAX: usize = 65_536;

/// Which of the unflushed blocks are there after a cut of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survival {
    /// None: every block is as it was flushed last.
    Nothing,
    /// Each with a chance of one half, drawn from this seed.
    Random(u64),
}

#[derive(Debug)]
pub(crate) struct Volatile {
    backing: File,
    len: u64,
    unflushed: BTreeMap<u64, Box<[u8; BLOCK]>>,
}

impl Volatile {
    /// Over `backing`, whose length is `len`, a multiple of [`BLOCK`].
    pub(crate) fn new(backing: File, len: u64) -> Self {
        Self {
            backing,
            len,
            unflushed: BTreeMap::new(),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Blocks that a cut of power would put in danger.
    pub(crate) fn unflushed(&self) -> usize {
        self.unflushed.len()
    }

    /// Bytes at `offset`, up to `size` or the end of the device.
    pub(crate) fn read(&self, offset: u64, size: usize) -> Result<Vec<u8>> {
        let size = usize::try_from(self.len.saturating_sub(offset))
            .unwrap_or(usize::MAX)
            .min(size);
        let mut bytes = vec![0; size];
        if size == 0 {
            return Ok(bytes);
        }
        self.backing.read_exact_at(&mut bytes, offset)?;
        let last = (offset + size as u64 - 1) / BLOCK as u64;
        for (block, cached) in self.unflushed.range(offset / BLOCK as u64..=last) {
            let begin = block * BLOCK as u64;
            let from = offset.max(begin);
            let to = (offset + size as u64).min(begin + BLOCK as u64);
            bytes[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&cached[(from - begin) as usize..(to - begin) as usize]);
        }
        Ok(bytes)
    }

    /// Takes a write into the cache; returns how many bytes the device had room for.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Result<usize> {
        let room = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let data = &data[..data.len().min(room)];
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let (block, inside) = (at / BLOCK as u64, (at % BLOCK as u64) as usize);
            let count = (BLOCK - inside).min(data.len() - done);
            let cached = self.cached(block, count == BLOCK)?;
            cached[inside..inside + count].copy_from_slice(&data[done..done + count]);
            done += count;
        }
        if self.unflushed.len() > CACHED_MAX {
            self.flush()?;
        }
        Ok(done)
    }

    /// The cached block, loaded first unless it is about to be overwritten whole.
    fn cached(&mut self, block: u64, whole: bool) -> Result<&mut [u8; BLOCK]> {
        use std::collections::btree_map::Entry;
        match self.unflushed.entry(block) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let mut bytes = Box::new([0; BLOCK]);
                if !whole {
                    self.backing
                        .read_exact_at(&mut bytes[..], block * BLOCK as u64)?;
                }
                Ok(entry.insert(bytes))
            }
        }
    }

    /// Puts everything in the backing file. That one needs no flush of its own: it is the medium here.
    pub(crate) fn flush(&mut self) -> Result<()> {
        for (block, bytes) in &self.unflushed {
            self.backing
                .write_all_at(&bytes[..], block * BLOCK as u64)?;
        }
        self.unflushed.clear();
        Ok(())
    }

    /// Cuts the power; returns how many blocks were lost.
    pub(crate) fn cut(&mut self, survival: Survival) -> Result<usize> {
        let mut lost = 0;
        let mut draw = match survival {
            Survival::Nothing => None,
            Survival::Random(seed) => Some(Draw(seed)),
        };
        for (block, bytes) in std::mem::take(&mut self.unflushed) {
            if draw.as_mut().is_some_and(Draw::coin) {
                self.backing
                    .write_all_at(&bytes[..], block * BLOCK as u64)?;
            } else {
                lost += 1;
            }
        }
        Ok(lost)
    }
}

/// splitmix64.
struct Draw(u64);

impl Draw {
    fn coin(&mut self) -> bool {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (value ^ (value >> 31)) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 64;

    fn device() -> Volatile {
        let backing = tempfile::tempfile().unwrap();
        backing.set_len(BLOCKS * BLOCK as u64).unwrap();
        Volatile::new(backing, BLOCKS * BLOCK as u64)
    }

    fn block(device: &Volatile, block: u64) -> Vec<u8> {
        device.read(block * BLOCK as u64, BLOCK).unwrap()
    }

    #[test]
    fn what_was_written_is_read_at_any_offset() {
        let mut device = device();
        let data: Vec<u8> = (0..3 * BLOCK).map(|index| index as u8 ^ 0x5A).collect();
        assert_eq!(device.write(1000, &data).unwrap(), data.len());
        assert_eq!(device.read(1000, data.len()).unwrap(), data);
        assert_eq!(device.read(999, 2).unwrap(), [0, data[0]]);
        device.flush().unwrap();
        assert_eq!(device.read(1000, data.len()).unwrap(), data);
    }

    #[test]
    fn a_cut_of_power_takes_what_was_not_flushed_and_nothing_else() {
        let mut device = device();
        device.write(0, &[1; 2 * BLOCK]).unwrap();
        device.flush().unwrap();
        device.write(0, &[2; BLOCK]).unwrap();
        assert_eq!(device.unflushed(), 1);
        assert_eq!(device.cut(Survival::Nothing).unwrap(), 1);
        assert_eq!(device.read(0, 2 * BLOCK).unwrap(), [1; 2 * BLOCK]);
        assert_eq!(device.unflushed(), 0);
    }

    #[test]
    fn a_seed_loses_some_blocks_and_the_same_ones_again() {
        let survivors = |seed| {
            let mut device = device();
            device.write(0, &[1; BLOCKS as usize * BLOCK]).unwrap();
            let lost = device.cut(Survival::Random(seed)).unwrap();
            let left: Vec<u64> = (0..BLOCKS)
                .filter(|index| match block(&device, *index)[0] {
                    1 => true,
                    0 => false,
                    other => panic!("{other}"),
                })
                .collect();
            assert_eq!(left.len() + lost, BLOCKS as usize);
            left
        };
        assert!((1..BLOCKS as usize).contains(&survivors(7).len()));
        assert_eq!(survivors(7), survivors(7));
        assert_ne!(survivors(7), survivors(8));
    }

    #[test]
    fn the_device_ends_where_it_ends() {
        let mut device = device();
        let end = device.len();
        assert_eq!(device.write(end - 100, &[1; 200]).unwrap(), 100);
        assert_eq!(device.read(end - 100, 200).unwrap(), [1; 100]);
        assert_eq!(device.write(end, &[1]).unwrap(), 0);
        assert!(device.read(end, 10).unwrap().is_empty());
    }
}
