//! What it costs to ask a store how much each chunk stores: the walk over a million chunk records, as a node
//! makes it twice a minute, and the same with as many changed map pages as the cache may hold.
//!
//! `cargo run --release -p fabric-store --example stored_cost` prints the time of each
//! walk and of the longest lock hold, 256 chunks. The device takes writes and keeps nothing.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use fabric_store::api::{
    CoreParams, DeviceLabel, LayerId, OpId, StoreCore, StoreOp, Submitted, Version,
};
use fabric_store::device::{DeviceAction, SyncDevice};
use fabric_store::{ShardCore, format, open};

const BLOCK: usize = 4096;
/// Eight shards of 131072 records.
const CAPACITY: u64 = 256 << 30;
const CHUNKS: u32 = 125_000;
/// Chunks of one lock hold.
const STEP: usize = 256;

/// Keeps what opening needs.
#[derive(Default)]
struct Pages(HashMap<u64, Vec<u8>>);

impl SyncDevice for Pages {
    fn capacity_bytes(&self) -> u64 {
        CAPACITY
    }

    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (block, at) in buf.chunks_mut(BLOCK).zip((offset..).step_by(BLOCK)) {
            match self.0.get(&at) {
                Some(page) => block.copy_from_slice(page),
                None => block.fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, buf: &[u8]) -> io::Result<()> {
        for (block, at) in buf.chunks(BLOCK).zip((offset..).step_by(BLOCK)) {
            self.0.insert(at, block.to_vec());
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lets a shard do all that it wants; the device says yes to everything.
fn run(core: &mut ShardCore) {
    loop {
        let mut is_idle = true;
        while let Some(action) = core.poll_action() {
            is_idle = false;
            let (DeviceAction::Read { id, .. }
            | DeviceAction::Write { id, .. }
            | DeviceAction::Flush { id }
            | DeviceAction::Discard { id, .. }) = action;
            core.on_device(id, Ok(()));
        }
        while let Some((_, result)) = core.poll_completion() {
            is_idle = false;
            result.expect("the device takes everything");
        }
        if is_idle {
            return;
        }
    }
}

/// Makes a map page of each of these chunks dirty.
fn touch(core: &mut ShardCore, chunks: std::ops::Range<u32>, version: u64) {
    for chunk in chunks {
        let hide = StoreOp::Zero {
            layers: &[LayerId(1), LayerId(2)],
            chunk,
            offset: 0,
            len: BLOCK as u32,
            version: Version(version),
            fua: false,
        };
        // SAFETY: it has no buffers.
        while unsafe { core.submit(OpId(u64::from(chunk)), hide) } == Submitted::Busy {
            run(core);
        }
        if chunk % 64 == 0 {
            run(core);
        }
    }
    run(core);
}

/// Walks through all chunks: how many there are, how long it took, and the longest step.
fn walk(cores: &[ShardCore]) -> (u64, Duration, Duration) {
    let (start, mut chunks, mut longest) = (Instant::now(), 0, Duration::ZERO);
    for core in cores {
        let mut cursor = Some(0);
        while cursor.is_some() {
            let began = Instant::now();
            for _ in 0..STEP {
                let Some((_, bytes, next)) = cursor.and_then(|at| core.next_stored(at)) else {
                    cursor = None;
                    break;
                };
                assert!(bytes.is_some(), "all is counted");
                (cursor, chunks) = (Some(next), chunks + 1);
            }
            longest = longest.max(began.elapsed());
        }
    }
    (chunks, start.elapsed(), longest)
}

fn main() {
    let mut pages = Pages::default();
    let label = DeviceLabel {
        cluster: [1; 16],
        device: [2; 16],
    };
    format(&mut pages, label, false).expect("format");
    let params = CoreParams {
        leaf_cache_bytes: 512 << 20,
        ..CoreParams::default()
    };
    let (mut cores, _) = open(&mut pages, &params, [3; 16]).expect("open");
    let dirty = |cores: &[ShardCore]| cores.iter().map(|c| c.metrics().dirty_leaves).sum::<u64>();
    for core in &mut cores {
        touch(core, 0..CHUNKS, 10);
        // SAFETY: it has no buffers.
        let submitted = unsafe { core.submit(OpId(0), StoreOp::Checkpoint { clean: false }) };
        assert_eq!(submitted, Submitted::Accepted);
        run(core);
    }
    for _ in 0..5 {
        let (chunks, took, longest) = walk(&cores);
        println!(
            "{chunks} chunks, {} dirty pages: {took:?}, at most {longest:?}",
            dirty(&cores)
        );
    }
    for core in &mut cores {
        // Chunks that are in the cache no more would be read, from a device that has kept nothing.
        touch(core, CHUNKS..CHUNKS + 6000, 20);
    }
    for _ in 0..5 {
        let (chunks, took, longest) = walk(&cores);
        println!(
            "{chunks} chunks, {} dirty pages: {took:?}, at most {longest:?}",
            dirty(&cores)
        );
    }
}
