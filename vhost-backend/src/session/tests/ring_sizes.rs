//! Rings of every size, with and without indirect descriptors: the limits that the device offers fit them.

use std::sync::Arc;

use fabric_testing::{MemEngine, MemVolume};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::memory::logged;
use super::support::*;
use crate::blk::{BlkDevice, BlkOptions, BlkQueue, CONFIG_BYTES};
use crate::device::DeviceQueue;
use crate::memory::GuestAddr;
use crate::ring::MAX_CHAIN;
use crate::testing::{Buffer, FakeGuest, FakeQueue, QueueOptions};

const SECTOR: usize = 512;
/// Enough for the longest ring and its requests.
const MEMORY_BYTES: u64 = 8 << 20;

/// A ring without indirect descriptors.
fn direct(size: u16) -> QueueOptions {
    QueueOptions {
        size,
        features: 1 << VIRTIO_RING_F_EVENT_IDX,
    }
}

fn front(bench: &Bench, options: QueueOptions) -> Front {
    let guest = Arc::new(FakeGuest::new(MEMORY_BYTES));
    let queue = FakeQueue::new(&guest, options);
    Front::of(bench, guest, queue)
}

/// Returns a word of the configuration space.
fn config(front: &mut Front, at: usize) -> u32 {
    let flags = VhostUserConfigFlags::empty();
    let size = CONFIG_BYTES as u32;
    let read = front
        .vhost
        .get_config(0, size, flags, &[0; CONFIG_BYTES])
        .unwrap();
    u32::from_le_bytes(read.1[at..at + 4].try_into().unwrap())
}

/// Sends a request with one descriptor per piece of data. In a ring without room for three descriptors the
/// header and the written data, or the read data and the status, share one.
fn request(front: &mut Front, kind: u32, data: &[Buffer]) -> u8 {
    let (mut chain, mut status) = front.queue.blk(kind, 0, data);
    if !front.queue.has_room(chain.len()) {
        assert_eq!(data.len(), 1, "room for more than one segment");
        let (at, len, is_writable) = data[0];
        let bytes = u64::from(len);
        let header = front.guest.read(chain[0].0, 16);
        chain = match is_writable {
            true => {
                let room = front.guest.alloc(bytes + 1, 1);
                status = GuestAddr(room.0 + bytes);
                vec![chain[0], (room, len + 1, true)]
            }
            false => {
                let whole = [header, front.guest.read(at, len as usize)].concat();
                vec![(front.guest.place(&whole), 16 + len, false), chain[2]]
            }
        };
        front.guest.write(status, &[0xee]);
    }
    let head = front.queue.add(&chain);
    front.queue.submit();
    assert_eq!(front.queue.wait_used().0, head);
    if let (true, [(at, len, true)]) = (chain.len() == 2, data) {
        let read = front.guest.read(chain[1].0, *len as usize);
        front.guest.write(*at, &read);
    }
    front.guest.read(status, 1)[0]
}

/// Buffers for sectors that are not adjacent, so that each is a segment.
fn sectors(front: &Front, count: u32, is_writable: bool) -> Vec<Buffer> {
    let one = |_| {
        (
            front.guest.alloc(SECTOR as u64, 1024),
            SECTOR as u32,
            is_writable,
        )
    };
    (0..count).map(one).collect()
}

/// Ranges of one sector, one descriptor for each.
fn ranges(front: &Front, count: u32) -> Vec<Buffer> {
    let range = |sector: u32| {
        let bytes = [u64::from(sector).to_le_bytes(), 1u64.to_le_bytes()].concat();
        (front.guest.place(&bytes), 16, false)
    };
    (0..count).map(range).collect()
}

/// Sends the largest requests that the device offers over a ring without indirect descriptors.
fn carries_the_largest_requests(bench: &Bench, options: QueueOptions) {
    let mut front = front(bench, options).started();
    let (size_max, seg_max) = (config(&mut front, 8), config(&mut front, 12));
    assert!(
        options.size < 3 || seg_max + 2 <= u32::from(options.size),
        "{seg_max} segments do not fit {options:?}: a driver waits forever for room"
    );
    assert!(seg_max > 0 && size_max % 4096 == 0 && size_max > 0);

    let from = sectors(&front, seg_max, false);
    for (i, (at, ..)) in from.iter().enumerate() {
        front.guest.write(*at, &[i as u8 | 1; SECTOR]);
    }
    assert_eq!(request(&mut front, VIRTIO_BLK_T_OUT, &from), 0);
    let to = sectors(&front, seg_max, true);
    assert_eq!(request(&mut front, VIRTIO_BLK_T_IN, &to), 0);
    for (i, (at, ..)) in to.iter().enumerate() {
        assert_eq!(front.guest.read(*at, SECTOR), [i as u8 | 1; SECTOR]);
    }
    for (kind, ranges_max_at) in [(VIRTIO_BLK_T_DISCARD, 40), (VIRTIO_BLK_T_WRITE_ZEROES, 52)] {
        let count = config(&mut front, ranges_max_at);
        assert!((1..=seg_max).contains(&count), "{count} ranges");
        let ranges = ranges(&front, count);
        assert_eq!(request(&mut front, kind, &ranges), 0, "{options:?}");
    }
    assert_eq!(bench.volume.peek(0, SECTOR), [0; SECTOR]);
    let is_broken = FakeQueue::events(&front.queue.err) > 0;
    assert!(!is_broken, "{options:?}");
}

/// QEMU's default, and the default of the device.
#[test]
fn a_ring_of_128_entries_has_room_for_the_largest_request() {
    for options in [direct(128), direct(128).packed()] {
        carries_the_largest_requests(&Bench::new(), options);
    }
}

#[test]
fn rings_of_every_size_have_room_for_the_largest_requests() {
    for size in [2, 4, 8, 16, 64, 128, 256, 512, 1024, 4096, 32768] {
        for options in [direct(size), direct(size).packed()] {
            carries_the_largest_requests(&Bench::for_queue_size(size), options);
        }
    }
}

#[test]
fn a_packed_ring_may_have_any_size() {
    for (size, queue_size) in [(3, 2), (5, 4), (100, 64), (32767, 16384)] {
        let options = direct(size).packed();
        carries_the_largest_requests(&Bench::for_queue_size(queue_size), options);
    }
}

#[test]
fn invalid_ring_sizes_are_refused() {
    for (options, sizes) in [
        (direct(64), &[0, 3, 6, 100, 32767, 32769, 65535][..]),
        (direct(64).packed(), &[0, 32769, 65535]),
    ] {
        let bench = Bench::new();
        let mut front = front(&bench, options);
        front.set_up(5);
        for size in sizes {
            let refused = front.vhost.set_vring_num(0, *size);
            assert!(refused.is_err(), "{options:?}, {size}");
        }
        for step in &SETUP[5..] {
            step(&mut front).unwrap();
        }
    }
}

/// Sends as many requests as the longest ring holds, several times, so that the ring wraps.
#[test]
fn the_longest_ring_can_be_full() {
    for options in [direct(32768), direct(32768).packed()] {
        let bench = Bench::new();
        let mut front = front(&bench, options).started();
        let (chain, status) = front.queue.blk(VIRTIO_BLK_T_FLUSH, 0, &[]);
        for _ in 0..3 {
            let mut added = 0;
            while front.queue.has_room(chain.len()) {
                front.queue.add(&chain);
                added += 1;
            }
            assert_eq!(added, 32768 / 2);
            front.queue.submit();
            for _ in 0..added {
                front.queue.wait_used();
            }
            assert_eq!(front.guest.read(status, 1), [0]);
        }
        front.round_trip();
    }
}

#[test]
fn a_long_ring_does_not_raise_the_chain_limit() {
    for options in [direct(4096), direct(4096).packed()] {
        let bench = Bench::new();
        let mut front = front(&bench, options).started();
        let (mut chain, _) = front.queue.blk(VIRTIO_BLK_T_FLUSH, 0, &[]);
        // The descriptors are empty, so that only their number matters.
        let empty = (chain[0].0, 0, false);
        let fill = |count: usize| vec![empty; count];
        let whole = usize::from(MAX_CHAIN);
        let longest = [&chain[..1], &fill(whole - 2), &chain[1..]].concat();
        front.queue.add(&longest);
        front.queue.submit();
        front.queue.wait_used();
        assert_eq!(FakeQueue::events(&front.queue.err), 0);
        chain.splice(1..1, fill(whole - 1));
        front.queue.add(&chain);
        front.queue.submit();
        assert!(FakeQueue::wait_event(&front.queue.err) > 0);
        drop(front);
        bench.assert_serves();
    }
}

#[test]
fn a_ring_too_short_for_the_largest_request_is_logged_once() {
    let start = |device: &Arc<BlkDevice<MemVolume>>, size, features| {
        drop(BlkQueue::<MemEngine>::start(device, 0, size, features));
    };
    let device = |queue_size| {
        let options = BlkOptions {
            queue_size,
            ..BlkOptions::default()
        };
        BlkDevice::new(MemVolume::new(4096), options).unwrap()
    };
    let said = logged(|| {
        let device = device(128);
        start(&device, 128, 0);
        start(&device, 16, 1 << VIRTIO_RING_F_INDIRECT_DESC);
    });
    assert_eq!(said, "");
    let said = logged(|| {
        let device = device(128);
        start(&device, 16, 0);
        start(&device, 16, 0);
    });
    assert_eq!(said.matches("WARN").count(), 1, "{said}");
    assert!(
        said.contains("--queue-size") && said.contains("entries=16"),
        "{said}"
    );
    // Firmware uses a part of a long ring for short requests.
    let said = logged(|| start(&device(1024), 128, 0));
    assert!(!said.contains("WARN"), "{said}");
}
