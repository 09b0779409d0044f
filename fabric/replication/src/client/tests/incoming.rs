//! A group that moves between two devices of a node: both are sent every write.

use super::*;

const COMING: NodeId = NodeId(2 | 1 << 63);

/// Nodes 1 and 2 in sync, and the group coming to another device of node 2 since this epoch.
fn moving(epoch: u64) -> ReplicaSet {
    let before = set(epoch, 2, &[IN, IN]);
    let mut members = before.members().to_vec();
    members.push(Member {
        node: COMING,
        state: SYNCING,
        since: Epoch(epoch),
        ..members[1]
    });
    ReplicaSet::new(PgId(0), Epoch(epoch), 2, members)
}

/// It has come, as a replica that is sent everything since `since`.
fn moved(epoch: u64, since: u64, state: ReplicaState) -> ReplicaSet {
    let mut members = set(epoch, 2, &[IN, state]).members().to_vec();
    members[1].since = Epoch(since);
    ReplicaSet::new(PgId(0), Epoch(epoch), 1, members)
}

#[test]
fn a_write_waits_for_both_and_a_read_asks_neither_twice() {
    assert_eq!(COMING, NodeId(2).incoming());
    let mut bench = Bench::new(moving(2));
    bench.write(1, 0, 4096);
    assert_eq!(bench.nodes(), [1, 2, COMING.0]);
    bench.answer(0, Ok(()));
    bench.answer(2, Ok(()));
    assert!(bench.done.is_empty());
    bench.answer(1, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    assert_eq!(bench.submit(2, Op::Read, 0, 4096), Submit::Pending);
    bench.answer(3, Err(Refusal::Corrupt));
    bench.answer(4, Err(Refusal::Corrupt));
    assert_eq!(bench.nodes()[3..], [1, 2], "what comes is never read");
    assert_eq!(bench.done[&2], Err(IoError::Corrupt));
}

#[test]
fn what_the_old_device_did_says_nothing_of_the_new_one() {
    let mut bench = Bench::new(moving(2));
    bench.discard(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    // The old device is gone while the new one has yet to answer: it is asked under the name that it has from
    // now on.
    bench.map(moved(3, 2, IN));
    assert!(bench.done.is_empty());
    assert_eq!(bench.nodes(), [1, 2, COMING.0]);
    bench.answer(2, Err(Refusal::StaleEpoch(Epoch(3))));
    bench.tick();
    assert_eq!(bench.nodes(), [1, 2, COMING.0, 2]);
    assert!(bench.done.is_empty());
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn when_the_old_device_fails_its_node_goes_on_with_the_new_one() {
    let mut bench = Bench::new(moving(2));
    bench.discard(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Device(libc::EROFS)));
    bench.answer(2, Ok(()));
    assert!(bench.done.is_empty());
    let failed = bench.client.poll_action();
    assert!(
        matches!(failed, Some(ClientAction::ReportFailed { node, .. }) if node == NodeId(2)),
        "{failed:?}"
    );
    bench.map(moved(3, 2, SYNCING));
    assert_eq!(bench.nodes()[3..], [2], "whatever it was before");
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_node_that_is_lost_answers_for_neither() {
    let mut bench = Bench::new(moving(2));
    bench.discard(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.lose(2);
    let mut failed: Vec<NodeId> = std::iter::from_fn(|| bench.client.poll_action())
        .map(|action| match action {
            ClientAction::ReportFailed { node, .. } => node,
            other => panic!("{other:?}"),
        })
        .collect();
    failed.sort_unstable();
    assert_eq!(failed, [NodeId(2), COMING]);
    bench.map(ReplicaSet::new(
        PgId(0),
        Epoch(3),
        1,
        set(3, 1, &[IN]).members().to_vec(),
    ));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn read_of_the_old_device_ends_before_the_new_device_is_asked() {
    let members = moving(2).members()[1..].to_vec();
    let mut bench = Bench::new(ReplicaSet::new(PgId(0), Epoch(2), 1, members));
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    let members = moved(3, 2, IN).members()[1..].to_vec();
    bench.map(ReplicaSet::new(PgId(0), Epoch(3), 1, members));
    // Long enough for another replica to be asked.
    bench.client.set_now_us(50_000);
    bench.tick();
    assert_eq!(bench.nodes(), [2], "they have one name, and one buffer");
    bench.answer(0, Ok(()));
    assert_eq!(bench.nodes(), [2, 2]);
    bench.answer(1, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}
