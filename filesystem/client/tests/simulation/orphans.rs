//! Files that are removed while they are open.

use std::time::Duration;

use fs_client::OwnedOperation;
use fuse_codec::{Errno, Handle, RenameFlags};

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{in_world, seeds, slow};

/// Longer than two rounds of a client's background.
const ROUNDS: Duration = Duration::from_secs(5);

fn inodes(world: &World) -> u64 {
    world.statistics().inodes
}

#[test]
fn a_file_that_is_open_on_another_host_stays_until_it_is_closed() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (here, there) = (Guest::new(&here), Guest::new(&there));
        let (file, first) = here.create(ROOT, "f", RDWR).await.unwrap();
        here.write(file, first, 0, b"before").await.unwrap();
        here.release(file, first).await.unwrap();
        let handle = there.open(file, RDWR).await.unwrap();
        here.unlink(ROOT, "f").await.unwrap();
        assert_eq!(here.lookup(ROOT, "f").await.err(), Some(Errno::ENOENT));
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(there.read(file, handle, 0, 99).await.unwrap(), b"before");
        there.write(file, handle, 6, b" and after").await.unwrap();
        assert_eq!(
            there.read(file, handle, 0, 99).await.unwrap(),
            b"before and after"
        );
        assert_eq!(there.getattr(file).await.unwrap().nlink, 0);
        let again = there.open(file, RDWR).await.unwrap();
        there.release(file, again).await.unwrap();
        assert_eq!(
            here.open(file, RDWR).await.err(),
            Some(Errno::ESTALE),
            "it is not open here"
        );
        there.release(file, handle).await.unwrap();
        assert_eq!(inodes(&world), 1, "it goes with its last handle");
        assert_eq!(world.statistics().named_bytes, 0);
    });
}

#[test]
fn a_kernel_without_open_requests_reads_a_removed_file_until_it_forgets_it() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (here, there) = (Guest::new(&here), Guest::read_only(&there).keeping());
        let (file, handle) = here.create(ROOT, "f", RDWR).await.unwrap();
        here.write(file, handle, 0, b"bytes").await.unwrap();
        assert_eq!(there.lookup(ROOT, "f").await.unwrap().nodeid.0, file);
        let by_itself = Handle(0);
        let read = async || there.read(file, by_itself, 0, 99).await;
        assert_eq!(read().await.unwrap(), b"bytes");
        here.release(file, handle).await.unwrap();
        here.unlink(ROOT, "f").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read().await.unwrap(), b"bytes");
        there.forget(file);
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read().await, Err(Errno::ESTALE));
    });
}

#[test]
fn a_file_that_is_open_in_another_mount_goes_when_it_is_closed() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let (opener, remover) = (Guest::new(&host), Guest::new(&host));
        let (file, handle) = opener.create(ROOT, "f", RDWR).await.unwrap();
        remover.create(ROOT, "g", RDWR).await.unwrap();
        remover
            .rename((ROOT, "g"), (ROOT, "f"), RenameFlags::Replace)
            .await
            .unwrap();
        opener.write(file, handle, 0, b"still").await.unwrap();
        assert_eq!(inodes(&world), 3);
        opener.release(file, handle).await.unwrap();
        assert_eq!(inodes(&world), 2);
        let directory = opener.mkdir(ROOT, "d").await.unwrap();
        let handle = opener.opendir(directory).await.unwrap();
        remover.rmdir(ROOT, "d").await.unwrap();
        assert_eq!(opener.readdir(directory, handle, 2, 99).await.unwrap(), []);
        assert_eq!(opener.mkdir(directory, "x").await, Err(Errno::ENOENT));
        assert!(opener.opendir(directory).await.is_ok());
        opener.mount.end_session();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 2, "it goes with its guest");
        assert_eq!(
            opener.readdir(directory, handle, 2, 99).await,
            Err(Errno::EBADF)
        );
    });
}

#[test]
fn a_file_that_nobody_has_open_goes_soon() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.release(file, handle).await.unwrap();
        guest.unlink(ROOT, "f").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 1);
        assert_eq!(guest.getattr(file).await.err(), Some(Errno::ESTALE));
        guest.create(ROOT, "open", RDWR).await.unwrap();
        let (other, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.release(other, handle).await.unwrap();
        guest.unlink(ROOT, "f").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 2, "another open file does not keep it");
        assert_eq!(host.counters().orphans_released, 2);
    });
}

/// A guest that creates a file, or opens the one that is there, and uses it.
async fn use_file(world: World, guest: Guest) {
    for _ in 0..8 {
        let Ok((file, handle)) = guest.create(ROOT, "f", RDWR).await else {
            continue;
        };
        for _ in 0..world.runtime.below(4) {
            world.delay().await;
            let written = guest.write(file, handle, 0, b"used").await;
            let read = guest.read(file, handle, 0, 4).await;
            if written != Ok(4) || read.as_deref() != Ok(b"used") {
                world.violation(format!("an open file was lost: {written:?}, {read:?}"));
            }
        }
        guest.release(file, handle).await.unwrap();
    }
}

async fn remove_file(world: World, guest: Guest) {
    for _ in 0..20 {
        world.delay().await;
        match guest.unlink(ROOT, "f").await {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => panic!("{errno:?}"),
        }
    }
}

pub async fn open_and_remove(world: World, mutation: Option<Mutation>) {
    world.set_faults(Faults {
        // Replies that are sent again do not keep an orphan, nor lose one.
        reply_lost: 0.01,
        ..slow()
    });
    let mut running = Vec::new();
    for node in 1..4 {
        let host = client(&world, node, mutation);
        for _ in 0..2 {
            let user = use_file(world.clone(), Guest::new(&host));
            running.push(world.runtime.spawn(user));
        }
        let remover = remove_file(world.clone(), Guest::new(&host));
        running.push(world.runtime.spawn(remover));
    }
    for task in running {
        task.await.unwrap();
    }
    world.set_faults(slow());
    world.runtime.sleep(ROUNDS * 3).await;
    let left = inodes(&world);
    if left > 2 {
        world.violation(format!("{left} inodes are left, of one name at most"));
    }
}

#[test]
fn files_stay_while_they_are_open_and_go_then() {
    seeds(40, |world| open_and_remove(world, None));
}

#[test]
fn files_of_a_guest_that_unmounts_while_it_opens_them_are_closed() {
    seeds(20, |world| async move {
        world.set_faults(slow());
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let running: Vec<_> = (0..5)
            .map(|number| {
                let guest = guest.clone();
                let name = format!("f{number}");
                world
                    .runtime
                    .spawn(async move { guest.create(ROOT, &name, RDWR).await })
            })
            .collect();
        world.delay().await;
        guest.mount.end_session();
        for task in running {
            match task.await.unwrap() {
                Ok((file, handle)) => {
                    let flush = OwnedOperation::Flush { handle };
                    assert_eq!(guest.done(file, flush).await, Err(Errno::EBADF));
                }
                Err(errno) => assert_eq!(errno, Errno::EIO),
            }
        }
        assert_eq!(host.open_inodes(), 0);
    });
}
