//! Carries one connection's messages through the machine: decode, plan, perform, answer.
//!
//! Acknowledgements follow the specification's REPLY_ACK: a message with the need-reply flag gets 0 or 1,
//! unless the front end has negotiated protocol features without it; a message that has an answer of its own
//! gets that and nothing else. What cannot be done and cannot be said ends the connection, for a front end
//! that believes in a ring that does not run would leave its guest hanging.

use std::os::fd::OwnedFd;

use zerocopy::{FromZeros, IntoBytes};

use super::codec::{self, DecodeError, Frame};
use super::machine::{Action, ActionDone, Machine, Offer, Refusal};
use super::message::{ConfigHead, InflightArea, code, name, protocol};

/// Refused messages of one connection that are logged as warnings; later ones are logged for debugging only,
/// so that a front end gone wild cannot fill the disk.
const LOGGED_REFUSALS_MAX: u32 = 16;

/// What an action gave.
#[derive(Debug)]
pub enum Effect {
    /// Nothing to tell.
    Done,
    /// The ring is drained; where to go on.
    Stopped(u32),
    /// Bytes of the configuration space.
    Config(Vec<u8>),
    /// A record of requests in flight, for the front end to keep.
    Inflight(InflightArea, OwnedFd),
}

/// Carries out actions: the real device, or a test's.
pub trait Host {
    /// Why an action failed.
    type Error: std::error::Error + 'static;

    /// Carries out one action. `machine` describes rings and features at this point of the plan.
    fn perform(&mut self, action: Action, machine: &Machine) -> Result<Effect, Self::Error>;
}

/// A message to send.
#[derive(Debug)]
pub struct Answer {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Goes along.
    pub fd: Option<OwnedFd>,
}

/// Why a message was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum MessageError<E: std::error::Error> {
    /// It is malformed.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// It does not fit the session.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Carrying it out failed.
    #[error("{name}: {source}")]
    Failed {
        /// The message.
        name: &'static str,
        /// Why.
        source: E,
    },
    /// The record of requests in flight has fewer entries than the ring.
    #[error("{name}: ring {index} has more entries than the in-flight record has room for")]
    InflightTooSmall {
        /// The message.
        name: &'static str,
        /// The ring.
        index: u16,
    },
}

/// One connection.
#[derive(Debug)]
pub struct Session<H> {
    machine: Machine,
    host: H,
    /// For requests to the front end.
    channel: Option<OwnedFd>,
    refusals: u32,
}

impl<H: Host> Session<H> {
    /// A connection on which nothing was said yet.
    pub fn new(offer: Offer, host: H) -> Self {
        Self {
            machine: Machine::new(offer),
            host,
            channel: None,
            refusals: 0,
        }
    }

    /// What is known of the session.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The device.
    pub fn host(&mut self) -> &mut H {
        &mut self.host
    }

    /// Where to send [`code::BACKEND_CONFIG_CHANGE_MSG`] when the configuration space changed, if the front
    /// end wants to be told.
    pub fn config_change_channel(&self) -> Option<&OwnedFd> {
        let wanted = protocol::BACKEND_REQ | protocol::CONFIG;
        let negotiated = self.machine.protocol_features() & wanted == wanted;
        self.channel.as_ref().filter(|_| negotiated)
    }

    /// Ends the connection: every ring is stopped and drained.
    pub fn end(mut self) {
        let running: Vec<u16> = self.machine.running().collect();
        for index in running {
            if let Err(error) = self.host.perform(Action::AbandonRing(index), &self.machine) {
                tracing::error!(ring = index, %error, "ring could not be stopped");
            }
        }
    }

    /// Handles one message. An error means that the connection must end.
    pub fn handle(&mut self, frame: Frame) -> Result<Option<Answer>, MessageError<H::Error>> {
        let (request, needs_ack) = (frame.header.code, frame.needs_ack());
        let outcome = self.carry_out(frame);
        let acknowledge = needs_ack && self.machine.acknowledges();
        match outcome {
            Ok(Some(answer)) => Ok(Some(answer)),
            Ok(None) => Ok(acknowledge.then(|| ack(request, 0))),
            Err(error) => {
                self.log_refusal(&error);
                match request {
                    code::GET_CONFIG => Ok(Some(reply(request, &[]))),
                    code::GET_INFLIGHT_FD => {
                        Ok(Some(reply(request, InflightArea::new_zeroed().as_bytes())))
                    }
                    _ if has_own_reply(request) => Err(error),
                    _ if acknowledge => Ok(Some(ack(request, 1))),
                    // A message from the future: whoever needs it to work asks for an acknowledgement.
                    _ if matches!(error, MessageError::Refused(Refusal::Unknown(_))) => Ok(None),
                    _ => Err(error),
                }
            }
        }
    }

    fn log_refusal(&mut self, error: &MessageError<H::Error>) {
        self.refusals = self.refusals.saturating_add(1);
        if self.refusals <= LOGGED_REFUSALS_MAX {
            tracing::warn!(%error, "vhost-user message refused");
        } else {
            tracing::debug!(%error, "vhost-user message refused");
        }
    }

    fn carry_out(&mut self, frame: Frame) -> Result<Option<Answer>, MessageError<H::Error>> {
        let request = frame.header.code;
        let message = codec::decode(frame)?;
        tracing::trace!(?message, "received");
        let plan = self.machine.request(message)?;
        let mut answer = None;
        for action in plan {
            if let Some(made) = self.step(request, action)? {
                answer = Some(made);
            }
        }
        Ok(answer)
    }

    fn step(
        &mut self,
        request: u32,
        action: Action,
    ) -> Result<Option<Answer>, MessageError<H::Error>> {
        match action {
            Action::Reply(payload) => Ok(Some(reply(request, &payload))),
            Action::ReplyBase(index) => {
                let state = [u32::from(index), self.machine.base(index)];
                Ok(Some(reply(request, state.as_bytes())))
            }
            Action::Note(note) => {
                self.machine.on_done(ActionDone::Note(note));
                Ok(None)
            }
            Action::BackendChannel(fd) => {
                self.channel = Some(fd);
                Ok(None)
            }
            Action::StartRing(index) => self.start(request, index).map(|()| None),
            Action::StopRing(index) => {
                if let Effect::Stopped(base) = self.perform(request, action)? {
                    self.machine.on_done(ActionDone::Stopped(index, base));
                }
                Ok(None)
            }
            Action::ReadConfig(head) => match self.perform(request, action)? {
                Effect::Config(bytes) => Ok(Some(config_reply(request, head, &bytes))),
                _ => Ok(None),
            },
            other => match self.perform(request, other)? {
                Effect::Inflight(area, fd) => Ok(Some(Answer {
                    fd: Some(fd),
                    ..reply(request, area.as_bytes())
                })),
                _ => Ok(None),
            },
        }
    }

    /// Starts a ring that is ready and does not run yet.
    fn start(&mut self, request: u32, index: u16) -> Result<(), MessageError<H::Error>> {
        let running = self.machine.ring(index).is_some_and(|ring| ring.running);
        if running || !self.machine.ready(index) {
            return Ok(());
        }
        if !self.machine.inflight_fits(index) {
            let name = name(request);
            return Err(MessageError::InflightTooSmall { name, index });
        }
        self.perform(request, Action::StartRing(index))?;
        self.machine.on_done(ActionDone::Started(index));
        Ok(())
    }

    fn perform(&mut self, request: u32, action: Action) -> Result<Effect, MessageError<H::Error>> {
        self.host
            .perform(action, &self.machine)
            .map_err(|source| MessageError::Failed {
                name: name(request),
                source,
            })
    }
}

fn reply(request: u32, payload: &[u8]) -> Answer {
    Answer {
        bytes: codec::encode_reply(request, payload),
        fd: None,
    }
}

fn ack(request: u32, code: u64) -> Answer {
    reply(request, &code.to_ne_bytes())
}

fn config_reply(request: u32, head: ConfigHead, bytes: &[u8]) -> Answer {
    reply(request, &[head.as_bytes(), bytes].concat())
}

/// Messages whose answer is not an acknowledgement.
fn has_own_reply(request: u32) -> bool {
    matches!(
        request,
        code::GET_FEATURES
            | code::GET_PROTOCOL_FEATURES
            | code::GET_QUEUE_NUM
            | code::GET_VRING_BASE
            | code::GET_CONFIG
            | code::GET_INFLIGHT_FD
            | code::GET_MAX_MEM_SLOTS
            | code::SET_LOG_BASE
    )
}

#[cfg(test)]
mod tests;
