//! Requests that no kernel sends.

use proptest::prelude::*;

use super::{DIALECT, UNIQUE, dialect_of, fit_length, message, requests};
use crate::{
    Errno, HEADER_BYTES, Header, LookupName, MAX_BATCH_FORGET_BYTES, MAX_CONTROL_BYTES, Malformed,
    Opcode, Operation, Request, Write, fuzzing,
};

/// A request with this body.
fn request(opcode: Opcode, body: &[u8]) -> Vec<u8> {
    let mut bytes = message("DESTROY");
    bytes[4..8].copy_from_slice(&opcode.number().to_le_bytes());
    bytes.extend_from_slice(body);
    fit_length(&mut bytes);
    bytes
}

/// What a request that is refused is answered with.
fn errno(bytes: &[u8]) -> Errno {
    let rejection = Request::parse(bytes, DIALECT).unwrap_err();
    let (unique, errno) = rejection.reply().unwrap();
    assert_eq!(unique, UNIQUE);
    errno
}

/// What a request of the fixture is answered with once bytes of it, counted from its body, are others.
fn errno_with(name: &str, changes: &[(usize, &[u8])]) -> Errno {
    let mut bytes = message(name);
    for (at, with) in changes {
        bytes[HEADER_BYTES + at..][..with.len()].copy_from_slice(with);
    }
    errno(&bytes)
}

#[test]
fn every_truncation_of_every_request_is_refused() {
    for (name, bytes) in requests() {
        let dialect = dialect_of(name);
        for end in 0..bytes.len() {
            let without_payload = name == "WRITE" && end >= Write::PAYLOAD_OFFSET;
            let result = Request::parse(&bytes[..end], dialect);
            assert_eq!(result.is_ok(), without_payload, "{name} to {end}");
            if end < HEADER_BYTES {
                assert_eq!(result.unwrap_err().reply(), None);
                continue;
            }
            // The header may agree with it. What is not known is not looked at.
            let mut fitting = bytes[..end].to_vec();
            fit_length(&mut fitting);
            let result = Request::parse(&fitting, dialect);
            assert_eq!(result.is_ok(), name == "BMAP", "{name} to {end}");
        }
    }
}

#[test]
fn bytes_behind_a_request_are_refused() {
    for (name, mut bytes) in requests() {
        bytes.push(0);
        let longer = Request::parse(&bytes, dialect_of(name)).unwrap_err();
        assert!(matches!(longer.reason, Malformed::Length { .. }), "{name}");
        fit_length(&mut bytes);
        let result = Request::parse(&bytes, dialect_of(name));
        // INIT may grow; what is not known is not looked at.
        assert_eq!(result.is_ok(), ["INIT", "BMAP"].contains(&name), "{name}");
    }
}

#[test]
fn names_that_no_entry_can_have_are_refused() {
    let long = [b'x'; 256];
    let cases: [(&[u8], Errno); 8] = [
        (b"\0", Errno::EINVAL),
        (b"", Errno::EIO),
        (b"unterminated", Errno::EIO),
        (b"in\0side\0", Errno::EIO),
        (b"a/b\0", Errno::EINVAL),
        (b".\0", Errno::EINVAL),
        (b"..\0", Errno::EINVAL),
        (&long, Errno::ENAMETOOLONG),
    ];
    for (name, expected) in cases {
        for opcode in [Opcode::Unlink, Opcode::Rmdir] {
            assert_eq!(errno(&request(opcode, name)), expected, "{name:?}");
        }
        let mkdir = [[0; 8].as_slice(), name].concat();
        assert_eq!(errno(&request(Opcode::Mkdir, &mkdir)), expected);
        let second = [[0; 8].as_slice(), b"old\0", name].concat();
        assert_eq!(errno(&request(Opcode::Rename, &second)), expected);
    }
    let mut longest = vec![b'x'; 255];
    longest.push(0);
    assert!(Request::parse(&request(Opcode::Unlink, &longest), DIALECT).is_ok());
}

#[test]
fn only_lookup_takes_the_names_of_the_directory_and_its_parent() {
    for (body, expected) in [
        (b".\0".as_slice(), LookupName::Itself),
        (b"/\0".as_slice(), LookupName::Itself),
        (b"..\0".as_slice(), LookupName::Parent),
    ] {
        let bytes = request(Opcode::Lookup, body);
        let operation = Request::parse(&bytes, DIALECT).unwrap().operation;
        assert_eq!(operation, Operation::Lookup { name: expected });
    }
    assert_eq!(errno(&request(Opcode::Lookup, b"a/b\0")), Errno::EINVAL);
}

#[test]
fn targets_and_names_of_attributes_have_limits_of_their_own() {
    let symlink = |bytes: usize| {
        let target = vec![b'/'; bytes];
        request(
            Opcode::Symlink,
            &[b"link\0".as_slice(), &target, b"\0"].concat(),
        )
    };
    assert!(Request::parse(&symlink(4095), DIALECT).is_ok());
    assert_eq!(errno(&symlink(4096)), Errno::ENAMETOOLONG);
    assert_eq!(errno(&symlink(0)), Errno::EINVAL);
    let xattr = |bytes: usize| {
        let name = vec![b'/'; bytes];
        request(Opcode::Removexattr, &[name.as_slice(), b"\0"].concat())
    };
    assert!(Request::parse(&xattr(255), DIALECT).is_ok());
    assert_eq!(errno(&xattr(256)), Errno::ERANGE);
    assert_eq!(errno(&xattr(0)), Errno::EINVAL);
}

#[test]
fn values_of_attributes_are_bounded_and_as_long_as_they_say() {
    let setxattr = |size: u32, value: usize| {
        let mut body = size.to_le_bytes().to_vec();
        body.resize(16, 0);
        body.extend_from_slice(b"user.a\0");
        body.resize(body.len() + value, 7);
        request(Opcode::Setxattr, &body)
    };
    assert!(Request::parse(&setxattr(65536, 65536), DIALECT).is_ok());
    assert_eq!(errno(&setxattr(65537, 65537)), Errno::E2BIG);
    assert_eq!(errno(&setxattr(9, 10)), Errno::EIO);
    assert_eq!(errno(&setxattr(u32::MAX, 10)), Errno::EIO);
}

#[test]
fn a_header_that_no_kernel_makes_is_refused() {
    let mut bytes = message("STATFS");
    bytes[36] = 1;
    assert_eq!(
        Request::parse(&bytes, DIALECT).unwrap_err().reason,
        Malformed::Extensions
    );
    let mut swapped = message("INIT");
    swapped[4..8].copy_from_slice(&26u32.to_be_bytes());
    let rejection = Request::parse(&swapped, DIALECT).unwrap_err();
    assert_eq!(rejection.reason, Malformed::ByteOrder);
    assert_eq!(rejection.reply(), None);
}

/// A BATCH_FORGET request, `length` bytes long.
fn batch_forget(length: usize) -> Vec<u8> {
    let mut body = vec![0; length - HEADER_BYTES];
    let count = (body.len() - 8) / 16;
    body[..4].copy_from_slice(&u32::try_from(count).unwrap().to_le_bytes());
    request(Opcode::BatchForget, &body)
}

#[test]
fn forgets_fill_the_buffer_of_a_reader_of_dev_fuse() {
    let full = batch_forget(MAX_BATCH_FORGET_BYTES);
    let found = Request::parse(&full, DIALECT).unwrap();
    let Operation::BatchForget(forgets) = found.operation else {
        panic!("{:?}", found.operation);
    };
    assert_eq!(forgets.len(), (MAX_BATCH_FORGET_BYTES - 48) / 16);
    let longer = batch_forget(MAX_BATCH_FORGET_BYTES + 16);
    let rejection = Request::parse(&longer, DIALECT).unwrap_err();
    assert!(matches!(rejection.reason, Malformed::TooLong(_)));
    assert_eq!(rejection.reply(), None, "a forget is never answered");
    let header = Header::parse(&longer).unwrap();
    assert!(header.control_bytes().is_err());
}

#[test]
fn other_requests_without_payload_are_bounded() {
    let body = vec![b'x'; MAX_CONTROL_BYTES - HEADER_BYTES + 1];
    for opcode in [Opcode::Lookup, Opcode::Setxattr, Opcode::Getattr] {
        let bytes = request(opcode, &body);
        assert_eq!(errno(&bytes), Errno::E2BIG, "{opcode:?}");
        let header = Header::parse(&bytes).unwrap();
        assert!(header.control_bytes().is_err());
    }
}

#[test]
fn counts_that_contradict_the_size_are_refused() {
    for count in [0u32, 2, 4, u32::MAX] {
        let mut bytes = message("BATCH_FORGET");
        bytes[40..44].copy_from_slice(&count.to_le_bytes());
        let rejection = Request::parse(&bytes, DIALECT).unwrap_err();
        assert!(matches!(rejection.reason, Malformed::Count { .. }));
        assert_eq!(rejection.reply(), None, "a forget is never answered");
    }
    assert_eq!(errno_with("WRITE", &[(16, &[8])]), Errno::EIO);
    assert_eq!(errno_with("WRITE", &[(16, &[6])]), Errno::EIO);
    assert_eq!(errno_with("IOCTL", &[(24, &[5])]), Errno::EIO);
}

#[test]
fn offsets_beyond_the_largest_are_refused() {
    let largest = (i64::MAX as u64).to_le_bytes();
    let beyond = (1u64 << 63).to_le_bytes();
    assert_eq!(errno_with("READ", &[(8, &beyond)]), Errno::EINVAL);
    assert_eq!(errno_with("READDIR", &[(8, &beyond)]), Errno::EINVAL);
    // What Linux says of SEEK_DATA and SEEK_HOLE from there.
    assert_eq!(errno_with("LSEEK", &[(8, &beyond)]), Errno::ENXIO);
    assert_eq!(errno_with("LSEEK", &[(8, &[0xff; 8])]), Errno::ENXIO);
    assert_eq!(errno_with("SETATTR", &[(16, &beyond)]), Errno::EINVAL);
    assert_eq!(errno_with("WRITE", &[(8, &beyond)]), Errno::EINVAL);
    assert_eq!(errno_with("WRITE", &[(8, &largest)]), Errno::EFBIG);
    assert_eq!(errno_with("FALLOCATE", &[(8, &largest)]), Errno::EFBIG);
    assert_eq!(errno_with("FALLOCATE", &[(16, &[0xff; 8])]), Errno::EFBIG);
    assert_eq!(
        errno_with("COPY_FILE_RANGE", &[(8, &largest)]),
        Errno::EFBIG
    );
    assert_eq!(
        errno_with("COPY_FILE_RANGE", &[(32, &largest)]),
        Errno::EFBIG
    );
    let mut last_page = message("READ");
    last_page[48..56].copy_from_slice(&(i64::MAX as u64 - 4095).to_le_bytes());
    assert!(Request::parse(&last_page, DIALECT).is_ok());
}

#[test]
fn values_without_a_meaning_are_refused() {
    let over = (DIALECT.io_bytes_max + 1).to_le_bytes();
    let billion = 1_000_000_000u32.to_le_bytes();
    let cases: &[(&str, usize, &[u8], Errno)] = &[
        ("READ", 16, &over, Errno::EINVAL),
        ("READDIR", 16, &over, Errno::EINVAL),
        ("READ", 32, &[3], Errno::EINVAL),
        ("OPEN", 0, &[3], Errno::EINVAL),
        ("SETATTR", 56, &billion, Errno::EINVAL),
        ("SETATTR", 64, &billion, Errno::EINVAL),
        ("SETATTR", 0, &[0, 0x10], Errno::EINVAL),
        ("RENAME2", 8, &[3], Errno::EINVAL),
        ("RENAME2", 8, &[6], Errno::EINVAL),
        ("MKNOD", 0, &0o040_755u32.to_le_bytes(), Errno::EINVAL),
        ("MKNOD", 0, &0o120_777u32.to_le_bytes(), Errno::EINVAL),
        ("MKNOD", 0, &0o644u32.to_le_bytes(), Errno::EINVAL),
        ("SETXATTR", 4, &[3], Errno::EINVAL),
        ("ACCESS", 0, &[8], Errno::EINVAL),
        ("FALLOCATE", 16, &[0; 8], Errno::EINVAL),
        ("FALLOCATE", 24, &[2], Errno::EOPNOTSUPP),
        ("FALLOCATE", 24, &[8], Errno::EOPNOTSUPP),
        ("FALLOCATE", 24, &[0x13], Errno::EOPNOTSUPP),
        ("LSEEK", 16, &[0], Errno::EINVAL),
        ("LSEEK", 16, &[5], Errno::EINVAL),
        ("COPY_FILE_RANGE", 48, &[1], Errno::EINVAL),
        ("SETLK", 32, &[3], Errno::EINVAL),
        ("SETLK", 16, &[0xff; 7], Errno::EINVAL),
    ];
    for (name, at, with, expected) in cases {
        let found = match *name {
            // The end of a lock before its start.
            "SETLK" if *at == 16 => errno_with(name, &[(16, *with), (24, &1u64.to_le_bytes())]),
            _ => errno_with(name, &[(*at, *with)]),
        };
        assert_eq!(found, *expected, "{name} at {at}: {with:?}");
    }
}

#[test]
fn unknown_operations_are_answered() {
    for number in [0, 7, 19, 37, 48, 49, 53, 4096, u32::MAX] {
        let mut bytes = message("STATFS");
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        let request = Request::parse(&bytes, DIALECT).unwrap();
        assert_eq!(request.operation, Operation::Unsupported(number));
        assert_eq!(request.reply_bytes_max(), 16);
    }
}

/// The fixture's requests, for proptest.
fn any_request() -> impl Strategy<Value = Vec<u8>> {
    let list: Vec<_> = requests().into_iter().map(|(_, bytes)| bytes).collect();
    proptest::sample::select(list)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_refused_or_sound(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzzing::request(&data);
    }

    #[test]
    fn any_body_of_any_operation_is_refused_or_sound(
        opcode in proptest::sample::select(Opcode::ALL), choice: u8,
        body in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut data = vec![choice];
        data.extend(request(opcode, &body));
        fuzzing::request(&data);
    }

    #[test]
    fn requests_with_other_bytes_are_refused_or_sound(
        bytes in any_request(), choice: u8, keep: prop::sample::Index, cut: bool,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let mut bytes = bytes;
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut {
            bytes.truncate(keep.index(bytes.len()));
        }
        bytes.insert(0, choice);
        fuzzing::request(&bytes);
    }
}

/// A target that stops at the first check it meets would find nothing.
#[test]
fn the_target_accepts_every_request_of_the_fixture() {
    for (name, bytes) in requests() {
        let ext = u8::from(name != "SETXATTR_OLD");
        for choice in [ext, ext | 2] {
            assert!(
                fuzzing::request(&[[choice].as_slice(), &bytes].concat()),
                "{name}"
            );
        }
    }
}
