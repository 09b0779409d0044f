//! A filesystem in a map, and requests to it.

use std::collections::BTreeMap;

use records::Txn;

use crate::keys::{FREED, INODES, number_at};
use crate::*;

pub(super) type Map = BTreeMap<Vec<u8>, Vec<u8>>;

pub(super) const FILESYSTEM_ID: FilesystemId = FilesystemId(7);

pub(super) struct World {
    pub(super) records: Map,
    /// Last sequence numbers.
    sequences: BTreeMap<(SessionId, u16), u64>,
    clock: i64,
    /// A segment that [`World::blocks`] allots from, and its next address.
    segment: Option<(SegmentId, u64)>,
    /// Ranges that were given back.
    pub(super) given_back: Vec<Freed>,
    /// Of the map in which the blocks are flushed.
    pub(super) epoch: u64,
}

pub(super) fn attempt(records: &mut Map, batch: &Batch) -> Vec<Reply> {
    let mut txn = Txn::over(&*records);
    let replies = apply(&mut txn, FILESYSTEM_ID, batch).unwrap();
    let writes = txn.into_writes();
    for (key, value) in writes {
        match value {
            Some(value) => records.insert(key, value),
            None => records.remove(&key),
        };
    }
    replies
}

pub(super) const SESSION: SessionId = SessionId(1);

impl World {
    /// Without a filesystem.
    pub(super) fn empty() -> Self {
        Self {
            records: Map::new(),
            sequences: BTreeMap::new(),
            clock: 0,
            segment: None,
            given_back: Vec::new(),
            epoch: 1,
        }
    }

    /// With a filesystem and session 1.
    pub(super) fn new() -> Self {
        let mut world = Self::empty();
        let create = Operation::CreateFilesystem {
            mode: 0o755,
            uid: 0,
            gid: 0,
        };
        assert_eq!(world.lead(create), Ok(Outcome::Done));
        assert_eq!(world.open_session(1), SESSION);
        world
    }

    pub(super) fn open_session(&mut self, node: u64) -> SessionId {
        match self.lead(open_session(node)) {
            Ok(Outcome::Session(session)) => session,
            other => panic!("{other:?}"),
        }
    }

    /// The next request of a slot.
    pub(super) fn request(
        &mut self,
        (session, slot): (SessionId, u16),
        operation: Operation,
    ) -> Request {
        self.clock += 1;
        let at = Time {
            seconds: self.clock,
            nanoseconds: 5,
        };
        let mut sequence = 0;
        if session != SessionId::NONE {
            let last = self.sequences.entry((session, slot)).or_default();
            *last += 1;
            sequence = *last;
        }
        Request {
            session,
            slot,
            sequence,
            at,
            operation,
        }
    }

    pub(super) fn apply(&mut self, request: &Request) -> Reply {
        let batch = Batch {
            operations: vec![request.clone()],
        };
        let range = given_back_by(&self.records, FILESYSTEM_ID, &request.operation).unwrap();
        let reply = attempt(&mut self.records, &batch).pop().unwrap();
        if reply.is_ok() {
            self.given_back.extend(range);
        }
        reply
    }

    pub(super) fn lead(&mut self, operation: Operation) -> Reply {
        let request = self.request((SessionId::NONE, 0), operation);
        self.apply(&request)
    }

    /// As session 1.
    pub(super) fn ask(&mut self, operation: Operation) -> Reply {
        let request = self.request((SESSION, 0), operation);
        self.apply(&request)
    }

    pub(super) fn make(&mut self, parent: Ino, name: &[u8], node: NewNode) -> Ino {
        match self.ask(make(parent, name, node)) {
            Ok(Outcome::Inode(attributes)) => attributes.ino,
            other => panic!("{name:x?}: {other:?}"),
        }
    }

    /// Names so many fresh blocks of a file at these block offsets.
    pub(super) fn write(&mut self, ino: Ino, pieces: &[(u64, u64)]) {
        let extents = pieces
            .iter()
            .map(|(offset, count)| self.blocks(*offset, *count))
            .collect::<Vec<_>>();
        let end = extents.iter().map(Extent::end).max().unwrap_or(0);
        let commit = commit(ino, extents, end);
        self.ask(commit).unwrap();
    }

    /// An extent of fresh data for a file's blocks.
    pub(super) fn blocks(&mut self, offset: u64, count: u64) -> Extent {
        if self.segment.is_none() {
            self.new_segment();
        }
        let (segment, address) = self.segment.unwrap();
        let length = count * BLOCK;
        self.segment = Some((segment, address + length));
        Extent {
            offset: offset * BLOCK,
            length,
            segment,
            address,
            epoch: self.epoch,
        }
    }

    /// Lets [`World::blocks`] allot from a new segment.
    pub(super) fn new_segment(&mut self) {
        match self.ask(Operation::NewSegment) {
            Ok(Outcome::Segment(segment)) => self.segment = Some((segment, 0)),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn read(&self) -> Namespace<'_> {
        Namespace::new(&self.records, FILESYSTEM_ID)
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.read().statistics().unwrap().unwrap()
    }

    pub(super) fn attributes(&self, ino: Ino) -> Attributes {
        self.read().attributes(ino).unwrap()
    }

    /// An inode's record, also when it is being emptied.
    pub(super) fn record(&self, ino: Ino) -> Inode {
        let found = INODES.get(&self.records, FILESYSTEM_ID, &ino).unwrap();
        found.unwrap()
    }

    pub(super) fn all_freed(&self) -> Vec<Freed> {
        all_freed(&self.records)
    }

    #[track_caller]
    pub(super) fn check(&self) {
        check(&self.records, FILESYSTEM_ID, &self.given_back).unwrap();
    }
}

/// The records of freed space, also in segments that are not sealed.
pub(super) fn all_freed(records: &Map) -> Vec<Freed> {
    let mut found = Vec::new();
    FREED
        .scan(records, FILESYSTEM_ID, &(), &(), &mut |key, length| {
            found.push(Freed {
                segment: SegmentId(number_at(key, 0)?),
                address: number_at(key, 8)?,
                length,
            });
            Ok(true)
        })
        .unwrap();
    found
}

/// That of a node's only start.
pub(super) fn open_session(node: u64) -> Operation {
    Operation::OpenSession {
        node,
        incarnation: u128::from(node) << 100,
    }
}

pub(super) fn make(parent: Ino, name: &[u8], node: NewNode) -> Operation {
    Operation::Make(Make {
        parent,
        name: name.to_vec(),
        mode: 0o644,
        uid: 1000,
        gid: 1000,
        node,
    })
}

pub(super) fn commit(ino: Ino, extents: Vec<Extent>, size: u64) -> Operation {
    Operation::Commit(Commit {
        ino,
        expected: None,
        extents,
        size,
        mtime: Time {
            seconds: 1_000_000,
            nanoseconds: 1,
        },
        clear_privileges: false,
    })
}

pub(super) fn unlink(parent: Ino, name: &[u8], openers: &[SessionId]) -> Operation {
    Operation::Unlink {
        parent,
        name: name.to_vec(),
        openers: Openers::Named(openers.to_vec()),
    }
}

pub(super) fn rename(
    (parent, name): (Ino, &[u8]),
    (new_parent, new_name): (Ino, &[u8]),
    mode: RenameMode,
) -> Operation {
    Operation::Rename(Rename {
        parent,
        name: name.to_vec(),
        new_parent,
        new_name: new_name.to_vec(),
        mode,
        openers: Openers::All { own: false },
    })
}

pub(super) fn truncate(ino: Ino, size: u64) -> Operation {
    Operation::SetAttributes(SetAttributes {
        ino,
        size: Some(size),
        ..SetAttributes::default()
    })
}
