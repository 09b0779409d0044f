//! Rename, case by case. The model has the rest.

use super::world::{World, make, rename};
use crate::*;

/// Root: `a/` with `sub/`, `b/`, the file `f` and its second name `g`.
fn tree() -> (World, [Ino; 4]) {
    let mut world = World::new();
    let a = world.make(Ino::ROOT, b"a", NewNode::Directory);
    let sub = world.make(a, b"sub", NewNode::Directory);
    let b = world.make(Ino::ROOT, b"b", NewNode::Directory);
    let f = world.make(Ino::ROOT, b"f", NewNode::File);
    let link = Operation::Link {
        ino: f,
        parent: Ino::ROOT,
        name: b"g".to_vec(),
    };
    world.ask(link).unwrap();
    (world, [a, sub, b, f])
}

#[test]
fn kinds_and_emptiness_decide_what_may_be_replaced() {
    use RenameMode::{Exchange, NoReplace, Replace};
    let root = Ino::ROOT;
    let (mut world, [a, sub, _, _]) = tree();
    for (from, to, mode, error) in [
        (
            (root, &b"a"[..]),
            (root, &b"f"[..]),
            Replace,
            Error::NotDirectory,
        ),
        ((root, b"f"), (root, b"b"), Replace, Error::IsDirectory),
        ((root, b"b"), (root, b"a"), Replace, Error::NotEmpty),
        ((a, b"sub"), (root, b"a"), Replace, Error::NotEmpty),
        ((root, b"a"), (sub, b"x"), Replace, Error::Invalid),
        ((root, b"a"), (a, b"x"), Replace, Error::Invalid),
        ((root, b"a"), (a, b"sub"), Exchange, Error::Invalid),
        ((a, b"sub"), (root, b"a"), Exchange, Error::Invalid),
        ((root, b"f"), (root, b"g"), NoReplace, Error::Exists),
        ((root, b"f"), (root, b"none"), Exchange, Error::NotFound),
        ((root, b"none"), (root, b"f"), Replace, Error::NotFound),
    ] {
        assert_eq!(world.ask(rename(from, to, mode)), Err(error), "{from:?}");
    }
    world.check();
}

#[test]
fn two_names_of_one_inode_both_stay() {
    let (mut world, [_, _, _, f]) = tree();
    let before = world.attributes(f);
    let same = rename((Ino::ROOT, b"f"), (Ino::ROOT, b"g"), RenameMode::Replace);
    assert_eq!(world.ask(same), Ok(Outcome::Removed(None)));
    assert_eq!(world.attributes(f), before);
    assert_eq!(before.nlink, 2);
}

#[test]
fn exchanged_directories_change_their_parents_and_their_links() {
    let (mut world, [a, sub, b, f]) = tree();
    let with_file = rename((a, b"sub"), (Ino::ROOT, b"f"), RenameMode::Exchange);
    world.ask(with_file).unwrap();
    assert_eq!(world.attributes(a).nlink, 2);
    assert_eq!(world.attributes(Ino::ROOT).nlink, 5);
    assert_eq!(world.read().lookup(a, b"sub").unwrap().0, f);
    world.check();
    let inner = world.make(b, b"inner", NewNode::Directory);
    let with_directory = rename((b, b"inner"), (Ino::ROOT, b"f"), RenameMode::Exchange);
    world.ask(with_directory).unwrap();
    let parent = |ino| match world.read().inode(ino).unwrap().body {
        Body::Directory(directory) => directory.parent,
        other => panic!("{other:?}"),
    };
    assert_eq!((parent(sub), parent(inner)), (b, Ino::ROOT));
    assert_eq!(world.attributes(b).nlink, 3);
    world.check();
}

#[test]
fn a_replaced_name_keeps_its_place_in_the_listing() {
    let (mut world, _) = tree();
    let places = |world: &World| -> Vec<(Vec<u8>, u64)> {
        let entries = world.read().readdir(Ino::ROOT, 0, 100).unwrap();
        entries
            .into_iter()
            .map(|entry| (entry.name, entry.cookie))
            .collect()
    };
    let before = places(&world);
    assert_eq!(before[0], (b"a".to_vec(), FIRST_COOKIE));
    world.ask(make(Ino::ROOT, b"new", NewNode::File)).unwrap();
    let replace = rename((Ino::ROOT, b"new"), (Ino::ROOT, b"f"), RenameMode::Replace);
    world.ask(replace).unwrap();
    assert_eq!(places(&world), before);
}

/// A rename that leaves a whiteout.
fn with_whiteout(from: (Ino, &[u8]), to: (Ino, &[u8]), no_replace: bool) -> Operation {
    let whiteout = Whiteout {
        no_replace,
        uid: 4,
        gid: 5,
    };
    rename(from, to, RenameMode::Whiteout(whiteout))
}

#[test]
fn a_whiteout_takes_the_place_of_what_was_moved() {
    let root = Ino::ROOT;
    let (mut world, [a, sub, b, f]) = tree();
    let entry = |world: &World, name: &[u8]| {
        let entries = world.read().readdir(root, 0, 100).unwrap();
        entries
            .into_iter()
            .find(|entry| entry.name == name)
            .unwrap()
    };
    let before = (entry(&world, b"f"), world.attributes(root));
    let inodes = world.statistics().inodes;
    world
        .ask(with_whiteout((root, b"f"), (b, b"moved"), false))
        .unwrap();
    assert_eq!(world.read().lookup(b, b"moved").unwrap().0, f);
    let left = entry(&world, b"f");
    assert_eq!(left.kind, Kind::CharacterDevice);
    assert_eq!(
        left.cookie, before.0.cookie,
        "the name was there throughout"
    );
    let whiteout = world.attributes(left.ino);
    assert_eq!((whiteout.rdev, whiteout.mode, whiteout.nlink), (0, 0, 1));
    assert_eq!((whiteout.uid, whiteout.gid), (4, 5));
    assert_eq!(world.read().inode(left.ino).unwrap().parent, Some(root));
    assert_eq!(world.statistics().inodes, inodes + 1);
    assert_eq!(world.attributes(root).nlink, before.1.nlink);
    world.check();
    // A directory takes its link along, and a replaced file goes.
    world
        .ask(with_whiteout((root, b"a"), (b, b"a"), true))
        .unwrap();
    assert_eq!(world.attributes(root).nlink, before.1.nlink - 1);
    assert_eq!(world.read().lookup(b, b"a").unwrap().0, a);
    let Body::Directory(moved) = world.read().inode(a).unwrap().body else {
        panic!("it is a directory");
    };
    assert_eq!(moved.parent, b);
    assert_eq!(world.read().lookup(a, b"sub").unwrap().0, sub);
    world.ask(make(b, b"other", NewNode::File)).unwrap();
    let over = with_whiteout((b, b"other"), (b, b"moved"), false);
    let Ok(Outcome::Removed(Some(removed))) = world.ask(over) else {
        panic!("a name was replaced");
    };
    assert_eq!((removed.ino, removed.nlink), (f, 1));
    assert_eq!(entry(&world, b"f").ino, left.ino);
    world.check();
}

#[test]
fn a_refused_rename_leaves_no_whiteout() {
    let root = Ino::ROOT;
    let (mut world, [_, sub, _, _]) = tree();
    let records = world.records.clone();
    for (from, to, no_replace, reply) in [
        (&b"f"[..], (root, &b"a"[..]), false, Err(Error::IsDirectory)),
        (b"f", (root, b"a"), true, Err(Error::Exists)),
        (b"a", (root, b"f"), false, Err(Error::NotDirectory)),
        (b"a", (sub, b"x"), false, Err(Error::Invalid)),
        (b"none", (root, b"x"), false, Err(Error::NotFound)),
        // Two names of one inode both stay.
        (b"f", (root, b"g"), false, Ok(Outcome::Removed(None))),
    ] {
        let request = with_whiteout((root, from), to, no_replace);
        assert_eq!(world.ask(request), reply, "{from:?}");
    }
    let without_slots = |records: &super::world::Map| {
        let slots = keys::SLOTS.key(super::world::FILESYSTEM_ID, &());
        let mut records = records.clone();
        records.retain(|key, _| !key.starts_with(&slots));
        records
    };
    assert_eq!(without_slots(&world.records), without_slots(&records));
}

#[test]
fn a_repeated_rename_leaves_one_whiteout() {
    let (mut world, [_, _, b, f]) = tree();
    let request = with_whiteout((Ino::ROOT, b"f"), (b, b"f"), false);
    let request = world.request((super::world::SESSION, 3), request);
    let reply = world.apply(&request);
    assert!(reply.is_ok());
    let records = world.records.clone();
    assert_eq!(world.apply(&request), reply);
    assert_eq!(world.records, records);
    assert_eq!(world.read().lookup(b, b"f").unwrap().0, f);
    // Its number is not used again, whoever removes it.
    let whiteout = world.read().lookup(Ino::ROOT, b"f").unwrap().0;
    let unlink = super::world::unlink(Ino::ROOT, b"f", &[]);
    world.ask(unlink).unwrap();
    assert!(world.read().inode(whiteout).is_err());
    world.check();
}

#[test]
fn a_whiteout_inherits_the_group_of_its_directory() {
    let (mut world, [a, _, _, _]) = tree();
    let set = Operation::SetAttributes(SetAttributes {
        ino: a,
        mode: Some(0o2755),
        gid: Some(77),
        ..SetAttributes::default()
    });
    world.ask(set).unwrap();
    world
        .ask(with_whiteout((a, b"sub"), (Ino::ROOT, b"sub"), true))
        .unwrap();
    let (_, whiteout) = world.read().lookup(a, b"sub").unwrap();
    assert_eq!((whiteout.uid, whiteout.gid, whiteout.mode), (4, 77, 0));
    assert_eq!(world.attributes(a).nlink, 2);
    world.check();
}
