//! Hostile input as a plain function: the fuzz target calls it with what the fuzzer finds, the tests with
//! random bytes. It returns if all is well and panics if a request was accepted that should not be.

use crate::{
    Dialect, Header, LookupName, Malformed, Negotiation, Operation, REPLY_BYTES_MAX, Request,
    Wanted, Write, XATTR_BYTES_MAX, negotiate,
};

/// Parses a request. The first byte chooses the dialect, and whether the header's length is made to fit, so
/// that more than its check is reached. Says whether the request was accepted.
pub fn request(data: &[u8]) -> bool {
    let Some((choice, bytes)) = data.split_first() else {
        return false;
    };
    let dialect = Dialect {
        setxattr_ext: choice & 1 != 0,
        io_bytes_max: 1 << 20,
    };
    let mut bytes = bytes.to_vec();
    if choice & 2 != 0 && bytes.len() >= 4 {
        let len = bytes.len() as u32;
        bytes[..4].copy_from_slice(&len.to_le_bytes());
    }
    match Request::parse(&bytes, dialect) {
        Ok(request) => {
            check(&request, &bytes, dialect);
            true
        }
        Err(rejection) => {
            if rejection.header.is_none() {
                assert!(rejection.reply().is_none());
            }
            false
        }
    }
}

fn check(request: &Request<'_>, bytes: &[u8], dialect: Dialect) {
    assert_eq!(Header::parse(bytes), Ok(request.header));
    let control = request.header.control_bytes().expect("an accepted length");
    assert!(control <= bytes.len() && bytes.len() <= request.header.len as usize);
    // The rest of a payload makes no difference to what is parsed.
    let again = Request::parse(&bytes[..control], dialect);
    assert_eq!(again.as_ref(), Ok(request));
    assert_eq!(request.reply_bytes_max() > 0, request.header.has_reply());
    check_operation(&request.operation, &request.header, dialect);
    assert!(!format!("{request:?}").is_empty());
}

fn check_operation(operation: &Operation<'_>, header: &Header, dialect: Dialect) {
    match operation {
        Operation::Lookup {
            name: LookupName::Name(name),
        }
        | Operation::Mknod { name, .. }
        | Operation::Mkdir { name, .. }
        | Operation::Unlink { name }
        | Operation::Rmdir { name }
        | Operation::Link { name, .. } => check_name(name.as_bytes()),
        Operation::Create(create) => check_name(create.name.as_bytes()),
        Operation::Symlink { name, target } => {
            check_name(name.as_bytes());
            assert!((1..=4095).contains(&target.as_bytes().len()));
            assert!(!target.as_bytes().contains(&0));
        }
        Operation::Rename { name, new_name, .. } => {
            check_name(name.as_bytes());
            check_name(new_name.as_bytes());
        }
        Operation::Getxattr { name, .. } | Operation::Removexattr { name } => {
            check_xattr_name(name.as_bytes());
        }
        Operation::Setxattr(setxattr) => {
            check_xattr_name(setxattr.name.as_bytes());
            assert!(setxattr.value.len() <= XATTR_BYTES_MAX as usize);
        }
        Operation::Write(write) => {
            assert_eq!(
                Write::PAYLOAD_OFFSET + write.size as usize,
                header.len as usize
            );
            assert!(write.size <= dialect.io_bytes_max);
            assert!(write.offset.checked_add(write.size.into()) <= Some(i64::MAX as u64));
        }
        Operation::Read(read) => {
            assert!(read.size <= dialect.io_bytes_max && read.offset <= i64::MAX as u64);
        }
        Operation::BatchForget(forgets) => assert_eq!(forgets.iter().count(), forgets.len()),
        Operation::Init(offer) => check_negotiation(offer),
        _ => {}
    }
}

fn check_name(name: &[u8]) {
    assert!((1..=255).contains(&name.len()));
    assert!(!name.contains(&0) && !name.contains(&b'/'));
    assert!(name != b"." && name != b"..");
}

fn check_xattr_name(name: &[u8]) {
    assert!((1..=255).contains(&name.len()) && !name.contains(&0));
}

fn check_negotiation(offer: &crate::Offer) {
    let wanted = Wanted {
        read_only: offer.minor & 1 == 0,
        nodeids_are_inodes: true,
        max_write_bytes: 1 << 20,
        max_pages: 256,
        max_readahead_bytes: 1 << 20,
        max_background: 1024,
        congestion_threshold: 768,
    };
    if let Negotiation::Agreed(agreed) = negotiate(offer, &wanted) {
        assert!(offer.features.contains(agreed.features()));
        assert!(agreed.max_write_bytes() <= agreed.dialect().io_bytes_max);
    }
    let mut out = [0; REPLY_BYTES_MAX];
    let unique = crate::Unique(1);
    let errno = Malformed::ByteOrder.errno();
    assert_eq!(
        crate::Encoder::new(&mut out, unique).error(errno),
        Ok(crate::REPLY_HEADER_BYTES)
    );
}
