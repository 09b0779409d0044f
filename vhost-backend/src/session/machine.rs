//! What a session knows, and what each request means: request in, ordered actions out. No input or output
//! happens here.
//!
//! A ring runs exactly while it is *ready* ([`Machine::ready`]): it has a size, addresses, a kick and memory,
//! and is enabled. Whatever completes that, in whatever order, starts it; whatever breaks it stops it, and a
//! stopped ring is drained. A change under a running ring (memory, addresses, logging, descriptors) is a stop
//! and a start: a drained ring goes on where it stood, and there is one way of doing everything.
//!
//! The machine asks for actions in an order in which a failure leaves the session as it was: what can be
//! refused comes first, and the machine's own state changes only in [`Machine::on_done`], once an action was
//! carried out.

mod rings;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use zerocopy::IntoBytes;

use super::codec::Request;
use super::message::*;
use crate::inflight::RingLayout;
use crate::ring::packed;

pub use rings::{Kick, Ring};

/// What the device behind the session has to offer.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    /// Virtio features; those of vhost-user are added.
    pub features: u64,
    /// Protocol features, some of [`protocol::OFFERED`].
    pub protocol_features: u64,
    /// Number of rings.
    pub queues: u16,
    /// Entries of the largest ring.
    pub queue_size_max: u16,
    /// Largest sum of the sizes of all rings.
    pub entries_max: u32,
    /// Most memory regions.
    pub memory_slots: usize,
}

/// A request that is well formed but cannot be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Bits that were never offered.
    #[error("{name}: bits {bits:#x} were not offered")]
    NotOffered {
        /// The message.
        name: &'static str,
        /// The bits.
        bits: u64,
    },
    /// A ring that the device does not have.
    #[error("{name}: ring {index} does not exist, the device has {queues}")]
    NoSuchRing {
        /// The message.
        name: &'static str,
        /// The ring asked for.
        index: u32,
        /// Rings there are.
        queues: u16,
    },
    /// Not possible while the ring runs.
    #[error("{name}: ring {index} is running, it must be stopped with GET_VRING_BASE first")]
    Running {
        /// The message.
        name: &'static str,
        /// The ring.
        index: u16,
    },
    /// Invalid ring size.
    #[error(
        "{name}: invalid ring size {size}: a split ring has a power of two up to {size_max}, a packed \
         one 1 to {size_max}"
    )]
    Size {
        /// The message.
        name: &'static str,
        /// Requested entries.
        size: u32,
        /// Entries of the largest ring.
        size_max: u16,
    },
    /// All rings of the device have too many entries together.
    #[error(
        "{name}: {entries} entries are too many: all rings of a device together have at most \
         {entries_max}"
    )]
    Entries {
        /// The message.
        name: &'static str,
        /// Entries of all rings including this one.
        entries: u32,
        /// Limit of the device.
        entries_max: u32,
    },
    /// A number outside its range.
    #[error("{name}: {what} {value:#x} is not possible")]
    Value {
        /// The message.
        name: &'static str,
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Nobody knows this message.
    #[error("unknown message {0}")]
    Unknown(u32),
}

/// What the shell is to do. Actions are carried out in order; the first that fails ends the request.
#[derive(Debug)]
pub enum Action {
    /// Map these regions, in place of all there were.
    ReplaceMemory(Vec<(Region, OwnedFd)>),
    /// Map one more region.
    AddMemory(Region, OwnedFd),
    /// Let go of one region.
    RemoveMemory(Region),
    /// Stop the ring and drain it. Reported done with where to go on.
    StopRing(u16),
    /// The same for a front end that has gone: what did not begin is left to the next one.
    AbandonRing(u16),
    /// Start the ring as [`Machine::ring`] describes it.
    StartRing(u16),
    /// Make sure that a descriptor can be waited for as a kick.
    CheckKick(Arc<OwnedFd>),
    /// Make sure that a descriptor can be signalled.
    CheckSignal(Arc<OwnedFd>),
    /// Use the ring's new call descriptor, and signal it once: answers may have been given while there was
    /// none.
    NewCall(u16),
    /// Use the ring's new error descriptor.
    NewErr(u16),
    /// Map the dirty log.
    MapLog(LogArea, OwnedFd),
    /// Make a record of requests in flight.
    CreateInflight {
        /// What kind of rings.
        layout: RingLayout,
        /// Rings.
        queues: u16,
        /// Entries of each.
        size: u16,
    },
    /// Map the record of requests in flight that the front end kept.
    MapInflight(RingLayout, InflightArea, OwnedFd),
    /// Read the configuration space.
    ReadConfig(ConfigHead),
    /// Write the configuration space.
    WriteConfig {
        /// First byte.
        offset: u32,
        /// What to write.
        data: Vec<u8>,
    },
    /// Put the device back to how it was made.
    ResetDevice,
    /// Use this channel for requests to the front end.
    BackendChannel(OwnedFd),
    /// A change of the machine's own state, at its place in the order.
    Note(Note),
    /// Answer with this payload.
    Reply(Vec<u8>),
    /// Answer where to go on in a ring that was stopped.
    ReplyBase(u16),
}

/// A change of the machine's state that waits until the actions before it are done.
#[derive(Debug)]
pub enum Note {
    /// Features were acknowledged.
    Features(u64),
    /// Protocol features were acknowledged.
    Protocol(u64),
    /// Memory regions there are now.
    Regions(usize),
    /// There is a record of requests in flight with that many entries per ring.
    Inflight(u16),
    /// Something about one ring.
    Ring(u16, RingNote),
}

/// A change of one ring's description.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is a field of `Ring`")]
pub enum RingNote {
    Size(u16),
    Addr(VringAddr),
    Base(Option<u32>),
    Kick(Option<Kick>),
    Call(Option<Arc<OwnedFd>>),
    Err(Option<Arc<OwnedFd>>),
    Enabled(bool),
}

/// The state of one session, from connection to disconnection.
#[derive(Debug)]
pub struct Machine {
    offer: Offer,
    features: u64,
    /// None before SET_PROTOCOL_FEATURES.
    protocol: Option<u64>,
    regions: usize,
    inflight_size: Option<u16>,
    rings: Vec<Ring>,
}

type Plan = Result<Vec<Action>, Refusal>;

impl Machine {
    /// A session in which nothing was said yet.
    pub fn new(offer: Offer) -> Self {
        let rings = (0..offer.queues).map(|_| Ring::default()).collect();
        Self {
            offer,
            features: 0,
            protocol: None,
            regions: 0,
            inflight_size: None,
            rings,
        }
    }

    /// Features on offer, those of vhost-user among them.
    pub fn offered_features(&self) -> u64 {
        self.offer.features | F_LOG_ALL | F_PROTOCOL_FEATURES
    }

    /// Features the front end acknowledged.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether a message that asks for an acknowledgement gets one.
    ///
    /// A front end that has negotiated nothing on this connection and asks nevertheless did so on an earlier
    /// one: QEMU before 8.2 does not negotiate again if its back end restarts before the device was started,
    /// as happens at the destination of a migration. It would wait for ever.
    pub fn acknowledges(&self) -> bool {
        self.protocol
            .is_none_or(|bits| bits & protocol::REPLY_ACK != 0)
    }

    /// Protocol features the front end acknowledged.
    pub fn protocol_features(&self) -> u64 {
        self.protocol.unwrap_or(0)
    }

    /// Whether writes to guest memory are logged.
    pub fn logging(&self) -> bool {
        self.features & F_LOG_ALL != 0
    }

    /// What kind of rings the driver chose.
    pub fn layout(&self) -> RingLayout {
        match self.features & F_RING_PACKED {
            0 => RingLayout::Split,
            _ => RingLayout::Packed,
        }
    }

    /// Where a ring goes on: where the front end said, or it stopped, or else where any ring begins.
    pub fn base(&self, index: u16) -> u32 {
        let begin = match self.layout() {
            RingLayout::Packed => packed::BASE_AT_START,
            RingLayout::Split => 0,
        };
        self.ring(index).and_then(|ring| ring.base).unwrap_or(begin)
    }

    /// What is known of a ring.
    pub fn ring(&self, index: u16) -> Option<&Ring> {
        self.rings.get(usize::from(index))
    }

    /// Rings that run.
    pub fn running(&self) -> impl Iterator<Item = u16> + '_ {
        (0..self.offer.queues).filter(|&index| self.rings[usize::from(index)].running)
    }

    /// What a request asks for.
    pub fn request(&self, request: Request) -> Plan {
        match request {
            Request::GetFeatures => Ok(vec![u64_reply(self.offered_features())]),
            Request::GetProtocolFeatures => Ok(vec![u64_reply(self.offer.protocol_features)]),
            Request::GetQueueNum => Ok(vec![u64_reply(u64::from(self.offer.queues))]),
            Request::GetMaxMemSlots => Ok(vec![u64_reply(self.offer.memory_slots as u64)]),
            // Owning means nothing to a back end that serves one connection at a time.
            Request::SetOwner => Ok(vec![]),
            Request::SetFeatures(bits) => self.set_features(bits),
            Request::SetProtocolFeatures(bits) => self.set_protocol_features(bits),
            Request::ResetOwner => Ok(self.disable_all()),
            Request::ResetDevice => Ok(self.reset_device()),
            Request::SetMemTable(_) | Request::AddMemReg(..) | Request::RemMemReg(_) => {
                Ok(self.memory(request))
            }
            Request::SetLogBase(area, fd) => Ok(self.set_log_base(area, fd)),
            // A signal for each change of the log is optional; front ends read the log when they need it.
            Request::SetLogFd(_) => Ok(vec![]),
            Request::SetBackendReqFd(fd) => Ok(vec![Action::BackendChannel(fd)]),
            Request::GetConfig(head) => Ok(vec![Action::ReadConfig(head)]),
            Request::SetConfig { head, data } => Ok(vec![Action::WriteConfig {
                offset: head.offset,
                data,
            }]),
            Request::GetInflightFd(area) => self.get_inflight(area),
            Request::SetInflightFd(area, fd) => self.set_inflight(area, fd),
            Request::Unknown(code) => Err(Refusal::Unknown(code)),
            other => self.vring_request(other),
        }
    }

    /// Learns that an action was carried out; `base` is the answer to [`Action::StopRing`].
    pub fn on_done(&mut self, done: ActionDone) {
        match done {
            ActionDone::Started(index) => self.rings[usize::from(index)].running = true,
            ActionDone::Stopped(index, base) => {
                let ring = &mut self.rings[usize::from(index)];
                ring.running = false;
                ring.base = Some(base);
            }
            ActionDone::Note(note) => self.note(note),
        }
    }

    fn note(&mut self, note: Note) {
        match note {
            Note::Features(bits) => {
                self.features = bits;
                // Without protocol features there is no SET_VRING_ENABLE: rings begin enabled.
                if bits & F_PROTOCOL_FEATURES == 0 {
                    self.rings.iter_mut().for_each(|ring| ring.enabled = true);
                }
            }
            Note::Protocol(bits) => self.protocol = Some(bits),
            Note::Regions(count) => self.regions = count,
            Note::Inflight(size) => self.inflight_size = Some(size),
            Note::Ring(index, note) => self.rings[usize::from(index)].note(note),
        }
    }

    fn set_features(&self, bits: u64) -> Plan {
        let extra = bits & !self.offered_features();
        if extra != 0 {
            return Err(Refusal::NotOffered {
                name: "SET_FEATURES",
                bits: extra,
            });
        }
        let note = Action::Note(Note::Features(bits));
        if bits == self.features {
            // Even an acknowledgement of no feature at all enables rings.
            let mut actions = vec![note];
            actions.extend(self.start_all());
            return Ok(actions);
        }
        Ok(self.restarting(note, []))
    }

    fn set_protocol_features(&self, bits: u64) -> Plan {
        let extra = bits & !self.offer.protocol_features;
        if extra != 0 {
            return Err(Refusal::NotOffered {
                name: "SET_PROTOCOL_FEATURES",
                bits: extra,
            });
        }
        Ok(vec![Action::Note(Note::Protocol(bits))])
    }

    fn memory(&self, request: Request) -> Vec<Action> {
        let (action, regions) = match request {
            Request::SetMemTable(table) => {
                let count = table.len();
                (Action::ReplaceMemory(table), count)
            }
            Request::AddMemReg(region, fd) => (Action::AddMemory(region, fd), self.regions + 1),
            Request::RemMemReg(region) => {
                (Action::RemoveMemory(region), self.regions.saturating_sub(1))
            }
            _ => return vec![],
        };
        self.restarting(action, [Action::Note(Note::Regions(regions))])
    }

    fn set_log_base(&self, area: LogArea, fd: OwnedFd) -> Vec<Action> {
        let map = Action::MapLog(area, fd);
        let mut actions = if self.logging() {
            self.restarting(map, [])
        } else {
            vec![map]
        };
        actions.push(Action::Reply(area.as_bytes().to_vec()));
        actions
    }

    fn get_inflight(&self, area: InflightArea) -> Plan {
        let name = "GET_INFLIGHT_FD";
        let (queues, asked) = self.inflight_layout(name, &area)?;
        let size = RingLayout::entries_for(asked);
        self.check_entries(name, u32::from(queues) * u32::from(size))?;
        Ok(vec![Action::CreateInflight {
            layout: self.layout(),
            queues,
            size,
        }])
    }

    fn set_inflight(&self, area: InflightArea, fd: OwnedFd) -> Plan {
        let (queues, asked) = self.inflight_layout("SET_INFLIGHT_FD", &area)?;
        let size = self.layout().entries(area.mmap_size, queues, asked);
        self.check_entries("SET_INFLIGHT_FD", u32::from(queues) * u32::from(size))?;
        let area = InflightArea {
            queue_size: size,
            ..area
        };
        if let Some(index) = self.running().next() {
            let name = "SET_INFLIGHT_FD";
            return Err(Refusal::Running { name, index });
        }
        Ok(vec![
            Action::MapInflight(self.layout(), area, fd),
            Action::Note(Note::Inflight(size)),
        ])
    }

    fn inflight_layout(
        &self,
        name: &'static str,
        area: &InflightArea,
    ) -> Result<(u16, u16), Refusal> {
        let value = |what, value: u16| Refusal::Value {
            name,
            what,
            value: u64::from(value),
        };
        if area.num_queues == 0 || area.num_queues > self.offer.queues {
            return Err(value("number of rings", area.num_queues));
        }
        if area.queue_size == 0 || area.queue_size > self.offer.queue_size_max {
            return Err(value("ring size", area.queue_size));
        }
        Ok((area.num_queues, area.queue_size))
    }

    fn check_entries(&self, name: &'static str, entries: u32) -> Result<(), Refusal> {
        let entries_max = self.offer.entries_max;
        match entries <= entries_max {
            true => Ok(()),
            false => Err(Refusal::Entries {
                name,
                entries,
                entries_max,
            }),
        }
    }

    fn disable_all(&self) -> Vec<Action> {
        let mut actions = self.stop_all();
        actions.extend(
            (0..self.offer.queues)
                .map(|index| Action::Note(Note::Ring(index, RingNote::Enabled(false)))),
        );
        actions
    }

    /// Everything the driver set up is forgotten; what belongs to the connection (memory, protocol features,
    /// the back-end channel, the record in flight) stays.
    fn reset_device(&self) -> Vec<Action> {
        let mut actions = self.disable_all();
        for index in 0..self.offer.queues {
            let note = |note| Action::Note(Note::Ring(index, note));
            actions.extend([note(RingNote::Kick(None)), note(RingNote::Base(None))]);
        }
        actions.push(Action::ResetDevice);
        actions
    }

    fn stop_all(&self) -> Vec<Action> {
        self.running().map(Action::StopRing).collect()
    }

    fn start_all(&self) -> impl Iterator<Item = Action> + use<> {
        (0..self.offer.queues).map(Action::StartRing)
    }

    /// `first`, then a stop of every ring that runs, then `notes`, then a start of every ring that is ready.
    ///
    /// `first` maps something new and may fail; nothing else has happened then.
    fn restarting<const N: usize>(&self, first: Action, notes: [Action; N]) -> Vec<Action> {
        let mut actions = vec![first];
        actions.extend(self.stop_all());
        actions.extend(notes);
        actions.extend(self.start_all());
        actions
    }
}

/// What the shell has carried out.
#[derive(Debug)]
pub enum ActionDone {
    /// [`Action::StartRing`].
    Started(u16),
    /// [`Action::StopRing`], with where to go on.
    Stopped(u16, u32),
    /// [`Action::Note`].
    Note(Note),
}

fn u64_reply(value: u64) -> Action {
    Action::Reply(value.to_ne_bytes().to_vec())
}
