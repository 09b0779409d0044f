//! Bytes and time of the two records that open a small file, by format: `cargo run -p namespace --example
//! record_size`. The namespace writes postcard. Fixed structs (zerocopy) and JSON are measured for
//! comparison.

use std::hint::black_box;
use std::time::Instant;

use namespace::{Body, Content, Dentry, Extent, Ino, Inode, Kind, SegmentId, Time};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const ROUNDS: u32 = 1_000_000;

/// The inode as a fixed struct: the longest body's fields are always there.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct FixedInode {
    version: u8,
    kind: u8,
    mode: U16,
    uid: U32,
    gid: U32,
    nlink: U32,
    parent: U64,
    size: U64,
    seconds: [I64; 4],
    nanoseconds: [U32; 4],
    change: U64,
    allocated: U64,
    xattr_bytes: [U32; 2],
    content: U32,
    extent: [U64; 5],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct FixedDentry {
    version: u8,
    kind: u8,
    ino: U64,
    cookie: U64,
}

fn fixed_inode(inode: &Inode) -> FixedInode {
    let Body::File(Content::Inline(extent)) = inode.body else {
        panic!("the sample is a file of one extent");
    };
    let times = [inode.atime, inode.mtime, inode.ctime, inode.btime];
    FixedInode {
        version: 1,
        kind: 0,
        mode: inode.mode.into(),
        uid: inode.uid.into(),
        gid: inode.gid.into(),
        nlink: inode.nlink.into(),
        parent: inode.parent.map_or(0, |parent| parent.0).into(),
        size: inode.size.into(),
        seconds: times.map(|time| time.seconds.into()),
        nanoseconds: times.map(|time| time.nanoseconds.into()),
        change: inode.change.into(),
        allocated: inode.allocated.into(),
        xattr_bytes: [inode.xattr_list_bytes, inode.xattr_value_bytes].map(U32::new),
        content: 1.into(),
        extent: [
            extent.offset,
            extent.length,
            extent.segment.0,
            extent.address,
            extent.epoch,
        ]
        .map(U64::new),
    }
}

fn inode_of(fixed: &FixedInode) -> Inode {
    let time = |at: usize| Time {
        seconds: fixed.seconds[at].get(),
        nanoseconds: fixed.nanoseconds[at].get(),
    };
    let [offset, length, segment, address, epoch] = fixed.extent.map(U64::get);
    Inode {
        mode: fixed.mode.get(),
        uid: fixed.uid.get(),
        gid: fixed.gid.get(),
        nlink: fixed.nlink.get(),
        parent: Some(Ino(fixed.parent.get())).filter(|parent| parent.0 != 0),
        size: fixed.size.get(),
        atime: time(0),
        mtime: time(1),
        ctime: time(2),
        btime: time(3),
        change: fixed.change.get(),
        allocated: fixed.allocated.get(),
        xattr_list_bytes: fixed.xattr_bytes[0].get(),
        xattr_value_bytes: fixed.xattr_bytes[1].get(),
        body: Body::File(Content::Inline(Extent {
            offset,
            length,
            segment: SegmentId(segment),
            address,
            epoch,
        })),
    }
}

/// The records of a file of 4 KiB, one of a million.
fn sample() -> (Inode, Dentry) {
    let time = Time {
        seconds: 1_790_000_000,
        nanoseconds: 123_456_789,
    };
    let extent = Extent {
        offset: 0,
        length: 4096,
        segment: SegmentId(1234),
        address: 3 << 30,
        epoch: 4321,
    };
    let inode = Inode {
        mode: 0o644,
        uid: 1000,
        gid: 1000,
        nlink: 1,
        parent: Some(Ino(321_654)),
        size: 4096,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        change: 3,
        allocated: 4096,
        xattr_list_bytes: 0,
        xattr_value_bytes: 0,
        body: Body::File(Content::Inline(extent)),
    };
    let dentry = Dentry {
        ino: Ino(654_321),
        kind: Kind::File,
        cookie: 54_321,
    };
    (inode, dentry)
}

/// Nanoseconds of one call.
fn nanoseconds<T>(call: impl Fn() -> T) -> f64 {
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        black_box(call());
    }
    begin.elapsed().as_secs_f64() * 1e9 / f64::from(ROUNDS)
}

/// A format's line: bytes of both records, time to write and to read both.
fn report<A, B>(
    format: &str,
    encode: impl Fn() -> (Vec<u8>, Vec<u8>),
    decode: impl Fn(&[u8], &[u8]) -> (A, B),
) {
    let (inode, dentry) = encode();
    let write = nanoseconds(&encode);
    let read = nanoseconds(|| decode(black_box(&inode), black_box(&dentry)));
    let (inode, dentry) = (inode.len(), dentry.len());
    println!(
        "{format:<9} inode {inode:>4} B  dentry {dentry:>3} B  encode {write:>6.0} ns  decode {read:>6.0} ns"
    );
}

fn postcard_of<T: Serialize>(record: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    bytes.push(1);
    postcard::to_extend(black_box(record), bytes).expect("a vector takes any record")
}

fn from_postcard<T: DeserializeOwned>(bytes: &[u8]) -> T {
    postcard::from_bytes(&bytes[1..]).expect("what was just written")
}

fn main() {
    let (inode, dentry) = sample();
    report(
        "postcard",
        || (postcard_of(&inode), postcard_of(&dentry)),
        |inode, dentry| {
            (
                from_postcard::<Inode>(inode),
                from_postcard::<Dentry>(dentry),
            )
        },
    );
    report(
        "zerocopy",
        || {
            let name = FixedDentry {
                version: 1,
                kind: 0,
                ino: black_box(&dentry).ino.0.into(),
                cookie: dentry.cookie.into(),
            };
            let inode = fixed_inode(black_box(&inode));
            (inode.as_bytes().to_vec(), name.as_bytes().to_vec())
        },
        |inode, dentry| {
            let fixed = FixedDentry::read_from_bytes(dentry).expect("its length");
            let dentry = Dentry {
                ino: Ino(fixed.ino.get()),
                kind: Kind::File,
                cookie: fixed.cookie.get(),
            };
            let fixed = FixedInode::read_from_bytes(inode).expect("its length");
            (inode_of(&fixed), dentry)
        },
    );
    let json = |record: &dyn Fn() -> serde_json::Result<Vec<u8>>| record().expect("plain records");
    report(
        "JSON",
        || {
            (
                json(&|| serde_json::to_vec(black_box(&inode))),
                json(&|| serde_json::to_vec(black_box(&dentry))),
            )
        },
        |inode, dentry| {
            let inode: Inode = serde_json::from_slice(inode).expect("what was just written");
            let dentry: Dentry = serde_json::from_slice(dentry).expect("what was just written");
            (inode, dentry)
        },
    );
}
