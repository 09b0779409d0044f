//! Each message, as another implementation of the protocol says it.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

use super::support::*;
use crate::blk::{CONFIG_BYTES, WRITEBACK_OFFSET};
use crate::device::Device;
use crate::session::message::{F_LOG_ALL, F_PROTOCOL_FEATURES, code};
use crate::testing::FakeQueue;

#[test]
fn every_step_to_a_running_ring_may_be_said_twice() {
    let bench = Bench::new();
    let mut front = Front::new(&bench);
    for step in &SETUP[..6] {
        step(&mut front).unwrap();
        step(&mut front).unwrap();
    }
    for step in &SETUP[6..] {
        step(&mut front).unwrap();
    }
    // With the ring running: all but its base, which is where it stands by now.
    for step in SETUP[..6].iter().chain(&SETUP[7..]) {
        step(&mut front).unwrap();
    }
    assert_eq!(bench.attachment.state().rings, 1);
}

#[test]
fn features_are_those_of_the_device_and_the_protocol() {
    let bench = Bench::new();
    let front = Front::new(&bench);
    let features = front.vhost.get_features().unwrap();
    assert_eq!(
        features,
        bench.device.features() | F_LOG_ALL | F_PROTOCOL_FEATURES
    );
}

#[test]
fn the_configuration_reads_as_zeroes_past_its_end() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let size = CONFIG_BYTES + 40;
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = front
        .vhost
        .get_config(0, size as u32, flags, &vec![0; size])
        .unwrap();
    assert_eq!(bytes[..8], (DISK_BYTES / 512).to_le_bytes());
    assert_eq!(bytes[CONFIG_BYTES..], [0; 40]);
    let (_, beyond) = front.vhost.get_config(4000, 64, flags, &[0; 64]).unwrap();
    assert_eq!(beyond, [0; 64]);
    let (_, tail) = front.vhost.get_config(4, 4, flags, &[0; 4]).unwrap();
    assert_eq!(tail, bytes[4..8]);
}

#[test]
fn of_the_configuration_only_the_cache_mode_can_be_written() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let flags = VhostUserConfigFlags::WRITABLE;
    assert!(bench.device.writeback());
    front
        .vhost
        .set_config(WRITEBACK_OFFSET, flags, &[0])
        .unwrap();
    assert!(!bench.device.writeback());
    for (offset, bytes) in [
        (0, &[1][..]),
        (WRITEBACK_OFFSET, &[2]),
        (WRITEBACK_OFFSET, &[1, 1]),
    ] {
        assert!(front.vhost.set_config(offset, flags, bytes).is_err());
    }
    assert!(!bench.device.writeback());
    // A front end that reconnects goes on with a driver that chose the mode long ago.
    drop(front);
    bench.assert_serves();
    assert!(!bench.device.writeback());
}

#[test]
fn stopping_a_ring_drains_it_and_tells_where_it_stands() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front.round_trip();
    front.round_trip();
    assert_eq!(front.vhost.get_vring_base(0).unwrap(), 4);
    assert_eq!(bench.attachment.state().rings, 0);
    assert_eq!(front.vhost.get_vring_base(0).unwrap(), 4);
    front.vhost.set_vring_base(0, 4).unwrap();
    front
        .vhost
        .set_vring_kick(0, &event_fd(&front.queue.kick))
        .unwrap();
    front.round_trip();
}

#[test]
fn a_drain_waits_for_the_last_answer() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    bench.volume.hold();
    let to = front.guest.alloc(512, 512);
    let (chain, _) = front.queue.blk(
        virtio_bindings::virtio_blk::VIRTIO_BLK_T_IN,
        0,
        &[(to, 512, true)],
    );
    front.queue.add(&chain);
    front.queue.submit();
    let release = bench.volume.clone();
    let releaser = std::thread::spawn(move || release.release());
    let base = front.vhost.get_vring_base(0).unwrap();
    assert_eq!(
        u32::from(front.queue.used_index()),
        base,
        "what was taken has its answer before the base is told"
    );
    releaser.join().unwrap();
}

#[test]
fn memory_comes_and_goes_region_by_region_under_a_running_ring() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    assert_eq!(front.vhost.get_max_mem_slots().unwrap(), 509);
    let more = crate::testing::FakeGuest::region(crate::testing::GUEST_BASE + (1 << 30), 1 << 16);
    let mut info = front.region();
    (info.guest_phys_addr, info.memory_size) = (more.guest.0, more.size);
    (info.userspace_addr, info.mmap_handle) = (more.user_addr, more.file.as_raw_fd());
    assert_eq!(bench.wait_for_open(1), 1);
    front.vhost.add_mem_region(&info).unwrap();
    assert!(
        front.vhost.add_mem_region(&info).is_err(),
        "it overlaps itself"
    );
    front.round_trip();
    assert_eq!(front.read(0, more.guest), 0);
    assert_eq!(bench.wait_for_open(2), 2, "opened whole, and once");
    front.vhost.remove_mem_region(&info).unwrap();
    assert!(front.vhost.remove_mem_region(&info).is_err());
    front.round_trip();
    assert_eq!(bench.wait_for_open(1), 2);
}

#[test]
fn guest_memory_is_registered_per_table_and_never_per_request() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    for _ in 0..20 {
        front.round_trip();
    }
    assert_eq!(bench.wait_for_open(1), 1);
    front.vhost.set_mem_table(&[front.region()]).unwrap();
    front.round_trip();
    assert_eq!(bench.wait_for_open(1), 2, "the old table is closed");
    drop(front);
    assert_eq!(bench.wait_for_open(0), 2, "and the last with its front end");
}

#[test]
fn a_region_may_begin_anywhere_in_its_file() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let more = crate::testing::FakeGuest::region(crate::testing::GUEST_BASE + (1 << 30), 1 << 16);
    bench.volume.poke(0, &[0x5a; 512]);
    let mut info = front.region();
    (info.guest_phys_addr, info.memory_size) = (more.guest.0, 0x3000);
    (info.userspace_addr, info.mmap_handle) = (more.user_addr, more.file.as_raw_fd());
    info.mmap_offset = 0x1000;
    front.vhost.add_mem_region(&info).unwrap();
    assert_eq!(front.read(0, more.guest), 0);
    let mut found = [0; 512];
    rustix::io::pread(&more.file, &mut found, 0x1000).unwrap();
    assert_eq!(found, [0x5a; 512]);
}

#[test]
fn device_reset_stops_rings_and_forgets_driver_choices() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front
        .vhost
        .set_config(WRITEBACK_OFFSET, VhostUserConfigFlags::WRITABLE, &[0])
        .unwrap();
    front.vhost.reset_device().unwrap();
    assert!(bench.device.writeback());
    bench.wait_for("rings stop", |state| state.rings == 0);
    front.vhost.reset_owner().unwrap();
    assert_eq!(front.vhost.get_vring_base(0).unwrap(), 0);
}

#[test]
fn new_call_descriptor_is_signalled_in_case_answers_were_missed() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front.round_trip();
    let call = FakeQueue::event();
    front.vhost.set_vring_call(0, &event_fd(&call)).unwrap();
    assert!(FakeQueue::wait_event(&call) > 0);
}

#[test]
fn a_ring_without_kick_and_call_descriptors_is_polled() {
    let bench = Bench::new();
    let mut front = Front::new(&bench);
    front.set_up(9);
    front
        .vhost
        .set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::empty());
    // The front end of the crate always sends descriptors; a socket of our own says what it cannot.
    drop(front.vhost);
    let mut socket = bench.connect();
    front.vhost = vhost::vhost_user::Frontend::from_stream(socket.try_clone().unwrap(), 2);
    front.set_up(9);
    for nofd in [code::SET_VRING_KICK, code::SET_VRING_CALL] {
        send_raw(&socket, &message(nofd, 8, &0x100_u64.to_ne_bytes()), &[]);
        assert_eq!(receive_raw(&mut socket).1, [0; 8]);
    }
    front.vhost.set_vring_enable(0, true).unwrap();
    front.round_trip();
}

#[test]
fn a_resize_reaches_the_front_end_on_its_channel() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let (ours, theirs) = UnixStream::pair().unwrap();
    front.vhost.set_backend_request_fd(&theirs).unwrap();
    let mut ours = ours;
    // The first message says that the disk may have changed before the rings ran.
    assert_eq!(
        receive_raw(&mut ours).0.code,
        code::BACKEND_CONFIG_CHANGE_MSG
    );
    bench.volume.resize(2 * DISK_BYTES);
    bench.attachment.notify_config_changed();
    let (header, payload) = receive_raw(&mut ours);
    assert_eq!(
        (header.code, header.flags),
        (code::BACKEND_CONFIG_CHANGE_MSG, 1)
    );
    assert!(payload.is_empty());
    let (_, config) = front
        .vhost
        .get_config(0, 8, VhostUserConfigFlags::empty(), &[0; 8])
        .unwrap();
    assert_eq!(config, (2 * DISK_BYTES / 512).to_le_bytes());
}

#[test]
fn a_front_end_that_reads_no_channel_does_not_stop_its_session() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let (_ours, theirs) = UnixStream::pair().unwrap();
    front.vhost.set_backend_request_fd(&theirs).unwrap();
    for _ in 0..2000 {
        bench.attachment.notify_config_changed();
        front.vhost.get_features().unwrap();
    }
    front.round_trip();
}

#[test]
fn the_signal_for_log_changes_is_taken() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front
        .vhost
        .set_log_fd(FakeQueue::event().as_raw_fd())
        .unwrap();
    front.round_trip();
}
