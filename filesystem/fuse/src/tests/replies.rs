//! Each reply against the kernel's header, and what happens without room for it.

use std::time::Duration;

use super::{UNIQUE, attr, entry, message, wanted};
use crate::{
    Encoder, Errno, Features, FsStats, Handle, Negotiation, NoRoom, Offer, OpenOptions, Opened,
    REPLY_BYTES_MAX, Wanted, negotiate,
};

const ATTR_VALID: Duration = Duration::new(2, 600);

type Encode = fn(Encoder<'_>) -> Result<usize, NoRoom>;

fn opened() -> Opened {
    Opened {
        handle: Handle(0x99),
        options: OpenOptions::KEEP_CACHE.with(OpenOptions::NOFLUSH),
    }
}

fn init(encoder: Encoder<'_>) -> Result<usize, NoRoom> {
    let offer = Offer {
        major: 7,
        minor: 45,
        max_readahead_bytes: 131_072,
        features: Features::from_bits(u64::MAX),
    };
    let read_only = Wanted {
        read_only: true,
        ..wanted()
    };
    let Negotiation::Agreed(agreed) = negotiate(&offer, &read_only) else {
        panic!("7.45 is served");
    };
    encoder.init(&agreed)
}

fn statfs(encoder: Encoder<'_>) -> Result<usize, NoRoom> {
    encoder.statfs(&FsStats {
        blocks: 1,
        blocks_free: 2,
        blocks_available: 3,
        inodes: 4,
        inodes_free: 5,
        block_bytes: 4096,
        name_bytes_max: 255,
    })
}

const REPLIES: [(&str, Encode); 15] = [
    ("out_entry", |e| e.entry(&entry())),
    ("out_negative", |e| e.negative_entry(Duration::new(1, 500))),
    ("out_attr", |e| e.attr(&attr(), ATTR_VALID)),
    ("out_statx", |e| e.statx(&attr(), ATTR_VALID)),
    ("out_open", |e| e.opened(&opened())),
    ("out_create", |e| e.created(&entry(), &opened())),
    ("out_write", |e| e.written(4096)),
    ("out_statfs", statfs),
    ("out_xattr_size", |e| e.xattr_size(77)),
    ("out_lseek", |e| e.lseek(1 << 50)),
    ("out_bytes", |e| e.bytes(b"some/target")),
    ("out_error", |e| e.error(Errno::ENOENT)),
    ("out_empty", |e| e.empty()),
    ("out_init", init),
    ("out_init_again", |e| e.init_version()),
];

#[test]
fn each_reply_is_what_the_kernels_header_says() {
    for (name, encode) in REPLIES {
        let expected = message(name);
        let mut out = [0xee; REPLY_BYTES_MAX];
        assert_eq!(
            encode(Encoder::new(&mut out, UNIQUE)),
            Ok(expected.len()),
            "{name}"
        );
        let (reply, rest) = out.split_at(expected.len());
        assert_eq!(reply, expected, "{name}");
        assert!(rest.iter().all(|byte| *byte == 0xee), "{name}");
        assert_eq!(reply[..4], (expected.len() as u32).to_le_bytes(), "{name}");
    }
}

#[test]
fn each_reply_of_the_fixture_is_tested() {
    let tested = REPLIES.map(|(name, _)| name);
    let there: Vec<_> = super::messages()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("out_"))
        .collect();
    assert_eq!(there, tested);
}

#[test]
fn a_reply_without_room_is_not_written_at_all() {
    for (name, encode) in REPLIES {
        let needed = message(name).len();
        for room in 0..needed {
            let mut out = vec![0xee; room];
            let result = encode(Encoder::new(&mut out, UNIQUE));
            assert_eq!(result.unwrap_err().room, room, "{name}");
            assert!(out.iter().all(|byte| *byte == 0xee), "{name}");
        }
    }
}

#[test]
fn the_header_of_a_payload_counts_the_payload() {
    let mut out = [0; 16];
    let length = Encoder::new(&mut out, UNIQUE).payload_header(1 << 20);
    assert_eq!(length, Ok(16 + (1 << 20)));
    assert_eq!(out[..4], (16u32 + (1 << 20)).to_le_bytes());
    assert_eq!(out[4..8], [0; 4]);
    assert_eq!(out[8..], UNIQUE.0.to_le_bytes());
    let short = Encoder::new(&mut out[..15], UNIQUE).payload_header(1);
    assert_eq!(
        short,
        Err(NoRoom {
            needed: 16,
            room: 15
        })
    );
}

#[test]
fn without_a_time_of_creation_statx_does_not_claim_one() {
    let attr = crate::Attr {
        btime: None,
        ..attr()
    };
    let mut out = [0; REPLY_BYTES_MAX];
    Encoder::new(&mut out, UNIQUE)
        .statx(&attr, Duration::ZERO)
        .unwrap();
    // `stat.mask`, behind the header and 32 bytes of `fuse_statx_out`.
    assert_eq!(out[48..52], 0x7ffu32.to_le_bytes());
}
