//! Space is discarded as soon as it is freed, whoever is about to read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fs_client::ClientOptions;
use fuse_codec::Handle;

use crate::guest::{Guest, RDWR, ROOT, client_with, options};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{seeds, slow};

const FILE_BYTES: usize = 64 << 10;
const BLOCK: usize = 4096;
const VERSIONS: u8 = 40;

/// A file all of whose blocks tell the version, or are zero: a third of them, others in each version.
fn content(version: u8) -> Vec<u8> {
    let block = |number: usize| match (number + usize::from(version)) % 3 {
        0 => [0; BLOCK],
        _ => [version; BLOCK],
    };
    (0..FILE_BYTES / BLOCK).flat_map(block).collect()
}

/// A guest of a host whose segments have room for one place to write at: those of two files are not in one.
fn guest(world: &World, node: u64, mutation: Option<Mutation>) -> Guest {
    let options = ClientOptions {
        segment_bytes: fs_client::CHUNK_BYTES,
        ..options(world, mutation)
    };
    Guest::new(&client_with(world, node, mutation, options))
}

struct Reader {
    world: World,
    guest: Guest,
    file: u64,
    handle: Handle,
    is_over: Arc<AtomicBool>,
}

impl Reader {
    /// Reads until the writer is done. Each version is whole, and not older than the one before.
    async fn run(self) {
        let mut last = 1;
        while !self.is_over.load(Ordering::Relaxed) {
            let read = self.guest.read(self.file, self.handle, 0, 1 << 20);
            let read = read.await.unwrap();
            let version = *read.iter().max().unwrap();
            if version < last || read != content(version) {
                let what = format!("after version {last}, a read finds {version} in part");
                self.world.violation(what);
            }
            last = last.max(version);
            // Cached data take no time.
            self.world.delay().await;
        }
    }
}

/// One host overwrites a file that others read.
pub async fn overwritten(world: World, mutation: Option<Mutation>) {
    world.set_faults(Faults {
        hasty_reclaim: true,
        ..slow()
    });
    let writer = guest(&world, 1, mutation);
    let (file, handle) = writer.create(ROOT, "f", RDWR).await.unwrap();
    let (other, other_handle) = writer.create(ROOT, "g", RDWR).await.unwrap();
    writer.write(file, handle, 0, &content(1)).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for node in [1, 2, 3] {
        let guest = match node {
            1 => writer.clone(),
            node => guest(&world, node, mutation),
        };
        let reader = Reader {
            handle: guest.open(file, RDWR).await.unwrap(),
            world: world.clone(),
            guest,
            file,
            is_over: Arc::clone(&is_over),
        };
        readers.push(world.runtime.spawn(reader.run()));
    }
    for version in 2..=VERSIONS {
        let content = content(version);
        writer.write(file, handle, 0, &content).await.unwrap();
        writer.fsync(file, handle).await.unwrap();
        // Ends the segment, so that the next version frees this one in a sealed one.
        let data = [version; BLOCK];
        writer.write(other, other_handle, 0, &data).await.unwrap();
        writer.fsync(other, other_handle).await.unwrap();
    }
    is_over.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
}

#[test]
fn readers_find_no_discarded_space_in_a_file() {
    seeds(4, |world| overwritten(world, None));
}
