//! File data are read from segments once, and ahead of who reads in order.

use std::sync::Arc;
use std::time::Duration;

use fs_client::{Client, ClientOptions, DataCache, OwnedOperation, OwnedReply};
use fuse_codec::Handle;
use futures_util::FutureExt;
use futures_util::future::join_all;

use crate::guest::{Guest, RDWR, ROOT, client, client_with, flags, options};
use crate::host::Host;
use crate::in_world_with;
use crate::world::{Faults, World, Writes};

const BLOCK: usize = 4096;

/// Longer than anything in the background takes.
const WHILE: Duration = Duration::from_millis(300);

fn cached(world: &World, node: u64, cache: &Arc<DataCache>) -> Arc<Client<Host>> {
    let options = ClientOptions {
        data_cache: Arc::clone(cache),
        ..options(world, None)
    };
    client_with(world, node, None, options)
}

/// A file of a host that caches nothing.
async fn file(world: &World, name: &str, length: usize) -> (u64, Vec<u8>) {
    let options = ClientOptions {
        data_cache: DataCache::new(0),
        ..options(world, None)
    };
    let writer = Guest::new(&client_with(world, 9, None, options));
    let (file, handle) = writer.create(ROOT, name, RDWR).await.unwrap();
    let bytes = world.runtime.bytes(length);
    for (number, part) in bytes.chunks(1 << 20).enumerate() {
        let offset = (number as u64) << 20;
        writer.write(file, handle, offset, part).await.unwrap();
    }
    writer.release(file, handle).await.unwrap();
    (file, bytes)
}

fn data_reads(world: &World) -> u64 {
    world.state().data_reads
}

fn read_operation(handle: Handle, offset: u64, size: u32) -> OwnedOperation {
    OwnedOperation::Read(fuse_codec::Read {
        handle,
        offset,
        size,
        lock_owner: None,
        flags: flags(libc::O_RDONLY),
    })
}

#[test]
fn data_are_read_once_and_then_answered_at_once() {
    in_world_with(Writes::Through, |world| async move {
        let (file, bytes) = file(&world, "f", 300_000).await;
        let host = cached(&world, 1, &DataCache::new(8 << 20));
        let guest = Guest::new(&host);
        guest.lookup(ROOT, "f").await.unwrap();
        let handle = guest.open(file, libc::O_RDONLY).await.unwrap();
        for _ in 0..3 {
            guest.read(file, handle, 0, 1 << 20).await.unwrap();
            world.runtime.sleep(WHILE).await;
        }
        let before = data_reads(&world);
        for (offset, size) in [(0, 1 << 20), (4096, 4096), (70_001, 100_000), (299_999, 9)] {
            let reply = guest.call(file, read_operation(handle, offset, size));
            let reply = reply.now_or_never().expect("it is answered at once");
            let (from, to) = (
                offset as usize,
                (offset as usize + size as usize).min(300_000),
            );
            assert_eq!(reply, OwnedReply::Data(bytes[from..to].to_vec().into()));
        }
        assert_eq!(data_reads(&world), before);
        let counters = host.counters();
        assert!(counters.data_miss_bytes < 310_000 && counters.data_hit_bytes > 900_000);
    });
}

#[test]
fn what_this_host_wrote_is_not_read() {
    in_world_with(Writes::Through, |world| async move {
        let host = cached(&world, 1, &DataCache::new(8 << 20));
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let bytes = world.runtime.bytes(100_000);
        guest.write(file, handle, 0, &bytes).await.unwrap();
        // Part of a block: it takes the rest from the cache, too.
        guest.write(file, handle, 5000, &[7; 100]).await.unwrap();
        let read = guest.read(file, handle, 0, 1 << 20).await.unwrap();
        assert!(read[..5000] == bytes[..5000] && read[5000..5100] == [7; 100]);
        assert!(read[5100..] == bytes[5100..]);
        assert_eq!(data_reads(&world), 0);
    });
}

#[test]
fn readers_of_the_same_data_ask_once() {
    in_world_with(Writes::Through, |world| async move {
        let (file, bytes) = file(&world, "f", 500_000).await;
        world.set_faults(Faults {
            delay_max: Duration::from_millis(3),
            ..Faults::default()
        });
        let guest = Guest::new(&cached(&world, 1, &DataCache::new(8 << 20)));
        let handle = guest.open(file, libc::O_RDONLY).await.unwrap();
        let before = data_reads(&world);
        // The first one stops before its data are there. Those that wait go on.
        let given_up = guest.read(file, handle, 0, 1 << 20);
        let given_up = async { given_up.now_or_never() };
        assert!(given_up.await.is_none());
        let readers = (0..8).map(|_| guest.read(file, handle, 0, 1 << 20));
        for read in join_all(readers).await {
            assert!(read.unwrap() == bytes);
        }
        assert!(data_reads(&world) - before <= 3, "{}", data_reads(&world));
    });
}

#[test]
fn data_that_could_not_be_read_are_read_again() {
    in_world_with(Writes::Through, |world| async move {
        let (file, bytes) = file(&world, "f", 200_000).await;
        let cache = DataCache::new(8 << 20);
        let guest = Guest::new(&cached(&world, 1, &cache));
        let handle = guest.open(file, libc::O_RDONLY).await.unwrap();
        world.set_faults(Faults {
            data_error: 1.0,
            ..Faults::default()
        });
        let readers = (0..4).map(|_| guest.read(file, handle, 0, 1 << 20));
        assert!(join_all(readers).await.iter().all(Result::is_err));
        assert_eq!(cache.used_bytes(), 0);
        world.set_faults(Faults::default());
        assert!(guest.read(file, handle, 0, 1 << 20).await.unwrap() == bytes);
    });
}

#[test]
fn what_is_read_long_after_it_was_named_is_looked_up_anew() {
    in_world_with(Writes::Through, |world| async move {
        let small_segments = ClientOptions {
            segment_bytes: fs_client::CHUNK_BYTES,
            ..options(&world, None)
        };
        let writer = Guest::new(&client_with(&world, 1, None, small_segments));
        let reader = Guest::new(&client(&world, 2, None));
        let (ino, handle) = writer.create(ROOT, "f", RDWR).await.unwrap();
        writer.write(ino, handle, 0, &[1; 2 * BLOCK]).await.unwrap();
        // Files next to each other do not share a chunk: this ends the segment.
        let (other, other_handle) = writer.create(ROOT, "g", RDWR).await.unwrap();
        writer.write(other, other_handle, 0, b"g").await.unwrap();
        let open = reader.open(ino, RDWR).await.unwrap();
        world.set_faults(Faults {
            read_late: 1.0,
            ..Faults::default()
        });
        let reading = {
            let reader = reader.clone();
            async move { reader.read(ino, open, 0, 2 * BLOCK as u32).await }
        };
        // Both need the old data.
        let changing = async move { reader.write(ino, open, 100, &[3; 10]).await };
        let reading = world.runtime.spawn(reading);
        let changing = world.runtime.spawn(changing);
        world.runtime.sleep(WHILE).await;
        world.set_faults(Faults {
            hasty_reclaim: true,
            ..Faults::default()
        });
        writer.write(ino, handle, 0, &[2; 2 * BLOCK]).await.unwrap();
        let read = reading.await.unwrap().unwrap();
        assert!(read.iter().all(|byte| [2, 3].contains(byte)), "{read:?}");
        changing.await.unwrap().unwrap();
        let read = writer.read(ino, handle, 0, 2 * BLOCK as u32).await.unwrap();
        assert!(
            read[100..110] == [3; 10] && read[..100] == [2; 100] && read[110..4096] == [2; 3986]
        );
    });
}

#[test]
fn a_file_that_is_read_in_order_is_read_ahead() {
    in_world_with(Writes::Through, |world| async move {
        const LENGTH: usize = 12 << 20;
        let (file, bytes) = file(&world, "f", LENGTH).await;
        let host = cached(&world, 1, &DataCache::new(128 << 20));
        let guest = Guest::new(&host);
        guest.lookup(ROOT, "f").await.unwrap();
        let handle = guest.open(file, libc::O_RDONLY).await.unwrap();
        let (mut offset, mut at_once) = (0, 0);
        while offset < LENGTH {
            let reading = guest.call(file, read_operation(handle, offset as u64, 128 << 10));
            let mut reading = Box::pin(reading);
            let reply = match futures_util::poll!(&mut reading) {
                std::task::Poll::Ready(reply) => {
                    at_once += 1;
                    reply
                }
                std::task::Poll::Pending => reading.await,
            };
            let end = offset + (128 << 10);
            assert_eq!(reply, OwnedReply::Data(bytes[offset..end].to_vec().into()));
            offset = end;
            world.runtime.sleep(Duration::from_millis(50)).await;
        }
        assert!(at_once >= 85, "{at_once} of 96");
        let counters = host.counters();
        assert!(counters.read_ahead_bytes as usize >= LENGTH * 9 / 10);
        let read = counters.read_ahead_bytes + counters.data_miss_bytes;
        assert_eq!(read as usize, LENGTH, "nothing is read twice");
    });
}

#[test]
fn filesystems_of_a_host_share_one_bound() {
    in_world_with(Writes::Through, |world| async move {
        let cache = DataCache::new(1 << 20);
        let mut hosts = Vec::new();
        for node in 1..4 {
            let host = cached(&world, node, &cache);
            let guest = Guest::new(&host);
            let name = format!("f{node}");
            let (file, handle) = guest.create(ROOT, &name, RDWR).await.unwrap();
            let bytes = world.runtime.bytes(200 * BLOCK);
            guest.write(file, handle, 0, &bytes).await.unwrap();
            assert!(cache.used_bytes() <= cache.capacity_bytes());
            hosts.push((host, guest, (file, handle), bytes));
        }
        assert!(cache.used_bytes() > cache.capacity_bytes() / 2);
        for _ in 0..2 {
            for (_, guest, (file, handle), bytes) in &hosts {
                let read = guest.read(*file, *handle, 0, 1 << 20).await.unwrap();
                assert!(read == *bytes);
                assert!(cache.used_bytes() <= cache.capacity_bytes());
            }
        }
    });
}

#[test]
fn a_client_that_goes_leaves_nothing_in_the_cache() {
    let cache = DataCache::new(8 << 20);
    let kept = Arc::clone(&cache);
    in_world_with(Writes::Through, |world| async move {
        let host = cached(&world, 1, &cache);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(file, handle, 0, &[1; 10_000]).await.unwrap();
        assert!(cache.used_bytes() > 10_000);
        drop(guest);
        host.shutdown().await;
        world.runtime.sleep(WHILE).await;
    });
    assert_eq!(kept.used_bytes(), 0);
}

#[test]
fn the_usual_client_of_these_tests_caches_little() {
    in_world_with(Writes::Through, |world| async move {
        let guest = Guest::new(&client(&world, 1, None));
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let bytes = world.runtime.bytes(1 << 20);
        guest.write(file, handle, 0, &bytes).await.unwrap();
        let before = data_reads(&world);
        assert!(guest.read(file, handle, 0, 1 << 20).await.unwrap() == bytes);
        assert!(data_reads(&world) > before, "most of it went again");
    });
}
