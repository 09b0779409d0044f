//! Replicas without space: which of the writes that wait are tried, who leaves, and how they end.

use fabric_types::ids::Version;

use super::super::full::RETRY_US;
use super::full::{FULL, FULL_IN_PART, WAIT_US};
use super::*;

/// A discard keeps everything else on its volume away.
#[test]
fn who_has_no_space_for_a_discard_that_others_have_leaves_soon() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.discard(1, 0, 4096);
    for (nth, result) in [Ok(()), FULL, Ok(())].into_iter().enumerate() {
        bench.answer(nth, result);
    }
    bench.at(0);
    assert_eq!(bench.refuse_a_second(1), [2], "it is never urgent");
    bench.nobody_is_reported();
    assert_eq!(bench.refuse_a_second(2), [2]);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.map(set(2, 2, &[IN, OUT, IN]));
    bench.tick();
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// For as long as nobody had it, it was in nobody's way.
#[test]
fn the_time_for_a_discard_begins_when_somebody_has_it() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.discard(1, 0, 4096);
    bench.answer_from(0, FULL);
    bench.at(0);
    for second in 1..10 {
        assert_eq!(bench.refuse_a_second(second), [1, 2]);
    }
    let sent = bench.script.sent.len();
    bench.at(10 * RETRY_US);
    bench.answer(sent, Ok(()));
    bench.answer(sent + 1, FULL);
    bench.nobody_is_reported();
    assert_eq!(bench.refuse_a_second(11), [2]);
    bench.nobody_is_reported();
    assert_eq!(bench.refuse_a_second(12), [2]);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
}

#[test]
fn a_discard_that_too_few_others_have_waits() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.discard(1, 0, 4096);
    for (nth, result) in [Ok(()), FULL, FULL].into_iter().enumerate() {
        bench.answer(nth, result);
    }
    bench.at(0);
    for second in 1..100 {
        assert_eq!(bench.refuse_a_second(second), [2, 3]);
    }
    bench.nobody_is_reported();
    let sent = bench.script.sent.len();
    bench.at(100 * RETRY_US);
    bench.answer_from(sent, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// Of which only the first pieces are cut.
#[test]
fn a_long_discard_that_nobody_has_keeps_nobody_away() {
    const PIECES: u64 = 40;
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.discard(1, 0, PIECES * CHUNK);
    let cut = bench.script.sent.len();
    assert!(cut < 2 * PIECES as usize);
    bench.answer_from(0, FULL);
    assert_eq!(bench.submit(2, Op::Read, 0, 4096), Submit::Pending);
    assert_eq!(bench.script.sent.len(), cut + 1, "the read is sent");
    bench.answer(cut, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    bench.write(3, CHUNK, 4096);
    bench.answer_from(cut + 1, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    let after = bench.script.sent.len();
    for second in 1..10 {
        bench.at(second * RETRY_US);
        bench.tick();
        let mut nth = after;
        while nth < bench.script.sent.len() {
            if bench
                .client
                .pieces
                .find(Key(bench.script.sent[nth].1.id.0))
                .is_some()
            {
                bench.answer(nth, Ok(()));
            }
            nth += 1;
        }
    }
    assert_eq!(bench.done[&1], Ok(()));
    let write = bench.version(cut + 1);
    let discarded = &bench.script.sent[after..];
    assert_eq!(discarded.len() as u64, 2 * PIECES);
    for (_, request) in discarded {
        let version = Version::of(request.generation, request.sequence);
        assert!(version > write, "it comes after the write");
    }
    bench.assert_idle();
}

/// The replica takes short writes and refuses long ones.
#[test]
fn short_writes_that_succeed_have_long_ones_tried_no_more_often() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    let mut next = 0;
    let mut long = 0;
    let mut answer_all = |bench: &mut Bench| {
        let from = long;
        while next < bench.script.sent.len() {
            let (node, request) = bench.script.sent[next];
            let is_long = matches!(request.command, Command::Write { len: 1048576, .. });
            let is_full = node == NodeId(2) && is_long;
            long += u64::from(is_full);
            bench.answer(next, if is_full { FULL } else { Ok(()) });
            next += 1;
        }
        long - from
    };
    for tag in 0..8 {
        bench.write(tag, tag << 20, 1 << 20);
    }
    // One of them may have been stored by the other replica, and is urgent.
    answer_all(&mut bench);
    for ms in 0..20_000u64 {
        bench.at(ms * 1000);
        if ms % 10 == 0 {
            bench.write(100 + ms, (50 << 20) + (ms % 1000) * 4096, 4096);
        }
        let asked = answer_all(&mut bench);
        assert!(asked <= 2, "{asked} at once");
    }
    assert!(long < 8 + 8 + 2 * 22, "tried {long} times in 20 s");
    bench.nobody_is_reported();
}

/// Urgent writes find space that others do not.
#[test]
fn writes_that_others_have_go_on_together_while_others_are_refused() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    for tag in 0..8 {
        bench.write(tag, tag * 8192, 4096);
    }
    for nth in 0..16 {
        bench.answer(nth, if nth % 2 == 0 { Ok(()) } else { FULL });
    }
    for nth in 16..bench.script.sent.len() {
        let is_second = bench.script.sent[nth].0 == NodeId(2);
        bench.answer(nth, if is_second { FULL } else { Ok(()) });
    }
    let sent = bench.script.sent.len();
    bench.write(8, 1 << 20, 4096);
    bench.answer_from(sent, FULL);
    bench.client.set_now_us(RETRY_US);
    for _ in 0..6 {
        let sent = bench.script.sent.len();
        bench.tick();
        for nth in sent..bench.script.sent.len() {
            let is_urgent = bench.is_urgent(nth);
            bench.answer(nth, if is_urgent { Ok(()) } else { FULL });
        }
    }
    assert_eq!(bench.done.len(), 8);
    assert!(!bench.done.contains_key(&8));
}

#[test]
fn members_that_leave_are_not_counted_on_for_others() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    bench.write(2, 8192, 4096);
    // The first lacks space at one replica, the second at another one.
    let mut next = 0;
    let mut answer_all = |bench: &mut Bench| {
        while next < bench.script.sent.len() {
            let (node, request) = bench.script.sent[next];
            let Command::Write { offset, .. } = request.command else {
                panic!("{request:?}")
            };
            let lacks = if offset == 0 { 1 } else { 2 };
            bench.answer(next, if node.0 == lacks { FULL } else { Ok(()) });
            next += 1;
        }
    };
    answer_all(&mut bench);
    let mut reported = Vec::new();
    for second in 0..70 {
        bench.at(second * RETRY_US);
        answer_all(&mut bench);
        reported.extend(std::iter::from_fn(|| bench.client.poll_action()));
    }
    assert_eq!(reported.len(), 1, "two would leave one: {reported:?}");
    assert!(bench.done.is_empty());
}

#[test]
fn the_one_at_fault_among_full_ones_is_reported_alone() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    let answers = [FULL, Err(Refusal::Device(libc::EROFS)), FULL];
    for (nth, result) in answers.into_iter().enumerate() {
        bench.answer(nth, result);
    }
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.nobody_is_reported();
    bench.map(set(2, 1, &[IN, OUT, IN]));
    bench.answer_from(3, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn what_all_have_in_part_only_is_given_up_when_its_time_is_over() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL_IN_PART);
    bench.at(0);
    for second in 1..60 {
        let sent = bench.script.sent.len();
        bench.at(second * RETRY_US);
        bench.answer_from(sent, FULL_IN_PART);
    }
    bench.nobody_is_reported();
    let sent = bench.script.sent.len();
    bench.at(WAIT_US);
    bench.answer_from(sent, FULL_IN_PART);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(3, 1)));
    bench.nobody_is_reported();
    assert!(bench.done.is_empty());
    bench.map(set(2, 2, &[IN, OUT, OUT]));
    bench.tick();
    assert_eq!(bench.done[&1], Err(IoError::NoSpace));
    bench.assert_idle();
}

#[test]
fn of_writes_that_others_have_each_gets_its_turn() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    for tag in 0..3 {
        bench.write(tag, tag * 8192, 4096);
    }
    for nth in 0..6 {
        bench.answer(nth, if nth % 2 == 0 { Ok(()) } else { FULL });
    }
    let copies = bench.script.sent.len();
    for nth in 6..copies {
        let is_second = bench.script.sent[nth].0 == NodeId(2);
        bench.answer(nth, if is_second { FULL } else { Ok(()) });
    }
    // One that nobody has, too.
    bench.write(3, 1 << 20, 4096);
    bench.answer_from(copies, FULL);
    bench.at(0);
    let mut tried = Vec::new();
    for second in 1..4 {
        let sent = bench.script.sent.len();
        bench.at(second * RETRY_US);
        for nth in sent..bench.script.sent.len() {
            let Command::Write { offset, .. } = bench.script.sent[nth].1.command else {
                panic!("no write");
            };
            tried.push(offset);
        }
        bench.answer_from(sent, FULL);
    }
    tried.sort_unstable();
    let of_nobody = 1 << 20;
    assert_eq!(tried, [0, 8192, 16384, of_nobody, of_nobody, of_nobody]);
}

/// A queue that is to stop waits for what it has taken.
#[test]
fn held_writes_end_soon_once_the_volume_does_not_wait_any_more() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    let sent = bench.script.sent.len();
    bench.write(2, CHUNK, 4096);
    // It is asked first, and the others are sent what it has accepted.
    bench.answer(sent, Ok(()));
    bench.answer(sent + 1, Ok(()));
    bench.answer(sent + 2, FULL);
    bench.answer_from(sent + 3, FULL);
    bench.at(1000);
    assert!(bench.done.is_empty());
    bench.volume.set_on_full(OnFull::ERROR);
    let sent = bench.script.sent.len();
    bench.at(2000);
    assert_eq!(bench.done[&1], Err(IoError::NoSpace));
    bench.answer_from(sent, FULL);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(1, 1)));
    bench.map(set(2, 2, &[OUT, IN, IN]));
    bench.tick();
    assert_eq!(bench.done[&2], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_write_whose_time_is_over_ends_though_others_are_in_its_way() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    bench.at(0);
    bench.discard(2, 0, 4096);
    bench.at(WAIT_US);
    assert_eq!(bench.done[&1], Err(IoError::NoSpace));
    bench.answer_from(2, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_write_without_memory_for_its_copy_is_held() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    let copies = std::mem::replace(&mut bench.client.private_bytes, 1 << 30);
    bench.write(2, 8192, 4096);
    assert_eq!(bench.script.sent.len(), 2);
    assert_eq!(bench.volume.held_writes().pieces, 2);
    bench.discard(3, 0, 1 << 20);
    assert_eq!(bench.script.sent.len(), 4, "nothing is in its way");
    bench.answer_from(2, Ok(()));
    bench.client.private_bytes = copies;
    for second in 1..4 {
        let sent = bench.script.sent.len();
        bench.at(second * RETRY_US);
        bench.answer_from(sent, Ok(()));
    }
    assert_eq!(bench.done.len(), 3);
    assert!(bench.done.values().all(Result::is_ok));
    bench.assert_idle();
}

#[test]
fn nothing_is_remembered_of_pieces_that_are_over() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, SYNCING]));
    bench.write(1, 0, 4096);
    for (nth, result) in [FULL, Ok(()), FULL].into_iter().enumerate() {
        bench.answer(nth, result);
    }
    bench.map(set(2, 2, &[IN, IN, OUT]));
    let sent = bench.script.sent.len();
    bench.write(2, CHUNK, 4096);
    assert_eq!(bench.nodes()[sent..], [1], "a suspect is in sync");
    bench.map(set(3, 1, &[OUT, IN, OUT]));
    bench.volume.revoke();
    let done = &mut bench.done;
    bench
        .client
        .end_revoked(&mut bench.script, &mut |tag, result| {
            done.insert(tag.0, result);
        });
    let mut nth = 0;
    while nth < bench.script.sent.len() {
        bench.answer(nth, FULL);
        nth += 1;
    }
    bench.at(RETRY_US);
    bench.assert_idle();
    assert!(bench.client.full.is_empty());
}
