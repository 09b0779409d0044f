use super::*;

fn set_of(pg: u64, epoch: u64, members: &[(u64, ReplicaState)]) -> ReplicaSet {
    let members = members.iter().map(|&(node, state)| Member {
        node: NodeId(node),
        incarnation: Incarnation(7),
        state,
        since: Epoch(1),
    });
    ReplicaSet::new(PgId(pg), Epoch(epoch), 1, members.collect())
}

fn bench(sets: Vec<ReplicaSet>) -> Bench {
    let mut bench = Bench::new(sets[0].clone());
    bench.client = Client::new(0, sets);
    bench
}

const FIRST: [(u64, ReplicaState); 3] = [(1, IN), (2, IN), (3, IN)];
const OTHER_ORDER: [(u64, ReplicaState); 3] = [(3, IN), (1, IN), (2, SYNCING)];
const ELSEWHERE: [(u64, ReplicaState); 3] = [(1, IN), (2, IN), (4, IN)];

#[test]
fn a_flush_goes_once_to_groups_on_the_same_nodes() {
    let sets = vec![
        set_of(0, 1, &FIRST),
        set_of(1, 1, &OTHER_ORDER),
        set_of(2, 1, &ELSEWHERE),
        set_of(3, 1, &FIRST),
    ];
    let mut bench = bench(sets);
    assert_eq!(bench.submit(1, Op::Flush, 0, 0), Submit::Pending);
    assert_eq!(bench.nodes(), [1, 2, 3, 1, 2, 4]);
    for nth in 0..6 {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// A node may have groups on several devices, and flushes those on which it knows groups to be written: by
/// the newest map of all.
#[test]
fn flush_carries_the_newest_epoch_of_the_groups_it_covers() {
    let sets = vec![
        set_of(0, 1, &FIRST),
        set_of(1, 4, &OTHER_ORDER),
        set_of(2, 7, &ELSEWHERE),
    ];
    let mut bench = bench(sets);
    let epochs = |bench: &Bench| {
        let sent = bench.script.sent.iter();
        let epochs: Vec<u64> = sent.map(|(_, request)| request.epoch.0).collect();
        epochs
    };
    assert_eq!(bench.submit(1, Op::Flush, 0, 0), Submit::Pending);
    assert_eq!(epochs(&bench), [4, 4, 4, 7, 7, 7]);
    bench.map(set_of(1, 9, &OTHER_ORDER));
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Pending);
    assert_eq!(epochs(&bench)[6..], [9, 9, 9, 7, 7, 7]);
}

#[test]
fn flush_failed_by_a_replica_ends_once_every_group_drops_it() {
    let sets = vec![set_of(0, 1, &FIRST), set_of(1, 1, &FIRST)];
    let mut bench = bench(sets);
    assert_eq!(bench.submit(1, Op::Flush, 0, 0), Submit::Pending);
    assert_eq!(bench.nodes(), [1, 2, 3]);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Device(5)));
    bench.answer(2, Ok(()));
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.map(set_of(0, 2, &[(1, IN), (2, OUT), (3, IN)]));
    assert!(bench.done.is_empty(), "the other group still counts on it");
    assert_eq!(bench.nodes()[3..], [1, 3, 1, 2, 3]);
    for (nth, result) in [(3, Ok(())), (4, Ok(())), (5, Ok(()))] {
        bench.answer(nth, result);
    }
    bench.answer(6, Err(Refusal::Device(5)));
    bench.answer(7, Ok(()));
    assert!(bench.done.is_empty());
    assert_eq!(
        bench.client.poll_action(),
        Some(ClientAction::ReportFailed {
            pg: PgId(1),
            node: NodeId(2),
            epoch: Epoch(1),
        })
    );
    bench.map(set_of(1, 3, &[(1, IN), (2, OUT), (3, IN)]));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_flush_during_which_a_map_changed_goes_to_each_group() {
    let sets = vec![set_of(0, 1, &FIRST), set_of(1, 1, &FIRST)];
    let mut bench = bench(sets);
    assert_eq!(bench.submit(1, Op::Flush, 0, 0), Submit::Pending);
    bench.map(set_of(1, 2, &[(1, IN), (2, IN), (3, OUT)]));
    for nth in 0..3 {
        bench.answer(nth, Ok(()));
    }
    assert!(bench.done.is_empty());
    assert_eq!(bench.nodes()[3..], [1, 2, 3, 1, 2]);
    for nth in 3..8 {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

/// A map by which the group has one replica in sync, after all had lost power.
fn after_power_loss(pg: u64) -> ReplicaSet {
    set_of(pg, 9, &[(1, IN), (2, OUT), (3, OUT)]).with_power_lost(Epoch(9))
}

#[test]
fn the_flush_after_a_loss_of_power_of_all_fails_once() {
    let mut bench = bench(vec![set_of(0, 1, &FIRST)]);
    bench.write(1, 0, 4096);
    (0..3).for_each(|nth| bench.answer(nth, Ok(())));
    assert_eq!(bench.done[&1], Ok(()));
    bench.map(after_power_loss(0));
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Pending);
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&2], Err(IoError::Device(libc::EIO)));
    let told = ClientAction::UnflushedLost { layer: LayerId(5) };
    assert_eq!(bench.client.poll_action(), Some(told));
    assert_eq!(bench.submit(3, Op::Flush, 0, 0), Submit::Pending);
    bench.answer(4, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    bench.assert_idle();
}

#[test]
fn write_partly_done_before_power_loss_fails_the_next_flush() {
    let mut bench = bench(vec![set_of(0, 1, &FIRST)]);
    bench.write(1, CHUNK - 4096, 8192);
    (0..3).for_each(|nth| bench.answer(nth, Ok(())));
    assert!(bench.done.is_empty(), "the other chunk's part is under way");
    bench.map(after_power_loss(0));
    for nth in 3..bench.script.sent.len() {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Pending);
    bench.answer(bench.script.sent.len() - 1, Ok(()));
    assert_eq!(bench.done[&2], Err(IoError::Device(libc::EIO)));
    bench.assert_idle();
}

#[test]
fn a_flush_that_is_under_way_while_all_lose_power_fails() {
    let mut bench = bench(vec![set_of(0, 1, &FIRST)]);
    bench.write(1, 0, 4096);
    (0..3).for_each(|nth| bench.answer(nth, Ok(())));
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Pending);
    bench.map(after_power_loss(0));
    (3..6).for_each(|nth| bench.answer(nth, Ok(())));
    // It has gone to the group anew.
    for nth in 6..bench.script.sent.len() {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&2], Err(IoError::Device(libc::EIO)));
    bench.assert_idle();
}

#[test]
fn what_needs_no_flush_is_not_lost_with_the_power() {
    let mut bench = bench(vec![set_of(0, 1, &FIRST)]);
    let write = bench.submit(1, Op::Write { fua: true }, 0, 4096);
    assert_eq!(write, Submit::Pending);
    (0..3).for_each(|nth| bench.answer(nth, Ok(())));
    // Under way meanwhile, and so sent again to who is left.
    bench.discard(2, 8192, 4096);
    bench.map(after_power_loss(0));
    for nth in 3..bench.script.sent.len() {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.submit(3, Op::Flush, 0, 0), Submit::Pending);
    bench.answer(bench.script.sent.len() - 1, Ok(()));
    assert_eq!(bench.done[&3], Ok(()));
    bench.assert_idle();
}
