//! Files that are made without a name, and whiteouts that renames leave.

use std::time::Duration;

use fs_client::OwnedOperation;
use fuse_codec::{DeviceNumber, Errno, Kind, RenameFlags};

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{in_world, seeds, slow};

/// Longer than two rounds of a client's background.
const ROUNDS: Duration = Duration::from_secs(5);
/// Names that temporary files get.
const NAMES: u64 = 3;

fn inodes(world: &World) -> u64 {
    world.statistics().inodes
}

async fn read(guest: &Guest, file: u64) -> Result<Vec<u8>, Errno> {
    let handle = guest.open(file, libc::O_RDONLY).await?;
    let content = guest.read(file, handle, 0, 99).await;
    guest.release(file, handle).await?;
    content
}

#[test]
fn a_temporary_file_goes_when_it_is_closed_and_forgotten() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host).keeping();
        let (file, handle) = guest.tmpfile(ROOT).await.unwrap();
        guest.write(file, handle, 0, b"scratch").await.unwrap();
        world.runtime.sleep(ROUNDS * 3).await;
        let attr = guest.getattr(file).await.unwrap();
        assert_eq!((attr.nlink, attr.size, attr.permissions), (0, 7, 0o600));
        assert_eq!(guest.list(ROOT).await.unwrap(), []);
        assert_eq!(guest.read(file, handle, 0, 99).await.unwrap(), b"scratch");
        // By /proc/self/fd.
        assert_eq!(read(&guest, file).await.unwrap(), b"scratch");
        guest.write(file, handle, 0, b"more").await.unwrap();
        guest.release(file, handle).await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 2, "the kernel knows it still");
        guest.forget(file);
        world.runtime.sleep(ROUNDS * 3).await;
        assert_eq!((inodes(&world), world.statistics().named_bytes), (1, 0));
        assert_eq!(guest.getattr(file).await.err(), Some(Errno::ESTALE));
        assert_eq!(host.counters().lost_bytes, 0, "nobody misses its data");
    });
}

#[test]
fn a_linked_temporary_file_stays_and_other_hosts_see_it_whole() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (here, there) = (Guest::new(&here).keeping(), Guest::new(&there));
        let (file, handle) = here.tmpfile(ROOT).await.unwrap();
        here.write(file, handle, 0, b"content").await.unwrap();
        let absent = there.lookup(ROOT, "f").await;
        assert_eq!(absent.err(), Some(Errno::ENOENT));
        assert_eq!(read(&there, file).await, Err(Errno::ESTALE));
        let linked = here.link(file, ROOT, "f").await.unwrap();
        assert_eq!((linked.nodeid.0, linked.attr.nlink), (file, 1));
        let found = there.lookup(ROOT, "f").await.unwrap();
        assert_eq!((found.nodeid.0, found.attr.size), (file, 7));
        assert_eq!(read(&there, file).await.unwrap(), b"content");
        here.release(file, handle).await.unwrap();
        here.forget(file);
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read(&here, file).await.unwrap(), b"content");
        assert_eq!(inodes(&world), 2);
        there.unlink(ROOT, "f").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!((inodes(&world), world.statistics().named_bytes), (1, 0));
    });
}

#[test]
fn what_has_lost_its_names_is_not_linked_again() {
    in_world(|world| async move {
        let guest = Guest::new(&client(&world, 1, None)).keeping();
        let (file, handle) = guest.tmpfile(ROOT).await.unwrap();
        guest.link(file, ROOT, "f").await.unwrap();
        guest.unlink(ROOT, "f").await.unwrap();
        let again = guest.link(file, ROOT, "f").await;
        assert_eq!(again.err(), Some(Errno::ENOENT));
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(guest.getattr(file).await.unwrap().nlink, 0);
        guest.write(file, handle, 0, b"still").await.unwrap();
        guest.mount.end_session();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 1, "it goes with its guest");
    });
}

#[test]
fn temporary_files_go_with_their_session_and_linked_ones_stay() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host).keeping();
        let (gone, handle) = guest.tmpfile(ROOT).await.unwrap();
        let (kept, other) = guest.tmpfile(ROOT).await.unwrap();
        guest.link(kept, ROOT, "kept").await.unwrap();
        world.end_session(host.backend().session()).await;
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 2);
        let lost = guest.link(gone, ROOT, "gone").await;
        assert_eq!(lost.err(), Some(Errno::ESTALE));
        let lost = guest.write(gone, handle, 0, b"lost").await;
        assert_eq!(lost, Err(Errno::ESTALE));
        guest.write(kept, other, 0, b"kept").await.unwrap();
        assert_eq!(guest.list(ROOT).await.unwrap(), [("kept".into(), kept)]);
    });
}

#[test]
fn a_guest_that_unmounts_leaves_no_temporary_file() {
    seeds(20, |world| async move {
        world.set_faults(slow());
        let guest = Guest::new(&client(&world, 1, None)).keeping();
        let making: Vec<_> = (0..5)
            .map(|_| {
                let guest = guest.clone();
                world
                    .runtime
                    .spawn(async move { guest.tmpfile(ROOT).await.map(drop) })
            })
            .collect();
        world.delay().await;
        guest.mount.end_session();
        for task in making {
            assert!(matches!(task.await.unwrap(), Ok(()) | Err(Errno::EIO)));
        }
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 1);
    });
}

#[test]
fn a_whiteout_is_left_for_all_hosts_to_see() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (here, there) = (Guest::new(&here), Guest::new(&there));
        let dir = here.mkdir(ROOT, "d").await.unwrap();
        let (file, handle) = here.create(dir, "f", RDWR).await.unwrap();
        here.release(file, handle).await.unwrap();
        assert_eq!(there.lookup(dir, "f").await.unwrap().nodeid.0, file);
        let leaves = |no_replace| RenameFlags::Whiteout { no_replace };
        here.rename((dir, "f"), (ROOT, "f"), leaves(true))
            .await
            .unwrap();
        for guest in [&here, &there] {
            let attr = guest.lookup(dir, "f").await.unwrap().attr;
            assert_eq!(
                (attr.kind, attr.rdev, attr.permissions),
                (Kind::CharDevice, DeviceNumber::default(), 0)
            );
            assert_eq!((attr.uid, attr.gid, attr.nlink), (1000, 1000, 1));
            assert_eq!(guest.lookup(ROOT, "f").await.unwrap().nodeid.0, file);
        }
        let taken = here.rename((dir, "f"), (ROOT, "f"), leaves(true)).await;
        assert_eq!(taken, Err(Errno::EEXIST));
        there
            .rename((dir, "f"), (ROOT, "f"), leaves(false))
            .await
            .unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 4, "the file is replaced by a whiteout");
    });
}

#[test]
fn a_temporary_file_is_refused_where_nothing_may_be_made() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let (guest, reader) = (Guest::new(&host), Guest::read_only(&host));
        assert_eq!(reader.tmpfile(ROOT).await.err(), Some(Errno::EROFS));
        let (file, _) = guest.create(ROOT, "f", RDWR).await.unwrap();
        assert_eq!(guest.tmpfile(file).await.err(), Some(Errno::ENOTDIR));
        assert_eq!(guest.tmpfile(0).await.err(), Some(Errno::ESTALE));
        assert_eq!(inodes(&world), 2);
    });
}

/// A guest that makes files without a name, and links some of them.
async fn make_and_link(world: World, guest: Guest) {
    for step in 0..12 {
        world.delay().await;
        let Ok((file, handle)) = guest.tmpfile(ROOT).await else {
            continue;
        };
        let content = format!("content {step}");
        let written = guest.write(file, handle, 0, content.as_bytes()).await;
        let linked = match world.runtime.happens(0.7) {
            true => {
                let name = format!("n{}", world.runtime.below(NAMES));
                guest.link(file, ROOT, &name).await.map(drop)
            }
            false => Ok(()),
        };
        if !matches!(linked, Ok(()) | Err(Errno::EEXIST)) {
            world.violation(format!("a temporary file is linked: {linked:?}"));
        }
        let read = guest.read(file, handle, 0, 99).await;
        if written.is_err() || read.as_deref() != Ok(content.as_bytes()) {
            world.violation(format!("a temporary file: {written:?}, {read:?}"));
        }
        guest.release(file, handle).await.unwrap();
        guest.forget_all();
    }
}

/// A guest that looks up what others have linked, uses it, and removes it now and then.
async fn use_and_remove(world: World, guest: Guest) {
    for _ in 0..30 {
        world.delay().await;
        let name = format!("n{}", world.runtime.below(NAMES));
        match guest.lookup(ROOT, &name).await {
            Ok(entry) => {
                let file = entry.nodeid.0;
                let content = read(&guest, file).await;
                if !content
                    .as_ref()
                    .is_ok_and(|read| read.starts_with(b"content"))
                {
                    world.violation(format!("{name} is inode {file}: {content:?}"));
                }
            }
            Err(Errno::ENOENT) => {}
            Err(errno) => world.violation(format!("a lookup of {name}: {errno:?}")),
        }
        if world.runtime.happens(0.3) {
            let unlink = OwnedOperation::Unlink {
                name: name.clone().into(),
            };
            let removed = guest.done(ROOT, unlink).await;
            if !matches!(removed, Ok(()) | Err(Errno::ENOENT)) {
                world.violation(format!("{name} is removed: {removed:?}"));
            }
        }
        guest.forget_all();
    }
}

pub async fn make_link_and_remove(world: World, mutation: Option<Mutation>) {
    world.set_faults(Faults {
        answer_late: 0.2,
        reply_lost: 0.005,
        ..slow()
    });
    let (mut running, mut guests) = (Vec::new(), Vec::new());
    for node in 1..4 {
        let host = client(&world, node, mutation);
        for _ in 0..2 {
            let maker = make_and_link(world.clone(), Guest::new(&host).keeping());
            running.push(world.runtime.spawn(maker));
            let guest = Guest::new(&host).keeping();
            guests.push(guest.clone());
            let user = use_and_remove(world.clone(), guest);
            running.push(world.runtime.spawn(user));
        }
    }
    for task in running {
        task.await.unwrap();
    }
    world.set_faults(slow());
    world.runtime.sleep(ROUNDS * 3).await;
    let names = guests[0].list(ROOT).await.unwrap().len() as u64;
    let left = inodes(&world);
    if left != names + 1 {
        world.violation(format!("{left} inodes are left, and {names} names"));
    }
}

#[test]
fn temporary_files_are_linked_or_go_and_what_is_linked_is_there() {
    seeds(60, |world| make_link_and_remove(world, None));
}
