//! What is agreed with which kernel.

use super::{message, wanted};
use crate::{
    Agreed, Dialect, Errno, Features, Negotiation, Offer, Operation, Request, Wanted, negotiate,
};

fn offer(minor: u32, features: u64) -> Offer {
    Offer {
        major: 7,
        minor,
        max_readahead_bytes: 131_072,
        features: Features::from_bits(features),
    }
}

fn agree(offer: &Offer, wanted: &Wanted) -> Agreed {
    match negotiate(offer, wanted) {
        Negotiation::Agreed(agreed) => agreed,
        other => panic!("{other:?}"),
    }
}

/// The offer of a fixture.
fn kernel(name: &str) -> Offer {
    let bytes = message(name);
    match Request::parse(&bytes, Dialect::BEFORE_INIT)
        .unwrap()
        .operation
    {
        Operation::Init(offer) => offer,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_old_kernel_gets_what_it_has() {
    let agreed = agree(&kernel("INIT_OLD"), &wanted());
    assert_eq!(agreed.minor(), 31);
    assert!(!agreed.passes_sync_on());
    for absent in [
        Features::HANDLE_KILLPRIV_V2,
        Features::SETXATTR_EXT,
        Features::INIT_EXT,
        Features::HANDLE_KILLPRIV,
    ] {
        assert!(!agreed.features().contains(absent), "{absent:?}");
    }
    assert!(agreed.features().contains(Features::CACHE_SYMLINKS));
    assert_eq!(
        agreed.dialect(),
        Dialect {
            setxattr_ext: false,
            io_bytes_max: 1 << 20
        }
    );
}

#[test]
fn a_new_kernel_gets_all_that_is_wanted() {
    let agreed = agree(&kernel("INIT"), &wanted());
    assert_eq!((agreed.minor(), agreed.max_write_bytes()), (38, 1 << 20));
    // That came with 7.39.
    let late = Features::DIRECT_IO_ALLOW_MMAP;
    assert!(!agreed.features().contains(late));
    assert_eq!(agreed.features().with(late), wanted().features());
    assert!(agreed.dialect().setxattr_ext);
    let newer = agree(&offer(99, u64::MAX), &wanted());
    assert_eq!(newer.minor(), 40);
    assert!(newer.passes_sync_on());
    assert_eq!(newer.features(), wanted().features());
}

#[test]
fn what_breaks_coherence_between_hosts_is_never_agreed() {
    for read_only in [false, true] {
        for nodeids_are_inodes in [false, true] {
            let wanted = Wanted {
                read_only,
                nodeids_are_inodes,
                ..wanted()
            };
            let agreed = agree(&offer(40, u64::MAX), &wanted);
            for never in [
                Features::WRITEBACK_CACHE,
                Features::EXPLICIT_INVAL_DATA,
                Features::POSIX_LOCKS,
                Features::FLOCK_LOCKS,
                Features::SUBMOUNTS,
                Features::POSIX_ACL,
                Features::DONT_MASK,
                Features::HANDLE_KILLPRIV,
                Features::SECURITY_CTX,
            ] {
                assert!(!agreed.features().contains(never), "{never:?}");
            }
            assert!(agreed.features().contains(Features::AUTO_INVAL_DATA));
            assert_eq!(agreed.zero_message_open(), read_only);
            assert_eq!(agreed.zero_message_opendir(), read_only);
            assert_eq!(
                agreed.features().contains(Features::EXPORT_SUPPORT),
                nodeids_are_inodes
            );
        }
    }
}

#[test]
fn nothing_is_agreed_that_was_not_offered() {
    for bit in 0..64 {
        let agreed = agree(&offer(40, !(1 << bit)), &wanted());
        assert!(!agreed.features().contains(Features::from_bits(1 << bit)));
    }
    assert_eq!(agree(&offer(31, 0), &wanted()).features(), Features::NONE);
}

#[test]
fn without_max_pages_requests_are_as_small_as_kernels_make_them() {
    let agreed = agree(&offer(31, 0), &wanted());
    assert_eq!(agreed.max_write_bytes(), 32 * 4096);
    assert_eq!(agreed.dialect().io_bytes_max, 32 * 4096);
    let tiny = Wanted {
        max_write_bytes: 0,
        max_pages: 0,
        ..wanted()
    };
    let agreed = agree(&offer(40, u64::MAX), &tiny);
    assert_eq!(agreed.max_write_bytes(), 4096);
    assert_eq!(agreed.dialect().io_bytes_max, 4096);
}

#[test]
fn other_versions_are_answered_as_the_protocol_says() {
    let version = |major, minor| {
        let offer = Offer {
            major,
            ..offer(minor, 0)
        };
        negotiate(&offer, &wanted())
    };
    assert_eq!(version(8, 0), Negotiation::Again);
    assert_eq!(version(u32::MAX, u32::MAX), Negotiation::Again);
    for (major, minor) in [(7, 30), (7, 0), (6, 99), (0, 0)] {
        assert_eq!(version(major, minor), Negotiation::Refused(Errno::EPROTO));
    }
    assert!(matches!(version(7, 31), Negotiation::Agreed(_)));
}

#[test]
fn init_of_a_later_major_version_may_have_any_form() {
    let mut bytes = message("INIT");
    bytes[40..44].copy_from_slice(&8u32.to_le_bytes());
    bytes.extend_from_slice(b"whatever comes with it");
    super::fit_length(&mut bytes);
    let request = Request::parse(&bytes, Dialect::BEFORE_INIT).unwrap();
    let Operation::Init(offer) = request.operation else {
        panic!("{request:?}");
    };
    assert_eq!(offer.major, 8);
}
