//! Crashes, opening again, and comparing what is found with the model.

use fabric_store::api::*;
use fabric_store::open;

use crate::disk::Disk;
use crate::rig::{BLOCK, Expected, Held, Rig, Sectors, params, sector_bytes};

impl Rig {
    /// Opens what is on `disk` now.
    pub fn reopen_on(&mut self, disk: Disk) -> RecoveryReport {
        self.disk = disk;
        self.held.clear();
        self.opens += 1;
        let (mut shards, report) =
            open(&mut self.disk, &params(), [self.opens; 16]).expect("recovery");
        self.core = shards.remove(0);
        self.flights.clear();
        self.history.clear();
        self.crash_at = None;
        self.check();
        report
    }

    /// The daemon dies; everything acknowledged must be there.
    pub fn process_crash(&mut self) -> RecoveryReport {
        let report = self.reopen_on(self.disk.process_crash());
        for expected in self.blocks.values_mut() {
            // What was acknowledged is certain; what was in flight may be there.
            (expected.durable, expected.acked) = (expected.newest_acked(), Vec::new());
        }
        self.resolve();
        report
    }

    /// Power loss; everything flushed must be there.
    pub fn power_loss(&mut self) -> RecoveryReport {
        let torn: Vec<(u64, Vec<u8>)> = self
            .held
            .iter()
            .filter_map(|h| {
                if let Held::Write(_, offset, data) = h {
                    Some((*offset, data.clone()))
                } else {
                    None
                }
            })
            .collect();
        let disk = self.disk.power_loss(&mut self.rng, &torn);
        let report = self.reopen_on(disk);
        self.resolve();
        report
    }

    /// Reads every block back, checks that it is one of the values it may have, and takes that as the truth.
    fn resolve(&mut self) {
        let mut keys: Vec<(u64, u32, u32)> = self.blocks.keys().copied().collect();
        keys.sort_unstable();
        for key in keys {
            let got = self.read_block(key);
            let expected = self.blocks.get_mut(&key).expect("known");
            let values = || {
                let later = expected
                    .acked
                    .iter()
                    .chain(&expected.submitted)
                    .map(|(_, value)| value);
                std::iter::once(&expected.durable).chain(later)
            };
            let bytes = |v: &Sectors| v.iter().flat_map(|&s| sector_bytes(s)).collect::<Vec<u8>>();
            let found = values().find(|v| bytes(v) == got).copied();
            let Some(found) = found else {
                let got: Vec<u64> = got
                    .chunks(512)
                    .map(|s| u64::from_le_bytes(s[..8].try_into().expect("8 bytes")))
                    .collect();
                panic!(
                    "{key:?} holds {got:?}, none of {:?}",
                    values().collect::<Vec<_>>()
                );
            };
            *expected = Expected {
                durable: found,
                ..Expected::default()
            };
        }
    }

    /// Reads a block outside the model.
    pub fn read_block(&mut self, (layer, chunk, block): (u64, u32, u32)) -> Vec<u8> {
        self.try_read_block((layer, chunk, block)).expect("read")
    }

    pub fn try_read_block(
        &mut self,
        (layer, chunk, block): (u64, u32, u32),
    ) -> Result<Vec<u8>, StoreError> {
        let mut memory = vec![0xaa; BLOCK];
        let iovecs = [libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: BLOCK,
        }];
        let layers = [LayerId(layer)];
        let offset = block * BLOCK as u32;
        let id = self.submit_raw(StoreOp::Read {
            layers: &layers,
            chunk,
            offset,
            iovecs: &iovecs,
        });
        while !self.results.contains_key(&id) {
            self.step();
        }
        self.results[&id].map(|()| memory)
    }

    /// Compares every block of the model with the store.
    pub fn compare_all(&mut self) {
        self.drain();
        let keys: Vec<(u64, u32, u32)> = self.blocks.keys().copied().collect();
        for key in keys {
            let got = self.read_block(key);
            let expected = &self.blocks[&key];
            let value = expected.newest_acked();
            let want: Vec<u8> = value.iter().flat_map(|&s| sector_bytes(s)).collect();
            assert!(got == want, "{key:?} differs");
        }
    }
}
