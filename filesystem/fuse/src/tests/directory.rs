//! Listings, read back by the offsets of the kernel's header.

use proptest::prelude::*;

use super::{entry, message};
use crate::{Cookie, DirBuffer, DirLayout, DirRecord, Entry, Kind, NodeId};

/// A record as a kernel reads it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    name: Vec<u8>,
    ino: u64,
    cookie: u64,
    dirent_type: u32,
    nodeid: Option<u64>,
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Reads a listing as `fs/fuse/readdir.c` does. Panics at what it would call broken.
fn read_back(mut bytes: &[u8], layout: DirLayout) -> Vec<Seen> {
    let dirent = match layout {
        DirLayout::Plain => 0,
        DirLayout::Plus => 128,
    };
    let mut list = Vec::new();
    while !bytes.is_empty() {
        let name_bytes = u32_at(bytes, dirent + 16) as usize;
        let end = dirent + 24 + name_bytes;
        let record = end.next_multiple_of(8);
        assert!(bytes[end..record].iter().all(|byte| *byte == 0));
        list.push(Seen {
            name: bytes[dirent + 24..end].to_vec(),
            ino: u64_at(bytes, dirent),
            cookie: u64_at(bytes, dirent + 8),
            dirent_type: u32_at(bytes, dirent + 20),
            nodeid: (layout == DirLayout::Plus).then(|| u64_at(bytes, 0)),
        });
        bytes = &bytes[record..];
    }
    list
}

#[test]
fn records_are_what_the_kernels_header_says() {
    for (layout, fixture) in [
        (DirLayout::Plain, "list_plain"),
        (DirLayout::Plus, "list_plus"),
    ] {
        let expected = message(fixture);
        let mut out = [0xee; 512];
        let mut listing = DirBuffer::new(&mut out, layout);
        assert!(listing.is_empty());
        assert!(listing.push(&DirRecord {
            name: b".",
            ino: 5,
            kind: Kind::Directory,
            cookie: Cookie::new(1).unwrap(),
            entry: None,
        }));
        assert!(listing.push(&DirRecord {
            name: b"some\xffname",
            ino: 0x0a0b_0c0d,
            kind: Kind::BlockDevice,
            cookie: Cookie::MAX,
            entry: Some(entry()),
        }));
        assert_eq!(listing.as_bytes(), expected, "{fixture}");
        assert_eq!(listing.len(), expected.len());
    }
}

#[test]
fn cookies_are_what_a_file_offset_can_be() {
    assert_eq!(Cookie::new(i64::MAX as u64), Some(Cookie::MAX));
    assert_eq!(Cookie::new(1 << 63), None);
    assert_eq!(Cookie::START.raw(), 0);
}

#[derive(Debug, Clone)]
struct Input {
    name: Vec<u8>,
    ino: u64,
    kind: Kind,
    cookie: u64,
    with_entry: bool,
}

fn input() -> impl Strategy<Value = Input> {
    (
        proptest::collection::vec(1u8.., 1..=255),
        any::<u64>(),
        proptest::sample::select(Kind::ALL.to_vec()),
        0..=i64::MAX as u64,
        any::<bool>(),
    )
        .prop_map(|(name, ino, kind, cookie, with_entry)| Input {
            name,
            ino,
            kind,
            cookie,
            with_entry,
        })
}

fn layout() -> impl Strategy<Value = DirLayout> {
    prop_oneof![Just(DirLayout::Plain), Just(DirLayout::Plus)]
}

fn seen(input: &Input, layout: DirLayout) -> Seen {
    let nodeid = if input.with_entry { input.ino } else { 0 };
    Seen {
        name: input.name.clone(),
        ino: input.ino,
        cookie: input.cookie,
        dirent_type: input.kind.dirent_type(),
        nodeid: (layout == DirLayout::Plus).then_some(nodeid),
    }
}

proptest! {
    #[test]
    fn a_listing_has_what_fitted_and_never_more_than_its_size(
        inputs in proptest::collection::vec(input(), 0..30), size in 0usize..4096, layout in layout(),
    ) {
        let mut out = vec![0xee; size + 8];
        let mut listing = DirBuffer::new(&mut out[..size], layout);
        let mut expected = Vec::new();
        for input in &inputs {
            let before = listing.len();
            let bytes = DirBuffer::record_bytes(layout, input.name.len());
            let fitted = listing.push(&DirRecord {
                name: &input.name,
                ino: input.ino,
                kind: input.kind,
                cookie: Cookie::new(input.cookie).unwrap(),
                entry: input.with_entry.then(|| Entry { nodeid: NodeId(input.ino), ..entry() }),
            });
            prop_assert_eq!(fitted, before + bytes <= size);
            prop_assert_eq!(listing.len(), if fitted { before + bytes } else { before });
            prop_assert_eq!(listing.len() % 8, 0);
            if fitted {
                expected.push(seen(input, layout));
            }
        }
        prop_assert_eq!(read_back(listing.as_bytes(), layout), expected);
        prop_assert_eq!(&out[size..], [0xee; 8]);
    }
}
