//! A queue pair on a device.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_transport::queue_pair::message::Window;
use fabric_transport::queue_pair::pair::{Body, Done, PARTS_MAX, Pair, Reach, Side, WINDOWS_MAX};
use fabric_transport::queue_pair::pairing::End;
use fabric_transport::queue_pair::regions::View;
use fabric_transport::queue_pair::slots::{
    BYTES, HEAD_BYTES, PAYLOAD_BYTES, RECEIVES, Slot, Slots,
};

use super::posted::{OnCompletion, Posted};
use super::windows::Windows;
use super::{Card, CardError};
use crate::verbs::address::{AckTimeout, Endpoint, Lid, Mtu, Psn, QpNumber, RemoteKey};
use crate::verbs::completion::{Completion, CompletionChannel, CompletionQueue};
use crate::verbs::gid::Gid;
use crate::verbs::memory::{Access, MemoryRegion, Segment};
use crate::verbs::post::{Payload, ReceiveChain, RemotePlace, SendChain, SendFlags, Work};
use crate::verbs::queue_pair::{Depths, QueuePair, RetryPolicy, Route};
use crate::verbs::status::Status;

/// Completions taken from a queue at once.
const TAKEN: usize = 16;
/// How long a queue pair that was ended may take to say what of its receives is left.
const END_TIME_MAX: Duration = Duration::from_millis(200);
/// A peer's card that acknowledges nothing is tried so long, and so often; cards may wait up to four times
/// that.
const ACK_TIMEOUT: Duration = Duration::from_millis(60);
/// See [`ACK_TIMEOUT`].
const RETRIES: u8 = 5;
/// Work requests that can be posted and not known to be done.
const POSTED_MAX: usize = 512;
/// Windows of a side that asks. With all of them in use requests go on the connection.
const WINDOWS: usize = 256;
/// READs that are served, and wanted, at once, if the device can do so many.
const READS_MAX: u8 = 16;
/// Set in the numbers of receives.
const IS_RECEIVE: u64 = 1 << 63;
const DEPTHS: Depths = Depths {
    sends: POSTED_MAX as u32,
    receives: RECEIVES as u32,
    // The head, and the parts of the payload.
    send_segments: 1 + PARTS_MAX as u32,
    receive_segments: 2,
    inline_bytes: 0,
};

/// See the module.
///
/// The first five fields are what the device holds, in the order in which it must be freed. Grouping them
/// would hide that order.
pub struct CardPair {
    // Before the queue pair, and that before the regions, and those before the memory: what is open or posted
    // ends with it.
    windows: Windows,
    pair: Arc<QueuePair>,
    queue: Arc<CompletionQueue>,
    channel: Arc<CompletionChannel>,
    region: MemoryRegion,
    view: View<MemoryRegion>,
    own: Endpoint,
    route: Route,
    chain: SendChain,
    receives: ReceiveChain,
    posted: Posted,
    /// What stands in the chain.
    staged: Vec<(u64, OnCompletion)>,
    /// Receives that are posted.
    receives_posted: u32,
    is_armed: bool,
    /// Something could not be taken up.
    failed: Option<String>,
    _slots: Arc<Slots>,
}

impl CardPair {
    /// A queue pair of this card over this memory.
    pub fn make(card: &Card, slots: &Arc<Slots>, side: Side) -> Result<Self, CardError> {
        let port = card.context.port(card.choice.port)?;
        let limits = card.context.limits()?;
        let mtu = port.mtu;
        let mtu = mtu.ok_or_else(|| CardError::Other("the port reports no MTU".to_owned()))?;
        let channel = Arc::new(CompletionChannel::new(&card.context)?);
        let entries = u32::from(RECEIVES) + POSTED_MAX as u32;
        let queue = CompletionQueue::new(&card.context, entries, Some(&channel), 0)?;
        let queue = Arc::new(queue);
        let pair = Arc::new(QueuePair::new(&card.domain, &queue, &queue, DEPTHS)?);
        // SAFETY: the pair holds the memory longer than the region. It is reached by pointers only; what is
        // read of it is read when the device is done with the slot.
        let region = unsafe {
            card.domain
                .register(slots.start(), BYTES, Access::LOCAL_WRITE)
        }?;
        let (windows, access) = match side {
            Side::Asks => (WINDOWS, Access::REMOTE_READ | Access::REMOTE_WRITE),
            Side::ReceivedRequest => (0, Access::NONE),
        };
        pair.init(card.choice.port, access)?;
        let own = Endpoint {
            queue_pair: pair.number(),
            psn: card.next_psn(),
            gid: card.choice.gid,
            lid: port.lid,
            mtu,
            reads_served: limits.reads_served.clamp(1, READS_MAX),
            reads_wanted: limits.reads_wanted.clamp(1, READS_MAX),
        };
        let mut made = Self {
            windows: Windows::new(&card.domain, windows)?,
            chain: pair.send_chain(POSTED_MAX),
            receives: ReceiveChain::new(usize::from(RECEIVES), 2),
            pair,
            queue,
            channel,
            region,
            view: View::new(&card.regions),
            own,
            route: Route {
                port: card.choice.port,
                gid: card.choice.index,
                traffic_class: 0,
                service_level: 0,
            },
            posted: Posted::new(POSTED_MAX),
            staged: Vec::with_capacity(POSTED_MAX),
            receives_posted: 0,
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

    fn of_slot(&self, at: usize, len: usize) -> Result<Segment, CardError> {
        let segment = self.region.segment(at..at + len);
        segment.ok_or_else(|| CardError::Other("no such slot".to_owned()))
    }

    fn push_receive(&mut self, slot: Slot) -> Result<(), CardError> {
        let segments = [
            self.of_slot(slot.head_at(), HEAD_BYTES)?,
            self.of_slot(slot.payload_at(), PAYLOAD_BYTES)?,
        ];
        let id = IS_RECEIVE | u64::from(slot.0);
        Ok(self.receives.push(id, &segments)?)
    }

    fn segment_at(&mut self, at: usize, len: usize) -> Result<Segment, CardError> {
        let found = self.view.find(at, len);
        let (region, from) = found.ok_or(CardError::Closed)?;
        region.segment(from..from + len).ok_or(CardError::Closed)
    }

    fn push_send(
        &mut self,
        slot: Slot,
        body: Body<'_>,
        closes: Option<u32>,
    ) -> Result<(), CardError> {
        let mut segments = [self.of_slot(slot.head_at(), HEAD_BYTES)?; 1 + PARTS_MAX];
        let mut used = 1;
        match body {
            Body::Page(0) => {}
            Body::Page(len) => {
                segments[1] = self.of_slot(slot.payload_at(), len as usize)?;
                used = 2;
            }
            Body::Parts(parts) => {
                for (part, place) in parts.iter().zip(&mut segments[1..]) {
                    *place = self.segment_at(part.iov_base.addr(), part.iov_len)?;
                    used += 1;
                }
            }
        }
        let work = closes.map_or(Work::Send, |key| Work::SendWithInvalidate(RemoteKey(key)));
        let payload = Payload::Segments(&segments[..used]);
        self.push(work, payload, SendFlags::SILENT, OnCompletion::Sent(slot))
    }

    fn push(
        &mut self,
        work: Work,
        payload: Payload<'_>,
        flags: SendFlags,
        then: OnCompletion,
    ) -> Result<(), CardError> {
        let id = self.posted.number();
        self.chain.push(id, work, payload, flags)?;
        self.staged.push((id, then));
        Ok(())
    }

    /// One work request for each window, from or to one place after the other, and what is known when the
    /// last is done. None is signalled: the last of what is posted with them is, and speaks for all.
    fn push_each(
        &mut self,
        place: NonNull<u8>,
        pieces: &[Window],
        work: impl Fn(RemotePlace) -> Work,
        then: OnCompletion,
    ) -> Result<(), CardError> {
        let mut at = place.addr().get();
        for (nth, piece) in pieces.iter().enumerate() {
            let segment = self.segment_at(at, piece.len as usize)?;
            at += piece.len as usize;
            let there = RemotePlace {
                address: piece.address,
                key: RemoteKey(piece.key),
            };
            let then = match nth + 1 == pieces.len() {
                true => then,
                false => OnCompletion::Nothing,
            };
            let payload = Payload::Segments(&[segment]);
            self.push(work(there), payload, SendFlags::SILENT, then)?;
        }
        Ok(())
    }

    fn push_closings(&mut self, token: u32, closed: Option<u32>) -> Result<bool, CardError> {
        let (first, others) = self.windows.of(token).ok_or(CardError::Closed)?;
        if closed != Some(first.0) {
            return Err(CardError::Other(
                "the peer has not closed what was opened for a request".to_owned(),
            ));
        }
        let keys: smallvec::SmallVec<[RemoteKey; WINDOWS_MAX]> = others.collect();
        for (nth, key) in keys.iter().enumerate() {
            let then = match nth + 1 == keys.len() {
                true => OnCompletion::Closed(token),
                false => OnCompletion::Nothing,
            };
            let work = Work::LocalInvalidate(*key);
            self.push(work, Payload::NONE, SendFlags::SILENT, then)?;
        }
        self.windows.closing(token);
        if keys.is_empty() {
            // SAFETY: there was but one, and the peer's message has closed it: its completion said so.
            unsafe { self.windows.closed(token) };
        }
        Ok(keys.is_empty())
    }

    fn open_all(
        &mut self,
        parts: &[libc::iovec],
        reach: Reach,
        token: u32,
        out: &mut Vec<Window>,
    ) -> Result<(), CardError> {
        for (nth, part) in parts.iter().enumerate() {
            let (start, bytes) = (part.iov_base.addr(), part.iov_len);
            let len = u32::try_from(bytes).map_err(|_| CardError::Closed)?;
            let (region, from) = self.view.find(start, bytes).ok_or(CardError::Closed)?;
            let range = from..from + bytes;
            let key = self.windows.open(region, range, reach, token, nth == 0);
            out.push(Window {
                address: start as u64,
                key: key.ok_or(CardError::Closed)?.0,
                len,
            });
        }
        Ok(())
    }

    /// What could not be asked for fails the queue pair with the next flush.
    fn note(&mut self, result: Result<(), CardError>) {
        if let Err(error) = result {
            self.failed.get_or_insert_with(|| error.to_string());
        }
    }

    fn post(&mut self) -> Result<(), CardError> {
        let receives = self.receives.len();
        let result = self.pair.post_receives(&mut self.receives);
        let taken = result.as_ref().err().map_or(receives, |error| error.taken);
        self.receives_posted += taken as u32;
        result?;
        self.chain.signal_last();
        let posted = &mut self.posted;
        let result = self.windows.post(&self.pair, &mut self.chain, || {
            let id = posted.number();
            posted.push(id, OnCompletion::Nothing);
            id
        });
        for (id, then) in self.staged.drain(..) {
            self.posted.push(id, then);
        }
        result
    }

    fn take(&mut self, done: &mut Vec<Done>) -> Result<(), CardError> {
        let mut failed = None;
        loop {
            let mut room = Completion::room::<TAKEN>();
            let taken = self.queue.poll(&mut room)?;
            for completion in &room[..taken] {
                let id = completion.id();
                let is_receive = id & IS_RECEIVE != 0;
                self.receives_posted -= u32::from(is_receive);
                match (completion.status(), is_receive) {
                    (Status::Success, true) => done.push(Done::Received {
                        slot: Slot((id & !IS_RECEIVE) as u16),
                        len: completion.bytes(),
                        closed: completion.invalidated().map(|key| key.0),
                    }),
                    (Status::Success, false) => self.arrived(id, done),
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

    fn arrived(&mut self, id: u64, done: &mut Vec<Done>) {
        let from = done.len();
        self.posted.done(id, done);
        for one in &done[from..] {
            if let Done::Closed(token) = *one {
                // SAFETY: our invalidations have succeeded, and were posted when the peer's had.
                unsafe { self.windows.closed(token) };
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
        let patience = RetryPolicy {
            timeout: AckTimeout::at_least(ACK_TIMEOUT),
            retries: RETRIES,
            receiver_not_ready_retries: 0,
        };
        let both = mtu.min(self.own.mtu);
        let served = self.own.reads_served.min(peer.reads_wanted).max(1);
        let wanted = self.own.reads_wanted.min(peer.reads_served).max(1);
        self.pair
            .ready_to_receive(&there, self.route, both, served)?;
        Ok(self.pair.ready_to_send(self.own.psn, wanted, patience)?)
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

    fn room(&self) -> usize {
        let used = self.posted.len() + self.staged.len() + self.windows.owed();
        POSTED_MAX.saturating_sub(used)
    }

    fn is_busy(&self) -> bool {
        self.posted.len() > 0
    }

    fn reaches(&mut self, part: &libc::iovec) -> bool {
        let found = self.view.find(part.iov_base.addr(), part.iov_len);
        found.is_some()
    }

    fn receive(&mut self, slot: Slot) {
        // There is room for every slot, and each is posted once.
        let pushed = self.push_receive(slot);
        self.note(pushed);
    }

    unsafe fn send(&mut self, slot: Slot, body: Body<'_>, closes: Option<u32>) {
        let pushed = self.push_send(slot, body, closes);
        self.note(pushed);
    }

    unsafe fn open(
        &mut self,
        parts: &[libc::iovec],
        reach: Reach,
        token: u32,
        windows: &mut Vec<Window>,
    ) -> bool {
        if self.windows.free() < parts.len() {
            return false;
        }
        let opened = self.open_all(parts, reach, token, windows);
        self.note(opened);
        true
    }

    fn close(&mut self, token: u32, closed: Option<u32>) -> Result<bool, String> {
        let pushed = self.push_closings(token, closed);
        pushed.map_err(|error| error.to_string())
    }

    unsafe fn read(&mut self, to: NonNull<u8>, windows: &[Window], token: u32) {
        let pushed = self.push_each(to, windows, Work::Read, OnCompletion::Read(token));
        self.note(pushed);
    }

    unsafe fn write(&mut self, from: NonNull<u8>, len: u32, windows: &[Window]) {
        let mut left = len;
        let pieces = windows.iter().map(|window| {
            let len = window.len.min(left);
            left -= len;
            Window { len, ..*window }
        });
        let mut pieces: smallvec::SmallVec<[Window; WINDOWS_MAX]> = pieces.collect();
        pieces.retain(|piece| piece.len > 0);
        let pushed = self.push_each(from, &pieces, Work::Write, OnCompletion::Nothing);
        self.note(pushed);
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
        while self.receives_posted > 0 && start.elapsed() < END_TIME_MAX {
            // That it has failed is known.
            let _ = self.take(done);
        }
        self.receives_posted == 0
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
