//! A daemon that dies with requests in flight, and the next one that does them again.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fabric_testing::{MemVolume, OpKind};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_OUT;

use super::support::*;
use crate::session::message::F_PROTOCOL_FEATURES;
use crate::testing::{FakeGuest, FakeQueue, QueueOptions};

const REQUESTS: u64 = 5;

/// Shared memory as it is at this moment, for a daemon that is about to die.
fn copy_of(file: &impl std::os::fd::AsFd, bytes: usize) -> OwnedFd {
    let mut content = vec![0; bytes];
    assert_eq!(rustix::io::pread(file, &mut content, 0).unwrap(), bytes);
    let copy = memfd_create("copy", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&copy, bytes as u64).unwrap();
    assert_eq!(rustix::io::pwrite(&copy, &content, 0).unwrap(), bytes);
    copy
}

/// Requests that are marked; header and entries have the same number of bytes.
fn marks(record: &impl std::os::fd::AsFd, bytes: usize, is_packed: bool) -> usize {
    let mut content = vec![0; bytes];
    rustix::io::pread(record, &mut content, 0).unwrap();
    let stride = if is_packed { 32 } else { 16 };
    content[stride..]
        .chunks(stride)
        .filter(|state| state[0] == 1)
        .count()
}

fn run(front: &mut Front, memory: &OwnedFd, record: (VhostUserInflight, &OwnedFd), base: u16) {
    front.set_up(4);
    let mut region = front.region();
    region.mmap_handle = memory.as_raw_fd();
    front
        .vhost
        .set_inflight_fd(&record.0, record.1.as_raw_fd())
        .unwrap();
    front.vhost.set_mem_table(&[region]).unwrap();
    let size = front.queue.config(0).size;
    front.vhost.set_vring_num(0, size).unwrap();
    if !front.is_packed() {
        front.vhost.set_vring_base(0, base).unwrap();
    }
    for step in &SETUP[7..12] {
        step(front).unwrap();
    }
}

#[test]
fn requests_in_flight_at_a_kill_run_once_in_the_next_daemon() {
    // Five requests, and two more of a round trip.
    run_once_in_the_next_daemon(QueueOptions::default(), 32, REQUESTS as u32 + 2);
}

#[test]
fn those_of_a_packed_ring_do_too() {
    // Three descriptors for each.
    run_once_in_the_next_daemon(QueueOptions::default().packed(), 32, 0x8015_8015);
}

#[test]
fn requests_in_flight_of_the_longest_rings_run_once() {
    let longest = QueueOptions {
        size: 32768,
        ..QueueOptions::default()
    };
    run_once_in_the_next_daemon(longest, 32768, REQUESTS as u32 + 2);
    run_once_in_the_next_daemon(longest.packed(), 32768, 0x8015_8015);
}

fn run_once_in_the_next_daemon(options: QueueOptions, asked: u16, base_after: u32) {
    let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
    let mut queue = FakeQueue::new(&guest, options);
    let mut statuses = Vec::new();
    for sector in 0..REQUESTS {
        let from = guest.place(&[sector as u8 + 1; 512]);
        let (chain, status) = queue.blk(VIRTIO_BLK_T_OUT, sector, &[(from, 512, false)]);
        queue.add(&chain);
        statuses.push(status);
    }
    queue.submit();

    // The first daemon works on a copy of the guest, in which it may do what it likes after its death.
    let dying = Bench::new();
    dying.volume.hold();
    let their_queue = FakeQueue::new(&Arc::new(FakeGuest::new(GUEST_BYTES)), options);
    let mut front = Front::of(&dying, Arc::clone(&guest), their_queue);
    front.queue.kick = queue.kick.try_clone().unwrap();
    std::mem::swap(&mut front.queue, &mut queue);
    // As QEMU 10.0, which lets the guest make a ring larger than it says, and hands the record back with its
    // own number.
    let wanted = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: asked,
    };
    front.set_up(3);
    let (made, file) = front.vhost.get_inflight_fd(&wanted).unwrap();
    let area = VhostUserInflight {
        queue_size: wanted.queue_size,
        ..made
    };
    let record: OwnedFd = file.into();
    let bytes = area.mmap_size as usize;
    let memory = copy_of(guest.file(), GUEST_BYTES as usize);
    run(&mut front, &memory, (area, &record), 0);
    eventually("all are taken", || {
        marks(&record, bytes, front.is_packed()) == REQUESTS as usize
    });

    // At this moment it dies. The front end keeps memory and record, and connects again.
    let record = copy_of(&record, bytes);
    std::mem::swap(&mut front.queue, &mut queue);
    let next = Bench::with(MemVolume::new(DISK_BYTES));
    let mut again = Front::of(&next, Arc::clone(&guest), queue);
    run(&mut again, guest.file(), (area, &record), 0);
    for _ in 0..REQUESTS {
        again.queue.wait_used();
    }
    for (sector, status) in statuses.into_iter().enumerate() {
        assert_eq!(guest.read(status, 1), [0]);
        assert_eq!(next.volume.peek(sector * 512, 512), [sector as u8 + 1; 512]);
    }
    assert_eq!(next.volume.done(OpKind::Write), REQUESTS);
    assert_eq!(marks(&record, bytes, again.is_packed()), 0);
    // It goes on behind them, and a clean stop leaves nothing to do again.
    again.round_trip();
    assert_eq!(again.vhost.get_vring_base(0).unwrap(), base_after);
    assert_eq!(next.volume.done(OpKind::Write), REQUESTS + 1);
    dying.volume.release();
}

#[test]
fn a_record_survives_any_number_of_clean_connections() {
    survives_clean_connections(QueueOptions::default());
}

#[test]
fn so_does_one_of_a_packed_ring() {
    survives_clean_connections(QueueOptions::default().packed());
}

fn survives_clean_connections(options: QueueOptions) {
    let bench = Bench::new();
    let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
    let mut queue = FakeQueue::new(&guest, options);
    let wanted = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 64,
    };
    let mut first = Front::with(&bench, options);
    first.set_up(3);
    let (area, file) = first.vhost.get_inflight_fd(&wanted).unwrap();
    drop(first);
    let record: OwnedFd = file.into();
    for turn in 0..4 {
        let mut front = Front::of(&bench, Arc::clone(&guest), queue);
        // A front end whose back end died does not know the base; the record and a split used ring tell.
        run(&mut front, guest.file(), (area, &record), 0);
        front.round_trip();
        assert_eq!(bench.volume.done(OpKind::Write), turn + 1);
        let Front {
            vhost, queue: kept, ..
        } = front;
        drop(vhost);
        queue = kept;
    }
}

#[test]
fn a_record_of_the_other_kind_of_rings_is_refused() {
    let bench = Bench::new();
    let mut front = Front::with(&bench, QueueOptions::default().packed());
    front.set_up(1);
    front.vhost.get_features().unwrap();
    // At the time of the record the rings are still split ones.
    front.vhost.set_features(F_PROTOCOL_FEATURES).unwrap();
    SETUP[2](&mut front).unwrap();
    let wanted = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 64,
    };
    let (area, file) = front.vhost.get_inflight_fd(&wanted).unwrap();
    front
        .vhost
        .set_inflight_fd(&area, file.as_raw_fd())
        .unwrap();
    front.vhost.set_features(front.features()).unwrap();
    let outcomes: Vec<_> = SETUP[3..12].iter().map(|step| step(&mut front)).collect();
    assert!(outcomes.iter().any(Result::is_err));
}

#[test]
fn after_a_reset_a_packed_ring_begins_anew() {
    let bench = Bench::new();
    let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
    let options = QueueOptions::default().packed();
    let wanted = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 64,
    };
    let queue = FakeQueue::new(&guest, options);
    let mut front = Front::of(&bench, Arc::clone(&guest), queue);
    front.set_up(3);
    let (area, file) = front.vhost.get_inflight_fd(&wanted).unwrap();
    let record: OwnedFd = file.into();
    run(&mut front, guest.file(), (area, &record), 0);
    front.round_trip();
    front.vhost.reset_device().unwrap();
    front.queue = FakeQueue::new(&guest, options);
    for step in &SETUP[5..12] {
        step(&mut front).unwrap();
    }
    front.round_trip();
}
