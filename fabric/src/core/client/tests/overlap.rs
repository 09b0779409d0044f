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
