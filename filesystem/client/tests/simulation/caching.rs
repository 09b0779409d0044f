//! What is cached is answered without the leader, and no more is cached than there is room for.

use std::sync::Arc;
use std::time::Duration;

use fs_client::{Client, ClientOptions, LookupTarget, OwnedOperation, OwnedReply};
use fuse_codec::{Cookie, DirLayout, Errno, SetAttr};
use futures_util::FutureExt;

use crate::guest::{Guest, RDWR, ROOT, client, client_with, names_in};
use crate::host::Host;
use crate::leader::settings;
use crate::world::{World, Writes};
use crate::{in_world, seeds, slow};

const FILES: usize = 1000;

/// Longer than a directory's loading takes, and than nothing must have changed before something is promised.
const LOADED: Duration = Duration::from_millis(200);

fn name(number: usize) -> String {
    format!("f{number:04}")
}

/// A directory with files, made by another host.
async fn fill(world: &World, files: usize) -> u64 {
    fill_as(&Guest::new(&client(world, 9, None)), "d", files).await
}

async fn fill_as(guest: &Guest, directory: &str, files: usize) -> u64 {
    let dir = guest.mkdir(ROOT, directory).await.unwrap();
    for number in 0..files {
        let (ino, handle) = guest.create(dir, &name(number), RDWR).await.unwrap();
        if number < 10 {
            guest
                .write(ino, handle, 0, name(number).as_bytes())
                .await
                .unwrap();
        }
        guest.release(ino, handle).await.unwrap();
    }
    dir
}

async fn look_up_all(guest: &Guest, dir: u64) {
    for number in 0..FILES {
        let entry = guest.lookup(dir, &name(number)).await.unwrap();
        let attr = guest.getattr(entry.nodeid.0).await.unwrap();
        assert_eq!(attr.ino, entry.attr.ino);
    }
    assert_eq!(guest.lookup(dir, "none").await.err(), Some(Errno::ENOENT));
}

async fn list_all(guest: &Guest, dir: u64) -> usize {
    let handle = guest.opendir(dir).await.unwrap();
    let (mut cookie, mut count) = (Cookie::START, 0);
    loop {
        let readdir = OwnedOperation::Readdir {
            layout: DirLayout::Plus,
            handle,
            cookie,
            size: 8192,
        };
        let OwnedReply::Bytes(bytes) = guest.call(dir, readdir).await else {
            panic!("no listing");
        };
        if bytes.is_empty() {
            break;
        }
        count += names_in(&bytes, DirLayout::Plus).len();
        cookie = Cookie::new(crate::guest::last_cookie(&bytes, DirLayout::Plus)).unwrap();
    }
    guest
        .done(dir, OwnedOperation::Releasedir { handle })
        .await
        .unwrap();
    count
}

fn questions(client: &Arc<Client<Host>>) -> u64 {
    client.counters().questions
}

#[test]
fn names_are_asked_for_a_hundred_at_a_time_and_then_not_at_all() {
    in_world(|world| async move {
        world.set_faults(slow());
        let dir = fill(&world, FILES).await;
        for lists_first in [true, false] {
            let host = client(&world, 1 + u64::from(lists_first), None);
            let guest = Guest::new(&host);
            // Otherwise there is no session yet, when it lists.
            guest.opendir(ROOT).await.unwrap();
            world.runtime.sleep(LOADED).await;
            let before = questions(&host);
            if lists_first {
                assert_eq!(list_all(&guest, dir).await, FILES);
            }
            look_up_all(&guest, dir).await;
            let asked = questions(&host) - before;
            assert!(asked <= FILES as u64 / 100, "{asked} questions");
            world.runtime.sleep(LOADED).await;
            let before = questions(&host);
            assert_eq!(list_all(&guest, dir).await, FILES);
            look_up_all(&guest, dir).await;
            assert_eq!(questions(&host) - before, 0);
        }
    });
}

#[test]
fn what_was_made_here_needs_no_questions() {
    in_world(|world| async move {
        world.set_faults(slow());
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let dir = guest.mkdir(ROOT, "d").await.unwrap();
        list_all(&guest, dir).await;
        world.runtime.sleep(LOADED).await;
        let mut before = questions(&host);
        for number in 0..FILES {
            let name = name(number);
            let looked = guest.lookup(dir, &name).await;
            assert_eq!(looked.err(), Some(Errno::ENOENT));
            let (file, handle) = guest.create(dir, &name, RDWR).await.unwrap();
            if number % 2 == 0 {
                let data = name.as_bytes();
                guest.write(file, handle, 0, data).await.unwrap();
                let private = SetAttr {
                    permissions: Some(0o600),
                    ..SetAttr::default()
                };
                guest.setattr(file, private).await.unwrap();
            }
            guest.release(file, handle).await.unwrap();
        }
        let limit = match world.writes {
            Writes::Buffered => FILES as u64 / 100,
            // Each of those that are written to is asked for afterwards.
            Writes::Through => FILES as u64 / 2 + FILES as u64 / 20,
        };
        // While bytes are buffered, and after they are written back.
        for _ in 0..2 {
            for number in 0..FILES {
                let entry = guest.lookup(dir, &name(number)).await.unwrap();
                let attr = guest.getattr(entry.nodeid.0).await.unwrap();
                let expected = if number % 2 == 0 {
                    (5, 0o600)
                } else {
                    (0, 0o644)
                };
                assert_eq!((attr.size, attr.permissions), expected);
            }
            let asked = questions(&host) - before;
            assert!(asked <= limit, "{asked} questions");
            world.runtime.sleep(Duration::from_secs(8)).await;
            before = questions(&host);
        }
    });
}

#[test]
fn what_is_cached_is_answered_at_once() {
    in_world(|world| async move {
        let dir = fill(&world, 10).await;
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let handle = guest.opendir(dir).await.unwrap();
        let file = guest.lookup(dir, &name(3)).await.unwrap().nodeid.0;
        guest.lookup(dir, &name(4)).await.unwrap();
        guest.open(file, libc::O_RDONLY).await.unwrap();
        world.runtime.sleep(LOADED).await;
        let look_up = |name: &str| OwnedOperation::Lookup {
            name: LookupTarget::Name(name.into()),
        };
        let readdir = OwnedOperation::Readdir {
            layout: DirLayout::Plus,
            handle,
            cookie: Cookie::START,
            size: 8192,
        };
        let xattr = OwnedOperation::Getxattr {
            name: "security.capability".into(),
            size: 0,
        };
        let open = OwnedOperation::Open {
            flags: crate::guest::flags(libc::O_RDONLY),
            kill_suidgid: false,
        };
        for (node, operation) in [
            (dir, look_up(&name(7))),
            (dir, look_up("none")),
            (dir, OwnedOperation::Getattr { handle: None }),
            (file, OwnedOperation::Statx { handle: None }),
            (file, xattr),
            (file, OwnedOperation::Listxattr { size: 0 }),
            (file, open),
            (dir, readdir),
            (dir, OwnedOperation::Opendir),
        ] {
            let said = format!("{operation:?}");
            let reply = guest.call(node, operation).now_or_never();
            assert!(reply.is_some(), "{said}");
        }
    });
}

#[test]
fn guests_are_promised_what_was_quiet_and_changes_wait_for_them() {
    in_world(|world| async move {
        let dir = fill(&world, 10).await;
        let host = client(&world, 1, None);
        let (guest, other) = (Guest::new(&host), Guest::new(&host));
        guest.list(dir).await.unwrap();
        guest.list(dir).await.unwrap();
        world.runtime.sleep(LOADED).await;
        let valid = settings().validity;
        let entry = guest.lookup(dir, &name(1)).await.unwrap();
        assert_eq!((entry.entry_valid, entry.attr_valid), (valid, valid));
        let none = OwnedOperation::Lookup {
            name: LookupTarget::Name("none".into()),
        };
        assert_eq!(guest.call(dir, none).await, OwnedReply::NoEntry(valid));
        let before = world.runtime.now();
        other.unlink(dir, &name(1)).await.unwrap();
        assert!(
            world.runtime.now() >= before + valid,
            "the guest goes by what it was told"
        );
        let entry = guest.lookup(dir, &name(2)).await.unwrap();
        let quiet = (entry.entry_valid, entry.attr_valid);
        assert_eq!(quiet, (valid, valid), "another name changed");
        let none = OwnedOperation::Lookup {
            name: LookupTarget::Name(name(1).into()),
        };
        // It is cached again once it was asked for.
        for _ in 0..2 {
            let reply = guest.call(dir, none.clone()).await;
            let absent = OwnedReply::Error(Errno::ENOENT);
            assert_eq!(reply, absent, "it changed a short while ago");
        }
        let before = world.runtime.now();
        other.unlink(dir, &name(3)).await.unwrap();
        other.create(dir, "new", RDWR).await.unwrap();
        assert!(
            world.runtime.now() < before + valid,
            "nothing was promised of these"
        );
    });
}

#[test]
fn a_guest_that_only_looks_has_a_session_before_long() {
    in_world(|world| async move {
        let dir = fill(&world, 10).await;
        let host = client(&world, 1, None);
        let guest = Guest::read_only(&host);
        let sessions = world.sessions().len();
        for _ in 0..4 {
            guest.lookup(dir, &name(1)).await.unwrap();
            world.runtime.sleep(LOADED).await;
        }
        assert_eq!(world.sessions().len(), sessions + 1);
        assert!(host.counters().hits > 0);
    });
}

#[test]
fn extents_of_a_file_are_asked_for_once() {
    in_world(|world| async move {
        let writer = Guest::new(&client(&world, 2, None));
        let (file, handle) = writer.create(ROOT, "f", RDWR).await.unwrap();
        for number in [0, 3, 6, 9] {
            let data = [number as u8 + 1; 4096];
            writer
                .write(file, handle, number * 4096, &data)
                .await
                .unwrap();
        }
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let handle = guest.open(file, libc::O_RDONLY).await.unwrap();
        for _ in 0..6 {
            guest.read(file, handle, 0, 4096).await.unwrap();
            world.runtime.sleep(LOADED).await;
        }
        let before = questions(&host);
        let expected = [(0, 1), (4096, 0), (3 * 4096, 4), (9 * 4096, 10)];
        for (offset, byte) in expected {
            let data = guest.read(file, handle, offset, 4096).await.unwrap();
            assert_eq!(data, [byte; 4096]);
        }
        assert_eq!(questions(&host), before);
        writer.truncate(file, 4096).await.unwrap();
        assert_eq!(guest.read(file, handle, 3 * 4096, 4096).await.unwrap(), []);
    });
}

#[test]
fn what_was_not_used_for_long_goes_when_there_is_too_much() {
    seeds(5, |world| async move {
        world.set_faults(slow());
        let writer = Guest::new(&client(&world, 2, None));
        let mut dirs = Vec::new();
        for number in 0..20 {
            let dir = writer.mkdir(ROOT, &format!("d{number}")).await.unwrap();
            for file in 0..10 {
                writer.create(dir, &name(file), RDWR).await.unwrap();
            }
            dirs.push(dir);
        }
        let options = ClientOptions {
            cached_names_max: 60,
            cached_inodes_max: 60,
            capabilities: settings(),
            ..ClientOptions::default()
        };
        let host = client_with(&world, 1, None, options);
        let guest = Guest::new(&host);
        for _ in 0..2 {
            for dir in &dirs {
                assert_eq!(guest.list(*dir).await.unwrap().len(), 10);
                for file in 0..10 {
                    guest.lookup(*dir, &name(file)).await.unwrap();
                }
            }
        }
        // What is given up waits for the guest.
        world.runtime.sleep(LOADED).await;
        let held = host.counters().capabilities;
        assert!((1..=8).contains(&held), "{held} capabilities");
    });
}

#[test]
fn directories_that_do_not_fit_are_not_loaded_again_for_each_name() {
    const DIRS: usize = 4;
    const NAMES: usize = 400;
    in_world(|world| async move {
        world.set_faults(slow());
        let writer = Guest::new(&client(&world, 9, None));
        let mut dirs = Vec::new();
        for number in 0..DIRS {
            dirs.push(fill_as(&writer, &format!("d{number}"), NAMES).await);
        }
        let options = ClientOptions {
            // Half of them.
            cached_names_max: DIRS * NAMES / 2,
            cached_inodes_max: DIRS * NAMES / 2,
            capabilities: settings(),
            ..ClientOptions::default()
        };
        let host = client_with(&world, 1, None, options);
        let guest = Guest::new(&host);
        for number in 0..NAMES {
            // Far from each other, as in no order.
            for (nth, dir) in dirs.iter().enumerate() {
                let file = (number * 89 + nth * 31) % NAMES;
                guest.lookup(*dir, &name(file)).await.unwrap();
            }
        }
        let counters = host.counters();
        let (looks, listed) = ((DIRS * NAMES) as u64, counters.listed_names);
        // One question for 32 names. Loading a directory on each lookup lists 124 names for each.
        assert!(
            listed <= 32 * looks,
            "{listed} names were listed for {looks}"
        );
        assert!(
            counters.questions <= 2 * looks,
            "{} questions",
            counters.questions
        );
        assert!(counters.hits > looks / 8, "{} hits", counters.hits);
    });
}

#[test]
fn a_client_that_ends_is_in_nobodys_way() {
    in_world(|world| async move {
        let dir = fill(&world, 10).await;
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        guest.list(dir).await.unwrap();
        guest.list(dir).await.unwrap();
        assert!(host.counters().capabilities > 0);
        guest.mount.end_session();
        host.shutdown().await;
        let other = Guest::new(&client(&world, 2, None));
        other.unlink(dir, &name(1)).await.unwrap();
        assert_eq!(other.lookup(dir, &name(1)).await.err(), Some(Errno::ENOENT));
    });
}
