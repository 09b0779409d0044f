//! Messages that are wrong, with the connection and the disk surviving or ending cleanly.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use zerocopy::IntoBytes;

use super::memory::logged;
use super::support::*;
use crate::session::codec::Frame;
use crate::session::fuzzing::model_session;
use crate::session::message::{FLAG_VERSION, Header, MAX_FDS, MAX_PAYLOAD_BYTES, code};
use crate::testing::FakeQueue;

fn null() -> OwnedFd {
    File::open("/dev/zero").unwrap().into()
}

#[test]
fn malformed_streams_end_only_their_connection() {
    let bench = Bench::new();
    let header = |code, flags, size| Header { code, flags, size }.as_bytes().to_vec();
    let streams = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        header(1, 0, 0),
        header(1, 2, 0),
        header(1, 5, 0),
        header(1, 1, u32::MAX),
        header(1, 1, MAX_PAYLOAD_BYTES as u32 + 1),
        vec![0xff; 4096],
    ];
    for (count, stream) in streams.iter().enumerate() {
        let mut socket = bench.connect();
        send_raw(&socket, stream, &[]);
        assert_hung_up(&mut socket);
        bench.wait_for("its end is known", |state| {
            !state.connected && state.connections == count as u64 + 1
        });
        assert!(bench.attachment.state().last_error.is_some());
    }
    bench.assert_serves();
}

#[test]
fn sixteen_refusals_of_a_connection_are_logged() {
    let mut session = model_session(1);
    let said = logged(|| {
        for code in 200..300 {
            let frame = Frame {
                header: Header {
                    code,
                    flags: FLAG_VERSION,
                    size: 0,
                },
                payload: Vec::new(),
                fds: Vec::new(),
            };
            assert!(session.handle(frame).unwrap().is_none());
        }
    });
    let lines = said.matches("vhost-user message refused").count();
    assert_eq!(lines, 16, "{said}");
}

#[test]
fn too_many_descriptors_end_the_connection_without_a_leak() {
    let bench = Bench::new();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let fd = FakeQueue::event();
    let fds = vec![&fd; MAX_FDS + 1];
    let before = open();
    for _ in 0..4 {
        let mut socket = bench.connect();
        send_raw(&socket, &message(code::SET_OWNER, 0, &[]), &fds);
        assert_hung_up(&mut socket);
    }
    bench.wait_for("the last one gone", |state| !state.connected);
    eventually("descriptors are closed", || open() <= before);
    bench.assert_serves();
}

#[test]
fn unexpected_descriptors_are_refused_and_closed() {
    let bench = Bench::new();
    let mut socket = bench.connect();
    let (mut reader, writer) = std::io::pipe().unwrap();
    send_raw(
        &socket,
        &message(code::SET_OWNER, 0, &[]),
        &[&writer.into()],
    );
    assert_hung_up(&mut socket);
    // The pipe ends once the last copy of its writing end is closed.
    assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
}

#[test]
fn memory_from_wrong_descriptors_is_refused() {
    let bench = Bench::new();
    let mut front = Front::new(&bench);
    front.set_up(4);
    let mut info = front.region();
    for wrong in [null(), FakeQueue::event()] {
        info.mmap_handle = wrong.as_raw_fd();
        assert!(front.vhost.set_mem_table(&[info]).is_err());
        assert!(front.vhost.add_mem_region(&info).is_err());
    }
    let mut beyond = front.region();
    beyond.mmap_offset = 4096;
    assert!(
        front.vhost.add_mem_region(&beyond).is_err(),
        "past the end of its file"
    );
    let mut wrap = front.region();
    wrap.guest_phys_addr = u64::MAX - 4096;
    assert!(front.vhost.add_mem_region(&wrap).is_err());
    for step in &SETUP[4..] {
        step(&mut front).unwrap();
    }
}

#[test]
fn a_memory_table_that_is_refused_leaves_the_old_one_working() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let bad = null();
    let mut info = front.region();
    info.mmap_handle = bad.as_raw_fd();
    info.guest_phys_addr += 1 << 30;
    info.userspace_addr += 1 << 30;
    assert!(front.vhost.set_mem_table(&[front.region(), info]).is_err());
    front.round_trip();
}

#[test]
fn rings_outside_of_memory_do_not_start() {
    let bench = Bench::new();
    let mut front = Front::new(&bench);
    front.set_up(7);
    let mut outside = front.addresses();
    outside.used_ring_addr = 0x1000;
    front.vhost.set_vring_addr(0, &outside).unwrap();
    front
        .vhost
        .set_vring_kick(0, &event_fd(&front.queue.kick))
        .unwrap();
    assert!(front.vhost.set_vring_enable(0, true).is_err());
    assert_eq!(bench.attachment.state().rings, 0);
    // What was wrong can be put right.
    for step in &SETUP[7..] {
        step(&mut front).unwrap();
    }
}

#[test]
fn signals_that_are_none_are_refused_and_a_running_ring_goes_on() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let file = event_fd(&null());
    assert!(front.vhost.set_vring_kick(0, &file).is_err());
    assert!(front.vhost.set_vring_call(0, &file).is_err());
    assert!(front.vhost.set_vring_err(0, &file).is_err());
    // Nobody empties a pipe of kicks, so that after some thousands the ring would hang.
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert!(front.vhost.set_vring_kick(0, &event_fd(&pipe)).is_err());
    front.round_trip();
}

#[test]
fn in_flight_records_that_cannot_be_are_refused() {
    let bench = Bench::new();
    let mut front = Front::new(&bench);
    front.set_up(4);
    let layout = |num_queues, queue_size| VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues,
        queue_size,
    };
    let (area, file) = front.vhost.get_inflight_fd(&layout(2, 64)).unwrap();
    let mut set = |area: VhostUserInflight, fd| front.vhost.set_inflight_fd(&area, fd);
    let good = file.as_raw_fd();
    assert!(
        set(
            VhostUserInflight {
                mmap_size: 16,
                ..area
            },
            good
        )
        .is_err()
    );
    assert!(
        set(
            VhostUserInflight {
                mmap_offset: 1 << 40,
                ..area
            },
            good
        )
        .is_err()
    );
    assert!(
        set(
            VhostUserInflight {
                mmap_offset: 3,
                ..area
            },
            good
        )
        .is_err()
    );
    assert!(
        set(
            VhostUserInflight {
                num_queues: 9,
                ..area
            },
            good
        )
        .is_err()
    );
    assert!(
        set(
            VhostUserInflight {
                mmap_size: area.mmap_size - 64,
                queue_size: 1024,
                ..area
            },
            good
        )
        .is_err()
    );
    assert!(set(area, null().as_raw_fd()).is_err());
    assert!(set(area, FakeQueue::event().as_raw_fd()).is_err());
    set(area, good).unwrap();
    for step in &SETUP[4..] {
        step(&mut front).unwrap();
    }
}

#[test]
fn a_dirty_log_from_a_wrong_descriptor_ends_the_connection() {
    let bench = Bench::new();
    let front = Front::start(&bench);
    let bad = null();
    let log = vhost::VhostUserDirtyLogRegion {
        mmap_size: 4096,
        mmap_offset: 0,
        mmap_handle: bad.as_raw_fd(),
    };
    // Its answer has no room for a refusal.
    assert!(front.vhost.set_log_base(0, Some(log)).is_err());
    drop(front);
    bench.assert_serves();
}

#[test]
fn answers_to_a_front_end_that_never_reads_are_bounded() {
    let bench = Bench::new();
    let socket = bench.connect();
    socket.set_nonblocking(true).unwrap();
    let request = message(code::GET_FEATURES, 0, &[]);
    // Until neither direction takes any more: then the session waits, and holds nothing but one answer.
    let mut refused = 0;
    while refused < 100 {
        match std::io::Write::write(&mut &socket, &request) {
            Ok(_) => refused = 0,
            Err(_) => {
                refused += 1;
                std::thread::yield_now();
            }
        }
    }
    drop(socket);
    bench.assert_serves();
}

#[test]
fn a_broken_ring_breaks_alone() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front.queue.force_avail_index(1000);
    rustix::io::write(&front.queue.kick, &1_u64.to_ne_bytes()).unwrap();
    FakeQueue::wait_event(&front.queue.err);
    assert!(front.vhost.get_features().is_ok());
    drop(front);
    bench.assert_serves();
}
