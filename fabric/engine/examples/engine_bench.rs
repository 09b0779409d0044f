//! Measures the engine alone, without a guest.
//!
//! `cargo run -p fabric --example engine_bench -- null` or `... -- FILE [OPTION...]`; FILE is created (and
//! removed). Options: `size=MIB`, `volume=MIB` (else a quarter of it), `threads=N` (each with an engine of
//! its own, on the same volume), `depth=N` (of each thread; else 1, 32 and 128 in turn), `runs=N` (the median
//! by requests per second is shown), `seconds=N` (of a run), `spin` (threads poll instead of sleeping),
//! `clean` (after the random loads: 1 MiB in order while the volume is scattered, and once the cleaner has
//! put it in order; else the cleaner is off).

use std::error::Error;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fabric::{
    DeviceConfig, DeviceStatus, Fabric, FabricConfig, FabricEngine, Missing, StoreKind,
    VolumeHandle,
};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_store::file::Allocation;
use fabric_store::metrics::StoreMetrics;
use fabric_types::ids::LayerId;
use fabric_types::io::{Engine, Op, Request, Submit, Tag};
use fabric_types::{Epoch, Generation};
use rustix::event::{PollFd, PollFlags, poll};

#[path = "../tests/common/single_node.rs"]
mod single_node;

use single_node::{INCARNATION, NODE};

const BLOCK: usize = 4096;

struct Options {
    target: String,
    size_bytes: u64,
    volume_bytes: Option<u64>,
    threads: usize,
    depths: Vec<usize>,
    runs: usize,
    run: Duration,
    spin: bool,
    clean: bool,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut args = std::env::args().skip(1);
        let usage = "usage: engine_bench null | FILE [size=MIB] [volume=MIB] [threads=N] [depth=N] [runs=N] \
            [seconds=N] [spin] [clean]";
        let mut options = Self {
            target: args.next().ok_or(usage)?,
            size_bytes: 4096 << 20,
            volume_bytes: None,
            threads: 1,
            depths: vec![1, 32, 128],
            runs: 1,
            run: Duration::from_secs(4),
            spin: false,
            clean: false,
        };
        for arg in args {
            match arg.split_once('=') {
                None if arg == "spin" => options.spin = true,
                None if arg == "clean" => options.clean = true,
                Some(("size", n)) => options.size_bytes = n.parse::<u64>()? << 20,
                Some(("volume", n)) => options.volume_bytes = Some(n.parse::<u64>()? << 20),
                Some(("threads", n)) => options.threads = n.parse()?,
                Some(("depth", n)) => options.depths = vec![n.parse()?],
                Some(("runs", n)) => options.runs = n.parse()?,
                Some(("seconds", n)) => options.run = Duration::from_secs(n.parse()?),
                _ => return Err(usage.into()),
            }
        }
        Ok(options)
    }

    fn config(&self) -> FabricConfig {
        let store = match self.target.as_str() {
            "null" => StoreKind::Null,
            path => StoreKind::Devices(vec![DeviceConfig {
                path: PathBuf::from(path),
                missing: Missing::CreateFile {
                    size_bytes: self.size_bytes,
                    allocation: Allocation::Written,
                },
            }]),
        };
        let mut config = FabricConfig::new(NODE, INCARNATION, [7; 16], store);
        config.scrub.enabled = false;
        config.clean.enabled = self.clean;
        config.clean.start_after_seconds = 0;
        config
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let fabric = single_node::open(options.config());
    let volume = fabric.open_volume(&VolumeParams {
        layer: LayerId(1),
        size_bytes: options.volume_bytes.unwrap_or(options.size_bytes / 4),
        generation: Generation(1),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
        on_full: OnFull::default(),
    })?;
    single_node::wait_until_served(&volume);
    let null = options.target == "null";
    if !null {
        fill(&fabric, &volume)?;
    }
    println!(
        "{:<12} {:>7} {:>5} {:>9} {:>8} {:>8} {:>9}",
        "", "threads", "depth", "IOPS", "p50 us", "p99 us", "CPU us/IO"
    );
    for &depth in &options.depths {
        for (name, op) in [
            ("randread", Op::Read),
            ("randwrite", Op::Write { fua: false }),
        ] {
            let before = fabric.devices();
            let mut runs = Vec::new();
            for _ in 0..options.runs {
                runs.push(run_threads(&fabric, &volume, op, depth, &options)?);
            }
            runs.sort_unstable_by(|a, b| a.iops.total_cmp(&b.iops));
            let median = &runs[runs.len() / 2];
            println!(
                "{name:<12} {:>7} {depth:>5} {:>9.0} {:>8.1} {:>8.1} {:>9.3}",
                options.threads, median.iops, median.p50_us, median.p99_us, median.cpu_us
            );
            if let (Some(before), Some(after)) = (before.first(), fabric.devices().first()) {
                print_device(before, after);
            }
        }
    }
    if options.clean && !null {
        in_order(&fabric, &volume, "scattered")?;
        wait_until_idle(&fabric);
        in_order(&fabric, &volume, "compacted")?;
    }
    drop(volume);
    fabric.close()?;
    if !null {
        std::fs::remove_file(options.target)?;
    }
    Ok(())
}

fn print_device(before: &DeviceStatus, after: &DeviceStatus) {
    let sum = |d: &DeviceStatus, f: fn(&StoreMetrics) -> u64| d.shards.iter().map(f).sum::<u64>();
    let diff = |f: fn(&StoreMetrics) -> u64| sum(after, f) - sum(before, f);
    println!(
        "             device reads {} writes {} ({} MiB) flushes {} checkpoints {}",
        diff(|m| m.device_reads),
        diff(|m| m.device_writes),
        diff(|m| m.device_write_bytes) >> 20,
        diff(|m| m.device_flushes),
        diff(|m| m.checkpoints),
    );
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

/// Reads a volume in order, and writes a quarter of it in order.
fn in_order(fabric: &Fabric, volume: &VolumeHandle, what: &str) -> Result<(), Box<dyn Error>> {
    let mut io = fabric.volume_io(volume)?;
    let mut data = vec![0x5a; 8 << 20];
    let start = Instant::now();
    for offset in (0..io.size_bytes()).step_by(data.len()) {
        io.read_at(offset, &mut data)?;
    }
    let read = io.size_bytes() as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    for offset in (0..io.size_bytes() / 4).step_by(data.len()) {
        io.write_at(offset, &data)?;
    }
    let written = io.size_bytes() as f64 / 4.0 / start.elapsed().as_secs_f64();
    let mib = f64::from(1 << 20);
    println!(
        "{what}: read {:.0} MiB/s, written {:.0} MiB/s",
        read / mib,
        written / mib
    );
    Ok(())
}

/// Waits until the cleaner moves nothing more.
fn wait_until_idle(fabric: &Fabric) {
    let sum = |f: fn(&StoreMetrics) -> u64| {
        let devices = fabric.devices();
        devices.iter().flat_map(|d| &d.shards).map(f).sum::<u64>()
    };
    let start = Instant::now();
    let (mut moved, mut since) = (0, Instant::now());
    while since.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(100));
        let now = sum(|m| m.moved_bytes);
        if now != moved {
            (moved, since) = (now, Instant::now());
        }
    }
    println!(
        "compacted after {:.1} s, {} MiB moved, {} map pages left, {} checkpoints",
        (since - start).as_secs_f64(),
        moved >> 20,
        sum(|m| m.leaves_to_clean),
        sum(|m| m.checkpoints),
    );
}

fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What a run of all threads gave.
struct Outcome {
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
}

fn run_threads(
    fabric: &Fabric,
    volume: &VolumeHandle,
    op: Op,
    depth: usize,
    options: &Options,
) -> Result<Outcome, Box<dyn Error>> {
    let mut engines = Vec::new();
    for _ in 0..options.threads {
        engines.push(fabric.engine()?);
    }
    let barrier = &Barrier::new(options.threads + 1);
    let (start, cpu, results) = std::thread::scope(|scope| {
        let threads: Vec<_> = engines
            .into_iter()
            .zip(1..)
            .map(|(mut engine, seed)| {
                scope.spawn(move || {
                    let mut load = Load::new(op, depth, seed);
                    barrier.wait();
                    let result = load.run(&mut engine, volume, options);
                    // Waits for what an error left in flight, which uses the memory of the load.
                    drop(engine);
                    result
                        .map(|()| load.latencies_ns)
                        .map_err(|error| error.to_string())
                })
            })
            .collect();
        barrier.wait();
        let (start, cpu) = (Instant::now(), cpu_time());
        let results: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        (start, cpu, results)
    });
    let (elapsed, cpu) = (start.elapsed().as_secs_f64(), cpu_time() - cpu);
    let mut latencies = Vec::new();
    for result in results {
        latencies.append(&mut result.map_err(|_| "a thread panicked")??);
    }
    latencies.sort_unstable();
    let at = |p: f64| {
        let place = (latencies.len() as f64 * p) as usize;
        latencies.get(place).map_or(0.0, |&ns| f64::from(ns) / 1e3)
    };
    Ok(Outcome {
        iops: latencies.len() as f64 / elapsed,
        p50_us: at(0.5),
        p99_us: at(0.99),
        cpu_us: cpu.as_secs_f64() * 1e6 / latencies.len() as f64,
    })
}

/// One thread's requests.
struct Load {
    op: Op,
    memory: Vec<Block>,
    idle: Vec<usize>,
    started: Vec<Instant>,
    latencies_ns: Vec<u32>,
    random: u64,
}

/// Aligned, so that nothing is copied that need not be.
#[repr(align(4096))]
#[derive(Clone)]
struct Block([u8; BLOCK]);

/// Requests answered at once that are counted together: with a null store nothing else would end the loop.
const INLINE_MAX: usize = 1024;

impl Load {
    fn new(op: Op, depth: usize, seed: u64) -> Self {
        Self {
            op,
            memory: vec![Block([0; BLOCK]); depth],
            idle: (0..depth).collect(),
            started: vec![Instant::now(); depth],
            latencies_ns: Vec::with_capacity(16 << 20),
            random: seed,
        }
    }

    fn run(
        &mut self,
        engine: &mut FabricEngine,
        volume: &VolumeHandle,
        options: &Options,
    ) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let mut running = true;
        while running || engine.in_flight() > 0 {
            let now = Instant::now();
            running = now - start < options.run;
            if running {
                self.submit(engine, volume, now)?;
            }
            engine.kick();
            let mut failed = None;
            let done = engine.reap(&mut |tag, result| {
                failed = failed.or(result.err());
                let slot = tag.0 as usize;
                self.idle.push(slot);
                let taken = self.started[slot].elapsed();
                self.latencies_ns.push(taken.as_nanos() as u32);
            });
            if let Some(error) = failed {
                return Err(error.into());
            }
            if done == 0 && engine.in_flight() > 0 && !options.spin {
                let fd = engine.wait_fd();
                let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], None);
            }
        }
        Ok(())
    }

    fn submit(
        &mut self,
        engine: &mut FabricEngine,
        volume: &VolumeHandle,
        now: Instant,
    ) -> Result<(), Box<dyn Error>> {
        let blocks = fabric_types::io::Volume::size_bytes(volume) / BLOCK as u64;
        let mut inline = 0;
        while let Some(slot) = self.idle.pop() {
            self.random = self
                .random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let buffers = [libc::iovec {
                iov_base: self.memory[slot].0.as_mut_ptr().cast(),
                iov_len: BLOCK,
            }];
            let request = Request {
                tag: Tag(slot as u64),
                op: self.op,
                offset: (self.random >> 33) % blocks * BLOCK as u64,
                len: BLOCK as u64,
                buffers: &buffers,
            };
            self.started[slot] = now;
            // SAFETY: the memory lives as long as `self`, which the caller drops after the engine.
            match unsafe { engine.submit(volume, &request) } {
                Submit::Done(result) => {
                    result?;
                    self.idle.push(slot);
                    self.latencies_ns.push(now.elapsed().as_nanos() as u32);
                    inline += 1;
                    if inline == INLINE_MAX {
                        return Ok(());
                    }
                }
                Submit::Pending => {}
                Submit::Busy => {
                    self.idle.push(slot);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}
