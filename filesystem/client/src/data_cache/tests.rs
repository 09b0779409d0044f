//! The cache by itself: what it gives is what was written, and it never takes more than its bound.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::plan::Step;
use super::*;
use crate::cache::Mistake;

/// What is in a block of a segment: its whole address, over and over.
fn block(filesystem: u64, segment: u64, number: u64) -> Vec<u8> {
    let mut word = Vec::new();
    word.extend(filesystem.to_le_bytes());
    word.extend(segment.to_le_bytes());
    word.extend(number.to_le_bytes());
    word.extend([0x5a; 8]);
    word.repeat(BLOCK as usize / word.len())
}

fn content(filesystem: u64, span: Span) -> Vec<u8> {
    let blocks = span.address / BLOCK..(span.address + span.length) / BLOCK;
    let blocks = blocks.map(|number| block(filesystem, span.segment.0, number));
    blocks.flatten().collect()
}

fn span(segment: u64, first: u64, blocks: u64) -> Span {
    Span {
        segment: SegmentId(segment),
        address: first * BLOCK,
        length: blocks * BLOCK,
    }
}

/// Reads as a client does. The bytes, and how many were read from the segment. `fails`: nothing can be read.
fn read(data: &FilesystemData, filesystem: u64, wanted: Span, fails: bool) -> (Vec<u8>, u64) {
    let (mut bytes, mut missed) = (Vec::new(), 0);
    for step in data.plan(wanted, true, u64::MAX) {
        match step {
            Step::Cached(slice) => bytes.extend_from_slice(slice.bytes()),
            Step::Read { span, claims } => {
                missed += span.length;
                let there = content(filesystem, span);
                for claim in claims.into_iter().filter(|_| !fails) {
                    claim.put(span.address, &there, true);
                }
                bytes.extend(there);
            }
            Step::UnderWay { .. } => panic!("nobody else reads"),
        }
    }
    (bytes, missed)
}

fn check(cache: &DataCache) {
    for shard in &cache.shards {
        lock(shard).check();
    }
    assert!(cache.used_bytes() <= cache.capacity_bytes());
}

fn write(data: &FilesystemData, filesystem: u64, written: Span) {
    let there = content(filesystem, written);
    data.put(data.copy(written.segment, written.address, &there));
}

/// Two filesystems with segments of the same numbers, which are read and written at random. False if one read
/// something else than what is there.
fn reads_what_is_there(seed: u64, capacity: u64, mistake: Option<Mistake>) -> bool {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let cache = DataCache::new(capacity);
    let mut filesystems: Vec<(u64, FilesystemData)> = Vec::new();
    for step in 0..400 {
        while filesystems.len() < 2 {
            let number = 2 * step + filesystems.len() as u64;
            filesystems.push((number, cache.register(mistake)));
        }
        let at = random.random_range(0..2);
        let (filesystem, data) = &filesystems[at];
        let longest = if random.random_bool(0.5) { 4 } else { 60 };
        let length = random.random_range(1..longest);
        let wanted = span(
            random.random_range(1..4),
            random.random_range(0..120),
            length,
        );
        match random.random_range(0..100) {
            0..20 => write(data, *filesystem, wanted),
            20..22 => drop(filesystems.swap_remove(at)),
            22..30 => drop(data.plan(wanted, random.random_bool(0.5), 5 * BLOCK)),
            other => {
                let (bytes, _) = read(data, *filesystem, wanted, other < 35);
                if bytes != content(*filesystem, wanted) {
                    return false;
                }
            }
        }
        check(&cache);
    }
    drop(filesystems);
    assert!(cache.used_bytes() == 0 || mistake.is_some());
    let claims = cache.shards.iter().map(|shard| lock(shard).claims());
    assert_eq!(claims.sum::<usize>(), 0);
    true
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_is_read_is_what_was_written(seed: u64, pages in 0_u64..40) {
        prop_assert!(reads_what_is_there(seed, pages * 32 * 1024, None));
    }
}

#[test]
fn data_that_are_found_without_their_segment_or_filesystem_are_noticed() {
    for mistake in [Mistake::DataWithoutSegment, Mistake::DataWithoutFilesystem] {
        assert!(
            !reads_what_is_there(1, 8 << 20, Some(mistake)),
            "{mistake:?}"
        );
        assert!(reads_what_is_there(1, 8 << 20, None));
    }
}

#[test]
fn what_was_read_or_written_once_is_not_read_again() {
    let cache = DataCache::new(8 << 20);
    let data = cache.register(None);
    let wanted = span(1, 5, 40);
    assert_eq!(read(&data, 0, wanted, false).1, wanted.length);
    assert_eq!(read(&data, 0, wanted, false), (content(0, wanted), 0));
    let more = span(1, 0, 60);
    assert_eq!(
        read(&data, 0, more, false).1,
        20 * BLOCK,
        "what is missing alone"
    );
    write(&data, 0, span(2, 7, 30));
    assert_eq!(read(&data, 0, span(2, 7, 30), false).1, 0);
}

#[test]
fn a_read_that_fails_puts_nothing() {
    let cache = DataCache::new(8 << 20);
    let data = cache.register(None);
    let wanted = span(1, 0, 16);
    read(&data, 0, wanted, true);
    assert_eq!(cache.used_bytes(), 0);
    assert_eq!(read(&data, 0, wanted, false).1, wanted.length);
}

#[test]
fn nothing_is_cached_with_no_room() {
    let cache = DataCache::new(0);
    let data = cache.register(None);
    for _ in 0..2 {
        assert_eq!(read(&data, 0, span(1, 0, 16), false).1, 16 * BLOCK);
    }
    assert_eq!(cache.used_bytes(), 0);
}

#[test]
fn whatever_is_put_it_takes_no_more_than_its_bound() {
    for capacity in [4096, 5000, 70_000, 1 << 20, 40 << 20] {
        let cache = DataCache::new(capacity);
        let data = cache.register(None);
        for number in 0..2000 {
            write(&data, 0, span(number % 7, number * 13, 1 + number % 33));
            check(&cache);
        }
        // A whole page needs more than some of these have.
        let is_full = cache.used_bytes() > capacity / 2;
        assert!(
            is_full || capacity <= 70_000,
            "{} of {capacity}",
            cache.used_bytes()
        );
    }
}

/// What is stored besides data is at most a tenth, even if each page has but one block.
#[test]
fn little_of_the_room_is_taken_by_tables() {
    let cache = DataCache::new(4 << 20);
    let data = cache.register(None);
    let pages = 600;
    for page in 0..pages {
        write(&data, 0, span(1, page * 16, 1));
    }
    let bytes = pages * BLOCK;
    assert!(cache.used_bytes() <= bytes * 11 / 10 + pages * 8);
}

#[test]
fn reading_much_once_does_not_displace_what_is_read_often() {
    let cache = DataCache::new(4 << 20);
    let data = cache.register(None);
    let often = span(1, 0, 16 * 24);
    for _ in 0..3 {
        read(&data, 0, often, false);
    }
    // Ten times as much as there is room for, in small pieces.
    for first in (0..10_000).step_by(4) {
        read(&data, 0, span(2, first, 4), false);
    }
    assert_eq!(read(&data, 0, often, false).1, 0);
}

#[test]
fn what_comes_back_soon_after_it_went_stays() {
    let cache = DataCache::new(1 << 20);
    let data = cache.register(None);
    let page = |number: u64| span(1, number * 16, 16);
    for number in 0..20 {
        read(&data, 0, page(number), false);
    }
    // It went a short while ago.
    assert!(read(&data, 0, page(3), false).1 > 0);
    for number in 100..200 {
        read(&data, 0, page(number), false);
    }
    assert_eq!(read(&data, 0, page(3), false).1, 0);
}

#[test]
fn who_comes_second_waits_for_the_first_until_it_reads_no_more() {
    let cache = DataCache::new(8 << 20);
    let data = cache.register(None);
    let wanted = span(1, 0, 32);
    let mut first = data.plan(wanted, true, u64::MAX);
    let mut second = data.plan(span(1, 8, 40), true, u64::MAX);
    let [
        Step::UnderWay { span: waits, ends },
        Step::Read { span: rest, .. },
    ] = &mut second[..]
    else {
        panic!("it reads what nobody else does");
    };
    assert_eq!((*waits, *rest), (span(1, 8, 24), span(1, 32, 16)));
    assert!(ends.iter_mut().all(|end| end.try_recv() == Ok(None)));
    let Some(Step::Read { span, claims }) = first.pop() else {
        panic!("it reads all");
    };
    for claim in claims {
        claim.put(span.address, &content(0, span), true);
    }
    assert!(ends.iter_mut().all(|end| end.try_recv() == Ok(Some(()))));
    drop(second);
    // Claims that were dropped are nobody's.
    assert_eq!(read(&data, 0, rest_of(wanted), false).1, 16 * BLOCK);
}

fn rest_of(wanted: Span) -> Span {
    let address = wanted.address + wanted.length;
    Span {
        address,
        length: 16 * BLOCK,
        ..wanted
    }
}

#[test]
fn a_large_range_is_planned_in_pieces() {
    let cache = DataCache::new(8 << 20);
    let data = cache.register(None);
    let steps = data.plan(span(1, 3, 100), false, 32 * BLOCK);
    let lengths = steps.iter().map(|step| match step {
        Step::Read { span, .. } => span.length / BLOCK,
        _ => 0,
    });
    assert_eq!(lengths.collect::<Vec<_>>(), [29, 32, 32, 7]);
}
