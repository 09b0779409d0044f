use proptest::prelude::*;

use super::*;
use crate::proto::ids::CHUNK_BYTES;

const NO_BUFFERS: IoVecs = IoVecs {
    ptr: std::ptr::null(),
    len: 0,
};

fn command() -> impl Strategy<Value = Command> {
    let range = (0..CHUNK_BYTES as u32)
        .prop_flat_map(|offset| (Just(offset), 0..=(CHUNK_BYTES as u32 - offset)));
    (0..4u8, any::<u64>(), any::<u32>(), range, any::<bool>()).prop_map(
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
    fn a_request_survives_the_wire(command in command(), id: u64, epoch: u64, sequence in 0..=Sequence::MAX.0) {
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
            prop_assert!(u64::from(header.offset.get()) + u64::from(header.len.get()) <= CHUNK_BYTES);
        }
    }
}

#[test]
fn every_refusal_survives_the_wire() {
    let refusals = [
        Refusal::StaleGeneration(Generation(9)),
        Refusal::StaleEpoch(Epoch(4)),
        Refusal::NoSpace,
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
