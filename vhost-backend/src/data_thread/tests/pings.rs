//! Whether a data thread still turns: what waits for a device does, what hangs does not.

use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::support::*;
use crate::data_thread::Ping;
use crate::testing::FakeQueue;

fn wait_for(ping: &Ping) {
    while !ping.is_answered() {
        std::thread::yield_now();
    }
}

#[test]
fn ping_is_answered_while_a_device_hangs() {
    let mut rig = Rig::new(Setup::default());
    rig.threads.ping().iter().for_each(wait_for);
    rig.disk().hold();
    let from = rig.guest().place(&[1; 512]);
    let (chain, _) = rig.queue.blk(OUT, 0, &[(from, 512, false)]);
    rig.queue.add(&chain);
    rig.queue.submit();
    while rig.script().is_empty() {
        std::thread::yield_now();
    }
    rig.threads.ping().iter().for_each(wait_for);
    rig.disk().release();
    rig.queue.wait_used();
}

#[test]
fn ping_is_not_answered_by_a_thread_that_hangs() {
    let mut rig = Rig::new(Setup::default());
    // A full descriptor that blocks whoever writes it: the thread hangs when it interrupts the guest.
    rig.queue.want_interrupt(rig.queue.used_index(), false);
    let full = (u64::MAX - 1).to_ne_bytes();
    while rustix::io::write(&rig.queue.call, &full) == Err(rustix::io::Errno::AGAIN) {
        FakeQueue::events(&rig.queue.call);
    }
    let flags = fcntl_getfl(&rig.queue.call).unwrap();
    fcntl_setfl(&rig.queue.call, flags - OFlags::NONBLOCK).unwrap();
    let from = rig.guest().place(&[1; 512]);
    let (chain, _) = rig.queue.blk(OUT, 0, &[(from, 512, false)]);
    rig.queue.add(&chain);
    rig.queue.submit();
    rig.queue.wait_used();
    // Asked after it hangs, which may be a moment after the answer is seen.
    let mut last = rig.threads.ping();
    while last.iter().all(Ping::is_answered) {
        std::thread::sleep(Duration::from_millis(20));
        last = rig.threads.ping();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(last.iter().any(|ping| !ping.is_answered()));
    // More than the mailbox holds: asking never waits.
    for _ in 0..1000 {
        drop(rig.threads.ping());
    }
    rustix::io::read(&rig.queue.call, &mut [0; 8]).unwrap();
    while !rig.threads.ping().iter().all(|ping| {
        std::thread::sleep(Duration::from_millis(1));
        ping.is_answered()
    }) {}
}
