//! Replicas without space: writes wait and nobody is reported.

use fabric_types::ids::Version;

use super::super::full::RETRY_US;
use super::private_copy::{bytes_of, write_memory};
use super::*;

/// Nothing of the write was stored.
pub(super) const FULL: Result<(), Refusal> = Err(Refusal::NoSpace { untouched: true });
/// A part of it may be.
pub(super) const FULL_IN_PART: Result<(), Refusal> = Err(Refusal::NoSpace { untouched: false });
/// What volumes wait for space by default.
pub(super) const WAIT_US: u64 = 60 * RETRY_US;

impl Bench {
    /// It is this time now, and a tick passes.
    pub(super) fn at(&mut self, now_us: u64) {
        self.client.set_now_us(now_us);
        self.tick();
    }

    /// Answers all that was sent since the `from`th request.
    pub(super) fn answer_from(&mut self, from: usize, result: Result<(), Refusal>) {
        let mut nth = from;
        while nth < self.script.sent.len() {
            self.answer(nth, result);
            nth += 1;
        }
    }

    /// A second passes, and whoever is asked refuses; who that is.
    pub(super) fn refuse_a_second(&mut self, second: u64) -> Vec<u64> {
        let sent = self.script.sent.len();
        self.at(second * RETRY_US);
        self.answer_from(sent, FULL);
        self.nodes()[sent..].to_vec()
    }

    pub(super) fn version(&self, nth: usize) -> Version {
        let request = &self.script.sent[nth].1;
        Version::of(request.generation, request.sequence)
    }

    pub(super) fn is_urgent(&self, nth: usize) -> bool {
        let command = self.script.sent[nth].1.command;
        matches!(command, Command::Write { urgent: true, .. })
    }

    pub(super) fn nobody_is_reported(&mut self) {
        assert_eq!(self.client.poll_action(), None);
    }
}

#[test]
fn a_write_that_nobody_has_space_for_waits_and_ends_with_no_space() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    bench.at(0);
    let mut asked = Vec::new();
    for second in 1..60 {
        asked.extend(bench.refuse_a_second(second));
        assert!(bench.done.is_empty(), "after {second} s");
    }
    assert_eq!(asked, [3; 59], "one replica, once a second");
    let held = bench.volume.held_writes();
    assert_eq!((held.pieces, held.longest.as_secs()), (1, 59));
    bench.refuse_a_second(60);
    assert_eq!(bench.done[&1], Err(IoError::NoSpace));
    assert_eq!(bench.volume.held_writes(), Default::default());
    bench.nobody_is_reported();
    bench.assert_idle();
    assert!(!bench.client.needs_tick());
}

#[test]
fn a_write_goes_on_as_soon_as_there_is_space() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    for second in 0..5 {
        bench.refuse_a_second(second);
    }
    let sent = bench.script.sent.len();
    bench.at(5 * RETRY_US);
    // Each that was full is asked alone: the next one may be still.
    for (nth, node) in [3, 2, 1].into_iter().enumerate() {
        assert_eq!(bench.nodes()[sent + nth..], [node]);
        assert!(bench.done.is_empty());
        bench.answer(sent + nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    // They have space: the next one is sent to all.
    bench.write(2, 0, 4096);
    assert_eq!(bench.nodes()[sent + 3..], [1, 2, 3]);
    bench.answer_from(sent + 3, Ok(()));
    bench.nobody_is_reported();
    bench.assert_idle();
}

#[test]
fn what_others_have_is_urgent_where_there_is_no_space() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    let mut memory = vec![1; 4096];
    write_memory(&mut bench, 1, &mut memory);
    bench.answer(0, Ok(()));
    bench.answer(1, FULL);
    assert!(!bench.is_urgent(1));
    memory.fill(2);
    bench.answer(2, Ok(()));
    // The guest may have changed its buffer: all get the same copy.
    assert_eq!(bench.nodes()[3..], [1, 2, 3]);
    memory.fill(3);
    for nth in 3..6 {
        assert!(bench.is_urgent(nth));
        assert!(bytes_of(&bench.script.sent[nth].1) == vec![2; 4096]);
        assert_eq!(bench.version(nth), bench.version(0));
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    bench.nobody_is_reported();
    bench.assert_idle();
}

#[test]
fn who_was_full_is_asked_first_and_alone() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 8192);
    for (nth, result) in [Ok(()), FULL, Ok(())].into_iter().enumerate() {
        bench.answer(nth, result);
    }
    bench.answer_from(3, Ok(()));
    assert_eq!(bench.done[&1], Ok(()), "by the reserve, which is no space");
    let mut memory = vec![1; 8192];
    write_memory(&mut bench, 2, &mut memory);
    assert_eq!(bench.nodes()[6..], [2]);
    bench.answer(6, FULL);
    bench.at(0);
    bench.at(RETRY_US);
    assert_eq!(bench.nodes()[7..], [2], "nobody else has it");
    memory.fill(2);
    bench.answer(7, Ok(()));
    memory.fill(3);
    // It had the data that were there when it was asked.
    assert_eq!(bench.nodes()[8..], [1, 3]);
    for nth in 8..10 {
        assert!(bytes_of(&bench.script.sent[nth].1) == vec![1; 8192]);
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&2], Ok(()));
    bench.write(3, 0, 4096);
    assert_eq!(bench.nodes()[10..], [1, 2, 3]);
    bench.answer_from(10, Ok(()));
    bench.nobody_is_reported();
    bench.assert_idle();
}

#[test]
fn who_takes_short_writes_may_have_no_space_for_long_ones() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.write(1, 0, 65536);
    bench.answer(0, Ok(()));
    bench.answer(1, FULL);
    bench.answer_from(2, Ok(()));
    let asked_first = |bench: &mut Bench, tag, len| {
        let sent = bench.script.sent.len();
        bench.write(tag, 0, len);
        let first = bench.nodes()[sent..].to_vec();
        bench.answer_from(sent, Ok(()));
        assert_eq!(bench.done[&tag], Ok(()));
        first
    };
    assert_eq!(asked_first(&mut bench, 2, 4096), [2]);
    assert_eq!(asked_first(&mut bench, 3, 4096), [2]);
    bench.client.set_now_us(10 * RETRY_US);
    assert_eq!(asked_first(&mut bench, 4, 4096), [2], "for the last time");
    assert_eq!(asked_first(&mut bench, 5, 4096), [1, 2]);
    bench.assert_idle();
}

#[test]
fn who_stays_full_leaves_after_the_wait_if_enough_others_have_the_write() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    for (nth, result) in [Ok(()), FULL, Ok(())].into_iter().enumerate() {
        bench.answer(nth, result);
    }
    for (nth, result) in [Ok(()), FULL, Ok(())].into_iter().enumerate() {
        bench.answer(3 + nth, result);
    }
    bench.at(0);
    for second in 1..60 {
        assert_eq!(bench.refuse_a_second(second), [2]);
        assert!(bench.is_urgent(bench.script.sent.len() - 1));
        bench.nobody_is_reported();
    }
    bench.refuse_a_second(60);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.refuse_a_second(61);
    bench.nobody_is_reported();
    assert!(bench.done.is_empty(), "Shrink before ack");
    bench.map(set(2, 2, &[IN, OUT, IN]));
    bench.tick();
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn who_stays_full_stays_where_too_few_others_have_the_write() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    for from in [0, 3] {
        for (nth, result) in [FULL, FULL, Ok(())].into_iter().enumerate() {
            bench.answer(from + nth, result);
        }
    }
    bench.at(0);
    for second in 1..200 {
        assert_eq!(bench.refuse_a_second(second), [1, 2]);
    }
    bench.nobody_is_reported();
    assert!(bench.done.is_empty(), "it must not end half done");
    let sent = bench.script.sent.len();
    bench.at(200 * RETRY_US);
    bench.answer_from(sent, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_volume_that_does_not_wait_hears_it_at_once() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.volume.set_on_full(OnFull::ERROR);
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    assert_eq!(bench.done[&1], Err(IoError::NoSpace));
    bench.nobody_is_reported();
    bench.assert_idle();
    // One is asked first, so nobody has it.
    bench.write(2, 0, 4096);
    assert_eq!(bench.nodes()[3..], [3]);
    bench.answer(3, FULL);
    assert_eq!(bench.done[&2], Err(IoError::NoSpace));
    // What others have cannot be taken back.
    bench.write(3, CHUNK, 4096);
    for (nth, result) in [Ok(()), Ok(()), FULL].into_iter().enumerate() {
        bench.answer(4 + nth, result);
    }
    bench.nobody_is_reported();
    assert_eq!(
        bench.nodes()[4..],
        [3, 2, 1, 1],
        "the last one with urgency"
    );
    bench.answer(7, FULL);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(1, 1)));
    bench.map(set(2, 2, &[OUT, IN, IN]));
    bench.tick();
    assert_eq!(bench.done[&3], Ok(()));
    bench.assert_idle();
}

#[test]
fn one_that_is_being_compared_and_has_no_space_is_reported() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, SYNCING]));
    bench.write(1, 0, 4096);
    for (nth, result) in [Ok(()), Ok(()), FULL].into_iter().enumerate() {
        bench.answer(nth, result);
    }
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(3, 1)));
    bench.map(set(2, 2, &[IN, IN, OUT]));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn who_is_at_fault_is_reported_and_who_is_full_is_not() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    let answers = [Ok(()), FULL, Err(Refusal::Unreachable)];
    for (nth, result) in answers.into_iter().enumerate() {
        bench.answer(nth, result);
    }
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(3, 1)));
    bench.map(set(2, 1, &[IN, IN, OUT]));
    let sent = bench.script.sent.len();
    bench.answer_from(3, Ok(()));
    assert!(sent > 3, "the full one is asked again");
    bench.nobody_is_reported();
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// It does not say whether it has a part, and takes an urgent write for a plain one.
#[test]
fn a_full_peer_of_an_older_release_leaves_after_the_wait() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    for from in [0, 3] {
        for (nth, result) in [FULL_IN_PART, Ok(()), Ok(())].into_iter().enumerate() {
            bench.answer(from + nth, result);
        }
    }
    bench.at(0);
    for second in 1..60 {
        let sent = bench.script.sent.len();
        bench.at(second * RETRY_US);
        assert_eq!(bench.nodes()[sent..], [1]);
        bench.answer(sent, FULL_IN_PART);
        bench.nobody_is_reported();
    }
    // What comes next it gets first, and all of it has to be sent on: it may have a part.
    let sent = bench.script.sent.len();
    bench.write(2, CHUNK, 4096);
    bench.answer(sent, FULL_IN_PART);
    assert_eq!(bench.nodes()[sent..], [1, 2, 3]);
    bench.answer_from(sent + 1, Ok(()));
    assert!(bench.is_urgent(bench.script.sent.len() - 1));
    assert_eq!(bench.done[&2], Ok(()), "there was space for this one");
    let sent = bench.script.sent.len();
    bench.at(WAIT_US);
    bench.answer_from(sent, FULL_IN_PART);
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(1, 1)));
}

#[test]
fn a_discard_and_a_read_do_not_wait_for_what_is_held() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    bench.at(0);
    assert_eq!(bench.submit(2, Op::Read, 0, 4096), Submit::Pending);
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    bench.discard(3, 0, 4096);
    assert_eq!(bench.nodes()[3..], [1, 2], "it makes space");
    // The write waits for the discard, and is the newer one.
    bench.at(RETRY_US);
    assert_eq!(bench.script.sent.len(), 5);
    bench.answer(3, Ok(()));
    bench.answer(4, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    bench.tick();
    assert_eq!(bench.nodes()[5..], [2]);
    assert!(bench.version(5) > bench.version(3));
    // Now it is in the way of others again.
    bench.discard(4, 0, 4096);
    assert_eq!(bench.script.sent.len(), 6);
    bench.answer_from(5, Ok(()));
    bench.tick();
    bench.answer_from(8, Ok(()));
    assert_eq!(bench.done.len(), 4);
    bench.assert_idle();
    bench.volume.watermark.refresh();
    let next = bench.volume.watermark.draw(1, true).unwrap();
    assert_eq!(bench.volume.watermark.resolved(), next);
}

#[test]
fn a_write_of_which_some_is_stored_keeps_discards_away() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, FULL);
    bench.answer(2, Ok(()));
    bench.answer(3, FULL);
    bench.discard(2, CHUNK, 4096);
    bench.at(0);
    assert_eq!(bench.script.sent.len(), 4);
    bench.at(RETRY_US);
    bench.answer(4, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    assert_eq!(bench.script.sent.len(), 7);
    bench.answer_from(5, Ok(()));
    bench.assert_idle();
}

/// A piece of it is done, and nobody has the other.
#[test]
fn a_write_in_several_pieces_steps_aside_once_all_that_is_left_is_held() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, CHUNK - 4096, 8192);
    bench.answer(2, FULL);
    bench.answer(3, FULL);
    bench.discard(2, 0, 4096);
    bench.at(0);
    assert_eq!(bench.script.sent.len(), 4, "the other piece is under way");
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    bench.tick();
    assert_eq!(bench.nodes()[4..], [1, 2], "the discard");
    bench.answer_from(4, Ok(()));
    bench.at(RETRY_US);
    bench.answer_from(6, Ok(()));
    assert_eq!(bench.done, BTreeMap::from([(1, Ok(())), (2, Ok(()))]));
    bench.assert_idle();
}

#[test]
fn of_many_that_are_held_few_are_tried_until_some_succeed() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    for tag in 1..=20 {
        bench.write(tag, tag * 4096, 4096);
    }
    bench.answer_from(0, FULL);
    assert_eq!(bench.script.sent.len(), 40);
    bench.at(0);
    for second in 1..5 {
        assert_eq!(bench.refuse_a_second(second).len(), 1);
    }
    let mut tried = Vec::new();
    bench.client.set_now_us(5 * RETRY_US);
    while bench.done.len() < 20 {
        let (sent, done) = (bench.script.sent.len(), bench.done.len());
        bench.tick();
        bench.answer_from(sent, Ok(()));
        tried.push(bench.done.len() - done);
    }
    assert_eq!(tried, [1, 2, 4, 8, 5]);
    bench.nobody_is_reported();
    bench.assert_idle();
}

#[test]
fn a_flush_and_other_groups_writes_do_not_wait_for_space() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Pending);
    bench.answer_from(2, Ok(()));
    assert_eq!(bench.done[&2], Ok(()));
    assert!(!bench.done.contains_key(&1), "it covers no held write");
    bench.volume.revoke();
    let done = &mut bench.done;
    bench
        .client
        .end_revoked(&mut bench.script, &mut |tag, result| {
            done.insert(tag.0, result);
        });
    assert_eq!(bench.done[&1], Err(IoError::Fenced));
    bench.at(RETRY_US);
    assert_eq!(bench.volume.held_writes().pieces, 0);
    bench.assert_idle();
}

#[test]
fn a_map_without_the_full_one_ends_the_wait() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.write(1, 0, 4096);
    bench.answer_from(0, FULL);
    bench.at(0);
    bench.map(set(2, 1, &[IN, OUT]));
    bench.at(1000);
    assert_eq!(bench.nodes()[2..], [1]);
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// What is cut off is freed, and the write must not come after that.
#[test]
fn a_write_that_is_cut_off_while_it_is_held_fails() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, 4 * CHUNK, 4096);
    bench.answer_from(0, FULL);
    bench.at(0);
    bench.volume.set_size_bytes(4 * CHUNK);
    bench.at(RETRY_US);
    assert_eq!(bench.script.sent.len(), 2);
    assert_eq!(bench.done[&1], Err(IoError::OutOfRange));
    bench.assert_idle();
}

#[test]
fn with_one_piece_of_a_write_the_others_that_are_held_fail() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.write(1, CHUNK - 4096, 8192);
    bench.answer(2, FULL);
    bench.answer(3, FULL);
    bench.answer(0, Err(Refusal::StaleGeneration(Generation(9))));
    bench.answer(1, Err(Refusal::StaleGeneration(Generation(9))));
    assert!(bench.done.is_empty());
    bench.at(RETRY_US);
    assert_eq!(bench.script.sent.len(), 4);
    assert_eq!(bench.done[&1], Err(IoError::Fenced));
    bench.assert_idle();
}
