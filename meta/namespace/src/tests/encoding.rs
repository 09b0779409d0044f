//! Bytes of records and batches.

use proptest::prelude::*;

use super::world::{FILESYSTEM_ID, World, make, rename, truncate, unlink};
use crate::keys::*;
use crate::*;

const T: Time = Time {
    seconds: -3,
    nanoseconds: 999_999_999,
};

const EXTENT: Extent = Extent {
    offset: 1 << 40,
    length: 8192,
    segment: SegmentId(u64::MAX),
    address: 4096,
    epoch: u64::MAX,
};

fn inode(body: Body) -> Inode {
    Inode {
        mode: 0o7777,
        uid: u32::MAX,
        gid: 0,
        nlink: 2,
        parent: Some(Ino(u64::MAX)),
        size: u64::MAX,
        atime: T,
        mtime: Time::default(),
        ctime: T,
        btime: T,
        change: 300,
        allocated: 8192,
        xattr_list_bytes: 65_536,
        xattr_value_bytes: 65_536,
        body,
    }
}

/// A record comes back from its bytes, and from no others: not with another version, not cut anywhere, not
/// with a byte more.
fn round_trip<V>(table: &Table<V>, record: V)
where
    V: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let bytes = table.encode(&record);
    assert_eq!(bytes[0], 1);
    assert_eq!(table.decode(b"key", &bytes).unwrap(), record);
    for version in (0..=255).filter(|version| *version != 1) {
        let mut other = bytes.clone();
        other[0] = version;
        let error = table.decode(b"key", &other).unwrap_err();
        assert!(error.detail.contains("damaged, or newer"), "{error}");
    }
    for end in 0..bytes.len() {
        table.decode(b"key", &bytes[..end]).unwrap_err();
    }
    table
        .decode(b"key", &[&bytes[..], b"x"].concat())
        .unwrap_err();
}

#[test]
fn every_inode_comes_back_from_its_bytes_alone() {
    let directory = Directory {
        parent: Ino(1),
        entries: 1_000_000,
        next_cookie: u64::MAX,
    };
    for body in [
        Body::File(Content::Empty),
        Body::File(Content::Inline(EXTENT)),
        Body::File(Content::Table(1 << 30)),
        Body::Directory(directory),
        Body::Symlink(b"to/\xff".to_vec()),
        Body::Fifo,
        Body::Socket,
        Body::CharacterDevice(u32::MAX),
        Body::BlockDevice(7),
    ] {
        round_trip(&INODES, inode(body));
    }
}

#[test]
fn every_other_record_comes_back_from_its_bytes_alone() {
    let statistics = Statistics {
        inodes: 1,
        named_bytes: 2,
        freed_bytes: 3,
    };
    round_trip(
        &FILESYSTEM,
        Filesystem {
            next_inode: 2,
            next_session: 1,
            next_segment: 1,
            statistics,
            removed_below: Some(vec![0x80, 0xff]),
        },
    );
    let (ino, kind) = (Ino(1 << 48 | 7), Kind::BlockDevice);
    round_trip(
        &DENTRIES,
        Dentry {
            ino,
            kind,
            cookie: 3,
        },
    );
    let name = vec![0xff; 255];
    round_trip(&COOKIES, CookieEntry { name, ino, kind });
    round_trip(&XATTRS, Xattr(vec![0; 65_536 / 64]));
    let (segment, address) = (SegmentId(9), 4096);
    round_trip(
        &EXTENTS,
        Run {
            length: 4096,
            segment,
            address,
            epoch: 300,
        },
    );
    round_trip(&ORPHANS, Orphan::Held(vec![SessionId(1), SessionId(300)]));
    round_trip(&ORPHANS, Orphan::Emptying);
    round_trip(&ORPHANS, Orphan::Temporary(SessionId(300)));
    round_trip(&HOLDS, ());
    round_trip(&FREED, 1 << 50);
    round_trip(
        &SHARED,
        Shared {
            length: 4096,
            others: u32::MAX,
        },
    );
    round_trip(
        &SESSIONS,
        Session {
            node: 5,
            incarnation: u128::MAX,
            opened_at: T,
            ending: true,
            open_segments: vec![segment],
        },
    );
    for state in [SegmentState::Open(vec![(0, 4096)]), SegmentState::Sealed] {
        round_trip(
            &SEGMENTS,
            Segment {
                session: SessionId(1),
                state,
                written: 8192,
                live: 4096,
            },
        );
    }
}

#[test]
fn every_reply_comes_back_from_its_slot() {
    let attributes = Attributes::of(Ino(3), &inode(Body::Fifo));
    let removed = Removed {
        ino: Ino(4),
        nlink: 0,
        kept: true,
    };
    let replies = [
        Ok(Outcome::Done),
        Ok(Outcome::Session(SessionId(1))),
        Ok(Outcome::Segment(SegmentId(1))),
        Ok(Outcome::Inode(attributes.clone())),
        Ok(Outcome::Changed {
            attributes: attributes.clone(),
            done: false,
        }),
        Ok(Outcome::Removed(Some(removed))),
        Ok(Outcome::Step { done: true }),
        Ok(Outcome::Copied {
            length: 5,
            attributes,
        }),
        Err(Error::NotFound),
        Err(Error::TooManyGaps),
        Err(Error::Changed),
    ];
    for reply in replies {
        round_trip(&SLOTS, Slot { sequence: 9, reply });
    }
}

fn requests() -> Vec<Request> {
    let mut world = World::new();
    let extents = vec![world.blocks(0, 3)];
    let operations = vec![
        make(Ino::ROOT, b"\xff", NewNode::CharacterDevice(259)),
        rename((Ino(3), b"file"), (Ino(2), b"f"), RenameMode::Exchange),
        super::world::commit(Ino(3), extents, 9000),
        truncate(Ino(3), 4096),
        unlink(Ino::ROOT, b"file", &[SessionId(1)]),
        Operation::Reap {
            ino: Ino(9),
            limit: 5,
        },
        Operation::OpenSession {
            node: 1,
            incarnation: u128::MAX,
        },
        Operation::DropFilesystem { limit: 7 },
        Operation::Rmdir {
            parent: Ino::ROOT,
            name: b"dir".to_vec(),
            openers: Openers::All { own: true },
        },
        rename(
            (Ino(3), b"file"),
            (Ino(2), b"f"),
            RenameMode::Whiteout(Whiteout {
                no_replace: true,
                uid: u32::MAX,
                gid: 300,
            }),
        ),
        Operation::MakeTemporary(MakeTemporary {
            parent: Ino::ROOT,
            mode: 0o600,
            uid: 300,
            gid: u32::MAX,
        }),
    ];
    let requests = operations.into_iter();
    requests
        .map(|operation| world.request((SessionId(1), 1023), operation))
        .collect()
}

#[test]
fn a_batch_comes_back_from_its_bytes_alone() {
    let batch = Batch {
        operations: requests(),
    };
    let bytes = batch.encode();
    assert_eq!(Batch::decode(&bytes), Ok(batch));
    for end in 0..bytes.len() {
        assert!(Batch::decode(&bytes[..end]).is_err(), "cut at {end}");
    }
    assert!(Batch::decode(&[&bytes[..], b"x"].concat()).is_err());
    let newer = [&[2], &bytes[1..]].concat();
    assert_eq!(Batch::decode(&newer), Err(DecodeError::Version(2)));
}

#[test]
fn a_damaged_record_stops_the_batch() {
    let mut world = World::new();
    let key = INODES.key(FILESYSTEM_ID, &Ino::ROOT);
    world.records.get_mut(&key).unwrap()[0] = 9;
    let operation = make(Ino::ROOT, b"x", NewNode::File);
    let batch = Batch {
        operations: vec![world.request((SessionId(1), 0), operation)],
    };
    let mut txn = records::Txn::over(&world.records);
    let error = apply(&mut txn, FILESYSTEM_ID, &batch).unwrap_err();
    assert!(error.detail.contains("version 9"), "{error}");
}

proptest! {
    #[test]
    fn inode_numbers_sort_by_shard_in_keys(a in any::<u64>(), b in any::<u64>()) {
        // Below the bit that tells namespaces from the cluster map's tables.
        let (a, b) = (Ino(a >> 1), Ino(b >> 1));
        let keys = [a, b].map(|ino| INODES.key(FILESYSTEM_ID, &ino));
        prop_assert_eq!(a.cmp(&b), keys[0].cmp(&keys[1]));
        let lead = u16::from_be_bytes([keys[0][0], keys[0][1]]);
        prop_assert_eq!(lead, 0x8000 | a.shard());
    }
}
