//! Requests that touch the same blocks.

use super::*;

#[test]
fn stable_reads_a_read_waits_for_an_overlapping_write_and_a_write_for_a_read() {
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
fn a_write_that_waited_is_numbered_after_those_that_it_waited_for() {
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
fn a_discard_waits_for_everything_else_and_everything_else_for_it() {
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
