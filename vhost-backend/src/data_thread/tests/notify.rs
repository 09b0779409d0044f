//! Kicks and interrupts: given when asked for, and spared when not.

use fabric_testing::Completion;

use super::support::*;
use crate::blk::BlkOptions;
use crate::data_thread::PollMode;
use crate::testing::{FakeQueue, QueueOptions};

fn rig(poll: PollMode, features: u64) -> Rig {
    let setup = Setup {
        poll,
        completion: Completion::Inline,
        ..Setup::default()
    };
    let mut rig = Rig::with(
        setup,
        BlkOptions::default(),
        QueueOptions { size: 64, features },
    );
    // The interrupt at the start, for a guest that an earlier daemon left waiting.
    assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1);
    assert_eq!(rig.queue.next_used(), None);
    rig
}

const EVENT_IDX: u64 = 1 << 29;

fn add_flushes(rig: &mut Rig, count: usize) {
    for _ in 0..count {
        let (chain, _) = rig.queue.blk(FLUSH, 0, &[]);
        rig.queue.add(&chain);
    }
    rig.queue.submit();
}

/// Waits for answers and then for the thread to have had every chance to interrupt.
fn take_answers(rig: &mut Rig, count: usize) {
    for _ in 0..count {
        rig.queue.wait_used();
    }
    for _ in 0..3 {
        rig.handle.set_err(None).unwrap();
    }
}

#[test]
fn event_idx_interrupts_at_the_wanted_answer_and_not_before() {
    let mut rig = rig(PollMode::Never, EVENT_IDX);
    rig.queue.want_interrupt(2, false);
    add_flushes(&mut rig, 1);
    take_answers(&mut rig, 1);
    add_flushes(&mut rig, 1);
    take_answers(&mut rig, 1);
    assert_eq!(FakeQueue::events(&rig.queue.call), 0);
    add_flushes(&mut rig, 1);
    assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1);
    take_answers(&mut rig, 1);
    // Passed, and not wanted again.
    add_flushes(&mut rig, 5);
    take_answers(&mut rig, 5);
    assert_eq!(FakeQueue::events(&rig.queue.call), 0);
}

#[test]
fn event_idx_interrupts_across_the_wrap_of_the_index() {
    let mut rig = rig(PollMode::Never, EVENT_IDX);
    rig.queue.want_interrupt(0xffff, false);
    for _ in 0..2047 {
        add_flushes(&mut rig, 32);
        for _ in 0..32 {
            rig.queue.wait_used();
        }
    }
    add_flushes(&mut rig, 31);
    take_answers(&mut rig, 31);
    assert_eq!(
        (rig.queue.used_index(), FakeQueue::events(&rig.queue.call)),
        (0xffff, 0)
    );
    add_flushes(&mut rig, 3);
    assert_eq!(FakeQueue::wait_event(&rig.queue.call), 1);
    take_answers(&mut rig, 3);
    assert_eq!(rig.queue.used_index(), 2);
}

#[test]
fn without_event_idx_the_flag_decides() {
    let mut rig = rig(PollMode::Never, 0);
    rig.queue.want_interrupt(0, false);
    add_flushes(&mut rig, 2);
    take_answers(&mut rig, 2);
    assert_eq!(FakeQueue::events(&rig.queue.call), 0);
    rig.queue.want_interrupt(0, true);
    add_flushes(&mut rig, 1);
    assert!(FakeQueue::wait_event(&rig.queue.call) >= 1);
}

#[test]
fn a_guest_that_waits_for_each_interrupt_gets_one_each_time() {
    for features in [EVENT_IDX, 0] {
        for poll in [PollMode::Never, PollMode::default(), PollMode::Always] {
            let mut rig = rig(poll, features);
            for round in 0..200u16 {
                rig.queue.want_interrupt(round, true);
                add_flushes(&mut rig, 1);
                FakeQueue::wait_event(&rig.queue.call);
                let (head, _) = rig
                    .queue
                    .next_used()
                    .expect("an answer before the interrupt");
                rig.queue.recycle(head);
            }
        }
    }
}

#[test]
fn a_thread_that_polls_wants_no_kicks() {
    for features in [EVENT_IDX, 0] {
        let mut rig = rig(PollMode::Always, features);
        let mut kicks = 0;
        for _ in 0..200 {
            let (chain, _) = rig.queue.blk(FLUSH, 0, &[]);
            rig.queue.add(&chain);
            kicks += u32::from(rig.queue.submit());
            rig.queue.wait_used();
        }
        assert_eq!(kicks, 0);
    }
}

#[test]
fn a_thread_that_sleeps_is_woken_by_every_kick() {
    for features in [EVENT_IDX, 0] {
        let mut rig = rig(PollMode::Never, features);
        for _ in 0..300 {
            assert_eq!(rig.queue.request(FLUSH, 0, &[]).0, OK);
        }
    }
}

#[test]
fn a_queue_without_a_kick_descriptor_is_polled() {
    let mut rig = rig(PollMode::Never, EVENT_IDX);
    rig.handle.stop().unwrap();
    let mut config = rig.queue.config(0);
    config.kick = None;
    let _polled = rig.threads.start_queue(&rig.device, config).unwrap();
    for _ in 0..10 {
        let (chain, _) = rig.queue.blk(FLUSH, 0, &[]);
        rig.queue.add(&chain);
        rig.queue.publish();
        rig.queue.wait_used();
    }
}

#[test]
fn a_new_call_descriptor_is_used_and_interrupted_once() {
    let mut rig = rig(PollMode::Never, EVENT_IDX);
    let fresh = FakeQueue::event();
    rig.handle
        .set_call(Some(fresh.try_clone().unwrap()))
        .unwrap();
    assert_eq!(FakeQueue::wait_event(&fresh), 1);
    rig.queue.want_interrupt(0, true);
    add_flushes(&mut rig, 1);
    assert_eq!(FakeQueue::wait_event(&fresh), 1);
    assert_eq!(FakeQueue::events(&rig.queue.call), 0);
}
