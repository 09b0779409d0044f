//! How long requests take, and how many are in flight.

use std::time::{Duration, Instant};

use fabric_testing::{Completion, OpKind};
use fabric_types::io::IoError;

use super::support::*;
use crate::blk::RequestKind;

fn count(rig: &Rig, kind: RequestKind) -> u64 {
    let latencies = rig.device.latencies(kind);
    latencies.buckets().map(|bucket| bucket.count).sum()
}

fn wait_in_flight(rig: &Rig, requests: u64) {
    while rig.device.in_flight() != requests {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn each_kind_of_request_has_its_own_histogram() {
    for completion in [Completion::Inline, Completion::Queued] {
        let mut rig = Rig::new(Setup {
            completion,
            ..Setup::default()
        });
        let guest = rig.guest();
        let (page, list) = (guest.alloc(4096, 1), guest.place(&ranges(&[(0, 8, 0)])));
        for _ in 0..3 {
            assert_eq!(rig.queue.request(IN, 0, &[(page, 4096, true)]).0, OK);
        }
        for _ in 0..2 {
            assert_eq!(rig.queue.request(OUT, 0, &[(page, 4096, false)]).0, OK);
        }
        assert_eq!(rig.queue.request(FLUSH, 0, &[]).0, OK);
        for kind in [DISCARD, WRITE_ZEROES] {
            assert_eq!(rig.queue.request(kind, 0, &[(list, 16, false)]).0, OK);
        }
        // Neither of these is one of the four.
        rig.disk().fail_next(OpKind::Read, IoError::NoSpace, 1);
        assert_eq!(rig.queue.request(IN, 0, &[(page, 4096, true)]).0, IOERR);
        assert_eq!(rig.queue.request(GET_ID, 0, &[(page, 20, true)]).0, OK);
        rig.handle.stop().unwrap();
        let device = &rig.device;
        let counts = RequestKind::ALL.map(|kind| {
            let latencies = device.latencies(kind);
            latencies.buckets().map(|bucket| bucket.count).sum::<u64>()
        });
        assert_eq!(counts, [3, 2, 1, 2]);
        assert_eq!(device.in_flight(), 0);
    }
}

#[test]
fn latency_is_the_time_that_the_engine_takes() {
    let mut rig = Rig::new(Setup::default());
    let page = rig.guest().alloc(4096, 1);
    rig.disk().hold();
    let began = Instant::now();
    for _ in 0..3 {
        let (chain, _) = rig.queue.blk(IN, 0, &[(page, 4096, true)]);
        rig.queue.add(&chain);
    }
    rig.queue.submit();
    wait_in_flight(&rig, 3);
    let taken = Instant::now();
    std::thread::sleep(Duration::from_millis(10));
    let least = taken.elapsed();
    rig.disk().release();
    wait_in_flight(&rig, 0);
    assert_eq!(count(&rig, RequestKind::Read), 3);
    let most = began.elapsed();
    let latencies = rig.device.latencies(RequestKind::Read);
    for bucket in latencies.buckets() {
        // A calibrated clock is off by less than a bucket is wide.
        let to = Duration::from_nanos(bucket.to_ns.unwrap());
        assert!(to >= least, "{bucket:?} of {least:?}");
        assert!(
            Duration::from_nanos(bucket.from_ns) <= most,
            "{bucket:?} of {most:?}"
        );
    }
    let mean = Duration::from_nanos(latencies.sum_ns / 3);
    assert!(mean >= least - least / 100 && mean <= most + most / 100);
}

#[test]
fn request_that_waits_for_room_is_in_flight() {
    let mut rig = Rig::new(Setup {
        in_flight_max: 1,
        ..Setup::default()
    });
    let page = rig.guest().alloc(4096, 1);
    rig.disk().hold();
    for _ in 0..4 {
        let (chain, _) = rig.queue.blk(OUT, 0, &[(page, 4096, false)]);
        rig.queue.add(&chain);
    }
    rig.queue.submit();
    // One is with the engine, one was taken and found no room. The others are still in the ring.
    wait_in_flight(&rig, 2);
    rig.disk().release();
    for _ in 0..4 {
        rig.queue.wait_used();
    }
    rig.handle.stop().unwrap();
    assert_eq!(rig.device.in_flight(), 0);
}
