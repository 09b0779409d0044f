//! Telling what blocks are, and making them what another replica has.

use fabric_store::api::{StoreCore, StoreError, StoreOp};
use fabric_types::block::{BLOCK_BYTES, BlockStamp, Holds};
use fabric_types::checksum::crc32c;
use fabric_types::ids::Version;

use crate::shard::{Block, CHUNK, LAYER, Shard, iovec, write_op};
use crate::sim_disk::CrashKind;

fn data(version: u64, content: &Block) -> BlockStamp {
    BlockStamp {
        version,
        crc: crc32c(content),
        holds: Holds::Data as u32,
    }
}

fn nothing(version: u64) -> BlockStamp {
    BlockStamp {
        version,
        ..BlockStamp::default()
    }
}

const A: Block = [0xa1; BLOCK_BYTES];
const B: Block = [0xb2; BLOCK_BYTES];
const ZEROES: Block = [0; BLOCK_BYTES];

#[test]
fn blocks_tell_their_version_and_checksum() {
    let mut shard = Shard::new(1);
    assert_eq!(shard.inspect(0, 256), vec![nothing(0); 256]);
    shard.write(5, 12, &A);
    shard.write(255, 13, &B);
    let stamps = shard.inspect(0, 256);
    assert_eq!(stamps[5], data(12, &A));
    assert_eq!(stamps[255], data(13, &B));
    assert!(
        (0..255)
            .filter(|&i| i != 5)
            .all(|i| stamps[i] == nothing(0))
    );
    // Also from the device, and of a part of a page.
    let mut again = shard.crashed(CrashKind::Process, 1);
    assert_eq!(again.inspect(4, 2), [nothing(0), data(12, &A)]);
    let chunks: Vec<_> =
        std::iter::successors(again.core.next_chunk(0), |c| again.core.next_chunk(c.2)).collect();
    assert_eq!(chunks.len(), 1);
    assert_eq!((chunks[0].0, chunks[0].1), (LAYER, CHUNK));
}

#[test]
fn an_inspection_waits_for_the_writes_before_it() {
    let mut shard = Shard::new(2);
    shard.write(0, 1, &A);
    let iovecs = [iovec(&B)];
    shard.submit(1, write_op(0, 2, &iovecs));
    let mut stamp = [nothing(77)];
    let out = [libc::iovec {
        iov_base: stamp.as_mut_ptr().cast(),
        iov_len: size_of::<BlockStamp>(),
    }];
    shard.submit(
        2,
        StoreOp::Inspect {
            layer: LAYER,
            chunk: CHUNK,
            block: 0,
            iovecs: &out,
        },
    );
    assert!(shard.run().iter().all(|(_, result)| result.is_ok()));
    assert_eq!(stamp, [data(2, &B)]);
}

#[test]
fn malformed_requests_are_refused() {
    let mut shard = Shard::new(3);
    let mut stamps = [nothing(0); 4];
    let mut out = |bytes: usize, shift: usize| libc::iovec {
        iov_base: stamps.as_mut_ptr().cast::<u8>().wrapping_add(shift).cast(),
        iov_len: bytes,
    };
    for (block, iovecs) in [
        (254, vec![out(64, 0)]),
        (0, vec![out(15, 0)]),
        (0, vec![out(16, 4)]),
        (0, vec![]),
        (0, vec![out(16, 0), out(16, 16)]),
        (1024, vec![out(16, 0)]),
        (u32::MAX, vec![out(16, 0)]),
    ] {
        let inspected = shard.one(StoreOp::Inspect {
            layer: LAYER,
            chunk: CHUNK,
            block,
            iovecs: &iovecs,
        });
        assert_eq!(inspected, Err(StoreError::OutOfRange), "block {block}");
    }
    // The store keeps fences under this number.
    let no_chunk = shard.one(StoreOp::Inspect {
        layer: LAYER,
        chunk: u32::MAX,
        block: 0,
        iovecs: &[out(16, 0)],
    });
    assert_eq!(no_chunk, Err(StoreError::OutOfRange));
    let surplus = shard.restore(0, nothing(0), nothing(1), Some(&A));
    assert_eq!(surplus, Err(StoreError::OutOfRange));
    let outside = shard.restore(1024, nothing(0), nothing(1), None);
    assert_eq!(outside, Err(StoreError::OutOfRange));
}

#[test]
fn restore_needs_the_expected_version_and_matching_data() {
    let mut shard = Shard::new(4);
    shard.write(9, 20, &A);
    let wrong = shard.restore(9, data(19, &A), data(30, &B), Some(&B));
    assert_eq!(wrong, Err(StoreError::Changed));
    let damaged = shard.restore(9, data(20, &A), data(30, &A), Some(&B));
    assert_eq!(damaged, Err(StoreError::Mismatch));
    assert_eq!(shard.inspect(9, 1), [data(20, &A)]);
    assert_eq!(shard.read(9), A);
    shard
        .restore(9, data(20, &A), data(30, &B), Some(&B))
        .unwrap();
    assert_eq!(shard.inspect(9, 1), [data(30, &B)]);
    assert_eq!(shard.read(9), B);
}

#[test]
fn a_guests_write_under_way_wins_over_a_restoration() {
    let mut shard = Shard::new(5);
    shard.write(0, 10, &A);
    let (old, new) = ([iovec(&A)], [iovec(&B)]);
    shard.submit(1, write_op(0, 11, &new));
    shard.submit(
        2,
        StoreOp::Restore {
            layer: LAYER,
            chunk: CHUNK,
            block: 0,
            expect: data(10, &A),
            stamp: data(5, &A),
            iovecs: &old,
            urgent: false,
        },
    );
    let mut done = shard.run();
    done.sort_by_key(|(id, _)| *id);
    assert_eq!(done, [(1, Ok(())), (2, Err(StoreError::Changed))]);
    assert_eq!(shard.read(0), B);
}

/// A takeover ends on a full replica, too, and without it.
#[test]
fn a_takeover_restores_on_a_full_store_and_a_round_of_comparison_does_not() {
    let mut shard = Shard::new(12);
    shard.write(0, 1, &A);
    let iovecs = [iovec(&A)];
    let places = (1..).flat_map(|chunk| (0..1024).map(move |block| (CHUNK + chunk, block)));
    for (chunk, block) in places {
        let written = shard.one(StoreOp::Write {
            layers: &[LAYER],
            chunk,
            offset: block * BLOCK_BYTES as u32,
            iovecs: &iovecs,
            version: Version(2),
            fua: false,
            urgent: false,
        });
        if written.is_err() {
            break;
        }
    }
    let refused = shard.restore(0, data(1, &A), data(3, &B), Some(&B));
    assert_eq!(refused, Err(StoreError::NoSpace { untouched: true }));
    let taken_over = shard.restore_urgently(0, data(1, &A), data(3, &B), Some(&B));
    assert_eq!(taken_over, Ok(()));
    assert_eq!(shard.inspect(0, 1), [data(3, &B)]);
    assert_eq!(shard.read(0), B);
}

/// Restores three blocks to older states: other data, nothing, zeroes. Returns what they are before and
/// after.
fn turn_back(shard: &mut Shard) -> [Vec<BlockStamp>; 2] {
    for block in 0..3 {
        shard.write(block, 100 + u64::from(block), &B);
    }
    shard.flush();
    let before = shard.inspect(0, 3);
    let zeroes = BlockStamp {
        version: 8,
        crc: 0,
        holds: Holds::Zeroes as u32,
    };
    let after = vec![data(50, &A), nothing(7), zeroes];
    shard.before_writes = Some(Vec::new());
    shard.restore(0, before[0], after[0], Some(&A)).unwrap();
    shard.restore(1, before[1], after[1], None).unwrap();
    shard.restore(2, before[2], after[2], None).unwrap();
    [before, after]
}

#[test]
fn an_older_state_replaces_a_newer_one_for_good() {
    let mut shard = Shard::new(6);
    let [_, after] = turn_back(&mut shard);
    assert_eq!(shard.inspect(0, 3), after);
    shard.flush();
    for kind in [CrashKind::Process, CrashKind::Power] {
        let mut found = shard.crashed(kind, 6);
        assert_eq!(found.inspect(0, 3), after, "{kind:?}");
        let content = [found.read(0), found.read(1), found.read(2)];
        assert!(content == [A, ZEROES, ZEROES]);
        found.one(StoreOp::Checkpoint { clean: true }).unwrap();
        let mut found = found.crashed(CrashKind::Power, 7);
        assert_eq!(found.inspect(0, 3), after, "after a checkpoint");
        // Writes that are newer than what is there now are taken.
        found.write(0, 51, &B);
        assert_eq!(found.read(0), B);
    }
}

#[test]
fn a_crash_while_restoring_leaves_the_old_the_new_or_nothing() {
    let mut shard = Shard::new(8);
    let [before, after] = turn_back(&mut shard);
    let disks = shard.before_writes.take().unwrap();
    assert!(disks.len() >= 3);
    for (nth, disk) in disks.iter().enumerate() {
        for seed in 0..8 {
            let kind = [CrashKind::Process, CrashKind::Power][seed as usize % 2];
            let mut found = Shard::open(disk.crash(kind, seed));
            for (block, stamp) in found.inspect(0, 3).into_iter().enumerate() {
                // Dropped, and the data that were to follow did not get there.
                let torn = stamp.holds() == Holds::Nothing;
                let known = stamp == before[block] || stamp == after[block] || torn;
                assert!(known, "write {nth}, block {block}: {stamp:?}");
                found.read(block as u32);
            }
        }
    }
}

/// A block that is mapped, with the checksum and version of data that nobody could read.
fn lose(shard: &mut Shard, block: u32) -> BlockStamp {
    let now = shard.inspect(block, 1)[0];
    let lost = data(now.version + 10, &A);
    shard.restore(block, now, lost, None).unwrap();
    assert_eq!(shard.inspect(block, 1), [lost]);
    lost
}

fn used_when_closed(shard: &Shard) -> u64 {
    let mut closed = shard.crashed(CrashKind::Process, 12);
    closed.one(StoreOp::Checkpoint { clean: true }).unwrap();
    closed
        .crashed(CrashKind::Process, 12)
        .core
        .space()
        .used_bytes
}

fn is_corrupt(result: Result<(), StoreError>, of: u32) -> bool {
    matches!(result, Err(StoreError::Corrupt { block, .. }) if block == of)
}

#[test]
fn a_lost_block_is_known_and_cannot_be_read() {
    let mut shard = Shard::new(10);
    shard.write(3, 20, &B);
    shard.write(4, 21, &B);
    let before = used_when_closed(&shard);
    let lost = lose(&mut shard, 3);
    lose(&mut shard, 7);
    // What is there is not given up for nothing.
    let there = shard.inspect(4, 1)[0];
    let refused = shard.restore(4, there, there, None);
    assert_eq!(refused, Err(StoreError::Changed));
    assert!(is_corrupt(shard.try_read(3).map(drop), 3));
    assert!(is_corrupt(shard.try_read(7).map(drop), 7));
    assert_eq!(shard.read(4), B);
    // A write of a part of it lacks what it would have to complete; an older one changes nothing.
    let half = [libc::iovec {
        iov_len: BLOCK_BYTES / 2,
        ..iovec(&B)
    }];
    assert!(is_corrupt(shard.one(write_op(3, 40, &half)), 3));
    let whole = [iovec(&B)];
    let stale = shard.one(write_op(3, 25, &whole));
    assert!(matches!(stale, Err(StoreError::Stale { .. })), "{stale:?}");
    shard.flush();
    for kind in [CrashKind::Process, CrashKind::Power] {
        let mut found = shard.crashed(kind, 10);
        assert_eq!(found.inspect(3, 1), [lost], "from the log, {kind:?}");
        found.one(StoreOp::Checkpoint { clean: true }).unwrap();
        let mut found = found.crashed(CrashKind::Power, 11);
        assert_eq!(found.inspect(3, 1), [lost], "from the map");
        assert!(is_corrupt(found.try_read(3).map(drop), 3));
    }
    let freed = before - used_when_closed(&shard);
    assert_eq!(
        freed, BLOCK_BYTES as u64,
        "the data of the one that had any"
    );
}

/// So that a write of a part of it that comes again ends, when no replica can read the block.
#[test]
fn block_is_marked_lost_only_after_a_failed_read() {
    let harms: [fn(&mut Shard); 2] = [
        |shard| shard.disk.flip_bit(shard.find(&B), 3),
        |shard| shard.disk.spoil(shard.find(&B)),
    ];
    for harm in harms {
        let mut shard = Shard::new(16);
        shard.write(3, 20, &B);
        let there = shard.inspect(3, 1)[0];
        let give_up = |shard: &mut Shard| shard.restore(3, there, there, None);
        assert_eq!(give_up(&mut shard), Err(StoreError::Changed));
        harm(&mut shard);
        assert_eq!(give_up(&mut shard), Err(StoreError::Changed), "not known");
        assert!(shard.try_read(3).is_err());
        give_up(&mut shard).unwrap();
        assert_eq!(shard.inspect(3, 1), [there]);
        assert!(is_corrupt(shard.try_read(3).map(|_| ()), 3));
        // What is written later is another block.
        shard.write(3, 21, &A);
        let there = shard.inspect(3, 1)[0];
        let given_up = shard.restore(3, there, there, None);
        assert_eq!(given_up, Err(StoreError::Changed));
    }
}

#[test]
fn a_write_that_was_lost_itself_is_done_when_it_comes_again() {
    let mut shard = Shard::new(15);
    shard.write(3, 20, &B);
    let lost = lose(&mut shard, 3);
    let both = [A, A];
    let part = |iov_len| {
        [libc::iovec {
            iov_base: both.as_ptr().cast_mut().cast(),
            iov_len,
        }]
    };
    let half = part(BLOCK_BYTES / 2);
    shard.one(write_op(3, lost.version, &half)).unwrap();
    assert_eq!(shard.inspect(3, 1), [lost], "as nobody has the rest of it");
    // Its other blocks are stored.
    let lost = lose(&mut shard, 5);
    let more = part(BLOCK_BYTES + BLOCK_BYTES / 2);
    shard.one(write_op(4, lost.version, &more)).unwrap();
    assert_eq!(shard.read(4), A);
    assert_eq!(shard.inspect(5, 1), [lost]);
    let later = shard.one(write_op(5, lost.version + 1, &half));
    assert!(is_corrupt(later, 5), "another write lacks the rest");
    shard.write(5, lost.version, &B);
    assert_eq!(shard.read(5), B, "a whole block needs nothing of it");
}

#[test]
fn a_lost_block_is_there_again_once_it_is_written_or_restored() {
    let mut shard = Shard::new(12);
    let found = lose(&mut shard, 0);
    let written = lose(&mut shard, 1);
    let discarded = lose(&mut shard, 2);
    shard.restore(0, found, found, Some(&A)).unwrap();
    shard.write(1, written.version + 1, &B);
    shard.zero(2, discarded.version + 1).unwrap();
    shard.flush();
    let mut again = shard.crashed(CrashKind::Power, 12);
    for shard in [&mut shard, &mut again] {
        assert!([shard.read(0), shard.read(1), shard.read(2)] == [A, B, ZEROES]);
    }
}

#[test]
fn the_scrubber_tells_of_lost_blocks() {
    let mut shard = Shard::new(13);
    shard.write(5, 1, &B);
    lose(&mut shard, 6);
    let found = shard.scrub();
    let told: Vec<_> = found.iter().map(|f| (f.block, f.device_offset)).collect();
    assert_eq!(told, [(6, 0)]);
}

#[test]
fn a_crash_while_a_block_is_lost_leaves_the_old_or_the_lost() {
    let mut shard = Shard::new(14);
    shard.write(0, 5, &B);
    shard.flush();
    shard.before_writes = Some(Vec::new());
    let lost = lose(&mut shard, 0);
    shard.flush();
    for disk in shard.before_writes.take().unwrap() {
        for seed in 0..8 {
            let kind = [CrashKind::Process, CrashKind::Power][seed as usize % 2];
            let mut found = Shard::open(disk.crash(kind, seed));
            let stamp = found.inspect(0, 1)[0];
            match stamp == lost {
                true => assert!(is_corrupt(found.try_read(0).map(drop), 0)),
                false => assert!(stamp == data(5, &B) && found.read(0) == B),
            }
        }
    }
}

/// A client counts on it when it tells its guest that nothing was written. A block goes bad, is spoilt, or is
/// lost.
#[test]
fn partial_write_over_a_bad_block_stores_none_of_its_map_page() {
    let harms: [fn(&mut Shard); 3] = [
        |shard| shard.disk.flip_bit(shard.find(&B), 3),
        |shard| shard.disk.spoil(shard.find(&B)),
        |shard| _ = lose(shard, 255),
    ];
    let half = libc::iovec {
        iov_len: BLOCK_BYTES / 2,
        ..iovec(&B)
    };
    for harm in harms {
        let mut shard = Shard::new(15);
        (252..255).for_each(|block| shard.write(block, 1, &A));
        shard.write(255, 1, &B);
        harm(&mut shard);
        let before = shard.inspect(252, 4);
        // The last of them it covers in part.
        let iovecs = [iovec(&B), iovec(&B), iovec(&B), half];
        let refused = shard.one(write_op(252, 9, &iovecs));
        let refused = refused.expect_err("what it does not cover cannot be read");
        // Who repairs it is told where it is.
        let found = refused.finding().map(|found| found.block);
        assert_eq!(found, Some(255), "{refused:?}");
        assert_eq!(shard.inspect(252, 4), before);
        // What lies in another page is stored.
        let offset = 255 * BLOCK_BYTES as u32 + 2048;
        let refused = shard.one(StoreOp::Write {
            layers: &[LAYER],
            chunk: CHUNK,
            offset,
            iovecs: &[half, iovec(&B)],
            version: Version(9),
            fua: false,
            urgent: false,
        });
        assert!(refused.is_err());
        assert_eq!(shard.inspect(255, 1), before[3..]);
        assert_eq!(shard.inspect(256, 1), [data(9, &B)]);
    }
}
