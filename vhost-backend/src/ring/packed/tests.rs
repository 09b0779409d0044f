//! Packed rings that are wrong in one certain way each, and what is said of it.

mod crashes;

use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::ring::MAX_INDIRECT;
use crate::testing::{Buffer, FakeGuest, FakeQueue, GUEST_BASE, QueueOptions};

const SIZE: u16 = 8;
const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;

fn config(queue: &FakeQueue, features: u64) -> PackedRingConfig {
    PackedRingConfig {
        size: SIZE,
        desc: queue.desc,
        driver: queue.avail,
        device: queue.used,
        event_idx: features & EVENT_IDX != 0,
        indirect: features & INDIRECT != 0,
    }
}

struct Rig {
    guest: Arc<FakeGuest>,
    queue: FakeQueue,
    ring: PackedRing,
    view: MemoryView,
    chain: Chain,
}

fn rig_with(features: u64) -> Rig {
    let guest = Arc::new(FakeGuest::new(1 << 20));
    let options = QueueOptions {
        size: SIZE,
        features,
    };
    let queue = FakeQueue::new(&guest, options.packed());
    let mut view = MemoryView::new(Arc::clone(guest.memory()));
    let config = config(&queue, features);
    let (ring, _) = PackedRing::new(config, BASE_AT_START, None, &mut view).unwrap();
    Rig {
        guest,
        queue,
        ring,
        view,
        chain: Chain::default(),
    }
}

fn rig() -> Rig {
    rig_with(EVENT_IDX | INDIRECT)
}

/// A descriptor as it lies in memory.
fn encode(addr: GuestAddr, len: u32, id: u16, flags: u16) -> [u8; 16] {
    let rest = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
    (u128::from(addr.0) | u128::from(rest) << 64).to_le_bytes()
}

const AVAILABLE: u16 = 1 << 7;

impl Rig {
    /// Writes a descriptor that is available in the first lap.
    fn desc(&self, index: u16, addr: GuestAddr, len: u32, flags: u16) {
        let at = GuestAddr(self.queue.desc.0 + 16 * u64::from(index));
        self.guest
            .write(at, &encode(addr, len, index, flags | AVAILABLE));
    }

    fn walk(&mut self) -> Result<u16, RingError> {
        assert!(self.ring.available()? > 0);
        self.ring.prefetch(1, &mut self.view);
        let id = self.ring.take()?;
        self.ring.walk(id, &mut self.view, &mut self.chain)?;
        Ok(id)
    }

    fn serve(&mut self, count: u16) {
        for _ in 0..count {
            let id = self.walk().unwrap();
            self.ring.answer(id, 1);
        }
        self.ring.publish();
    }

    fn data(&self) -> GuestAddr {
        GuestAddr(GUEST_BASE + 0x8_0000)
    }
}

#[test]
fn a_chain_comes_off_in_order_and_split_by_direction() {
    let mut rig = rig();
    let at = rig.data();
    let buffers: Vec<Buffer> = vec![
        (at, 16, false),
        (at, 8, false),
        (at, 4, true),
        (at, 2, true),
    ];
    // Laps come to an end within a chain, too.
    for turn in 0..40 {
        let buffer = match turn % 3 {
            0 => rig.queue.add_indirect(&buffers),
            _ => rig.queue.add(&buffers),
        };
        rig.queue.publish();
        assert_eq!(rig.ring.available(), Ok(1));
        let id = rig.walk().unwrap();
        let lens = |pieces: &[libc::iovec]| pieces.iter().map(|p| p.iov_len).collect::<Vec<_>>();
        assert_eq!(
            (lens(&rig.chain.readable), lens(&rig.chain.writable)),
            (vec![16, 8], vec![4, 2])
        );
        assert_eq!(rig.ring.available(), Ok(0));
        rig.ring.answer(id, turn);
        assert_eq!((rig.queue.next_used(), rig.ring.unpublished()), (None, 1));
        rig.ring.publish();
        assert_eq!(rig.queue.next_used(), Some((buffer, turn)));
        rig.queue.recycle(buffer);
    }
}

#[test]
fn loops_and_chains_longer_than_the_ring_end() {
    let mut rig = rig();
    for index in 0..SIZE {
        rig.desc(index, rig.data(), 16, DESC_F_NEXT);
    }
    assert_eq!(rig.walk(), Err(RingError::TooLong(u32::from(SIZE))));
    // What is in flight counts, too.
    let mut rig = self::rig();
    rig.desc(0, rig.data(), 16, 0);
    rig.walk().unwrap();
    for index in 1..SIZE {
        rig.desc(index, rig.data(), 16, DESC_F_NEXT);
    }
    assert_eq!(rig.walk(), Err(RingError::TooLong(u32::from(SIZE))));
}

#[test]
fn requests_that_are_more_than_the_ring_holds_are_refused() {
    let mut rig = rig();
    for lap in [AVAILABLE, 1 << 15] {
        for index in 0..SIZE {
            let at = GuestAddr(rig.queue.desc.0 + 16 * u64::from(index));
            rig.guest.write(at, &encode(rig.data(), 16, index, lap));
        }
        let taken: Vec<_> = (0..SIZE).map(|_| rig.walk()).collect();
        let all_taken = taken.iter().all(Result::is_ok);
        assert_eq!(all_taken, lap == AVAILABLE);
        if !all_taken {
            assert_eq!(taken[0], Err(RingError::TooLong(u32::from(SIZE))));
        }
    }
}

#[test]
fn buffers_outside_guest_memory_are_refused() {
    for (addr, len) in [
        (0, 1),
        (u64::MAX, 1),
        (u64::MAX - 15, 16),
        (GUEST_BASE, u32::MAX),
    ] {
        let mut rig = rig();
        rig.desc(0, GuestAddr(addr), len, 0);
        let len = u64::from(len);
        assert_eq!(rig.walk(), Err(RingError::BufferAddress { addr, len }));
    }
}

#[test]
fn indirect_tables_must_be_whole_bounded_alone_and_negotiated() {
    let refused = |len, flags| {
        let mut rig = rig();
        rig.desc(0, rig.data(), len, flags);
        rig.desc(1, rig.data(), 16, 0);
        rig.walk().unwrap_err()
    };
    for len in [0, 15, 17, (MAX_INDIRECT + 1) * 16, u32::MAX] {
        assert_eq!(
            refused(len, DESC_F_INDIRECT),
            RingError::IndirectLength(len)
        );
    }
    let both = DESC_F_INDIRECT | DESC_F_NEXT;
    assert_eq!(refused(16, both), RingError::IndirectNested);

    let mut rig = rig_with(0);
    rig.desc(0, rig.data(), 16, DESC_F_INDIRECT);
    assert_eq!(rig.walk(), Err(RingError::IndirectNotNegotiated));
    let mut rig = self::rig();
    let table = rig.guest.place(&encode(rig.data(), 16, 0, DESC_F_INDIRECT));
    rig.desc(0, table, 16, DESC_F_INDIRECT);
    assert_eq!(rig.walk(), Err(RingError::IndirectNested));
    rig.desc(1, GuestAddr(16), 16, DESC_F_INDIRECT);
    let outside = RingError::BufferAddress { addr: 16, len: 16 };
    assert_eq!(rig.walk(), Err(outside));
}

#[test]
fn in_an_indirect_table_next_and_id_mean_nothing() {
    let mut rig = rig();
    let descs = [(16, 7, DESC_F_NEXT), (1, 0xffff, DESC_F_WRITE)];
    let descs = descs.map(|(len, id, flags)| encode(rig.data(), len, id, flags));
    let table = rig.guest.place(descs.as_flattened());
    rig.desc(0, table, 32, DESC_F_INDIRECT);
    rig.walk().unwrap();
    let bytes = (rig.chain.readable_bytes, rig.chain.writable_bytes);
    assert_eq!(bytes, (16, 1));
}

#[test]
fn readable_after_writable_is_refused() {
    let mut rig = rig();
    rig.desc(1, rig.data(), 16, 0);
    rig.desc(0, rig.data(), 16, DESC_F_WRITE | DESC_F_NEXT);
    assert_eq!(rig.walk(), Err(RingError::Order));
}

#[test]
fn a_request_that_is_taken_back_is_refused() {
    let mut rig = rig();
    rig.desc(0, rig.data(), 16, 0);
    assert_eq!(rig.ring.available(), Ok(1));
    rig.guest.write(rig.queue.desc, &[0; 16]);
    assert_eq!(rig.ring.take(), Err(RingError::TakenBack(0)));
}

#[test]
fn a_chain_is_the_one_that_was_taken_whatever_is_written_over_it() {
    let mut rig = rig();
    let at = rig.data();
    let slow = rig.queue.add(&[(at, 100, false), (at, 1, true)]);
    let quick = rig.queue.add(&[(at, 7, false)]);
    rig.queue.publish();
    let first = rig.walk().unwrap();
    let second = rig.walk().unwrap();
    // The answer to the second one lies where the first one's descriptors were.
    rig.ring.answer(second, 5);
    rig.ring.publish();
    assert_eq!(rig.queue.next_used(), Some((quick, 5)));
    rig.ring.walk(first, &mut rig.view, &mut rig.chain).unwrap();
    let bytes = (rig.chain.readable_bytes, rig.chain.writable_bytes);
    assert_eq!(bytes, (100, 1));
    rig.ring.answer(first, 1);
    rig.ring.publish();
    assert_eq!(rig.queue.next_used(), Some((slow, 1)));
}

#[test]
fn what_is_put_back_is_the_next_one_again() {
    let mut rig = rig();
    let at = rig.data();
    for len in 1..4 {
        rig.queue.add(&[(at, len, false), (at, 1, true)]);
    }
    rig.queue.publish();
    let first = rig.walk().unwrap();
    rig.walk().unwrap();
    rig.ring.answer(first, 1);
    rig.ring.publish();
    rig.ring.untake();
    assert_eq!(rig.ring.base(), 0x8002_8002);
    for len in 2..4 {
        rig.walk().unwrap();
        assert_eq!(rig.chain.readable_bytes, len);
    }
    assert_eq!(rig.ring.available(), Ok(0));
}

#[test]
fn interrupts_come_when_the_place_is_reached_in_any_lap() {
    for begin in 0..2 * SIZE {
        let wanted = begin % 3;
        let mut rig = rotate(rig(), begin);
        rig.queue.want_interrupt(begin + wanted, false);
        for answer in 0..3 {
            rig.queue.add_indirect(&[(rig.data(), 1, true)]);
            rig.queue.publish();
            rig.serve(1);
            assert_eq!(rig.ring.interrupt_due(), answer == wanted, "at {begin}");
        }
    }
}

/// A rig whose ring stands at place `at`.
fn rotate(mut rig: Rig, at: u16) -> Rig {
    let data = rig.data();
    for _ in 0..at {
        let id = rig.queue.add(&[(data, 1, true)]);
        rig.queue.publish();
        rig.serve(1);
        assert_eq!(rig.queue.next_used(), Some((id, 1)));
        rig.queue.recycle(id);
    }
    rig.ring.interrupt_due();
    rig
}

#[test]
fn flags_switch_interrupts_on_and_off() {
    let mut rig = rig_with(0);
    let at = rig.data();
    for wanted in [true, false, true] {
        rig.queue.want_interrupt(0, wanted);
        let id = rig.queue.add(&[(at, 1, true)]);
        rig.queue.publish();
        assert!(!rig.ring.interrupt_due(), "nothing was answered");
        rig.serve(1);
        assert_eq!(rig.ring.interrupt_due(), wanted);
        rig.queue.next_used();
        rig.queue.recycle(id);
    }
}

#[test]
fn kicks_are_wanted_exactly_while_armed() {
    for features in [0, EVENT_IDX] {
        let mut rig = rig_with(features);
        let at = rig.data();
        for turn in 0..40 {
            rig.ring.disarm();
            let first = rig.queue.add(&[(at, 1, false), (at, 1, true)]);
            rig.queue.publish();
            assert!(!rig.queue.kick_wanted());
            rig.serve(1);
            assert_eq!(rig.ring.arm(), Ok(false));
            let second = rig.queue.add(&[(at, 1, true)]);
            rig.queue.publish();
            assert!(rig.queue.kick_wanted(), "turn {turn}");
            rig.serve(1);
            for id in [first, second] {
                assert_eq!(rig.queue.next_used(), Some((id, 1)));
                rig.queue.recycle(id);
            }
        }
        rig.queue.add(&[(at, 1, true)]);
        rig.queue.publish();
        assert_eq!(rig.ring.arm(), Ok(true), "there is work already");
    }
}

#[test]
fn a_ring_goes_on_at_its_base() {
    let mut rig = rotate(rig(), 13);
    let base = rig.ring.base();
    assert_eq!(base, 0x0005_0005);
    let id = rig.queue.add(&[(rig.data(), 9, false)]);
    rig.queue.publish();
    let config = config(&rig.queue, 0);
    let (ring, replay) = PackedRing::new(config, base, None, &mut rig.view).unwrap();
    assert_eq!(replay, [0; 0]);
    rig.ring = ring;
    rig.serve(1);
    assert_eq!(rig.queue.next_used(), Some((id, 1)));
    for bad in [0x8000_8008, 0x8008_8000, 0x7fff_7fff] {
        let refused = PackedRing::new(config, bad, None, &mut rig.view);
        assert_eq!(refused.err(), Some(RingError::Base(bad)));
    }
}

fn log() -> Arc<DirtyLog> {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    DirtyLog::map(file, 4096, 0).unwrap()
}

#[test]
fn a_logged_ring_that_was_not_closed_is_refused_without_a_record() {
    for features in [0, EVENT_IDX] {
        let mut rig = rig_with(features);
        let config = config(&rig.queue, features);
        let mut again = |base| PackedRing::new(config, base, None, &mut rig.view).map(|_| ());
        rig.ring.set_log(Some((log(), rig.queue.used)));
        for armed in [true, false] {
            if armed {
                rig.ring.arm().unwrap();
            } else {
                rig.ring.disarm();
            }
            assert_eq!(again(BASE_AT_START), Err(RingError::NotClosed));
        }
        rig.ring.close();
        assert_eq!(again(BASE_AT_START), Ok(()));
        rig.queue.add(&[(GuestAddr(GUEST_BASE), 1, true)]);
        rig.queue.publish();
        assert!(
            rig.queue.kick_wanted(),
            "who serves it next waits for a kick"
        );
        // Something is in flight, of which the base alone does not tell.
        rig.ring.take().unwrap();
        rig.ring.close();
        assert_eq!(again(BASE_AT_START), Err(RingError::NotClosed));
        rig.ring.set_log(None);
        rig.ring.disarm();
        assert_eq!(again(BASE_AT_START), Ok(()), "only migration needs it");
    }
}
