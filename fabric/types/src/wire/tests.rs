use proptest::prelude::*;

use super::*;
use crate::ids::CHUNK_BYTES;

const NO_BUFFERS: IoVecs = IoVecs {
    ptr: std::ptr::null(),
    len: 0,
};

fn command() -> impl Strategy<Value = Command> {
    let range = (0..CHUNK_BYTES as u32)
        .prop_flat_map(|offset| (Just(offset), 1..=(CHUNK_BYTES as u32 - offset)));
    (0..4u8, any::<u64>(), 0..u32::MAX, range, any::<bool>()).prop_map(
        |(kind, layer, index, (offset, len), fua)| {
            let layer = LayerId(layer);
            let chunk = ChunkKey { layer, index };
            let buffers = NO_BUFFERS;
            match kind {
                0 => Command::Read {
                    chunk,
                    offset,
                    buffers,
                    len,
                },
                1 => Command::Write {
                    chunk,
                    offset,
                    buffers,
                    len,
                    fua,
                    urgent: index % 2 == 0,
                },
                2 => Command::Zero {
                    chunk,
                    offset,
                    len,
                    fua,
                },
                _ => Command::Flush { layer },
            }
        },
    )
}

proptest! {
    #[test]
    fn a_request_survives_the_wire(
        command in command(), id: u64, epoch: u64, sequence in 0..=Sequence::MAX.0,
    ) {
        let request = Request {
            id: RequestId(id),
            pg: PgId(3),
            epoch: Epoch(epoch),
            generation: Generation(7),
            sequence: Sequence(sequence),
            watermark: Sequence(sequence / 2),
            command,
        };
        let header = RequestHeader::encode(&request);
        let back = RequestHeader::parse(header.as_bytes()).unwrap().decode(NO_BUFFERS).unwrap();
        prop_assert_eq!(format!("{back:?}"), format!("{request:?}"));
    }

    #[test]
    fn hostile_headers_are_refused_or_keep_to_their_chunk(bytes: [u8; 80], ours: bool) {
        let mut bytes = bytes;
        if ours {
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4] = VERSION;
        }
        let Ok(header) = RequestHeader::parse(&bytes) else { return Ok(()) };
        if let Ok(request) = header.decode(NO_BUFFERS) {
            prop_assert!(request.sequence <= Sequence::MAX);
            prop_assert!(request.watermark <= Sequence::MAX);
            prop_assert!(request.generation <= Generation::MAX);
            prop_assert!(u64::from(header.offset.get()) + u64::from(header.len.get()) <= CHUNK_BYTES);
        }
    }
}

#[test]
fn every_refusal_survives_the_wire() {
    let refusals = [
        Refusal::StaleGeneration(Generation(9)),
        Refusal::StaleEpoch(Epoch(4)),
        Refusal::NoSpace { untouched: true },
        Refusal::NoSpace { untouched: false },
        Refusal::Corrupt,
        Refusal::Device(5),
        Refusal::Invalid,
        Refusal::Renumber,
    ];
    for result in refusals.map(Err).into_iter().chain([Ok(())]) {
        let reply = Reply {
            id: RequestId(77),
            incarnation: Incarnation(2),
            result,
        };
        let header = ReplyHeader::encode(&reply, 0, 0);
        assert_eq!(
            ReplyHeader::parse(header.as_bytes()).unwrap().decode(),
            Ok(reply)
        );
    }
}

#[test]
fn crcs_are_counted_per_block_touched() {
    assert_eq!(blocks_touched(0, 0), 0);
    assert_eq!(blocks_touched(0, 4096), 1);
    assert_eq!(blocks_touched(4095, 2), 2);
    assert_eq!(blocks_touched(512, 512), 1);
}

#[test]
fn another_format_version_is_named() {
    let mut bytes = [0u8; 80];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = 9;
    assert_eq!(RequestHeader::parse(&bytes), Err(WireError::Version(9)));
    assert_eq!(RequestHeader::parse(&bytes[..79]), Err(WireError::NotOurs));
}

/// A header that every peer may send, of each kind.
fn sound(kind: u8) -> RequestHeader {
    let chunk = ChunkKey {
        layer: LayerId(5),
        index: 3,
    };
    let write = Request {
        pg: PgId(1),
        epoch: Epoch(4),
        generation: Generation(7),
        sequence: Sequence(9),
        watermark: Sequence(8),
        command: Command::Read {
            chunk,
            offset: 0,
            buffers: NO_BUFFERS,
            len: 4096,
        },
        ..Request::NOTHING
    };
    let mut header = RequestHeader::encode(&write);
    header.kind = kind;
    let len = match kind {
        kind::READ | kind::WRITE | kind::ZERO => 4096,
        kind::INSPECT => 4 * size_of::<BlockStamp>() as u32,
        kind::RESTORE => STAMPS_BYTES + 4096,
        kind::LIST_CHUNKS | kind::FENCE => 24,
        kind::TELL_FENCE => 16,
        _ => 0,
    };
    header.len = len.into();
    header.crc_count = u32::from(kind == kind::WRITE).into();
    header
}

const KINDS: std::ops::RangeInclusive<u8> = kind::READ..=kind::TELL_FENCE;

#[test]
fn counters_out_of_range_are_refused_in_every_kind_of_request() {
    let too_large = (Generation::MAX.0 + 1, Sequence::MAX.0 + 1);
    for kind in KINDS {
        assert!(sound(kind).decode(NO_BUFFERS).is_ok(), "kind {kind}");
        for generation in [too_large.0, u64::from(u32::MAX) + 1, u64::MAX] {
            let header = RequestHeader {
                generation: generation.into(),
                ..sound(kind)
            };
            let refused = Some(WireError::Field("generation"));
            assert_eq!(header.decode(NO_BUFFERS).err(), refused, "kind {kind}");
        }
        for wrong in [too_large.1, u64::MAX] {
            let sequence = RequestHeader {
                sequence: wrong.into(),
                ..sound(kind)
            };
            let watermark = RequestHeader {
                watermark: wrong.into(),
                ..sound(kind)
            };
            for (header, field) in [(sequence, "sequence"), (watermark, "watermark")] {
                let refused = Some(WireError::Field(field));
                assert_eq!(header.decode(NO_BUFFERS).err(), refused, "kind {kind}");
            }
        }
    }
}

/// It is for a node's own rounds of comparison, which change nothing on other nodes.
#[test]
fn nothing_is_changed_under_the_last_generation() {
    for kind in KINDS {
        let header = RequestHeader {
            generation: Generation::MAX.0.into(),
            ..sound(kind)
        };
        let request = header.decode(NO_BUFFERS);
        let changes = sound(kind)
            .decode(NO_BUFFERS)
            .is_ok_and(|request| request.command.mutates());
        let refused = changes.then_some(WireError::Field("generation"));
        assert_eq!(request.err(), refused, "kind {kind}");
    }
}

#[test]
fn only_a_flag_that_its_kind_has_is_taken() {
    for kind in KINDS {
        for flags in 1..8u16 {
            let header = RequestHeader {
                flags: flags.into(),
                ..sound(kind)
            };
            let known = match kind {
                kind::WRITE => FLAG_FUA | FLAG_URGENT,
                kind::ZERO => FLAG_FUA,
                _ => 0,
            };
            let refused = (flags & !known != 0).then_some(WireError::Field("flags"));
            assert_eq!(header.decode(NO_BUFFERS).err(), refused, "{kind}: {flags}");
        }
    }
}

#[test]
fn a_full_replica_says_whether_it_has_stored_a_part() {
    let full = Refusal::NoSpace { untouched: true };
    let reply = Reply {
        id: RequestId(1),
        incarnation: Incarnation(2),
        result: Err(full),
    };
    let header = ReplyHeader::encode(&reply, 0, 0);
    assert_eq!(header.decode().unwrap().result, Err(full));
    let partly = ReplyHeader {
        detail: 0.into(),
        ..header
    };
    let part = Refusal::NoSpace { untouched: false };
    assert_eq!(partly.decode().unwrap().result, Err(part));
}

#[test]
fn lengths_that_a_kind_cannot_have_are_refused() {
    let stamp = size_of::<BlockStamp>() as u32;
    let wrong: [(u8, &[u32]); 10] = [
        (kind::READ, &[0, CHUNK_BYTES as u32 + 1, u32::MAX]),
        (kind::WRITE, &[0]),
        (kind::ZERO, &[0, u32::MAX]),
        (kind::FLUSH, &[1]),
        (kind::INSPECT, &[0, 1, stamp + 1, 1025 * stamp, u32::MAX]),
        (kind::RESTORE, &[0, 31, 4096, STAMPS_BYTES + 1]),
        (kind::LIST_CHUNKS, &[0, 23, LIST_BYTES_MAX + 1]),
        (kind::FENCE, &[0, 23, LIST_BYTES_MAX + 1]),
        (kind::JOIN, &[24]),
        (kind::TELL_FENCE, &[0, 15, LIST_BYTES_MAX + 1]),
    ];
    for (kind, lens) in wrong {
        for len in lens {
            let crcs = match kind {
                kind::WRITE => blocks_touched(0, *len),
                _ => 0,
            };
            let header = RequestHeader {
                len: (*len).into(),
                crc_count: crcs.into(),
                ..sound(kind)
            };
            let refused = Some(WireError::Field("len"));
            assert_eq!(header.decode(NO_BUFFERS).err(), refused, "{kind}: {len}");
        }
    }
}

#[test]
fn places_outside_a_chunk_are_refused() {
    let at = |kind, offset: u32| {
        let header = RequestHeader {
            offset: offset.into(),
            ..sound(kind)
        };
        header.decode(NO_BUFFERS).err()
    };
    assert_eq!(at(kind::RESTORE, 1023), None);
    assert_eq!(at(kind::RESTORE, 1024), Some(WireError::Field("offset")));
    assert_eq!(
        at(kind::RESTORE, u32::MAX),
        Some(WireError::Field("offset"))
    );
    assert_eq!(at(kind::INSPECT, 1020), None);
    assert_eq!(at(kind::INSPECT, 1021), Some(WireError::Field("len")));
    assert_eq!(at(kind::INSPECT, u32::MAX), Some(WireError::Field("len")));
    for kind in KINDS {
        let header = RequestHeader {
            chunk: u32::MAX.into(),
            ..sound(kind)
        };
        let request = sound(kind).decode(NO_BUFFERS).unwrap();
        let names_chunk = matches!(
            request.command,
            Command::Read { .. }
                | Command::Write { .. }
                | Command::Zero { .. }
                | Command::Inspect { .. }
                | Command::Restore { .. }
        );
        let refused = names_chunk.then_some(WireError::Field("chunk"));
        assert_eq!(header.decode(NO_BUFFERS).err(), refused, "kind {kind}");
    }
}

#[test]
fn a_reply_with_an_impossible_field_is_refused() {
    let reply = |status: u16, detail: u64, reserved| ReplyHeader {
        status: status.into(),
        detail: detail.into(),
        reserved,
        ..ReplyHeader::encode(
            &Reply {
                id: RequestId(1),
                incarnation: Incarnation(2),
                result: Ok(()),
            },
            0,
            0,
        )
    };
    let wrong = |header: ReplyHeader| header.decode().err();
    assert_eq!(
        wrong(reply(status::OK, 0, 1)),
        Some(WireError::Field("reserved"))
    );
    let detail = Some(WireError::Field("detail"));
    let last = Generation::MAX.0;
    assert_eq!(wrong(reply(status::STALE_GENERATION, last, 0)), None);
    assert_eq!(wrong(reply(status::STALE_GENERATION, last + 1, 0)), detail);
    assert_eq!(wrong(reply(status::DEVICE, 1 << 31, 0)), detail);
    assert_eq!(
        wrong(reply(u16::MAX, 0, 0)),
        Some(WireError::Field("status"))
    );
}
