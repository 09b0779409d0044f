//! Sessions that end, segments that are full, and the end of a client.

use std::sync::Arc;
use std::time::Duration;

use fs_client::{Client, ClientOptions};
use fuse_codec::Errno;

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Host;
use crate::world::{Faults, Writes};
use crate::{faulty, in_world, in_world_with, seeds, slow};

#[test]
fn open_files_outlive_a_session() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(file, handle, 0, b"before").await.unwrap();
        guest.fsync(file, handle).await.unwrap();
        let first = host.backend().session();
        world.end_session(first).await;
        guest.write(file, handle, 6, b" and after").await.unwrap();
        assert_eq!(
            guest.read(file, handle, 0, 99).await.unwrap(),
            b"before and after"
        );
        let second = host.backend().session();
        assert_ne!(first, second);
        assert_eq!(world.sessions(), [second]);
        assert_eq!(guest.getattr(999).await.err(), Some(Errno::ESTALE));
        assert_eq!(guest.link(999, ROOT, "x").await.err(), Some(Errno::ESTALE));
        assert_eq!(
            host.backend().session(),
            second,
            "an inode that is gone is no session's end"
        );
        world.end_session(second).await;
        world.runtime.sleep(Duration::from_secs(5)).await;
        let third = host.backend().session();
        assert_eq!(world.sessions(), [third], "opened without any request");
        world.end_session(third).await;
        guest.mkdir(ROOT, "d").await.unwrap();
        assert_ne!(host.backend().session(), third, "done in another session");
        world.runtime.sleep(Duration::from_secs(5)).await;
        let current = world.open_segments();
        assert!(
            current.is_empty(),
            "leases of former sessions are given back: {current:?}"
        );
    });
}

#[test]
fn an_orphan_goes_with_the_session_that_held_it() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.unlink(ROOT, "f").await.unwrap();
        guest.write(file, handle, 0, b"still").await.unwrap();
        world.end_session(host.backend().session()).await;
        assert_eq!(
            guest.write(file, handle, 0, b"gone").await,
            Err(Errno::ESTALE)
        );
        guest.release(file, handle).await.unwrap();
        assert_eq!(world.statistics().inodes, 1);
    });
}

#[test]
fn full_segments_are_sealed_and_others_begun() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let data = world.runtime.bytes(1 << 20);
        for number in 0..150 {
            guest
                .write(file, handle, number << 20, &data)
                .await
                .unwrap();
        }
        guest.fsync(file, handle).await.unwrap();
        assert_eq!(host.counters().segments, 3);
        world.runtime.sleep(Duration::from_secs(5)).await;
        assert_eq!(world.open_segments().len(), 1);
        let last = guest.read(file, handle, 149 << 20, 1 << 20).await.unwrap();
        assert!(last == data);
    });
}

#[test]
fn what_is_never_named_ends_a_segment_before_the_namespace_refuses_it() {
    seeds(4, |world| async move {
        let host = client(&world, 1, None);
        let mut running = Vec::new();
        for number in 0..8 {
            let guest = Guest::new(&host);
            let name = format!("f{number}");
            let (file, handle) = guest.create(ROOT, &name, RDWR).await.unwrap();
            let world = world.clone();
            running.push((world.clone(), async move {
                for step in 0..600 {
                    let length = world.runtime.below(20_000) as usize + 1;
                    let data = world.runtime.bytes(length);
                    // It may fail, and then leaves a gap.
                    let _ = guest.write(file, handle, step * 100, &data).await;
                }
            }));
        }
        world.set_faults(Faults {
            data_error: 0.2,
            ..slow()
        });
        let tasks: Vec<_> = running
            .into_iter()
            .map(|(world, task)| world.runtime.spawn(task))
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        world.set_faults(slow());
        // When such a one failed, further ones are written through; that they fail, too, is seen less often.
        assert!(host.counters().segments > 1 || world.writes == Writes::Buffered);
        world.runtime.sleep(Duration::from_secs(5)).await;
        assert!(world.open_segments().len() <= 1);
    });
}

#[test]
fn writes_share_flushes() {
    in_world_with(Writes::Through, |world| async move {
        world.set_faults(slow());
        let host = client(&world, 1, None);
        let tasks: Vec<_> = (0..40)
            .map(|number| {
                let guest = Guest::new(&host);
                world.runtime.spawn(async move {
                    let name = format!("f{number}");
                    let (file, handle) = guest.create(ROOT, &name, RDWR).await.unwrap();
                    guest.write(file, handle, 0, b"data").await.unwrap();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let counters = host.counters();
        assert_eq!(counters.flushes_asked, 40);
        assert!(counters.flushes < 20, "{counters:?}");
    });
}

#[test]
fn a_client_ends_with_its_segments_sealed_and_its_leases_given_back() {
    seeds(20, |world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let mut running = Vec::new();
        for number in 0..4 {
            let (guest, world, name) = (guest.clone(), world.clone(), format!("f{number}"));
            let (file, handle) = guest.create(ROOT, &name, RDWR).await.unwrap();
            running.push(async move {
                let mut done = 0;
                while guest.write(file, handle, done, b"some data").await.is_ok() {
                    done += 9;
                    world.delay().await;
                }
                (file, done)
            });
        }
        world.set_faults(slow());
        let running: Vec<_> = running
            .into_iter()
            .map(|task| world.runtime.spawn(task))
            .collect();
        world
            .runtime
            .sleep(Duration::from_millis(world.runtime.below(100)))
            .await;
        guest.mount.end_session();
        host.shutdown().await;
        assert!(world.open_segments().is_empty());
        let other = Guest::new(&client(&world, 2, None));
        for task in running {
            let (file, done) = task.await.unwrap();
            assert_eq!(other.getattr(file).await.unwrap().size, done);
        }
        assert_eq!(guest.lookup(ROOT, "f0").await.err(), Some(Errno::EIO));
    });
}

#[test]
fn requests_wait_for_slots() {
    seeds(20, |world| async move {
        let options = ClientOptions {
            operations_max: 2,
            writes_max: 1,
            segment_bytes: 64 << 20,
            ..ClientOptions::default()
        };
        let host = Client::new(Host::new(world.clone(), 1, None), options);
        drop(world.runtime.spawn(Arc::clone(&host).run()));
        world.set_faults(slow());
        let tasks: Vec<_> = (0..20)
            .map(|number| {
                let guest = Guest::new(&host);
                world.runtime.spawn(async move {
                    let name = format!("f{number}");
                    let (file, handle) = guest.create(ROOT, &name, RDWR).await.unwrap();
                    guest.write(file, handle, 3, b"data").await.unwrap();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[test]
fn futures_of_requests_may_be_dropped_at_any_time() {
    seeds(40, |world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        world.set_faults(faulty());
        for number in 0..40 {
            let data = world.runtime.bytes(5000);
            let name = format!("f{number}");
            let works = async {
                let _ = guest.write(file, handle, number * 1000, &data).await;
                let _ = guest.create(ROOT, &name, RDWR).await;
                let _ = guest.truncate(file, number * 500).await;
            };
            let patience = Duration::from_micros(world.runtime.below(40_000));
            let sleep = world.runtime.sleep(patience);
            futures_util::future::select(Box::pin(works), Box::pin(sleep)).await;
        }
        world.set_faults(slow());
        guest.truncate(file, 0).await.unwrap();
        guest.write(file, handle, 0, b"whole").await.unwrap();
        assert_eq!(guest.read(file, handle, 0, 99).await.unwrap(), b"whole");
        guest.mount.end_session();
        host.shutdown().await;
        assert!(world.open_segments().is_empty());
    });
}
