//! What the fuzz target calls: batches as bytes, applied to a small filesystem.

use std::collections::BTreeMap;

use records::{Txn, Writes};

use crate::ids::{FilesystemId, SessionId, Time};
use crate::operation::{Batch, Make, NewNode, Operation, Request};
use crate::{Freed, Ino, Reply, apply, check, given_back_by};

const FILESYSTEM: FilesystemId = FilesystemId(1);

/// A filesystem with one session, one segment, a directory and a file.
fn beginning() -> Batch {
    let leader = |operation| Request {
        session: SessionId::NONE,
        slot: 0,
        sequence: 0,
        at: Time::default(),
        operation,
    };
    let make = |sequence, name: &[u8], node| Request {
        session: SessionId(1),
        slot: 0,
        sequence,
        at: Time::default(),
        operation: Operation::Make(Make {
            parent: Ino::ROOT,
            name: name.to_vec(),
            mode: 0o755,
            uid: 0,
            gid: 0,
            node,
        }),
    };
    let new_segment = Request {
        operation: Operation::NewSegment,
        ..make(3, b"", NewNode::File)
    };
    Batch {
        operations: vec![
            leader(Operation::CreateFilesystem {
                mode: 0o755,
                uid: 0,
                gid: 0,
            }),
            leader(Operation::OpenSession {
                node: 1,
                incarnation: 1,
            }),
            make(1, b"directory", NewNode::Directory),
            make(2, b"file", NewNode::File),
            new_segment,
        ],
    }
}

/// Applies a batch if the bytes are one, and checks every invariant. Its own sequence numbers do not matter:
/// each request becomes its slot's next. The replies; none if the bytes are no batch.
pub fn batch(data: &[u8]) -> Vec<Reply> {
    let Ok(mut batch) = Batch::decode(data) else {
        return Vec::new();
    };
    assert_eq!(Batch::decode(&batch.encode()).as_ref(), Ok(&batch));
    let mut sequences: BTreeMap<(SessionId, u16), u64> = BTreeMap::new();
    sequences.insert((SessionId(1), 0), 3);
    for request in &mut batch.operations {
        let sequence = sequences
            .entry((request.session, request.slot))
            .or_default();
        *sequence += 1;
        request.sequence = *sequence;
    }
    let records = BTreeMap::new();
    let mut txn = Txn::over(&records);
    apply(&mut txn, FILESYSTEM, &beginning()).expect("a map can be read");
    let replies = apply(&mut txn, FILESYSTEM, &batch).expect("a map can be read");
    let (one_by_one, given_back) = apply_one_by_one(&batch, &replies);
    if let Err(broken) = check(&txn, FILESYSTEM, &given_back) {
        panic!("{broken}: {batch:?}");
    }
    assert_eq!(txn.into_writes(), one_by_one, "cut anywhere: {batch:?}");
    replies
}

/// The same records from a batch for each request, and what was given back.
fn apply_one_by_one(batch: &Batch, replies: &[Reply]) -> (Writes, Vec<Freed>) {
    let records = BTreeMap::new();
    let mut txn = Txn::over(&records);
    apply(&mut txn, FILESYSTEM, &beginning()).expect("a map can be read");
    let mut given_back = Vec::new();
    for (request, reply) in batch.operations.iter().zip(replies) {
        let range = given_back_by(&txn, FILESYSTEM, &request.operation).expect("a map can be read");
        let operations = vec![request.clone()];
        let found = apply(&mut txn, FILESYSTEM, &Batch { operations });
        let found = found.expect("a map can be read");
        assert_eq!(found, std::slice::from_ref(reply), "{request:?}");
        given_back.extend(range.filter(|_| reply.is_ok()));
    }
    (txn.into_writes(), given_back)
}
