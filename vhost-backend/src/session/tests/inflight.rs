//! A daemon that dies with requests in flight, and the next one that does them again.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fabric::testing::{MemVolume, OpKind};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_OUT;

use super::support::*;
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

fn marks(record: &impl std::os::fd::AsFd, bytes: usize) -> usize {
    let mut content = vec![0; bytes];
    rustix::io::pread(record, &mut content, 0).unwrap();
    content[16..]
        .chunks(16)
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
    front.vhost.set_vring_num(0, 64).unwrap();
    front.vhost.set_vring_base(0, base).unwrap();
    for step in &SETUP[7..12] {
        step(front).unwrap();
    }
}

#[test]
fn requests_in_flight_at_a_kill_run_once_in_the_next_daemon() {
    let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
    let mut queue = FakeQueue::new(&guest, QueueOptions::default());
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
    let their_queue = FakeQueue::new(
        &Arc::new(FakeGuest::new(GUEST_BYTES)),
        QueueOptions::default(),
    );
    let mut front = Front::of(&dying, Arc::clone(&guest), their_queue);
    front.queue.kick = queue.kick.try_clone().unwrap();
    std::mem::swap(&mut front.queue, &mut queue);
    // As QEMU 10.0, which lets the guest make a ring larger than it says, and hands the record back with its
    // own number.
    let wanted = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 32,
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
        marks(&record, bytes) == REQUESTS as usize
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
    assert_eq!(marks(&record, bytes), 0);
    // It goes on behind them, and a clean stop leaves nothing to do again.
    again.round_trip();
    assert_eq!(again.vhost.get_vring_base(0).unwrap(), REQUESTS as u32 + 2);
    assert_eq!(next.volume.done(OpKind::Write), REQUESTS + 1);
    dying.volume.release();
}

#[test]
fn a_record_survives_any_number_of_clean_connections() {
    let bench = Bench::new();
    let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
    let mut queue = FakeQueue::new(&guest, QueueOptions::default());
    let wanted = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 64,
    };
    let mut first = Front::new(&bench);
    first.set_up(3);
    let (area, file) = first.vhost.get_inflight_fd(&wanted).unwrap();
    drop(first);
    let record: OwnedFd = file.into();
    for turn in 0..4 {
        let mut front = Front::of(&bench, Arc::clone(&guest), queue);
        // A front end whose back end died does not know the base; the record and the used ring tell.
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
