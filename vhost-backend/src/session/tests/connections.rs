//! Front ends that come and go.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use fabric_testing::{Completion, MemEngine, MemVolume};
use vhost::VhostBackend;
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_OUT;

use super::support::*;
use crate::data_thread::{PollMode, ThreadOptions, Threads};
use crate::memory::budget::MemoryPolicy;
use crate::session::Attachment;
use crate::session::socket::Endpoint;

/// Attachments that one daemon serves at once at least.
const MANY: usize = 64;

#[test]
fn a_front_end_may_leave_after_any_step() {
    let bench = Bench::new();
    for steps in 0..=SETUP.len() {
        let mut front = Front::new(&bench);
        front.set_up(steps);
        drop(front);
        bench.wait_for("disconnected", |state| !state.connected && state.rings == 0);
    }
    bench.assert_serves();
    assert_eq!(bench.attachment.state().last_error, None);
}

#[test]
fn a_front_end_may_leave_within_any_message() {
    let bench = Bench::new();
    let whole = message(crate::session::message::code::SET_VRING_NUM, 0, &[0; 8]);
    for len in 1..whole.len() {
        let socket = bench.connect();
        send_raw(&socket, &whole[..len], &[]);
        socket.shutdown(Shutdown::Write).unwrap();
        let mut socket = socket;
        assert_hung_up(&mut socket);
    }
    bench.wait_for("the last one gone", |state| !state.connected);
    let error = bench.attachment.state().last_error;
    assert_eq!(
        error.as_deref(),
        Some("front end closed the connection within a message")
    );
    bench.assert_serves();
}

#[test]
fn requests_in_flight_are_drained_when_a_front_end_leaves() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    bench.volume.hold();
    let from = front.guest.place(&[9; 512]);
    for sector in 0..4 {
        let (chain, _) = front
            .queue
            .blk(VIRTIO_BLK_T_OUT, sector, &[(from, 512, false)]);
        front.queue.add(&chain);
    }
    front.queue.submit();
    let Front { vhost, queue, .. } = front;
    drop(vhost);
    bench.volume.release();
    bench.wait_for("drained", |state| !state.connected);
    // A request is taken whole or not at all: the next daemon or connection finds the ring consistent.
    let answered = bench.device.counters().writes;
    assert_eq!(u64::from(queue.used_index()), answered);
    bench.assert_serves();
}

#[test]
fn front_ends_are_served_in_turn() {
    let bench = Bench::new();
    for turn in 1..=5 {
        bench.assert_serves();
        assert_eq!(bench.attachment.state().connections, turn);
    }
}

#[test]
fn a_second_front_end_waits_for_the_first_to_go() {
    let bench = Bench::new();
    let mut first = Front::start(&bench);
    let path = bench.path.clone();
    let second = std::thread::spawn(move || {
        let second = vhost::vhost_user::Frontend::connect(path, 1).unwrap();
        second.get_features().unwrap()
    });
    // The first goes on undisturbed, for as long as it likes.
    for _ in 0..50 {
        first.round_trip();
    }
    assert_eq!(bench.attachment.state().connections, 1);
    drop(first);
    assert_ne!(second.join().unwrap(), 0);
    assert_eq!(bench.attachment.state().connections, 2);
}

#[test]
fn many_attachments_live_side_by_side() {
    let options = ThreadOptions {
        threads: 2,
        poll: PollMode::Never,
        pin: None,
    };
    let threads = Threads::start(&options, |_| MemEngine::new(Completion::Queued)).unwrap();
    let benches: Vec<Bench> = (0..MANY)
        .map(|_| Bench::on(MemVolume::new(DISK_BYTES), Arc::clone(&threads)))
        .collect();
    let mut fronts: Vec<Front> = benches.iter().map(Front::start).collect();
    for front in &mut fronts {
        front.round_trip();
    }
    assert!(
        benches
            .iter()
            .all(|bench| bench.attachment.state().rings == 1)
    );
    drop(fronts);
    for bench in &benches {
        bench.wait_for("disconnected", |state| !state.connected);
    }
}

#[test]
fn closing_an_attachment_disconnects_and_removes_the_socket() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    front.round_trip();
    let path = bench.path.clone();
    let Bench { attachment, .. } = bench;
    attachment.close();
    assert!(!path.exists());
    assert!(front.vhost.get_features().is_err());
}

#[test]
fn close_does_not_wait_for_a_front_end_silent_within_a_message() {
    let bench = Bench::new();
    let socket = bench.connect();
    send_raw(&socket, &[1, 0, 0], &[]);
    bench.wait_for("connected", |state| state.connected);
    let Bench { attachment, .. } = bench;
    attachment.close();
    let mut socket = socket;
    assert_hung_up(&mut socket);
}

#[test]
fn a_connected_socket_that_was_handed_over_is_served_once() {
    let bench = Bench::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let attachment = Attachment::start(
        Endpoint::from_fd(theirs.into()).unwrap(),
        Arc::clone(&bench.device),
        Arc::clone(&bench.threads),
        MemoryPolicy::alone(),
    )
    .unwrap();
    let mut front = Front::new(&bench);
    front.vhost = vhost::vhost_user::Frontend::from_stream(ours, 2);
    front.set_up(SETUP.len());
    assert!(!attachment.is_finished());
    drop(front);
    eventually("it ends by itself", || attachment.is_finished());
}
