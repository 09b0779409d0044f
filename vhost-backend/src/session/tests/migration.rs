//! The dirty log, as live migration uses it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::{VhostBackend, VhostUserDirtyLogRegion};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_OUT};

use super::support::*;
use crate::session::message::F_LOG_ALL;
use crate::testing::QueueOptions;

const LOG_BYTES: usize = 4096;

struct Log(OwnedFd);

impl Log {
    fn new() -> Self {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LOG_BYTES as u64).unwrap();
        Self(file)
    }

    fn region(&self) -> VhostUserDirtyLogRegion {
        VhostUserDirtyLogRegion {
            mmap_size: LOG_BYTES as u64,
            mmap_offset: 0,
            mmap_handle: self.0.as_raw_fd(),
        }
    }

    /// Guest addresses of the pages that were written since the last call.
    fn take(&self) -> Vec<u64> {
        let mut bytes = vec![0; LOG_BYTES];
        rustix::io::pread(&self.0, &mut bytes, 0).unwrap();
        rustix::io::pwrite(&self.0, &vec![0; LOG_BYTES], 0).unwrap();
        (0..LOG_BYTES as u64 * 8)
            .filter(|page| bytes[(page / 8) as usize] & 1 << (page % 8) != 0)
            .map(|page| page * 4096)
            .collect()
    }
}

/// Has all writes of the front end's device logged from now on, but those to the used ring.
fn logged_without_rings(front: &Front) -> Log {
    let log = Log::new();
    front.vhost.set_log_base(0, Some(log.region())).unwrap();
    front
        .vhost
        .set_features(front.features() | F_LOG_ALL)
        .unwrap();
    log
}

/// Has all writes of the front end's device logged from now on.
fn logged(front: &mut Front) -> Log {
    let log = logged_without_rings(front);
    front.used_log = Some(front.queue.used.0);
    front.vhost.set_vring_addr(0, &front.addresses()).unwrap();
    log
}

fn page(at: u64) -> u64 {
    at & !4095
}

#[test]
fn what_a_read_writes_is_logged_between_on_and_off() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let log = Log::new();
    front.vhost.set_log_base(0, Some(log.region())).unwrap();
    let to = front.guest.alloc(4096 * 3, 4096);
    assert_eq!(front.read(0, to), 0);
    assert_eq!(log.take(), [0; 0], "not asked for yet");

    front
        .vhost
        .set_features(front.features() | F_LOG_ALL)
        .unwrap();
    front.used_log = Some(front.queue.used.0);
    front.vhost.set_vring_addr(0, &front.addresses()).unwrap();
    log.take();
    assert_eq!(front.read(0, to), 0);
    let dirty = log.take();
    assert!(dirty.contains(&to.0), "the data");
    assert!(dirty.contains(&page(front.queue.used.0)), "the used ring");
    assert!(
        !dirty.contains(&(to.0 + 4096)),
        "a page that was not written"
    );
    let desc = page(front.queue.desc.0);
    assert!(
        !dirty.contains(&desc),
        "the descriptor table is the guest's"
    );

    front.vhost.set_features(front.features()).unwrap();
    front.used_log = None;
    front.vhost.set_vring_addr(0, &front.addresses()).unwrap();
    log.take();
    front.round_trip();
    assert_eq!(log.take(), [0; 0], "off again");
}

#[test]
fn a_packed_ring_is_logged_where_it_is_written() {
    let bench = Bench::new();
    let mut front = Front::start_packed(&bench);
    let log = logged(&mut front);
    log.take();
    let to = front.guest.alloc(4096 * 3, 4096);
    assert_eq!(front.read(0, to), 0);
    let dirty = log.take();
    assert!(dirty.contains(&to.0), "the data");
    let desc = page(front.queue.desc.0);
    assert!(dirty.contains(&desc), "the ring, which answers lie in");
    let driver = page(front.queue.avail.0);
    assert!(
        !dirty.contains(&driver),
        "the driver's structure is its own"
    );
    // The last thing is that the ring is not served any more.
    front.vhost.get_vring_base(0).unwrap();
    assert!(log.take().contains(&page(front.queue.used.0)));
}

/// A front end at the destination, which has the guest's memory and a base. Whether its ring starts.
fn starts_elsewhere(front: &Front) -> bool {
    let there = Bench::new();
    let mut again = Front::with(&there, QueueOptions::default().packed());
    again.guest = Arc::clone(&front.guest);
    (again.queue.desc, again.queue.avail, again.queue.used) =
        (front.queue.desc, front.queue.avail, front.queue.used);
    SETUP[..12].iter().all(|step| step(&mut again).is_ok())
}

#[test]
fn a_packed_ring_whose_daemon_is_gone_at_the_end_of_a_migration_is_refused() {
    let bench = Bench::new();
    let mut front = Front::start_packed(&bench);
    let _log = logged(&mut front);
    front.round_trip();
    assert!(!starts_elsewhere(&front), "its daemon was not asked");
    front.vhost.get_vring_base(0).unwrap();
    assert!(starts_elsewhere(&front));
}

#[test]
fn without_the_flag_the_used_ring_is_not_logged() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let log = logged_without_rings(&front);
    let to = front.guest.alloc(4096, 4096);
    assert_eq!(front.read(0, to), 0);
    let dirty = log.take();
    assert!(dirty.contains(&to.0));
    assert!(!dirty.contains(&page(front.queue.used.0)));
}

#[test]
fn answers_are_in_the_order_of_the_requests_while_logging() {
    let bench = Bench::new();
    answers_in_order(&bench, Front::start(&bench));
}

#[test]
fn answers_in_a_packed_ring_are_too() {
    let bench = Bench::new();
    answers_in_order(&bench, Front::start_packed(&bench));
}

fn answers_in_order(bench: &Bench, mut front: Front) {
    let guest = Arc::clone(&front.guest);
    let log = Log::new();
    for logs in [false, true] {
        if logs {
            front.vhost.set_log_base(0, Some(log.region())).unwrap();
            let features = front.features() | F_LOG_ALL;
            front.vhost.set_features(features).unwrap();
        }
        let before = front.queue.used_index();
        bench.volume.hold();
        let from = guest.place(&[7; 512]);
        let (write, _) = front.queue.blk(VIRTIO_BLK_T_OUT, 0, &[(from, 512, false)]);
        let to = guest.place(&[0; 20]);
        let (id, status) = front.queue.blk(VIRTIO_BLK_T_GET_ID, 0, &[(to, 20, true)]);
        front.queue.add(&write);
        front.queue.add(&id);
        front.queue.submit();
        eventually("the second is done", || guest.read(status, 1) == [0]);
        if !logs {
            eventually("it is answered", || front.queue.used_index() == before + 1);
        }
        // The ring's thread has had turns since.
        front
            .vhost
            .set_vring_err(0, &event_fd(&front.queue.err))
            .unwrap();
        let answered = front.queue.used_index() - before;
        assert_eq!(answered, u16::from(!logs), "the first one is under way");
        bench.volume.release();
        front.queue.wait_used();
        front.queue.wait_used();
    }
}

#[test]
fn a_log_that_is_replaced_while_logging_is_the_one_written_to() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let (first, second) = (Log::new(), Log::new());
    front.vhost.set_log_base(0, Some(first.region())).unwrap();
    front
        .vhost
        .set_features(front.features() | F_LOG_ALL)
        .unwrap();
    front.vhost.set_log_base(0, Some(second.region())).unwrap();
    first.take();
    let to = front.guest.alloc(4096, 4096);
    assert_eq!(front.read(0, to), 0);
    assert_eq!(first.take(), [0; 0]);
    assert!(second.take().contains(&to.0));
}

#[test]
fn a_log_set_only_after_logging_was_switched_on_is_used() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front
        .vhost
        .set_features(front.features() | F_LOG_ALL)
        .unwrap();
    let log = Log::new();
    front.vhost.set_log_base(0, Some(log.region())).unwrap();
    let to = front.guest.alloc(4096, 4096);
    assert_eq!(front.read(0, to), 0);
    assert!(log.take().contains(&to.0));
}
