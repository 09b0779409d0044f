use super::*;

fn at(bench: &mut Bench, ms: u64) {
    bench.client.set_now_us(ms * 1000);
    bench.tick();
}

#[test]
fn slow_read_is_hedged_to_another_replica_whose_reply_counts() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN, SYNCING]));
    bench.script.abandons = true;
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    at(&mut bench, 1);
    assert_eq!(bench.nodes(), [1], "not yet");
    at(&mut bench, 10);
    assert_eq!(bench.nodes(), [1, 2]);
    at(&mut bench, 50);
    assert_eq!(bench.nodes(), [1, 2], "a syncing replica is not read");
    bench.answer(1, Ok(()));
    assert_eq!(bench.script.abandoned, [NodeId(1)]);
    assert_eq!(bench.done[&1], Ok(()));
    assert_eq!(bench.client.hedged_reads(), 1);
    // The answer that nobody waits for any more.
    bench.answer(0, Ok(()));
    bench.assert_idle();
    assert!(!bench.client.needs_tick());
}

#[test]
fn hedged_read_that_cannot_be_cancelled_waits_for_both_replies() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    at(&mut bench, 10);
    bench.answer(1, Ok(()));
    assert!(
        bench.done.is_empty(),
        "the first may still be filling the buffer"
    );
    bench.answer(0, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// Both bring their bytes to the guest's buffer: those of the one that failed may lie over the good ones, or
/// the good ones were verified while they came.
#[test]
fn hedged_read_with_one_failed_reply_is_retried_alone() {
    let corrupt = Err(Refusal::Corrupt);
    let mismatch = Err(Refusal::Mismatch);
    for (first, second, asked_again) in [
        (corrupt, Ok(()), 2),
        (Ok(()), corrupt, 1),
        (Err(Refusal::Unreachable), Ok(()), 2),
        (corrupt, mismatch, 2),
        (mismatch, corrupt, 1),
    ] {
        for swapped in [false, true] {
            let mut bench = Bench::new(set(1, 1, &[IN, IN]));
            assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
            at(&mut bench, 10);
            let mut answers = [(0, first), (1, second)];
            if swapped {
                answers.reverse();
            }
            for (sent, answer) in answers {
                assert!(bench.done.is_empty());
                bench.answer(sent, answer);
            }
            assert!(bench.done.is_empty(), "{first:?} {second:?}");
            assert_eq!(bench.nodes(), [1, 2, asked_again], "{first:?} {second:?}");
            at(&mut bench, 200);
            assert_eq!(bench.nodes().len(), 3, "alone");
            bench.answer(2, Ok(()));
            assert_eq!(bench.done[&1], Ok(()));
        }
    }
}

#[test]
fn read_corrupted_in_transit_fails_only_if_all_replicas_fail() {
    for last in [Ok(()), Err(Refusal::Mismatch)] {
        let mut bench = Bench::new(set(1, 1, &[IN, IN]));
        assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
        bench.answer(0, Err(Refusal::Mismatch));
        assert_eq!(bench.nodes(), [1, 2]);
        bench.answer(1, last);
        let expected = last.map_err(|_| IoError::Device(libc::EIO));
        assert_eq!(bench.done[&1], expected);
        bench.assert_idle();
    }
}

#[test]
fn of_two_that_are_asked_one_may_refuse() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.script.abandons = true;
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    at(&mut bench, 10);
    bench.answer(1, Err(Refusal::Invalid));
    assert!(bench.done.is_empty());
    bench.answer(0, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn read_goes_to_the_local_replica_first_in_any_map_order() {
    for (near, asked) in [(1, [1, 2]), (3, [3, 1])] {
        let mut bench = Bench::new(set(1, 1, &[IN, IN, IN]).near(NodeId(near)));
        assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
        bench.answer(0, Err(Refusal::Corrupt));
        assert_eq!(bench.nodes(), asked);
        bench.answer(1, Ok(()));
        assert_eq!(bench.done[&1], Ok(()));
    }
    // As the newer map does, too.
    let mut bench = Bench::new(set(1, 1, &[IN, IN]).near(NodeId(2)));
    bench.map(set(2, 1, &[IN, IN, IN]).near(NodeId(2)));
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    assert_eq!(bench.nodes(), [2]);
    bench.answer(0, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
}

#[test]
fn reads_that_are_answered_in_time_are_not_doubled() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    for tag in 0..20 {
        assert_eq!(bench.submit(tag, Op::Read, 0, 4096), Submit::Pending);
        at(&mut bench, 10 * tag);
        bench.answer(tag as usize, Ok(()));
        at(&mut bench, 10 * tag + 9);
    }
    assert_eq!(bench.client.hedged_reads(), 0);
    bench.assert_idle();
}

#[test]
fn slow_replica_is_reported_unless_the_in_sync_set_needs_it() {
    for (min_in_sync, expected) in [(2, 1), (3, 0)] {
        let mut bench = Bench::new(set(1, min_in_sync, &[IN, IN, IN]));
        for round in 0..200u64 {
            let start = round * 50_000;
            bench.client.set_now_us(start);
            bench.write(round, 0, 4096);
            let first = 3 * round as usize;
            bench.client.set_now_us(start + 500);
            bench.answer(first, Ok(()));
            bench.answer(first + 1, Ok(()));
            bench.client.set_now_us(start + 45_000);
            bench.answer(first + 2, Ok(()));
            bench.tick();
        }
        let slow: Vec<_> = std::iter::from_fn(|| bench.client.poll_action()).collect();
        assert_eq!(slow.len(), expected, "{slow:?}");
        if let Some(slow) = slow.first() {
            let is_it = ClientAction::ReportSlow {
                pg: PgId(0),
                node: NodeId(3),
                epoch: Epoch(1),
            };
            assert_eq!(*slow, is_it);
        }
    }
}
