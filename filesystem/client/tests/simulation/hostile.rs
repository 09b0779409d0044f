//! A guest that says anything: it gets errors, and harms nobody.

use fs_client::{LookupTarget, OwnedCreate, OwnedOperation, OwnedReply};
use fuse_codec::{
    Cookie, CopyFileRange, DirLayout, Fallocate, FallocateMode, Handle, NodeId, Read, RenameFlags,
    SetAttr, SetTime, Timestamp, Whence, Write, XattrMode,
};

use crate::executor::Runtime;
use crate::guest::{Guest, RDWR, ROOT, client, flags};
use crate::{seeds, slow};

/// Numbers as a hostile guest picks them.
fn number(random: &Runtime) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => i64::MAX as u64,
        3 => i64::MAX as u64 - random.below(5000),
        4 => 1 << random.below(64),
        5 => random.below(20_000),
        _ => random.below(8),
    }
}

fn name(random: &Runtime) -> Vec<u8> {
    match random.below(6) {
        0 => random.bytes(3),
        1 => Vec::new(),
        2 => vec![b'a'; random.below(300) as usize],
        3 => b"..".to_vec(),
        _ => format!("n{}", random.below(4)).into(),
    }
}

fn handle(random: &Runtime) -> Handle {
    Handle(number(random))
}

fn change_of_attributes(random: &Runtime) -> SetAttr {
    let time = SetTime::At(Timestamp {
        secs: number(random) as i64,
        nanos: number(random) as u32,
    });
    SetAttr {
        permissions: Some(number(random) as u32),
        size: random.happens(0.5).then(|| number(random)),
        atime: random.happens(0.5).then_some(time),
        mtime: random.happens(0.2).then_some(time),
        handle: random.happens(0.3).then(|| handle(random)),
        kill_suidgid: random.happens(0.5),
        ..SetAttr::default()
    }
}

fn of_names(random: &Runtime) -> OwnedOperation {
    use OwnedOperation as Op;
    match random.below(9) {
        0 => Op::Lookup {
            name: match random.below(3) {
                0 => LookupTarget::Itself,
                1 => LookupTarget::Parent,
                _ => LookupTarget::Name(name(random)),
            },
        },
        1 => Op::Symlink {
            name: name(random),
            target: name(random),
        },
        2 => Op::Mkdir {
            name: name(random),
            permissions: number(random) as u32,
        },
        3 => Op::Unlink { name: name(random) },
        4 => Op::Rmdir { name: name(random) },
        5 => Op::Rename {
            name: name(random),
            new_parent: NodeId(number(random)),
            new_name: name(random),
            flags: match random.happens(0.5) {
                true => RenameFlags::Exchange,
                false => RenameFlags::Whiteout { no_replace: false },
            },
        },
        6 => Op::Link {
            inode: NodeId(number(random)),
            name: name(random),
        },
        7 => Op::Setattr(change_of_attributes(random)),
        _ => Op::Setxattr {
            name: name(random),
            value: vec![1; random.below(70_000) as usize],
            mode: XattrMode::Set,
        },
    }
}

fn of_files(random: &Runtime, payload: &mut Vec<u8>) -> OwnedOperation {
    use OwnedOperation as Op;
    let (handle, offset) = (handle(random), number(random));
    match random.below(10) {
        0 => Op::Create(OwnedCreate {
            name: name(random),
            flags: flags(RDWR | libc::O_TRUNC),
            permissions: 0o644,
            kill_suidgid: false,
        }),
        1 => Op::Open {
            flags: flags(RDWR | libc::O_TRUNC),
            kill_suidgid: true,
        },
        9 => Op::Tmpfile {
            flags: flags(RDWR | libc::O_TMPFILE),
            permissions: number(random) as u32,
        },
        2 => Op::Read(Read {
            handle,
            offset,
            size: number(random) as u32,
            lock_owner: None,
            flags: flags(0),
        }),
        3..5 => {
            payload.resize(random.below(9000) as usize, 5);
            let is_true = random.happens(0.9);
            Op::Write(Write {
                handle,
                offset,
                size: payload.len() as u32 + u32::from(!is_true),
                lock_owner: None,
                flags: flags(if random.happens(0.5) {
                    libc::O_APPEND | RDWR
                } else {
                    RDWR
                }),
                from_page_cache: false,
                kill_suidgid: true,
            })
        }
        5 => Op::Fallocate(Fallocate {
            handle,
            offset,
            length: number(random),
            mode: match random.below(3) {
                0 => FallocateMode::PunchHole,
                1 => FallocateMode::Zero { keep_size: false },
                _ => FallocateMode::Allocate { keep_size: false },
            },
        }),
        6 => Op::Lseek {
            handle,
            offset,
            whence: Whence::Hole,
        },
        7 => Op::CopyFileRange(CopyFileRange {
            from: handle,
            from_offset: offset,
            to_inode: NodeId(number(random)),
            to: Handle(number(random)),
            to_offset: number(random),
            length: number(random),
        }),
        _ => Op::Readdir {
            layout: DirLayout::Plus,
            handle,
            cookie: Cookie::new(offset).unwrap_or(Cookie::MAX),
            size: number(random) as u32,
        },
    }
}

#[test]
fn forged_requests_are_answered_and_harm_nobody() {
    seeds(30, |world| async move {
        world.set_faults(slow());
        let host = client(&world, 1, None);
        let (honest, hostile) = (Guest::new(&host), Guest::new(&host));
        let (file, kept) = honest.create(ROOT, "honest", RDWR).await.unwrap();
        honest.write(file, kept, 0, b"kept").await.unwrap();
        // Handles of the hostile guest are small numbers, which it guesses.
        hostile.create(ROOT, "n1", RDWR).await.unwrap();
        hostile.opendir(ROOT).await.unwrap();
        for _ in 0..150 {
            let (random, mut payload) = (&world.runtime, Vec::new());
            let node = number(random);
            let operation = match random.happens(0.5) {
                true => of_names(random),
                false => of_files(random, &mut payload),
            };
            // What it may do as root of its guest is not what is tried here.
            if node == file {
                continue;
            }
            let said = format!("{node}: {operation:?}");
            if let OwnedReply::Data(data) = hostile.call_with(node, operation, payload).await {
                assert!(data.len() <= 8 << 20, "{said}");
            }
        }
        assert_eq!(honest.read(file, kept, 0, 99).await.unwrap(), b"kept");
        world.check();
    });
}
