//! Names and listings.

use std::collections::BTreeMap;

use super::world::{World, make, rename, unlink};
use crate::*;

/// Names of a listing in steps, with something happening between the steps.
fn listing(
    world: &mut World,
    directory: Ino,
    step: usize,
    mut between: impl FnMut(&mut World, usize),
) -> BTreeMap<Vec<u8>, usize> {
    let (mut seen, mut cookie, mut count) = (BTreeMap::new(), 0, 0);
    loop {
        let entries = world.read().readdir(directory, cookie, step).unwrap();
        let Some(last) = entries.last() else {
            return seen;
        };
        cookie = last.cookie;
        for entry in entries {
            *seen.entry(entry.name).or_default() += 1;
        }
        between(world, count);
        count += 1;
    }
}

#[test]
fn a_listing_shows_each_name_that_stays_once_while_others_come_and_go() {
    let mut world = World::new();
    let directory = world.make(Ino::ROOT, b"many", NewNode::Directory);
    let name = |number: usize| format!("{:05}", number * 7919 % 100_000).into_bytes();
    for number in 0..100_000 {
        world.make(directory, &name(number), NewNode::File);
    }
    // Every third name goes while the listing runs, new ones come, and two that stay are replaced or
    // exchanged, before and behind where the listing is.
    let mut comes = 0;
    let seen = listing(&mut world, directory, 997, |world, step| {
        let gone = step * 900..(step * 900 + 900).min(100_000);
        for number in gone.filter(|number| number % 3 == 0) {
            world.ask(unlink(directory, &name(number), &[])).ok();
        }
        // Or the listing would follow them for ever.
        for _ in 0..if step < 60 { 100 } else { 0 } {
            world.make(directory, format!("new{comes}").as_bytes(), NewNode::File);
            comes += 1;
        }
        let (early, late) = (name(step * 3 + 1), name(99_001 - step * 3));
        let exchange = rename(
            (directory, &early),
            (directory, &late),
            RenameMode::Exchange,
        );
        world.ask(exchange).unwrap();
        world.make(directory, b"replacement", NewNode::File);
        let replace = rename(
            (directory, b"replacement"),
            (directory, &early),
            RenameMode::Replace,
        );
        world.ask(replace).unwrap();
    });
    for number in (0..100_000).filter(|number| number % 3 != 0) {
        assert_eq!(seen.get(&name(number)), Some(&1), "{number}");
    }
    assert!(seen.values().all(|times| *times == 1));
    world.check();
}

#[test]
fn names_are_listed_in_the_order_of_bytes_from_any_name_on() {
    let mut world = World::new();
    for name in [&b"b"[..], b"\xff", b"a\x01", b"a", b"ab", b"\x01"] {
        world.make(Ino::ROOT, name, NewNode::File);
    }
    let list = |from: &[u8], max| -> Vec<Vec<u8>> {
        let found = world.read().list(Ino::ROOT, from, max).unwrap();
        found.into_iter().map(|(name, _)| name).collect()
    };
    let all: [&[u8]; 6] = [b"\x01", b"a", b"a\x01", b"ab", b"b", b"\xff"];
    assert_eq!(list(b"", 10), all);
    assert_eq!(list(b"a\x00", 2), all[2..4]);
    assert_eq!(list(b"b", 10), all[4..]);
    assert_eq!(list(b"", 0), [b""; 0]);
}

#[test]
fn a_file_says_where_its_only_name_is() {
    let mut world = World::new();
    let directory = world.make(Ino::ROOT, b"d", NewNode::Directory);
    let file = world.make(directory, b"f", NewNode::File);
    let parent = |world: &World, ino| world.read().inode(ino).unwrap().parent;
    assert_eq!(parent(&world, file), Some(directory));
    assert_eq!(parent(&world, directory), None, "its body says that");
    let up = rename((directory, b"f"), (Ino::ROOT, b"f"), RenameMode::Replace);
    world.ask(up).unwrap();
    assert_eq!(parent(&world, file), Some(Ino::ROOT));

    let other = world.make(directory, b"o", NewNode::File);
    let exchange = rename((directory, b"o"), (Ino::ROOT, b"f"), RenameMode::Exchange);
    world.ask(exchange).unwrap();
    assert_eq!(parent(&world, file), Some(directory));
    assert_eq!(parent(&world, other), Some(Ino::ROOT));

    let link = Operation::Link {
        ino: file,
        parent: Ino::ROOT,
        name: b"l".to_vec(),
    };
    world.ask(link).unwrap();
    assert_eq!(parent(&world, file), None);
    world.ask(unlink(Ino::ROOT, b"l", &[])).unwrap();
    assert_eq!(
        parent(&world, file),
        None,
        "where the other one is, nothing says"
    );
    world.check();
}

#[test]
fn a_file_has_65000_names_and_no_more() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"first", NewNode::File);
    let link = |name: &str| Operation::Link {
        ino: file,
        parent: Ino::ROOT,
        name: name.as_bytes().to_vec(),
    };
    for number in 1..65_000 {
        world.ask(link(&number.to_string())).unwrap();
    }
    assert_eq!(world.attributes(file).nlink, 65_000);
    assert_eq!(world.ask(link("one more")), Err(Error::TooManyLinks));
    assert_eq!(Error::TooManyLinks.errno(), libc::EMLINK);
    world.ask(unlink(Ino::ROOT, b"77", &[])).unwrap();
    world.ask(link("one more")).unwrap();
    world.check();
}

#[test]
fn directories_lie_4000_levels_deep() {
    let mut world = World::new();
    let mut path = vec![Ino::ROOT];
    for _ in 0..4000 {
        let below = world.make(*path.last().unwrap(), b"d", NewNode::Directory);
        path.push(below);
    }
    // The whole way up is looked at.
    let last = *path.last().unwrap();
    let into_itself = rename((Ino::ROOT, b"d"), (last, b"x"), RenameMode::Replace);
    assert_eq!(world.ask(into_itself), Err(Error::Invalid));
    let other = world.make(Ino::ROOT, b"other", NewNode::Directory);
    let deep = rename((Ino::ROOT, b"other"), (last, b"x"), RenameMode::Replace);
    world.ask(deep).unwrap();
    assert_eq!(world.read().lookup(last, b"x").unwrap().0, other);
    world.check();
}

#[test]
fn a_directory_is_not_moved_below_the_depth_limit() {
    let mut world = World::new();
    let other = world.make(Ino::ROOT, b"other", NewNode::Directory);
    let mut path = vec![Ino::ROOT];
    for _ in 0..DEPTH_MAX {
        let below = world.make(*path.last().unwrap(), b"d", NewNode::Directory);
        path.push(below);
    }
    let to = |level: usize| {
        rename(
            (Ino::ROOT, b"other"),
            (path[level], b"x"),
            RenameMode::Replace,
        )
    };
    let last = path.len() - 1;
    assert_eq!(world.ask(to(last)), Err(Error::TooDeep));
    assert_eq!(Error::TooDeep.errno(), libc::ELOOP);
    // A file has nothing below it.
    world.make(Ino::ROOT, b"file", NewNode::File);
    let file = rename(
        (Ino::ROOT, b"file"),
        (path[last], b"f"),
        RenameMode::Replace,
    );
    world.ask(file).unwrap();
    world.ask(to(last - 1)).unwrap();
    assert_eq!(world.read().lookup(path[last - 1], b"x").unwrap().0, other);
    world.check();
}

#[test]
fn what_cannot_be_a_name_is_refused() {
    let mut world = World::new();
    for (name, error) in [
        (&b""[..], Error::Invalid),
        (b".", Error::Invalid),
        (b"..", Error::Invalid),
        (b"a/b", Error::Invalid),
        (b"a\0", Error::Invalid),
        (&[b'n'; 256], Error::NameTooLong),
    ] {
        assert_eq!(world.ask(make(Ino::ROOT, name, NewNode::File)), Err(error));
        let found = world.read().lookup(Ino::ROOT, name);
        assert!(matches!(found, Err(Failure::Refused(found)) if found == error));
    }
    world.make(Ino::ROOT, &[0xfe; 255], NewNode::File);
    let mut symlink = |target: Vec<u8>| {
        world.ask(Operation::Symlink {
            parent: Ino::ROOT,
            name: b"s".to_vec(),
            target,
            uid: 0,
            gid: 0,
        })
    };
    assert_eq!(symlink(vec![b't'; 4096]), Err(Error::NameTooLong));
    assert_eq!(symlink(b"a\0b".to_vec()), Err(Error::Invalid));
    symlink(vec![b't'; 4095]).unwrap();
}

#[test]
fn forged_inode_numbers_are_stale() {
    let mut world = World::new();
    world.make(Ino::ROOT, b"x", NewNode::File);
    for ino in [0, 3, 1 << 48 | 1, 1 << 63 | 1, u64::MAX].map(Ino) {
        assert_eq!(world.ask(make(ino, b"y", NewNode::File)), Err(Error::Stale));
        let read = world.read().attributes(ino);
        assert!(matches!(read, Err(Failure::Refused(Error::Stale))));
    }
}

#[test]
fn an_attribute_of_full_size_fits_and_the_list_is_bounded() {
    let mut world = World::new();
    let set = |ino, name: &[u8], length| Operation::SetXattr {
        ino,
        name: name.to_vec(),
        value: vec![b'v'; length],
        mode: XattrMode::Set,
    };
    let values = world.make(Ino::ROOT, b"values", NewNode::File);
    let too_long = set(values, b"user.a", XATTR_VALUE_MAX + 1);
    assert_eq!(world.ask(too_long), Err(Error::ValueTooLong));
    for name in [&b"user.a"[..], b"security.b", b"user.a"] {
        world.ask(set(values, name, XATTR_VALUE_MAX)).unwrap();
    }
    assert_eq!(world.ask(set(values, b"user.c", 1)), Err(Error::NoSpace));
    // A name without a value takes only its place in the list.
    world.ask(set(values, b"user.c", 0)).unwrap();
    world.check();
    let names = world.make(Ino::ROOT, b"names", NewNode::File);
    // Each takes 256 bytes with its 0.
    for number in 0..256 {
        let name = format!("user.{number:0>250}");
        world.ask(set(names, name.as_bytes(), 1)).unwrap();
    }
    let listed = world.read().xattr_names(names).unwrap();
    let bytes: usize = listed.iter().map(|name| name.len() + 1).sum();
    assert_eq!(bytes, XATTR_LIST_MAX as usize);
    assert_eq!(world.ask(set(names, b"user.x", 0)), Err(Error::NoSpace));
    world.ask(set(names, &listed[0], 2)).unwrap();
    let remove = Operation::RemoveXattr {
        ino: names,
        name: listed[0].clone(),
    };
    world.ask(remove).unwrap();
    world.ask(set(names, b"user.x", 0)).unwrap();
    world.check();
}
