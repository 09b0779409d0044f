use proptest::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};
use zerocopy::IntoBytes;

use super::*;

fn fds(count: usize) -> Vec<OwnedFd> {
    let make = |_| memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    (0..count).map(make).collect()
}

fn frame(code: u32, payload: &[u8], fd_count: usize) -> Frame {
    Frame {
        header: Header {
            code,
            flags: FLAG_VERSION,
            size: payload.len() as u32,
        },
        payload: payload.to_vec(),
        fds: fds(fd_count),
    }
}

fn table(count: u32, regions: usize) -> Vec<u8> {
    let head = MemoryHead { count, padding: 0 };
    [head.as_bytes(), &vec![7; regions * size_of::<Region>()]].concat()
}

const STATE: [u8; 8] = [1, 0, 0, 0, 1, 0, 0, 0];

#[test]
fn every_message_is_recognised_with_its_payload_and_descriptors() {
    let cases: Vec<(u32, Vec<u8>, usize, &str)> = vec![
        (code::GET_FEATURES, vec![], 0, "GetFeatures"),
        (code::SET_FEATURES, vec![0; 8], 0, "SetFeatures"),
        (code::SET_OWNER, vec![], 0, "SetOwner"),
        (code::RESET_OWNER, vec![], 0, "ResetOwner"),
        (code::SET_MEM_TABLE, table(2, 2), 2, "SetMemTable"),
        (code::SET_MEM_TABLE, table(8, 8), 8, "SetMemTable"),
        (code::SET_MEM_TABLE, table(32, 32), 32, "SetMemTable"),
        (code::SET_LOG_BASE, vec![0; 16], 1, "SetLogBase"),
        (code::SET_LOG_FD, vec![], 1, "SetLogFd"),
        (code::SET_VRING_NUM, STATE.into(), 0, "SetVringNum"),
        (code::SET_VRING_ADDR, vec![0; 40], 0, "SetVringAddr"),
        (code::SET_VRING_BASE, STATE.into(), 0, "SetVringBase"),
        (code::GET_VRING_BASE, STATE.into(), 0, "GetVringBase"),
        (
            code::SET_VRING_KICK,
            vec![0; 8],
            1,
            "SetVringKick { index: 0, fd: Some",
        ),
        (
            code::SET_VRING_CALL,
            vec![3, 0, 0, 0, 0, 0, 0, 0],
            1,
            "SetVringCall { index: 3, fd: Some",
        ),
        (
            code::SET_VRING_ERR,
            vec![3, 1, 0, 0, 0, 0, 0, 0],
            0,
            "SetVringErr { index: 3, fd: None",
        ),
        (
            code::GET_PROTOCOL_FEATURES,
            vec![],
            0,
            "GetProtocolFeatures",
        ),
        (
            code::SET_PROTOCOL_FEATURES,
            vec![0; 8],
            0,
            "SetProtocolFeatures",
        ),
        (code::GET_QUEUE_NUM, vec![], 0, "GetQueueNum"),
        (
            code::SET_VRING_ENABLE,
            STATE.into(),
            0,
            "SetVringEnable { index: 1, enable: true",
        ),
        (code::SET_BACKEND_REQ_FD, vec![], 1, "SetBackendReqFd"),
        (code::GET_CONFIG, vec![0; 12], 0, "GetConfig"),
        (code::SET_CONFIG, vec![0; 12], 0, "SetConfig"),
        (code::GET_INFLIGHT_FD, vec![0; 24], 0, "GetInflightFd"),
        (code::SET_INFLIGHT_FD, vec![0; 24], 1, "SetInflightFd"),
        (code::RESET_DEVICE, vec![], 0, "ResetDevice"),
        (code::GET_MAX_MEM_SLOTS, vec![], 0, "GetMaxMemSlots"),
        (code::ADD_MEM_REG, vec![0; 40], 1, "AddMemReg"),
        (code::REM_MEM_REG, vec![0; 40], 0, "RemMemReg"),
        (code::REM_MEM_REG, vec![0; 40], 1, "RemMemReg"),
        (999, vec![1, 2, 3], 2, "Unknown(999)"),
    ];
    for (code, payload, fd_count, expected) in cases {
        let request = decode(frame(code, &payload, fd_count)).unwrap();
        let shown = format!("{request:?}");
        assert!(shown.starts_with(expected), "{shown} is not {expected}");
    }
}

#[test]
fn a_wrong_length_is_an_error_that_names_the_message() {
    let cases = [
        (code::SET_FEATURES, 7, 0),
        (code::SET_FEATURES, 9, 0),
        (code::SET_MEM_TABLE, 4, 0),
        (code::SET_VRING_NUM, 4, 0),
        (code::SET_VRING_ADDR, 39, 0),
        (code::SET_VRING_KICK, 4, 1),
        (code::GET_CONFIG, 11, 0),
        (code::GET_INFLIGHT_FD, 20, 0),
        (code::SET_INFLIGHT_FD, 25, 1),
        (code::ADD_MEM_REG, 32, 1),
        (code::SET_LOG_BASE, 8, 1),
    ];
    for (code, len, fd_count) in cases {
        let error = decode(frame(code, &vec![0; len], fd_count)).unwrap_err();
        let DecodeError::Length {
            name: shown, got, ..
        } = error
        else {
            panic!("{error} is not about a length");
        };
        assert_eq!((shown, got), (name(code), len));
    }
}

#[test]
fn a_wrong_number_of_descriptors_is_an_error() {
    let cases: [(u32, Vec<u8>, usize); 9] = [
        (code::GET_FEATURES, vec![], 1),
        (code::SET_MEM_TABLE, table(2, 2), 1),
        (code::SET_MEM_TABLE, table(2, 2), 3),
        (code::SET_VRING_CALL, vec![0; 8], 0),
        (code::SET_VRING_CALL, vec![0; 8], 2),
        (code::SET_VRING_CALL, vec![0, 1, 0, 0, 0, 0, 0, 0], 1),
        (code::ADD_MEM_REG, vec![0; 40], 0),
        (code::SET_INFLIGHT_FD, vec![0; 24], 0),
        (code::SET_BACKEND_REQ_FD, vec![], 2),
    ];
    for (code, payload, fd_count) in cases {
        let error = decode(frame(code, &payload, fd_count)).unwrap_err();
        assert!(
            matches!(error, DecodeError::Fds { got, .. } if got == fd_count),
            "{error}"
        );
    }
}

#[test]
fn counts_and_indexes_are_bounded_before_any_allocation() {
    let too_many = decode(frame(code::SET_MEM_TABLE, &table(u32::MAX, 1), 1)).unwrap_err();
    assert!(matches!(
        too_many,
        DecodeError::Range {
            value: 0xffff_ffff,
            ..
        }
    ));
    let short = decode(frame(code::SET_MEM_TABLE, &table(3, 2), 3)).unwrap_err();
    assert!(matches!(short, DecodeError::Length { want: 104, .. }));
    let ring = decode(frame(code::SET_VRING_KICK, &[0, 2, 0, 0, 0, 0, 0, 0], 1)).unwrap_err();
    assert!(matches!(ring, DecodeError::Range { what: "ring", .. }));
    let huge = ConfigHead {
        offset: 0,
        size: u32::MAX,
        flags: 0,
    };
    let config = decode(frame(code::GET_CONFIG, huge.as_bytes(), 0)).unwrap_err();
    assert!(matches!(config, DecodeError::Range { what: "size", .. }));
}

#[test]
fn headers_of_another_protocol_end_the_connection() {
    let header = |flags, size| Header {
        code: 1,
        flags,
        size,
    };
    assert_eq!(check_header(&header(1, 0)), Ok(()));
    assert_eq!(check_header(&header(9, MAX_PAYLOAD_BYTES as u32)), Ok(()));
    assert_eq!(check_header(&header(0, 0)), Err(FramingError::Version(0)));
    assert_eq!(check_header(&header(2, 0)), Err(FramingError::Version(2)));
    assert!(matches!(
        check_header(&header(5, 0)),
        Err(FramingError::UnexpectedReply(_))
    ));
    let oversize = header(1, MAX_PAYLOAD_BYTES as u32 + 1);
    assert!(matches!(
        check_header(&oversize),
        Err(FramingError::Oversize { .. })
    ));
}

proptest! {
    #[test]
    fn no_payload_makes_decoding_panic(
        code in 0..50u32,
        payload in proptest::collection::vec(any::<u8>(), 0..128),
        fd_count in 0..4usize,
    ) {
        let _ = decode(frame(code, &payload, fd_count));
    }
}
