//! A guest that breaks the rules harms itself alone.

use fuse_codec::{NodeId, Opcode, REPLY_HEADER_BYTES, wire};
use vhost_backend::testing::FakeQueue;
use zerocopy::IntoBytes;

use super::{Guest, ROOT, guest, pattern};
use crate::IO_BYTES_MAX;
use crate::testing::{Cut, named};

/// A lookup that is sound.
fn sound(guest: &mut Guest) -> Vec<u8> {
    guest.request(Opcode::Lookup.number(), ROOT, &named(&[], b"name"))
}

/// The guest's other queue still works.
fn assert_serves(guest: &mut Guest) {
    let bytes = sound(guest);
    let answer = guest.send(2, &bytes, 144, Cut::Kernel).unwrap();
    assert_eq!(answer.error, 0);
}

#[test]
fn a_request_without_room_for_its_reply_is_not_carried_out() {
    let mut guest = guest();
    let head = wire::MkdirIn::default();
    let body = named(head.as_bytes(), b"dir");
    let bytes = guest.request(Opcode::Mkdir.number(), ROOT, &body);
    for room in [0, 1, REPLY_HEADER_BYTES - 1] {
        assert_eq!(guest.send(1, &bytes, room, Cut::Kernel), None);
    }
    for room in [REPLY_HEADER_BYTES, 143] {
        for cut in [Cut::Kernel, Cut::Pieces(3)] {
            let answer = guest.send(1, &bytes, room, cut).unwrap();
            assert_eq!((answer.error, answer.used), (libc::EIO, 16));
        }
    }
    assert_eq!(guest.lookup(ROOT, b"dir").unwrap().nodeid.get(), 0);
    assert_eq!(guest.device.queue_counters(1).unwrap().refused, 7);
    assert_eq!(guest.send(1, &bytes, 144, Cut::Kernel).unwrap().error, 0);
}

#[test]
fn lengths_that_contradict_each_other_are_answered_eio() {
    let mut guest = guest();
    let bytes = sound(&mut guest);
    for len in [
        0u32,
        39,
        40,
        bytes.len() as u32 - 1,
        bytes.len() as u32 + 1,
        u32::MAX,
    ] {
        let mut bytes = bytes.clone();
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        let answer = guest.send(1, &bytes, 144, Cut::Kernel).unwrap();
        assert_eq!((answer.error, answer.used), (libc::EIO, 16), "{len}");
    }
    // What is whole as far as its header says, and longer.
    let mut long = guest.request(Opcode::Statfs.number(), ROOT, &[0]);
    long[..4].copy_from_slice(&40u32.to_le_bytes());
    assert_eq!(
        guest.send(1, &long, 96, Cut::Kernel).unwrap().error,
        libc::EIO
    );
    // A header that tells the truth of a request that is too short, or too long.
    for body in [&b""[..], b"name", b"name\0more"] {
        let bytes = guest.request(Opcode::Lookup.number(), ROOT, body);
        assert_eq!(
            guest.send(1, &bytes, 144, Cut::Kernel).unwrap().error,
            libc::EIO
        );
    }
    let long = guest.request(Opcode::Lookup.number(), ROOT, &vec![b'n'; 200_000]);
    assert_eq!(
        guest.send(1, &long, 144, Cut::Kernel).unwrap().error,
        libc::E2BIG
    );
    assert_serves(&mut guest);
}

#[test]
fn a_chain_without_a_header_breaks_its_queue_alone() {
    let sound = sound(&mut guest());
    let mut swapped = sound.clone();
    swapped[4..8].copy_from_slice(&26u32.to_be_bytes());
    for bytes in [&sound[..39], &sound[..1], &[], &swapped[..]] {
        for cut in [Cut::Kernel, Cut::Pieces(2)] {
            let mut guest = guest();
            guest.put(1, bytes, 144, cut);
            guest.queues[1].submit();
            assert!(FakeQueue::wait_event(&guest.queues[1].err) > 0);
            assert_eq!(guest.queues[1].next_used(), None);
            assert_serves(&mut guest);
            guest.stop_queues();
        }
    }
}

#[test]
fn a_chain_outside_of_guest_memory_breaks_its_queue_alone() {
    let mut guest = guest();
    let bytes = sound(&mut guest);
    let at = guest.place(&bytes);
    let outside = vhost_backend::memory::GuestAddr(1 << 60);
    guest.queues[1].add(&[(at, bytes.len() as u32, false), (outside, 144, true)]);
    guest.queues[1].submit();
    assert!(FakeQueue::wait_event(&guest.queues[1].err) > 0);
    assert_serves(&mut guest);
}

#[test]
fn forged_inodes_and_handles_are_told_so() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    for node in [NodeId(0), NodeId(file.0 + 1), NodeId(u64::MAX)] {
        assert_eq!(guest.getattr(node), Err(libc::ESTALE));
        assert_eq!(guest.lookup(node, b"name").unwrap_err(), libc::ESTALE);
        assert_eq!(guest.mkdir(node, b"name"), Err(libc::ESTALE));
        assert_eq!(guest.write(node, handle, 0, b"data"), Err(libc::EBADF));
    }
    for forged in [0, handle + 1, u64::MAX] {
        assert_eq!(guest.read(file, forged, 0, 10), Err(libc::EBADF));
        assert_eq!(guest.write(file, forged, 0, b"data"), Err(libc::EBADF));
    }
    assert_eq!(
        guest.list(Opcode::Readdir, file, handle, 0, 100),
        Err(libc::ENOTDIR)
    );
}

#[test]
fn more_data_than_were_agreed_are_refused() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    let data = pattern(IO_BYTES_MAX as usize + 1);
    let bytes = guest.write_request(file, handle, 0, &data);
    let answer = guest.send(1, &bytes, 24, Cut::Kernel).unwrap();
    assert_eq!(answer.error, libc::EINVAL);
    let bytes = guest.read_request(file, handle, 0, IO_BYTES_MAX + 1);
    let room = IO_BYTES_MAX as usize + 100;
    assert_eq!(
        guest.send(1, &bytes, room, Cut::Kernel).unwrap().error,
        libc::EINVAL
    );
    assert_eq!(guest.getattr(file).unwrap().size.get(), 0);
    // A payload that the arguments do not count.
    let mut bytes = guest.write_request(file, handle, 0, b"data");
    bytes[56..60].copy_from_slice(&3u32.to_le_bytes());
    assert_eq!(
        guest.send(1, &bytes, 24, Cut::Kernel).unwrap().error,
        libc::EIO
    );
}

#[test]
fn a_batch_of_forgets_may_be_long_or_a_lie() {
    let mut guest = guest();
    let count = 4096u32;
    for said in [count, count - 1, u32::MAX] {
        let batch = wire::BatchForgetIn {
            count: said.into(),
            dummy: 0.into(),
        };
        let one = wire::ForgetOne {
            nodeid: 5.into(),
            nlookup: u64::MAX.into(),
        };
        let body = [batch.as_bytes(), &one.as_bytes().repeat(count as usize)].concat();
        let bytes = guest.request(Opcode::BatchForget.number(), NodeId(0), &body);
        assert_eq!(guest.send(0, &bytes, 0, Cut::Kernel), None);
    }
    assert_eq!(guest.device.queue_counters(0).unwrap().refused, 2);
}
