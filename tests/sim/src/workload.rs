//! Guests: what they ask for, and where.

use std::collections::BTreeMap;

use fabric_types::ids::CHUNK_BYTES;
use fabric_types::io::{Op, SECTOR_BYTES};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::checker::{Begun, Tag};
use crate::plan::{GuestBehaviour, Plan};
use crate::queue::At;

/// Sectors of a chunk.
pub const CHUNK_SECTORS: u64 = CHUNK_BYTES / SECTOR_BYTES;
/// Sectors of a place where guests write: 128 KiB.
pub const SPOT_SECTORS: u64 = 256;
/// Sectors of a block.
const BLOCK_SECTORS: u64 = 8;

/// A request of a guest.
pub struct GuestOp {
    /// What it does.
    pub op: Op,
    /// First sector.
    pub first: u64,
    /// Sectors.
    pub sectors: u64,
    /// What a write writes.
    pub tag: Tag,
    /// As the checker knows it.
    pub begun: Option<Begun>,
    /// When it was submitted.
    pub since: At,
    /// Data thread.
    pub lane: usize,
    /// Its memory.
    pub memory: Box<[u8]>,
}

impl GuestOp {
    /// The sectors.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.first..self.first + self.sectors
    }

    /// Whether it changes data.
    pub fn writes(&self) -> bool {
        !matches!(self.op, Op::Read | Op::Flush)
    }

    /// Whether it is acknowledged only once durable.
    pub fn is_fua(&self) -> bool {
        matches!(self.op, Op::Write { fua: true })
    }

    /// Whether it writes zeroes.
    pub fn zeroes(&self) -> bool {
        matches!(self.op, Op::Discard | Op::WriteZeroes { .. })
    }

    /// The memory as a list of one to three parts.
    pub fn list(&mut self, rng: &mut ChaCha8Rng) -> Vec<libc::iovec> {
        let parts = rng
            .random_range(1..=3)
            .min(self.memory.len() as u64 / SECTOR_BYTES) as usize;
        let mut rest = &mut *self.memory;
        let mut list = Vec::new();
        for left in (1..=parts).rev() {
            let sectors = rest.len() / SECTOR_BYTES as usize / left;
            let len = if left == 1 {
                rest.len()
            } else {
                sectors * SECTOR_BYTES as usize
            };
            let (part, later) = rest.split_at_mut(len);
            list.push(libc::iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: part.len(),
            });
            rest = later;
        }
        list
    }
}

/// A guest with one disk.
pub struct Guest {
    /// Its volume.
    pub volume: usize,
    /// Where it runs.
    pub host: usize,
    /// Requests that it still makes.
    pub left: u32,
    /// Requests in flight by their name.
    pub in_flight: BTreeMap<u64, GuestOp>,
    /// First sectors of the places where it writes.
    pub spots: Vec<u64>,
    /// A step of it waits in the queue.
    pub awake: bool,
    /// It waits for its host to have the lease.
    pub suspended: bool,
    /// It moves as soon as its requests are answered.
    pub draining: bool,
    /// Its host will ask for the lease.
    pub asking: bool,
}

/// Places where guests write: at the ends of chunks and of map pages, and anywhere.
pub fn spots(chunks: u64, per_chunk: u64, rng: &mut ChaCha8Rng) -> Vec<u64> {
    let mut spots = Vec::new();
    for chunk in 0..chunks {
        let base = chunk * CHUNK_SECTORS;
        for nth in 0..per_chunk {
            let within = match nth {
                // Reaches into the next chunk, if there is one.
                0 if chunk + 1 < chunks => CHUNK_SECTORS - SPOT_SECTORS / 2,
                1 => (1 << 20) / SECTOR_BYTES - SPOT_SECTORS / 2,
                _ => {
                    rng.random_range(0..(CHUNK_SECTORS - SPOT_SECTORS) / BLOCK_SECTORS)
                        * BLOCK_SECTORS
                }
            };
            spots.push(base + within);
        }
    }
    spots
}

/// Draws what a guest does next. Few blocks are used, so that requests meet. `None`: nothing that its manners
/// allow.
pub fn draw(guest: &Guest, plan: &Plan, tag: Tag, rng: &mut ChaCha8Rng) -> Option<GuestOp> {
    let op = match rng.random_range(0..100) {
        0..40 => Op::Read,
        40..80 => Op::Write {
            fua: rng.random_bool(0.1),
        },
        80..86 => Op::Discard,
        86..90 => Op::WriteZeroes {
            unmap: rng.random_bool(0.5),
        },
        _ => Op::Flush,
    };
    let lane = rng.random_range(0..plan.lanes);
    let (first, sectors) = if op == Op::Flush {
        (0, 0)
    } else {
        range(guest, plan.guests_do, rng)
    };
    let moves_data = matches!(op, Op::Read | Op::Write { .. });
    let bytes = if moves_data {
        sectors * SECTOR_BYTES
    } else {
        0
    };
    let drawn = GuestOp {
        op,
        first,
        sectors,
        tag,
        begun: None,
        since: At(0),
        lane,
        memory: vec![0; bytes as usize].into(),
    };
    let clashes = |other: &GuestOp| {
        let (a, b) = (drawn.range(), other.range());
        other.writes() && a.start < b.end && b.start < a.end
    };
    let rude = drawn.writes() && guest.in_flight.values().any(clashes);
    (plan.guests_do.overlaps || !rude).then_some(drawn)
}

fn range(guest: &Guest, guests_do: GuestBehaviour, rng: &mut ChaCha8Rng) -> (u64, u64) {
    let spot = guest.spots[rng.random_range(0..guest.spots.len())];
    let (first, sectors) = match rng.random_range(0..10) {
        // A block.
        0..5 => (
            rng.random_range(0..SPOT_SECTORS / BLOCK_SECTORS) * BLOCK_SECTORS,
            BLOCK_SECTORS,
        ),
        // A few blocks.
        5..8 => (
            rng.random_range(0..SPOT_SECTORS / BLOCK_SECTORS - 8) * BLOCK_SECTORS,
            rng.random_range(1..=8) * BLOCK_SECTORS,
        ),
        // Sectors of the first blocks, so that their neighbours are often written at the same time.
        8 if guests_do.sectors && rng.random() => {
            (rng.random_range(0..32), rng.random_range(1..=3))
        }
        // Sectors.
        8 if guests_do.sectors => (
            rng.random_range(0..SPOT_SECTORS - 16),
            rng.random_range(1..=16),
        ),
        // All of it.
        _ => (0, SPOT_SECTORS),
    };
    (spot + first, sectors)
}
