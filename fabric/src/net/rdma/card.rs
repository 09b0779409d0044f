//! Queue pairs on a device, by verbs.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::choice::{Choice, choose};
use super::pair::{Done, Pair, Port};
use super::pairing::End;
use super::slots::{BYTES, HEAD_BYTES, RECEIVES, SENDS, Slot, Slots};
use super::survey::Survey;
use super::verbs::address::{AckTimeout, Endpoint, Lid, Mtu, Psn, QpNumber};
use super::verbs::completion::{Completion, CompletionChannel, CompletionQueue};
use super::verbs::context::Context;
use super::verbs::device::DeviceList;
use super::verbs::error::VerbsError;
use super::verbs::gid::Gid;
use super::verbs::memory::{Access, MemoryRegion, ProtectionDomain, Segment};
use super::verbs::post::{ChainError, Manner, Payload, ReceiveChain, SendChain, Work};
use super::verbs::queue_pair::{Depths, Patience, PostError, QueuePair, Route};
use super::verbs::status::Status;

/// Completions taken from a queue at once.
const TAKEN: usize = 16;
/// How long a queue pair that was ended may take to say what of its receives is left.
const END_TIME_MAX: Duration = Duration::from_millis(200);
/// A peer's card that acknowledges nothing is tried so long, and so often; cards may wait up to four times that.
const ACK_TIMEOUT: Duration = Duration::from_millis(60);
/// See [`ACK_TIMEOUT`].
const RETRIES: u8 = 5;
const DEPTHS: Depths = Depths {
    sends: SENDS as u32,
    receives: RECEIVES as u32,
    send_segments: 2,
    receive_segments: 2,
    inline_bytes: 0,
};

/// Why there is none, or it has failed.
#[derive(Debug, thiserror::Error)]
enum CardError {
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    #[error("{}", .0.source)]
    Post(#[from] PostError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error("{0}")]
    Other(String),
}

/// The port of a device that a node's data address belongs to, opened.
pub struct Card {
    context: Context,
    domain: ProtectionDomain,
    choice: Choice,
    /// Where the next queue pair begins to number its packets: a packet of an older one of the same number is none of its.
    psn: AtomicU32,
}

impl Card {
    /// The port for this address. `Err` says why there is none, for people.
    pub fn open(address: IpAddr) -> Result<Self, String> {
        let survey = Survey::take().map_err(|error| error.to_string())?;
        let choice = choose(&survey, address).map_err(|unfit| unfit.to_string())?;
        let open = || -> Result<Self, CardError> {
            let list = DeviceList::get()?;
            let device = list.find(&choice.device);
            let device = device.ok_or_else(|| CardError::Other("the device is gone".to_owned()))?;
            let context = device.open()?;
            let clock = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
            Ok(Self {
                domain: ProtectionDomain::new(&context)?,
                context,
                choice: choice.clone(),
                psn: AtomicU32::new(clock.subsec_nanos()),
            })
        };
        open().map_err(|error| format!("{choice}: {error}"))
    }

    /// Which it is, for people.
    pub fn name(&self) -> String {
        self.choice.to_string()
    }

    fn make(&self, slots: &Arc<Slots>) -> Result<CardPair, CardError> {
        let port = self.context.port(self.choice.port)?;
        let mtu = port.mtu;
        let mtu =
            mtu.ok_or_else(|| CardError::Other("the port tells no size of packets".to_owned()))?;
        let channel = Arc::new(CompletionChannel::new(&self.context)?);
        let entries = u32::from(RECEIVES) + u32::from(SENDS);
        let queue = CompletionQueue::new(&self.context, entries, Some(&channel), 0)?;
        let queue = Arc::new(queue);
        let pair = QueuePair::new(&self.domain, &queue, &queue, DEPTHS)?;
        // SAFETY: the pair holds the memory longer than the region. It is reached by pointers only; what is read of it is read when the
        // device is done with the slot.
        let region = unsafe {
            self.domain
                .register(slots.start(), BYTES, Access::LOCAL_WRITE)
        }?;
        pair.init(self.choice.port, Access::NONE)?;
        let own = Endpoint {
            queue_pair: pair.number(),
            psn: Psn::new(self.psn.fetch_add(0x3_1415, Ordering::Relaxed)),
            gid: self.choice.gid,
            lid: port.lid,
            mtu,
            reads_served: 1,
            reads_wanted: 1,
        };
        let mut made = CardPair {
            chain: pair.send_chain(usize::from(SENDS)),
            receives: ReceiveChain::new(usize::from(RECEIVES), 2),
            pair,
            queue,
            channel,
            region,
            own,
            route: Route {
                port: self.choice.port,
                gid: self.choice.index,
                traffic_class: 0,
                service_level: 0,
            },
            sends: Vec::with_capacity(usize::from(SENDS)),
            sent: VecDeque::with_capacity(usize::from(SENDS)),
            posted: 0,
            is_armed: false,
            failed: None,
            _slots: Arc::clone(slots),
        };
        for slot in Slot::receives() {
            made.push_receive(slot)?;
        }
        made.post()?;
        Ok(made)
    }
}

impl Port for Card {
    fn open(&self, slots: &Arc<Slots>) -> Result<Box<dyn Pair>, String> {
        let made = self.make(slots);
        let made = made.map_err(|error| format!("{}: {error}", self.choice))?;
        Ok(Box::new(made))
    }
}

struct CardPair {
    // Before the region, and that before the memory: what is posted ends with it.
    pair: QueuePair,
    queue: Arc<CompletionQueue>,
    channel: Arc<CompletionChannel>,
    region: MemoryRegion,
    own: Endpoint,
    route: Route,
    chain: SendChain,
    receives: ReceiveChain,
    /// To be posted with the next flush.
    sends: Vec<(Slot, u32)>,
    /// Posted, in order. Only the last of each flush tells of itself.
    sent: VecDeque<Slot>,
    /// Receives that are posted.
    posted: u32,
    is_armed: bool,
    /// A receive could not be taken up.
    failed: Option<String>,
    _slots: Arc<Slots>,
}

impl CardPair {
    fn segments(&self, slot: Slot, payload_len: usize) -> Result<[Segment; 2], CardError> {
        let of = |at: usize, len: usize| self.region.segment(at..at + len);
        let head = of(slot.head_at(), HEAD_BYTES);
        let both = head.zip(of(slot.payload_at(), payload_len));
        let (head, payload) = both.ok_or_else(|| CardError::Other("no such slot".to_owned()))?;
        Ok([head, payload])
    }

    fn push_receive(&mut self, slot: Slot) -> Result<(), CardError> {
        let segments = self.segments(slot, super::slots::PAYLOAD_BYTES)?;
        Ok(self.receives.push(u64::from(slot.0), &segments)?)
    }

    fn post(&mut self) -> Result<(), CardError> {
        let receives = self.receives.len() as u32;
        self.pair.post_receives(&mut self.receives)?;
        self.posted += receives;
        let sends = std::mem::take(&mut self.sends);
        for (nth, (slot, payload_len)) in sends.iter().enumerate() {
            let segments = self.segments(*slot, *payload_len as usize)?;
            let used = if *payload_len > 0 { 2 } else { 1 };
            let is_last = nth + 1 == sends.len();
            let manner = if is_last {
                Manner::SIGNALLED
            } else {
                Manner::SILENT
            };
            let payload = Payload::Segments(&segments[..used]);
            self.chain
                .push(u64::from(slot.0), Work::Send, payload, manner)?;
        }
        self.pair.post(&mut self.chain)?;
        self.sent.extend(sends.iter().map(|(slot, _)| *slot));
        self.sends = sends;
        self.sends.clear();
        Ok(())
    }

    fn take(&mut self, done: &mut Vec<Done>) -> Result<(), CardError> {
        let mut failed = None;
        loop {
            let mut room = Completion::room::<TAKEN>();
            let taken = self.queue.poll(&mut room)?;
            for completion in &room[..taken] {
                let slot = Slot(completion.id() as u16);
                let is_receive = slot.0 < RECEIVES;
                self.posted -= u32::from(is_receive);
                match (completion.status(), is_receive) {
                    (Status::Success, true) => {
                        done.push(Done::Received(slot, completion.bytes()));
                    }
                    (Status::Success, false) => self.arrived(slot, done),
                    // What is flushed has no reason of its own.
                    (status, _) if status == Status::Flushed => {
                        failed.get_or_insert(status);
                    }
                    (status, _) => failed = Some(status),
                }
            }
            if taken < TAKEN {
                break;
            }
        }
        match failed {
            Some(status) => Err(CardError::Other(status.to_string())),
            None => Ok(()),
        }
    }

    /// This one has arrived, and all that were sent before.
    fn arrived(&mut self, last: Slot, done: &mut Vec<Done>) {
        while let Some(slot) = self.sent.pop_front() {
            done.push(Done::Sent(slot));
            if slot == last {
                return;
            }
        }
    }

    fn connect_with(&mut self, peer: &End) -> Result<(), CardError> {
        let mtu = Mtu::from_code(u32::from(peer.mtu));
        let mtu = mtu.ok_or_else(|| CardError::Other("a packet size that is none".to_owned()))?;
        let there = Endpoint {
            queue_pair: QpNumber(peer.queue_pair),
            psn: Psn::new(peer.psn),
            gid: Gid::from_bytes(peer.gid),
            lid: Lid(peer.lid),
            mtu,
            reads_served: peer.reads_served,
            reads_wanted: peer.reads_wanted,
        };
        let patience = Patience {
            timeout: AckTimeout::at_least(ACK_TIMEOUT),
            retries: RETRIES,
            receiver_not_ready_retries: 0,
        };
        let both = mtu.min(self.own.mtu);
        self.pair.ready_to_receive(&there, self.route, both, 1)?;
        Ok(self.pair.ready_to_send(self.own.psn, 1, patience)?)
    }
}

impl Pair for CardPair {
    fn end(&self) -> End {
        End {
            queue_pair: self.own.queue_pair.0,
            psn: self.own.psn.get(),
            gid: self.own.gid.bytes(),
            lid: self.own.lid.0,
            mtu: self.own.mtu.code() as u8,
            reads_served: self.own.reads_served,
            reads_wanted: self.own.reads_wanted,
            receives: RECEIVES,
            key: [0; 16],
        }
    }

    fn connect(&mut self, peer: &End) -> Result<(), String> {
        self.connect_with(peer).map_err(|error| error.to_string())
    }

    fn receive(&mut self, slot: Slot) {
        // There is room for every slot, and each is posted once.
        if let Err(error) = self.push_receive(slot) {
            self.failed = Some(error.to_string());
        }
    }

    fn send(&mut self, slot: Slot, payload_len: u32) {
        self.sends.push((slot, payload_len));
    }

    fn flush(&mut self) -> Result<(), String> {
        match self.failed.take() {
            Some(reason) => Err(reason),
            None => self.post().map_err(|error| error.to_string()),
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        self.take(done).map_err(|error| error.to_string())
    }

    fn end_all(&mut self, done: &mut Vec<Done>) -> bool {
        if let Err(error) = self.pair.fail() {
            tracing::warn!(%error, "a queue pair cannot be ended");
        }
        let start = Instant::now();
        while self.posted > 0 && start.elapsed() < END_TIME_MAX {
            // That it has failed is known.
            let _ = self.take(done);
        }
        self.posted == 0
    }

    fn arm(&mut self) -> Result<(), String> {
        if self.is_armed {
            return Ok(());
        }
        self.is_armed = true;
        self.queue.arm().map_err(|error| error.to_string())
    }

    fn heard(&mut self) {
        while let Ok(Some(_)) = self.channel.next_event() {
            self.is_armed = false;
        }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }
}
