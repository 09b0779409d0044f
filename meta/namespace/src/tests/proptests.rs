//! Sequences of operations beside the model.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::acts::{Act, SESSIONS, act, data_act, resolve, session};
use super::model::{Model, Place, What};
use super::world::{FILESYSTEM_ID, Map, World, attempt};
use crate::keys::{FREED, INODES, number_at};
use crate::*;

/// A reply without the change counters, which the model does not have.
fn without_change(mut reply: Reply) -> Reply {
    if let Ok(
        Outcome::Inode(attributes)
        | Outcome::Changed { attributes, .. }
        | Outcome::Copied { attributes, .. },
    ) = &mut reply
    {
        attributes.change = 0;
    }
    reply
}

/// The tree, by all that reads can say.
fn compare(world: &World, model: &Model) {
    let namespace = world.read();
    for (number, node) in &model.nodes {
        let ino = Ino(*number);
        let mut attributes = namespace.attributes(ino).unwrap();
        attributes.change = 0;
        assert_eq!(attributes, model.attributes(*number));
        match &node.what {
            What::Directory(children) => compare_directory(namespace, ino, children),
            What::File(blocks) => {
                let mut found = BTreeMap::new();
                for extent in namespace.extents(ino, (0, u64::MAX), 1000).unwrap() {
                    for at in 0..extent.length / BLOCK {
                        let place = (extent.segment.0, extent.address / BLOCK + at);
                        let flushed = model.segments[&place.0].claimed[&place.1];
                        assert!(extent.epoch >= flushed, "{extent:?} of {ino:?}");
                        assert_eq!(found.insert(extent.offset / BLOCK + at, place), None);
                    }
                }
                assert_eq!(&found, blocks, "{ino:?}");
            }
            What::Symlink(target) => assert_eq!(&namespace.readlink(ino).unwrap(), target),
            What::Other(..) => {}
        }
        let names = namespace.xattr_names(ino).unwrap();
        assert!(names.iter().eq(node.xattrs.keys()), "attributes of {ino:?}");
        for (name, value) in &node.xattrs {
            assert_eq!(&namespace.xattr(ino, name).unwrap(), value);
        }
    }
    let statistics = world.statistics();
    assert_eq!(statistics.inodes, model.nodes.len() as u64);
    assert_eq!(statistics.named_bytes, model.named().len() as u64 * BLOCK);
    let places = |ranges: Vec<Freed>| -> BTreeSet<Place> {
        let blocks = ranges.into_iter().flat_map(|range| {
            let blocks = range.address / BLOCK..(range.address + range.length) / BLOCK;
            blocks.map(move |at| (range.segment.0, at))
        });
        blocks.collect()
    };
    let freed = model.freed();
    assert_eq!(places(world.all_freed()), freed);
    let sealed = freed
        .into_iter()
        .filter(|place| model.segments[&place.0].sealed);
    let listed = namespace.freed((SegmentId(0), 0), 10_000).unwrap();
    assert_eq!(places(listed), sealed.collect());
}

fn compare_directory(namespace: Namespace<'_>, ino: Ino, children: &BTreeMap<Vec<u8>, u64>) {
    let right = children.iter().map(|(name, ino)| (name.clone(), Ino(*ino)));
    let right: Vec<_> = right.collect();
    let listed = namespace.list(ino, b"", 1000).unwrap();
    let listed: Vec<_> = listed
        .into_iter()
        .map(|(name, entry)| (name, entry.ino))
        .collect();
    assert_eq!(listed, right);
    let mut read: Vec<_> = (namespace.readdir(ino, 0, 1000).unwrap())
        .into_iter()
        .map(|entry| (entry.name, entry.ino))
        .collect();
    read.sort();
    assert_eq!(read, right);
    for (name, child) in right {
        assert_eq!(namespace.lookup(ino, &name).unwrap().0, child);
    }
}

/// Whatever differs between two states of an inode but the last access, its change counter says so: of its
/// record, and of where its data are.
fn check_change_counters(before: &Map, after: &Map) {
    let extents = |records: &Map, ino: Ino| {
        let namespace = Namespace::new(records, FILESYSTEM_ID);
        namespace.extents(ino, (0, u64::MAX), 1000).ok()
    };
    let prefix = INODES.key(FILESYSTEM_ID, &());
    for (key, old) in before.range(prefix.clone()..) {
        let Some(new) = after.get(key).filter(|_| key.starts_with(&prefix)) else {
            continue;
        };
        let (old, new) = (
            INODES.decode(key, old).unwrap(),
            INODES.decode(key, new).unwrap(),
        );
        let same = Inode {
            atime: new.atime,
            ..old.clone()
        };
        assert!(same == new || old.change < new.change, "{old:?} {new:?}");
        let ino = Ino(number_at(&key[prefix.len()..], 0).unwrap());
        let now = extents(after, ino);
        // What is being emptied is nobody's any more.
        let is_same = now.is_none() || extents(before, ino) == now;
        assert!(is_same || old.change < new.change, "{ino:?} {new:?}");
    }
}

/// Runs acts beside the model, comparing after each. The requests and their replies.
fn run(acts: &[(Act, u8)]) -> (World, Vec<(Request, Reply)>) {
    let mut world = World::new();
    let more = [world.open_session(2), world.open_session(3)];
    assert_eq!(more, [SessionId(2), SessionId(3)]);
    let at = world.attributes(Ino::ROOT).btime;
    let mut model = Model::new(&SESSIONS, at);
    model.nodes.get_mut(&1).unwrap().change = world.attributes(Ino::ROOT).change;
    let mut log: Vec<(Request, Reply)> = Vec::new();
    for (act, choice) in acts {
        let Some(operation) = resolve(&model, &world.records, act) else {
            continue;
        };
        let from = session(&model, &operation, *choice);
        if from.0 != SessionId::NONE && !model.sessions.contains(&from.0.0) {
            continue;
        }
        let request = world.request(from, operation);
        let before = world.records.clone();
        let reply = world.apply(&request);
        assert_eq!(
            without_change(reply.clone()),
            model.apply(&request),
            "{request:?}"
        );
        compare(&world, &model);
        world.check();
        check_change_counters(&before, &world.records);
        for (number, node) in &mut model.nodes {
            node.change = world.attributes(Ino(*number)).change;
        }
        log.push((request, reply));
        check_retries(&mut world, &model, &log);
    }
    (world, log)
}

/// The filesystem is dropped in steps. From the first one on the last requests before are answered with
/// ESTALE, and in the end nothing is left.
fn remove(world: &mut World, log: &[(Request, Reply)], limit: u32) {
    let drop = Operation::DropFilesystem { limit };
    while world.lead(drop.clone()) == Ok(Outcome::Step { done: false }) {
        let before = world.records.clone();
        for (request, _) in log.iter().rev().take(3) {
            assert_eq!(world.apply(request), Err(Error::Stale), "{request:?}");
        }
        assert_eq!(world.records, before);
    }
    assert!(world.records.is_empty());
}

/// The last request of each slot, repeated now, gets its reply and changes nothing. That of a session which
/// has ended is refused.
fn check_retries(world: &mut World, model: &Model, log: &[(Request, Reply)]) {
    let mut slots = BTreeSet::new();
    let before = world.records.clone();
    for (request, reply) in log.iter().rev() {
        let is_last = slots.insert((request.session, request.slot));
        if request.session == SessionId::NONE || !is_last {
            continue;
        }
        let right = match model.sessions.contains(&request.session.0) {
            true => reply.clone(),
            false => Err(Error::Stale),
        };
        assert_eq!(world.apply(request), right, "{request:?} was repeated");
        assert_eq!(world.records, before, "{request:?} was repeated");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn every_reply_and_the_whole_tree_are_the_models(
        acts in prop::collection::vec((act(), any::<u8>()), 1..60),
        limit in 0..20_u32,
    ) {
        let (mut world, log) = run(&acts);
        remove(&mut world, &log, limit);
    }

    #[test]
    fn files_that_share_data_change_apart(
        acts in prop::collection::vec((data_act(), any::<u8>()), 1..60),
    ) {
        let mut all = vec![(Act::NewSegment, 0)];
        all.extend((0..4).map(|name| (Act::Make(0, name, 0), 0)));
        all.extend(acts);
        run(&all);
    }

    #[test]
    fn batches_cut_anywhere_give_the_same_bytes(
        acts in prop::collection::vec((act(), any::<u8>()), 1..60),
        cuts in prop::collection::vec(1..9_usize, 60),
    ) {
        let (world, log) = run(&acts);
        let mut other = World::new();
        other.open_session(2);
        other.open_session(3);
        let mut left = log.as_slice();
        for cut in cuts {
            let (now, rest) = left.split_at(cut.min(left.len()));
            left = rest;
            let operations = now.iter().map(|(request, _)| request.clone()).collect();
            let batch = Batch::decode(&Batch { operations }.encode()).unwrap();
            let replies = attempt(&mut other.records, &batch);
            let right: Vec<Reply> = now.iter().map(|(_, reply)| reply.clone()).collect();
            prop_assert_eq!(replies, right);
        }
        prop_assert_eq!(left.len(), 0);
        prop_assert_eq!(world.records, other.records);
    }

    #[test]
    fn any_bytes_are_refused_or_keep_the_invariants(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        fuzzing::batch(&bytes);
    }
}

/// Random bytes are seldom a batch: here is one, with a byte changed at each place.
#[test]
fn changed_batches_are_refused_or_keep_the_invariants() {
    let mut world = World::new();
    let operations = vec![
        super::world::make(Ino::ROOT, b"x", NewNode::Directory),
        super::world::rename((Ino::ROOT, b"file"), (Ino(2), b"f"), RenameMode::Replace),
        super::world::commit(Ino(3), vec![world.blocks(0, 3)], 9000),
        super::world::truncate(Ino(3), 4096),
        super::world::unlink(Ino(2), b"f", &[SessionId(1)]),
        super::world::rename(
            (Ino::ROOT, b"directory"),
            (Ino(4), b"moved"),
            RenameMode::Whiteout(Whiteout {
                no_replace: true,
                uid: 1,
                gid: 2,
            }),
        ),
        Operation::MakeTemporary(MakeTemporary {
            parent: Ino::ROOT,
            mode: 0o600,
            uid: 1,
            gid: 2,
        }),
        Operation::Link {
            ino: Ino(6),
            parent: Ino(4),
            name: b"named".to_vec(),
        },
    ];
    let requests = operations.into_iter().enumerate();
    let requests = requests.map(|(slot, operation)| Request {
        session: SessionId(1),
        slot: u16::try_from(slot).unwrap(),
        sequence: 1,
        at: Time::default(),
        operation,
    });
    let batch = Batch {
        operations: requests.collect(),
    };
    let bytes = batch.encode();
    let replies = fuzzing::batch(&bytes);
    assert_eq!(replies.len(), batch.operations.len());
    assert!(replies.iter().all(Reply::is_ok), "{replies:?}");
    for at in 0..bytes.len() {
        for value in [0, 1, 2, 3, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] = value;
            fuzzing::batch(&changed);
        }
    }
    assert!(Batch::decode(&bytes[..bytes.len() - 1]).is_err());
}

#[test]
fn freed_space_has_the_key_that_the_table_says() {
    let key = FREED.key(FilesystemId(0x0102_0304), &(SegmentId(5), 6_u64));
    let mut right = vec![0x80, 0, 1, 2, 3, 4, 0x0c];
    right.extend(5_u64.to_be_bytes());
    right.extend(6_u64.to_be_bytes());
    assert_eq!(key, right);
}
