//! Writes that all replicas refuse: whether some of them may have a part all the same decides how they end.

use super::*;

/// A write covers a block in part, and what it does not cover is lost.
const LOST: [Refusal; 2] = [Refusal::Corrupt, Refusal::Device(libc::EIO)];

#[test]
fn write_stored_nowhere_fails_at_once_and_drops_no_replica() {
    for (first, second) in [(0, 0), (0, 1), (1, 1)] {
        let mut bench = Bench::new(set(1, 2, &[IN, SYNCING, IN]));
        bench.write(1, 512, 8192);
        bench.answer(0, Err(LOST[first]));
        // One that is being compared puts it off first.
        bench.answer(1, Err(Refusal::Behind(Epoch(1))));
        bench.answer(2, Err(LOST[second]));
        assert!(bench.done.is_empty());
        bench.tick();
        assert_eq!(bench.nodes(), [1, 2, 3, 1, 2, 3]);
        bench.answer(3, Err(LOST[first]));
        bench.answer(4, Err(Refusal::Corrupt));
        assert!(bench.done.is_empty());
        bench.answer(5, Err(LOST[second]));
        let error = match second {
            0 => IoError::Corrupt,
            _ => IoError::Device(libc::EIO),
        };
        assert_eq!(bench.done[&1], Err(error));
        assert_eq!(bench.client.poll_action(), None, "meta is not asked");
        bench.assert_idle();
    }
}

#[test]
fn write_possibly_stored_fails_once_one_replica_is_left() {
    let page = 1 << 20;
    let (write, zeroes) = (Op::Write { fua: false }, Op::WriteZeroes { unmap: false });
    let maybe = [
        // Another refusal than that of a lost block.
        (write, 512, Refusal::Device(libc::EROFS)),
        // Another map page may have been stored. No piece of a write lies in two.
        (zeroes, page - 4096 - 512, Refusal::Corrupt),
    ];
    for (op, offset, refusal) in maybe {
        let mut bench = Bench::new(set(1, 1, &[IN, IN]));
        assert_eq!(bench.submit(1, op, offset, 8192), Submit::Pending);
        bench.answer(0, Err(Refusal::Corrupt));
        bench.answer(1, Err(refusal));
        assert!(bench.done.is_empty(), "{refusal:?}");
        assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
        bench.map(set(2, 1, &[IN, OUT]));
        assert!(bench.done[&1].is_err());
        bench.assert_idle();
    }
}

/// One of them had stored it under its first number, and the block rotted there since.
#[test]
fn a_write_that_was_numbered_anew_may_have_been_stored_before() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.write(1, 512, 8192);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Renumber));
    bench.answer(2, Err(Refusal::Corrupt));
    bench.answer(3, Err(Refusal::Corrupt));
    assert!(bench.done.is_empty());
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.map(set(2, 1, &[IN, OUT]));
    assert_eq!(bench.done[&1], Err(IoError::Corrupt));
    bench.assert_idle();
}

#[test]
fn a_flush_that_all_devices_refuse_is_no_lost_block() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Pending);
    bench.answer(2, Err(Refusal::Device(libc::EIO)));
    bench.answer(3, Err(Refusal::Device(libc::EIO)));
    assert!(!bench.done.contains_key(&2));
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
}
