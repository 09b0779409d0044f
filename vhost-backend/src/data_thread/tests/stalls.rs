//! Requests that find the engine full: what the guest does meanwhile, and what it is told of the others.

use std::sync::mpsc;

use fabric_types::io::Op;

use super::support::*;
use crate::blk::BlkOptions;
use crate::data_thread::PollMode;
use crate::testing::{FakeQueue, QueueOptions, STATUS_UNSET};

/// Requests that the engine has room for.
const ROOM: usize = 2;

fn rig() -> Rig {
    Rig::new(Setup {
        in_flight_max: ROOM,
        ..Setup::default()
    })
}

fn wait_for_script(rig: &Rig, len: usize) {
    while rig.script().len() < len {
        std::thread::yield_now();
    }
}

/// Gives the thread turns enough to have tried the stalled request once more.
fn some_turns(rig: &Rig) {
    for _ in 0..3 {
        rig.handle.set_err(None).unwrap();
    }
}

#[test]
fn discard_stalled_half_way_finishes_as_the_guest_sent_it() {
    for kind in [FLUSH, GET_ID, IN, WRITE_ZEROES, 99] {
        let mut rig = rig();
        let guest = rig.guest();
        rig.disk().hold();
        let list = guest.place(&ranges(&[
            (0, 8, 0),
            (16, 8, 0),
            (32, 8, 0),
            (48, 8, 0),
            (64, 8, 0),
        ]));
        let (chain, status) = rig.queue.blk(DISCARD, 0, &[(list, 80, false)]);
        rig.queue.add(&chain);
        rig.queue.submit();
        wait_for_script(&rig, ROOM);
        // The guest has no business here before the answer.
        guest.write(chain[0].0, &kind.to_le_bytes());
        guest.write(list, &[0xff; 80]);
        some_turns(&rig);
        rig.disk().release();
        rig.queue.wait_used();
        assert_eq!(guest.read(status, 1), [OK], "type {kind}");
        let expected = [0, 16, 32, 48, 64].map(|sector| (Op::Discard, sector * 512, 4096));
        assert_eq!(rig.script(), expected, "type {kind}");
        assert_eq!(rig.queue.used_index(), 1);
        assert_eq!(FakeQueue::events(&rig.queue.err), 0);
        assert_eq!(rig.handle.stop().unwrap(), 1);
    }
}

#[test]
fn chain_broken_while_its_request_waits_for_room_is_harmless() {
    let mut rig = rig();
    let guest = rig.guest();
    rig.disk().hold();
    let list = guest.place(&ranges(&[(0, 8, 0), (16, 8, 0), (32, 8, 0)]));
    let (chain, status) = rig.queue.blk(DISCARD, 0, &[(list, 48, false)]);
    let head = rig.queue.add(&chain);
    rig.queue.submit();
    wait_for_script(&rig, ROOM);
    // A loop.
    rig.queue.write_desc(head, chain[0].0, 16, 1, head);
    some_turns(&rig);
    rig.disk().release();
    rig.queue.wait_used();
    assert_eq!((guest.read(status, 1), rig.script().len()), (vec![OK], 3));
    assert_eq!(rig.handle.stop().unwrap(), 1);
}

#[test]
fn stopped_queue_first_finishes_a_request_waiting_for_room() {
    let mut rig = rig();
    let guest = rig.guest();
    rig.disk().hold();
    let list = guest.place(&ranges(&[(0, 8, 0), (16, 8, 0), (32, 8, 0)]));
    let (chain, status) = rig.queue.blk(DISCARD, 0, &[(list, 48, false)]);
    rig.queue.add(&chain);
    rig.queue.submit();
    wait_for_script(&rig, ROOM);
    guest.write(chain[0].0, &GET_ID.to_le_bytes());
    let (said, heard) = mpsc::channel();
    let handle = rig.handle;
    let stopper = std::thread::spawn(move || said.send(handle.stop()).unwrap());
    assert_eq!(guest.read(status, 1), [STATUS_UNSET]);
    rig.device.volume().release();
    assert_eq!(heard.recv().unwrap().unwrap(), 1);
    stopper.join().unwrap();
    assert_eq!(guest.read(status, 1), [OK]);
}

#[test]
fn stop_puts_what_did_not_begin_back_on_the_ring() {
    // As a volume that waits for its lease: it takes nothing.
    let setup = Setup {
        in_flight_max: 0,
        ..Setup::default()
    };
    for kind in [OUT, DISCARD] {
        let mut rig = Rig::new(setup);
        let guest = rig.guest();
        let data = match kind {
            OUT => guest.place(&[7; 512]),
            _ => guest.place(&ranges(&[(0, 8, 0), (16, 8, 0)])),
        };
        let len = if kind == OUT { 512 } else { 32 };
        let (chain, status) = rig.queue.blk(kind, 0, &[(data, len, false)]);
        rig.queue.add(&chain);
        rig.queue.submit();
        some_turns(&rig);
        assert_eq!(rig.handle.stop().unwrap(), 0, "it is the next one again");
        assert_eq!(
            (guest.read(status, 1), rig.queue.used_index()),
            (vec![STATUS_UNSET], 0)
        );
        assert_eq!(*rig.script.lock().unwrap(), []);
    }
}

#[test]
fn answers_before_a_stall_are_signalled_during_the_stall() {
    for poll in [PollMode::Never, PollMode::default(), PollMode::Always] {
        let mut rig = Rig::new(Setup {
            in_flight_max: ROOM,
            poll,
            ..Setup::default()
        });
        assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1);
        let guest = rig.guest();
        rig.disk().hold();
        rig.queue.want_interrupt(0, true);
        let data = guest.place(&[7; 512]);
        for _ in 0..3 {
            let (chain, _) = rig.queue.blk(GET_ID, 0, &[]);
            rig.queue.add(&chain);
        }
        for sector in 0..ROOM as u64 + 1 {
            let (chain, _) = rig.queue.blk(OUT, sector, &[(data, 512, false)]);
            rig.queue.add(&chain);
        }
        rig.queue.submit();
        assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1, "{poll:?}");
        for _ in 0..3 {
            rig.queue.wait_used();
        }
        rig.disk().release();
        for _ in 0..=ROOM {
            rig.queue.wait_used();
        }
    }
}

/// Each turn of the thread has room for one request. Were the same queue first every time, the other would
/// have its turn when that one has nothing left.
#[test]
fn queues_take_turns_for_the_only_place_in_the_engine() {
    const EACH: u64 = 16;
    /// Where the requests of the second queue are.
    const SECOND: u64 = 1 << 20;
    let setup = Setup {
        in_flight_max: 1,
        ..Setup::default()
    };
    let blk = BlkOptions {
        queues: 2,
        ..BlkOptions::default()
    };
    let mut rig = Rig::with(setup, blk, QueueOptions::default());
    let guest = rig.guest();
    let mut second = FakeQueue::new(&guest, QueueOptions::default());
    let config = second.config(1);
    let handle = rig.threads.start_queue(&rig.device, config).unwrap();
    let data = guest.place(&[7; 512]);
    rig.disk().hold();
    let (chain, _) = rig.queue.blk(OUT, 0, &[(data, 512, false)]);
    rig.queue.add(&chain);
    rig.queue.submit();
    wait_for_script(&rig, 1);
    for nth in 1..=EACH {
        let (chain, _) = rig.queue.blk(OUT, nth, &[(data, 512, false)]);
        rig.queue.add(&chain);
        let (chain, _) = second.blk(OUT, SECOND / 512 + nth, &[(data, 512, false)]);
        second.add(&chain);
    }
    rig.queue.submit();
    second.submit();
    some_turns(&rig);
    rig.disk().release();
    for _ in 0..EACH {
        rig.queue.wait_used();
        second.wait_used();
    }
    rig.queue.wait_used();
    let early = &rig.script()[1..=EACH as usize];
    let of_second = early.iter().filter(|(_, offset, _)| *offset >= SECOND);
    let share = of_second.count() as u64;
    assert!((1..EACH).contains(&share), "{share} of the first {EACH}");
    handle.stop().unwrap();
}

#[test]
fn answers_given_before_the_guest_broke_its_ring_are_announced() {
    let mut rig = Rig::with(
        Setup::default(),
        BlkOptions::default(),
        QueueOptions::default(),
    );
    assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1);
    rig.queue.want_interrupt(0, true);
    let (chain, _) = rig.queue.blk(GET_ID, 0, &[]);
    rig.queue.add(&chain);
    rig.queue.offer(u16::MAX);
    rig.queue.submit();
    assert_eq!(FakeQueue::wait_event(&rig.queue.err), 1);
    assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1);
    rig.queue.wait_used();
}
