//! The machines against each other and against hostile bytes, all without sockets.

use std::time::{Duration, SystemTime};

use fabric_types::block::BlockStamp;
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Incarnation, NodeId, Refusal, Reply, Request};
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::caller::{Caller, LinkError, QUIET_TICKS_MAX, shape_of};
use super::frame::PAYLOAD_BYTES_MAX;
use super::fuzzing::{agreed, bytes, drain, fill, request};
use super::handshake::{Established, Handshake, HandshakeError};
use super::hello::{CREDIT_BYTES, CREDIT_REQUESTS, Hello, Refused, VERSIONS, Wire};
use super::identity::{Identity, node_name};
use super::responder::{ALIVE_TICKS, Answer, ReceivedRequest, Responder, STUCK_TICKS_MAX, cost};
use super::session::State;
use super::shape;

mod exchange;
pub mod handshakes;

proptest! {
    #[test]
    fn hostile_bytes_end_a_connection_and_nothing_else(
        data in proptest::collection::vec(any::<u8>(), 0..2000),
        repair: bool,
    ) {
        bytes(&data, repair);
    }
}

#[test]
fn hostile_frames_end_a_connection_and_nothing_else() {
    // Frames that are nearly right get furthest.
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut memory = vec![7u8; 8192];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: memory.len(),
    }];
    for _ in 0..2000 {
        let mut caller = Caller::new(&agreed());
        for id in 0..3 {
            let request = request(id, random.random(), 0, &list, 8192);
            let mut crcs = Vec::new();
            let shape = shape_of(&request);
            if let Some(list) = shape.payload {
                // SAFETY: the list lies above.
                unsafe { shape::sums(&list, 0, 8192, &mut crcs) };
            }
            // SAFETY: the memory outlives the caller.
            unsafe { caller.send(&request, &shape, &crcs) };
        }
        let mut data = drain(caller.queue(), usize::MAX);
        for _ in 0..random.random_range(0..4) {
            let at = random.random_range(0..data.len().min(200));
            data[at] = random.random();
        }
        bytes(&data, random.random());
    }
}
