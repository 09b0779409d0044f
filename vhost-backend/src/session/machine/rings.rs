//! The requests about one ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Action, Machine, Note, Plan, Refusal, RingNote};
use crate::inflight::RingLayout;
use crate::session::codec::Request;
use crate::session::message::VringAddr;

/// Alignment of a descriptor table, in bytes.
const DESC_ALIGN_BYTES: u64 = 16;
/// Alignment of an available ring.
const AVAIL_ALIGN_BYTES: u64 = 2;
/// Alignment of a used ring.
const USED_ALIGN_BYTES: u64 = 4;

/// How the driver tells of new requests.
#[derive(Debug)]
pub enum Kick {
    /// By this eventfd.
    Fd(Arc<OwnedFd>),
    /// Not at all: the ring is polled.
    Polled,
}

/// One ring as the front end described it so far.
#[derive(Debug, Default)]
pub struct Ring {
    /// Entries, 0 before SET_VRING_NUM.
    pub size: u16,
    /// Where it lies.
    pub addr: Option<VringAddr>,
    /// Where to go on, current while the ring is stopped; none before anybody said. For a split ring the next
    /// index in the available ring, for a packed one [`crate::ring::packed`] says what.
    pub base: Option<u32>,
    /// How the driver tells of new requests; none before SET_VRING_KICK and after GET_VRING_BASE.
    pub kick: Option<Kick>,
    /// How the driver learns of answers.
    pub call: Option<Arc<OwnedFd>>,
    /// How the front end learns that the ring is broken.
    pub err: Option<Arc<OwnedFd>>,
    /// SET_VRING_ENABLE.
    pub enabled: bool,
    /// A data thread serves it.
    pub running: bool,
}

impl Ring {
    pub(super) fn note(&mut self, note: RingNote) {
        match note {
            RingNote::Size(size) => self.size = size,
            RingNote::Addr(addr) => self.addr = Some(addr),
            RingNote::Base(base) => self.base = base,
            RingNote::Kick(kick) => self.kick = kick,
            RingNote::Call(fd) => self.call = fd,
            RingNote::Err(fd) => self.err = fd,
            RingNote::Enabled(enabled) => self.enabled = enabled,
        }
    }
}

impl Machine {
    /// Whether everything is there that a ring needs to run. [`Action::StartRing`] for any other ring, or for
    /// one that runs, does nothing.
    pub fn ready(&self, index: u16) -> bool {
        self.ring(index).is_some_and(|ring| {
            ring.size > 0
                && ring.addr.is_some()
                && ring.kick.is_some()
                && ring.enabled
                && self.regions > 0
        })
    }

    /// Whether the record of requests in flight, if there is one, has room for the ring.
    pub fn inflight_fits(&self, index: u16) -> bool {
        match (self.inflight_size, self.ring(index)) {
            (Some(size), Some(ring)) => ring.size <= size,
            _ => true,
        }
    }

    pub(super) fn vring_request(&self, request: Request) -> Plan {
        match request {
            Request::SetVringNum { index, num } => self.set_num(index, num),
            Request::SetVringBase { index, base } => self.set_base(index, base),
            Request::SetVringAddr(addr) => self.set_addr(addr),
            Request::GetVringBase { index } => self.get_base(index),
            Request::SetVringEnable { index, enable } => self.set_enable(index, enable),
            Request::SetVringKick { index, fd } => self.set_kick(index, fd),
            Request::SetVringCall { index, fd } => {
                let index = self.index("SET_VRING_CALL", index)?;
                let fd = fd.map(Arc::new);
                let note = ring_note(index, RingNote::Call(fd.clone()));
                Ok(signalled(fd, [note, Action::NewCall(index)]))
            }
            Request::SetVringErr { index, fd } => {
                let index = self.index("SET_VRING_ERR", index)?;
                let fd = fd.map(Arc::new);
                let note = ring_note(index, RingNote::Err(fd.clone()));
                Ok(signalled(fd, [note, Action::NewErr(index)]))
            }
            _ => Ok(vec![]),
        }
    }

    fn index(&self, name: &'static str, index: u32) -> Result<u16, Refusal> {
        let queues = self.offer.queues;
        match u16::try_from(index) {
            Ok(known) if known < queues => Ok(known),
            _ => Err(Refusal::NoSuchRing {
                name,
                index,
                queues,
            }),
        }
    }

    /// The ring, which must not run.
    fn stopped(&self, name: &'static str, index: u32) -> Result<u16, Refusal> {
        let index = self.index(name, index)?;
        if self.rings[usize::from(index)].running {
            return Err(Refusal::Running { name, index });
        }
        Ok(index)
    }

    fn set_num(&self, index: u32, num: u32) -> Plan {
        let name = "SET_VRING_NUM";
        let known = self.index(name, index)?;
        if num == u32::from(self.rings[usize::from(known)].size) && num > 0 {
            return Ok(vec![]);
        }
        let index = self.stopped(name, index)?;
        // Front ends acknowledge the features, and with them the layout, before they describe rings.
        let fits = |size: &u16| match self.layout() {
            RingLayout::Split => size.is_power_of_two(),
            RingLayout::Packed => *size > 0,
        };
        let size = u16::try_from(num).ok();
        let size = size.filter(|size| fits(size) && *size <= self.offer.queue_size_max);
        let size = size.ok_or(Refusal::Size {
            name,
            size: num,
            size_max: self.offer.queue_size_max,
        })?;
        let others = self.rings.iter().enumerate();
        let others = others.filter(|(other, _)| *other != usize::from(index));
        let entries: u32 = others.map(|(_, ring)| u32::from(ring.size)).sum();
        self.check_entries(name, entries + num)?;
        Ok(start_after(index, RingNote::Size(size)))
    }

    fn set_base(&self, index: u32, base: u32) -> Plan {
        let name = "SET_VRING_BASE";
        let index = self.stopped(name, index)?;
        if self.layout() == RingLayout::Split && base > u32::from(u16::MAX) {
            return Err(Refusal::Value {
                name,
                what: "index",
                value: u64::from(base),
            });
        }
        Ok(vec![ring_note(index, RingNote::Base(Some(base)))])
    }

    fn set_addr(&self, addr: VringAddr) -> Plan {
        let name = "SET_VRING_ADDR";
        let index = self.index(name, addr.index)?;
        let checks = [
            ("descriptor table at", addr.desc, DESC_ALIGN_BYTES),
            ("available ring at", addr.avail, AVAIL_ALIGN_BYTES),
            ("used ring at", addr.used, USED_ALIGN_BYTES),
        ];
        for (what, value, align) in checks {
            if value % align != 0 {
                return Err(Refusal::Value { name, what, value });
            }
        }
        if self.rings[usize::from(index)].addr == Some(addr) {
            return Ok(vec![Action::StartRing(index)]);
        }
        Ok(self.restart_after(index, RingNote::Addr(addr)))
    }

    fn get_base(&self, index: u32) -> Plan {
        let index = self.index("GET_VRING_BASE", index)?;
        let mut actions = self.stop(index);
        actions.push(ring_note(index, RingNote::Kick(None)));
        actions.push(Action::ReplyBase(index));
        Ok(actions)
    }

    fn set_enable(&self, index: u32, enable: bool) -> Plan {
        let index = self.index("SET_VRING_ENABLE", index)?;
        if enable {
            return Ok(start_after(index, RingNote::Enabled(true)));
        }
        let mut actions = self.stop(index);
        actions.push(ring_note(index, RingNote::Enabled(false)));
        Ok(actions)
    }

    fn set_kick(&self, index: u32, fd: Option<OwnedFd>) -> Plan {
        let index = self.index("SET_VRING_KICK", index)?;
        let fd = fd.map(Arc::new);
        let kick = fd.clone().map_or(Kick::Polled, Kick::Fd);
        let check = fd.map(Action::CheckKick).into_iter();
        let restart = self.restart_after(index, RingNote::Kick(Some(kick)));
        Ok(check.chain(restart).collect())
    }

    fn stop(&self, index: u16) -> Vec<Action> {
        let running = self.rings[usize::from(index)].running;
        running
            .then_some(Action::StopRing(index))
            .into_iter()
            .collect()
    }

    fn restart_after(&self, index: u16, note: RingNote) -> Vec<Action> {
        let mut actions = self.stop(index);
        actions.extend(start_after(index, note));
        actions
    }
}

fn ring_note(index: u16, note: RingNote) -> Action {
    Action::Note(Note::Ring(index, note))
}

fn start_after(index: u16, note: RingNote) -> Vec<Action> {
    vec![ring_note(index, note), Action::StartRing(index)]
}

/// The check of a descriptor to be signalled, then the rest.
fn signalled(fd: Option<Arc<OwnedFd>>, rest: impl IntoIterator<Item = Action>) -> Vec<Action> {
    fd.map(Action::CheckSignal)
        .into_iter()
        .chain(rest)
        .collect()
}
