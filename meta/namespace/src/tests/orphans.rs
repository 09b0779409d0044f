//! Inodes without a name, and large files.

use super::world::{SESSION, World, attempt, commit, rename, truncate, unlink};
use crate::*;

/// A file of so many extents of one block each, with holes between.
fn sparse(world: &mut World, name: &[u8], count: u64) -> Ino {
    let file = world.make(Ino::ROOT, name, NewNode::File);
    let mut at = 0;
    while at < count {
        let pieces: Vec<_> = (at..count.min(at + 500)).map(|at| (at * 2, 1)).collect();
        world.write(file, &pieces);
        at += 500;
    }
    file
}

#[test]
fn an_unlinked_file_lives_until_its_last_opener_closes_it() {
    let mut world = World::new();
    let second = world.open_session(2);
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 2)]);
    world
        .ask(unlink(Ino::ROOT, b"f", &[second, SESSION]))
        .unwrap();
    assert_eq!(world.attributes(file).nlink, 0);
    let link = Operation::Link {
        ino: file,
        parent: Ino::ROOT,
        name: b"again".to_vec(),
    };
    assert_eq!(world.ask(link), Err(Error::NotFound));
    let reap = Operation::Reap {
        ino: file,
        limit: 10,
    };
    assert_eq!(world.lead(reap), Err(Error::Busy));
    world.write(file, &[(5, 1)]);
    world.check();
    let release = |session| Operation::ReleaseOrphan { ino: file, session };
    world.lead(release(SESSION)).unwrap();
    assert_eq!(world.attributes(file).allocated, 3 * BLOCK);
    world.lead(release(second)).unwrap();
    assert_eq!(world.statistics().freed_bytes, 3 * BLOCK);
    assert_eq!(world.statistics().inodes, 1);
    assert_eq!(world.ask(truncate(file, 0)), Err(Error::Stale));
    world.check();
}

#[test]
fn an_inode_is_held_by_every_session_that_may_have_it_open() {
    let mut world = World::new();
    let unlink_all = |name: &[u8], own| Operation::Unlink {
        parent: Ino::ROOT,
        name: name.to_vec(),
        openers: Openers::All { own },
    };
    // One session alone, which says that it has it not open: it goes at once.
    world.make(Ino::ROOT, b"alone", NewNode::File);
    let Ok(Outcome::Removed(Some(removed))) = world.ask(unlink_all(b"alone", false)) else {
        panic!("it is removed");
    };
    assert!(!removed.kept);
    let [second, third, ending] = [2, 3, 4].map(|node| world.open_session(node));
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let own = world.make(Ino::ROOT, b"own", NewNode::File);
    let directory = world.make(Ino::ROOT, b"dir", NewNode::Directory);
    let replaced = world.make(Ino::ROOT, b"replaced", NewNode::File);
    // It ends in steps, and is nobody's opener meanwhile.
    let held = world.make(Ino::ROOT, b"held", NewNode::File);
    world.ask(unlink(Ino::ROOT, b"held", &[ending])).unwrap();
    let end = Operation::EndSession { session: ending };
    world.lead(end).unwrap();
    assert!(world.read().inode(held).is_err());
    world.ask(unlink_all(b"f", false)).unwrap();
    let rmdir = Operation::Rmdir {
        parent: Ino::ROOT,
        name: b"dir".to_vec(),
        openers: Openers::All { own: false },
    };
    world.ask(rmdir).unwrap();
    let over = rename(
        (Ino::ROOT, b"own"),
        (Ino::ROOT, b"replaced"),
        RenameMode::Replace,
    );
    world.ask(over).unwrap();
    world.ask(unlink_all(b"replaced", true)).unwrap();
    let orphans = world.read().orphans(Ino(0), 9).unwrap();
    let others = Orphan::Held(vec![second, third]);
    let all = Orphan::Held(vec![SESSION, second, third]);
    let right = [
        (file, others.clone()),
        (own, all),
        (directory, others.clone()),
        (replaced, others),
    ];
    assert_eq!(orphans, right);
    // Each lets go of what it does not have open.
    let held = |world: &World, session, from, max| world.read().held(session, from, max).unwrap();
    assert_eq!(held(&world, SESSION, Ino(0), 9), [own]);
    let everything = [file, own, directory, replaced];
    assert_eq!(held(&world, second, Ino(0), 9), everything);
    assert_eq!(held(&world, second, own, 2), [own, directory]);
    assert_eq!(held(&world, second, own, 0), []);
    assert_eq!(held(&world, ending, Ino(0), 9), []);
    for session in [second, third] {
        let request = world.request(
            (session, 0),
            Operation::ReleaseOrphan { ino: file, session },
        );
        world.apply(&request).unwrap();
    }
    assert!(world.read().inode(file).is_err());
    assert_eq!(held(&world, second, Ino(0), 9), everything[1..]);
    world.check();
}

#[test]
fn a_session_that_was_opened_in_the_same_batch_is_an_opener() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let open = Operation::OpenSession {
        node: 9,
        incarnation: 9,
    };
    let unlink = Operation::Unlink {
        parent: Ino::ROOT,
        name: b"f".to_vec(),
        openers: Openers::All { own: false },
    };
    let operations = vec![
        world.request((SessionId::NONE, 0), open),
        world.request((SESSION, 0), unlink),
    ];
    let replies = attempt(&mut world.records, &Batch { operations });
    let [Ok(Outcome::Session(opened)), Ok(Outcome::Removed(Some(_)))] = replies[..] else {
        panic!("{replies:?}");
    };
    let orphans = world.read().orphans(Ino(0), 9).unwrap();
    assert_eq!(orphans, [(file, Orphan::Held(vec![opened]))]);
    world.check();
}

#[test]
fn a_large_file_is_emptied_in_steps() {
    let mut world = World::new();
    let file = sparse(&mut world, b"big", 3000);
    let gone = world.ask(unlink(Ino::ROOT, b"big", &[])).unwrap();
    let removed = Removed {
        ino: file,
        nlink: 0,
        kept: true,
    };
    assert_eq!(gone, Outcome::Removed(Some(removed)));
    let orphans = world.read().orphans(Ino(0), 10).unwrap();
    assert_eq!(orphans, [(file, Orphan::Emptying)]);
    assert_eq!(world.ask(truncate(file, 0)), Err(Error::Stale));
    let namespace = world.read();
    let reads = [
        namespace.attributes(file).map(drop),
        namespace.extents(file, (0, u64::MAX), 9).map(drop),
        namespace.xattr_names(file).map(drop),
        namespace.xattr(file, b"user.x").map(drop),
    ];
    for read in reads {
        let is_stale = matches!(read, Err(Failure::Refused(Error::Stale)));
        assert!(is_stale, "{read:?}");
    }
    let mut steps = 0;
    loop {
        let reap = Operation::Reap {
            ino: file,
            limit: 700,
        };
        let left = world.record(file).allocated;
        let reply = world.lead(reap);
        steps += 1;
        world.check();
        if reply == Ok(Outcome::Step { done: true }) {
            break;
        }
        assert_eq!(left - world.record(file).allocated, 700 * BLOCK);
    }
    assert_eq!(steps, 5);
    let statistics = Statistics {
        inodes: 1,
        named_bytes: 0,
        freed_bytes: 3000 * BLOCK,
    };
    assert_eq!(world.statistics(), statistics);
}

#[test]
fn attributes_of_an_orphan_go_in_steps_too() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    for number in 0..2500 {
        let set = Operation::SetXattr {
            ino: file,
            name: format!("user.{number}").into_bytes(),
            value: vec![1; 10],
            mode: XattrMode::Create,
        };
        world.ask(set).unwrap();
    }
    world.ask(unlink(Ino::ROOT, b"f", &[])).unwrap();
    let reap = Operation::Reap {
        ino: file,
        limit: u32::MAX,
    };
    assert_eq!(world.lead(reap.clone()), Ok(Outcome::Step { done: false }));
    world.check();
    assert_eq!(world.lead(reap.clone()), Ok(Outcome::Step { done: true }));
    assert_eq!(world.lead(reap), Ok(Outcome::Step { done: true }));
    world.check();
    assert_eq!(world.statistics().inodes, 1);
}

#[test]
fn a_file_of_many_extents_shrinks_in_steps() {
    let mut world = World::new();
    let file = sparse(&mut world, b"big", 2500);
    let mut sizes = vec![world.attributes(file).size];
    loop {
        let outcome = world.ask(truncate(file, 2 * BLOCK)).unwrap();
        let Outcome::Changed { attributes, done } = outcome else {
            panic!("{outcome:?}");
        };
        sizes.push(attributes.size);
        world.check();
        if done {
            break;
        }
    }
    // The last block of what is left is at the end each time.
    let left = [2500, 2500 - 1024, 2500 - 2048].map(|count| (2 * count - 1) * BLOCK);
    assert_eq!(sizes, [left[0], left[1], left[2], 2 * BLOCK]);
    assert_eq!(world.attributes(file).allocated, BLOCK);
}

#[test]
fn a_hole_is_punched_in_steps() {
    let mut world = World::new();
    let file = sparse(&mut world, b"big", 2000);
    let punch = Operation::Punch(Punch {
        ino: file,
        offset: 0,
        length: 1 << 40,
        extend: false,
        clear_privileges: false,
    });
    let step = |world: &mut World| match world.ask(punch.clone()) {
        Ok(Outcome::Changed { attributes, done }) => (attributes.allocated / BLOCK, done),
        other => panic!("{other:?}"),
    };
    assert_eq!(step(&mut world), (2000 - 1024, false));
    world.check();
    assert_eq!(step(&mut world), (0, true));
    assert_eq!(world.attributes(file).size, 3999 * BLOCK);
    world.check();
}

#[test]
fn a_range_of_many_extents_is_copied_in_steps() {
    let mut world = World::new();
    let (from, to) = (
        sparse(&mut world, b"from", 1500),
        sparse(&mut world, b"to", 1200),
    );
    let (end, mut at, mut steps) = (2999 * BLOCK, 0, 0);
    while at < end {
        let copy = Operation::CopyRange(CopyRange {
            from,
            from_offset: at,
            to,
            to_offset: at + BLOCK,
            length: end - at,
            clear_privileges: false,
        });
        match world.ask(copy).unwrap() {
            Outcome::Copied { length, .. } if length > 0 => at += length,
            other => panic!("{other:?}"),
        }
        steps += 1;
        world.check();
    }
    // One record for each extent copied, and one for each overwritten.
    assert_eq!((at, steps), (end, 3));
    let [source, copied] = [from, to].map(|ino| {
        let all = world.read().extents(ino, (0, u64::MAX), 10_000).unwrap();
        all.into_iter()
            .map(|extent| (extent.offset, extent.address))
            .collect::<Vec<_>>()
    });
    let moved: Vec<_> = source
        .iter()
        .map(|(offset, address)| (offset + BLOCK, *address))
        .collect();
    // The first block of the destination was not copied over.
    assert_eq!(copied[1..], moved);
    for name in [&b"from"[..], b"to"] {
        world.ask(unlink(Ino::ROOT, name, &[])).unwrap();
    }
    for ino in [from, to] {
        let reap = Operation::Reap { ino, limit: 2000 };
        while world.lead(reap.clone()) != Ok(Outcome::Step { done: true }) {
            world.check();
        }
        world.check();
    }
    assert_eq!(world.statistics().named_bytes, 0);
    assert_eq!(world.statistics().freed_bytes, 2700 * BLOCK);
}

#[test]
fn sequential_writes_are_one_extent_in_the_inode() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    for at in 0..100 {
        world.write(file, &[(at * 8, 8)]);
    }
    let inode = world.read().inode(file).unwrap();
    let Body::File(Content::Inline(extent)) = inode.body else {
        panic!("{inode:?}");
    };
    assert_eq!((extent.offset, extent.length), (0, 800 * BLOCK));
    // Overwritten in the middle, there are three.
    let middle = world.blocks(400, 1);
    let size = inode.size;
    world.ask(commit(file, vec![middle], size)).unwrap();
    let body = world.read().inode(file).unwrap().body;
    assert_eq!(body, Body::File(Content::Table(3)));
    let found = world
        .read()
        .extents(file, (399 * BLOCK, 400 * BLOCK + 1), 9)
        .unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(found[1], middle);
    world.check();
}
