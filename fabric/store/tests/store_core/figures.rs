//! Figures for the documentation, printed with `--no-capture`: RAM per TiB, write amplification, CPU per
//! block.

use fabric_store::api::*;
use fabric_store::device::{DeviceAction, SyncDevice};
use fabric_store::{ShardCore, format, open};
use fabric_types::iov::IoVecs;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::rig::{BLOCK, IDENTITY};

/// Memory that costs only what is touched.
struct Memory {
    bytes: Vec<u8>,
}

impl SyncDevice for Memory {
    fn capacity_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        buf.copy_from_slice(&self.bytes[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, buf: &[u8]) -> std::io::Result<()> {
        self.bytes[offset as usize..offset as usize + buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// CPU time of this thread: other work on the machine does not count.
fn cpu_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a valid place for the answer.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    assert_eq!(rc, 0);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn each(iovecs: &IoVecs, mut f: impl FnMut(&mut [u8])) {
    for i in 0..iovecs.len as usize {
        // SAFETY: the core keeps the list and its memory valid until the completion.
        let buf = unsafe {
            let iov = &*iovecs.ptr.add(i);
            std::slice::from_raw_parts_mut(iov.iov_base.cast::<u8>(), iov.iov_len)
        };
        f(buf);
    }
}

/// Executes everything the core wants; returns the nanoseconds that the device's copies took.
fn turn(core: &mut ShardCore, disk: &mut Memory) -> u64 {
    let mut device_ns = 0;
    let mut held = Vec::new();
    loop {
        while let Some(action) = core.poll_action() {
            held.push(action);
        }
        if held.is_empty() {
            return device_ns;
        }
        let begin = cpu_ns();
        for action in &held {
            match action {
                DeviceAction::Read { offset, iovecs, .. } => {
                    let mut at = *offset as usize;
                    each(iovecs, |buf| {
                        buf.copy_from_slice(&disk.bytes[at..at + buf.len()]);
                        at += buf.len();
                    });
                }
                DeviceAction::Write { offset, iovecs, .. } => {
                    let mut at = *offset as usize;
                    each(iovecs, |buf| {
                        disk.bytes[at..at + buf.len()].copy_from_slice(buf);
                        at += buf.len();
                    });
                }
                DeviceAction::Flush { .. } | DeviceAction::Discard { .. } => {}
            }
        }
        device_ns += cpu_ns() - begin;
        for action in held.drain(..) {
            let (DeviceAction::Read { id, .. }
            | DeviceAction::Write { id, .. }
            | DeviceAction::Flush { id }
            | DeviceAction::Discard { id, .. }) = action;
            core.on_device(id, Ok(()));
        }
    }
}

/// Submits a write under `version`, or a read. The caller keeps the buffers until it is done.
fn submit_block(
    core: &mut ShardCore,
    id: u64,
    (chunk, offset): (u32, u32),
    iovecs: &[libc::iovec],
    version: Option<Version>,
) {
    let layers = &[LayerId(1)];
    let op = match version {
        Some(version) => StoreOp::Write {
            layers,
            chunk,
            offset,
            iovecs,
            version,
            fua: false,
            urgent: false,
        },
        None => StoreOp::Read {
            layers,
            chunk,
            offset,
            iovecs,
        },
    };
    // SAFETY: the buffers outlive the turn behind the submissions, which completes everything.
    let submitted = unsafe { core.submit(OpId(id), op) };
    assert_eq!(submitted, Submitted::Accepted);
}

#[test]
fn figures_of_random_4k_at_depth_32() {
    const SPAN_CHUNKS: u32 = 128;
    const OPS: u32 = 100_000;
    const DEPTH: u32 = 32;
    let mut disk = Memory {
        bytes: vec![0; 1 << 30],
    };
    format(&mut disk, IDENTITY, false).expect("format");
    let (mut shards, _) = open(&mut disk, &CoreParams::default(), [3; 16]).expect("open");
    let core = &mut shards[0];
    let mut buffers = vec![0u8; BLOCK * (DEPTH as usize + 1)];
    let skip = buffers.as_ptr().align_offset(BLOCK);
    let buffers = &mut buffers[skip..];
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut run = |core: &mut ShardCore, write: bool, ops: u32, sequence: &mut u64| {
        let mut device_ns = 0;
        let begin = cpu_ns();
        for _ in 0..ops / DEPTH {
            for i in 0..DEPTH {
                let base = buffers[i as usize * BLOCK..].as_mut_ptr().cast();
                let iovecs = [libc::iovec {
                    iov_base: base,
                    iov_len: BLOCK,
                }];
                let (chunk, offset) = (
                    rng.random_range(0..SPAN_CHUNKS),
                    rng.random_range(0..1024) * BLOCK as u32,
                );
                *sequence += 1;
                let version = write.then(|| Version::new(1, *sequence));
                submit_block(core, u64::from(i), (chunk, offset), &iovecs, version);
            }
            device_ns += turn(core, &mut disk);
            for _ in 0..DEPTH {
                assert!(matches!(core.poll_completion(), Some((_, Ok(())))));
            }
        }
        ((cpu_ns() - begin) - device_ns) / u64::from(ops)
    };
    let mut sequence = 0;
    run(core, true, OPS, &mut sequence);
    let before = core.metrics();
    let write_ns = run(core, true, OPS, &mut sequence);
    let after = core.metrics();
    let read_ns = run(core, false, OPS, &mut sequence);
    let bytes = |m: &fabric_store::metrics::StoreMetrics| (m.device_write_bytes, m.write_op_bytes);
    let ((b, bo), (a, ao)) = (bytes(&before), bytes(&after));
    let amplification = (a - b) as f64 / (ao - bo) as f64;
    let device_writes = (after.device_writes - before.device_writes) as f64 / f64::from(OPS);
    println!("random 4 KiB, depth {DEPTH}, 512 MiB span, 1 GiB shard, device time not counted:");
    println!("  write {write_ns} ns, read {read_ns} ns of CPU each, CRC and copy included");
    println!(
        "  write amplification {amplification:.2}, device writes per write {device_writes:.3}"
    );
    println!("  checkpoints {}", after.checkpoints - before.checkpoints);
    assert!(
        amplification < 2.0 && device_writes < 0.25,
        "{amplification} {device_writes}"
    );
    assert_eq!(core.check(&mut disk), Ok(()));
}

/// What a shard's memory grows with: capacity (bitmaps) and chunks stored.
#[test]
fn ram_per_tib_stored_is_within_the_bound_we_state() {
    let ram = |bytes: usize, chunks: u32| {
        let mut disk = Memory {
            bytes: vec![0; bytes],
        };
        format(&mut disk, IDENTITY, false).expect("format");
        let (mut shards, _) = open(&mut disk, &CoreParams::default(), [3; 16]).expect("open");
        let core = &mut shards[0];
        let data = vec![1u8; BLOCK];
        let iovecs = [libc::iovec {
            iov_base: data.as_ptr().cast_mut().cast(),
            iov_len: BLOCK,
        }];
        for chunk in 0..chunks {
            let (layers, version) = (&[LayerId(1)], Version::new(1, u64::from(chunk)));
            let op = StoreOp::Write {
                layers,
                chunk,
                offset: 0,
                iovecs: &iovecs,
                version,
                fua: false,
                urgent: false,
            };
            // SAFETY: the buffer outlives the turn, which completes everything.
            assert_eq!(unsafe { core.submit(OpId(1), op) }, Submitted::Accepted);
            turn(core, &mut disk);
            assert_eq!(core.poll_completion(), Some((OpId(1), Ok(()))));
        }
        core.metrics().ram
    };
    let (small, large) = (ram(256 << 20, 0), ram(512 << 20, 0));
    let bitmaps_per_tib = (large.bitmaps - small.bitmaps) * (1 << 12);
    // As many records as the index doubles at: the worst moment.
    let stored = ram(512 << 20, 3600);
    let chunks_per_tib = (stored.chunks - large.chunks) * 262_144 / 3600;
    let total = (bitmaps_per_tib + chunks_per_tib) >> 20;
    println!(
        "RAM per TiB: bitmaps {} MiB, chunk records {} MiB",
        bitmaps_per_tib >> 20,
        chunks_per_tib >> 20
    );
    println!(
        "beside it, fixed per store: leaf cache {}, buffers {}",
        small.leaf_cache, small.buffers
    );
    println!("tables of one shard: {} KiB", small.tables >> 10);
    assert!(total < 128, "{total} MiB per TiB");
}
