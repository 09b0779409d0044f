//! Removal of whole filesystems.

use records::Txn;

use super::world::{FILESYSTEM_ID, Map, SESSION, World, attempt, make, unlink};
use crate::keys::FILESYSTEM;
use crate::*;

/// A filesystem with records in all tables.
fn full() -> World {
    let mut world = World::new();
    let second = world.open_session(2);
    let [copied, held, emptying] = [&b"copied"[..], b"held", b"emptying"].map(|name| {
        let file = world.make(Ino::ROOT, name, NewNode::File);
        world.write(file, &(0..70).map(|at| (at * 2, 1)).collect::<Vec<_>>());
        file
    });
    let copy = Operation::CopyRange(CopyRange {
        from: copied,
        from_offset: 0,
        to: held,
        to_offset: 0,
        length: 10 * BLOCK,
        clear_privileges: false,
    });
    world.ask(copy).unwrap();
    let set = Operation::SetXattr {
        ino: emptying,
        name: b"user.x".to_vec(),
        value: vec![1],
        mode: XattrMode::Set,
    };
    world.ask(set).unwrap();
    world.ask(unlink(Ino::ROOT, b"held", &[second])).unwrap();
    world.ask(unlink(Ino::ROOT, b"emptying", &[])).unwrap();
    for number in 0..700 {
        world.make(Ino::ROOT, number.to_string().as_bytes(), NewNode::Directory);
    }
    world.check();
    let tables: std::collections::BTreeSet<u8> = world.records.keys().map(|key| key[6]).collect();
    assert_eq!(tables, (0x01..=0x0d).collect(), "all tables have records");
    world
}

/// Every question but that for statistics.
fn queries() -> Vec<Query> {
    let (from, max) = (Ino(0), 9);
    vec![
        Query::Inode(Ino::ROOT),
        Query::Orphans { from, max },
        Query::Held {
            session: SESSION,
            from,
            max,
        },
        Query::Sessions {
            from: SessionId(0),
            max,
        },
        Query::Segments {
            from: SegmentId(0),
            max,
        },
        Query::Freed {
            from: (SegmentId(0), 0),
            max,
        },
        Query::FilesAt {
            blocks: Vec::new(),
            from: SearchFrom::START,
            max,
        },
        Query::NameOf {
            ino: Ino::ROOT,
            behind: 0,
            max,
        },
    ]
}

fn ask(world: &World, query: &Query) -> Result<Answer, Error> {
    answer(&world.records, FILESYSTEM_ID, query, 1 << 20).unwrap()
}

#[test]
fn a_filesystem_goes_in_bounded_steps_and_does_nothing_else_from_the_first_on() {
    let mut world = full();
    let repeated = world.request((SESSION, 3), make(Ino::ROOT, b"x", NewNode::File));
    world.apply(&repeated).unwrap();
    let other = world.records.clone().into_iter().map(|(mut key, value)| {
        key[5] += 1;
        (key, value)
    });
    let other: Vec<_> = other.collect();
    world.records.extend(other.iter().cloned());
    let create = Operation::CreateFilesystem {
        mode: 0o755,
        uid: 0,
        gid: 0,
    };
    let drop = Operation::DropFilesystem { limit: 300 };
    let (mut steps, mut before) = (0, world.records.len());
    while world.lead(drop.clone()) == Ok(Outcome::Step { done: false }) {
        steps += 1;
        assert!(world.records.len() + 300 == before, "a step has its limit");
        before = world.records.len();
        let records = world.records.clone();
        assert_eq!(
            ask(&world, &Query::Statistics),
            Ok(Answer::Statistics(None))
        );
        for query in queries() {
            assert_eq!(ask(&world, &query), Err(Error::Stale), "{query:?}");
        }
        assert_eq!(world.lead(create.clone()), Err(Error::Stale));
        let end = Operation::EndSession { session: SESSION };
        assert_eq!(world.lead(end), Err(Error::Stale));
        assert_eq!(world.apply(&repeated), Err(Error::Stale), "a retry");
        assert_eq!(world.ask(Operation::NewSegment), Err(Error::Stale));
        assert_eq!(world.records, records);
    }
    assert!(steps > 5, "{steps} steps");
    assert_eq!(
        world.records,
        other.into_iter().collect(),
        "the other one stays"
    );
    assert_eq!(world.lead(drop), Ok(Outcome::Step { done: true }));
    assert_eq!(
        ask(&world, &Query::Statistics),
        Ok(Answer::Statistics(None))
    );
    for query in queries() {
        assert_eq!(ask(&world, &query), Err(Error::Stale), "{query:?}");
    }
    assert_eq!(world.ask(Operation::NewSegment), Err(Error::Stale));
    world.check();
}

#[test]
fn the_smallest_steps_come_to_the_same_end_in_one_batch() {
    let mut world = full();
    let count = world.records.len();
    let requests = (0..count).map(|_| Request {
        session: SessionId::NONE,
        slot: 0,
        sequence: 0,
        at: Time::default(),
        operation: Operation::DropFilesystem { limit: 0 },
    });
    let operations = requests.collect();
    let replies = attempt(&mut world.records, &Batch { operations });
    let done = replies
        .iter()
        .position(|reply| *reply == Ok(Outcome::Step { done: true }));
    assert_eq!(
        done,
        Some(count - 2),
        "the last of them goes with the filesystem's own"
    );
    assert!(world.records.is_empty());
}

#[test]
fn a_session_does_not_remove_its_filesystem() {
    let mut world = World::new();
    let drop = Operation::DropFilesystem { limit: 9 };
    assert!(drop.frees_space() && drop.is_of_leader());
    assert_eq!(world.ask(drop), Err(Error::Invalid));
    let found = FILESYSTEM.get(&world.records, FILESYSTEM_ID, &()).unwrap();
    assert_eq!(found.unwrap().removed_below, None);
}

#[test]
fn the_filesystems_of_a_group_are_found_by_their_records() {
    let mut records = Map::new();
    assert_eq!(filesystems(&records).unwrap(), []);
    let wanted = [0, 7, 8, u32::MAX].map(FilesystemId);
    for id in wanted {
        let create = Operation::CreateFilesystem {
            mode: 0o755,
            uid: 0,
            gid: 0,
        };
        let request = World::empty().request((SessionId::NONE, 0), create);
        let batch = Batch {
            operations: vec![request],
        };
        let mut txn = Txn::over(&records);
        assert_eq!(apply(&mut txn, id, &batch).unwrap(), [Ok(Outcome::Done)]);
        let writes = txn.into_writes();
        records.extend(
            writes
                .into_iter()
                .filter_map(|(key, value)| Some((key, value?))),
        );
    }
    assert_eq!(filesystems(&records).unwrap(), wanted);
}
