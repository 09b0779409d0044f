//! A shard on a simulated disk, with a reference model of what it must hold.
//!
//! The model knows of each block every value it may have: the last one that must survive, and those written
//! since.

use std::collections::HashMap;

use fabric_store::api::*;
use fabric_store::device::{DeviceAction, IoId};
use fabric_store::{ShardCore, format, open};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::disk::{Disk, gather};

pub const BLOCK: usize = 4096;
pub const IDENTITY: DeviceLabel = DeviceLabel {
    cluster: [1; 16],
    device: [2; 16],
};

pub fn params() -> CoreParams {
    CoreParams {
        leaf_cache_bytes: 0,
        buffer_bytes: 0,
        ops_max: 64,
        ..CoreParams::default()
    }
}

/// An action that was handed out and not yet executed.
pub enum Held {
    Read(DeviceAction),
    Write(IoId, u64, Vec<u8>),
    Flush(IoId),
}

/// Value of a block: a number that its sectors are made of. 0 is zeroes.
pub type Sectors = [u64; 8];

impl Expected {
    /// The value of the newest write.
    pub fn newest(&self) -> Sectors {
        self.acked
            .iter()
            .chain(&self.submitted)
            .max_by_key(|(op, _)| *op)
            .map_or(self.durable, |(_, value)| *value)
    }

    /// The value of the newest acknowledged write.
    pub fn newest_acked(&self) -> Sectors {
        self.acked.last().map_or(self.durable, |(_, value)| *value)
    }
}

/// What a block may hold after a crash.
#[derive(Clone, Default)]
pub struct Expected {
    /// Acknowledged and, as far as it matters, durable.
    pub durable: Sectors,
    /// Acknowledged since the last flush, in the order of submission (an FUA write is acknowledged late).
    pub acked: Vec<(u64, Sectors)>,
    /// Submitted and not acknowledged.
    pub submitted: Vec<(u64, Sectors)>,
}

/// Memory of one operation in flight.
pub struct Flight {
    memory: Vec<u8>,
    iovs: Vec<libc::iovec>,
    what: Outcome,
}

pub enum Outcome {
    Write {
        blocks: Vec<(u64, u32, u32, Sectors)>,
    },
    Read {
        layer: u64,
        chunk: u32,
        sector: u32,
        want: Vec<u64>,
    },
    Other,
    Flush {
        acked_before: Vec<(u64, u32, u32, u64)>,
    },
}

pub struct Rig {
    pub core: ShardCore,
    pub disk: Disk,
    pub held: Vec<Held>,
    pub blocks: HashMap<(u64, u32, u32), Expected>,
    pub flights: HashMap<u64, Flight>,
    /// Every value written to a block since the last crash, by operation.
    pub history: HashMap<(u64, u32, u32), Vec<(u64, Sectors)>>,
    pub rng: ChaCha8Rng,
    next_op: u64,
    next_value: u64,
    next_sequence: u64,
    pub results: HashMap<u64, StoreResult>,
    pub opens: u8,
    pub device_writes_done: u64,
    /// Stop as soon as so many device writes were executed.
    pub crash_at: Option<u64>,
    pub layers: Vec<LayerId>,
    pub expect_errors: bool,
}

pub fn sector_bytes(value: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    if value != 0 {
        for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(
                &value
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15 + i as u64 * 2)
                    .to_le_bytes(),
            );
        }
        bytes[..8].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

impl Rig {
    pub fn new(bytes: usize, seed: u64) -> Self {
        let mut disk = Disk::new(bytes);
        format(&mut disk, IDENTITY, false).expect("format");
        let (mut shards, report) = open(&mut disk, &params(), [9; 16]).expect("open");
        assert_eq!((report.shards, report.clean_shards), (1, 1));
        Self {
            core: shards.remove(0),
            disk,
            held: Vec::new(),
            blocks: HashMap::new(),
            flights: HashMap::new(),
            history: HashMap::new(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            next_op: 1,
            next_value: 1,
            next_sequence: 1,
            results: HashMap::new(),
            opens: 10,
            device_writes_done: 0,
            crash_at: None,
            layers: vec![LayerId(7)],
            expect_errors: false,
        }
    }

    pub fn version(&mut self) -> Version {
        self.next_sequence += 1;
        Version::new(1, self.next_sequence)
    }

    /// Scatter list over `memory`, cut at random places when `cut`.
    fn iovecs(rng: &mut ChaCha8Rng, memory: &mut [u8], cut: bool) -> Vec<libc::iovec> {
        let mut iovs = Vec::new();
        let mut at = 0;
        while at < memory.len() {
            let left = memory.len() - at;
            let len = if cut {
                rng.random_range(1..=left.min(9000))
            } else {
                left
            };
            iovs.push(libc::iovec {
                iov_base: memory[at..].as_mut_ptr().cast(),
                iov_len: len,
            });
            at += len;
        }
        iovs
    }

    pub fn submit_raw(&mut self, op: StoreOp<'_>) -> u64 {
        let id = self.next_op;
        self.next_op += 1;
        loop {
            // SAFETY: the memory of operations lives in `flights` until they complete.
            match unsafe { self.core.submit(OpId(id), op) } {
                Submitted::Accepted => return id,
                Submitted::Busy => self.step(),
            }
        }
    }

    /// Writes fresh values to sectors `sector..sector + count` of a chunk.
    pub fn write(&mut self, chunk: u32, sector: u32, count: u32, fua: bool) -> u64 {
        let mut memory = Vec::with_capacity(count as usize * 512);
        let values: Vec<u64> = (0..count).map(|i| self.next_value + u64::from(i)).collect();
        self.next_value += u64::from(count);
        values
            .iter()
            .for_each(|&v| memory.extend_from_slice(&sector_bytes(v)));
        let version = self.version();
        let blocks = self.note_submitted(chunk, sector, &values);
        let cut = self.rng.random_bool(0.3);
        let iovs = Self::iovecs(&mut self.rng, &mut memory, cut);
        let layers = self.layers.clone();
        let (iovecs, offset) = (iovs.clone(), sector * 512);
        self.flights.insert(
            self.next_op,
            Flight {
                memory,
                iovs,
                what: Outcome::Write { blocks },
            },
        );
        self.submit_raw(StoreOp::Write {
            layers: &layers,
            chunk,
            offset,
            iovecs: &iovecs,
            version,
            fua,
            urgent: false,
        })
    }

    pub fn zero(&mut self, chunk: u32, sector: u32, count: u32) -> u64 {
        let version = self.version();
        let blocks = self.note_submitted(chunk, sector, &vec![0; count as usize]);
        let flight = Flight {
            memory: Vec::new(),
            iovs: Vec::new(),
            what: Outcome::Write { blocks },
        };
        self.flights.insert(self.next_op, flight);
        let layers = self.layers.clone();
        let (offset, len) = (sector * 512, count * 512);
        self.submit_raw(StoreOp::Zero {
            layers: &layers,
            chunk,
            offset,
            len,
            version,
            fua: false,
        })
    }

    fn note_submitted(
        &mut self,
        chunk: u32,
        sector: u32,
        values: &[u64],
    ) -> Vec<(u64, u32, u32, Sectors)> {
        let layer = self.layers[0].0;
        let mut blocks: Vec<(u64, u32, u32, Sectors)> = Vec::new();
        for (i, &value) in values.iter().enumerate() {
            let (block, inside) = ((sector + i as u32) / 8, (sector as usize + i) % 8);
            if blocks.last().is_none_or(|b| b.2 != block) {
                let expected = self.blocks.entry((layer, chunk, block)).or_default();
                blocks.push((layer, chunk, block, expected.newest()));
            }
            blocks.last_mut().expect("pushed").3[inside] = value;
        }
        for &(layer, chunk, block, value) in &blocks {
            let expected = self
                .blocks
                .get_mut(&(layer, chunk, block))
                .expect("entered");
            expected.submitted.push((self.next_op, value));
            self.history
                .entry((layer, chunk, block))
                .or_default()
                .push((self.next_op, value));
        }
        blocks
    }

    /// Reads sectors; the outcome must be the newest value submitted before, for the store keeps the order of
    /// overlaps.
    pub fn read(&mut self, chunk: u32, sector: u32, count: u32) -> u64 {
        let layer = self.layers[0].0;
        let want = (sector..sector + count)
            .map(|s| {
                let Some(expected) = self.blocks.get(&(layer, chunk, s / 8)) else {
                    return 0;
                };
                expected.newest()[s as usize % 8]
            })
            .collect();
        let mut memory = vec![0xee; count as usize * 512];
        let cut = self.rng.random_bool(0.3);
        let iovs = Self::iovecs(&mut self.rng, &mut memory, cut);
        let (iovecs, offset) = (iovs.clone(), sector * 512);
        let what = Outcome::Read {
            layer,
            chunk,
            sector,
            want,
        };
        self.flights
            .insert(self.next_op, Flight { memory, iovs, what });
        let layers = self.layers.clone();
        self.submit_raw(StoreOp::Read {
            layers: &layers,
            chunk,
            offset,
            iovecs: &iovecs,
        })
    }

    pub fn flush(&mut self) -> u64 {
        let newest = |e: &Expected| e.acked.last().map_or(0, |(op, _)| *op);
        let acked_before = self
            .blocks
            .iter()
            .map(|(k, e)| (k.0, k.1, k.2, newest(e)))
            .collect();
        let flight = Flight {
            memory: Vec::new(),
            iovs: Vec::new(),
            what: Outcome::Flush { acked_before },
        };
        self.flights.insert(self.next_op, flight);
        self.submit_raw(StoreOp::Flush)
    }

    pub fn other(&mut self, op: StoreOp<'_>) -> u64 {
        let flight = Flight {
            memory: Vec::new(),
            iovs: Vec::new(),
            what: Outcome::Other,
        };
        self.flights.insert(self.next_op, flight);
        self.submit_raw(op)
    }

    pub fn crashed(&self) -> bool {
        self.crash_at.is_some_and(|n| self.device_writes_done >= n)
    }

    /// Takes new actions from the core.
    pub fn collect(&mut self) {
        while let Some(action) = self.core.poll_action() {
            self.held.push(match action {
                DeviceAction::Write { id, offset, iovecs } => {
                    Held::Write(id, offset, gather(&iovecs))
                }
                DeviceAction::Flush { id } => Held::Flush(id),
                DeviceAction::Discard { id, .. } => Held::Flush(id),
                read @ DeviceAction::Read { .. } => Held::Read(read),
            });
        }
    }

    /// Executes one held action, picked at random, and takes completions in.
    pub fn step(&mut self) {
        self.collect();
        if self.crashed() || self.held.is_empty() {
            self.complete();
            return;
        }
        let at = self.rng.random_range(0..self.held.len());
        match self.held.swap_remove(at) {
            Held::Read(DeviceAction::Read { id, offset, iovecs }) => {
                self.disk.read(offset, &iovecs);
                self.core.on_device(id, Ok(()));
            }
            Held::Read(_) => unreachable!("only reads are held as reads"),
            Held::Write(id, offset, data) => {
                let result = self.disk.write(offset, data);
                self.device_writes_done += 1;
                self.core.on_device(id, result);
            }
            Held::Flush(id) => {
                self.disk.make_durable();
                self.core.on_device(id, Ok(()));
            }
        }
        self.complete();
    }

    fn complete(&mut self) {
        while let Some((id, result)) = self.core.poll_completion() {
            self.results.insert(id.0, result);
            let Some(flight) = self.flights.remove(&id.0) else {
                continue;
            };
            assert!(
                result.is_ok() || self.expect_errors,
                "op {} failed: {result:?}",
                id.0
            );
            self.check_outcome(id.0, flight, result);
        }
        self.collect();
    }

    fn check_outcome(&mut self, id: u64, flight: Flight, result: StoreResult) {
        match flight.what {
            Outcome::Write { blocks } if result.is_err() => {
                // Some of its blocks may have been written: nothing is known of them.
                for (layer, chunk, block, _) in blocks {
                    self.blocks.remove(&(layer, chunk, block));
                }
            }
            Outcome::Write { blocks } => {
                for (layer, chunk, block, _) in blocks {
                    let expected = self
                        .blocks
                        .get_mut(&(layer, chunk, block))
                        .expect("entered");
                    let at = expected
                        .submitted
                        .iter()
                        .position(|(op, _)| *op == id)
                        .expect("submitted once");
                    let write = expected.submitted.remove(at);
                    expected.acked.push(write);
                    expected.acked.sort_by_key(|(op, _)| *op);
                }
            }
            Outcome::Read {
                layer,
                chunk,
                sector,
                want,
            } if result.is_ok() => {
                assert!(!flight.iovs.is_empty());
                for (i, (got, want)) in flight.memory.chunks(512).zip(want).enumerate() {
                    let at = sector as usize + i;
                    // A write submitted after the read may be seen as well.
                    let history = self
                        .history
                        .get(&(layer, chunk, at as u32 / 8))
                        .map_or(&[][..], |h| h);
                    let later = history
                        .iter()
                        .filter(|(op, _)| *op > id)
                        .map(|(_, v)| v[at % 8]);
                    let fits = std::iter::once(want)
                        .chain(later)
                        .any(|v| got == sector_bytes(v));
                    let value = u64::from_le_bytes(got[..8].try_into().expect("8 bytes"));
                    assert!(
                        fits,
                        "layer {layer} chunk {chunk} sector {at}: {value}, {want} expected"
                    );
                }
            }
            Outcome::Flush { acked_before } if result.is_ok() => {
                for (layer, chunk, block, newest) in acked_before {
                    let expected = self
                        .blocks
                        .get_mut(&(layer, chunk, block))
                        .expect("entered");
                    while expected.acked.first().is_some_and(|(op, _)| *op <= newest) {
                        expected.durable = expected.acked.remove(0).1;
                    }
                }
            }
            _ => {}
        }
    }

    /// Runs until nothing is in flight (or the crash point is reached).
    pub fn drain(&mut self) {
        for _ in 0..2_000_000 {
            self.collect();
            self.complete();
            if self.crashed() || (self.core.in_flight() == 0 && self.held.is_empty()) {
                return;
            }
            assert!(
                !self.held.is_empty(),
                "operations are in flight and the core wants nothing"
            );
            self.step();
        }
        panic!("no end");
    }

    pub fn check(&mut self) {
        if let Err(problem) = self.core.check(&mut self.disk) {
            panic!("{problem}");
        }
    }

    /// Runs one operation to its end.
    pub fn run(&mut self, id: u64) -> StoreResult {
        while !self.results.contains_key(&id) {
            self.step();
        }
        self.results[&id]
    }

    /// Empties the model: what it knew was dropped.
    pub fn forget(&mut self) {
        self.blocks.clear();
    }
}
