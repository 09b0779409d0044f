//! What maps and their epochs mean for requests under way.

use super::*;
use crate::client::answers::PUT_OFF_MAX;

#[test]
fn write_missed_by_a_syncing_replica_waits_until_it_is_out() {
    let mut bench = Bench::new(set(1, 1, &[IN, SYNCING, OUT]));
    bench.write(1, 0, 4096);
    assert_eq!(bench.nodes(), [1, 2]);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Device(5)));
    assert!(bench.done.is_empty(), "it may just be promoted");
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.map(set(2, 1, &[IN, OUT, OUT]));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn syncing_replica_is_not_read_and_does_not_count_as_in_sync() {
    let mut bench = Bench::new(set(1, 2, &[IN, SYNCING, OUT]));
    assert_eq!(bench.submit(1, Op::Read, 1 << 20, 4096), Submit::Pending);
    assert_eq!(bench.nodes(), [1]);
    bench.write(2, 0, 4096);
    assert_eq!(bench.nodes(), [1], "one in sync is not enough");
    bench.answer(0, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
}

#[test]
fn a_replica_that_does_not_know_the_map_yet_is_asked_again() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.discard(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Behind(Epoch(0))));
    assert!(bench.done.is_empty() && bench.client.needs_tick());
    assert_eq!(bench.client.poll_action(), None, "it has not failed");
    bench.tick();
    assert_eq!(bench.nodes(), [1, 2, 2]);
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn replica_that_defers_a_write_too_long_is_reported_and_retried() {
    let mut bench = Bench::new(set(1, 1, &[IN, SYNCING]));
    bench.discard(1, 0, 512);
    bench.answer(0, Ok(()));
    for nth in 1..=PUT_OFF_MAX as usize {
        assert_eq!(bench.client.poll_action(), None, "put off {nth} times");
        bench.answer(nth, Err(Refusal::Behind(Epoch(1))));
        bench.tick();
    }
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    let last = bench.script.sent.len() - 1;
    bench.answer(last, Err(Refusal::Behind(Epoch(1))));
    assert_eq!(bench.client.poll_action(), None, "once per map");
    bench.tick();
    bench.answer(last + 1, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn an_older_map_is_no_error_when_there_are_several_replicas() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.discard(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::StaleEpoch(Epoch(2))));
    assert!(bench.done.is_empty());
    bench.map(set(2, 1, &[IN, IN]));
    assert_eq!(bench.nodes(), [1, 2, 2]);
    assert_eq!(bench.script.sent[2].1.epoch, Epoch(2));
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn what_a_replica_answered_before_it_began_anew_does_not_count() {
    let anew = |epoch: u64, states: &[ReplicaState]| {
        let mut members = set(epoch, 1, states).members().to_vec();
        members[1].since = Epoch(epoch);
        ReplicaSet::new(PgId(0), Epoch(epoch), 1, members)
    };
    let mut bench = Bench::new(set(1, 1, &[IN, IN, IN]));
    bench.write(1, 0, 4096);
    bench.write(2, 4096, 4096);
    // The first: answered before. The second: on its way.
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    bench.answer(2, Err(Refusal::Unreachable));
    bench.map(anew(2, &[IN, SYNCING, IN]));
    // A copy, to the first, too: the guest may have changed its buffer.
    assert_eq!(bench.nodes(), [1, 2, 3, 1, 2, 3, 1, 2, 3]);
    for nth in 6..9 {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    for nth in 3..6 {
        bench.answer(nth, Ok(()));
    }
    assert!(
        !bench.done.contains_key(&2),
        "one answer was to the old map"
    );
    assert_eq!(bench.nodes()[9..], [1, 2, 3]);
    for nth in 9..12 {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&2], Ok(()));
    bench.assert_idle();
}
