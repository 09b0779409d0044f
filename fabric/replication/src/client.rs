//! The client machine: guest requests in, requests to replicas out, answers in, outcomes out.
//!
//! A guest request is split at chunk boundaries into pieces. A piece goes to every replica that receives
//! writes (a read to one), and is done when every in-sync replica answered. One that failed is reported, and
//! the piece is parked until a newer map leaves that replica out: invariant *Shrink before ack*. While any
//! answer is outstanding a piece is never finished, for its replica may still be reading or filling the
//! guest's buffers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId};
use fabric_types::io::{self, IoError, IoResult, Op, Submit, Tag};
use fabric_types::membership::{Members, REPLICAS_MAX, ReplicaSet};
use fabric_types::message::PIECES_MAX;
use fabric_types::slab::{Key, Slab};
use fabric_types::{Command, Epoch, NodeId, PgId, Refusal, Reply, Request, RequestId, Sequence};

use super::segments::{ListRefusal, SegmentPool, Segments};
use super::share::may_take;
use super::volume::{Finished, VolumeState};

mod answers;
mod data;
mod fences;
mod flush;
mod full;
mod group_table;
mod hedge;
mod ios;
mod latency;
mod link;
mod lost;
mod maps;
mod parts;
mod piece;
mod places;
mod private;
mod repair;
mod shares;
mod tally;
mod ticks;
mod unsent;
mod volumes;
mod waiting;
mod window;
mod writes;

use answers::{Next, all_but_one};
use data::pieces_of;
use full::{Asks, FullReplicas, NoSpaceStep};
use group_table::GroupTable;
use hedge::Hedging;
use ios::{GuestIo, NO_IO, check};
use piece::{Piece, Stage};
use ticks::Ticks;
use unsent::Unsent;
use volumes::Volumes;
use window::Window;

pub use window::WindowSizes;

/// Guest requests in flight per data thread; more are answered busy.
pub const IOS_MAX: u32 = 4096;

/// How often [`Client::on_tick`] is called while something waits for it.
pub const TICK: Duration = Duration::from_millis(1);

/// Largest read or write; a longer one is refused as out of range. Far above what guests send (1 to 4 MiB).
pub const TRANSFER_BYTES_MAX: u64 = 64 << 20;

/// Pieces of one discard, write-zeroes or flush that are in flight together; the next follow as these are
/// answered. A guest may discard a whole disk in one request.
const RANGE_WINDOW: u32 = 16;

/// The way to replicas.
pub trait Transport {
    /// Sends a request. `Some`: answered already. `None`: the answer comes by [`Client::on_reply`], exactly
    /// one, or the replica is lost ([`Client::on_lost`]). Never refuses: beyond its credits a transport keeps
    /// requests, as many as the client has pieces. Until the answer it may use the buffers, after it never.
    fn send(&mut self, node: NodeId, request: &Request) -> Option<Reply>;

    /// Gives a read up that another replica has answered meanwhile. True: its buffers are not touched any
    /// more, and no answer comes. False: the answer comes as usual.
    #[inline]
    fn abandon(&mut self, _node: NodeId, _id: RequestId) -> bool {
        false
    }
}

/// What the client asks of the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAction {
    /// Commit a smaller in-sync set: this replica failed a request made under this map. Said once per map.
    ReportFailed {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Map under which it failed.
        epoch: Epoch,
    },
    /// Take this replica out until it is faster: it answers, and every write waits for it.
    ReportSlow {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Map under which it was slow.
        epoch: Epoch,
    },
    /// Tell people: a block of this replica had failed its checksum, and has been written again from another
    /// one.
    Repaired {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Chunk.
        chunk: ChunkKey,
        /// Block within the chunk.
        block: u32,
    },
    /// Tell people: a flush was failed, for writes before it were lost with the power of all replicas.
    UnflushedLost {
        /// Layer of the volume.
        layer: LayerId,
    },
}

/// The machine. One per data thread.
pub struct Client {
    lane: usize,
    ios: Slab<GuestIo>,
    pieces: Slab<Piece>,
    segments: SegmentPool,
    groups: GroupTable,
    volumes: Volumes,
    window: Window,
    ticks: Ticks,
    hedging: Hedging,
    full: FullReplicas,
    /// What the shell said last.
    now_us: u64,
    /// Bytes copied for writes in flight.
    private_bytes: usize,
    /// Pieces that have begun, and of which nobody has anything to answer.
    idle_pieces: usize,
    /// Reads that are being repaired.
    repairs: usize,
    actions: VecDeque<ClientAction>,
}

fn changes_data(op: Op) -> bool {
    !matches!(op, Op::Read | Op::Flush)
}

impl Client {
    /// A client for the data thread `lane`, knowing these replica sets. A request to a volume of whose pool
    /// it knows none is answered busy. A set of group 0 alone holds the chunks of every volume: the node is a
    /// cluster of its own.
    pub fn new(lane: usize, sets: Vec<ReplicaSet>) -> Self {
        let actions = VecDeque::with_capacity(sets.len() * REPLICAS_MAX);
        let mut groups = GroupTable::default();
        groups.add(sets);
        Self {
            lane,
            ios: Slab::new(IOS_MAX, || NO_IO),
            pieces: Slab::new(PIECES_MAX, Piece::new),
            segments: SegmentPool::new(),
            groups,
            volumes: Volumes::default(),
            window: Window::default(),
            ticks: Ticks::default(),
            hedging: Hedging::new(),
            full: FullReplicas::default(),
            now_us: 0,
            private_bytes: 0,
            idle_pieces: 0,
            repairs: 0,
            actions,
        }
    }

    /// Guest requests accepted and not reported.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.ios.taken()
    }

    /// Requests to replicas that are not answered: their buffers are in use.
    pub fn unanswered(&self) -> u64 {
        self.groups.unanswered()
    }

    /// What is kept for requests in flight, of whatever kind: nothing while there is none.
    pub fn left_over(&self) -> u64 {
        let kept = self.pieces.taken() + self.volumes.waiting() + self.private_bytes + self.repairs;
        self.unanswered() + kept as u64 + self.actions.len() as u64
    }

    /// Requests that a replica of a group has not answered.
    pub fn in_flight_at(&self, pg: PgId, node: NodeId) -> u32 {
        self.groups.in_flight_at(pg, node)
    }

    /// Next thing to ask of the control plane.
    pub fn poll_action(&mut self) -> Option<ClientAction> {
        self.actions.pop_front()
    }

    /// A guest request. The buffers stay valid until it is done; the list of them is copied.
    #[inline]
    pub fn submit<T: Transport>(
        &mut self,
        volume: &Arc<VolumeState>,
        request: &io::Request<'_>,
        transport: &mut T,
    ) -> Submit {
        // Its size may be another by the time that it has a lease.
        if !volume.is_recovered() && !volume.is_revoked() {
            return Submit::Busy;
        }
        if let Err(error) = check(volume, request) {
            volume.count(self.lane, Finished::Error);
            return Submit::Done(Err(error));
        }
        if request.len == 0 && request.op != Op::Flush {
            return Submit::Done(Ok(()));
        }
        // Without a lease nothing is begun, but nothing is an error either: it may be renewed.
        let may_begin = self.now_us < volume.lease_until_us()
            && volume.is_recovered()
            && self.groups.knows(volume.layer());
        if !may_begin || !self.volumes.attach(volume) {
            return Submit::Busy;
        }
        let piece_bytes = self.window.piece_bytes(volume.slot());
        if !self.has_share(volume, request, pieces_of(request, piece_bytes)) {
            return Submit::Busy;
        }
        if let Op::Read | Op::Write { .. } = request.op {
            self.window.note(volume.slot(), request.len);
        }
        let Some(io) = self.open_io(volume, request) else {
            volume.count(self.lane, Finished::Error);
            return Submit::Done(Err(IoError::Fenced));
        };
        if let Op::Read | Op::Write { .. } = request.op {
            match self.cut(io, volume, request, piece_bytes) {
                Ok(()) => {}
                Err(ListRefusal::Busy) => return self.refuse(io),
                Err(ListRefusal::Malformed) => self.ios[io].error = Some(IoError::OutOfRange),
            }
        }
        if self.ios[io].error.is_none() {
            match self.enter(io) {
                Ok(()) => self.begin(io, transport),
                Err(met) if self.wait(io, met) => return Submit::Pending,
                Err(_) => return self.refuse(io),
            }
        }
        if !self.ios[io].is_sent() {
            return Submit::Pending;
        }
        self.conclude(io);
        self.count_finished(io);
        Submit::Done(self.close_io(io))
    }

    /// There is no room for a request of which nothing was sent: the version it drew is simply never used.
    #[cold]
    fn refuse(&mut self, io: u32) -> Submit {
        self.drop_unsent(io);
        self.note_refused(self.ios[io].volume);
        let _ = self.close_io(io);
        Submit::Busy
    }

    /// A replica answered. Answers that nobody waits for (sent twice, or late) are ignored.
    #[inline]
    pub fn on_reply<T: Transport>(
        &mut self,
        node: NodeId,
        reply: &Reply,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let Some(piece) = self.pieces.find(Key(reply.id.0)) else {
            return;
        };
        let set = self.groups.set(self.pieces[piece].group);
        let Some(member) = set.index_of(node) else {
            return;
        };
        if !self.record(piece, member, reply) {
            return;
        }
        if reply.result.is_ok() {
            self.note_answered(piece, node);
        }
        self.drop_slower(piece, transport);
        if self.pieces[piece].answers.are_complete() {
            self.go_on(piece, transport, done);
        }
    }

    /// Cuts and sends pieces of a flush, discard or write-zeroes up to its window.
    fn pump<T: Transport>(&mut self, io: u32, transport: &mut T) {
        loop {
            let Some(at) = self.ios[io].unsent.next_cut() else {
                return;
            };
            let state = self.ios[io];
            let waits = state.has_stepped_aside || state.error.is_some();
            if waits || state.open >= RANGE_WINDOW {
                return;
            }
            let held = self.volumes[state.volume].held.pieces as usize;
            if state.open > 0 && !may_take(held, 1, self.pieces.free()) {
                return;
            }
            // The piece whose answer brought us here is free again, so an open request never starves.
            let Some(piece) = self.take_piece(io) else {
                return;
            };
            let (group, command, next) = self.cut_range(&state, at);
            self.ios[io].unsent.cut_to(next);
            self.fill_piece(piece, io, group, command);
            self.start(piece, io, transport);
        }
    }

    /// What is to be done at `at` for a flush, discard or write-zeroes, by which group, and where the next
    /// piece begins.
    fn cut_range(&self, io: &GuestIo, at: u64) -> (u16, Command, u64) {
        let volume = &self.volumes[io.volume].state;
        if let Unsent::Groups(flush) = &io.unsent {
            let layer = volume.layer();
            return (
                at as u16,
                Command::Flush { layer },
                self.groups.next_to_flush(flush),
            );
        }
        let chunk = volume.chunk_at(at).expect("check() bounds the offset");
        let end = io.offset + io.len;
        let next = end.min(at - at % CHUNK_BYTES + CHUNK_BYTES);
        let command = Command::Zero {
            chunk,
            offset: (at % CHUNK_BYTES) as u32,
            len: (next - at) as u32,
            fua: io.fua,
        };
        (self.groups.group_of(chunk), command, next)
    }

    /// Gives a fresh piece its request; the fences are filled in when it is sent.
    #[inline]
    fn fill_piece(&mut self, piece: u32, io: u32, group: u16, command: Command) {
        let (generation, sequence) = self.ios[io].number.parts();
        let request = Request {
            id: RequestId(self.pieces.key(piece).0),
            pg: self.groups.set(group).pg(),
            epoch: Epoch(0),
            generation,
            sequence,
            watermark: Sequence(0),
            command,
        };
        self.pieces[piece].begin(io, group, request);
    }

    /// Sends a fresh piece; one that is answered in place is done on return.
    #[inline]
    fn start<T: Transport>(&mut self, piece: u32, io: u32, transport: &mut T) {
        self.ios[io].open += 1;
        self.refresh_fences(piece);
        if let Some(result) = self.drive(piece, transport) {
            self.end_piece(piece, result);
            self.step_aside(io);
        }
    }

    /// Notes an answer; false if none was awaited.
    #[inline]
    fn record(&mut self, piece: u32, member: usize, reply: &Reply) -> bool {
        let slot = &mut self.pieces[piece];
        if !slot.answers.receive(member) {
            return false;
        }
        self.groups.note_answered(slot.group, member);
        // Invariant *No trust on return*: a replica that restarted is not the one that the map calls in-sync.
        let known = self.groups.set(slot.group).members()[member].incarnation == reply.incarnation;
        let result = match known {
            true => reply.result,
            false => Err(Refusal::Unreachable),
        };
        slot.answered(member, result);
        match result {
            Err(Refusal::NoSpace { .. }) => self.note_full(piece, member),
            Ok(()) if !self.full.is_empty() => self.note_stored(piece, member),
            _ => {}
        }
        true
    }

    /// A piece has all its answers (or a new map): finishes it, sends it further, or parks it.
    fn go_on<T: Transport>(
        &mut self,
        piece: u32,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        if self.pieces[piece].is_repair() {
            self.go_on_repairing(piece, transport);
            return;
        }
        let Some(result) = self.drive(piece, transport) else {
            self.send_waiting(transport, done);
            return;
        };
        self.finish(piece, result, transport, done);
    }

    /// A piece has ended: goes on with its request, and with what waited for that.
    fn finish<T: Transport>(
        &mut self,
        piece: u32,
        result: IoResult,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let io = self.pieces[piece].io;
        let volume = self.ios[io].volume;
        self.end_piece(piece, result);
        self.pump(io, transport);
        if self.flush_each_group(io) {
            self.pump(io, transport);
        }
        self.step_aside(io);
        self.report_if_done(io, done);
        if self.volumes.waiting() > 0 {
            self.begin_waiting(volume, transport, done);
        }
        self.send_waiting(transport, done);
    }

    #[inline]
    fn report_if_done(&mut self, io: u32, done: &mut dyn FnMut(Tag, IoResult)) {
        if self.ios[io].is_sent() {
            let tag = self.ios[io].tag;
            self.conclude(io);
            self.count_finished(io);
            done(tag, self.close_io(io));
        }
    }

    /// Does what is next for a piece without outstanding answers, until it waits (`None`) or is done.
    #[inline]
    fn drive<T: Transport>(&mut self, piece: u32, transport: &mut T) -> Option<IoResult> {
        self.idle_pieces -= usize::from(self.pieces[piece].resume());
        let result = self.take_steps(piece, transport);
        if self.pieces[piece].answers.are_complete() {
            self.leave_window(piece);
            if result.is_none() {
                self.pieces[piece].stage = Stage::Idle;
                self.idle_pieces += 1;
            }
        }
        result
    }

    /// Every turn asks a member not asked before, or has a strictly newer lease or map, or numbers anew, so
    /// the turns are bounded.
    #[inline]
    fn take_steps<T: Transport>(&mut self, piece: u32, transport: &mut T) -> Option<IoResult> {
        loop {
            let slot = &self.pieces[piece];
            let next = slot.next(self.groups.set(slot.group));
            if !matches!(next, Next::Done(_)) && self.is_revoked(piece) {
                return Some(Err(IoError::Fenced));
            }
            match next {
                Next::Done(result) => {
                    if result.is_ok() && !slot.answers.unreadable().is_empty() {
                        self.repair(piece, transport);
                    }
                    let set = self.groups.set(self.pieces[piece].group);
                    let others = set.in_sync().len() > 1;
                    if let Some(result) = self.pieces[piece].or_next_part(result, others) {
                        return Some(result);
                    }
                }
                Next::Send(_) if self.needs_copy(piece) => {
                    if !self.copy_piece(piece) {
                        return None;
                    }
                }
                Next::Send(to) => {
                    let to = match self.whom_to_ask(piece, to) {
                        Asks::These(to) => to,
                        Asks::CopyFirst if self.copy_piece(piece) => continue,
                        Asks::CopyFirst => return self.wait_for_copies(piece),
                    };
                    self.dispatch(piece, to, transport);
                    if !self.pieces[piece].answers.are_complete() {
                        return None;
                    }
                }
                Next::Renew(generation) => {
                    if !self.refresh_fences(piece) || !self.reaches(piece, generation) {
                        return Some(Err(IoError::Fenced));
                    }
                    self.pieces[piece].answers.forget();
                }
                Next::Renumber => {
                    if !self.renumber(piece) {
                        return Some(Err(IoError::Device(libc::EIO)));
                    }
                    self.pieces[piece].answers.forget();
                }
                Next::Copy if !self.copy_piece(piece) => return None,
                Next::Copy => {}
                Next::Again => self.pieces[piece].answers.read_again(),
                Next::Retry => {
                    self.ticks.retry();
                    self.report(piece, self.pieces[piece].answers.lagging());
                    return None;
                }
                Next::Fail { refusal, others } => {
                    self.condemn(piece, refusal, others);
                    return None;
                }
                Next::NoSpace { full } => match self.on_no_space(piece, full) {
                    NoSpaceStep::End => return Some(Err(IoError::NoSpace)),
                    NoSpaceStep::Urge => self.pieces[piece].urge(),
                    NoSpaceStep::GiveUp => {
                        let set = self.groups.set(self.pieces[piece].group);
                        let refusal = Refusal::NoSpace { untouched: false };
                        self.condemn(piece, refusal, all_but_one(set));
                        return None;
                    }
                    step => {
                        if step == NoSpaceStep::TakeOut {
                            self.report(piece, full);
                        }
                        self.hold(piece);
                        return None;
                    }
                },
                Next::Park { failed } => {
                    self.report(piece, failed);
                    let io = self.pieces[piece].io;
                    if let Unsent::Groups(flush) = &mut self.ios[io].unsent {
                        flush.note_failed();
                    }
                    if self.pieces[piece].answers.has_unreachable() {
                        self.ticks.park();
                    }
                    return None;
                }
            }
        }
    }

    #[inline]
    fn dispatch<T: Transport>(&mut self, piece: u32, to: Members, transport: &mut T) {
        self.pieces[piece].answers.sending(to);
        self.enter_window(piece);
        self.note_sent(piece, to);
        let group = self.pieces[piece].group;
        for member in to.iter() {
            let node = self.groups.note_sent(group, member);
            if let Some(reply) = transport.send(node, &self.pieces[piece].request) {
                self.record(piece, member, &reply);
            }
        }
    }

    #[inline]
    fn end_piece(&mut self, piece: u32, result: IoResult) {
        let index = self.pieces[piece].io;
        self.release(piece);
        if result.is_ok() && !self.full.is_empty() {
            self.note_done(piece);
        }
        self.free_piece(piece);
        let io = &mut self.ios[index];
        io.open -= 1;
        match result {
            Ok(()) => self.note_begun(index),
            // The first error is the guest's; what was not cut yet is not tried.
            Err(error) => {
                io.error = io.error.or(Some(error));
                io.unsent.stop_cutting();
                self.drop_unsent(index);
            }
        }
    }
}

#[cfg(test)]
mod tests;
