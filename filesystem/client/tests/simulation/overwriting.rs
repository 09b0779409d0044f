//! A pool is full before freed space is back unless writers wait for it.

use std::sync::Arc;
use std::time::Duration;

use fs_client::{Client, ClientOptions};
use fuse_codec::Errno;

use crate::guest::{Guest, RDWR, ROOT, client_with, options};
use crate::host::{Host, Mutation};
use crate::pool::{REPORT_INTERVAL, limit, repeat};
use crate::world::{World, Writes};
use crate::{in_world_with, seeds, slow};

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 64 * MIB;
/// Pause of whoever gives freed space back.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(1);
/// Pause of the neighbour between two writes.
const NEIGHBOUR_INTERVAL: Duration = Duration::from_millis(250);
const NEIGHBOUR_BYTES: u64 = 64 << 10;

/// A host that buffers less than the pool has.
fn host(world: &World, node: u64, mutation: Option<Mutation>) -> Arc<Client<Host>> {
    let usual = options(world, mutation);
    let options = ClientOptions {
        dirty_bytes_max: usual.dirty_bytes_max.min(8 * MIB),
        ..usual
    };
    client_with(world, node, mutation, options)
}

fn version(number: u64) -> Vec<u8> {
    vec![number as u8 | 1; MIB as usize]
}

/// Overwrites one file with many times what the pool holds, beside a neighbour and another host that write
/// a little.
pub async fn overwritten(world: World, mutation: Option<Mutation>) {
    const VERSIONS: u64 = 6 * TOTAL / MIB;
    world.set_faults(slow());
    limit(&world, TOTAL);
    repeat(&world, RECLAIM_INTERVAL, World::reclaim_all);
    repeat(&world, NEIGHBOUR_INTERVAL, |world| {
        let mut state = world.state();
        // It overwrites its own data, and removes some in between.
        match state.pool().take(NEIGHBOUR_BYTES) {
            true => state.pool().give_back(NEIGHBOUR_BYTES),
            false => state.violations.push("no space for a neighbour".to_owned()),
        }
    });
    let writer = Guest::new(&host(&world, 1, mutation));
    let other = Guest::new(&host(&world, 2, mutation));
    let (file, handle) = writer.create(ROOT, "f", RDWR).await.unwrap();
    let (small, small_handle) = other.create(ROOT, "g", RDWR).await.unwrap();
    for number in 0..VERSIONS {
        let count = writer.write(file, handle, 0, &version(number)).await;
        assert_eq!(count, Ok(MIB as u32), "version {number}");
        // Else the buffer may have one version replace the other.
        let synced = writer.fsync(file, handle).await;
        assert_eq!(synced, Ok(()), "version {number}");
        if number % 10 == 0 {
            let count = other.write(small, small_handle, 0, &[7; 4096]).await;
            assert_eq!(count, Ok(4096), "beside version {number}");
        }
    }
    other.fsync(small, small_handle).await.unwrap();
    let handle = other.open(file, RDWR).await.unwrap();
    let read = other.read(file, handle, 0, 1 << 20).await.unwrap();
    assert!(read == version(VERSIONS - 1));
}

#[test]
fn overwriting_a_file_fills_no_pool() {
    seeds(2, |world| overwritten(world, None));
}

#[test]
fn a_pool_that_is_full_of_named_data_says_so_at_once() {
    in_world_with(Writes::Through, |world| async move {
        limit(&world, 16 * MIB);
        let guest = Guest::new(&host(&world, 1, None));
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let mut number = 0;
        while guest
            .write(file, handle, number * MIB, &version(number))
            .await
            .is_ok()
        {
            number += 1;
        }
        assert_eq!(number, 16);
        let begun = world.runtime.now();
        let refused = guest.write(file, handle, 0, &version(1)).await;
        assert_eq!(refused, Err(Errno::ENOSPC));
        assert!(world.runtime.now() - begun < Duration::from_millis(200));
        assert_eq!(guest.truncate(file, 0).await.unwrap().size, 0);
    });
}

#[test]
fn a_write_waits_for_removed_space_and_holds_up_nobody() {
    in_world_with(Writes::Through, |world| async move {
        limit(&world, 16 * MIB);
        let guest = Guest::new(&host(&world, 1, None));
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        for number in 0..16 {
            let data = version(number);
            let written = guest.write(file, handle, number * MIB, &data).await;
            assert_eq!(written, Ok(MIB as u32));
        }
        guest.truncate(file, 8 * MIB).await.unwrap();
        // Nobody gives it back yet.
        let writing = {
            let guest = guest.clone();
            async move { guest.write(file, handle, 0, &version(1)).await }
        };
        let mut writing = world.runtime.spawn(writing);
        world.runtime.sleep(REPORT_INTERVAL).await;
        assert_eq!(writing.try_recv(), Ok(None), "it waits");
        guest.truncate(file, 7 * MIB).await.unwrap();
        let read = guest.read(file, handle, 0, 1 << 20).await.unwrap();
        assert!(read == version(0));
        world.reclaim_all();
        assert_eq!(writing.await.unwrap(), Ok(MIB as u32));
    });
}

#[test]
fn space_that_does_not_come_back_is_not_waited_for_without_end() {
    in_world_with(Writes::Through, |world| async move {
        limit(&world, 16 * MIB);
        let guest = Guest::new(&host(&world, 1, None));
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let mut number = 0;
        let refused = loop {
            match guest.write(file, handle, 0, &version(number)).await {
                Ok(_) => number += 1,
                Err(errno) => break errno,
            }
        };
        assert_eq!(refused, Errno::ENOSPC);
        let begun = world.runtime.now();
        let refused = guest.write(file, handle, 0, &version(0)).await;
        assert_eq!(refused, Err(Errno::ENOSPC));
        assert!(world.runtime.now() - begun < Duration::from_millis(200));
        let read = guest.read(file, handle, 0, 1 << 20).await.unwrap();
        assert!(read == version(number - 1));
    });
}
