use fabric_types::ids::ChunkKey;
use fabric_types::{Epoch, PgId};

use super::*;

const LAYER: LayerId = LayerId(4);
const NEXT_LEASE: Generation = Generation(3);

fn zero(
    (generation, sequence, watermark): (u64, u64, u64),
    (chunk, offset, len): (u32, u32, u32),
) -> Request {
    Request {
        pg: PgId(1),
        epoch: Epoch(1),
        generation: Generation(generation),
        sequence: Sequence(sequence),
        watermark: Sequence(watermark),
        command: Command::Zero {
            chunk: ChunkKey {
                layer: LAYER,
                index: chunk,
            },
            offset,
            len,
            fua: false,
        },
        ..Request::NOTHING
    }
}

fn lanes(count: usize) -> Vec<Arc<Unresolved>> {
    (0..count).map(|_| Arc::default()).collect()
}

/// What a new lease is told: sequence, chunk, first block, blocks.
fn reported(lanes: &[Arc<Unresolved>], room: usize) -> Vec<(u64, u32, u32, u32)> {
    let entries = list(lanes, LAYER, NEXT_LEASE, room);
    let of = |e: &UnresolvedEntry| (Version(e.version).sequence(), e.chunk, e.block, e.count);
    entries.iter().map(of).collect()
}

#[test]
fn writes_above_the_watermark_are_tracked_by_block() {
    let lanes = lanes(1);
    lanes[0].note(&zero((2, 10, 10), (0, 0, 4096)));
    lanes[0].note(&zero((2, 11, 10), (1, 512, 4096)));
    assert_eq!(reported(&lanes, 9), [(10, 0, 0, 1), (11, 1, 0, 2)]);
    // The watermark is the oldest that is not resolved.
    lanes[0].note(&zero((2, 12, 11), (0, 8192, 512)));
    assert_eq!(reported(&lanes, 9), [(11, 1, 0, 2), (12, 0, 2, 1)]);
    lanes[0].note(&zero((2, 13, 13), (0, 0, 512)));
    assert_eq!(reported(&lanes, 9), [(13, 0, 0, 1)]);
}

#[test]
fn pieces_and_repeats_of_a_write_are_one_entry_per_chunk() {
    let lanes = lanes(1);
    lanes[0].note(&zero((2, 10, 1), (0, 4096, 4096)));
    lanes[0].note(&zero((2, 10, 1), (1, 0, 4096)));
    lanes[0].note(&zero((2, 10, 1), (0, 16384, 4096)));
    assert_eq!(reported(&lanes, 9), [(10, 0, 1, 4), (10, 1, 0, 1)]);
}

#[test]
fn nothing_is_resolved_by_a_lease_that_has_just_begun() {
    let lanes = lanes(1);
    lanes[0].note(&zero((1, 500, 1), (0, 0, 4096)));
    lanes[0].note(&zero((2, 1, 0), (1, 0, 4096)));
    assert_eq!(reported(&lanes, 9), [(500, 0, 0, 1), (1, 1, 0, 1)]);
    // Its first watermark says that what older leases left has been recovered.
    lanes[0].note(&zero((2, 2, 1), (2, 0, 4096)));
    assert_eq!(reported(&lanes, 9), [(1, 1, 0, 1), (2, 2, 0, 1)]);
}

#[test]
fn new_lease_learns_writes_of_older_leases_from_all_threads() {
    let lanes = lanes(3);
    lanes[0].note(&zero((2, 10, 1), (0, 0, 4096)));
    lanes[2].note(&zero((1, 70, 1), (1, 0, 4096)));
    lanes[1].note(&zero((3, 1, 0), (2, 0, 4096)));
    assert_eq!(reported(&lanes, 9), [(70, 1, 0, 1), (10, 0, 0, 1)]);
    let of_another = list(&lanes, LayerId(5), NEXT_LEASE, 9);
    assert!(of_another.is_empty());
    lanes[0].forget(LAYER);
    assert_eq!(reported(&lanes, 9), [(70, 1, 0, 1)]);
    let lens: Vec<usize> = lanes.iter().map(|l| l.len()).collect();
    assert_eq!(lens, [0, 1, 1]);
    assert!(lanes[0].is_empty());
}

#[test]
fn what_writes_nothing_is_not_remembered() {
    let lanes = lanes(1);
    let layer = LAYER;
    let flush = Request {
        command: Command::Flush { layer },
        ..zero((2, 10, 1), (0, 0, 0))
    };
    lanes[0].note(&flush);
    assert!(lanes[0].is_empty());
}

#[test]
fn too_many_for_the_list_are_merged_and_nothing_is_left_out() {
    let lanes = lanes(2);
    for nth in 0..10 {
        let at = (nth % 2, nth * 8192, 4096);
        lanes[nth as usize % 2].note(&zero((2, 10 + u64::from(nth), 1), at));
    }
    assert_eq!(reported(&lanes, 10).len(), 10);
    // One range for each chunk, under its newest version.
    assert_eq!(reported(&lanes, 9), [(18, 0, 0, 17), (19, 1, 2, 17)]);
    let all = list(&lanes, LAYER, NEXT_LEASE, 1);
    assert_eq!(all, [UnresolvedEntry::EVERYTHING]);
}

#[test]
fn bounded_unresolved_writes_are_merged_by_chunk_at_the_limit() {
    let lanes = lanes(1);
    for nth in 0..=WRITES_MAX as u64 {
        let at = ((nth % 8) as u32, (nth % 1024) as u32 * 4096, 4096);
        lanes[0].note(&zero((2, 10 + nth, 1), at));
    }
    assert_eq!(lanes[0].len(), 8);
    let list = reported(&lanes, 9);
    assert_eq!(list.len(), 8);
    for (chunk, (_, of, first, count)) in list.into_iter().map(|t| (t.1, t)) {
        assert_eq!((of, first, first + count), (chunk, chunk, 1024 - 7 + chunk));
    }
    // They are resolved when the newest of them is.
    let newest = 10 + WRITES_MAX as u64;
    lanes[0].note(&zero((2, newest + 1, newest + 1), (0, 0, 4096)));
    assert_eq!(lanes[0].len(), 1);
}

#[test]
fn adopted_entries_are_reported_until_later_writes_resolve_them() {
    let source = lanes(2);
    source[0].note(&zero((2, 10, 1), (0, 4096, 8192)));
    source[1].note(&zero((2, 11, 1), (7, 0, 4096)));
    let heard = list(&source, LAYER, Generation::MAX, 9);
    let here = lanes(2);
    here[0].adopt(LAYER, &heard);
    assert_eq!(reported(&here, 9), [(10, 0, 1, 2), (11, 7, 0, 1)]);
    here[0].note(&zero((2, 12, 12), (1, 0, 4096)));
    assert_eq!(reported(&here, 9), [(12, 1, 0, 1)]);
}

#[test]
fn who_was_told_of_everything_tells_of_everything() {
    let source = lanes(1);
    (0..9).for_each(|chunk| source[0].note(&zero((2, 10 + u64::from(chunk), 1), (chunk, 0, 4096))));
    let heard = list(&source, LAYER, Generation::MAX, 3);
    assert_eq!(heard, [UnresolvedEntry::EVERYTHING]);
    let here = lanes(1);
    here[0].adopt(LAYER, &heard);
    here[0].note(&zero((2, 90, 90), (1, 0, 4096)));
    assert_eq!(
        list(&here, LAYER, NEXT_LEASE, 9),
        [UnresolvedEntry::EVERYTHING]
    );
}

#[test]
fn bounded_writes_to_ever_more_chunks_become_everything() {
    let lanes = lanes(1);
    let many = 2 * WRITES_MAX as u64;
    for nth in 0..many {
        lanes[0].note(&zero((2, 10 + nth, 0), (nth as u32, 0, 4096)));
        assert!(lanes[0].len() <= WRITES_MAX);
    }
    let everything = [UnresolvedEntry::EVERYTHING];
    assert_eq!(list(&lanes, LAYER, NEXT_LEASE, 9), everything);
    // Until the newest of them is resolved.
    lanes[0].note(&zero((2, 10 + many, 10 + many), (1, 0, 4096)));
    assert_eq!(reported(&lanes, 9), [(10 + many, 1, 0, 1)]);
}

/// The list ends with an entry without blocks: what comes behind it would be forgotten.
#[test]
fn entries_of_a_peer_that_name_no_block_hide_no_others() {
    let entry = |version, chunk, block, count| UnresolvedEntry {
        version: Version::of(Generation(2), Sequence(version)).0,
        chunk,
        block,
        count,
        reserved: 0,
    };
    let here = lanes(1);
    let beyond = [
        entry(10, 0, u32::MAX, 1),
        entry(11, 0, 1024, 7),
        entry(12, u32::MAX, 3, 4),
        entry(13, 0, 1020, u32::MAX),
        entry(14, 2, 5, 1),
    ];
    here[0].adopt(LAYER, &beyond);
    assert_eq!(reported(&here, 9), [(13, 0, 1020, 4), (14, 2, 5, 1)]);
}

#[test]
fn newest_write_of_a_block_is_known_until_it_is_resolved() {
    let lanes = lanes(2);
    let chunk = ChunkKey {
        layer: LAYER,
        index: 7,
    };
    let version = |sequence| Version::of(Generation(2), Sequence(sequence));
    let of_block = |block| newest(&lanes, chunk, block);
    assert_eq!(of_block(1), Version(0));
    lanes[0].note(&zero((2, 10, 1), (7, 4096, 8192)));
    lanes[1].note(&zero((2, 12, 1), (7, 8192, 100)));
    lanes[1].note(&zero((2, 13, 1), (6, 0, 1 << 20)));
    let known = [0, 1, 2, 3].map(of_block);
    assert_eq!(known, [Version(0), version(10), version(12), Version(0)]);
    // What was copied from others came from there; what a comparison has brought may be here alone by now.
    let entry = UnresolvedEntry {
        version: version(20).0,
        chunk: 7,
        block: 2,
        count: 2,
        reserved: 0,
    };
    lanes[0].adopt_copied(LAYER, &[entry]);
    assert_eq!(of_block(2), version(12));
    assert_eq!(reported(&lanes, 9).len(), 4, "but a new lease is told");
    lanes[0].adopt(LAYER, &[entry]);
    assert_eq!([of_block(2), of_block(3)], [version(20); 2]);
    // Each data thread hears of what is resolved by itself.
    lanes[0].note(&zero((2, 30, 30), (1, 0, 4096)));
    lanes[1].note(&zero((2, 31, 30), (1, 0, 4096)));
    assert_eq!([1, 2, 3].map(of_block), [Version(0); 3]);
    assert_eq!(reported(&lanes, 9).len(), 2);
    lanes[1].adopt(LAYER, &[UnresolvedEntry::EVERYTHING]);
    assert_eq!(of_block(900), Version(u64::MAX));
}
