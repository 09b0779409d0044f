//! Measures the engine alone, without a guest.
//!
//! `cargo run -p fabric --example engine_bench -- null` or `... -- FILE [SIZE_MIB [spin]]`; FILE is created (and
//! removed). With `spin` the thread polls instead of sleeping.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fabric::core::volume::{Durability, VolumeParams};
use fabric::engine::{
    DeviceConfig, Fabric, FabricConfig, FabricEngine, Missing, StoreKind, VolumeHandle,
};
use fabric::io::{Engine, Op, Request, Submit, Tag};
use fabric::proto::ids::LayerId;
use fabric::proto::{Epoch, Generation, Incarnation, NodeId};
use fabric::store::file::Allocation;
use rustix::event::{PollFd, PollFlags, poll};

const RUN: Duration = Duration::from_secs(4);
const BLOCK: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let target = args
        .next()
        .ok_or("usage: engine_bench null | FILE [SIZE_MIB [spin]]")?;
    let size_bytes = args.next().map_or(Ok(4096), |s| s.parse::<u64>())? << 20;
    let spin = args.next().is_some_and(|a| a == "spin");
    let store = if target == "null" {
        StoreKind::Null
    } else {
        StoreKind::Devices(vec![DeviceConfig {
            path: PathBuf::from(&target),
            missing: Missing::CreateFile {
                size_bytes,
                allocation: Allocation::Written,
            },
        }])
    };
    let null = matches!(store, StoreKind::Null);
    let mut config = FabricConfig::new(NodeId(1), Incarnation(1), [7; 16], store);
    config.scrub.enabled = false;
    let fabric = Fabric::open(config)?;
    let volume = fabric.open_volume(&VolumeParams {
        layer: LayerId(1),
        size_bytes: size_bytes / 4,
        generation: Generation(1),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
    })?;
    if !null {
        fill(&fabric, &volume)?;
    }
    let mut engine = fabric.engine()?;
    println!(
        "{:<12} {:>5} {:>9} {:>8} {:>8} {:>9}",
        "", "depth", "IOPS", "p50 us", "p99 us", "CPU us/IO"
    );
    for depth in [1, 32, 128] {
        for (name, op) in [
            ("randread", Op::Read),
            ("randwrite", Op::Write { fua: false }),
        ] {
            let before = fabric.devices();
            run(&mut engine, &volume, name, op, depth, spin)?;
            if let (Some(a), Some(b)) = (before.first(), fabric.devices().first()) {
                let sum =
                    |d: &fabric::engine::DeviceStatus,
                     f: fn(&fabric::store::metrics::StoreMetrics) -> u64| {
                        d.shards.iter().map(f).sum::<u64>()
                    };
                let diff =
                    |f: fn(&fabric::store::metrics::StoreMetrics) -> u64| sum(b, f) - sum(a, f);
                println!(
                    "             device reads {} writes {} ({} MiB) flushes {} checkpoints {}",
                    diff(|m| m.device_reads),
                    diff(|m| m.device_writes),
                    diff(|m| m.device_write_bytes) >> 20,
                    diff(|m| m.device_flushes),
                    diff(|m| m.checkpoints),
                );
            }
        }
    }
    drop(engine);
    fabric.close()?;
    if !null {
        std::fs::remove_file(target)?;
    }
    Ok(())
}

/// Writes the whole volume once, so that every read finds a block.
fn fill(fabric: &Fabric, volume: &VolumeHandle) -> Result<(), Box<dyn Error>> {
    let mut io = fabric.volume_io(volume)?;
    let data = vec![0x5a; 8 << 20];
    let start = Instant::now();
    for offset in (0..io.size_bytes()).step_by(data.len()) {
        io.write_at(offset, &data)?;
    }
    io.flush()?;
    let mib = io.size_bytes() as f64 / (1 << 20) as f64;
    println!(
        "sequential fill: {:.0} MiB/s",
        mib / start.elapsed().as_secs_f64()
    );
    Ok(())
}

fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn run(
    engine: &mut FabricEngine,
    volume: &VolumeHandle,
    name: &str,
    op: Op,
    depth: usize,
    spin: bool,
) -> Result<(), Box<dyn Error>> {
    let layout = std::alloc::Layout::from_size_align(BLOCK * depth, BLOCK)?;
    // SAFETY: the layout is not empty.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    let mut idle: Vec<usize> = (0..depth).collect();
    let mut started = vec![Instant::now(); depth];
    let mut latencies: Vec<u32> = Vec::with_capacity(16 << 20);
    let (start, cpu) = (Instant::now(), cpu_time());
    let mut random = 1u64;
    let mut requests = 0u64;
    let mut running = true;
    while running || engine.in_flight() > 0 {
        let now = Instant::now();
        running = now - start < RUN;
        while let Some(slot) = idle.pop() {
            if !running {
                break;
            }
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            let offset = (random >> 33) % (fabric::io::Volume::size_bytes(volume) / BLOCK as u64)
                * BLOCK as u64;
            let buffers = [libc::iovec {
                iov_base: memory.wrapping_add(slot * BLOCK).cast(),
                iov_len: BLOCK,
            }];
            let request = Request {
                tag: Tag(slot as u64),
                op,
                offset,
                len: BLOCK as u64,
                buffers: &buffers,
            };
            started[slot] = now;
            // SAFETY: the memory is freed after the last completion.
            match unsafe { engine.submit(volume, &request) } {
                Submit::Done(result) => {
                    result?;
                    idle.push(slot);
                    requests += 1;
                    if requests % 1024 == 0 {
                        break;
                    }
                }
                Submit::Pending => {}
                Submit::Busy => {
                    idle.push(slot);
                    break;
                }
            }
        }
        engine.kick();
        let mut failed = None;
        let done = engine.reap(&mut |tag, result| {
            failed = failed.or(result.err());
            idle.push(tag.0 as usize);
            latencies.push(started[tag.0 as usize].elapsed().as_nanos() as u32);
        });
        requests += done as u64;
        if let Some(error) = failed {
            return Err(error.into());
        }
        if done == 0 && engine.in_flight() > 0 && !spin {
            let fd = engine.wait_fd();
            let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], None);
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    let cpu = (cpu_time() - cpu).as_secs_f64();
    latencies.sort_unstable();
    let at = |p: f64| {
        latencies
            .get((latencies.len() as f64 * p) as usize)
            .map_or(0.0, |&n| f64::from(n) / 1000.0)
    };
    println!(
        "{name:<12} {depth:>5} {:>9.0} {:>8.1} {:>8.1} {:>9.3}",
        requests as f64 / elapsed,
        at(0.5),
        at(0.99),
        cpu * 1e6 / requests as f64
    );
    // SAFETY: allocated above; nothing is in flight.
    unsafe { std::alloc::dealloc(memory, layout) };
    Ok(())
}
