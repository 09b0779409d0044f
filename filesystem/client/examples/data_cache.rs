//! What reading from the cache of file data costs: `cargo run -p fs-client --example data_cache`.
//!
//! A guest reads 4 KiB files and a large one, again and again, through `Mount::serve`. The leader and the
//! segments are those of the simulation: only what is cached says something.

#[allow(dead_code)]
#[path = "../tests/simulation/executor.rs"]
mod executor;
#[allow(dead_code)]
#[path = "../tests/simulation/guest.rs"]
mod guest;
#[allow(dead_code)]
#[path = "../tests/simulation/history.rs"]
mod history;
#[allow(dead_code)]
#[path = "../tests/simulation/host.rs"]
mod host;
#[allow(dead_code)]
#[path = "../tests/simulation/leader.rs"]
mod leader;
#[allow(dead_code)]
#[path = "../tests/simulation/pool.rs"]
mod pool;
#[allow(dead_code)]
#[path = "../tests/simulation/world.rs"]
mod world;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fs_client::{ClientOptions, DataCache, OwnedOperation, OwnedReply};
use fuse_codec::{Handle, Read};
use futures_util::FutureExt;

use executor::Runtime;
use guest::{Guest, RDWR, ROOT, client_with, flags, options};
use world::{World, Writes};

const FILES: usize = 4000;
const LARGE: u64 = 256 << 20;
const ROUNDS: usize = 5;

/// Reads everything several times; what one round took.
fn measure(guest: &Guest, reads: &[(u64, Handle, u64, u32)]) -> Duration {
    let mut room = vec![0; 1 << 20];
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        for (file, handle, offset, size) in reads {
            let read = OwnedOperation::Read(Read {
                handle: *handle,
                offset: *offset,
                size: *size,
                lock_owner: None,
                flags: flags(RDWR),
            });
            let reply = guest.call(*file, read).now_or_never();
            let Some(OwnedReply::Data(data)) = reply else {
                panic!("it is cached");
            };
            // As into a guest's memory.
            let mut at = 0;
            for bytes in data.slices() {
                room[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            }
            assert_eq!(black_box(&room[..at]).len(), *size as usize);
        }
    }
    begin.elapsed() / ROUNDS as u32
}

async fn run(world: World) {
    let cache = DataCache::new(1 << 30);
    let options = ClientOptions {
        data_cache: Arc::clone(&cache),
        ..options(&world, None)
    };
    let host = client_with(&world, 1, None, options);
    let guest = Guest::new(&host);
    let dir = guest.mkdir(ROOT, "d").await.unwrap();
    let mut small = Vec::new();
    for number in 0..FILES {
        let name = format!("f{number}");
        let (file, handle) = guest.create(dir, &name, RDWR).await.unwrap();
        guest.write(file, handle, 0, &[7; 4096]).await.unwrap();
        small.push((file, handle, 0, 4096));
    }
    let (file, handle) = guest.create(ROOT, "large", RDWR).await.unwrap();
    for offset in (0..LARGE).step_by(1 << 20) {
        let data = vec![offset as u8; 1 << 20];
        guest.write(file, handle, offset, &data).await.unwrap();
    }
    let bytes = FILES as u64 * 4096 + LARGE;
    let overhead = (cache.used_bytes() - bytes) as f64 * 100.0 / bytes as f64;
    println!("counted besides data: {overhead:.2} %");
    // Names and extents get cached.
    for _ in 0..3 {
        guest.list(dir).await.unwrap();
        for (file, handle, offset, size) in &small {
            guest.read(*file, *handle, *offset, *size).await.unwrap();
        }
        guest.read(file, handle, 0, 4096).await.unwrap();
        world.runtime.sleep(Duration::from_millis(500)).await;
    }
    let took = measure(&guest, &small);
    println!("a 4 KiB file: {} ns", took.as_nanos() / FILES as u128);
    for size in [4_u32 << 10, 128 << 10, 1 << 20] {
        let offsets = (0..LARGE).step_by(size as usize);
        let reads: Vec<_> = offsets.map(|offset| (file, handle, offset, size)).collect();
        let took = measure(&guest, &reads);
        let rate = LARGE as f64 / took.as_secs_f64() / 1e9;
        let each = took.as_nanos() / reads.len() as u128;
        println!(
            "{} KiB of a large file: {each} ns, {rate:.1} GB/s",
            size >> 10
        );
    }
}

fn main() {
    let runtime = Runtime::new(1);
    let world = World::new(runtime.clone(), Writes::Through);
    runtime.run(run(world));
}
