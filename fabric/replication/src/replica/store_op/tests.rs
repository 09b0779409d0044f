use std::sync::Arc;

use fabric_types::block::BlockStamp;
use fabric_types::ids::LayerId;
use fabric_types::membership::ReplicaState;
use fabric_types::{PgId, Sequence};

use super::*;

const PG: PgId = PgId(3);
const LAYER: LayerId = LayerId(8);
const CHUNK: ChunkKey = ChunkKey {
    layer: LAYER,
    index: 6,
};

fn request(epoch: u64, generation: u64, command: Command) -> Request {
    Request {
        pg: PG,
        epoch: Epoch(epoch),
        generation: Generation(generation),
        sequence: Sequence(7),
        command,
        ..Request::NOTHING
    }
}

fn zero() -> Command {
    Command::Zero {
        chunk: CHUNK,
        offset: 512,
        len: 1024,
        fua: true,
    }
}

fn in_sync() -> Arc<Groups> {
    let groups = Arc::new(Groups::default());
    groups.set(PG, ReplicaState::InSync, Epoch(1));
    groups.applied(Epoch(4));
    groups
}

#[test]
fn request_admitted_before_a_join_is_refused_if_it_runs_after() {
    let (groups, fence) = (in_sync(), LayerFence::default());
    let waiting = request(3, 1, zero());
    let mut cache = GroupCache::new(Arc::clone(&groups));
    let mut look = |request| still_admitted(request, Some(&fence), &mut cache);
    assert_eq!(look(&waiting), Ok(()));
    groups.join(PG, Epoch(4));
    assert_eq!(look(&waiting), Err(Refusal::StaleEpoch(Epoch(4))));
    assert_eq!(look(&request(4, 1, zero())), Ok(()));
}

#[test]
fn queued_request_is_refused_once_the_replica_is_out() {
    let (groups, fence) = (in_sync(), LayerFence::default());
    let mut cache = GroupCache::new(Arc::clone(&groups));
    let waiting = request(4, 1, zero());
    groups.set(PG, ReplicaState::Out, Epoch(5));
    groups.applied(Epoch(5));
    let looked = still_admitted(&waiting, Some(&fence), &mut cache);
    assert_eq!(looked, Err(Refusal::StaleEpoch(Epoch(5))));
    groups.keep(&[]);
    let looked = still_admitted(&waiting, Some(&fence), &mut cache);
    assert_eq!(looked, Err(Refusal::StaleEpoch(Epoch(5))));
}

#[test]
fn queued_restore_of_a_block_written_meanwhile_is_refused() {
    let groups = Arc::new(Groups::default());
    groups.set(PG, ReplicaState::Syncing, Epoch(1));
    groups.applied(Epoch(4));
    let buffers = IoVecs {
        ptr: std::ptr::null(),
        len: 0,
    };
    let restore = |block| Command::Restore {
        chunk: CHUNK,
        block,
        stamps: [BlockStamp::default(); 2],
        buffers,
        len: 0,
    };
    let mut cache = GroupCache::new(Arc::clone(&groups));
    let mut look = |block, generation| {
        let request = request(4, generation, restore(block));
        still_admitted(&request, None, &mut cache)
    };
    assert_eq!(look(300, ROUND.0), Ok(()));
    // A discard leaves no trace where nothing is mapped.
    let discard = Command::Zero {
        chunk: CHUNK,
        offset: 300 * 4096,
        len: 4096,
        fua: false,
    };
    assert!(groups.note(&request(4, 1, discard)).is_some());
    assert_eq!(look(300, ROUND.0), Err(Refusal::Changed));
    assert_eq!(look(301, ROUND.0), Ok(()));
    assert_eq!(look(300, 1), Ok(()), "a new lease that recovers");
}

#[test]
fn queued_request_of_an_older_lease_is_refused_but_a_fence_runs() {
    let (groups, fence) = (in_sync(), LayerFence::default());
    let mut cache = GroupCache::new(Arc::clone(&groups));
    fence.raise(Generation(2), Epoch(4));
    let old = still_admitted(&request(4, 1, zero()), Some(&fence), &mut cache);
    assert_eq!(old, Err(Refusal::StaleGeneration(Generation(2))));
    let fences = Command::Fence {
        layer: LAYER,
        buffers: IoVecs {
            ptr: std::ptr::null(),
            len: 0,
        },
        len: 0,
    };
    let raising = request(4, 2, fences);
    assert_eq!(still_admitted(&raising, Some(&fence), &mut cache), Ok(()));
    // SAFETY: the operation has no buffers.
    let op = unsafe { operation(&raising) };
    let raised = Fence {
        generation: 2,
        epoch: 4,
    };
    assert!(matches!(op, Some(StoreOp::SetFence { layer: LAYER, fence }) if fence == raised));
}

#[test]
fn an_operation_has_the_version_and_the_buffers_of_its_request() {
    let mut bytes = [0u8; 1024];
    let iov = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let buffers = IoVecs { ptr: &iov, len: 1 };
    let write = request(
        1,
        2,
        Command::Write {
            chunk: CHUNK,
            offset: 512,
            buffers,
            len: 1024,
            fua: true,
            urgent: false,
        },
    );
    // SAFETY: the list and the memory are on this stack.
    let op = unsafe { operation(&write) };
    let Some(StoreOp::Write {
        layers: [LAYER],
        chunk: 6,
        offset: 512,
        iovecs: [part],
        version,
        fua: true,
        urgent: false,
    }) = op
    else {
        panic!("{op:?}")
    };
    assert_eq!(version, Version::new(2, 7));
    assert_eq!((part.iov_base, part.iov_len), (iov.iov_base, iov.iov_len));
    // What holds no data has none, whatever the list says.
    let restore = request(
        1,
        2,
        Command::Restore {
            chunk: CHUNK,
            block: 9,
            stamps: [BlockStamp::default(); 2],
            buffers,
            len: 0,
        },
    );
    // SAFETY: as above.
    let op = unsafe { operation(&restore) };
    assert!(matches!(
        op,
        Some(StoreOp::Restore {
            block: 9,
            iovecs: [],
            urgent: true,
            ..
        })
    ));
    let compared = Request {
        generation: ROUND,
        ..restore
    };
    // SAFETY: as above.
    let op = unsafe { operation(&compared) };
    assert!(matches!(op, Some(StoreOp::Restore { urgent: false, .. })));
    let join = request(1, 2, Command::Join);
    // SAFETY: it has no buffers.
    let op = unsafe { operation(&join) };
    assert!(op.is_none());
}

/// The list of chunks 0 to `count` in answers with room for `places` entries.
fn listed(count: u32, places: usize) -> Vec<u32> {
    let (mut cursor, mut found) = (0, Vec::new());
    loop {
        let mut entries = vec![ChunkEntry::default(); places];
        let iov = libc::iovec {
            iov_base: entries.as_mut_ptr().cast(),
            iov_len: size_of_val(entries.as_slice()),
        };
        let next = |cursor: u64| {
            let index = cursor as u32;
            let chunk = ChunkKey {
                layer: LAYER,
                index,
            };
            (index < count).then_some((chunk, cursor + 1))
        };
        // SAFETY: the list and the memory are on this stack.
        unsafe { list_chunks(cursor, &IoVecs { ptr: &iov, len: 1 }, next) };
        for entry in entries {
            cursor = entry.cursor;
            match entry.kind {
                chunk_entry::CHUNK => found.push(entry.chunk),
                chunk_entry::MORE => break,
                _ => return found,
            }
        }
    }
}

#[test]
fn a_list_of_chunks_ends_and_goes_on_where_it_broke_off() {
    for count in 0..9 {
        for places in 2..6 {
            let all: Vec<u32> = (0..count).collect();
            assert_eq!(listed(count, places), all, "{count} in lists of {places}");
        }
    }
}

#[test]
fn a_fenced_operation_names_what_the_client_lacks() {
    let fenced = |generation| failure(StoreError::Fenced { generation }, &request(4, 2, zero()));
    assert_eq!(
        fenced(3),
        StoreFailure::Fenced(Refusal::StaleGeneration(Generation(3)))
    );
    assert_eq!(
        fenced(0),
        StoreFailure::Fenced(Refusal::StaleEpoch(Epoch(5)))
    );
}

#[test]
fn read_only_store_is_not_mistaken_for_an_unreadable_block() {
    let told = |error| failure(error, &request(4, 2, zero()));
    let read_only = told(StoreError::ReadOnly(libc::EIO));
    assert_eq!(read_only, StoreFailure::Device(libc::EROFS));
    assert!(!Refusal::Device(libc::EROFS).is_unreadable());
    let bad_sector = told(StoreError::Unreadable {
        layer: LayerId(1),
        chunk: 0,
        block: 7,
        device_offset: 1 << 20,
        errno: libc::EIO,
    });
    assert_eq!(bad_sector, StoreFailure::Device(libc::EIO));
    assert!(Refusal::Device(libc::EIO).is_unreadable());
}

/// The memory was another request's, whose data are nobody else's business.
#[test]
fn lists_leave_nothing_of_what_their_memory_held() {
    const STALE: u8 = 0xa5;
    let filled = |fill: &dyn Fn(&IoVecs)| {
        let mut bytes = vec![STALE; 100];
        let iov = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        fill(&IoVecs { ptr: &iov, len: 1 });
        bytes
    };
    let nothing_stale = |bytes: &[u8]| !bytes.contains(&STALE);
    // SAFETY: the list and the memory are on this stack.
    let chunks = filled(&|list| unsafe { list_chunks(0, list, |_| Listed::End) });
    assert!(nothing_stale(&chunks), "{chunks:?}");
    // SAFETY: as above.
    let fence = filled(&|list| unsafe { tell_fence(list, std::iter::once(Fence::default())) });
    assert!(nothing_stale(&fence), "{fence:?}");
}

#[test]
fn the_last_epoch_does_not_overflow() {
    let fenced = StoreError::Fenced { generation: 0 };
    let told = failure(fenced, &request(u64::MAX, 2, zero()));
    let last = Refusal::StaleEpoch(Epoch(u64::MAX));
    assert_eq!(told, StoreFailure::Fenced(last));
}
