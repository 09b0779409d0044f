//! Random histories: operations that overlap, straddle map pages, and come in all sizes.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::model::{BASE, BLOCK_SECTORS, CHILD, OTHER, PLAIN, Range, View};
use crate::rig::Rig;

/// Chunks that histories use.
pub const CHUNKS: [u32; 3] = [0, 1, 9];
/// Blocks that histories use, as (first, count): the start of a chunk, around a map page border, the end of a
/// chunk.
pub const HOT: [(u32, u32); 3] = [(0, 48), (246, 20), (1012, 12)];
/// Views that histories write.
pub const VIEWS: [View; 3] = [PLAIN, OTHER, CHILD];
/// Operations under way at most.
const DEPTH_MAX: usize = 16;

/// One step of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Write { range: Range, fua: bool },
    Zero { range: Range, fua: bool },
    Read(Range),
    Flush,
    FlushByMarks,
    Checkpoint,
    RaiseFence(View),
    DropLayer(View),
    DropChunk(View, u32),
    Idle,
}

/// A range in a hot place; `from` and `len` are taken modulo what is there.
pub fn hot_range(view: usize, chunk: usize, hot: usize, from: u32, len: u32) -> Range {
    let (first, count) = HOT[hot % HOT.len()];
    let per = BLOCK_SECTORS as u32;
    let from = from % (count * per);
    let sectors = len.clamp(1, count * per - from);
    let chunk = CHUNKS[chunk % CHUNKS.len()];
    let view = VIEWS[view % VIEWS.len()];
    Range {
        view,
        chunk,
        sector: first * per + from,
        sectors,
    }
}

pub fn random_range(rng: &mut ChaCha8Rng) -> Range {
    let per = BLOCK_SECTORS as u32;
    let (from, len) = match rng.random_range(0..10) {
        0..5 => (rng.random_range(0..48) * per, per),
        5..7 => (rng.random_range(0..48 * per), rng.random_range(1..=2 * per)),
        7..9 => (rng.random_range(0..48) * per, rng.random_range(1..=6) * per),
        _ => (0, rng.random_range(16..=48) * per),
    };
    let (view, chunk) = (rng.random_range(0..3), rng.random_range(0..3));
    let hot = [0, 0, 1, 2][rng.random_range(0..4)];
    hot_range(view, chunk, hot, from, len)
}

pub fn random_op(rng: &mut ChaCha8Rng) -> Op {
    let fua = rng.random_bool(0.1);
    match rng.random_range(0..100) {
        0..58 => Op::Write {
            range: random_range(rng),
            fua,
        },
        58..66 => Op::Zero {
            range: random_range(rng),
            fua,
        },
        66..82 => Op::Read(random_range(rng)),
        82..88 => Op::Flush,
        88..91 => Op::FlushByMarks,
        91..95 => Op::Checkpoint,
        95..96 => Op::RaiseFence(PLAIN),
        96..97 => Op::DropChunk(
            VIEWS[rng.random_range(0..3)],
            CHUNKS[rng.random_range(0..3)],
        ),
        97..98 => Op::DropLayer([OTHER, CHILD][rng.random_range(0..2)]),
        _ => Op::Idle,
    }
}

/// Submits one operation; those that need quiet wait for it.
pub fn apply(rig: &mut Rig, op: Op) {
    match op {
        Op::Write { range, fua } => {
            rig.write(range, fua);
        }
        Op::Zero { range, fua } => {
            rig.zero(range, fua);
        }
        Op::Read(range) => {
            rig.read(range);
        }
        Op::Flush => rig.flush(),
        Op::FlushByMarks => rig.flush_by_marks(),
        Op::Checkpoint => rig.checkpoint(),
        Op::RaiseFence(view) => {
            rig.drain();
            rig.raise_fence(view);
        }
        Op::DropLayer(view) => rig.drop_layer(view),
        Op::DropChunk(view, chunk) => rig.drop_chunk(view, chunk),
        Op::Idle => rig.idle(),
    }
}

/// Fills the layer below [`CHILD`].
pub fn prologue(rig: &mut Rig) {
    // Whatever a history shows, it shows beside the cleaner.
    rig.now.cleaning = true;
    for chunk in CHUNKS {
        for (first, count) in HOT {
            rig.write(Range::blocks(BASE, chunk, first, count / 2), false);
        }
    }
    rig.drain();
    rig.flush();
    rig.drain();
}

/// Runs random operations, several at a time, and leaves the last of them under way.
pub fn run(rig: &mut Rig, rng: &mut ChaCha8Rng, ops: usize) {
    let mut pace = 0.7;
    for _ in 0..ops {
        if rng.random_bool(0.1) {
            pace = [0.1, 0.5, 0.9][rng.random_range(0..3)];
        }
        apply(rig, random_op(rng));
        while rig.in_flight() > DEPTH_MAX || rng.random_bool(pace) {
            if !rig.step() {
                break;
            }
        }
    }
}
