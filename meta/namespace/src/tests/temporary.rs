//! Files that are made without a name.

use super::world::{SESSION, World, make, truncate, unlink};
use crate::keys::HOLDS;
use crate::*;

fn make_temporary(parent: Ino) -> Operation {
    Operation::MakeTemporary(MakeTemporary {
        parent,
        mode: 0o600,
        uid: 1000,
        gid: 1000,
    })
}

fn link(ino: Ino, name: &[u8]) -> Operation {
    Operation::Link {
        ino,
        parent: Ino::ROOT,
        name: name.to_vec(),
    }
}

/// A temporary file of the first session.
fn temporary(world: &mut World) -> Ino {
    match world.ask(make_temporary(Ino::ROOT)) {
        Ok(Outcome::Inode(attributes)) => attributes.ino,
        other => panic!("{other:?}"),
    }
}

fn release(ino: Ino, session: SessionId) -> Operation {
    Operation::ReleaseOrphan { ino, session }
}

#[test]
fn a_temporary_file_is_held_by_its_session_until_that_releases_it() {
    let mut world = World::new();
    let other = world.open_session(2);
    let root = world.attributes(Ino::ROOT);
    let file = temporary(&mut world);
    assert_eq!(world.attributes(Ino::ROOT), root, "it has no entry there");
    let attributes = world.attributes(file);
    assert_eq!((attributes.kind, attributes.nlink), (Kind::File, 0));
    assert_eq!((attributes.mode, attributes.uid), (0o600, 1000));
    let orphans = world.read().orphans(Ino(0), 9).unwrap();
    assert_eq!(orphans, [(file, Orphan::Temporary(SESSION))]);
    assert_eq!(world.read().held(SESSION, Ino(0), 9).unwrap(), [file]);
    world.write(file, &[(0, 2)]);
    world.ask(truncate(file, BLOCK)).unwrap();
    world.check();
    let reap = Operation::Reap {
        ino: file,
        limit: 9,
    };
    assert_eq!(world.lead(reap), Err(Error::Busy));
    world.lead(release(file, other)).unwrap();
    assert_eq!(world.statistics().inodes, 2, "the other one has no hold");
    world.lead(release(file, SESSION)).unwrap();
    assert_eq!(world.ask(truncate(file, 0)), Err(Error::Stale));
    assert_eq!(world.statistics().inodes, 1);
    assert_eq!(world.statistics().freed_bytes, 2 * BLOCK);
    world.check();
}

#[test]
fn a_linked_temporary_file_is_a_file_like_any_other() {
    let mut world = World::new();
    let file = temporary(&mut world);
    world.write(file, &[(0, 1)]);
    world.make(Ino::ROOT, b"taken", NewNode::File);
    assert_eq!(world.ask(link(file, b"taken")), Err(Error::Exists));
    let Ok(Outcome::Inode(linked)) = world.ask(link(file, b"f")) else {
        panic!("it never had a name");
    };
    assert_eq!(linked.nlink, 1);
    world.check();
    let inode = world.read().inode(file).unwrap();
    assert_eq!(inode.parent, Some(Ino::ROOT), "it is its only name");
    // Whoever still takes it for an orphan does no harm.
    for session in [SESSION, SessionId(99)] {
        world.lead(release(file, session)).unwrap();
    }
    let reap = Operation::Reap {
        ino: file,
        limit: 9,
    };
    assert_eq!(world.lead(reap), Ok(Outcome::Step { done: true }));
    assert_eq!(world.read().lookup(Ino::ROOT, b"f").unwrap().0, file);
    assert_eq!(world.attributes(file).allocated, BLOCK);
    world.ask(link(file, b"g")).unwrap();
    assert_eq!(world.read().inode(file).unwrap().parent, None);
    for name in [&b"f"[..], b"g"] {
        world.ask(unlink(Ino::ROOT, name, &[SESSION])).unwrap();
    }
    assert_eq!(world.ask(link(file, b"again")), Err(Error::NotFound));
    world.lead(release(file, SESSION)).unwrap();
    assert_eq!(world.statistics().inodes, 2);
    world.check();
}

#[test]
fn only_the_session_that_made_a_temporary_file_links_it() {
    let mut world = World::new();
    let other = world.open_session(2);
    let file = temporary(&mut world);
    let foreign = world.request((other, 0), link(file, b"f"));
    assert_eq!(world.apply(&foreign), Err(Error::NotFound));
    assert_eq!(world.read().held(SESSION, Ino(0), 9).unwrap(), [file]);
    world.ask(link(file, b"f")).unwrap();
    let named = world.request((other, 0), link(file, b"g"));
    world.apply(&named).unwrap();
    world.check();
}

#[test]
fn a_session_that_ends_takes_its_temporary_files_along_and_leaves_linked_ones() {
    let mut world = World::new();
    let [gone, kept] = [(); 2].map(|()| temporary(&mut world));
    world.write(gone, &[(0, 1)]);
    world.ask(link(kept, b"kept")).unwrap();
    let end = Operation::EndSession { session: SESSION };
    while world.lead(end.clone()) != Ok(Outcome::Step { done: true }) {
        world.check();
    }
    assert!(world.read().inode(gone).is_err());
    assert_eq!(world.read().lookup(Ino::ROOT, b"kept").unwrap().0, kept);
    assert_eq!(world.statistics().inodes, 2);
    world.check();
}

#[test]
fn repeated_requests_make_and_link_one_temporary_file() {
    let mut world = World::new();
    let make = world.request((SESSION, 0), make_temporary(Ino::ROOT));
    let made = world.apply(&make);
    let Ok(Outcome::Inode(Attributes { ino, .. })) = made else {
        panic!("{made:?}");
    };
    assert_eq!(world.apply(&make), made);
    assert_eq!(world.statistics().inodes, 2);
    let linked = world.request((SESSION, 1), link(ino, b"f"));
    let reply = world.apply(&linked);
    world.ask(unlink(Ino::ROOT, b"f", &[])).unwrap();
    let records = world.records.clone();
    assert!(reply.is_ok());
    assert_eq!(world.apply(&linked), reply, "it is not done twice");
    assert_eq!(world.records, records);
    assert_eq!(world.statistics().inodes, 1);
    world.check();
}

#[test]
fn a_temporary_file_inherits_from_its_directory_and_needs_one() {
    let mut world = World::new();
    let directory = world.make(Ino::ROOT, b"d", NewNode::Directory);
    let set = Operation::SetAttributes(SetAttributes {
        ino: directory,
        mode: Some(0o2775),
        gid: Some(7),
        ..SetAttributes::default()
    });
    world.ask(set).unwrap();
    let Ok(Outcome::Inode(made)) = world.ask(make_temporary(directory)) else {
        panic!("there is a directory");
    };
    assert_eq!((made.gid, made.mode), (7, 0o600));
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    assert_eq!(world.ask(make_temporary(file)), Err(Error::NotDirectory));
    assert_eq!(world.ask(make_temporary(Ino(99))), Err(Error::Stale));
    assert_eq!(world.lead(make_temporary(Ino::ROOT)), Err(Error::Stale));
    let rmdir = Operation::Rmdir {
        parent: Ino::ROOT,
        name: b"d".to_vec(),
        openers: Openers::All { own: true },
    };
    world.ask(rmdir).unwrap();
    assert_eq!(world.ask(make_temporary(directory)), Err(Error::NotFound));
    assert_eq!(world.attributes(made.ino).nlink, 0, "it outlives that");
    world.check();
}

#[test]
fn temporary_files_leave_no_holds_behind() {
    let mut world = World::new();
    for number in 0..50 {
        let file = temporary(&mut world);
        match number % 2 {
            0 => world.ask(link(file, format!("{number}").as_bytes())),
            _ => world.lead(release(file, SESSION)),
        }
        .unwrap();
    }
    let holds = HOLDS.key(super::world::FILESYSTEM_ID, &());
    let mut left = world.records.range(holds.clone()..);
    assert!(left.next().is_none_or(|(key, _)| !key.starts_with(&holds)));
    assert_eq!(world.statistics().inodes, 26);
    assert_eq!(world.read().orphans(Ino(0), 9).unwrap(), []);
    world.ask(make(Ino::ROOT, b"f", NewNode::File)).unwrap();
    world.check();
}
