//! Rings that are wrong in one certain way each, and what is said of it.

use std::sync::Arc;

use super::*;
use crate::ring::MAX_INDIRECT;
use crate::testing::{Buffer, FakeGuest, FakeQueue, QueueOptions};

const SIZE: u16 = 8;

struct Rig {
    guest: Arc<FakeGuest>,
    queue: FakeQueue,
    ring: SplitRing,
    view: MemoryView,
    chain: Chain,
}

fn rig_with(indirect: bool) -> Rig {
    let guest = Arc::new(FakeGuest::new(1 << 20));
    let queue = FakeQueue::new(
        &guest,
        QueueOptions {
            size: SIZE,
            ..QueueOptions::default()
        },
    );
    let mut view = MemoryView::new(Arc::clone(guest.memory()));
    let config = SplitRingConfig {
        size: SIZE,
        desc: queue.desc,
        avail: queue.avail,
        used: queue.used,
        event_idx: true,
        indirect,
    };
    let ring = SplitRing::new(config, 0, &mut view).unwrap();
    Rig {
        guest,
        queue,
        ring,
        view,
        chain: Chain::default(),
    }
}

impl Rig {
    fn walk(&mut self, head: u16) -> Result<(), RingError> {
        self.queue.offer(head);
        self.queue.publish();
        assert!(self.ring.available()? > 0);
        self.ring.prefetch(1, &mut self.view);
        let id = self.ring.take()?;
        self.ring.walk(id, &mut self.view, &mut self.chain)
    }

    fn table(&mut self, descs: &[(GuestAddr, u32, u16, u16)]) -> GuestAddr {
        let mut bytes = Vec::new();
        for (addr, len, flags, next) in descs {
            bytes.extend([&addr.0.to_le_bytes()[..], &len.to_le_bytes()].concat());
            bytes.extend([flags.to_le_bytes(), next.to_le_bytes()].concat());
        }
        self.guest.place(&bytes)
    }
}

fn rig() -> Rig {
    rig_with(true)
}

#[test]
fn a_chain_comes_off_in_order_and_split_by_direction() {
    let mut rig = rig();
    let at = rig.guest.alloc(64, 1);
    let buffers: Vec<Buffer> = vec![
        (at, 16, false),
        (at, 8, false),
        (at, 4, true),
        (at, 2, true),
    ];
    for indirect in [false, true] {
        let head = if indirect {
            rig.queue.add_indirect(&buffers)
        } else {
            rig.queue.add(&buffers)
        };
        rig.queue.publish();
        assert_eq!(rig.ring.available(), Ok(1));
        assert_eq!(rig.ring.take(), Ok(head));
        rig.ring.walk(head, &mut rig.view, &mut rig.chain).unwrap();
        let lens = |pieces: &[libc::iovec]| pieces.iter().map(|p| p.iov_len).collect::<Vec<_>>();
        assert_eq!(
            (lens(&rig.chain.readable), lens(&rig.chain.writable)),
            (vec![16, 8], vec![4, 2])
        );
        assert_eq!(
            (rig.chain.readable_bytes, rig.chain.writable_bytes),
            (24, 6)
        );
        assert_eq!(rig.ring.available(), Ok(0));
    }
}

#[test]
fn loops_end() {
    let mut rig = rig();
    let at = rig.guest.alloc(16, 1);
    rig.queue.write_desc(0, at, 16, 1, 1);
    rig.queue.write_desc(1, at, 16, 1, 0);
    assert_eq!(rig.walk(0), Err(RingError::TooLong(u32::from(SIZE))));
    rig.queue.write_desc(2, at, 16, 1, 2);
    assert_eq!(rig.walk(2), Err(RingError::TooLong(u32::from(SIZE))));
    let table = rig.table(&[(at, 1, 1, 1), (at, 1, 1, 0)]);
    rig.queue.write_desc(3, table, 32, 4, 0);
    assert_eq!(rig.walk(3), Err(RingError::TooLong(2)));
}

#[test]
fn buffers_outside_guest_memory_are_refused() {
    for (addr, len) in [
        (0, 1),
        (u64::MAX, 1),
        (u64::MAX - 15, 16),
        (crate::testing::GUEST_BASE, u32::MAX),
    ] {
        let mut rig = rig();
        rig.queue.write_desc(0, GuestAddr(addr), len, 0, 0);
        assert_eq!(
            rig.walk(0),
            Err(RingError::BufferAddress {
                addr,
                len: u64::from(len)
            })
        );
    }
}

#[test]
fn indices_outside_their_table_are_refused() {
    let mut rig = rig();
    let at = rig.guest.alloc(16, 1);
    assert_eq!(
        rig.walk(SIZE),
        Err(RingError::DescriptorIndex {
            index: SIZE,
            size: u32::from(SIZE)
        })
    );
    let mut rig = self::rig();
    rig.queue.write_desc(0, at, 16, 1, 0xffff);
    assert_eq!(
        rig.walk(0),
        Err(RingError::DescriptorIndex {
            index: 0xffff,
            size: u32::from(SIZE)
        })
    );
    let table = rig.table(&[(at, 1, 1, 1)]);
    rig.queue.write_desc(0, table, 16, 4, 0);
    assert_eq!(rig.walk(0), Err(RingError::TooLong(1)));
    let table = rig.table(&[(at, 1, 1, 7), (at, 1, 0, 0)]);
    rig.queue.write_desc(0, table, 32, 4, 0);
    assert_eq!(
        rig.walk(0),
        Err(RingError::DescriptorIndex { index: 7, size: 2 })
    );
}

#[test]
fn index_jump_is_refused_and_the_largest_valid_step_is_not() {
    let mut rig = rig();
    rig.queue.force_avail_index(SIZE);
    assert_eq!(rig.ring.available(), Ok(SIZE));
    for to in [SIZE + 1, 0xffff, 0x8000] {
        let mut rig = self::rig();
        rig.queue.force_avail_index(to);
        assert_eq!(
            rig.ring.available(),
            Err(RingError::IndexJump {
                from: 0,
                to,
                size: SIZE
            })
        );
        assert!(rig.ring.arm().is_err());
    }
}

#[test]
fn indirect_tables_must_be_whole_bounded_alone_and_negotiated() {
    let mut rig = rig();
    let at = rig.guest.alloc(16, 1);
    for len in [0, 15, 17, (MAX_INDIRECT + 1) * 16, u32::MAX] {
        rig.queue.write_desc(0, at, len, 4, 0);
        assert_eq!(rig.walk(0), Err(RingError::IndirectLength(len)));
    }
    rig.queue.write_desc(0, at, 16, 4 | 1, 1);
    assert_eq!(rig.walk(0), Err(RingError::IndirectNested));
    let table = rig.table(&[(at, 16, 4, 0)]);
    rig.queue.write_desc(0, table, 16, 4, 0);
    assert_eq!(rig.walk(0), Err(RingError::IndirectNested));
    rig.queue.write_desc(0, GuestAddr(16), 16, 4, 0);
    assert_eq!(
        rig.walk(0),
        Err(RingError::BufferAddress { addr: 16, len: 16 })
    );
    let mut rig = rig_with(false);
    rig.queue.write_desc(0, table, 16, 4, 0);
    assert_eq!(rig.walk(0), Err(RingError::IndirectNotNegotiated));
}

#[test]
fn readable_after_writable_is_refused() {
    let mut rig = rig();
    let at = rig.guest.alloc(16, 1);
    rig.queue.write_desc(0, at, 16, 3, 1);
    rig.queue.write_desc(1, at, 16, 0, 0);
    assert_eq!(rig.walk(0), Err(RingError::Order));
}

#[test]
fn indices_wrap() {
    let guest = Arc::new(FakeGuest::new(1 << 20));
    let queue = FakeQueue::new(
        &guest,
        QueueOptions {
            size: SIZE,
            ..QueueOptions::default()
        },
    );
    let mut view = MemoryView::new(Arc::clone(guest.memory()));
    guest.write(GuestAddr(queue.avail.0 + 2), &2u16.to_le_bytes());
    guest.write(GuestAddr(queue.used.0 + 2), &0xffffu16.to_le_bytes());
    let (desc, avail, used) = (queue.desc, queue.avail, queue.used);
    let config = SplitRingConfig {
        size: SIZE,
        desc,
        avail,
        used,
        event_idx: true,
        indirect: true,
    };
    let mut ring = SplitRing::new(config, 0xfffe, &mut view).unwrap();
    assert_eq!(ring.available(), Ok(4));
    for _ in 0..4 {
        ring.take().unwrap();
        ring.answer(3, 1);
    }
    assert_eq!((ring.base(), ring.unpublished()), (2, 4));
    ring.publish();
    assert_eq!(
        (queue.used_index(), ring.unpublished(), ring.next_used()),
        (3, 0, 3)
    );
}
