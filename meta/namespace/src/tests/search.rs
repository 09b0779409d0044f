//! From addresses back to files, and from inodes to names.

use super::world::{FILESYSTEM_ID, World, commit};
use crate::*;

fn ask(world: &World, query: &Query) -> Answer {
    let answered = answer(&world.records, FILESYSTEM_ID, query, 1 << 20).unwrap();
    answered.unwrap()
}

/// Runs a whole search in steps of `max` records.
fn files_at(world: &World, blocks: &[(SegmentId, u64)], max: u32) -> Vec<NamedBlock> {
    let (mut found, mut next) = (Vec::new(), Some(SearchFrom::START));
    while let Some(from) = next {
        let blocks = blocks.to_vec();
        match ask(world, &Query::FilesAt { blocks, from, max }) {
            Answer::FilesAt(step) => {
                found.extend(step.found);
                assert!(step.next > next || step.next.is_none(), "it gets on");
                next = step.next;
            }
            other => panic!("{other:?}"),
        }
    }
    found.sort_unstable();
    found
}

fn name_of(world: &World, ino: Ino, max: u32) -> Option<Named> {
    let mut behind = 0;
    loop {
        match ask(world, &Query::NameOf { ino, behind, max }) {
            Answer::NameOf(SearchStep {
                found: None,
                next: Some(next),
            }) => behind = next,
            Answer::NameOf(step) => return step.found,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_block_leads_to_every_file_that_names_it_and_to_its_offset_there() {
    let mut world = World::new();
    let file = |world: &mut World, name: &[u8]| world.make(Ino::ROOT, name, NewNode::File);
    let (small, large) = (file(&mut world, b"small"), file(&mut world, b"large"));
    let (copy, empty) = (file(&mut world, b"copy"), file(&mut world, b"empty"));
    let of_small = world.blocks(2, 3);
    let of_large = [world.blocks(0, 4), world.blocks(10, 4)];
    let unnamed = world.blocks(0, 1);
    world.ask(commit(small, vec![of_small], 5 * BLOCK)).unwrap();
    world
        .ask(commit(large, of_large.to_vec(), 14 * BLOCK))
        .unwrap();
    let shared = CopyRange {
        from: large,
        from_offset: 11 * BLOCK,
        to: copy,
        to_offset: 0,
        length: BLOCK,
        clear_privileges: false,
    };
    world.ask(Operation::CopyRange(shared)).unwrap();
    world.check();

    let at = |extent: &Extent, block: u64| (extent.segment, extent.address + block * BLOCK);
    let wanted = [
        at(&of_small, 1),
        at(&of_large[1], 1),
        at(&of_large[0], 3),
        at(&unnamed, 0),
    ];
    let named = |(segment, address), ino, block| NamedBlock {
        segment,
        address,
        ino,
        offset: block * BLOCK,
    };
    let mut right = vec![
        named(wanted[0], small, 3),
        named(wanted[1], large, 11),
        named(wanted[1], copy, 0),
        named(wanted[2], large, 3),
    ];
    right.sort_unstable();
    for max in [1, 2, 3, 1000] {
        assert_eq!(files_at(&world, &wanted, max), right, "{max} at a time");
    }
    assert_eq!(files_at(&world, &[at(&unnamed, 0)], 9), []);
    let too_many = Query::FilesAt {
        blocks: vec![wanted[0]; BLOCKS_MAX + 1],
        from: SearchFrom::START,
        max: 9,
    };
    let refused = answer(&world.records, FILESYSTEM_ID, &too_many, 1 << 20).unwrap();
    assert_eq!(refused, Err(Error::Invalid));
    let named = |parent, name: &[u8]| {
        let name = name.to_vec();
        Some(Named { parent, name })
    };
    let directory = world.make(Ino::ROOT, b"directory", NewNode::Directory);
    let inner = world.make(directory, b"inner", NewNode::File);
    for max in [1, 3, 1000] {
        assert_eq!(name_of(&world, empty, max), named(Ino::ROOT, b"empty"));
        assert_eq!(
            name_of(&world, directory, max),
            named(Ino::ROOT, b"directory")
        );
        assert_eq!(name_of(&world, inner, max), named(directory, b"inner"));
    }
    let link = Operation::Link {
        ino: inner,
        parent: Ino::ROOT,
        name: b"second".to_vec(),
    };
    world.ask(link).unwrap();
    assert_eq!(name_of(&world, inner, 9), None, "it has two names");
}
