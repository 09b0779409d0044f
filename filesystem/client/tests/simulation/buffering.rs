//! Buffered writes: when they are written back, who sees them before, and what becomes of those that cannot
//! be written back.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use fs_client::{Client, OwnedOperation};
use fuse_codec::{
    Errno, FallocateMode, Handle, RenameFlags, SetAttr, SetTime, Timestamp, Write as WriteRequest,
};

use crate::guest::{Guest, RDWR, ROOT, client, client_with, flags, options, written};
use crate::host::{Host, Mutation};
use crate::world::{Faults, World, Writes};
use crate::{in_world_with, run_unchecked, slow};

/// Longer than bytes stay buffered.
const AGED: Duration = Duration::from_secs(7);

/// Runs a test with buffered writes.
fn buffered<F: Future<Output = ()> + Send + 'static>(body: impl FnOnce(World) -> F) {
    in_world_with(Writes::Buffered, body);
}

async fn flush(guest: &Guest, ino: u64, handle: Handle) -> Result<(), Errno> {
    guest.done(ino, OwnedOperation::Flush { handle }).await
}

fn dirty(host: &Arc<Client<Host>>) -> u64 {
    host.counters().dirty_bytes
}

/// A host whose link is there, with a guest.
async fn host(world: &World, node: u64) -> (Arc<Client<Host>>, Guest) {
    let host = client(world, node, None);
    let guest = Guest::new(&host);
    guest.opendir(ROOT).await.unwrap();
    world.runtime.sleep(Duration::from_millis(300)).await;
    (host, guest)
}

#[test]
fn a_write_is_answered_before_it_is_committed_and_is_seen_by_all() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, writer) = host(&world, 1).await;
        let (_two, reader) = host(&world, 2).await;
        let (ino, handle) = writer.create(ROOT, "f", RDWR).await.unwrap();
        let read = reader.open(ino, libc::O_RDONLY).await.unwrap();
        // It was recalled for that.
        world.runtime.sleep(Duration::from_millis(300)).await;
        let data = world.runtime.bytes(10_000);
        writer.write(ino, handle, 100, &data).await.unwrap();
        assert_eq!(dirty(&one), 3 * 4096);
        assert_eq!(one.counters().write_backs, 0);
        // Here, nothing is written back for it.
        let attr = writer.getattr(ino).await.unwrap();
        assert_eq!(attr.size, 10_100);
        assert!(attr.allocated_bytes >= 10_100 && attr.mtime == attr.ctime);
        let looked = writer.lookup(ROOT, "f").await.unwrap();
        assert_eq!(looked.attr, attr);
        let here = Guest::new(&one);
        let open = here.open(ino, libc::O_RDONLY).await.unwrap();
        assert_eq!(here.read(ino, open, 100, 20_000).await.unwrap(), data);
        assert_eq!(dirty(&one), 3 * 4096);
        // Elsewhere, it is.
        assert_eq!(reader.getattr(ino).await.unwrap().size, 10_100);
        assert_eq!(dirty(&one), 0);
        assert_eq!(reader.read(ino, read, 100, 20_000).await.unwrap(), data);
        let seen = reader.getattr(ino).await.unwrap();
        assert_eq!((seen.mtime, seen.ctime), (attr.mtime, attr.ctime));
        let counters = one.counters();
        assert_eq!(
            (counters.write_backs, counters.written_back_bytes),
            (1, 3 * 4096)
        );
    });
}

#[test]
fn a_listing_elsewhere_has_sizes_that_are_buffered_here() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (_one, writer) = host(&world, 1).await;
        let (_two, reader) = host(&world, 2).await;
        for number in 0..20 {
            let name = format!("f{number}");
            let (ino, handle) = writer.create(ROOT, &name, RDWR).await.unwrap();
            writer.write(ino, handle, 0, name.as_bytes()).await.unwrap();
        }
        reader.list(ROOT).await.unwrap();
        for number in 0..20 {
            let name = format!("f{number}");
            let entry = reader.lookup(ROOT, &name).await.unwrap();
            assert_eq!(entry.attr.size, name.len() as u64);
        }
    });
}

#[test]
fn bytes_are_written_back_when_they_are_old_many_or_synced() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        let (ino, handle) = guest.create(ROOT, "old", RDWR).await.unwrap();
        guest.write(ino, handle, 0, b"old").await.unwrap();
        flush(&guest, ino, handle).await.unwrap();
        world.runtime.sleep(AGED / 2).await;
        assert_eq!(dirty(&one), 4096);
        world.runtime.sleep(AGED / 2).await;
        assert_eq!(dirty(&one), 0);
        guest.write(ino, handle, 3, b"er").await.unwrap();
        assert_eq!(dirty(&one), 4096);
        guest.fsync(ino, handle).await.unwrap();
        assert_eq!(dirty(&one), 0);
        let data = vec![7; 128 << 10];
        for number in 0..8 {
            guest
                .write(ino, handle, number * data.len() as u64, &data)
                .await
                .unwrap();
        }
        world.runtime.sleep(Duration::from_millis(100)).await;
        assert_eq!(dirty(&one), 0, "a MiB goes at once");
        let (other, other_handle) = guest.create(ROOT, "other", RDWR).await.unwrap();
        guest.write(ino, handle, 0, b"x").await.unwrap();
        guest.write(other, other_handle, 0, b"y").await.unwrap();
        assert_eq!(dirty(&one), 2 * 4096);
        guest.done(ROOT, OwnedOperation::Syncfs).await.unwrap();
        assert_eq!(dirty(&one), 0);
        let counters = one.counters();
        assert_eq!((counters.write_backs, counters.write_back_failures), (5, 0));
    });
}

#[test]
fn small_files_are_written_back_side_by_side() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        for number in 0..300 {
            let (ino, handle) = guest
                .create(ROOT, &format!("f{number}"), RDWR)
                .await
                .unwrap();
            guest
                .write(ino, handle, 0, &[number as u8; 3000])
                .await
                .unwrap();
            guest.release(ino, handle).await.unwrap();
        }
        let before = one.counters();
        world.runtime.sleep(AGED).await;
        let counters = one.counters();
        assert_eq!(counters.write_backs, 300);
        let flushes = counters.flushes_asked - before.flushes_asked;
        assert!(flushes <= 300 / 16, "{flushes} flushes");
        assert_eq!(counters.segments, 1);
        let (_two, reader) = host(&world, 2).await;
        for number in 0..300 {
            let ino = reader
                .lookup(ROOT, &format!("f{number}"))
                .await
                .unwrap()
                .nodeid
                .0;
            let handle = reader.open(ino, libc::O_RDONLY).await.unwrap();
            let data = reader.read(ino, handle, 0, 9000).await.unwrap();
            assert_eq!(data, [number as u8; 3000]);
        }
    });
}

#[test]
fn writers_wait_for_room_and_go_on() {
    buffered(|world| async move {
        world.set_faults(slow());
        let mut options = options(&world, None);
        options.dirty_bytes_max = 1 << 20;
        let one = client_with(&world, 1, None, options);
        let guest = Guest::new(&one);
        guest.opendir(ROOT).await.unwrap();
        world.runtime.sleep(Duration::from_millis(300)).await;
        let mut running = Vec::new();
        for task in 0..8 {
            let (guest, world) = (guest.clone(), world.clone());
            let (ino, handle) = guest.create(ROOT, &format!("f{task}"), RDWR).await.unwrap();
            running.push(async move {
                let mut all = Vec::new();
                for number in 0..20 {
                    let data = world.runtime.bytes(100_000);
                    guest
                        .write(ino, handle, number * 100_000, &data)
                        .await
                        .unwrap();
                    all.extend(data);
                }
                (guest, ino, handle, all)
            });
        }
        let running: Vec<_> = running
            .into_iter()
            .map(|task| world.runtime.spawn(task))
            .collect();
        let (watched, watcher) = (Arc::clone(&one), world.clone());
        drop(world.runtime.spawn(async move {
            loop {
                let used = dirty(&watched);
                if used > 1 << 20 {
                    watcher.violation(format!("{used} bytes are buffered"));
                }
                watcher.runtime.sleep(Duration::from_micros(300)).await;
            }
        }));
        for task in running {
            let (guest, ino, handle, all) = task.await.unwrap();
            for (at, expected) in all.chunks(1 << 20).enumerate() {
                let read = guest
                    .read(ino, handle, (at as u64) << 20, 1 << 20)
                    .await
                    .unwrap();
                assert!(read == expected);
            }
        }
        assert!(one.counters().write_backs > 0);
    });
}

#[test]
fn synchronous_and_direct_writes_are_committed_when_they_are_answered() {
    buffered(|world| async move {
        let (one, guest) = host(&world, 1).await;
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(ino, handle, 0, b"buffered").await.unwrap();
        assert_eq!(dirty(&one), 4096);
        for (at, bits) in [libc::O_SYNC, libc::O_DSYNC, libc::O_DIRECT]
            .into_iter()
            .enumerate()
        {
            let offset = 10_000 * at as u64;
            let wrote = guest
                .write_with(ino, handle, offset, b"now", RDWR | bits)
                .await;
            assert_eq!(wrote, Ok(3));
            assert_eq!(dirty(&one), 0, "what was there before goes first");
        }
        assert_eq!(guest.read(ino, handle, 0, 8).await.unwrap(), b"nowfered");
    });
}

#[test]
fn a_kernel_that_does_not_pass_sync_on_has_its_writes_committed_when_they_are_answered() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, _guest) = host(&world, 1).await;
        let guest = Guest::before_syncfs(&one);
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        for number in 0..5 {
            guest.write(ino, handle, number, b"data").await.unwrap();
            assert_eq!(dirty(&one), 0);
        }
    });
}

#[test]
fn times_that_are_set_stay_when_what_was_written_before_is_written_back() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest
            .write(ino, handle, 0, b"from an archive")
            .await
            .unwrap();
        let time = Timestamp {
            secs: 1000,
            nanos: 5,
        };
        let times = SetAttr {
            mtime: Some(SetTime::At(time)),
            permissions: Some(0o600),
            ..SetAttr::default()
        };
        let attr = guest.setattr(ino, times).await.unwrap();
        assert_eq!((attr.mtime, attr.size, attr.permissions), (time, 15, 0o600));
        assert_eq!(dirty(&one), 4096, "the data wait");
        assert_eq!(guest.getattr(ino).await.unwrap().mtime, time);
        guest.fsync(ino, handle).await.unwrap();
        let attr = guest.getattr(ino).await.unwrap();
        assert_eq!((attr.mtime, attr.size, attr.permissions), (time, 15, 0o600));
        guest.write(ino, handle, 0, b"F").await.unwrap();
        assert!(guest.getattr(ino).await.unwrap().mtime > time);
    });
}

#[test]
fn a_buffered_write_takes_privileges_away() {
    buffered(|world| async move {
        let (one, guest) = host(&world, 1).await;
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let privileged = SetAttr {
            permissions: Some(0o6755),
            ..SetAttr::default()
        };
        guest.setattr(ino, privileged).await.unwrap();
        let write = WriteRequest {
            handle,
            offset: 0,
            size: 3,
            lock_owner: None,
            flags: flags(RDWR),
            from_page_cache: false,
            kill_suidgid: true,
        };
        let write = OwnedOperation::Write(write);
        let count = written(guest.call_with(ino, write, b"new".to_vec()).await);
        assert_eq!((count, dirty(&one)), (Ok(3), 4096));
        assert_eq!(guest.getattr(ino).await.unwrap().permissions, 0o755);
        // It is not taken away once more.
        let attr = guest.setattr(ino, privileged).await.unwrap();
        assert_eq!(attr.permissions, 0o6755);
        guest.fsync(ino, handle).await.unwrap();
        assert_eq!(guest.getattr(ino).await.unwrap().permissions, 0o6755);
    });
}

#[test]
fn what_is_changed_otherwise_has_what_was_buffered() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(ino, handle, 0, &[1; 9000]).await.unwrap();
        guest.truncate(ino, 5000).await.unwrap();
        guest.write(ino, handle, 6000, &[2; 100]).await.unwrap();
        let hole = (5500, 550);
        guest
            .fallocate(ino, handle, hole, FallocateMode::PunchHole)
            .await
            .unwrap();
        guest.append(ino, handle, &[3; 10]).await.unwrap();
        assert!(dirty(&one) > 0);
        let longer = FallocateMode::Allocate { keep_size: false };
        guest
            .fallocate(ino, handle, (0, 7000), longer)
            .await
            .unwrap();
        guest.append(ino, handle, &[4; 10]).await.unwrap();
        let mut expected = vec![1; 5000];
        expected.resize(7000, 0);
        expected[6050..6100].fill(2);
        expected[6100..6110].fill(3);
        expected.extend([4; 10]);
        assert_eq!(guest.read(ino, handle, 0, 9000).await.unwrap(), expected);
        let link = guest.link(ino, ROOT, "g").await.unwrap();
        assert_eq!((link.attr.size, link.attr.nlink), (7010, 2));
        let (_two, other) = host(&world, 2).await;
        let open = other.open(ino, libc::O_RDONLY).await.unwrap();
        assert_eq!(other.read(ino, open, 0, 9000).await.unwrap(), expected);
    });
}

#[test]
fn a_file_that_is_renamed_or_removed_is_as_it_was_written() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        let (two, other) = host(&world, 2).await;
        let (ino, handle) = guest.create(ROOT, "new", RDWR).await.unwrap();
        guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(ino, handle, 0, b"renamed").await.unwrap();
        let names = ((ROOT, "new"), (ROOT, "f"));
        guest
            .rename(names.0, names.1, RenameFlags::Replace)
            .await
            .unwrap();
        let entry = other.lookup(ROOT, "f").await.unwrap();
        assert_eq!((entry.nodeid.0, entry.attr.size), (ino, 7));
        // Open elsewhere, it is read after its name is gone.
        world.runtime.sleep(Duration::from_millis(100)).await;
        let open = other.open(ino, RDWR).await.unwrap();
        guest.write(ino, handle, 0, b"removed").await.unwrap();
        guest.release(ino, handle).await.unwrap();
        guest.unlink(ROOT, "f").await.unwrap();
        assert_eq!(other.read(ino, open, 0, 9).await.unwrap(), b"removed");
        other.release(ino, open).await.unwrap();
        // What nobody has open goes, with what was written to it.
        let (ino, handle) = guest.create(ROOT, "gone", RDWR).await.unwrap();
        guest.write(ino, handle, 0, b"gone").await.unwrap();
        guest.release(ino, handle).await.unwrap();
        guest.unlink(ROOT, "gone").await.unwrap();
        assert_eq!(dirty(&one), 4096);
        let before = one.counters();
        world.runtime.sleep(2 * AGED).await;
        let after = one.counters();
        assert_eq!((after.dirty_bytes, after.lost_bytes), (0, 0));
        assert_eq!(after.write_backs, before.write_backs, "of no use");
        assert_eq!(after.flushes, before.flushes);
        assert_eq!(guest.getattr(ino).await.err(), Some(Errno::ESTALE));
        drop(two);
    });
}

/// With its last name it is gone at once, also if it is being written back.
#[test]
fn nothing_is_lost_of_a_file_that_goes_while_it_is_written_back() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        for step in 0..60 {
            let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
            guest.write(ino, handle, 0, b"gone").await.unwrap();
            guest.release(ino, handle).await.unwrap();
            // It is written back after five seconds.
            let age = Duration::from_micros(4_980_000 + step * 1_000);
            world.runtime.sleep(age).await;
            guest.unlink(ROOT, "f").await.unwrap();
            world.runtime.sleep(Duration::from_secs(1)).await;
            assert_eq!(dirty(&one), 0);
        }
        assert!(one.counters().write_backs > 0, "some were committed first");
        assert_eq!(one.counters().lost_bytes, 0);
    });
}

#[test]
fn two_writers_of_one_file_stop_buffering_and_one_alone_begins_again() {
    buffered(|world| async move {
        world.set_faults(slow());
        let mut options = options(&world, None);
        options.capabilities.quiet = Duration::from_secs(2);
        let one = client_with(&world, 1, None, options.clone());
        let two = client_with(&world, 2, None, options);
        let (guest, other) = (Guest::new(&one), Guest::new(&two));
        let (ino, handle) = guest.create(ROOT, "log", RDWR).await.unwrap();
        let open = other.open(ino, RDWR).await.unwrap();
        world.runtime.sleep(Duration::from_secs(3)).await;
        for _ in 0..50 {
            guest.append(ino, handle, b"one\n").await.unwrap();
            other.append(ino, open, b"two\n").await.unwrap();
        }
        let write_backs = one.counters().write_backs + two.counters().write_backs;
        assert!((1..4).contains(&write_backs), "{write_backs}");
        let content = guest.read(ino, handle, 0, 9999).await.unwrap();
        assert_eq!(content, b"one\ntwo\n".repeat(50));
        world.runtime.sleep(Duration::from_secs(3)).await;
        for _ in 0..3 {
            guest.append(ino, handle, b"one\n").await.unwrap();
        }
        assert_eq!(dirty(&one), 4096);
    });
}

#[test]
fn what_cannot_be_written_back_is_told_to_each_handle_once() {
    buffered(|world| async move {
        let (one, guest) = host(&world, 1).await;
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let reader = guest.open(ino, libc::O_RDONLY).await.unwrap();
        let writes_on = guest.open(ino, RDWR).await.unwrap();
        let beside = Guest::new(&one);
        guest.write(ino, handle, 0, b"old").await.unwrap();
        guest.fsync(ino, handle).await.unwrap();
        guest.write(ino, handle, 0, b"new").await.unwrap();
        world.set_faults(Faults {
            data_error: 1.0,
            ..Faults::default()
        });
        let failed = guest.fsync(ino, handle).await;
        assert!(
            matches!(failed, Err(Errno::ENOSPC | Errno::EIO)),
            "{failed:?}"
        );
        world.set_faults(Faults::default());
        assert_eq!(guest.fsync(ino, handle).await, Ok(()));
        let told = flush(&guest, ino, reader).await;
        assert_eq!(told, failed);
        assert_eq!(flush(&guest, ino, reader).await, Ok(()));
        // Who writes on, or syncs all, is told, too.
        let write = async || guest.write(ino, writes_on, 0, b"old").await.map(drop);
        assert_eq!(write().await, failed);
        assert_eq!(write().await, Ok(()));
        let sync_all = async |guest: &Guest| guest.done(ROOT, OwnedOperation::Syncfs).await;
        for mount in [&guest, &beside] {
            assert_eq!(sync_all(mount).await, failed);
            assert_eq!(sync_all(mount).await, Ok(()));
        }
        assert_eq!(sync_all(&Guest::new(&one)).await, Ok(()));
        let later = guest.open(ino, RDWR).await.unwrap();
        assert_eq!(flush(&guest, ino, later).await, Ok(()));
        let counters = one.counters();
        assert_eq!(
            (counters.write_back_failures, counters.lost_bytes),
            (1, 4096)
        );
        assert_eq!(guest.read(ino, handle, 0, 9).await.unwrap(), b"old");
        // For a while writes fail by themselves, if they do.
        guest.write(ino, handle, 0, b"now").await.unwrap();
        assert_eq!(dirty(&one), 0);
        world.runtime.sleep(AGED).await;
        guest.write(ino, handle, 0, b"now").await.unwrap();
        assert_eq!(dirty(&one), 4096);
    });
}

/// A session ends while something is buffered: it is lost, here and elsewhere, and that is told.
pub async fn session_ends(world: World, mutation: Option<Mutation>) {
    let one = client(&world, 1, mutation);
    let guest = Guest::new(&one);
    let two = client(&world, 2, None);
    let other = Guest::new(&two);
    guest.opendir(ROOT).await.unwrap();
    world.runtime.sleep(Duration::from_millis(300)).await;
    let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
    guest.write(ino, handle, 0, b"committed").await.unwrap();
    guest.fsync(ino, handle).await.unwrap();
    guest.write(ino, handle, 0, b"buffered!").await.unwrap();
    assert_eq!(dirty(&one), 4096);
    world.end_session(one.backend().session()).await;
    let open = other.open(ino, RDWR).await.unwrap();
    let expect = |read: Vec<u8>, expected: &[u8]| {
        if read != expected {
            world.violation(format!("{:?} is read", String::from_utf8(read)));
        }
    };
    expect(other.read(ino, open, 0, 9).await.unwrap(), b"committed");
    expect(guest.read(ino, handle, 0, 9).await.unwrap(), b"committed");
    other.write(ino, open, 0, b"elsewhere").await.unwrap();
    expect(guest.read(ino, handle, 0, 9).await.unwrap(), b"elsewhere");
    let all = guest.done(ROOT, OwnedOperation::Syncfs).await;
    if guest.fsync(ino, handle).await != Err(Errno::EIO) || all != Err(Errno::EIO) {
        world.violation("what was lost is not told".into());
    }
    assert_eq!(guest.fsync(ino, handle).await, Ok(()));
    assert_eq!(dirty(&one), 0);
}

#[test]
fn what_is_buffered_ends_with_its_session_and_that_is_told() {
    buffered(|world| session_ends(world, None));
}

#[test]
fn a_client_that_ends_has_written_all_back() {
    for seed in 0..20 {
        let body = |world: World| async move {
            let (one, guest) = host(&world, 1).await;
            world.set_faults(slow());
            let mut files = Vec::new();
            for number in 0..40 {
                let (ino, handle) = guest
                    .create(ROOT, &format!("f{number}"), RDWR)
                    .await
                    .unwrap();
                let data = world.runtime.bytes(10_000);
                guest.write(ino, handle, number, &data).await.unwrap();
                files.push((ino, number, data));
            }
            assert!(dirty(&one) > 0);
            guest.mount.end_session();
            one.shutdown().await;
            assert_eq!(dirty(&one), 0);
            assert!(world.open_segments().is_empty());
            let (_two, other) = host(&world, 2).await;
            for (ino, offset, data) in files {
                let handle = other.open(ino, libc::O_RDONLY).await.unwrap();
                assert!(other.read(ino, handle, offset, 20_000).await.unwrap() == data);
            }
        };
        run_unchecked(seed, Writes::Buffered, body).check();
    }
}

#[test]
fn a_large_recall_is_answered_in_time() {
    buffered(|world| async move {
        world.set_faults(slow());
        let (one, guest) = host(&world, 1).await;
        let (_two, other) = host(&world, 2).await;
        let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let data = vec![9; 900_000];
        for number in 0..40 {
            // Holes between, so that nothing is contiguous.
            guest.write(ino, handle, number << 20, &data).await.unwrap();
        }
        let before = world.runtime.now();
        assert_eq!(other.getattr(ino).await.unwrap().size, (39 << 20) + 900_000);
        let took = world.runtime.now() - before;
        assert!(took < Duration::from_secs(2), "{took:?}");
        assert_eq!(dirty(&one), 0);
    });
}
