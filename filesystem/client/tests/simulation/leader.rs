//! The leader's side of capabilities: operations pass the coordinator that ships, with delays at each step.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fs_capabilities::{
    Coordinator, Event, Instant, OperationId, SessionEnd, Settings, ToHolder, ToManager, Told,
    files_told, footprint,
};
use fs_client::{LinkBroken, Reader};
use futures_channel::oneshot;
use futures_util::future::select;
use namespace::{Answer, Error, Ino, Namespace, Query, Reply, Request, SessionId};

use crate::world::{FILESYSTEM, World};

/// How long a node's sessions may be used after a heartbeat. Longer than what guests are promised.
pub const LEASE: Duration = Duration::from_millis(150);

/// How long a leader waits for messages to send.
const RECEIVE_WAIT: Duration = Duration::from_secs(3);

/// Times of the simulation: short, so that much happens in each.
pub fn settings() -> Settings {
    Settings {
        validity: Duration::from_millis(40),
        quiet: Duration::from_millis(20),
        guest_delay: Duration::from_millis(5),
        claims_at_once: 3,
        ..Settings::default()
    }
}

/// Whether an operation goes on.
type Verdict = bool;

pub struct Leader {
    coordinator: Coordinator,
    pub term: u64,
    next: u64,
    waiting: BTreeMap<OperationId, oneshot::Sender<Verdict>>,
    /// Who waits for something to happen.
    listeners: Vec<oneshot::Sender<()>>,
    leases: BTreeMap<u64, Lease>,
}

#[derive(Default)]
struct Lease {
    /// The latest end that the node knows.
    until: Instant,
    /// It is not renewed.
    is_stopped: bool,
}

impl Leader {
    pub fn new() -> Self {
        let mut leader = Self {
            coordinator: Coordinator::new(Instant::START, 1, [], settings()),
            term: 1,
            next: 0,
            waiting: BTreeMap::new(),
            listeners: Vec::new(),
            leases: BTreeMap::new(),
        };
        leader.lead();
        leader
    }

    fn lead(&mut self) {
        let for_ever = Instant::from_nanos(u64::MAX);
        self.coordinator.lead_until(Instant::START, for_ever);
    }

    /// Does what the coordinator says.
    fn pump(&mut self) {
        while let Some(event) = self.coordinator.next_event() {
            let (operation, verdict) = match event {
                Event::Proceed { operation } => (operation, true),
                Event::Refuse { operation, .. } => (operation, false),
                Event::LinkClosed { session, limit } => panic!("{session:?} is honest: {limit}"),
                _ => continue,
            };
            let waiting = self.waiting.remove(&operation);
            let _ = waiting.expect("it waits").send(verdict);
        }
        for listener in self.listeners.drain(..) {
            let _ = listener.send(());
        }
    }

    fn listen(&mut self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        self.listeners.push(sender);
        receiver
    }
}

/// A question that is being answered, with the operations that keep others from buffering meanwhile.
struct Reading {
    world: World,
    term: u64,
    files: BTreeSet<Ino>,
    under_way: Vec<OperationId>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        let now = self.world.monotonic();
        let mut leader = self.world.leader();
        if leader.term == self.term {
            for operation in self.under_way.drain(..) {
                leader.coordinator.end(now, operation);
            }
            leader.pump();
        }
    }
}

impl World {
    pub fn monotonic(&self) -> Instant {
        Instant::START + self.runtime.now()
    }

    /// Lets the leader's time pass.
    pub fn spawn_ticks(&self) {
        let world = self.clone();
        drop(self.runtime.spawn(async move {
            loop {
                let (due, change) = {
                    let mut leader = world.leader();
                    leader.coordinator.tick(world.monotonic());
                    leader.pump();
                    (leader.coordinator.next_wakeup(), leader.listen())
                };
                let now = world.monotonic();
                let wait = due.map_or(Duration::from_secs(3600), |due| due.since(now));
                let sleep = Box::pin(world.runtime.sleep(wait + Duration::from_micros(1)));
                select(change, sleep).await;
            }
        }));
    }

    /// Has a request applied when nothing is in its way. None if the leader is lost before. It goes on if
    /// nobody waits for it.
    pub async fn apply(&self, request: &Request) -> Option<Reply> {
        let (world, request) = (self.clone(), request.clone());
        let applied = async move { world.pass(&request).await };
        self.runtime.spawn(applied).await.ok().flatten()
    }

    async fn pass(&self, request: &Request) -> Option<Reply> {
        loop {
            let before = self.footprint(request);
            let (term, operation, verdict) = {
                let mut leader = self.leader();
                leader.next += 1;
                let operation = OperationId(leader.next);
                let (sender, verdict) = oneshot::channel();
                leader.waiting.insert(operation, sender);
                let now = self.monotonic();
                let session = request.session;
                leader
                    .coordinator
                    .begin(now, operation, session, before.clone());
                leader.pump();
                (leader.term, operation, verdict)
            };
            if !verdict.await.unwrap_or(false) {
                let is_there = self.sessions().contains(&request.session);
                return (!is_there).then_some(Err(Error::Stale));
            }
            self.delay().await;
            if self.leader().term != term {
                return None;
            }
            let reply = (self.footprint(request) == before).then(|| self.apply_now(request));
            self.delay().await;
            let mut leader = self.leader();
            if leader.term == term {
                leader.coordinator.end(self.monotonic(), operation);
                leader.pump();
            }
            drop(leader);
            if reply.is_some() {
                return reply;
            }
        }
    }

    /// Answers a question, and says whether the answer may be cached. Before it tells of files, what others
    /// have buffered of them is written back. None if the leader is lost before.
    pub async fn look_up(
        &self,
        session: SessionId,
        query: &Query,
    ) -> Option<(Result<Answer, Error>, bool)> {
        let mut reading = Reading {
            world: self.clone(),
            term: self.leader().term,
            files: BTreeSet::new(),
            under_way: Vec::new(),
        };
        loop {
            let moment = self.leader().coordinator.moment();
            self.delay().await;
            let answer = self.answer(query);
            self.delay().await;
            if self.leader().term != reading.term {
                return None;
            }
            let files = files_told(query, &answer);
            let to_tell = files.difference(&reading.files).copied().collect();
            let told = self.leader().coordinator.tell(session, &to_tell, moment);
            match told {
                Told::Now => {
                    let leader = self.leader();
                    let may_cache = leader.coordinator.may_cache(session, &files, moment);
                    return Some((answer, may_cache));
                }
                Told::Anew => {}
                Told::Buffered(parts) => {
                    for (files, footprint) in parts {
                        let operation = self.admit(session, footprint).await?;
                        reading.under_way.push(operation);
                        reading.files.extend(files);
                    }
                }
            }
        }
    }

    /// Waits until an operation that reads may go on.
    async fn admit(
        &self,
        session: SessionId,
        footprint: fs_capabilities::Footprint,
    ) -> Option<OperationId> {
        let (operation, verdict) = {
            let mut leader = self.leader();
            leader.next += 1;
            let operation = OperationId(leader.next);
            let (sender, verdict) = oneshot::channel();
            leader.waiting.insert(operation, sender);
            let now = self.monotonic();
            leader.coordinator.begin(now, operation, session, footprint);
            leader.pump();
            (operation, verdict)
        };
        verdict.await.ok()?.then_some(operation)
    }

    fn footprint(&self, request: &Request) -> fs_capabilities::Footprint {
        let state = self.state();
        let namespace = Namespace::new(&state.records, FILESYSTEM);
        footprint(&namespace, &request.operation).unwrap()
    }

    pub fn session_opened(&self, session: SessionId) {
        self.leader().coordinator.session_opened(session);
    }

    /// Another leader: what waited at the former one is lost.
    pub fn change_leader(&self) {
        let sessions = self.sessions();
        let now = self.monotonic();
        let mut leader = self.leader();
        leader.term += 1;
        leader.waiting.clear();
        leader.coordinator = Coordinator::new(now, leader.term, sessions, settings());
        leader.lead();
        leader.pump();
    }

    /// How many messages were sent on a reader's link.
    pub fn sent(&self, reader: Reader) -> Option<u64> {
        self.leader().coordinator.sent(reader.session, reader.link)
    }

    pub fn take(
        &self,
        reader: Reader,
        first: u64,
        messages: Vec<ToManager>,
    ) -> Result<(), LinkBroken> {
        let now = self.monotonic();
        let mut leader = self.leader();
        let (session, link) = (reader.session, reader.link);
        let place_of = |ino, _| {
            let state = self.state();
            let inode = Namespace::new(&state.records, FILESYSTEM).inode(ino);
            inode.ok().map(|inode| inode.parent)
        };
        let coordinator = &mut leader.coordinator;
        let taken = coordinator
            .check(now, session, &messages)
            .and_then(|()| coordinator.take(now, session, link, first, messages, place_of));
        leader.pump();
        taken.map_err(|_| LinkBroken)
    }

    pub async fn messages(&self, reader: Reader, behind: u64) -> Result<Vec<ToHolder>, LinkBroken> {
        let mut patience = Box::pin(self.runtime.sleep(RECEIVE_WAIT));
        loop {
            let change = {
                let mut leader = self.leader();
                let (session, link) = (reader.session, reader.link);
                let messages = leader.coordinator.messages(session, link, behind);
                let messages = messages.map_err(|_| LinkBroken)?;
                if !messages.is_empty() {
                    return Ok(messages);
                }
                leader.listen()
            };
            if let futures_util::future::Either::Right(_) = select(change, &mut patience).await {
                return Ok(Vec::new());
            }
        }
    }

    /// The end of a node's lease, which is renewed all the time unless it is stopped.
    pub fn lease_until(&self, node: u64) -> Instant {
        let renewed = self.monotonic() + LEASE;
        let mut leader = self.leader();
        let lease = leader.leases.entry(node).or_default();
        if !lease.is_stopped {
            lease.until = renewed;
        }
        lease.until
    }

    /// Ends a session as group 0 and the leader do: once the node's lease has ended, by the node's clock.
    pub async fn end_session(&self, session: SessionId) {
        let Some(node) = self.node_of(session) else {
            return;
        };
        let until = {
            let mut leader = self.leader();
            let lease = leader.leases.entry(node).or_default();
            if std::mem::replace(&mut lease.is_stopped, true) {
                return;
            }
            lease.until
        };
        self.runtime.sleep(until.since(self.monotonic())).await;
        {
            let now = self.monotonic();
            let mut leader = self.leader();
            leader
                .coordinator
                .session_ended(now, session, SessionEnd::LeaseEnded);
            leader.pump();
        }
        self.remove_session(session);
        let mut leader = self.leader();
        leader.leases.entry(node).or_default().is_stopped = false;
    }
}
