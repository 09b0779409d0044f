//! Commits, segments and space.

use super::world::{FILESYSTEM_ID, SESSION, World, attempt, commit, truncate, unlink};
use crate::*;

#[test]
fn an_address_is_named_once_and_only_by_its_session() {
    let mut world = World::new();
    let second = world.open_session(2);
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let first = world.blocks(0, 4);
    let size = 100 * BLOCK;
    world.ask(commit(file, vec![first], size)).unwrap();
    let again = Extent {
        offset: 50 * BLOCK,
        length: BLOCK,
        ..first
    };
    assert_eq!(
        world.ask(commit(file, vec![again], size)),
        Err(Error::Invalid)
    );
    // Nor when it was freed.
    world.ask(truncate(file, 0)).unwrap();
    assert_eq!(
        world.ask(commit(file, vec![again], size)),
        Err(Error::Invalid)
    );
    let of_other = commit(file, vec![world.blocks(0, 1)], size);
    let request = world.request((second, 0), of_other);
    assert_eq!(world.apply(&request), Err(Error::Invalid));
    let nowhere = Extent {
        segment: SegmentId(77),
        ..again
    };
    assert_eq!(
        world.ask(commit(file, vec![nowhere], size)),
        Err(Error::Invalid)
    );
    world.check();
}

#[test]
fn commits_come_in_any_order_and_what_was_skipped_is_freed_at_the_seal() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let parts: Vec<_> = (0..5).map(|at| world.blocks(at * 10, 2)).collect();
    for at in [3, 0, 1] {
        world.ask(commit(file, vec![parts[at]], 1 << 20)).unwrap();
        world.check();
    }
    let segment = parts[0].segment;
    let seal = Operation::SealSegment {
        segment,
        length: 10 * BLOCK,
    };
    world.ask(seal).unwrap();
    world.check();
    let freed = world.read().freed((SegmentId(0), 0), 9).unwrap();
    let right = [parts[2], parts[4]].map(|part| Freed {
        segment,
        address: part.address,
        length: part.length,
    });
    assert_eq!(freed, right);
    let late = commit(file, vec![parts[2]], 1 << 20);
    assert_eq!(world.ask(late), Err(Error::Invalid));
}

#[test]
fn a_segment_has_a_bounded_number_of_gaps() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    for _ in 0..GAPS_MAX {
        world.blocks(0, 1);
        let extent = world.blocks(0, 1);
        world.ask(commit(file, vec![extent], BLOCK)).unwrap();
    }
    world.blocks(0, 1);
    let extent = world.blocks(0, 1);
    let one_more = commit(file, vec![extent], BLOCK);
    assert_eq!(world.ask(one_more), Err(Error::TooManyGaps));
    world.check();
}

#[test]
fn a_file_that_ends_within_a_block_gets_that_block_anew() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 3)]);
    assert_eq!(world.ask(truncate(file, 5000)), Err(Error::Invalid));
    let tail = world.blocks(1, 1);
    let shrink = |size, tail| {
        Operation::SetAttributes(SetAttributes {
            ino: file,
            size: Some(size),
            tail,
            ..SetAttributes::default()
        })
    };
    let given = Some(Tail {
        segment: tail.segment,
        address: tail.address,
        epoch: tail.epoch,
    });
    assert_eq!(world.ask(shrink(BLOCK, given)), Err(Error::Invalid));
    world.ask(shrink(5000, given)).unwrap();
    let found = world.read().extents(file, (BLOCK, 2 * BLOCK), 9).unwrap();
    assert_eq!(found, [tail]);
    // In a hole there is nothing to be seen.
    world.ask(shrink(1 << 20, None)).unwrap();
    world.ask(shrink(100_000, None)).unwrap();
    world.check();
    let too_large = shrink(SIZE_MAX + 1, None);
    assert_eq!(world.ask(too_large), Err(Error::TooLarge));
    world.ask(shrink(SIZE_MAX, None)).unwrap();
}

#[test]
fn what_is_not_whole_blocks_within_the_file_is_refused() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let good = world.blocks(2, 2);
    let size = 4 * BLOCK;
    let wrong = [
        Extent { offset: 1, ..good },
        Extent { length: 1, ..good },
        Extent { length: 0, ..good },
        Extent { address: 1, ..good },
        Extent {
            length: COMMIT_BYTES_MAX + BLOCK,
            ..good
        },
        Extent {
            offset: 3 * BLOCK,
            ..good
        },
        Extent {
            offset: u64::MAX - BLOCK + 1,
            ..good
        },
        Extent {
            address: u64::MAX - BLOCK + 1,
            ..good
        },
        Extent {
            address: SEGMENT_LENGTH_MAX,
            ..good
        },
    ];
    for extent in wrong {
        let reply = world.ask(commit(file, vec![extent], size));
        assert_eq!(reply, Err(Error::Invalid), "{extent:?}");
    }
    let earlier = Extent {
        offset: 0,
        address: good.address + good.length,
        ..good
    };
    let unordered = commit(file, vec![good, earlier], size);
    assert_eq!(world.ask(unordered), Err(Error::Invalid));
    world.ask(commit(file, vec![earlier, good], size)).unwrap();
    world.check();
}

#[test]
fn space_of_sealed_segments_is_given_back_once_and_an_empty_segment_goes() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 2), (4, 1)]);
    let segment = SegmentId(1);
    let drop_segment = Operation::DropSegment { segment };
    assert_eq!(world.lead(drop_segment.clone()), Err(Error::Busy));
    world.ask(unlink(Ino::ROOT, b"f", &[])).unwrap();
    let freed = world.all_freed();
    let reclaimed = |length| Operation::Reclaimed {
        segment,
        address: freed[0].address,
        length,
    };
    // A segment that is written is left alone.
    assert_eq!(world.read().freed((SegmentId(0), 0), 9).unwrap(), []);
    let early = world.lead(reclaimed(freed[0].length));
    assert_eq!(early, Err(Error::Busy));
    let seal = Operation::SealSegment {
        segment,
        length: 3 * BLOCK,
    };
    world.ask(seal).unwrap();
    let given = world.read().freed((SegmentId(0), 0), 9).unwrap();
    assert_eq!(given, freed);
    assert_eq!(world.lead(reclaimed(7)), Err(Error::Invalid));
    for _ in 0..2 {
        assert_eq!(world.lead(reclaimed(freed[0].length)), Ok(Outcome::Done));
        let left = 3 * BLOCK - freed[0].length;
        assert_eq!(world.statistics().freed_bytes, left);
        world.check();
    }
    for _ in 0..2 {
        let reply = world.lead(drop_segment.clone());
        assert_eq!(reply, Ok(Outcome::Step { done: true }));
    }
    assert_eq!(world.statistics().freed_bytes, 0);
    assert_eq!(world.read().segments(SegmentId(0), 9).unwrap(), []);
    // A retry after that.
    assert_eq!(world.lead(reclaimed(freed[0].length)), Ok(Outcome::Done));
    world.check();
}

#[test]
fn freed_space_is_listed_of_sealed_segments_only_from_any_place_on() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    for _ in 0..4 {
        world.new_segment();
        world.write(file, &[(0, 1), (2, 1), (4, 1)]);
    }
    world.ask(unlink(Ino::ROOT, b"f", &[])).unwrap();
    for segment in [2, 4].map(SegmentId) {
        let seal = Operation::SealSegment {
            segment,
            length: 3 * BLOCK,
        };
        world.ask(seal).unwrap();
    }
    let all = world.all_freed();
    assert_eq!(all.len(), 12);
    let sealed: Vec<_> = all
        .into_iter()
        .filter(|part| part.segment.0 % 2 == 0)
        .collect();
    assert_eq!(sealed.len(), 6);
    let list = |from, max| world.read().freed(from, max).unwrap();
    assert_eq!(list((SegmentId(0), 0), 100), sealed);
    assert_eq!(list((SegmentId(1), BLOCK), 4), sealed[..4]);
    assert_eq!(list((SegmentId(2), BLOCK), 3), sealed[1..4]);
    assert_eq!(list((SegmentId(3), 0), 100), sealed[3..]);
    assert_eq!(list((SegmentId(5), 0), 100), []);
    assert_eq!(list((SegmentId(0), 0), 0), []);
}

#[test]
fn data_that_three_files_share_go_with_the_last() {
    let mut world = World::new();
    let [a, b, c] = [b"a", b"b", b"c"].map(|name| world.make(Ino::ROOT, name, NewNode::File));
    world.write(a, &[(0, 10)]);
    for (to, length) in [(b, 10), (c, 6)] {
        let copy = Operation::CopyRange(CopyRange {
            from: a,
            from_offset: 0,
            to,
            to_offset: 0,
            length: length * BLOCK,
            clear_privileges: false,
        });
        world.ask(copy).unwrap();
        world.check();
    }
    assert_eq!(world.statistics().named_bytes, 10 * BLOCK);
    // The middle of one, the whole of another: what a third names stays.
    let freed = |world: &World| world.statistics().freed_bytes / BLOCK;
    let middle = vec![world.blocks(4, 4)];
    world.ask(commit(a, middle, 0)).unwrap();
    world.check();
    assert_eq!(freed(&world), 0);
    world.ask(unlink(Ino::ROOT, b"b", &[])).unwrap();
    world.check();
    assert_eq!(freed(&world), 2);
    world.ask(truncate(a, 0)).unwrap();
    world.check();
    // Its own four blocks, and two behind what the last one names.
    assert_eq!(freed(&world), 2 + 4 + 2);
    world.ask(truncate(c, 0)).unwrap();
    assert_eq!(freed(&world), 14);
    world.check();
}

#[test]
fn readers_get_the_latest_epoch_of_what_they_read() {
    let mut world = World::new();
    let [file, other] = [b"f", b"g"].map(|name| world.make(Ino::ROOT, name, NewNode::File));
    let epochs = |world: &World, ino| -> Vec<(u64, u64)> {
        let found = world.read().extents(ino, (0, u64::MAX), 9).unwrap();
        let found = found.iter();
        found
            .map(|part| (part.offset / BLOCK, part.epoch))
            .collect()
    };
    world.epoch = 7;
    world.write(file, &[(0, 2)]);
    assert_eq!(epochs(&world, file), [(0, 7)]);
    // Joined on either side; what stays apart keeps its own.
    world.epoch = 9;
    world.write(file, &[(2, 2)]);
    world.epoch = 8;
    world.write(file, &[(4, 2), (10, 1)]);
    assert_eq!(epochs(&world, file), [(0, 9), (10, 8)]);
    // Cut and copied.
    let copy = Operation::CopyRange(CopyRange {
        from: file,
        from_offset: BLOCK,
        to: other,
        to_offset: 3 * BLOCK,
        length: 2 * BLOCK,
        clear_privileges: false,
    });
    world.ask(copy).unwrap();
    assert_eq!(epochs(&world, other), [(3, 9)]);
    world.epoch = 12;
    let tail = world.blocks(0, 1);
    let shrink = Operation::SetAttributes(SetAttributes {
        ino: file,
        size: Some(BLOCK + 5),
        tail: Some(Tail {
            segment: tail.segment,
            address: tail.address,
            epoch: tail.epoch,
        }),
        ..SetAttributes::default()
    });
    world.ask(shrink).unwrap();
    assert_eq!(epochs(&world, file), [(0, 9), (1, 12)]);
    world.check();
}

/// A file of `extents` extents, in each of which `runs` single blocks are shared with another file.
fn with_shared_runs(world: &mut World, extents: u64, runs: u64) -> Ino {
    let [file, other] = [b"from", b"with"].map(|name| world.make(Ino::ROOT, name, NewNode::File));
    for number in 0..extents {
        // Between two extents lie addresses that nothing names.
        world.blocks(0, 1);
        world.write(file, &[(number * runs * 2, runs * 2)]);
    }
    for number in 0..extents * runs {
        let offset = number * 2 * BLOCK;
        let copy = Operation::CopyRange(CopyRange {
            from: file,
            from_offset: offset,
            to: other,
            to_offset: offset,
            length: BLOCK,
            clear_privileges: false,
        });
        world.ask(copy).unwrap();
    }
    file
}

#[test]
fn a_copy_of_many_shared_runs_goes_in_steps() {
    let mut world = World::new();
    let (extents, runs) = (20, 150);
    let from = with_shared_runs(&mut world, extents, runs);
    let to = world.make(Ino::ROOT, b"to", NewNode::File);
    for at in 0..extents {
        world.write(to, &[(at * runs * 2, runs * 2)]);
    }
    let old = world.read().extents(to, (0, u64::MAX), 9).unwrap()[0];
    let (end, mut at, mut steps) = (world.attributes(from).size, 0, 0);
    while at < end {
        let copy = Operation::CopyRange(CopyRange {
            from,
            from_offset: at,
            to,
            to_offset: at,
            length: end - at,
            clear_privileges: false,
        });
        let request = world.request((SESSION, 0), copy);
        let batch = Batch {
            operations: vec![request],
        };
        let mut txn = records::Txn::over(&world.records);
        apply(&mut txn, FILESYSTEM_ID, &batch).unwrap();
        let written = txn.into_writes().len();
        assert!(written <= 3 * STEP_MAX, "{written} records in one step");
        match attempt(&mut world.records, &batch).pop() {
            Some(Ok(Outcome::Copied { length, .. })) if length > 0 => at += length,
            other => panic!("{other:?}"),
        }
        steps += 1;
        world.check();
        // What was not copied yet is as it was.
        let rest = world.read().extents(to, (at, end), 99).unwrap();
        let is_old = |part: &Extent| part.address == old.address + part.offset;
        assert!(
            at == end || (rest.len() == 1 && is_old(&rest[0])),
            "{rest:?}"
        );
    }
    assert!(steps > 3, "{steps} steps for 6,000 runs");
    let all = |ino| world.read().extents(ino, (0, u64::MAX), 99).unwrap();
    assert_eq!(all(to), all(from));
}

#[test]
fn an_access_leaves_ctime_and_the_change_counter_alone() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let before = world.attributes(file);
    let atime = Time {
        seconds: 1 << 33,
        nanoseconds: 7,
    };
    for ino in [file, Ino::ROOT] {
        let before = world.attributes(ino);
        let set = Operation::SetAccessTime { ino, atime };
        let attributes = Attributes { atime, ..before };
        let right = Outcome::Changed {
            attributes: attributes.clone(),
            done: true,
        };
        assert_eq!(world.ask(set), Ok(right));
        assert_eq!(world.attributes(ino), attributes);
    }
    // As utimensat(2) asks for it, ctime changes.
    let set = Operation::SetAttributes(SetAttributes {
        ino: file,
        atime: Some(SetTime::To(atime)),
        ..SetAttributes::default()
    });
    world.ask(set).unwrap();
    let after = world.attributes(file);
    assert!(after.ctime > before.ctime && after.change > before.change);
    let nanoseconds = 1_000_000_000;
    let atime = Time {
        nanoseconds,
        ..atime
    };
    let set = |ino| Operation::SetAccessTime { ino, atime };
    assert_eq!(world.ask(set(file)), Err(Error::Invalid));
    assert_eq!(world.ask(set(Ino(99))), Err(Error::Stale));
    world.check();
}

#[test]
fn changed_content_and_owners_lose_capabilities_whoever_asks() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 2)]);
    let size = world.attributes(file).size;
    let set = |ino| SetAttributes {
        ino,
        ..SetAttributes::default()
    };
    let source = world.make(Ino::ROOT, b"source", NewNode::File);
    world.write(source, &[(0, 1)]);
    let data = world.blocks(1, 1);
    let changes = [
        commit(file, vec![data], size),
        truncate(file, BLOCK),
        truncate(file, 9 * BLOCK),
        Operation::Punch(Punch {
            ino: file,
            offset: 0,
            length: BLOCK,
            extend: false,
            clear_privileges: false,
        }),
        Operation::CopyRange(CopyRange {
            from: source,
            from_offset: 0,
            to: file,
            to_offset: 0,
            length: BLOCK,
            clear_privileges: false,
        }),
        Operation::SetAttributes(SetAttributes {
            uid: Some(0),
            ..set(file)
        }),
        Operation::SetAttributes(SetAttributes {
            gid: Some(0),
            ..set(file)
        }),
    ];
    let mode = Operation::SetAttributes(SetAttributes {
        mode: Some(0o6755),
        ..set(file)
    });
    world.ask(mode).unwrap();
    for change in changes {
        world.ask(capability(file)).unwrap();
        world.ask(change.clone()).unwrap();
        let names = world.read().xattr_names(file).unwrap();
        assert_eq!(names, [b""; 0], "{change:?}");
        // Whoever may keep the mode says so.
        assert_eq!(world.attributes(file).mode, 0o6755, "{change:?}");
        world.check();
    }
}

#[test]
fn a_mode_a_time_and_a_directorys_owner_keep_capabilities() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    let set = |ino| SetAttributes {
        ino,
        ..SetAttributes::default()
    };
    for kept in [
        Operation::SetAttributes(SetAttributes {
            mode: Some(0o4711),
            mtime: Some(SetTime::Now),
            ..set(file)
        }),
        // Of directories, chown(2) takes nothing.
        Operation::SetAttributes(SetAttributes {
            uid: Some(7),
            ..set(Ino::ROOT)
        }),
    ] {
        let Operation::SetAttributes(SetAttributes { ino, .. }) = kept else {
            panic!("{kept:?}");
        };
        world.ask(capability(ino)).unwrap();
        world.ask(kept).unwrap();
        assert_eq!(world.read().xattr_names(ino).unwrap().len(), 1);
    }
}

fn capability(ino: Ino) -> Operation {
    Operation::SetXattr {
        ino,
        name: b"security.capability".to_vec(),
        value: vec![2; 20],
        mode: XattrMode::Set,
    }
}

#[test]
fn the_check_finds_lost_space() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 3)]);
    world.ask(truncate(file, BLOCK)).unwrap();
    let seal = Operation::SealSegment {
        segment: SegmentId(1),
        length: 4 * BLOCK,
    };
    world.ask(seal).unwrap();
    let freed = world.all_freed();
    assert_eq!(freed.len(), 2);
    world.check();
    let found = |world: &World, given_back: &[Freed]| {
        check(&world.records, FILESYSTEM_ID, given_back).err()
    };
    let reclaimed = Operation::Reclaimed {
        segment: freed[0].segment,
        address: freed[0].address,
        length: freed[0].length,
    };
    world.lead(reclaimed).unwrap();
    world.check();
    let lost = found(&world, &[]).unwrap();
    assert_eq!(lost, "8192 bytes of SegmentId(1) are lost");
    // What has a record was not given back, nor was what is named.
    let twice = found(&world, &freed).unwrap();
    assert!(twice.ends_with("is free twice"), "{twice}");
    let named = Freed {
        address: 0,
        length: BLOCK,
        ..freed[0]
    };
    let both = found(&world, &[freed[0], named]).unwrap();
    assert!(both.ends_with("is named and free"), "{both}");
}

#[test]
fn content_is_told_with_the_inode_of_the_same_moment() {
    let mut world = World::new();
    let file = world.make(Ino::ROOT, b"f", NewNode::File);
    world.write(file, &[(0, 1), (4, 2), (9, 1)]);
    let ask = |world: &World, range, max| {
        let ino = file;
        let query = Query::Content { ino, range, max };
        match answer(&world.records, FILESYSTEM_ID, &query, 1 << 16).unwrap() {
            Ok(Answer::Content(inode, extents)) => Ok((inode, extents)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        }
    };
    let (inode, extents) = ask(&world, (BLOCK, 5 * BLOCK), 9).unwrap();
    assert_eq!(inode.size, 10 * BLOCK);
    let offsets: Vec<u64> = extents.iter().map(|extent| extent.offset).collect();
    assert_eq!(offsets, [4 * BLOCK]);
    assert_eq!(ask(&world, (0, SIZE_MAX), 2).unwrap().1.len(), 2);
    world.ask(unlink(Ino::ROOT, b"f", &[])).unwrap();
    assert_eq!(ask(&world, (0, SIZE_MAX), 2), Err(Error::Stale));
}
