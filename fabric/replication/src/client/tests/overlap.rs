//! Requests that touch the same blocks.

use super::*;
use crate::overlap::Access;

#[test]
fn stable_reads_overlapping_read_and_write_wait_for_each_other() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.write(1, 0, 4096);
    assert_eq!(bench.submit(2, Op::Read, 0, 8192), Submit::Pending);
    assert_eq!(bench.nodes(), [1, 2], "the read waits");
    bench.answer(0, Ok(()));
    assert_eq!(bench.nodes(), [1, 2]);
    bench.answer(1, Ok(()));
    assert_eq!(bench.nodes(), [1, 2, 1]);
    bench.write(3, 4096, 4096);
    assert_eq!(bench.nodes(), [1, 2, 1], "the write waits");
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    assert_eq!(bench.nodes(), [1, 2, 1, 1, 2]);
    bench.answer(3, Ok(()));
    bench.answer(4, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    bench.assert_idle();
}

#[test]
fn delayed_write_is_numbered_after_the_writes_it_waited_for() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    let sequence = |bench: &Bench, nth: usize| bench.script.sent[nth].1.sequence;
    bench.write(1, 0, 8192);
    // It waits, and so does the next; the third does not, and is newer than both.
    bench.write(2, 4096, 8192);
    bench.write(3, 8192, 4096);
    assert_eq!(bench.nodes(), [1, 2, 1, 2]);
    let third = sequence(&bench, 2);
    bench.answer(2, Ok(()));
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    assert_eq!(bench.nodes(), [1, 2, 1, 2, 1, 2]);
    assert!(sequence(&bench, 4) > third);
    assert_eq!(sequence(&bench, 4), sequence(&bench, 5));
    assert!(bench.script.sent[4].1.watermark <= sequence(&bench, 0));
    bench.answer(4, Ok(()));
    bench.answer(5, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    bench.assert_idle();
}

#[test]
fn discard_waits_for_all_other_requests_and_they_for_it() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.write(1, 0, 4096);
    assert_eq!(bench.submit(2, Op::Discard, CHUNK, 4096), Submit::Pending);
    assert_eq!(bench.nodes(), [1, 2]);
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    assert_eq!(bench.nodes(), [1, 2, 1, 2]);
    assert_eq!(bench.submit(3, Op::Read, 2 * CHUNK, 512), Submit::Pending);
    assert_eq!(bench.nodes(), [1, 2, 1, 2]);
    bench.answer(2, Ok(()));
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    bench.answer(4, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    bench.assert_idle();
}

#[test]
fn zeroes_that_waited_are_written_once_a_piece_is_free() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    let overlap = bench.volume.overlap.get_or_init(Default::default);
    // Another data thread reads.
    overlap.enter(1, Access::Read, &(0..4096)).unwrap();
    let zeroes = Op::WriteZeroes { unmap: false };
    assert_eq!(bench.submit(1, zeroes, 0, 4096), Submit::Pending);
    let mut others = Vec::new();
    while let Some(piece) = bench.client.pieces.take() {
        others.push(piece);
    }
    let overlap = bench.volume.overlap.get().unwrap();
    overlap.leave(1, Access::Read, &(0..4096));
    bench.tick();
    assert!(bench.done.is_empty(), "nothing was written");
    for piece in others {
        bench.client.pieces.give_back(piece);
    }
    bench.tick();
    assert_eq!(bench.nodes(), [1, 2]);
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}
