//! Changes of what the caller has looked at before.

use super::world::{World, commit, truncate};
use crate::*;

/// The same operation, of an inode in this state alone.
fn expecting(operation: Operation, expected: u64) -> Operation {
    let expected = Some(expected);
    match operation {
        Operation::Commit(commit) => Operation::Commit(Commit { expected, ..commit }),
        Operation::SetAttributes(set) => {
            Operation::SetAttributes(SetAttributes { expected, ..set })
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_completes_a_block_of_another_state_of_the_file_is_told_and_changes_nothing() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 2)]);
    let seen = world.attributes(file).change;
    // Another host's write comes in between.
    world.write(file, &[(0, 1)]);
    let replaced = world.blocks(0, 1);
    let late = expecting(commit(file, vec![replaced], BLOCK), seen);
    let before = world.read().inode(file).unwrap();
    assert_eq!(world.ask(late), Err(Error::Changed));
    assert_eq!(world.read().inode(file).unwrap(), before);
    world.check();
    // The address is not used up: whoever looks again may name it.
    let again = expecting(commit(file, vec![replaced], BLOCK), before.change);
    world.ask(again.clone()).unwrap();
    assert_eq!(world.ask(again), Err(Error::Changed), "it has changed it");
    world.check();
}

#[test]
fn a_tail_is_cut_from_the_file_that_was_read() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 2)]);
    let seen = world.attributes(file).change;
    let set = Operation::SetXattr {
        ino: file,
        name: b"user.x".to_vec(),
        value: Vec::new(),
        mode: XattrMode::Set,
    };
    world.ask(set).unwrap();
    let tail = world.blocks(0, 1);
    let cut = Operation::SetAttributes(SetAttributes {
        ino: file,
        size: Some(100),
        tail: Some(Tail {
            segment: tail.segment,
            address: tail.address,
            epoch: 1,
        }),
        ..SetAttributes::default()
    });
    assert_eq!(world.ask(expecting(cut.clone(), seen)), Err(Error::Changed));
    let now = world.attributes(file).change;
    let Ok(Outcome::Changed { attributes, done }) = world.ask(expecting(cut, now)) else {
        panic!("it is as it was seen");
    };
    assert!(done && attributes.change > now && attributes.size == 100);
    world.check();
}

#[test]
fn of_two_appends_at_the_same_end_one_looks_again() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let seen = world.attributes(file).change;
    let records = [world.blocks(0, 1), world.blocks(0, 1)];
    let replies = records.map(|record| {
        let append = commit(file, vec![record], BLOCK);
        world.ask(expecting(append, seen)).map(drop)
    });
    assert_eq!(replies, [Ok(()), Err(Error::Changed)]);
    assert_eq!(
        Error::Changed.errno(),
        libc::EAGAIN,
        "it is not for the guest"
    );
    // Who does not depend on what is there says nothing, and is done.
    world.ask(truncate(file, 0)).unwrap();
}
