//! Sessions, slots and retries.

use super::world::{FILESYSTEM_ID, SESSION, World, attempt, commit, make, truncate, unlink};
use crate::keys::{FILESYSTEM, HOLDS, SLOTS};
use crate::*;

#[test]
fn only_the_next_sequence_number_is_new() {
    let mut world = World::new();
    let request = |sequence, slot, name: &[u8]| Request {
        session: SESSION,
        slot,
        sequence,
        at: Time::default(),
        operation: make(Ino::ROOT, name, NewNode::File),
    };
    assert_eq!(world.apply(&request(2, 0, b"a")), Err(Error::OutOfSequence));
    assert_eq!(world.apply(&request(0, 0, b"a")), Err(Error::OutOfSequence));
    let first = world.apply(&request(1, 0, b"a"));
    let second = world.apply(&request(2, 0, b"b"));
    assert!(first.is_ok() && second.is_ok());
    let records = world.records.clone();
    // A repeated number is the repeated request, whatever it says.
    assert_eq!(world.apply(&request(2, 0, b"else")), second);
    assert_eq!(world.apply(&request(1, 0, b"a")), Err(Error::OutOfSequence));
    assert_eq!(world.apply(&request(4, 0, b"c")), Err(Error::OutOfSequence));
    assert_eq!(
        world.apply(&request(1, SLOTS_MAX, b"c")),
        Err(Error::Invalid)
    );
    assert_eq!(world.records, records);
    // A refusal is kept like any reply.
    let refused = world.apply(&request(1, 1, b"a"));
    assert_eq!(refused, Err(Error::Exists));
    world.ask_twice_after(unlink(Ino::ROOT, b"a", &[]));
    assert_eq!(world.apply(&request(1, 1, b"a")), refused);
}

impl World {
    fn filesystem(&self) -> Filesystem {
        FILESYSTEM
            .get(&self.records, FILESYSTEM_ID, &())
            .unwrap()
            .unwrap()
    }

    /// Another slot's request, given twice in one batch.
    fn ask_twice_after(&mut self, operation: Operation) {
        let request = self.request((SESSION, 9), operation);
        let batch = Batch {
            operations: vec![request.clone(), request],
        };
        let replies = attempt(&mut self.records, &batch);
        assert!(replies[0].is_ok() && replies[0] == replies[1]);
    }
}

#[test]
fn sessions_are_found_by_their_incarnation_and_never_come_back() {
    let mut world = World::new();
    assert_eq!(world.open_session(1), SESSION);
    let second = world.open_session(2);
    assert_eq!(second, SessionId(2));
    let end = Operation::EndSession { session: second };
    for _ in 0..2 {
        assert_eq!(world.lead(end.clone()), Ok(Outcome::Step { done: true }));
    }
    assert_eq!(world.open_session(2), SessionId(3));
    let late = world.request((second, 0), Operation::NewSegment);
    assert_eq!(world.apply(&late), Err(Error::Stale));
    let all = world.read().sessions(SessionId(0), 9).unwrap();
    assert_eq!(all.len(), 2);
    world.check();
}

#[test]
fn a_session_that_ends_leaves_nothing_but_sealed_segments() {
    let mut world = World::new();
    let second = world.open_session(2);
    for number in 0..2100 {
        let name = format!("{number}").into_bytes();
        let file = world.make(Ino::ROOT, &name, NewNode::File);
        if number == 0 {
            world.write(file, &[(0, 1)]);
        }
        let holders = if number % 2 == 0 {
            vec![SESSION]
        } else {
            vec![SESSION, second]
        };
        world.ask(unlink(Ino::ROOT, &name, &holders)).unwrap();
    }
    let end = Operation::EndSession { session: SESSION };
    for done in [false, false, true] {
        assert_eq!(world.lead(end.clone()), Ok(Outcome::Step { done }));
        world.check();
        // Nothing more is done for it from the first step on.
        let late = world.request((SESSION, 5), Operation::NewSegment);
        assert_eq!(world.apply(&late), Err(Error::Stale));
    }
    assert_eq!(world.statistics().inodes, 1 + 1050);
    let segment = &world.read().segments(SegmentId(0), 9).unwrap()[0].1;
    assert_eq!(segment.state, SegmentState::Sealed);
    for prefix in [
        SLOTS.key(FILESYSTEM_ID, &SESSION),
        HOLDS.key(FILESYSTEM_ID, &SESSION),
    ] {
        let mut left = world.records.range(prefix.clone()..);
        assert!(left.next().is_none_or(|(key, _)| !key.starts_with(&prefix)));
    }
    let end = Operation::EndSession { session: second };
    for done in [false, true] {
        assert_eq!(world.lead(end.clone()), Ok(Outcome::Step { done }));
    }
    assert_eq!(world.statistics().inodes, 1);
    world.check();
}

#[test]
fn a_session_writes_a_bounded_number_of_segments() {
    let mut world = World::new();
    for number in 1..=OPEN_SEGMENTS_MAX as u64 {
        let reply = world.ask(Operation::NewSegment);
        assert_eq!(reply, Ok(Outcome::Segment(SegmentId(number))));
    }
    assert_eq!(world.ask(Operation::NewSegment), Err(Error::TooManyOpen));
    let seal = Operation::SealSegment {
        segment: SegmentId(3),
        length: 0,
    };
    world.ask(seal.clone()).unwrap();
    assert_eq!(world.ask(seal), Err(Error::Invalid));
    world.ask(Operation::NewSegment).unwrap();
    world.check();
}

#[test]
fn who_has_no_session_changes_nothing() {
    let mut world = World::new();
    let before = world.records.clone();
    assert_eq!(
        world.lead(make(Ino::ROOT, b"x", NewNode::File)),
        Err(Error::Stale)
    );
    let create = Operation::CreateFilesystem {
        mode: 0,
        uid: 9,
        gid: 9,
    };
    assert_eq!(world.lead(create.clone()), Ok(Outcome::Done));
    assert_eq!(world.records, before);
    // Nor is another session's end, or the filesystem's beginning, for a session to ask.
    assert_eq!(world.ask(create), Err(Error::Invalid));
    assert_eq!(world.records, before);
    let mut none = World::empty();
    let open = Operation::OpenSession {
        node: 1,
        incarnation: 1,
    };
    assert_eq!(none.lead(open), Err(Error::Stale));
    assert!(none.records.is_empty());
}

#[test]
fn a_session_asks_nothing_that_is_the_leaders() {
    let mut world = World::new();
    let second = world.open_session(2);
    let held = world.make(Ino::ROOT, b"held", NewNode::File);
    world.write(held, &[(0, 70)]);
    world
        .ask(unlink(Ino::ROOT, b"held", &[SESSION, second]))
        .unwrap();
    let segment = SegmentId(1);
    let before = world.records.clone();
    for operation in [
        Operation::OpenSession {
            node: 3,
            incarnation: 3,
        },
        Operation::EndSession { session: second },
        Operation::EndSession { session: SESSION },
        Operation::ReleaseOrphan {
            ino: held,
            session: second,
        },
        Operation::Reap {
            ino: held,
            limit: 1,
        },
        Operation::Reclaimed {
            segment,
            address: 0,
            length: BLOCK,
        },
        Operation::DropSegment { segment },
        Operation::RaiseNumbers,
    ] {
        let request = Request {
            session: SESSION,
            slot: 7,
            sequence: 1,
            at: Time::default(),
            operation,
        };
        assert_eq!(world.apply(&request), Err(Error::Invalid), "{request:?}");
        assert_eq!(world.records, before, "{request:?}");
    }
    let own = Operation::ReleaseOrphan {
        ino: held,
        session: SESSION,
    };
    assert_eq!(world.ask(own), Ok(Outcome::Done));
    let orphans = world.read().orphans(Ino(0), 9).unwrap();
    assert_eq!(orphans, [(held, Orphan::Held(vec![second]))]);
    world.check();
}

/// Orphans that one session holds: files of 60 extents, or of 60 attributes. And segments with gaps.
fn with_much_to_end() -> World {
    let mut world = World::new();
    for number in 0..120_u64 {
        let name = number.to_string().into_bytes();
        let file = world.make(Ino::ROOT, &name, NewNode::File);
        if number % 2 == 0 {
            let pieces: Vec<_> = (0..60).map(|at| (at * 2, 1)).collect();
            world.write(file, &pieces);
        } else {
            for attribute in 0..60 {
                let set = Operation::SetXattr {
                    ino: file,
                    name: format!("user.{attribute}").into_bytes(),
                    value: vec![1],
                    mode: XattrMode::Create,
                };
                world.ask(set).unwrap();
            }
        }
        world.ask(unlink(Ino::ROOT, &name, &[SESSION])).unwrap();
    }
    let file = world.make(Ino::ROOT, b"gaps", NewNode::File);
    for _ in 1..OPEN_SEGMENTS_MAX {
        world.new_segment();
        for _ in 0..200 {
            world.blocks(0, 1);
            let extent = world.blocks(0, 1);
            world.ask(commit(file, vec![extent], BLOCK)).unwrap();
        }
    }
    for slot in 1..1000 {
        let request = world.request((SESSION, slot), truncate(file, 0));
        world.apply(&request).unwrap();
    }
    world
}

#[test]
fn each_step_of_a_sessions_end_is_bounded() {
    let mut world = with_much_to_end();
    let mut steps = 0;
    loop {
        let request = world.request(
            (SessionId::NONE, 0),
            Operation::EndSession { session: SESSION },
        );
        let batch = Batch {
            operations: vec![request],
        };
        let mut txn = records::Txn::over(&world.records);
        apply(&mut txn, FILESYSTEM_ID, &batch).unwrap();
        let written = txn.into_writes().len();
        assert!(written <= 3 * STEP_MAX, "{written} records in one step");
        let replies = attempt(&mut world.records, &batch);
        world.check();
        steps += 1;
        assert!(steps < 100, "it ends");
        if replies == [Ok(Outcome::Step { done: true })] {
            break;
        }
    }
    assert!(steps > 5, "{steps} steps for 12,000 records");
    assert_eq!(world.read().sessions(SessionId(0), 9).unwrap(), []);
    // What was emptied in part is left to be reaped.
    for (ino, orphan) in world.read().orphans(Ino(0), 1000).unwrap() {
        assert_eq!(orphan, Orphan::Emptying);
        let reap = Operation::Reap { ino, limit: 1000 };
        assert_eq!(world.lead(reap), Ok(Outcome::Step { done: true }));
    }
    world.check();
    assert_eq!(world.statistics().inodes, 2);
}

#[test]
fn after_a_recovery_no_number_is_given_that_may_have_been_given_before() {
    let mut world = World::new();
    let made = |world: &mut World| match world.ask(Operation::NewSegment).unwrap() {
        Outcome::Segment(id) => id.0,
        other => panic!("{other:?}"),
    };
    let first = made(&mut world);
    let before = world.filesystem();
    for round in 1..=2 {
        assert_eq!(world.lead(Operation::RaiseNumbers), Ok(Outcome::Done));
        let raised = world.filesystem();
        assert_eq!(raised.next_inode, before.next_inode + (round << 32));
        assert_eq!(raised.next_session, before.next_session + (round << 16));
        assert_eq!(raised.statistics, before.statistics);
    }
    assert_eq!(made(&mut world), first + 1 + (2 << 16));
}
