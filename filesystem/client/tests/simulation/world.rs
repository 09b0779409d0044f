//! The namespace's leader and the segments of all hosts, in memory, with the checks that a client must pass.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use fs_client::DataError;
use namespace::{
    Answer, Attributes, BLOCK, Batch, Error, Extent, FilesystemId, Freed, Ino, Namespace,
    Operation, Orphan, Outcome, Query, Reply, Request, Segment, SegmentId, SegmentState, SessionId,
    Statistics, Tail, Time,
};
use records::Txn;

use crate::executor::Runtime;
use crate::history::History;
use crate::leader::Leader;
use crate::pool::Pool;

pub const FILESYSTEM: FilesystemId = FilesystemId(3);
/// Bytes of a list in one answer.
const LIST_BYTES: usize = 64 << 10;

/// What goes wrong, as chances of each call.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// Longest delay of anything.
    pub delay_max: Duration,
    /// A request gets lost on its way to the leader.
    pub request_lost: f64,
    /// It is done much later than its sender thinks.
    pub request_late: f64,
    /// A reply gets lost.
    pub reply_lost: f64,
    /// A question is not answered for long.
    pub unavailable: f64,
    /// An answer to a question comes much later than it was given.
    pub answer_late: f64,
    /// The leader is short of space.
    pub no_space: f64,
    /// Data are not written, or only in part, or cannot be read.
    pub data_error: f64,
    /// The session of whoever asks is ended as soon as its lease has.
    pub session_end: f64,
    /// A link breaks when something is sent or received on it.
    pub link_break: f64,
    /// Data are read long after they were named.
    pub read_late: f64,
    /// Freed space is given back at once.
    pub hasty_reclaim: bool,
    /// The pool is short of space.
    pub short_pool: bool,
    /// Lists are answered in pieces of one or two items.
    pub short_lists: bool,
}

/// What becomes of a guest's write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// It is committed before it is answered.
    Through,
    /// It is buffered where that is possible.
    Buffered,
}

/// One block of a segment.
struct Block {
    data: Vec<u8>,
    /// Epoch of the flush; none before.
    flushed: Option<u64>,
    given_back: bool,
}

#[derive(Default)]
struct Volume {
    blocks: BTreeMap<u64, Block>,
    is_fenced: bool,
    is_closed: bool,
}

#[derive(Default)]
pub struct State {
    pub records: BTreeMap<Vec<u8>, Vec<u8>>,
    pub given_back: Vec<Freed>,
    volumes: BTreeMap<SegmentId, Volume>,
    epoch: u64,
    /// What a client did that it must not.
    pub violations: Vec<String>,
    /// Requests that were done, by session, slot and number.
    done: BTreeSet<(SessionId, u16, u64)>,
    pub questions: u64,
    pub data_reads: u64,
    /// Where the data lie, if it is limited.
    pub pool: Option<Pool>,
    /// What was true when, if that is to be recorded.
    pub history: Option<History>,
}

/// What all hosts share.
#[derive(Clone)]
pub struct World {
    pub runtime: Runtime,
    pub writes: Writes,
    state: Arc<Mutex<State>>,
    faults: Arc<Mutex<Faults>>,
    leader: Arc<Mutex<Leader>>,
}

impl World {
    pub fn new(runtime: Runtime, writes: Writes) -> Self {
        let world = Self {
            runtime,
            writes,
            state: Arc::default(),
            faults: Arc::default(),
            leader: Arc::new(Mutex::new(Leader::new())),
        };
        let create = Operation::CreateFilesystem {
            mode: 0o755,
            uid: 0,
            gid: 0,
        };
        assert_eq!(world.lead(create), Ok(Outcome::Done));
        world.spawn_ticks();
        world
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn leader(&self) -> MutexGuard<'_, Leader> {
        self.leader.lock().unwrap()
    }

    /// Notes that a client did what it must not.
    pub fn violation(&self, what: String) {
        self.state().violations.push(what);
    }

    pub fn faults(&self) -> Faults {
        *self.faults.lock().unwrap()
    }

    pub fn set_faults(&self, faults: Faults) {
        *self.faults.lock().unwrap() = faults;
    }

    pub async fn delay(&self) {
        let longest = self.faults().delay_max.as_micros() as u64;
        let delay = Duration::from_micros(self.runtime.below(longest + 1));
        self.runtime.sleep(delay).await;
    }

    pub fn wall_clock(&self) -> Time {
        let now = self.runtime.now();
        Time {
            seconds: 1_700_000_000 + now.as_secs() as i64,
            nanoseconds: now.subsec_nanos(),
        }
    }

    /// An operation of the leader itself.
    pub fn lead(&self, operation: Operation) -> Reply {
        self.apply_now(&Request {
            session: SessionId::NONE,
            slot: 0,
            sequence: 0,
            at: self.wall_clock(),
            operation,
        })
    }

    /// Applies a request, and does what the leader does besides.
    pub fn apply_now(&self, request: &Request) -> Reply {
        let reply = self.apply_alone(request);
        if request.session != SessionId::NONE {
            self.reap();
            if self.faults().hasty_reclaim {
                self.reclaim();
            }
        }
        reply
    }

    fn apply_alone(&self, request: &Request) -> Reply {
        let mut state = self.state();
        let state = &mut *state;
        state.check_request(request);
        let range = namespace::given_back_by(&state.records, FILESYSTEM, &request.operation);
        let batch = Batch {
            operations: vec![request.clone()],
        };
        let mut txn = Txn::over(&state.records);
        let mut replies = namespace::apply(&mut txn, FILESYSTEM, &batch).unwrap();
        for (key, value) in txn.into_writes() {
            match value {
                Some(value) => state.records.insert(key, value),
                None => state.records.remove(&key),
            };
        }
        let reply = replies.pop().unwrap();
        if reply.is_ok() {
            state.given_back.extend(range.unwrap());
        }
        if let Some(mut history) = state.history.take() {
            history.record(state);
            state.history = Some(history);
        }
        if reply == Err(Error::TooManyGaps) {
            state.violations.push(format!("{reply:?} to {request:?}"));
        }
        reply
    }

    /// Records from now on what is true.
    pub fn record_history(&self) {
        let mut state = self.state();
        let mut history = History::new(self.writes == Writes::Buffered);
        history.record(&state);
        state.history = Some(history);
    }

    pub fn answer(&self, query: &Query) -> Result<Answer, Error> {
        let is_short = self.faults().short_lists;
        let list_bytes = if is_short { 100 } else { LIST_BYTES };
        let mut state = self.state();
        state.questions += 1;
        namespace::answer(&state.records, FILESYSTEM, query, list_bytes).unwrap()
    }

    /// Removes orphans that nobody holds.
    pub fn reap(&self) {
        let orphans = {
            let state = self.state();
            let namespace = Namespace::new(&state.records, FILESYSTEM);
            namespace.orphans(Ino(0), 100).unwrap()
        };
        for (ino, orphan) in orphans {
            if orphan == Orphan::Emptying {
                let reap = Operation::Reap { ino, limit: 100 };
                self.lead(reap).unwrap();
            }
        }
    }

    /// Gives freed space back.
    pub fn reclaim(&self) {
        let freed = {
            let state = self.state();
            let namespace = Namespace::new(&state.records, FILESYSTEM);
            namespace.freed((SegmentId(0), 0), 100).unwrap()
        };
        for freed in freed {
            self.state().give_back(&freed);
            let reclaimed = Operation::Reclaimed {
                segment: freed.segment,
                address: freed.address,
                length: freed.length,
            };
            self.lead(reclaimed).unwrap();
        }
    }

    /// The same until nothing is left to give back.
    pub fn reclaim_all(&self) {
        let mut before = u64::MAX;
        while self.statistics().freed_bytes < before {
            before = self.statistics().freed_bytes;
            self.reclaim();
        }
    }

    /// Gives space back that a file names.
    pub fn reclaim_named(&self, named: &Extent) {
        let freed = Freed {
            segment: named.segment,
            address: named.address,
            length: named.length,
        };
        let mut state = self.state();
        state.give_back(&freed);
        state.given_back.push(freed);
    }

    /// Removes a session as the leader does: fences what it writes, then lets go of all it has.
    pub fn remove_session(&self, session: SessionId) {
        {
            let mut state = self.state();
            let namespace = Namespace::new(&state.records, FILESYSTEM);
            let segments = namespace.segments(SegmentId(0), 10_000).unwrap();
            for (id, segment) in segments {
                if segment.session == session {
                    state.volumes.entry(id).or_default().is_fenced = true;
                }
            }
        }
        loop {
            match self.lead(Operation::EndSession { session }) {
                Ok(Outcome::Step { done: true }) => return,
                Ok(_) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub fn statistics(&self) -> Statistics {
        match self.answer(&Query::Statistics) {
            Ok(Answer::Statistics(Some(statistics))) => statistics,
            other => panic!("{other:?}"),
        }
    }

    /// Segments that have a lease or are not sealed.
    pub fn open_segments(&self) -> Vec<SegmentId> {
        let state = self.state();
        let namespace = Namespace::new(&state.records, FILESYSTEM);
        let segments = namespace
            .segments(SegmentId(0), 10_000)
            .unwrap()
            .into_iter();
        let is_open = |id: &SegmentId, segment: &Segment| {
            segment.state != SegmentState::Sealed || !state.is_closed(*id)
        };
        let open = segments.filter(|(id, segment)| is_open(id, segment));
        open.map(|(id, _)| id).collect()
    }

    pub fn node_of(&self, session: SessionId) -> Option<u64> {
        let state = self.state();
        let namespace = Namespace::new(&state.records, FILESYSTEM);
        let found = namespace.sessions(session, 1).unwrap();
        let found = found.into_iter().find(|(id, _)| *id == session);
        found.map(|(_, record)| record.node)
    }

    pub fn sessions(&self) -> Vec<SessionId> {
        let state = self.state();
        let namespace = Namespace::new(&state.records, FILESYSTEM);
        let sessions = namespace.sessions(SessionId(0), 100).unwrap();
        sessions.into_iter().map(|(id, _)| id).collect()
    }

    /// Checks all records, and that no client did what it must not.
    #[track_caller]
    pub fn check(&self) {
        let state = self.state();
        assert!(state.violations.is_empty(), "{:#?}", state.violations);
        namespace::check(&state.records, FILESYSTEM, &state.given_back).unwrap();
    }
}

impl State {
    /// The bytes of a small file.
    pub fn content(&self, attributes: &Attributes) -> Option<Vec<u8>> {
        let namespace = Namespace::new(&self.records, FILESYSTEM);
        let range = (0, namespace::SIZE_MAX);
        let extents = namespace.extents(attributes.ino, range, 1000).ok()?;
        let mut bytes = vec![0; attributes.size.next_multiple_of(BLOCK) as usize];
        for extent in extents {
            let blocks = self
                .volumes
                .get(&extent.segment)
                .map(|volume| &volume.blocks)?;
            for at in (0..extent.length).step_by(BLOCK as usize) {
                let block = blocks.get(&(extent.address + at))?;
                let from = (extent.offset + at) as usize;
                bytes[from..from + BLOCK as usize].copy_from_slice(&block.data);
            }
        }
        bytes.truncate(attributes.size as usize);
        Some(bytes)
    }

    fn give_back(&mut self, freed: &Freed) {
        let (first, end) = (freed.address, freed.address + freed.length);
        if let Some(volume) = self.volumes.get_mut(&freed.segment) {
            for (_, block) in volume.blocks.range_mut(first..end) {
                let was_given_back = std::mem::replace(&mut block.given_back, true);
                if let Some(pool) = self.pool.as_mut().filter(|_| !was_given_back) {
                    pool.give_back(BLOCK);
                    // So much is overwritten that this process has no memory for it.
                    block.data = Vec::new();
                }
            }
        }
    }

    /// What a request names was written, and flushed in the epoch that it says.
    fn check_request(&mut self, request: &Request) {
        let extents = match &request.operation {
            Operation::Commit(commit) => commit.extents.clone(),
            Operation::SetAttributes(set) => set.tail.iter().map(extent_of).collect(),
            _ => Vec::new(),
        };
        let key = (request.session, request.slot, request.sequence);
        if request.session != SessionId::NONE && !self.done.insert(key) {
            return;
        }
        for extent in extents {
            let blocks = extent.address..extent.address + extent.length;
            for address in blocks.step_by(BLOCK as usize) {
                let volume = self.volumes.get(&extent.segment);
                let block = volume.and_then(|volume| volume.blocks.get(&address));
                let flushed = block.and_then(|block| block.flushed);
                if flushed.is_none_or(|epoch| epoch > extent.epoch) {
                    let what = format!("named before it was flushed: {extent:?}");
                    self.violations.push(what);
                    break;
                }
            }
        }
    }

    pub fn create(&mut self, segment: SegmentId) -> Result<(), DataError> {
        match self.volumes.get(&segment) {
            None => {
                self.volumes.insert(segment, Volume::default());
            }
            // Its session has ended.
            Some(volume) if volume.is_fenced => return Err(DataError::Fenced),
            Some(_) => self.violations.push(format!("{segment:?} was made twice")),
        }
        Ok(())
    }

    pub fn close(&mut self, segment: SegmentId) {
        self.volumes.entry(segment).or_default().is_closed = true;
    }

    pub fn is_closed(&self, segment: SegmentId) -> bool {
        self.volumes
            .get(&segment)
            .is_none_or(|volume| volume.is_closed)
    }

    pub fn write(
        &mut self,
        segment: SegmentId,
        address: u64,
        data: &[u8],
    ) -> Result<(), DataError> {
        let Some(volume) = self.volumes.get_mut(&segment) else {
            self.violations
                .push(format!("{segment:?} is written and was not made"));
            return Err(DataError::Io);
        };
        if volume.is_fenced {
            return Err(DataError::Fenced);
        }
        let is_whole = address % BLOCK == 0 && data.len() as u64 % BLOCK == 0;
        let last = address + (data.len() as u64).max(1) - 1;
        let in_chunk = address / fs_client::CHUNK_BYTES == last / fs_client::CHUNK_BYTES;
        if volume.is_closed || !is_whole || !in_chunk {
            let what = format!("{segment:?} is written at {address}, {} bytes", data.len());
            self.violations.push(what);
        }
        if let Some(pool) = &mut self.pool {
            if !pool.take(data.len() as u64) {
                return Err(DataError::NoSpace);
            }
        }
        for (at, data) in (address..)
            .step_by(BLOCK as usize)
            .zip(data.chunks(BLOCK as usize))
        {
            let block = Block {
                data: data.to_vec(),
                flushed: None,
                given_back: false,
            };
            if volume.blocks.insert(at, block).is_some() {
                let what = format!("{segment:?} is written twice at {at}");
                self.violations.push(what);
            }
        }
        Ok(())
    }

    /// Addresses that were written and not flushed.
    pub fn unflushed(&self, segment: SegmentId) -> Vec<u64> {
        let blocks = self
            .volumes
            .get(&segment)
            .map(|volume| volume.blocks.iter());
        let blocks = blocks.into_iter().flatten();
        let unflushed = blocks.filter(|(_, block)| block.flushed.is_none());
        unflushed.map(|(address, _)| *address).collect()
    }

    pub fn flushed(&mut self, segment: SegmentId, addresses: &[u64]) -> Result<u64, DataError> {
        self.epoch += 1;
        let epoch = self.epoch;
        let volume = self.volumes.get_mut(&segment).ok_or(DataError::Io)?;
        if volume.is_fenced {
            return Err(DataError::Fenced);
        }
        for address in addresses {
            if let Some(block) = volume.blocks.get_mut(address) {
                block.flushed.get_or_insert(epoch);
            }
        }
        Ok(epoch)
    }

    pub fn read(
        &mut self,
        segment: SegmentId,
        (address, length): (u64, u64),
        epoch: u64,
        may_fail: bool,
    ) -> Result<Vec<u8>, DataError> {
        self.data_reads += 1;
        let mut data = Vec::new();
        for at in (address..address + length).step_by(BLOCK as usize) {
            let volume = self.volumes.get(&segment);
            let block = volume.and_then(|volume| volume.blocks.get(&at));
            match block {
                Some(block) if block.given_back && may_fail => return Err(DataError::Io),
                Some(block) if block.given_back => data.extend([0; BLOCK as usize]),
                Some(block) if block.flushed.is_some_and(|flushed| flushed <= epoch) => {
                    data.extend(&block.data);
                }
                _ => {
                    let what = format!("{segment:?} is read at {at}, and was not flushed");
                    self.violations.push(what);
                    return Err(DataError::Io);
                }
            }
        }
        Ok(data)
    }
}

fn extent_of(tail: &Tail) -> Extent {
    Extent {
        offset: 0,
        length: BLOCK,
        segment: tail.segment,
        address: tail.address,
        epoch: tail.epoch,
    }
}
