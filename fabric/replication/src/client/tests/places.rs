//! Groups of several pools, and volumes without a lease.

use super::*;

const POOL: u64 = 1 << 32;

fn set_of(pg: u64, epoch: u64, nodes: &[u64]) -> ReplicaSet {
    let members = nodes.iter().map(|&node| Member {
        node: NodeId(node),
        incarnation: Incarnation(7),
        state: IN,
        since: Epoch(1),
    });
    ReplicaSet::new(PgId(pg), Epoch(epoch), 1, members.collect())
}

#[test]
fn a_flush_goes_to_the_volumes_pool_only() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    bench.client = Client::new(
        0,
        vec![
            set_of(0, 1, &[1, 2]),
            set_of(1, 1, &[1, 2]),
            set_of(2 * POOL, 1, &[4]),
        ],
    );
    assert_eq!(bench.submit(1, Op::Flush, 0, 0), Submit::Pending);
    assert_eq!(bench.nodes(), [1, 2]);
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
}

#[test]
fn request_waits_until_the_map_has_the_pool_of_its_volume() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    bench.client = Client::new(0, Vec::new());
    let write = Op::Write { fua: false };
    assert_eq!(bench.submit(1, write, 0, 4096), Submit::Busy);
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Busy);
    bench.map(set_of(0, 1, &[3]));
    assert_eq!(bench.submit(1, write, 0, 4096), Submit::Pending);
    assert_eq!(bench.nodes(), [3]);
    bench.answer(0, Ok(()));
    bench.assert_idle();
}

#[test]
fn groups_added_to_the_map_do_not_affect_requests_in_flight() {
    let mut bench = Bench::new(set_of(0, 1, &[1, 2]));
    bench.discard(1, 0, 4096);
    bench.map(set_of(2 * POOL, 2, &[4]));
    bench.map(set_of(0, 3, &[1, 3]));
    bench.answer(0, Ok(()));
    bench.answer(1, Ok(()));
    assert!(bench.done.is_empty(), "the second member is another one");
    assert_eq!(bench.nodes(), [1, 2, 3]);
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn requests_after_the_end_of_the_lease_wait_until_it_is_renewed() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.volume.set_lease_until_us(1000);
    bench.client.set_now_us(999);
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    bench.client.set_now_us(1000);
    for op in [Op::Read, Op::Write { fua: false }, Op::Discard] {
        assert_eq!(bench.submit(2, op, 8192, 4096), Submit::Busy);
    }
    assert_eq!(bench.submit(2, Op::Flush, 0, 0), Submit::Busy);
    // What had begun is finished.
    bench.answer(0, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.volume.set_lease_until_us(2000);
    bench.write(2, 8192, 4096);
    bench.answer(1, Ok(()));
    bench.answer(2, Ok(()));
    bench.assert_idle();
}
