//! Starting, stopping, replaying, and queues that share a thread.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use fabric_testing::{Completion, OpKind};

use super::support::*;
use crate::blk::BlkOptions;
use crate::data_thread::{PollMode, QueueError, ThreadError, ThreadOptions, Threads};
use crate::dirty::DirtyLog;
use crate::inflight::{InflightRegion, RingLayout};
use crate::memory::GuestAddr;
use crate::ring::RingError;
use crate::testing::{FakeGuest, FakeQueue, GUEST_BASE, QueueOptions, STATUS_UNSET};

#[test]
fn stopping_waits_for_what_is_in_flight() {
    let mut rig = Rig::new(Setup::default());
    let guest = rig.guest();
    rig.disk().hold();
    let (chain, status) = rig
        .queue
        .blk(OUT, 0, &[(guest.place(&[3; 512]), 512, false)]);
    rig.queue.add(&chain);
    rig.queue.submit();
    while rig.script().is_empty() {
        std::thread::yield_now();
    }
    let (said, heard) = mpsc::channel();
    let handle = rig.handle;
    let stopper = std::thread::spawn(move || said.send(handle.stop()).unwrap());
    assert!(
        heard.recv_timeout(Duration::from_millis(50)).is_err(),
        "stopped with a request in flight"
    );
    assert_eq!(guest.read(status, 1), [STATUS_UNSET]);
    rig.device.volume().release();
    assert_eq!(heard.recv().unwrap().unwrap(), 1);
    stopper.join().unwrap();
    assert_eq!(
        (guest.read(status, 1), rig.queue.used_index()),
        (vec![OK], 1)
    );
    // What is offered after the stop stays where it is.
    let (chain, status) = rig.queue.blk(FLUSH, 0, &[]);
    rig.queue.add(&chain);
    rig.queue.submit();
    let next = rig.threads.start_queue(
        &rig.device,
        crate::data_thread::QueueConfig {
            base: 1,
            ..rig.queue.config(0)
        },
    );
    rig.queue.wait_used();
    rig.queue.wait_used();
    assert_eq!(guest.read(status, 1), [OK]);
    assert_eq!(next.unwrap().stop().unwrap(), 2);
}

#[test]
fn requests_in_flight_are_done_again_once_each_and_in_order() {
    done_again_once_each_and_in_order(RingLayout::Split, QueueOptions::default());
}

#[test]
fn those_of_a_packed_ring_are_too() {
    done_again_once_each_and_in_order(RingLayout::Packed, QueueOptions::default().packed());
}

fn done_again_once_each_and_in_order(layout: RingLayout, options: QueueOptions) {
    // After six writes and a flush, and one more flush: requests, or descriptors on either side.
    let bases = match layout {
        RingLayout::Split => [7, 8],
        RingLayout::Packed => [0x8014_8014, 0x8016_8016],
    };
    let (region, _file) = InflightRegion::create(layout, 1, 64).unwrap();
    let mut first = Rig::with(Setup::default(), BlkOptions::default(), options);
    first.handle.stop().unwrap();
    let mut config = first.queue.config(0);
    config.inflight = region.queue(0);
    let old = first.threads.start_queue(&first.device, config).unwrap();
    let guest = Arc::clone(first.queue.guest());
    assert_eq!(
        first
            .queue
            .request(OUT, 7, &[(guest.place(&[9; 512]), 512, false)])
            .0,
        OK
    );

    // Five writes reach the engine of a daemon that will not answer any more.
    first.device.volume().hold();
    let mut statuses = Vec::new();
    for sector in 0..5 {
        let (chain, status) = first.queue.blk(
            OUT,
            sector,
            &[(guest.place(&[sector as u8 + 1; 512]), 512, false)],
        );
        first.queue.add(&chain);
        statuses.push(status);
    }
    first.queue.submit();
    while first.script.lock().unwrap().len() < 6 {
        std::thread::yield_now();
    }

    // A daemon that was killed takes nothing more off the ring and writes nothing more into the record. This
    // one drains for as long as the disk is held; once its thread has started another queue, it knows.
    drop(old);
    let other = FakeQueue::new(&guest, QueueOptions::default());
    let _other = first.threads.start_queue(&first.device, other.config(0));

    // The next daemon gets the same memory and record. It starts at the wrong base on purpose: the record
    // knows better.
    let (threads, script) = threads(Setup::default());
    let device = device(BlkOptions::default());
    let mut config = first.queue.config(0);
    config.inflight = region.queue(0);
    let handle = threads.start_queue(&device, config).unwrap();
    for _ in 0..5 {
        first.queue.wait_used();
    }
    let writes = script
        .lock()
        .unwrap()
        .iter()
        .map(|done| done.1 / 512)
        .collect::<Vec<_>>();
    assert_eq!(writes, [0, 1, 2, 3, 4]);
    assert!(statuses.iter().all(|status| guest.read(*status, 1) == [OK]));
    assert_eq!(first.queue.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(script.lock().unwrap().len(), 6);
    assert_eq!(handle.stop().unwrap(), bases[0]);

    // Nothing is left for a third one.
    let mut config = first.queue.config(0);
    config.inflight = region.queue(0);
    let third = threads.start_queue(&device, config).unwrap();
    assert_eq!(first.queue.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(script.lock().unwrap().len(), 7);
    assert_eq!(third.stop().unwrap(), bases[1]);
    first.device.volume().release();
}

#[test]
fn a_full_engine_holds_requests_back_and_loses_none() {
    let mut rig = Rig::new(Setup {
        in_flight_max: 2,
        ..Setup::default()
    });
    let guest = rig.guest();
    for sector in 0..10 {
        let (chain, _) = rig.queue.blk(
            OUT,
            sector,
            &[(guest.place(&[sector as u8 + 1; 512]), 512, false)],
        );
        rig.queue.add(&chain);
    }
    let (chain, _) = rig.queue.blk(
        DISCARD,
        0,
        &[(guest.place(&ranges(&[(100, 1, 0); 8])), 128, false)],
    );
    rig.queue.add(&chain);
    rig.queue.submit();
    for _ in 0..11 {
        rig.queue.wait_used();
    }
    let sectors: Vec<u64> = rig.script().iter().map(|done| done.1 / 512).collect();
    assert_eq!(
        sectors,
        [(0..10).collect::<Vec<u64>>(), vec![100; 8]].concat()
    );
    assert_eq!(rig.disk().done(OpKind::Discard), 8);
}

#[test]
fn a_dirty_log_has_every_page_that_was_written() {
    for completion in [Completion::Inline, Completion::Queued] {
        let mut rig = Rig::new(Setup {
            completion,
            ..Setup::default()
        });
        rig.handle.stop().unwrap();
        let guest = Arc::clone(rig.queue.guest());
        let bytes = (GUEST_BASE + (8 << 20)) / 4096 / 8;
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let log = DirtyLog::map(file.try_clone().unwrap(), bytes, 0).unwrap();
        let mut config = rig.queue.config(0);
        (config.log, config.used_log) = (Some(log), Some(rig.queue.used));
        let logged = rig.threads.start_queue(&rig.device, config).unwrap();
        let (data, out) = (guest.alloc(3 * 4096, 4096), guest.alloc(4096, 4096));
        let marked = |addr: u64| {
            let mut byte = [0];
            rustix::io::pread(&file, &mut byte, addr / 4096 / 8).unwrap();
            byte[0] >> (addr / 4096 % 8) & 1 == 1
        };
        guest.alloc(4096, 4096);
        let (chain, status) = rig
            .queue
            .blk(IN, 0, &[(GuestAddr(data.0 + 4096), 4097 + 511, true)]);
        rig.queue.add(&chain);
        rig.queue.submit();
        rig.queue.wait_used();
        let pages = [0, 4096, 8192].map(|at| marked(data.0 + at));
        assert_eq!(pages, [false, true, true]);
        assert!(marked(status.0) && marked(rig.queue.used.0) && !marked(rig.queue.avail.0));
        assert_eq!(rig.queue.request(OUT, 0, &[(out, 512, false)]).0, OK);
        assert!(!marked(out.0));
        let base = logged.stop().unwrap();
        let config = crate::data_thread::QueueConfig {
            base,
            ..rig.queue.config(0)
        };
        let _unlogged = rig.threads.start_queue(&rig.device, config).unwrap();
        assert_eq!(rig.queue.request(IN, 0, &[(out, 512, true)]).0, OK);
        assert!(!marked(out.0), "marked after logging was switched off");
    }
}

#[test]
fn one_broken_queue_leaves_the_others_of_its_thread_alone() {
    let mut good = Rig::new(Setup::default());
    let other = device(BlkOptions::default());
    let mut bad = FakeQueue::new(&Arc::new(FakeGuest::new(1 << 20)), QueueOptions::default());
    let handle = good.threads.start_queue(&other, bad.config(0)).unwrap();
    bad.force_avail_index(1000);
    rustix::io::write(&bad.kick, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(FakeQueue::wait_event(&bad.err), 1);
    assert_eq!(FakeQueue::events(&good.queue.err), 0);
    assert_eq!(good.queue.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(handle.stop().unwrap(), 0);
    assert_eq!(good.queue.request(FLUSH, 0, &[]).0, OK);
}

#[test]
fn many_queues_share_one_thread_in_every_poll_mode() {
    for poll in [PollMode::default(), PollMode::Always, PollMode::Never] {
        let (threads, _script) = threads(Setup {
            poll,
            ..Setup::default()
        });
        let start = |_| {
            let device = device(BlkOptions::default());
            let queue = FakeQueue::new(&Arc::new(FakeGuest::new(1 << 20)), QueueOptions::default());
            let handle = threads.start_queue(&device, queue.config(0)).unwrap();
            (queue, handle)
        };
        let mut queues: Vec<_> = (0..32).map(start).collect();
        for round in 0..20u64 {
            for (queue, _) in &mut queues {
                assert_eq!(queue.request(FLUSH, 0, &[]).0, OK);
            }
            if round % 2 == 0 {
                let at = round as usize;
                assert_eq!(
                    queues.swap_remove(at % queues.len()).1.stop().unwrap(),
                    round as u32 + 1
                );
            }
        }
    }
}

#[test]
fn shutdown_drains_and_later_commands_are_refused() {
    let mut rig = Rig::new(Setup {
        completion: Completion::Delayed(Duration::from_millis(5)),
        ..Setup::default()
    });
    let (chain, status) = rig.queue.blk(FLUSH, 0, &[]);
    rig.queue.add(&chain);
    rig.queue.submit();
    while rig.script().is_empty() {
        std::thread::yield_now();
    }
    rig.threads.shutdown();
    assert_eq!(rig.queue.guest().read(status, 1), [OK]);
    assert!(matches!(
        rig.handle.set_err(None),
        Err(QueueError::ThreadGone)
    ));
    let again = rig.threads.start_queue(&rig.device, rig.queue.config(0));
    assert!(matches!(again, Err(QueueError::ThreadGone)));
}

#[test]
fn impossible_configurations_are_refused() {
    let rig = Rig::inline();
    let start = |config| rig.threads.start_queue(&rig.device, config).map(|_| ());
    let config = || rig.queue.config(0);
    for size in [0, 3, 32769] {
        let config = crate::data_thread::QueueConfig { size, ..config() };
        assert!(
            matches!(start(config), Err(QueueError::Ring(RingError::QueueSize(s))) if s == size)
        );
    }
    assert!(matches!(
        start(rig.queue.config(1)),
        Err(QueueError::Index {
            index: 1,
            queues: 1
        })
    ));
    let mut odd = config();
    odd.used = GuestAddr(odd.used.0 + 2);
    assert!(matches!(
        start(odd),
        Err(QueueError::Ring(RingError::RingAddress {
            part: "used ring",
            ..
        }))
    ));
    let mut outside = config();
    outside.desc = GuestAddr(0);
    assert!(matches!(
        start(outside),
        Err(QueueError::Ring(RingError::RingAddress { .. }))
    ));
    let mut small = config();
    small.inflight = InflightRegion::create(RingLayout::Split, 1, 8)
        .unwrap()
        .0
        .queue(0);
    assert!(matches!(
        start(small),
        Err(QueueError::InflightSize {
            record: 8,
            size: 64
        })
    ));
}

#[test]
fn impossible_threads_are_refused() {
    let start = |threads, pin: Option<Vec<usize>>| {
        let options = ThreadOptions {
            threads,
            pin,
            ..ThreadOptions::default()
        };
        Threads::start(&options, |_| {
            fabric_testing::MemEngine::new(Completion::Inline)
        })
        .map(|_| ())
    };
    assert!(matches!(start(0, None), Err(ThreadError::Count(0))));
    assert!(matches!(
        start(1, Some(vec![100_000])),
        Err(ThreadError::Pin { cpu: 100_000, .. })
    ));
    let options = ThreadOptions {
        threads: 1,
        ..ThreadOptions::default()
    };
    let refused =
        Threads::<fabric_testing::MemEngine>::start(&options, |_| Err(std::io::Error::other("no")));
    assert!(matches!(
        refused,
        Err(ThreadError::Engine { thread: 0, .. })
    ));
    assert!(start(2, Some(vec![0])).is_ok());
}
