//! Random histories of operations.

use fabric::store::api::{StoreCore, StoreOp};
use rand::Rng;

use crate::rig::Rig;

/// One step of a history.
#[derive(Debug, Clone, Copy)]
pub enum Op {
    Write {
        chunk: u32,
        sector: u32,
        count: u32,
        fua: bool,
    },
    Zero {
        chunk: u32,
        sector: u32,
        count: u32,
    },
    Read {
        chunk: u32,
        sector: u32,
        count: u32,
    },
    Flush,
    Checkpoint {
        clean: bool,
    },
    Idle,
    Drain,
    DeviceSteps(u32),
}

/// The next operation; `busy` lays ranges on few blocks, so that they overlap.
pub fn generate(rng: &mut impl Rng, chunks: u32, span_sectors: u32, large: bool) -> Op {
    let chunk = rng.random_range(0..chunks);
    let count = match rng.random_range(0..10) {
        0..5 => 8,
        5..7 => rng.random_range(1..24),
        7..9 => 8 * rng.random_range(1..6),
        _ if large => 8 * rng.random_range(16..300),
        _ => 8,
    };
    let limit = span_sectors.min(8192);
    let count = count.min(limit);
    let aligned = rng.random_bool(0.7);
    let mut sector = rng.random_range(0..=limit - count);
    if aligned {
        sector -= sector % 8;
    }
    match rng.random_range(0..100) {
        0..50 => Op::Write {
            chunk,
            sector,
            count,
            fua: rng.random_bool(0.05),
        },
        50..58 => Op::Zero {
            chunk,
            sector,
            count,
        },
        58..70 => Op::Read {
            chunk,
            sector,
            count,
        },
        70..76 => Op::Flush,
        76..78 => Op::Checkpoint {
            clean: rng.random_bool(0.2),
        },
        78..80 => Op::Idle,
        80..85 => Op::Drain,
        _ => Op::DeviceSteps(rng.random_range(1..8)),
    }
}

pub fn apply(rig: &mut Rig, op: Op) {
    match op {
        Op::Write {
            chunk,
            sector,
            count,
            fua,
        } => drop(rig.write(chunk, sector, count, fua)),
        Op::Zero {
            chunk,
            sector,
            count,
        } => drop(rig.zero(chunk, sector, count)),
        Op::Read {
            chunk,
            sector,
            count,
        } => drop(rig.read(chunk, sector, count)),
        Op::Flush => drop(rig.flush()),
        Op::Checkpoint { clean } => drop(rig.other(StoreOp::Checkpoint { clean })),
        Op::Idle => rig.core.on_idle(),
        Op::Drain => rig.drain(),
        Op::DeviceSteps(n) => (0..n).for_each(|_| rig.step()),
    }
}
