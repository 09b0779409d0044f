//! Inodes that a guest's kernel has looked up, and whose names are removed or replaced.

use std::time::Duration;

use fs_client::{LookupTarget, OwnedOperation, OwnedReply};
use fuse_codec::{Cookie, DirLayout, Errno, RenameFlags, SetAttr};

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{in_world, seeds, slow};

/// Longer than two rounds of a client's background.
const ROUNDS: Duration = Duration::from_secs(5);
/// Longer than an orphan is kept when the pool is short of space.
const GIVEN_UP: Duration = Duration::from_secs(70);

fn inodes(world: &World) -> u64 {
    world.statistics().inodes
}

async fn make(guest: &Guest, name: &str, content: &[u8]) -> u64 {
    let (file, handle) = guest.create(ROOT, name, RDWR).await.unwrap();
    guest.write(file, handle, 0, content).await.unwrap();
    guest.release(file, handle).await.unwrap();
    file
}

async fn replace(guest: &Guest, from: &str, to: &str) {
    let names = ((ROOT, from), (ROOT, to));
    guest
        .rename(names.0, names.1, RenameFlags::Replace)
        .await
        .unwrap();
}

async fn read(guest: &Guest, file: u64) -> Result<Vec<u8>, Errno> {
    let handle = guest.open(file, libc::O_RDONLY).await?;
    let content = guest.read(file, handle, 0, 99).await;
    guest.release(file, handle).await?;
    content
}

/// Returns the names with their inodes, read by READDIRPLUS.
async fn list_plus(guest: &Guest, node: u64) -> Result<Vec<u8>, Errno> {
    let handle = guest.opendir(node).await?;
    let readdir = OwnedOperation::Readdir {
        layout: DirLayout::Plus,
        handle,
        cookie: Cookie::new(0).unwrap(),
        size: 4096,
    };
    let reply = guest.call(node, readdir).await;
    guest
        .done(node, OwnedOperation::Releasedir { handle })
        .await?;
    match reply {
        OwnedReply::Bytes(bytes) => Ok(bytes),
        OwnedReply::Error(errno) => Err(errno),
        other => panic!("{other:?}"),
    }
}

/// Performs the requests of `open("f", O_PATH)`, a rename over `f`, and an open of the descriptor.
async fn stays_until_it_is_forgotten(world: &World, user: &Guest, remover: &Guest) {
    let old = make(remover, "f", b"old").await;
    make(remover, "g", b"new").await;
    assert_eq!(user.lookup(ROOT, "f").await.unwrap().nodeid.0, old);
    replace(remover, "g", "f").await;
    world.runtime.sleep(ROUNDS).await;
    assert_eq!(user.getattr(old).await.unwrap().nlink, 0);
    assert_eq!(read(user, old).await.unwrap(), b"old");
    let handle = user.open(old, RDWR).await.unwrap();
    user.write(old, handle, 3, b" and more").await.unwrap();
    user.release(old, handle).await.unwrap();
    user.truncate(old, 7).await.unwrap();
    world.runtime.sleep(ROUNDS).await;
    assert_eq!(read(user, old).await.unwrap(), b"old and");
    let new = user.lookup(ROOT, "f").await.unwrap().nodeid.0;
    assert_eq!(read(user, new).await.unwrap(), b"new");
    assert_eq!(inodes(world), 3);
    user.forget(old);
    world.runtime.sleep(ROUNDS).await;
    assert_eq!(inodes(world), 2, "the forgotten inode is removed");
    assert_eq!(user.getattr(old).await.err(), Some(Errno::ESTALE));
    remover.unlink(ROOT, "f").await.unwrap();
    world.runtime.sleep(ROUNDS).await;
    assert_eq!(read(user, new).await.unwrap(), b"new");
    user.forget(new);
    world.runtime.sleep(ROUNDS).await;
    assert_eq!((inodes(world), world.statistics().named_bytes), (1, 0));
}

#[test]
fn a_looked_up_file_that_its_own_guest_replaces_stays_until_it_is_forgotten() {
    in_world(|world| async move {
        let guest = Guest::new(&client(&world, 1, None)).keeping();
        stays_until_it_is_forgotten(&world, &guest, &guest).await;
    });
}

#[test]
fn a_looked_up_file_that_another_guest_replaces_stays_until_it_is_forgotten() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let (user, remover) = (Guest::new(&host).keeping(), Guest::new(&host));
        stays_until_it_is_forgotten(&world, &user, &remover).await;
    });
}

#[test]
fn a_looked_up_file_that_another_host_replaces_stays_until_it_is_forgotten() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        stays_until_it_is_forgotten(&world, &user, &remover).await;
    });
}

#[test]
fn a_removed_directory_that_is_looked_up_is_empty_and_takes_no_names() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        let outer = remover.mkdir(ROOT, "outer").await.unwrap();
        let directory = remover.mkdir(outer, "d").await.unwrap();
        user.lookup(ROOT, "outer").await.unwrap();
        user.lookup(outer, "d").await.unwrap();
        remover.rmdir(outer, "d").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(user.list(directory).await.unwrap(), []);
        assert!(list_plus(&user, directory).await.is_ok());
        assert_eq!(user.getattr(directory).await.unwrap().nlink, 0);
        let parent = OwnedOperation::Lookup {
            name: LookupTarget::Parent,
        };
        let parent = user.entry(directory, parent).await.unwrap();
        assert_eq!(parent.nodeid.0, outer);
        let absent = user.lookup(directory, "x").await;
        assert_eq!(absent.err(), Some(Errno::ENOENT));
        assert_eq!(user.mkdir(directory, "x").await, Err(Errno::ENOENT));
        let created = user.create(directory, "x", RDWR).await;
        assert_eq!(created.err(), Some(Errno::ENOENT));
        user.forget(directory);
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(user.opendir(directory).await.err(), Some(Errno::ESTALE));
        assert_eq!(inodes(&world), 2);
    });
}

#[test]
fn each_reply_with_an_inode_counts_as_a_lookup() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        let directory = user.mkdir(ROOT, "d").await.unwrap();
        let (file, handle) = user.create(ROOT, "f", RDWR).await.unwrap();
        user.release(file, handle).await.unwrap();
        let symlink = OwnedOperation::Symlink {
            name: b"s".to_vec(),
            target: b"target".to_vec(),
        };
        let symlink = user.entry(ROOT, symlink).await.unwrap().nodeid.0;
        user.link(file, ROOT, "g").await.unwrap();
        list_plus(&user, ROOT).await.unwrap();
        let nodes = [directory, file, symlink];
        assert_eq!(nodes.map(|node| user.lookups(node)), [2, 4, 2]);
        // Half of the lookups are subtracted.
        for node in nodes {
            let half = user.lookups(node) / 2;
            user.mount.forget(fuse_codec::NodeId(node), half);
        }
        for name in ["f", "g", "s"] {
            remover.unlink(ROOT, name).await.unwrap();
        }
        remover.rmdir(ROOT, "d").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read(&user, file).await.unwrap(), b"");
        let target = user.call(symlink, OwnedOperation::Readlink).await;
        assert_eq!(target, OwnedReply::Bytes(b"target".to_vec()));
        assert_eq!(user.list(directory).await.unwrap(), []);
        user.forget_all();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 1);
    });
}

#[test]
fn a_removed_inode_is_found_by_its_number_only_where_it_is_looked_up() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there).keeping());
        let file = make(&remover, "f", b"bytes").await;
        user.lookup(ROOT, "f").await.unwrap();
        remover.unlink(ROOT, "f").await.unwrap();
        remover.forget(file);
        world.runtime.sleep(ROUNDS).await;
        let itself = || OwnedOperation::Lookup {
            name: LookupTarget::Itself,
        };
        let found = remover.entry(file, itself()).await;
        assert_eq!(found.err(), Some(Errno::ESTALE));
        assert_eq!(read(&remover, file).await, Err(Errno::ESTALE));
        assert_eq!(user.entry(file, itself()).await.unwrap().nodeid.0, file);
        assert_eq!(read(&user, file).await.unwrap(), b"bytes");
    });
}

#[test]
fn an_unmounted_guest_keeps_no_inodes() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        for (number, ends) in [(1, true), (2, false)] {
            let file = make(&remover, "f", b"bytes").await;
            user.lookup(ROOT, "f").await.unwrap();
            remover.unlink(ROOT, "f").await.unwrap();
            world.runtime.sleep(ROUNDS).await;
            assert_eq!(inodes(&world), 2, "{number}");
            match ends {
                true => user.mount.end_session(),
                false => user.forget(file),
            }
            world.runtime.sleep(ROUNDS).await;
            assert_eq!(inodes(&world), 1, "{number}");
        }
    });
}

#[test]
fn a_lost_session_keeps_no_inodes_and_the_next_one_does() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        let (gone, stays) = (
            make(&remover, "gone", b"gone").await,
            make(&remover, "stays", b"stays").await,
        );
        user.lookup(ROOT, "gone").await.unwrap();
        user.lookup(ROOT, "stays").await.unwrap();
        remover.unlink(ROOT, "gone").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 3);
        world.end_session(here.backend().session()).await;
        assert_eq!(inodes(&world), 2, "only that session held it");
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(user.getattr(gone).await.err(), Some(Errno::ESTALE));
        remover.unlink(ROOT, "stays").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read(&user, stays).await.unwrap(), b"stays");
        user.forget_all();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 1);
    });
}

#[test]
fn a_pool_that_is_short_of_space_does_not_wait_for_kernels_to_forget() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        let looked_up = make(&remover, "looked up", b"looked up").await;
        let open = make(&remover, "open", b"open").await;
        user.lookup(ROOT, "looked up").await.unwrap();
        user.lookup(ROOT, "open").await.unwrap();
        let handle = user.open(open, RDWR).await.unwrap();
        remover.unlink(ROOT, "looked up").await.unwrap();
        remover.unlink(ROOT, "open").await.unwrap();
        world.runtime.sleep(GIVEN_UP).await;
        assert_eq!(read(&user, looked_up).await.unwrap(), b"looked up");
        world.set_faults(Faults {
            short_pool: true,
            ..Faults::default()
        });
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read(&user, looked_up).await, Err(Errno::ESTALE));
        assert_eq!(user.read(open, handle, 0, 99).await.unwrap(), b"open");
        let late = make(&remover, "late", b"late").await;
        user.lookup(ROOT, "late").await.unwrap();
        remover.unlink(ROOT, "late").await.unwrap();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(read(&user, late).await.unwrap(), b"late", "not at once");
        user.release(open, handle).await.unwrap();
        user.forget_all();
        world.runtime.sleep(ROUNDS).await;
        assert_eq!(inodes(&world), 1);
    });
}

/// A search for held orphans continues after the last answer, however short that was.
#[test]
fn kept_orphans_do_not_hide_others() {
    in_world(|world| async move {
        let (here, there) = (client(&world, 1, None), client(&world, 2, None));
        let (user, remover) = (Guest::new(&here).keeping(), Guest::new(&there));
        world.set_faults(Faults {
            short_lists: true,
            ..Faults::default()
        });
        for number in 0..100 {
            let name = format!("f{number}");
            make(&remover, &name, b"").await;
            if number < 90 {
                user.lookup(ROOT, &name).await.unwrap();
            }
            remover.unlink(ROOT, &name).await.unwrap();
        }
        world.runtime.sleep(ROUNDS * 6).await;
        assert_eq!(inodes(&world), 91);
        user.mount.end_session();
        world.runtime.sleep(ROUNDS * 6).await;
        assert_eq!(inodes(&world), 1);
    });
}

/// Runs a guest that looks names up and uses their inodes. No inode may be gone before it is forgotten.
async fn look_up(world: World, guest: Guest) {
    for _ in 0..12 {
        world.delay().await;
        let name = if world.runtime.happens(0.7) { "f" } else { "d" };
        let node = match world.runtime.happens(0.8) {
            true => match guest.lookup(ROOT, name).await {
                Ok(entry) => entry.nodeid.0,
                Err(Errno::ENOENT) => continue,
                Err(errno) => {
                    world.violation(format!("a lookup of {name}: {errno:?}"));
                    continue;
                }
            },
            false => {
                let listed = list_plus(&guest, ROOT).await.unwrap();
                let names = crate::guest::names_in(&listed, DirLayout::Plus);
                let Some(node) = names.get(name).filter(|node| guest.lookups(**node) > 0) else {
                    guest.forget_all();
                    continue;
                };
                *node
            }
        };
        for _ in 0..world.runtime.below(5) {
            if world.runtime.happens(0.2) {
                world.runtime.sleep(Duration::from_secs(1)).await;
            }
            world.delay().await;
            let used = match (world.runtime.below(3), name) {
                (0, _) => guest.getattr(node).await.map(drop),
                (1, _) => {
                    let set = SetAttr {
                        permissions: Some(0o700),
                        ..SetAttr::default()
                    };
                    guest.setattr(node, set).await.map(drop)
                }
                (_, "d") => guest.list(node).await.map(drop),
                (_, _) => read(&guest, node).await.map(|content| {
                    if !content.starts_with(b"content") {
                        world.violation(format!("inode {node} has {content:?}"));
                    }
                }),
            };
            if let Err(errno) = used {
                world.violation(format!("inode {node} of {name} is looked up: {errno:?}"));
            }
        }
        guest.forget_all();
    }
}

/// Runs a guest that replaces and removes names that others look up.
async fn replace_names(world: World, guest: Guest, number: u64) {
    let temporary = format!("t{number}");
    for step in 0..15 {
        world.delay().await;
        let done = match world.runtime.below(6) {
            0 => guest.unlink(ROOT, "f").await,
            1 => guest.mkdir(ROOT, "d").await.map(drop),
            2 => guest.rmdir(ROOT, "d").await,
            _ => {
                make(&guest, &temporary, format!("content {step}").as_bytes()).await;
                replace(&guest, &temporary, "f").await;
                Ok(())
            }
        };
        match done {
            Ok(()) | Err(Errno::ENOENT | Errno::EEXIST) => {}
            Err(errno) => panic!("{errno:?}"),
        }
    }
}

pub async fn look_up_and_replace(world: World, mutation: Option<Mutation>) {
    world.set_faults(Faults {
        // A lookup may be answered long after its name was removed.
        answer_late: 0.2,
        reply_lost: 0.005,
        ..slow()
    });
    let (mut running, mut guests) = (Vec::new(), Vec::new());
    for node in 1..4 {
        let host = client(&world, node, mutation);
        for _ in 0..2 {
            let guest = Guest::new(&host).keeping();
            guests.push(guest.clone());
            let user = look_up(world.clone(), guest);
            running.push(world.runtime.spawn(user));
        }
        let remover = replace_names(world.clone(), Guest::new(&host), node);
        running.push(world.runtime.spawn(remover));
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
fn looked_up_inodes_are_removed_only_after_they_are_forgotten() {
    seeds(60, |world| look_up_and_replace(world, None));
}
