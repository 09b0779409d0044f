//! A host's way to the leader and to segments, with what goes wrong on it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fs_capabilities::{Instant, ToHolder, ToManager};
use fs_client::{
    Answered, ApplyError, Clock, DataError, Leader, LinkBroken, Mistake, Reader, SegmentStore,
    Space, Unavailable,
};
use namespace::{
    Error, Openers, Operation, Outcome, Query, Reply, Request, SegmentId, SessionId, Time,
};

use crate::world::World;

/// A mistake made on purpose, which the checks must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Data are named before they are flushed.
    CommitBeforeFlush,
    /// Changes of a part do not say what they were made from.
    NothingExpected,
    /// An address is written again.
    AddressTwice,
    /// Files that are open elsewhere go with their names.
    OrphanNotKept,
    /// A request is repeated under another number.
    DoneTwice,
    /// A removal is answered, and not done.
    RemovalLeftOut,
    /// Space that a file names is given back.
    NamedReclaimed,
    /// The leader tells of files what others have buffered changes of.
    ToldBeforeWriteBack,
    /// A mistake of the client itself.
    Client(Mistake),
}

/// How long a late read takes.
const LATE: Duration = Duration::from_secs(60);

/// Tries of one request.
const TRIES: usize = 3;

pub struct Host {
    pub world: World,
    node: u64,
    mutation: Option<Mutation>,
    /// The address that each segment was first written at.
    first: Mutex<BTreeMap<SegmentId, u64>>,
    session: AtomicU64,
    is_dead: AtomicBool,
}

impl Host {
    pub fn new(world: World, node: u64, mutation: Option<Mutation>) -> Self {
        Self {
            world,
            node,
            mutation,
            first: Mutex::default(),
            session: AtomicU64::new(0),
            is_dead: AtomicBool::new(false),
        }
    }

    /// It loses its power: nothing that it begins from now on is done.
    pub fn crash(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
    }

    /// Ends the call of a host that is dead, which nobody waits for.
    async fn alive(&self) {
        if self.is_dead.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }

    /// The session that it opened last.
    pub fn session(&self) -> SessionId {
        SessionId(self.session.load(Ordering::Relaxed))
    }

    fn mutate(&self, mut request: Request) -> Request {
        match (self.mutation, &mut request.operation) {
            (Some(Mutation::NothingExpected), Operation::Commit(commit)) => commit.expected = None,
            (
                Some(Mutation::OrphanNotKept),
                Operation::Unlink { openers, .. } | Operation::Rmdir { openers, .. },
            ) => *openers = Openers::Named(Vec::new()),
            _ => {}
        }
        request
    }

    fn has_data_error(&self) -> bool {
        let runtime = &self.world.runtime;
        runtime.happens(self.world.faults().data_error)
    }

    fn may_break(&self) -> Result<(), LinkBroken> {
        let is_broken = self.world.runtime.happens(self.world.faults().link_break);
        if is_broken { Err(LinkBroken) } else { Ok(()) }
    }

    async fn apply_and_reclaim(&self, request: Request) -> Result<Reply, ApplyError> {
        let reply = self.try_once(&request).await.ok_or(Unavailable)?;
        if let (Operation::Commit(commit), Ok(_)) = (&request.operation, &reply) {
            commit
                .extents
                .iter()
                .for_each(|named| self.world.reclaim_named(named));
        }
        Ok(reply)
    }

    /// One way of a request to the leader. No reply: it got lost, or comes too late.
    async fn try_once(&self, request: &Request) -> Option<Reply> {
        let world = &self.world;
        world.delay().await;
        let faults = world.faults();
        if world.runtime.happens(faults.session_end) {
            let (world, session) = (world.clone(), request.session);
            let ending = async move { world.end_session(session).await };
            drop(self.world.runtime.spawn(ending));
        }
        if world.runtime.happens(faults.request_lost) {
            return None;
        }
        if world.runtime.happens(faults.request_late) {
            let (world, request) = (world.clone(), request.clone());
            let late = async move {
                let runtime = &world.runtime;
                runtime
                    .sleep(Duration::from_millis(runtime.below(300)))
                    .await;
                let _ = world.apply(&request).await;
            };
            // Nobody waits for it.
            drop(self.world.runtime.spawn(late));
            return None;
        }
        let reply = world.apply(request).await?;
        world.delay().await;
        (!world.runtime.happens(faults.reply_lost)).then_some(reply)
    }
}

impl Leader for Host {
    async fn apply(&self, request: Request) -> Result<Reply, ApplyError> {
        self.alive().await;
        let mut request = self.mutate(request);
        let is_removal = matches!(request.operation, Operation::Unlink { .. });
        if self.mutation == Some(Mutation::RemovalLeftOut) && is_removal {
            return Ok(Ok(Outcome::Removed(None)));
        }
        if self.mutation == Some(Mutation::NamedReclaimed) {
            return self.apply_and_reclaim(request).await;
        }
        if self.world.runtime.happens(self.world.faults().no_space) {
            return Err(ApplyError::NoSpace);
        }
        for tries in 0..TRIES {
            match self.try_once(&request).await {
                // An earlier try may have been done before the session ended.
                Some(Err(Error::Stale)) if tries > 0 => break,
                Some(reply) => {
                    if reply == Err(Error::OutOfSequence) {
                        self.world.violation(format!("{reply:?} to {request:?}"));
                    }
                    return Ok(reply);
                }
                None if self.mutation == Some(Mutation::DoneTwice) => request.sequence += 1,
                None => {}
            }
        }
        Err(Unavailable.into())
    }

    async fn read(&self, query: Query, reader: Option<Reader>) -> Result<Answered, Unavailable> {
        self.alive().await;
        self.world.delay().await;
        if self.world.runtime.happens(self.world.faults().unavailable) {
            return Err(Unavailable);
        }
        let sent = reader.and_then(|reader| self.world.sent(reader));
        self.world.delay().await;
        let session = reader.map_or(SessionId::NONE, |reader| reader.session);
        // It goes on if nobody waits for it, as at a leader.
        let (world, asked) = (self.world.clone(), query.clone());
        let is_hasty = self.mutation == Some(Mutation::ToldBeforeWriteBack);
        let looking = async move {
            match is_hasty {
                true => Some((world.answer(&asked), true)),
                false => world.look_up(session, &asked).await,
            }
        };
        let answered = self.world.runtime.spawn(looking).await;
        let Some((answer, may_cache)) = answered.ok().flatten() else {
            return Err(Unavailable);
        };
        let sent = sent.filter(|_| may_cache);
        if self.world.runtime.happens(self.world.faults().answer_late) {
            let late = Duration::from_millis(self.world.runtime.below(80));
            self.world.runtime.sleep(late).await;
        }
        self.world.delay().await;
        Ok(Answered { answer, sent })
    }

    async fn leader_term(&self) -> Result<u64, Unavailable> {
        self.alive().await;
        self.world.delay().await;
        let term = self.world.leader().term;
        self.world.delay().await;
        Ok(term)
    }

    async fn send(
        &self,
        reader: Reader,
        first: u64,
        messages: Vec<ToManager>,
    ) -> Result<(), LinkBroken> {
        self.alive().await;
        self.world.delay().await;
        self.may_break()?;
        self.world.take(reader, first, messages)?;
        self.world.delay().await;
        self.may_break()
    }

    async fn receive(&self, reader: Reader, behind: u64) -> Result<Vec<ToHolder>, LinkBroken> {
        self.alive().await;
        self.world.delay().await;
        let messages = self.world.messages(reader, behind).await?;
        self.world.delay().await;
        self.may_break()?;
        Ok(messages)
    }

    fn lease_until(&self) -> Option<Instant> {
        Some(self.world.lease_until(self.node))
    }

    async fn open_session(&self) -> Result<SessionId, Unavailable> {
        self.alive().await;
        self.world.delay().await;
        let open = Operation::OpenSession {
            node: self.node,
            incarnation: self.node.into(),
        };
        match self.world.lead(open) {
            Ok(Outcome::Session(id)) => {
                self.session.store(id.0, Ordering::Relaxed);
                self.world.session_opened(id);
                Ok(id)
            }
            other => panic!("{other:?}"),
        }
    }
}

impl SegmentStore for Host {
    async fn create_segment(&self, segment: SegmentId) -> Result<(), DataError> {
        self.alive().await;
        self.world.delay().await;
        if self.has_data_error() {
            return Err(DataError::NoSpace);
        }
        self.world.state().create(segment)
    }

    async fn close_segment(&self, segment: SegmentId) {
        self.alive().await;
        self.world.delay().await;
        self.world.state().close(segment);
    }

    async fn write(
        &self,
        segment: SegmentId,
        mut address: u64,
        data: Vec<u8>,
    ) -> Result<(), DataError> {
        self.alive().await;
        self.world.delay().await;
        if self.mutation == Some(Mutation::AddressTwice) {
            address = *self.first.lock().unwrap().entry(segment).or_insert(address);
        }
        if self.has_data_error() {
            let blocks = self.world.runtime.below(data.len() as u64 / 4096 + 1) as usize;
            let part = &data[..blocks * 4096];
            self.world.state().write(segment, address, part)?;
            return Err(match self.world.runtime.happens(0.7) {
                true => DataError::NoSpace,
                false => DataError::Io,
            });
        }
        self.world.state().write(segment, address, &data)
    }

    async fn flush(&self, segment: SegmentId) -> Result<u64, DataError> {
        self.alive().await;
        if self.mutation == Some(Mutation::CommitBeforeFlush) {
            return Ok(1 << 40);
        }
        let written = self.world.state().unflushed(segment);
        self.world.delay().await;
        if self.has_data_error() {
            return Err(DataError::Io);
        }
        self.world.state().flushed(segment, &written)
    }

    async fn read_data(
        &self,
        segment: SegmentId,
        address: u64,
        length: u64,
        epoch: u64,
    ) -> Result<Vec<u8>, DataError> {
        self.alive().await;
        self.world.delay().await;
        if self.has_data_error() {
            return Err(DataError::Io);
        }
        if self.world.runtime.happens(self.world.faults().read_late) {
            self.world.runtime.sleep(LATE).await;
        }
        // Where all of a segment is freed, its volume may be deleted.
        let may_fail = self.world.runtime.happens(0.2);
        let mut state = self.world.state();
        state.read(segment, (address, length), epoch, may_fail)
    }

    fn space(&self) -> Option<Space> {
        if let Some(pool) = &self.world.state().pool {
            return Some(pool.reported());
        }
        let is_short = self.world.faults().short_pool;
        is_short.then_some(Space {
            total_bytes: 100 << 30,
            free_bytes: 4 << 30,
        })
    }
}

impl Clock for Host {
    fn monotonic(&self) -> Instant {
        self.world.monotonic()
    }

    fn now(&self) -> Time {
        self.world.wall_clock()
    }

    async fn sleep(&self, duration: Duration) {
        self.alive().await;
        self.world.runtime.sleep(duration).await;
    }
}
