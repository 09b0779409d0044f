//! Chains of the shapes that drivers do not make, and of the largest that they do.

use fuse_codec::{Opcode, REPLY_HEADER_BYTES, wire};
use vhost_backend::testing::QueueOptions;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use zerocopy::FromBytes;

use super::{ROOT, guest, guest_with, pattern};
use crate::IO_BYTES_MAX;
use crate::testing::Cut;

#[test]
fn requests_and_replies_in_single_bytes_are_whole() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    guest.cut = Cut::Pieces(1);
    let data = pattern(150);
    assert_eq!(guest.write(file, handle, 7, &data), Ok(150));
    assert_eq!(guest.read(file, handle, 7, 150).unwrap(), data);
    assert_eq!(guest.getattr(file).unwrap().size.get(), 157);
    let found = guest.lookup(ROOT, b"file").unwrap();
    assert_eq!(found.nodeid.get(), file.0);
    let dir = guest.mkdir(ROOT, b"dir").unwrap();
    let handle = guest.open(Opcode::Opendir, dir, 0).unwrap();
    assert_eq!(
        guest
            .list(Opcode::Readdir, dir, handle, 0, 200)
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn headers_and_payloads_may_meet_anywhere_in_a_piece() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    let data = pattern(500);
    for piece in [13, 39, 40, 41, 79, 80, 81, 200, 1000] {
        guest.cut = Cut::Pieces(piece);
        assert_eq!(guest.write(file, handle, piece as u64, &data), Ok(500));
        assert_eq!(
            guest.read(file, handle, piece as u64, 500).unwrap(),
            data,
            "{piece}"
        );
    }
}

#[test]
fn a_mebibyte_is_written_and_read_over_256_pieces() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    let data = pattern(IO_BYTES_MAX as usize);
    for cut in [
        Cut::Kernel,
        Cut::Indirect,
        Cut::Pieces(4096),
        Cut::Pieces(1500),
    ] {
        let bytes = guest.write_request(file, handle, 0, &data);
        let room = REPLY_HEADER_BYTES + size_of::<wire::WriteOut>();
        let sent = guest.put(1, &bytes, room, cut);
        guest.queues[1].submit();
        let (head, used) = guest.queues[1].wait_used();
        assert_eq!((head, used), (sent.head, 24));
        let answer = guest.answer(&sent, used).unwrap().ok().unwrap();
        let out = wire::WriteOut::read_from_bytes(&answer).unwrap();
        assert_eq!(out.size.get(), IO_BYTES_MAX);

        let bytes = guest.read_request(file, handle, 0, IO_BYTES_MAX);
        let sent = guest.put(1, &bytes, REPLY_HEADER_BYTES + data.len(), cut);
        if cut == Cut::Kernel {
            assert_eq!(sent.room.len(), 257);
        }
        guest.queues[1].submit();
        let (_, used) = guest.queues[1].wait_used();
        assert_eq!(used as usize, REPLY_HEADER_BYTES + data.len());
        let answer = guest.answer(&sent, used).unwrap();
        assert!(answer.body == data, "{cut:?}");
    }
}

/// Ring sizes without indirect descriptors, and the pages of the largest request.
const PAGES_BY_ENTRIES: [(u16, u16); 9] = [
    (2, 1),
    (4, 1),
    (8, 4),
    (16, 12),
    (64, 60),
    (128, 124),
    (256, 252),
    (1024, 256),
    (32768, 256),
];

#[test]
fn the_largest_requests_fit_rings_without_indirect_descriptors() {
    let features = 1 << VIRTIO_RING_F_EVENT_IDX;
    for (size, pages) in PAGES_BY_ENTRIES {
        let direct = QueueOptions { size, features };
        for rings in [direct, direct.packed()] {
            // With indirect descriptors the limit is unchanged.
            let (mut guest, _) = guest_with(false, QueueOptions::default());
            assert_eq!(guest.init().unwrap().max_pages.get(), 256);
            guest.stop_queues();
            guest.start_queues(rings);
            if size < 6 {
                // No guest mounts with such a ring. The value is the smallest possible one.
                assert_eq!(guest.device.wanted().max_pages, pages);
                continue;
            }
            let reply = guest.init().unwrap();
            let bytes = usize::from(pages) * 4096;
            assert_eq!(reply.max_pages.get(), pages, "{rings:?}");
            assert_eq!(reply.max_write.get() as usize, bytes);
            let (file, handle) = guest.create(ROOT, b"file").unwrap();
            let data = pattern(bytes);
            assert_eq!(guest.write(file, handle, 0, &data), Ok(bytes as u32));
            let read = guest.read(file, handle, 0, bytes as u32).unwrap();
            assert!(read == data, "{rings:?}");
        }
    }
}

#[test]
fn a_chain_may_have_more_room_than_the_reply_needs() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    guest.write(file, handle, 0, &pattern(1000)).unwrap();
    let bytes = guest.read_request(file, handle, 200, 300);
    for cut in [Cut::Kernel, Cut::Pieces(9)] {
        let answer = guest.send(1, &bytes, 2000, cut).unwrap();
        assert_eq!(answer.used, 316);
        assert_eq!(answer.body, pattern(1000)[200..500]);
    }
}
