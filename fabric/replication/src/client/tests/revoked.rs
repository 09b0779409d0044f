//! A lease that is another's by now.

use super::*;

impl Bench {
    fn end_revoked(&mut self) {
        let done = &mut self.done;
        self.client
            .end_revoked(&mut self.script, &mut |tag, result| {
                assert_eq!(done.insert(tag.0, result), None, "reported twice");
            });
    }
}

#[test]
fn a_revoked_volume_sends_nothing_more_whatever_maps_come() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, OUT]));
    bench.write(1, 0, 4096);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Device(5)));
    bench.write(2, 4096, 4096);
    let held = bench.submit(3, Op::Read, 4096, 4096);
    assert_eq!(held, Submit::Pending);
    bench.volume.revoke();
    bench.map(set(2, 1, &[IN, OUT, SYNCING]));
    assert_eq!(bench.nodes(), [1, 2, 1, 2], "nobody else is asked");
    assert_eq!(bench.done[&1], Err(IoError::Fenced));
    let refused = bench.submit(4, Op::Flush, 0, 0);
    assert_eq!(refused, Submit::Done(Err(IoError::Fenced)));
    assert!(
        !bench.done.contains_key(&2),
        "its buffers are still being sent"
    );
    bench.answer(2, Ok(()));
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&2], Err(IoError::Fenced));
    assert_eq!(bench.done[&3], Err(IoError::Fenced));
    assert_eq!(bench.nodes(), [1, 2, 1, 2]);
    bench.assert_idle();
}

#[test]
fn what_waits_for_a_map_ends_when_its_lease_does() {
    let mut bench = Bench::new(set(1, 2, &[IN, OUT, OUT]));
    bench.write(1, 0, 4096);
    bench.end_revoked();
    assert!(bench.done.is_empty(), "the lease is ours");
    bench.volume.revoke();
    bench.end_revoked();
    assert_eq!(bench.done[&1], Err(IoError::Fenced));
    bench.assert_idle();
}

#[test]
fn without_a_lease_a_request_waits_though_the_volume_is_too_small() {
    let mut bench = Bench::new(set(1, 2, &[IN, OUT, OUT]));
    let end = bench.volume.size_bytes();
    // It may be resized before this node has the lease.
    bench.volume.suspend();
    assert_eq!(bench.submit(1, Op::Read, end, 4096), Submit::Busy);
    bench.volume.unsuspend();
    let refused = bench.submit(1, Op::Read, end, 4096);
    assert_eq!(refused, Submit::Done(Err(IoError::OutOfRange)));
}
