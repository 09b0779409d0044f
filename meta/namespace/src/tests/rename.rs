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
