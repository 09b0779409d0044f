use proptest::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};
use zerocopy::FromBytes;

use super::*;
use crate::session::fuzzing::{ModelHost, model_offer, model_session, seed, session_bytes};
use crate::session::message::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, HEADER_BYTES,
    Header, LogArea, Region, SingleRegion, VringAddr, VringState,
};

struct Talk(Session<ModelHost>);

type Said = Result<Option<(u32, Vec<u8>)>, String>;

impl Talk {
    fn new() -> Self {
        Self(model_session(2))
    }

    fn say(&mut self, code: u32, flags: u32, payload: &[u8], fds: usize) -> Said {
        let frame = Frame {
            header: Header {
                code,
                flags: FLAG_VERSION | flags,
                size: payload.len() as u32,
            },
            payload: payload.to_vec(),
            fds: (0..fds)
                .map(|_| memfd_create("t", MemfdFlags::CLOEXEC).unwrap())
                .collect(),
        };
        let answer = self.0.handle(frame).map_err(|e| e.to_string())?;
        Ok(answer.map(|answer| {
            let (header, payload) = Header::read_from_prefix(&answer.bytes).unwrap();
            assert_eq!(
                (header.code, header.flags),
                (code, FLAG_VERSION | FLAG_REPLY)
            );
            assert_eq!(header.size as usize, answer.bytes.len() - HEADER_BYTES);
            (header.code, payload.to_vec())
        }))
    }

    fn tell(&mut self, code: u32, payload: &[u8], fds: usize) {
        assert_eq!(self.say(code, 0, payload, fds), Ok(None), "{}", name(code));
    }

    fn ack(&mut self, code: u32, payload: &[u8], fds: usize) -> u64 {
        let (_, payload) = self
            .say(code, FLAG_NEED_REPLY, payload, fds)
            .unwrap()
            .unwrap();
        u64::from_ne_bytes(payload.try_into().unwrap())
    }

    fn negotiate(&mut self) {
        self.tell(code::SET_FEATURES, &F_PROTOCOL_FEATURES.to_ne_bytes(), 0);
        self.tell(
            code::SET_PROTOCOL_FEATURES,
            &protocol::OFFERED.to_ne_bytes(),
            0,
        );
    }

    fn running(&mut self) -> Vec<u16> {
        self.0.host().running().iter().copied().collect()
    }

    fn base(&mut self, index: u32) -> u32 {
        let (_, reply) = self
            .say(code::GET_VRING_BASE, 0, &state(index, 0), 0)
            .unwrap()
            .unwrap();
        let state = VringState::read_from_bytes(&reply).unwrap();
        assert_eq!(state.index, index);
        state.num
    }
}

fn state(index: u32, num: u32) -> Vec<u8> {
    VringState { index, num }.as_bytes().to_vec()
}

fn addr(index: u32, flags: u32) -> Vec<u8> {
    let addr = VringAddr {
        index,
        flags,
        desc: 0x1000,
        used: 0x2000,
        avail: 0x3000,
        log: 0,
    };
    addr.as_bytes().to_vec()
}

fn region() -> Vec<u8> {
    let region = Region {
        guest: 0,
        size: 4096,
        user: 0,
        mmap_offset: 0,
    };
    SingleRegion { padding: 0, region }.as_bytes().to_vec()
}

/// What starts ring 0, in the order of most front ends.
fn setup() -> Vec<(u32, Vec<u8>, usize)> {
    vec![
        (code::ADD_MEM_REG, region(), 1),
        (code::SET_VRING_NUM, state(0, 64), 0),
        (code::SET_VRING_BASE, state(0, 5), 0),
        (code::SET_VRING_ADDR, addr(0, 0), 0),
        (code::SET_VRING_KICK, vec![0; 8], 1),
        (code::SET_VRING_CALL, vec![0; 8], 1),
        (code::SET_VRING_ENABLE, state(0, 1), 0),
    ]
}

fn started() -> Talk {
    let mut talk = Talk::new();
    talk.negotiate();
    for (code, payload, fds) in setup() {
        talk.tell(code, &payload, fds);
    }
    assert_eq!(talk.running(), [0]);
    talk
}

#[test]
fn acks_are_sent_only_when_negotiated_and_requested() {
    let mut talk = Talk::new();
    let without = protocol::OFFERED & !protocol::REPLY_ACK;
    talk.tell(code::SET_PROTOCOL_FEATURES, &without.to_ne_bytes(), 0);
    assert_eq!(talk.say(code::SET_OWNER, FLAG_NEED_REPLY, &[], 0), Ok(None));
    // The feature holds from the message on that negotiates it.
    assert_eq!(
        talk.ack(
            code::SET_PROTOCOL_FEATURES,
            &protocol::OFFERED.to_ne_bytes(),
            0
        ),
        0
    );
    assert_eq!(talk.ack(code::SET_OWNER, &[], 0), 0);
    talk.tell(code::SET_OWNER, &[], 0);
}

/// QEMU before 8.0 crashes if the back end of a filesystem offers CONFIG.
#[test]
fn a_device_offers_no_protocol_features_but_its_own() {
    let own = protocol::OFFERED & !protocol::CONFIG;
    let offer = Offer {
        protocol_features: own,
        ..model_offer(2)
    };
    let mut talk = Talk(Session::new(offer, ModelHost::default()));
    let (_, offered) = talk
        .say(code::GET_PROTOCOL_FEATURES, 0, &[], 0)
        .unwrap()
        .unwrap();
    assert_eq!(offered, own.to_ne_bytes());
    let all = protocol::OFFERED.to_ne_bytes();
    assert_eq!(talk.ack(code::SET_PROTOCOL_FEATURES, &all, 0), 1);
    let own = own.to_ne_bytes();
    assert_eq!(talk.ack(code::SET_PROTOCOL_FEATURES, &own, 0), 0);
}

/// QEMU 7.2 whose back end restarted before the device was started.
#[test]
fn front_end_that_negotiated_on_an_earlier_connection_gets_its_acks() {
    let mut talk = Talk::new();
    talk.tell(code::SET_FEATURES, &F_PROTOCOL_FEATURES.to_ne_bytes(), 0);
    for (code, payload, fds) in setup() {
        assert_eq!(talk.ack(code, &payload, fds), 0, "{}", name(code));
    }
    assert_eq!(talk.running(), [0]);
}

#[test]
fn a_message_with_an_answer_of_its_own_gets_that_alone() {
    let mut talk = Talk::new();
    talk.negotiate();
    let (_, features) = talk
        .say(code::GET_FEATURES, FLAG_NEED_REPLY, &[], 0)
        .unwrap()
        .unwrap();
    let features = u64::from_ne_bytes(features.try_into().unwrap());
    assert_eq!(features, 0x5_3000_0000 | F_LOG_ALL | F_PROTOCOL_FEATURES);
    let log = LogArea {
        size: 4096,
        offset: 0,
    };
    let reply = talk
        .say(code::SET_LOG_BASE, FLAG_NEED_REPLY, log.as_bytes(), 1)
        .unwrap();
    assert_eq!(reply, Some((code::SET_LOG_BASE, log.as_bytes().to_vec())));
    let (_, slots) = talk
        .say(code::GET_MAX_MEM_SLOTS, 0, &[], 0)
        .unwrap()
        .unwrap();
    assert_eq!(slots, 509_u64.to_ne_bytes());
    let (_, queues) = talk.say(code::GET_QUEUE_NUM, 0, &[], 0).unwrap().unwrap();
    assert_eq!(queues, 2_u64.to_ne_bytes());
}

#[test]
fn a_refusal_is_acknowledged_with_1_or_ends_the_connection() {
    let mut talk = Talk::new();
    talk.negotiate();
    assert_eq!(talk.ack(code::SET_VRING_NUM, &state(0, 63), 0), 1);
    assert_eq!(talk.ack(code::SET_VRING_NUM, &state(9, 64), 0), 1);
    assert_eq!(talk.ack(code::SET_VRING_NUM, &[0; 3], 0), 1);
    assert_eq!(talk.ack(code::SET_VRING_NUM, &state(0, 64), 0), 0);
    let error = talk
        .say(code::SET_VRING_NUM, 0, &state(9, 64), 0)
        .unwrap_err();
    assert_eq!(
        error,
        "SET_VRING_NUM: ring 9 does not exist, the device has 2"
    );
}

#[test]
fn an_invalid_ring_size_is_refused_with_the_valid_range() {
    let mut talk = Talk::new();
    talk.negotiate();
    for size in [0, 3, 65536, u32::MAX] {
        let error = talk.say(code::SET_VRING_NUM, 0, &state(0, size), 0);
        let message = format!(
            "SET_VRING_NUM: invalid ring size {size}: a split ring has a power of two up to 32768, a \
             packed one 1 to 32768"
        );
        // Without REPLY_ACK the device cannot report the error, so it closes the connection.
        assert_eq!(error, Err(message));
    }
}

/// The model's limit is 4096 entries.
#[test]
fn all_rings_of_a_device_together_are_bounded() {
    let mut talk = Talk(model_session(9));
    talk.negotiate();
    for index in 0..8 {
        talk.tell(code::SET_VRING_NUM, &state(index, 512), 0);
    }
    let error = talk.say(code::SET_VRING_NUM, 0, &state(8, 1024), 0);
    let expected = "SET_VRING_NUM: 5120 entries are too many: all rings of a device together have at \
                most 4096";
    assert_eq!(error, Err(expected.to_owned()));
    // Another size of the same ring counts once.
    talk.tell(code::SET_VRING_NUM, &state(0, 256), 0);
    talk.tell(code::SET_VRING_NUM, &state(8, 256), 0);
    let area = |queues, size| InflightArea {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: queues,
        queue_size: size,
        padding: 0,
    };
    let mut made = |queues, size| {
        let area = area(queues, size);
        let reply = talk.say(code::GET_INFLIGHT_FD, 0, area.as_bytes(), 0);
        let (_, payload) = reply.unwrap().unwrap();
        InflightArea::read_from_bytes(&payload).unwrap().queue_size
    };
    assert_eq!(made(4, 128), 1024);
    assert_eq!(made(1, 4096), 4096);
    // The device refuses with an area of size 0.
    assert_eq!(made(9, 128), 0);
    assert_eq!(made(2, 4096), 0);
}

#[test]
fn unknown_message_is_ignored_unless_an_ack_is_requested() {
    let mut talk = Talk::new();
    talk.negotiate();
    talk.tell(77, &[1, 2, 3], 1);
    assert_eq!(talk.ack(77, &[], 0), 1);
    assert_eq!(talk.ack(code::SET_OWNER, &[], 0), 0);
}

#[test]
fn bits_that_were_not_offered_are_refused_by_name() {
    let mut talk = Talk::new();
    let error = talk
        .say(code::SET_FEATURES, 0, &(1_u64 << 60).to_ne_bytes(), 0)
        .unwrap_err();
    assert_eq!(
        error,
        "SET_FEATURES: bits 0x1000000000000000 were not offered"
    );
    let status = (1_u64 << 16).to_ne_bytes();
    assert!(
        talk.say(code::SET_PROTOCOL_FEATURES, 0, &status, 0)
            .is_err()
    );
}

#[test]
fn a_ring_starts_with_the_last_of_its_parts_in_any_order() {
    let steps = setup();
    // Every rotation and the reverse: each part is the last one once.
    let mut orders: Vec<Vec<usize>> = (0..steps.len())
        .map(|by| (0..steps.len()).map(|at| (at + by) % steps.len()).collect())
        .collect();
    orders.push((0..steps.len()).rev().collect());
    for order in orders {
        let mut talk = Talk::new();
        talk.negotiate();
        let needed = order.iter().rposition(|&at| at != 2 && at != 5).unwrap();
        for (count, &at) in order.iter().enumerate() {
            let (code, payload, fds) = &steps[at];
            if *code == code::SET_VRING_BASE && talk.running() == [0] {
                continue;
            }
            talk.tell(*code, payload, *fds);
            assert_eq!(
                talk.running().is_empty(),
                count < needed,
                "{order:?} at {count}"
            );
        }
    }
}

#[test]
fn without_protocol_features_rings_begin_enabled() {
    let mut talk = Talk::new();
    talk.tell(code::SET_FEATURES, &0_u64.to_ne_bytes(), 0);
    for (code, payload, fds) in setup().into_iter().take(5) {
        talk.tell(code, &payload, fds);
    }
    assert_eq!(talk.running(), [0]);
}

#[test]
fn get_vring_base_stops_the_ring_until_the_next_kick_descriptor() {
    let mut talk = started();
    assert_eq!(talk.base(0), 5);
    assert_eq!(talk.running(), [0; 0]);
    talk.tell(code::SET_VRING_ENABLE, &state(0, 1), 0);
    assert_eq!(talk.running(), [0; 0]);
    assert_eq!(talk.base(0), 5);
    talk.tell(code::SET_VRING_KICK, &[0, 1, 0, 0, 0, 0, 0, 0], 0);
    assert_eq!(talk.running(), [0]);
}

#[test]
fn disabling_stops_and_enabling_starts() {
    let mut talk = started();
    for _ in 0..2 {
        talk.tell(code::SET_VRING_ENABLE, &state(0, 0), 0);
        assert_eq!(talk.running(), [0; 0]);
    }
    for _ in 0..2 {
        talk.tell(code::SET_VRING_ENABLE, &state(0, 1), 0);
        assert_eq!(talk.running(), [0]);
    }
}

#[test]
fn invalid_changes_to_a_running_ring_are_refused_and_it_goes_on() {
    let mut talk = started();
    assert_eq!(talk.ack(code::SET_VRING_NUM, &state(0, 128), 0), 1);
    assert_eq!(talk.ack(code::SET_VRING_BASE, &state(0, 1), 0), 1);
    let inflight = InflightArea {
        mmap_size: 4096,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 64,
        padding: 0,
    };
    assert_eq!(talk.ack(code::SET_INFLIGHT_FD, inflight.as_bytes(), 1), 1);
    assert_eq!(talk.ack(code::SET_VRING_NUM, &state(0, 64), 0), 0);
    assert_eq!(talk.running(), [0]);
}

#[test]
fn memory_logging_and_descriptors_change_under_a_running_ring() {
    let mut talk = started();
    talk.tell(code::SET_VRING_CALL, &[0; 8], 1);
    talk.tell(code::SET_VRING_ERR, &[0; 8], 1);
    talk.tell(code::SET_VRING_KICK, &[0; 8], 1);
    talk.tell(code::ADD_MEM_REG, &region(), 1);
    talk.tell(
        code::SET_FEATURES,
        &(F_PROTOCOL_FEATURES | F_LOG_ALL).to_ne_bytes(),
        0,
    );
    assert!(talk.0.machine().logging());
    talk.tell(code::SET_VRING_ADDR, &addr(0, 1), 0);
    talk.tell(code::SET_FEATURES, &F_PROTOCOL_FEATURES.to_ne_bytes(), 0);
    assert!(!talk.0.machine().logging());
    talk.tell(code::REM_MEM_REG, &region(), 0);
    assert_eq!(talk.running(), [0]);
    talk.tell(code::REM_MEM_REG, &region(), 0);
    assert_eq!(talk.running(), [0; 0], "no memory is left");
}

#[test]
fn resets_stop_every_ring() {
    let mut talk = started();
    talk.tell(code::RESET_OWNER, &[], 0);
    assert_eq!(talk.running(), [0; 0]);
    talk.tell(code::SET_VRING_ENABLE, &state(0, 1), 0);
    assert_eq!(talk.running(), [0]);
    talk.tell(code::RESET_DEVICE, &[], 0);
    assert_eq!(talk.running(), [0; 0]);
    assert_eq!(talk.base(0), 0);
}

#[test]
fn a_ring_larger_than_the_in_flight_record_does_not_start() {
    let mut talk = Talk::new();
    talk.negotiate();
    let inflight = InflightArea {
        mmap_size: 4096,
        mmap_offset: 0,
        num_queues: 1,
        queue_size: 32,
        padding: 0,
    };
    talk.tell(code::SET_INFLIGHT_FD, inflight.as_bytes(), 1);
    for (code, payload, fds) in setup().into_iter().take(6) {
        talk.tell(code, &payload, fds);
    }
    assert_eq!(talk.ack(code::SET_VRING_ENABLE, &state(0, 1), 0), 1);
    assert_eq!(talk.running(), [0; 0]);
}

#[test]
fn hostile_in_flight_layouts_are_refused() {
    let mut talk = Talk::new();
    talk.negotiate();
    for (queues, size) in [
        (0, 64),
        (3, 64),
        (1, 0),
        (1, 32769),
        (1, 8192),
        (u16::MAX, u16::MAX),
    ] {
        let area = InflightArea {
            mmap_size: u64::MAX,
            mmap_offset: 0,
            num_queues: queues,
            queue_size: size,
            padding: 0,
        };
        assert_eq!(talk.ack(code::SET_INFLIGHT_FD, area.as_bytes(), 1), 1);
        let reply = talk
            .say(code::GET_INFLIGHT_FD, 0, area.as_bytes(), 0)
            .unwrap()
            .unwrap();
        assert_eq!(reply.1, [0; 24], "no record is an answer of zeroes");
    }
}

#[test]
fn the_end_of_the_connection_stops_what_runs() {
    let talk = started();
    let Talk(session) = talk;
    // The model insists that only running rings are stopped, and each once.
    session.end();
}

#[test]
fn a_config_change_is_announced_only_on_a_negotiated_channel() {
    let mut talk = Talk::new();
    assert!(talk.0.config_change_channel().is_none());
    talk.tell(code::SET_BACKEND_REQ_FD, &[], 1);
    assert!(talk.0.config_change_channel().is_none());
    talk.negotiate();
    assert!(talk.0.config_change_channel().is_some());
}

/// A message that is likely to mean something.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let ring = 0..3u32;
    prop_oneof![
        (
            ring.clone(),
            prop_oneof![Just(64u32), Just(63), Just(0), any::<u32>()]
        )
            .prop_map(|(i, n)| seed(code::SET_VRING_NUM, 8, &state(i, n), 0)),
        (ring.clone(), any::<u16>()).prop_map(|(i, n)| seed(
            code::SET_VRING_BASE,
            8,
            &state(i, n.into()),
            0
        )),
        (ring.clone(), 0..2u32).prop_map(|(i, f)| seed(code::SET_VRING_ADDR, 8, &addr(i, f), 0)),
        (ring.clone(), 0..2u32).prop_map(|(i, n)| seed(code::SET_VRING_ENABLE, 8, &state(i, n), 0)),
        ring.clone()
            .prop_map(|i| seed(code::GET_VRING_BASE, 8, &state(i, 0), 0)),
        (12..15u32, ring, any::<bool>()).prop_map(|(c, i, nofd)| {
            let value = u64::from(i) | u64::from(nofd) << 8;
            seed(c, 8, &value.to_ne_bytes(), u8::from(!nofd))
        }),
        (37..39u32).prop_map(|c| seed(c, 8, &region(), 1)),
        prop_oneof![
            Just(0),
            Just(F_LOG_ALL),
            Just(F_PROTOCOL_FEATURES),
            any::<u64>()
        ]
        .prop_map(|bits| seed(code::SET_FEATURES, 8, &bits.to_ne_bytes(), 0)),
        Just(seed(
            code::SET_PROTOCOL_FEATURES,
            8,
            &protocol::OFFERED.to_ne_bytes(),
            0
        )),
        prop_oneof![
            Just(code::RESET_OWNER),
            Just(code::RESET_DEVICE),
            Just(code::GET_FEATURES)
        ]
        .prop_map(|c| seed(c, 8, &[], 0)),
        (
            0..50u32,
            proptest::collection::vec(any::<u8>(), 0..48),
            0..3u8
        )
            .prop_map(|(c, payload, fds)| seed(c, 8, &payload, fds)),
    ]
}

proptest! {
    #[test]
    fn rings_run_exactly_while_ready_whatever_is_said(
        messages in proptest::collection::vec(message(), 0..60)
    ) {
        let negotiated = seed(code::SET_PROTOCOL_FEATURES, 8, &protocol::OFFERED.to_ne_bytes(), 0);
        session_bytes(&[vec![negotiated], messages].concat().concat());
    }

    #[test]
    fn no_bytes_make_a_session_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        session_bytes(&bytes);
    }
}
