//! Measures the engine alone, without a guest: `cargo run -p fabric --example engine_bench -- null`.

use std::error::Error;
use std::time::{Duration, Instant};

use fabric::core::volume::{Durability, VolumeParams};
use fabric::engine::{Fabric, FabricConfig, StoreKind};
use fabric::io::{Engine, Op, Request, Submit, Tag};
use fabric::proto::ids::LayerId;
use fabric::proto::{Epoch, Generation, Incarnation, NodeId};

const RUN: Duration = Duration::from_secs(2);
const VOLUME_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let fabric = Fabric::open(FabricConfig {
        node: NodeId(1),
        incarnation: Incarnation(1),
        store: StoreKind::Null,
    })?;
    let mut engine = fabric.engine()?;
    let volume = fabric.open_volume(&VolumeParams {
        layer: LayerId(1),
        size_bytes: VOLUME_BYTES,
        generation: Generation(1),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
    })?;
    let mut buffer = vec![0u8; 4096];
    let buffers = [libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    }];
    for (name, op) in [("read", Op::Read), ("write", Op::Write { fua: false })] {
        let start = Instant::now();
        let mut requests = 0u64;
        let mut random = 1u64;
        while start.elapsed() < RUN {
            for _ in 0..1024 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                let offset = (random >> 33) % (VOLUME_BYTES / 4096) * 4096;
                let request = Request {
                    tag: Tag(requests),
                    op,
                    offset,
                    len: 4096,
                    buffers: &buffers,
                };
                // SAFETY: the buffer outlives the engine's requests, which finish in place.
                let outcome = unsafe { engine.submit(&volume, &request) };
                assert_eq!(outcome, Submit::Done(Ok(())));
                requests += 1;
            }
            engine.kick();
            engine.reap(&mut |_, _| ());
        }
        let nanos = start.elapsed().as_nanos() as f64 / requests as f64;
        println!("null {name}: {nanos:.1} ns per request");
    }
    Ok(())
}
