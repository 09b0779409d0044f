//! Every request kind, the way guests send it and the way odd guests send it.

use fabric_testing::{Completion, OpKind};
use fabric_types::io::{IoError, Op};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::support::*;
use crate::blk::{BlkOptions, MAX_RANGE_SECTORS, MAX_RANGES, WRITEBACK_OFFSET};
use crate::device::Device;
use crate::memory::GuestAddr;
use crate::testing::{Buffer, FakeQueue, QueueOptions};

#[test]
fn written_bytes_come_back() {
    for completion in [Completion::Inline, Completion::Queued] {
        let mut rig = Rig::new(Setup {
            completion,
            ..Setup::default()
        });
        let (guest, bytes) = (rig.guest(), pattern(4096, 1));
        let (out, back) = (guest.place(&bytes), guest.alloc(4096, 1));
        assert_eq!(rig.queue.request(OUT, 8, &[(out, 4096, false)]), (OK, 1));
        assert_eq!(rig.queue.request(IN, 8, &[(back, 4096, true)]), (OK, 4097));
        assert_eq!(guest.read(back, 4096), bytes);
        assert_eq!(rig.disk().peek(8 * 512, 4096), bytes);
        assert_eq!(rig.queue.request(FLUSH, 0, &[]), (OK, 1));
        assert_eq!(rig.disk().done(OpKind::Flush), 1);
        let counters = rig.device.counters();
        assert_eq!((counters.reads, counters.read_bytes), (1, 4096));
        assert_eq!(
            (counters.writes, counters.written_bytes, counters.flushes),
            (1, 4096, 1)
        );
        assert_eq!(rig.handle.stop().unwrap(), 3);
    }
}

#[test]
fn single_sectors_and_unaligned_buffers_work() {
    let mut rig = Rig::inline();
    let guest = rig.guest();
    for sector in 0..8 {
        let bytes = pattern(512, sector as u8);
        guest.alloc(sector + 1, 1);
        let (out, back) = (guest.place(&bytes), guest.alloc(512, 1));
        assert_eq!(
            rig.queue.request(OUT, sector, &[(out, 512, false)]),
            (OK, 1)
        );
        assert_eq!(
            rig.queue.request(IN, sector, &[(back, 512, true)]),
            (OK, 513)
        );
        assert_eq!(guest.read(back, 512), bytes);
    }
}

#[test]
fn a_mebibyte_in_256_segments_goes_in_one_request() {
    let mut rig = Rig::inline();
    let (guest, bytes) = (rig.guest(), pattern(1 << 20, 7));
    let (out, back) = (guest.place(&bytes), guest.alloc(1 << 20, 4096));
    let segments = |at: GuestAddr, writable: bool| -> Vec<Buffer> {
        (0..256)
            .map(|i| (GuestAddr(at.0 + i * 4096), 4096, writable))
            .collect()
    };
    assert_eq!(rig.queue.request(OUT, 0, &segments(out, false)), (OK, 1));
    assert_eq!(
        rig.queue.request(IN, 0, &segments(back, true)),
        (OK, (1 << 20) + 1)
    );
    assert_eq!(guest.read(back, 1 << 20), bytes);
    assert_eq!(
        rig.script(),
        [
            (Op::Write { fua: true }, 0, 1 << 20),
            (Op::Read, 0, 1 << 20)
        ]
    );
}

#[test]
fn a_header_and_a_status_may_be_cut_and_joined_in_any_way() {
    let mut rig = Rig::inline();
    let (guest, bytes) = (rig.guest(), pattern(1024, 3));
    let mut stream = [&OUT.to_le_bytes()[..], &[0; 4], &2u64.to_le_bytes(), &bytes].concat();
    let status = guest.place(&[9]);
    let out = guest.place(&stream);
    let cuts = [0u64, 1, 5, 16, 17, 600, 1040];
    let mut chain: Vec<Buffer> = cuts
        .windows(2)
        .map(|w| (GuestAddr(out.0 + w[0]), (w[1] - w[0]) as u32, false))
        .collect();
    chain.extend([(out, 0, false), (status, 1, true)]);
    rig.queue.add(&chain);
    rig.queue.submit();
    rig.queue.wait_used();
    assert_eq!(
        (guest.read(status, 1), rig.disk().peek(1024, 1024)),
        (vec![OK], bytes.clone())
    );

    // Header and all data readable in one piece, and the status right behind the data to be read.
    stream[..4].copy_from_slice(&IN.to_le_bytes());
    let (header, back) = (guest.place(&stream[..16]), guest.alloc(1025, 1));
    rig.queue.add_indirect(&[
        (header, 16, false),
        (back, 1000, true),
        (GuestAddr(back.0 + 1000), 25, true),
    ]);
    rig.queue.submit();
    assert_eq!(rig.queue.wait_used().1, 1025);
    assert_eq!(guest.read(back, 1025), [&bytes[..], &[OK]].concat());
}

#[test]
fn get_id_gives_the_serial_padded_with_zeroes() {
    let blk = BlkOptions {
        serial: "penstock-1".into(),
        ..BlkOptions::default()
    };
    let mut rig = Rig::with(Setup::default(), blk, QueueOptions::default());
    let guest = rig.guest();
    let id = guest.place(&[0xff; 32]);
    let pieces = [(id, 3, true), (GuestAddr(id.0 + 3), 17, true)];
    assert_eq!(rig.queue.request(GET_ID, 0, &pieces), (OK, 21));
    assert_eq!(guest.read(id, 21), *b"penstock-1\0\0\0\0\0\0\0\0\0\0\xff");
    assert_eq!(rig.queue.request(GET_ID, 0, &[(id, 5, true)]), (OK, 6));
    assert_eq!(rig.queue.request(GET_ID, 0, &[]), (OK, 1));
}

#[test]
fn discard_and_write_zeroes_take_several_ranges() {
    for completion in [Completion::Inline, Completion::Queued] {
        let mut rig = Rig::new(Setup {
            completion,
            ..Setup::default()
        });
        let guest = rig.guest();
        rig.disk().poke(0, &[1; 64 << 10]);
        let three = guest.place(&ranges(&[(0, 8, 0), (64, 0, 0), (16, 8, 0), (32, 1, 0)]));
        let cut = [(three, 20, false), (GuestAddr(three.0 + 20), 44, false)];
        assert_eq!(rig.queue.request(DISCARD, 0, &cut), (OK, 1));
        let zero = guest.place(&ranges(&[(80, 2, 1), (90, 2, 0)]));
        assert_eq!(
            rig.queue.request(WRITE_ZEROES, 0, &[(zero, 32, false)]),
            (OK, 1)
        );
        let expected = [
            (Op::Discard, 0, 4096),
            (Op::Discard, 16 * 512, 4096),
            (Op::Discard, 32 * 512, 512),
            (Op::WriteZeroes { unmap: true }, 80 * 512, 1024),
            (Op::WriteZeroes { unmap: false }, 90 * 512, 1024),
        ];
        assert_eq!(rig.script(), expected);
        assert_eq!(
            (
                rig.device.counters().discards,
                rig.device.counters().write_zeroes
            ),
            (1, 1)
        );
    }
}

#[test]
fn ranges_beyond_the_limits_are_refused_and_nothing_is_done() {
    let mut rig = Rig::inline();
    let guest = rig.guest();
    let sectors = DISK_BYTES / 512;
    let mut ask = |kind, list: &[(u64, u32, u32)], cut: u32| {
        let bytes = ranges(list);
        let at = guest.place(&bytes);
        rig.queue
            .request(kind, 0, &[(at, bytes.len() as u32 - cut, false)])
            .0
    };
    assert_eq!(ask(DISCARD, &[(0, 8, 0), (0, 8, 1)], 0), UNSUPP);
    assert_eq!(ask(WRITE_ZEROES, &[(0, 8, 2)], 0), UNSUPP);
    assert_eq!(ask(DISCARD, &[(0, 8, 0), (sectors - 7, 8, 0)], 0), IOERR);
    assert_eq!(ask(DISCARD, &[(u64::MAX, 8, 0)], 0), IOERR);
    assert_eq!(ask(DISCARD, &[(0, MAX_RANGE_SECTORS + 1, 0)], 0), IOERR);
    assert_eq!(
        ask(DISCARD, &[(0, 8, 0); MAX_RANGES as usize + 1], 0),
        IOERR
    );
    assert_eq!(ask(DISCARD, &[(0, 8, 0)], 1), IOERR);
    assert_eq!(rig.queue.request(DISCARD, 0, &[]).0, IOERR);
    assert_eq!(rig.script(), []);
    assert_eq!(rig.device.counters().errors, 8);
}

#[test]
fn one_range_that_fails_fails_the_request() {
    for completion in [Completion::Inline, Completion::Queued] {
        let mut rig = Rig::new(Setup {
            completion,
            ..Setup::default()
        });
        rig.disk()
            .fail_next(OpKind::Discard, IoError::Device(libc::EIO), 1);
        let at = rig.guest().place(&ranges(&[(0, 8, 0), (8, 8, 0)]));
        assert_eq!(rig.queue.request(DISCARD, 0, &[(at, 32, false)]).0, IOERR);
        assert_eq!(rig.queue.request(DISCARD, 0, &[(at, 32, false)]).0, OK);
    }
}

#[test]
fn without_a_write_cache_every_write_is_fua() {
    let features = QueueOptions::default().features | 1 << VIRTIO_BLK_F_FLUSH;
    let mut rig = Rig::with(
        Setup::default(),
        BlkOptions::default(),
        QueueOptions {
            features,
            ..QueueOptions::default()
        },
    );
    let out = [(rig.guest().place(&[5; 512]), 512, false)];
    rig.queue.request(OUT, 0, &out);
    rig.device.write_config(WRITEBACK_OFFSET, &[0]).unwrap();
    rig.queue.request(OUT, 0, &out);
    rig.device.write_config(WRITEBACK_OFFSET, &[1]).unwrap();
    rig.queue.request(OUT, 0, &out);
    let fua = rig.script().iter().map(|done| done.0).collect::<Vec<_>>();
    assert_eq!(fua, [false, true, false].map(|fua| Op::Write { fua }));
}

#[test]
fn a_guest_that_cannot_flush_gets_no_write_cache() {
    let mut rig = Rig::inline();
    let out = [(rig.guest().place(&[5; 512]), 512, false)];
    rig.queue.request(OUT, 0, &out);
    assert_eq!(rig.script(), [(Op::Write { fua: true }, 0, 512)]);
}

#[test]
fn a_read_only_device_refuses_every_change() {
    let blk = BlkOptions {
        read_only: true,
        ..BlkOptions::default()
    };
    let mut rig = Rig::with(Setup::default(), blk, QueueOptions::default());
    let guest = rig.guest();
    let (data, range) = (guest.place(&[1; 512]), guest.place(&ranges(&[(0, 8, 0)])));
    assert_eq!(rig.queue.request(OUT, 0, &[(data, 512, false)]).0, IOERR);
    assert_eq!(
        rig.queue.request(DISCARD, 0, &[(range, 16, false)]).0,
        IOERR
    );
    assert_eq!(
        rig.queue.request(WRITE_ZEROES, 0, &[(range, 16, false)]).0,
        IOERR
    );
    assert_eq!(rig.queue.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(rig.queue.request(IN, 0, &[(data, 512, true)]).0, OK);
    assert_eq!(guest.read(data, 512), [0; 512]);
}

#[test]
fn what_leaves_the_volume_or_is_not_whole_sectors_is_refused() {
    let mut rig = Rig::inline();
    let (guest, last) = (rig.guest(), DISK_BYTES / 512 - 1);
    let data = guest.alloc(1024, 1);
    for (sector, len, status) in [
        (last, 512, OK),
        (last, 1024, IOERR),
        (last + 1, 512, IOERR),
        (u64::MAX, 512, IOERR),
        (0, 511, IOERR),
    ] {
        assert_eq!(
            rig.queue.request(IN, sector, &[(data, len, true)]).0,
            status,
            "{sector} {len}"
        );
        assert_eq!(
            rig.queue.request(OUT, sector, &[(data, len, false)]).0,
            status,
            "{sector} {len}"
        );
    }
    assert_eq!(rig.queue.request(IN, 0, &[]), (OK, 1));
    assert_eq!(rig.queue.request(99, 0, &[]), (UNSUPP, 1));
}

#[test]
fn a_live_resize_moves_the_end_of_the_volume() {
    let mut rig = Rig::inline();
    let data = rig.guest().alloc(512, 1);
    let beyond = DISK_BYTES / 512;
    assert_eq!(rig.queue.request(IN, beyond, &[(data, 512, true)]).0, IOERR);
    rig.disk().resize(DISK_BYTES + 512);
    assert_eq!(rig.queue.request(IN, beyond, &[(data, 512, true)]).0, OK);
    rig.disk().resize(512);
    assert_eq!(rig.queue.request(IN, 1, &[(data, 512, true)]).0, IOERR);
}

#[test]
fn out_of_space_is_an_io_error_and_passes() {
    let mut rig = Rig::new(Setup::default());
    let out = [(rig.guest().place(&[5; 512]), 512, false)];
    rig.disk().fail_next(OpKind::Write, IoError::NoSpace, 1);
    assert_eq!(rig.queue.request(OUT, 0, &out).0, IOERR);
    assert_eq!(rig.queue.request(OUT, 0, &out).0, OK);
    assert_eq!(FakeQueue::events(&rig.queue.err), 0);
}
