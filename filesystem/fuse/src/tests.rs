//! Tests against bytes that a C program made with the kernel's header, and against hostile ones.

mod directory;
mod hostile;
mod init;
mod replies;
mod requests;

use crate::{Attr, DeviceNumber, Dialect, Entry, Errno, Kind, NodeId, Timestamp, Unique, Wanted};
use std::time::Duration;

/// What `fixtures/generate.c` printed.
const MESSAGES: &str = include_str!("../fixtures/messages.txt");

/// The id of every request and reply there.
const UNIQUE: Unique = Unique(0x1122_3344_5566_7788);

const DIALECT: Dialect = Dialect {
    setxattr_ext: true,
    io_bytes_max: 1 << 20,
};

/// Every message by its name.
fn messages() -> Vec<(&'static str, Vec<u8>)> {
    MESSAGES
        .lines()
        .map(|line| {
            let (name, digits) = line.split_once(' ').unwrap();
            let bytes = (0..digits.len()).step_by(2);
            let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
            (name, bytes.map(byte).collect())
        })
        .collect()
}

fn message(name: &str) -> Vec<u8> {
    let found = messages().into_iter().find(|(other, _)| *other == name);
    found.unwrap_or_else(|| panic!("no message {name}")).1
}

/// Requests are in capitals.
fn requests() -> Vec<(&'static str, Vec<u8>)> {
    let mut list = messages();
    list.retain(|(name, _)| name.starts_with(|c: char| c.is_ascii_uppercase()));
    list
}

fn dialect_of(name: &str) -> Dialect {
    Dialect {
        setxattr_ext: name != "SETXATTR_OLD",
        ..DIALECT
    }
}

/// Makes the length in a request's header that of its bytes.
fn fit_length(bytes: &mut [u8]) {
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_le_bytes());
}

/// The attributes of the replies.
fn attr() -> Attr {
    Attr {
        ino: 0x0a0b_0c0d,
        kind: Kind::BlockDevice,
        permissions: 0o660,
        nlink: 2,
        uid: 7,
        gid: 8,
        rdev: DeviceNumber {
            major: 0xabc,
            minor: 0x12345,
        },
        size: 1 << 34,
        // Sixteen units of 512 bytes, and one byte.
        allocated_bytes: 8193,
        atime: time(-1, 1),
        mtime: time(2_000_000_000, 2),
        ctime: time(3_000_000_000, 3),
        btime: Some(time(-9, 4)),
        block_bytes: 65536,
    }
}

fn time(secs: i64, nanos: u32) -> Timestamp {
    Timestamp { secs, nanos }
}

fn entry() -> Entry {
    Entry {
        nodeid: NodeId(0x0a0b_0c0d),
        entry_valid: Duration::new(1, 500),
        attr_valid: Duration::new(2, 600),
        attr: attr(),
    }
}

fn wanted() -> Wanted {
    Wanted {
        read_only: false,
        nodeids_are_inodes: true,
        max_write_bytes: 1 << 20,
        max_pages: 256,
        max_readahead_bytes: 65536,
        max_background: 1024,
        congestion_threshold: 768,
    }
}

#[test]
fn kinds_are_those_of_modes_and_directory_entries() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_mode(kind.mode_bits() | 0o7777), Some(kind));
    }
    let numbers = Kind::ALL.map(Kind::dirent_type);
    // DT_REG, DT_DIR, DT_LNK, DT_CHR, DT_BLK, DT_FIFO, DT_SOCK
    assert_eq!(numbers, [8, 4, 10, 2, 6, 1, 12]);
    assert_eq!(Kind::from_mode(0o644), None);
    assert_eq!(Kind::from_mode(0o170_000), None);
}

#[test]
fn device_numbers_survive_the_wire_up_to_their_widths() {
    for (major, minor) in [(0, 0), (8, 1), (0xfff, 0xf_ffff), (0xabc, 0x12345)] {
        let number = DeviceNumber { major, minor };
        assert_eq!(DeviceNumber::from_wire(number.to_wire()), number);
    }
}

#[test]
fn stored_bytes_count_in_whole_units_of_512() {
    for (bytes, blocks) in [(0, 0), (1, 1), (512, 1), (513, 2), (4096, 8)] {
        let attr = Attr {
            allocated_bytes: bytes,
            ..attr()
        };
        assert_eq!(attr.stat_blocks(), blocks);
    }
}

#[test]
fn only_numbers_that_a_reply_can_carry_are_error_numbers() {
    for raw in [i32::MIN, -1, 0, 512, i32::MAX] {
        assert_eq!(Errno::new(raw), None);
    }
    assert_eq!(Errno::new(2), Some(Errno::ENOENT));
    assert_eq!(Errno::new(511).map(Errno::raw), Some(511));
    assert_eq!(
        (
            Errno::ESTALE.to_string(),
            Errno::new(300).unwrap().to_string()
        ),
        ("ESTALE".to_owned(), "Errno(300)".to_owned())
    );
}
