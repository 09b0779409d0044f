//! Each request of the kernel's header, field by field.

use super::{DIALECT, UNIQUE, dialect_of, fit_length, message, requests, time};
use crate::{
    AccessMask, AccessMode, Cookie, CopyFileRange, Create, DeviceNumber, DirLayout, Errno,
    Fallocate, FallocateMode, Features, Handle, Header, Ioctl, Kind, Lock, LockKind, LockOwner,
    LookupName, Malformed, Name, NodeId, Offer, Opcode, OpenFlags, Operation, Poll, Read, Release,
    RenameFlags, Request, SetAttr, SetTime, SetXattr, Target, Tmpfile, Unique, Whence, Write,
    XattrMode, XattrName,
};

const HANDLE: Handle = Handle(0x99);
const OWNER: LockOwner = LockOwner(0x77);

fn name(text: &[u8]) -> Name<'_> {
    Name::new(text).unwrap()
}

fn xattr() -> XattrName<'static> {
    XattrName::new(b"user.a/b").unwrap()
}

fn flags(flags: i32) -> OpenFlags {
    OpenFlags::from_wire(flags as u32).unwrap()
}

/// What the requests of the fixture mean.
fn expected(request: &str) -> Operation<'static> {
    match request {
        "INIT_OLD" | "INIT" | "DESTROY" | "INTERRUPT" | "FORGET" | "BATCH_FORGET" | "STATFS"
        | "SYNCFS" => expected_of_session(request),
        "GETATTR" | "SETATTR" | "STATX" | "READLINK" | "ACCESS" | "SETXATTR_OLD" | "SETXATTR"
        | "GETXATTR" | "LISTXATTR" | "REMOVEXATTR" => expected_of_inodes(request),
        "LOOKUP" | "SYMLINK" | "MKNOD" | "MKDIR" | "UNLINK" | "RMDIR" | "RENAME" | "RENAME2"
        | "LINK" | "CREATE" | "TMPFILE" => expected_of_names(request),
        "OPEN" | "OPENDIR" | "READ" | "WRITE" | "FLUSH" | "RELEASE" | "RELEASEDIR" | "FSYNC"
        | "FSYNCDIR" | "READDIR" | "READDIRPLUS" => expected_of_open_files(request),
        _ => expected_of_ranges_and_locks(request),
    }
}

fn expected_of_session(request: &str) -> Operation<'static> {
    match request {
        "INIT_OLD" => Operation::Init(Offer {
            major: 7,
            minor: 31,
            max_readahead_bytes: 131_072,
            features: Features::from_bits(0x03ff_fffb),
        }),
        "INIT" => Operation::Init(Offer {
            major: 7,
            minor: 38,
            max_readahead_bytes: 131_072,
            features: Features::from_bits(0xb_73ff_fffb),
        }),
        "DESTROY" => Operation::Destroy,
        "INTERRUPT" => Operation::Interrupt {
            unique: Unique(0xab_cdef),
        },
        "FORGET" => Operation::Forget { lookups: 17 },
        "STATFS" => Operation::Statfs,
        "SYNCFS" => Operation::Syncfs,
        // BATCH_FORGET borrows its list and has a test of its own.
        _ => panic!("no expectation for {request}"),
    }
}

fn expected_of_inodes(request: &str) -> Operation<'static> {
    match request {
        "GETATTR" => Operation::Getattr {
            handle: Some(HANDLE),
        },
        "SETATTR" => Operation::Setattr(SetAttr {
            permissions: Some(0o4755),
            uid: Some(21),
            gid: Some(22),
            size: Some(123_456_789_012),
            atime: Some(SetTime::At(time(-5, 8))),
            mtime: Some(SetTime::Now),
            ctime: Some(time(7, 999_999_999)),
            handle: Some(HANDLE),
            lock_owner: Some(OWNER),
            kill_suidgid: true,
        }),
        "STATX" => Operation::Statx {
            handle: Some(HANDLE),
            flags: 0x2000,
            mask: 0xfff,
        },
        "READLINK" => Operation::Readlink,
        "ACCESS" => Operation::Access {
            mask: AccessMask::READ.with(AccessMask::EXECUTE),
        },
        "SETXATTR_OLD" | "SETXATTR" => {
            let old = request == "SETXATTR_OLD";
            Operation::Setxattr(SetXattr {
                name: xattr(),
                value: b"va\0ue",
                mode: if old {
                    XattrMode::Create
                } else {
                    XattrMode::Replace
                },
                kill_sgid: !old,
            })
        }
        "GETXATTR" => Operation::Getxattr {
            name: xattr(),
            size: 4096,
        },
        "LISTXATTR" => Operation::Listxattr { size: 4096 },
        "REMOVEXATTR" => Operation::Removexattr { name: xattr() },
        _ => panic!("no expectation for {request}"),
    }
}

fn expected_of_names(request: &str) -> Operation<'static> {
    let rename = |flags| Operation::Rename {
        name: name(b"old"),
        new_parent: NodeId(0x55),
        new_name: name(b"newer"),
        flags,
    };
    match request {
        "LOOKUP" => Operation::Lookup {
            name: LookupName::Name(name(b"na\xff\xfe me")),
        },
        "SYMLINK" => Operation::Symlink {
            name: name(b"link"),
            target: Target::new(b"../some/target").unwrap(),
        },
        "MKNOD" => Operation::Mknod {
            name: name(b"node"),
            kind: Kind::CharDevice,
            permissions: 0o640,
            device: DeviceNumber {
                major: 0xabc,
                minor: 0x12345,
            },
            umask: 0o22,
        },
        "MKDIR" => Operation::Mkdir {
            name: name(b"directory"),
            permissions: 0o1777,
            umask: 0o27,
        },
        "UNLINK" => Operation::Unlink {
            name: name(b"gone"),
        },
        "RMDIR" => Operation::Rmdir {
            name: name(b"gone"),
        },
        "RENAME" => rename(RenameFlags::Replace),
        "RENAME2" => rename(RenameFlags::Exchange),
        "LINK" => Operation::Link {
            inode: NodeId(0x66),
            name: name(b"other"),
        },
        "CREATE" => Operation::Create(Create {
            name: name(b"made"),
            flags: flags(libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_APPEND),
            permissions: 0o644,
            umask: 0o2,
            kill_suidgid: true,
        }),
        "TMPFILE" => Operation::Tmpfile(Tmpfile {
            flags: flags(libc::O_RDWR | libc::O_TMPFILE | libc::O_EXCL),
            permissions: 0o600,
            umask: 0o7,
        }),
        _ => panic!("no expectation for {request}"),
    }
}

fn expected_of_open_files(request: &str) -> Operation<'static> {
    let readdir = |layout| Operation::Readdir {
        layout,
        handle: HANDLE,
        cookie: Cookie::MAX,
        size: 4096,
    };
    match request {
        "OPEN" => Operation::Open {
            flags: flags(libc::O_WRONLY | libc::O_TRUNC | libc::O_DSYNC),
            kill_suidgid: true,
        },
        "OPENDIR" => Operation::Opendir {
            flags: flags(libc::O_DIRECTORY),
        },
        "READ" => Operation::Read(Read {
            handle: HANDLE,
            offset: 1 << 40,
            size: 1 << 20,
            lock_owner: Some(OWNER),
            flags: flags(libc::O_RDWR),
        }),
        "WRITE" => Operation::Write(Write {
            handle: HANDLE,
            offset: 1 << 41,
            size: 7,
            lock_owner: Some(OWNER),
            flags: flags(libc::O_WRONLY),
            from_page_cache: true,
            kill_suidgid: true,
        }),
        "FLUSH" => Operation::Flush {
            handle: HANDLE,
            lock_owner: OWNER,
        },
        "RELEASE" => Operation::Release(Release {
            handle: HANDLE,
            flags: flags(libc::O_RDWR),
            flush: true,
            flock_unlock: Some(OWNER),
        }),
        "RELEASEDIR" => Operation::Releasedir { handle: HANDLE },
        "FSYNC" => Operation::Fsync {
            handle: HANDLE,
            data_only: true,
        },
        "FSYNCDIR" => Operation::Fsyncdir {
            handle: HANDLE,
            data_only: true,
        },
        "READDIR" => readdir(DirLayout::Plain),
        "READDIRPLUS" => readdir(DirLayout::Plus),
        _ => panic!("no expectation for {request}"),
    }
}

fn expected_of_ranges_and_locks(request: &str) -> Operation<'static> {
    let lock = Lock {
        handle: HANDLE,
        owner: OWNER,
        start: 3,
        end: i64::MAX as u64,
        kind: LockKind::Write,
        pid: 9,
        flock: true,
    };
    match request {
        "FALLOCATE" => Operation::Fallocate(Fallocate {
            handle: HANDLE,
            offset: 4096,
            length: 8192,
            mode: FallocateMode::PunchHole,
        }),
        "LSEEK" => Operation::Lseek {
            handle: HANDLE,
            offset: 65536,
            whence: Whence::Hole,
        },
        "COPY_FILE_RANGE" => Operation::CopyFileRange(CopyFileRange {
            from: HANDLE,
            from_offset: 1,
            to_inode: NodeId(0x66),
            to: Handle(0x9a),
            to_offset: 2,
            length: 0xffff_0000,
        }),
        "GETLK" => Operation::Getlk(lock),
        "SETLK" => Operation::Setlk { lock, wait: false },
        "SETLKW" => Operation::Setlk { lock, wait: true },
        "IOCTL" => Operation::Ioctl(Ioctl {
            handle: HANDLE,
            flags: 8,
            command: 0x1234,
            argument: 0x5678,
            input: b"data",
            output_bytes: 16,
        }),
        "POLL" => Operation::Poll(Poll {
            handle: HANDLE,
            kernel_handle: 0x98,
            flags: 1,
            events: 5,
        }),
        "BMAP" => Operation::Unsupported(37),
        _ => panic!("no expectation for {request}"),
    }
}

#[test]
fn each_request_is_what_the_kernels_header_says() {
    for (name, bytes) in requests() {
        let request = Request::parse(&bytes, dialect_of(name)).expect(name);
        let header = Header {
            len: bytes.len() as u32,
            opcode: request.header.opcode,
            unique: UNIQUE,
            nodeid: NodeId(0x0102_0304_0506_0708),
            uid: 1001,
            gid: 1002,
            pid: 4242,
        };
        assert_eq!(request.header, header, "{name}");
        if name != "BATCH_FORGET" {
            assert_eq!(request.operation, expected(name), "{name}");
        }
    }
}

#[test]
fn each_operation_has_a_request_in_the_fixture() {
    let list = requests();
    for opcode in Opcode::ALL {
        // An answer to what is never sent.
        if *opcode == Opcode::NotifyReply {
            continue;
        }
        let (_, bytes) = list
            .iter()
            .find(|(name, _)| *name == opcode.name())
            .unwrap_or_else(|| panic!("no request {opcode:?}"));
        let header = Header::parse(bytes).unwrap();
        assert_eq!(header.opcode, opcode.number());
        assert_eq!(Opcode::from_number(header.opcode), Some(*opcode));
    }
}

#[test]
fn a_batch_of_forgets_lists_inodes_and_lookups() {
    let bytes = message("BATCH_FORGET");
    let request = Request::parse(&bytes, DIALECT).unwrap();
    let Operation::BatchForget(forgets) = request.operation else {
        panic!("{request:?}");
    };
    let list: Vec<_> = forgets.iter().collect();
    assert_eq!(
        list,
        [(NodeId(11), 1), (NodeId(12), 2), (NodeId(u64::MAX), 3)]
    );
    assert_eq!((forgets.len(), forgets.is_empty()), (3, false));
}

#[test]
fn a_rename_exchanges_or_leaves_a_whiteout() {
    let with_flags = |flags: u32| {
        let mut bytes = message("RENAME2");
        bytes[48..52].copy_from_slice(&flags.to_le_bytes());
        let parsed = Request::parse(&bytes, DIALECT).map(|request| request.operation);
        match parsed {
            Ok(Operation::Rename { flags, .. }) => Ok(flags),
            Ok(other) => panic!("{other:?}"),
            Err(rejection) => Err(rejection.reason.errno()),
        }
    };
    let (no_replace, exchange) = (libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE);
    let whiteout = libc::RENAME_WHITEOUT;
    let leaves = |no_replace| Ok(RenameFlags::Whiteout { no_replace });
    assert_eq!(with_flags(0), Ok(RenameFlags::Replace));
    assert_eq!(with_flags(whiteout), leaves(false));
    assert_eq!(with_flags(whiteout | no_replace), leaves(true));
    for flags in [
        exchange | no_replace,
        exchange | whiteout,
        exchange | whiteout | no_replace,
        8,
        whiteout | 8,
    ] {
        assert_eq!(with_flags(flags), Err(Errno::EINVAL), "{flags}");
    }
}

#[test]
fn the_name_of_a_temporary_file_has_no_meaning_but_ends() {
    let bytes = message("TMPFILE");
    let of_name = |name: &[u8]| {
        let mut bytes = bytes[..bytes.len() - 2].to_vec();
        bytes.extend_from_slice(name);
        fit_length(&mut bytes);
        match Request::parse(&bytes, DIALECT) {
            Ok(request) => {
                assert_eq!(request.operation, expected("TMPFILE"), "{name:?}");
                Ok(())
            }
            Err(rejection) => Err(rejection.reason),
        }
    };
    for name in [&b"/\0"[..], b"\0", b"..\0", b"a/b\0"] {
        assert_eq!(of_name(name), Ok(()), "{name:?}");
    }
    assert_eq!(of_name(b"/"), Err(Malformed::Unterminated));
    assert_eq!(of_name(b"/\0x"), Err(Malformed::Trailing(1)));
    let long = [&[b'x'; 256][..], &[0]].concat();
    assert_eq!(of_name(&long), Err(Malformed::NameTooLong));
}

#[test]
fn requests_are_read_at_any_address() {
    for (name, bytes) in requests() {
        for shift in 1..8 {
            let mut shifted = vec![0xee; shift];
            shifted.extend_from_slice(&bytes);
            assert_eq!(
                Request::parse(&shifted[shift..], dialect_of(name)),
                Request::parse(&bytes, dialect_of(name)),
                "{name}"
            );
        }
    }
}

#[test]
fn the_payload_of_a_write_is_not_needed() {
    let bytes = message("WRITE");
    let header = Header::parse(&bytes[..40]).unwrap();
    assert_eq!(header.control_bytes(), Ok(80));
    assert_eq!(Write::PAYLOAD_OFFSET, 80);
    assert_eq!(&bytes[Write::PAYLOAD_OFFSET..], b"payload");
    let alone = Request::parse(&bytes[..80], DIALECT).unwrap();
    assert_eq!(alone, Request::parse(&bytes, DIALECT).unwrap());
}

#[test]
fn only_what_the_kernel_does_not_wait_for_has_no_reply() {
    for (name, bytes) in requests() {
        let header = Header::parse(&bytes).unwrap();
        let silent = ["FORGET", "BATCH_FORGET", "INTERRUPT"].contains(&name);
        assert_eq!(header.has_reply(), !silent, "{name}");
        let request = Request::parse(&bytes, dialect_of(name)).unwrap();
        assert_eq!(request.reply_bytes_max() == 0, silent, "{name}");
    }
}

#[test]
fn open_flags_say_what_the_file_is_opened_for() {
    let sync = flags(libc::O_RDWR | libc::O_SYNC | libc::O_DIRECT);
    assert_eq!(sync.access(), AccessMode::ReadWrite);
    assert!(sync.sync() && sync.data_sync() && sync.direct());
    let data_sync = flags(libc::O_WRONLY | libc::O_DSYNC | libc::O_TRUNC);
    assert_eq!(data_sync.access(), AccessMode::Write);
    assert!(!data_sync.sync() && data_sync.data_sync() && data_sync.truncate());
    let read = flags(0x20);
    assert_eq!(read.access(), AccessMode::Read);
    assert!(read.execute() && !read.append() && !read.exclusive());
    assert!(OpenFlags::from_wire(3).is_err());
}
