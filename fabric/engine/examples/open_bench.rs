//! Measures how long a store takes to open after a crash.
//!
//! `cargo run -p fabric --example open_bench -- FILE [SIZE_GIB [ROUNDS]]`; FILE is created sparse and
//! removed. A block is written to every chunk of the size and every page of the space bitmap is made, so that
//! there is as much metadata to read as a full store of that size has (but for the map pages, which are read
//! when they are needed). Each round writes at random without a flush, drops the store without closing it,
//! and measures the opening that follows.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fabric::{DeviceConfig, Fabric, FabricConfig, FabricEngine, Missing, StoreKind, VolumeHandle};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_store::device::SyncDevice;
use fabric_store::file::{Allocation, DeviceFile};
use fabric_store::format::{
    DIR_PTRS, Geometry, Page, Ptr, SHARDS_START_UNIT, Superblock, UNIT_BYTES, seal,
};
use fabric_store::recovery::read_label;
use fabric_types::ids::{CHUNK_BYTES, LayerId};
use fabric_types::io::{Engine, Op, Request, Submit, Tag};
use fabric_types::{Epoch, Generation};
use rustix::event::{PollFd, PollFlags, poll};
use zerocopy::IntoBytes;

#[path = "../tests/common/single_node.rs"]
mod single_node;

use single_node::{INCARNATION, NODE};

/// Random writes before each crash.
const CRASH_WRITES: u64 = 30_000;
/// Requests in flight.
const DEPTH: usize = 128;
/// The random writes go to the first so many blocks of a chunk: they share the map page that the chunk has.
const CHUNK_BLOCKS: u64 = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .ok_or("usage: open_bench FILE [SIZE_GIB [ROUNDS]]")?;
    let path = PathBuf::from(path);
    let size_bytes = args.next().map_or(Ok(1024), |s| s.parse::<u64>())? << 30;
    let rounds = args.next().map_or(Ok(5), |s| s.parse::<u64>())?;
    let chunks = size_bytes / CHUNK_BYTES;
    let (fabric, volume) = open(&path, size_bytes, 1)?;
    write_all(
        &fabric,
        &volume,
        (0..chunks).map(|chunk| chunk * CHUNK_BYTES),
    )?;
    fabric.close()?;
    drop((volume, fabric));
    fill_bitmaps(&path)?;
    let mut random = 1u64;
    let mut millis = Vec::new();
    for round in 0..rounds {
        let (fabric, volume) = open(&path, size_bytes, round * 2 + 2)?;
        let mut place = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            let (chunk, block) = ((random >> 33) % chunks, (random >> 24) % CHUNK_BLOCKS);
            chunk * CHUNK_BYTES + block * UNIT_BYTES as u64
        };
        write_all(&fabric, &volume, (0..CRASH_WRITES).map(|_| place()))?;
        drop((volume, fabric));
        let start = Instant::now();
        let fabric = Fabric::open(config(&path, size_bytes))?;
        let took = start.elapsed();
        for device in fabric.devices() {
            println!("{:>7} ms: {}", took.as_millis(), device.report);
        }
        millis.push(took.as_millis());
    }
    millis.sort_unstable();
    println!(
        "median of {rounds}: {} ms; {} MiB resident",
        millis[millis.len() / 2],
        resident_mib()?
    );
    std::fs::remove_file(path)?;
    Ok(())
}

fn config(path: &Path, size_bytes: u64) -> FabricConfig {
    let store = StoreKind::Devices(vec![DeviceConfig {
        path: path.to_owned(),
        missing: Missing::CreateFile {
            size_bytes,
            allocation: Allocation::Sparse,
        },
    }]);
    let mut config = FabricConfig::new(NODE, INCARNATION, [7; 16], store);
    config.scrub.enabled = false;
    config
}

fn open(
    path: &Path,
    size_bytes: u64,
    generation: u64,
) -> Result<(Fabric, VolumeHandle), Box<dyn Error>> {
    let fabric = single_node::open(config(path, size_bytes));
    let volume = fabric.open_volume(&VolumeParams {
        layer: LayerId(1),
        size_bytes,
        generation: Generation(generation),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
        on_full: OnFull::default(),
    })?;
    single_node::wait_until_served(&volume);
    Ok((fabric, volume))
}

/// Writes a block at each offset.
fn write_all(
    fabric: &Fabric,
    volume: &VolumeHandle,
    mut offsets: impl Iterator<Item = u64>,
) -> Result<(), Box<dyn Error>> {
    let mut engine = fabric.engine()?;
    let block = Page::zeroed();
    let buffers = [libc::iovec {
        iov_base: block.0.as_ptr().cast_mut().cast(),
        iov_len: UNIT_BYTES,
    }];
    let mut next = offsets.next();
    while next.is_some() || engine.in_flight() > 0 {
        while let Some(offset) = next.filter(|_| engine.in_flight() < DEPTH) {
            let request = Request {
                tag: Tag(0),
                op: Op::Write { fua: false },
                offset,
                len: UNIT_BYTES as u64,
                buffers: &buffers,
            };
            // SAFETY: the block outlives the loop, which ends with nothing in flight.
            match unsafe { engine.submit(volume, &request) } {
                Submit::Done(result) => result?,
                Submit::Pending => {}
                Submit::Busy => break,
            }
            next = offsets.next();
        }
        wait(&mut engine)?;
    }
    Ok(())
}

fn wait(engine: &mut FabricEngine) -> Result<(), Box<dyn Error>> {
    engine.kick();
    let mut failed = None;
    if engine.reap(&mut |_, result| failed = failed.or(result.err())) == 0 && engine.in_flight() > 0
    {
        let fd = engine.wait_fd();
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], None);
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

/// Gives every bitmap page that the closed store has not made yet a place and zeroes for content: to the
/// store that is the same, and to whoever reads it as much work as a full one.
fn fill_bitmaps(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut dev = DeviceFile::open(path)?;
    let label = read_label(&mut dev)?;
    let (zeroes, mut page) = (Page::zeroed(), Page::zeroed());
    let nothing = fabric_types::checksum::crc32c(&zeroes.0);
    for shard in 0..label.shards {
        let base = SHARDS_START_UNIT + u64::from(shard) * u64::from(label.shard_units);
        let units = label.shard_units;
        let geo = Geometry { shard, units, base };
        let mut newest: Option<Superblock> = None;
        for slot in 0..2 {
            dev.read_at(geo.offset(geo.superblock_units(slot)[0]), &mut page.0)?;
            let read = Superblock::read(&page.0, shard, units);
            if read.as_ref().map(|sb| sb.checkpoint) > newest.as_ref().map(|sb| sb.checkpoint) {
                newest = read;
            }
        }
        let mut sb = newest.ok_or("a shard without superblock")?;
        for dir in 0..geo.bitmap_dirs() {
            let mut ptrs = [Ptr::default(); DIR_PTRS];
            let old = sb.bitmap_dirs[dir as usize];
            if old.unit != 0 {
                dev.read_at(geo.offset(old.unit), &mut page.0)?;
                ptrs.as_mut_bytes().copy_from_slice(&page.0);
            }
            let pages = (geo.bitmap_pages() - dir * DIR_PTRS as u32).min(DIR_PTRS as u32);
            for (at, ptr) in ptrs.iter_mut().enumerate().take(pages as usize) {
                if ptr.unit == 0 {
                    let unit = geo.bitmap_slot(dir * DIR_PTRS as u32 + at as u32, 0);
                    dev.write_at(geo.offset(unit), &zeroes.0)?;
                    *ptr = Ptr { unit, crc: nothing };
                }
            }
            page.0.copy_from_slice(ptrs.as_bytes());
            let (unit, crc) = (
                geo.bitmap_dir_slot(dir, 0),
                fabric_types::checksum::crc32c(&page.0),
            );
            dev.write_at(geo.offset(unit), &page.0)?;
            sb.bitmap_dirs[dir as usize] = Ptr { unit, crc };
        }
        page.0.fill(0);
        page.0[..size_of::<Superblock>()].copy_from_slice(sb.as_bytes());
        seal(&mut page.0);
        for unit in geo.superblock_units(sb.checkpoint) {
            dev.write_at(geo.offset(unit), &page.0)?;
        }
    }
    Ok(dev.flush()?)
}

/// Memory that this process holds.
fn resident_mib() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("no VmRSS")?.trim().parse::<u64>()? >> 10)
}
