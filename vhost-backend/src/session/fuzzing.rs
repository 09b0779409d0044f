//! A whole session on arbitrary bytes, without a socket or a device: the body of a fuzz target, and of a
//! property test.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};
use zerocopy::{FromBytes, IntoBytes};

use super::codec::{Frame, check_header};
use super::machine::{Action, Machine, Offer};
use super::message::{FLAG_VERSION, HEADER_BYTES, Header, InflightArea, MAX_FDS};
use super::protocol::{Effect, Host, Session};
use crate::ring;

/// Messages taken from one input; what follows is ignored.
const MESSAGES_MAX: usize = 512;

/// A device with nothing behind it, which insists on the promises that the machine makes to a real one.
#[derive(Debug, Default)]
pub struct ModelHost {
    running: BTreeSet<u16>,
}

impl ModelHost {
    /// Rings that were started and not stopped.
    pub fn running(&self) -> &BTreeSet<u16> {
        &self.running
    }
}

impl Host for ModelHost {
    type Error = Infallible;

    fn perform(&mut self, action: Action, machine: &Machine) -> Result<Effect, Infallible> {
        Ok(match action {
            Action::StartRing(index) => {
                assert!(machine.ready(index), "a ring that is not ready was started");
                assert!(self.running.insert(index), "a ring was started twice");
                Effect::Done
            }
            Action::StopRing(index) | Action::AbandonRing(index) => {
                assert!(
                    self.running.remove(&index),
                    "a ring that did not run was stopped"
                );
                Effect::Stopped(machine.base(index))
            }
            Action::ReadConfig(head) => Effect::Config(vec![0; head.size as usize]),
            Action::CreateInflight { queues, size, .. } => Effect::Inflight(
                InflightArea {
                    mmap_size: 4096,
                    mmap_offset: 0,
                    num_queues: queues,
                    queue_size: size,
                    padding: 0,
                },
                descriptor(),
            ),
            _ => Effect::Done,
        })
    }
}

/// A session on a [`ModelHost`] with the given number of rings.
pub fn model_session(queues: u16) -> Session<ModelHost> {
    Session::new(model_offer(queues), ModelHost::default())
}

/// What that session offers.
pub fn model_offer(queues: u16) -> Offer {
    Offer {
        features: 0x5_3000_0000,
        protocol_features: super::message::protocol::OFFERED,
        queues,
        queue_size_max: ring::MAX_QUEUE_SIZE,
        entries_max: 4 * u32::from(ring::QEMU_QUEUE_SIZE_MAX),
        memory_slots: 509,
    }
}

/// Feeds `data` to a session as messages: per message one byte for the number of descriptors that come along,
/// then header and payload. Panics when a promise is broken: every reply is well formed, rings run exactly
/// while they should.
pub fn session_bytes(mut data: &[u8]) {
    let mut session = model_session(4);
    for _ in 0..MESSAGES_MAX {
        let Some((frame, rest)) = next_frame(data) else {
            break;
        };
        data = rest;
        let request = frame.header.code;
        let Ok(answer) = session.handle(frame) else {
            break;
        };
        if let Some(answer) = answer {
            let (header, payload) =
                Header::read_from_prefix(&answer.bytes).expect("a reply has a header");
            assert_eq!(header.code, request);
            assert_eq!(header.size as usize, payload.len());
        }
        let running: BTreeSet<u16> = session.machine().running().collect();
        assert_eq!(&running, session.host().running());
        assert!(running.iter().all(|&index| session.machine().ready(index)));
    }
    session.end();
}

fn next_frame(data: &[u8]) -> Option<(Frame, &[u8])> {
    let (&fds, data) = data.split_first()?;
    let (mut header, data) = Header::read_from_prefix(data).ok()?;
    // Most inputs should get past the version check, which is tested by itself.
    header.flags = header.flags & !0x7 | FLAG_VERSION;
    check_header(&header).ok()?;
    let payload = data.get(..header.size as usize)?;
    let frame = Frame {
        header,
        payload: payload.to_vec(),
        fds: (0..usize::from(fds) % (MAX_FDS + 1))
            .map(|_| descriptor())
            .collect(),
    };
    Some((frame, &data[payload.len()..]))
}

/// A message in the form that [`session_bytes`] takes, for seeds.
pub fn seed(code: u32, flags: u32, payload: &[u8], fds: u8) -> Vec<u8> {
    let header = Header {
        code,
        flags: flags | FLAG_VERSION,
        size: payload.len() as u32,
    };
    let mut bytes = Vec::with_capacity(1 + HEADER_BYTES + payload.len());
    bytes.push(fds);
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fn descriptor() -> OwnedFd {
    memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory files can be made")
}
