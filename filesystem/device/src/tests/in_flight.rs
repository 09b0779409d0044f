//! Requests that other threads answer, in whatever order.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fuse_codec::{NodeId, Opcode, REPLY_HEADER_BYTES};
use vhost_backend::testing::QueueOptions;
use zerocopy::IntoBytes;

use super::{ROOT, eventually, pattern};
use crate::memory_fs::{DeferringService, MemoryFilesystem};
use crate::testing::{Cut, FsGuest, Sent, options};

/// Answers are held until this is set.
type Gate = Arc<AtomicBool>;

/// A guest whose requests are answered in an order that a seed chooses, while its gate is open.
fn deferred(queues: u16, rings: QueueOptions) -> (FsGuest<DeferringService>, Gate) {
    let gate = Gate::new(AtomicBool::new(true));
    let shared = Arc::clone(&gate);
    let make = move |thread: usize| {
        let gate = Arc::clone(&shared);
        let mut state = thread as u64 + 1;
        DeferringService::new(move |_| {
            while !gate.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize
        })
    };
    let filesystem = MemoryFilesystem::new();
    let mut guest = FsGuest::new(&filesystem, options(queues, false), rings, make);
    guest.init().unwrap();
    (guest, gate)
}

/// Puts READs of 32 bytes on a queue, each from another place; where each is from by its first descriptor.
fn put_reads(
    guest: &mut FsGuest<DeferringService>,
    queue: usize,
    (file, handle): (NodeId, u64),
    count: usize,
    cut: Cut,
) -> HashMap<u16, (Sent, usize)> {
    let reads = (0..count).map(|at| {
        let bytes = guest.read_request(file, handle, at as u64, 32);
        let sent = guest.put(queue, &bytes, REPLY_HEADER_BYTES + 32, cut);
        (sent.head, (sent, at))
    });
    reads.collect()
}

/// Takes all answers; returns from where they were read, in their order.
fn take_answers(
    guest: &mut FsGuest<DeferringService>,
    queue: usize,
    mut reads: HashMap<u16, (Sent, usize)>,
    data: &[u8],
) -> Vec<usize> {
    let mut order = Vec::new();
    while !reads.is_empty() {
        let (head, used) = guest.queues[queue].wait_used();
        let (sent, at) = reads.remove(&head).expect("an answer to a request");
        let answer = guest.answer(&sent, used).unwrap();
        assert_eq!(answer.ok().unwrap(), data[at..at + 32]);
        order.push(at);
    }
    order
}

#[test]
fn a_thousand_requests_are_in_flight_and_answered_in_any_order() {
    for rings in [QueueOptions::default(), QueueOptions::default().packed()] {
        let (mut guest, gate) = deferred(2, rings);
        let file = guest.create(ROOT, b"file").unwrap();
        let data = pattern(2000);
        guest.write(file.0, file.1, 0, &data).unwrap();
        gate.store(false, Ordering::Release);
        let both = [1, 2].map(|queue| {
            let reads = put_reads(&mut guest, queue, file, 1000, Cut::Indirect);
            guest.queues[queue].submit();
            (queue, reads)
        });
        eventually("2000 in flight", || {
            guest.device.counters().in_flight == 2000
        });
        assert_eq!(guest.device.queue_counters(1).unwrap().in_flight, 1000);
        gate.store(true, Ordering::Release);
        for (queue, reads) in both {
            let order = take_answers(&mut guest, queue, reads, &data);
            assert!(!order.is_sorted(), "some order but theirs");
        }
        eventually("none in flight", || guest.device.counters().in_flight == 0);
    }
}

#[test]
fn replies_of_every_length_come_back_later() {
    let (mut guest, _) = deferred(1, QueueOptions::default());
    for cut in [Cut::Kernel, Cut::Pieces(5), Cut::Pieces(64)] {
        guest.cut = cut;
        let dir = guest.mkdir(ROOT, format!("{cut:?}").as_bytes()).unwrap();
        for name in 0..40 {
            guest.create(dir, format!("{name}").as_bytes()).unwrap();
        }
        let handle = guest.open(Opcode::Opendir, dir, 0).unwrap();
        assert_eq!(
            guest
                .list(Opcode::Readdir, dir, handle, 0, 4000)
                .unwrap()
                .len(),
            42
        );
        let forget = guest.request(Opcode::Forget.number(), dir, 1u64.as_bytes());
        assert_eq!(guest.send(0, &forget, 0, cut), None);
    }
}

/// There are few lists for replies in many pieces.
#[test]
fn many_replies_in_single_bytes_wait_for_each_other_and_are_all_given() {
    let (mut guest, gate) = deferred(1, QueueOptions::default());
    let file = guest.create(ROOT, b"file").unwrap();
    let data = pattern(2000);
    guest.write(file.0, file.1, 0, &data).unwrap();
    for _ in 0..3 {
        gate.store(false, Ordering::Release);
        let mut reads = HashMap::new();
        for at in 0..30 {
            let bytes = guest.read_request(file.0, file.1, at as u64, 32);
            let sent = guest.put_indirect(1, &bytes, REPLY_HEADER_BYTES + 32, Cut::Pieces(1));
            reads.insert(sent.head, (sent, at));
        }
        guest.queues[1].submit();
        eventually("as many in flight as there are lists", || {
            guest.device.counters().in_flight >= 8
        });
        std::thread::sleep(Duration::from_millis(5));
        // One more is taken off the ring and waits.
        assert_eq!(guest.device.counters().in_flight, 9);
        gate.store(true, Ordering::Release);
        assert_eq!(take_answers(&mut guest, 1, reads, &data).len(), 30);
    }
}

#[test]
fn a_queue_that_stops_answers_what_is_in_flight() {
    for rings in [QueueOptions::default(), QueueOptions::default().packed()] {
        let (mut guest, gate) = deferred(1, rings);
        let file = guest.create(ROOT, b"file").unwrap();
        let data = pattern(2000);
        guest.write(file.0, file.1, 0, &data).unwrap();
        gate.store(false, Ordering::Release);
        let reads = put_reads(&mut guest, 1, file, 100, Cut::Indirect);
        guest.queues[1].submit();
        eventually("100 in flight", || guest.device.counters().in_flight == 100);
        let opened = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                opened.store(true, Ordering::Release);
                gate.store(true, Ordering::Release);
            });
            guest.stop_queues();
            assert!(
                opened.load(Ordering::Acquire),
                "stopped with requests in flight"
            );
        });
        assert_eq!(take_answers(&mut guest, 1, reads, &data).len(), 100);
        assert_eq!(guest.device.counters().in_flight, 0);
        guest.start_queues(QueueOptions {
            size: 1024,
            ..rings
        });
        assert_eq!(guest.read(file.0, file.1, 5, 10).unwrap(), data[5..15]);
    }
}
