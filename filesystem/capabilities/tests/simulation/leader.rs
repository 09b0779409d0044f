//! A leader: the manager, the operations that pass it, and the log below.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fs_capabilities::{
    Access, Action, Link, Manager, OperationId, SessionEnd, ToHolder, ToManager, Touch,
};
use namespace::{Ino, SessionId};
use rand::Rng;

use crate::clock::Clock;
use crate::event::{Body, Event, Outcome, Request, ToHost, ToLeader};
use crate::plan::{LEAD, MILLI, Mistake, SECOND};
use crate::world::{INODES, World, files_of, parent_of};

/// What the group's state machine has.
#[derive(Debug, Clone, Default)]
pub struct Namespace {
    pub values: BTreeMap<Ino, u64>,
    pub sessions: BTreeSet<SessionId>,
    /// Requests that were applied: a retry changes nothing.
    pub done: BTreeSet<u64>,
    pub last_session: u64,
}

impl Namespace {
    pub fn value(&self, ino: Ino) -> u64 {
        self.values.get(&ino).copied().unwrap_or(0)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Operation {
    pub host: usize,
    pub session: SessionId,
    link: Link,
    pub request: Request,
    began: u64,
    pub is_under_way: bool,
}

pub struct Leader {
    pub term: u64,
    pub clock: Clock,
    pub manager: Manager,
    /// Its process runs.
    pub is_up: bool,
    /// It is cut off from the others of its group.
    pub is_deposed: bool,
    /// When its lease ends, in true time.
    pub lease_end: u64,
    pub links: BTreeMap<SessionId, Link>,
    pub operations: BTreeMap<OperationId, Operation>,
    last_operation: u64,
    /// Sessions of whose end the manager knows.
    pub ended: BTreeSet<SessionId>,
    /// What it has of the namespace once others go on without it.
    pub frozen: Option<Namespace>,
    pub tick_at: Option<u64>,
}

impl World {
    /// A new leader, when the lease of the last one is over.
    pub fn elect(&mut self) {
        let old = self.leaders.last().expect("there was one");
        let term = old.term + 1;
        self.finish_log(old.term);
        let namespace = self.namespace.clone();
        self.leaders.last_mut().expect("there was one").frozen = Some(namespace);
        self.new_leader(term);
        for host in 0..self.hosts.len() {
            let link = self.hosts[host].link;
            let after = self.rng.random_range(0..700 * MILLI);
            self.after(after, Event::Break { host, link });
        }
    }

    pub fn new_leader(&mut self, term: u64) {
        let clock = Clock::draw(&mut self.rng);
        let now = clock.at(self.now);
        let sessions: Vec<SessionId> = self.namespace.sessions.iter().copied().collect();
        let settings = self.plan.settings();
        let manager = if self.is(Mistake::SkipReclaim) {
            let mut manager = Manager::new(now, term, [], settings);
            sessions
                .into_iter()
                .for_each(|session| manager.session_opened(session));
            manager
        } else {
            Manager::new(now, term, sessions, settings)
        };
        self.leaders.push(Leader {
            term,
            clock,
            manager,
            is_up: true,
            is_deposed: false,
            lease_end: self.now,
            links: BTreeMap::new(),
            operations: BTreeMap::new(),
            last_operation: 0,
            ended: BTreeSet::new(),
            frozen: None,
            tick_at: None,
        });
        self.after(1, Event::LeadLease { term });
        self.after(MILLI, Event::OwnRead { term });
    }

    /// The leader reads a file for itself, as it does to list what there is.
    pub fn own_read(&mut self, term: u64) {
        if !self.leader(term).is_up || self.now > self.plan.stop_at {
            return;
        }
        let ino = INODES[self.rng.random_range(0..INODES.len())];
        if parent_of(ino).is_some() {
            let request = Request {
                id: self.next_number(),
                body: Body::File(ino),
            };
            let link = Link { term, round: 0 };
            self.begin(term, 0, SessionId::NONE, link, request);
            self.run_leader(term);
        }
        let after = self.rng.random_range(MILLI..2 * SECOND);
        self.after(after, Event::OwnRead { term });
    }

    /// Of the operations that a lost leader had proposed, the first few are in its successor's log.
    fn finish_log(&mut self, term: u64) {
        let operations = &self.leader(term).operations;
        let proposed = operations
            .values()
            .filter(|operation| operation.is_under_way);
        let proposed: Vec<Operation> = proposed.copied().collect();
        let count = self.rng.random_range(0..=proposed.len());
        for operation in &proposed[..count] {
            self.apply(operation);
        }
    }

    /// A round of heartbeats was answered by a majority.
    pub fn lead_lease(&mut self, term: u64) {
        if self.leader(term).is_deposed {
            return;
        }
        let lead = match self.is(Mistake::LeaderIgnoresLease) {
            true => Duration::from_secs(3600),
            false => LEAD,
        };
        let now = self.now;
        let leader = self.leader(term);
        let shown = leader.clock.at(now);
        leader.lease_end = leader.clock.when(shown + LEAD);
        leader.manager.lead_until(shown, shown + lead);
        self.run_leader(term);
        self.after(100 * MILLI, Event::LeadLease { term });
    }

    pub fn leader_receives(
        &mut self,
        host: usize,
        session: SessionId,
        link: Link,
        packet: ToLeader,
    ) {
        let term = link.term;
        let now = self.now;
        if !self.leader(term).is_up {
            return;
        }
        match packet {
            ToLeader::Capabilities(mut message) => {
                let is_mistaken = self.is(Mistake::AcceptOldMessages);
                if let ToManager::Claims(claims) | ToManager::SomeClaims(claims) = &mut message {
                    if self.plan.mistake == Some(Mistake::ClaimNothing) {
                        claims.clear();
                    }
                    if self.leader(term).links.get(&session) != Some(&link) {
                        self.disconnect(term, session, None);
                        self.leader(term).links.insert(session, link);
                    }
                }
                let leader = self.leader(term);
                let present = leader.links.get(&session).copied();
                let link = match is_mistaken {
                    true => present.unwrap_or(link),
                    false => link,
                };
                let shown = leader.clock.at(now);
                leader.manager.receive(shown, session, link, message);
            }
            ToLeader::Request(request) => {
                if self.leader(term).links.get(&session) == Some(&link) {
                    self.begin(term, host, session, link, request);
                }
            }
        }
        self.run_leader(term);
    }

    fn begin(&mut self, term: u64, host: usize, session: SessionId, link: Link, request: Request) {
        let now = self.now;
        let leader = self.leader(term);
        let same = leader
            .operations
            .values_mut()
            .find(|other| other.request.id == request.id);
        if let Some(same) = same {
            // The first try is under way. Its reply goes where it is waited for.
            same.link = link;
            return;
        }
        leader.last_operation += 1;
        let id = OperationId(leader.last_operation);
        let operation = Operation {
            host,
            session,
            link,
            request,
            began: now,
            is_under_way: false,
        };
        leader.operations.insert(id, operation);
        let footprint: Vec<Touch> = match request.body {
            Body::Names(_) => vec![],
            Body::File(ino) => vec![Touch {
                ino,
                access: Access::ReadFile,
            }],
            Body::Change { ino, .. } | Body::WriteBack { ino, .. } => match parent_of(ino) {
                None => vec![Touch {
                    ino,
                    access: Access::ChangeDirectory,
                }],
                Some(parent) => vec![
                    Touch {
                        ino,
                        access: Access::ChangeFile,
                    },
                    Touch {
                        ino: parent,
                        access: Access::ChangeChild(ino),
                    },
                ],
            },
        };
        let shown = leader.clock.at(now);
        leader.manager.begin(shown, id, session, &footprint);
    }

    /// The leader notices that a connection broke: this one, or whichever there is.
    pub fn disconnect(&mut self, term: u64, session: SessionId, link: Option<Link>) {
        let now = self.now;
        let leader = self.leader(term);
        let present = leader.links.get(&session).copied();
        if !leader.is_up || present.is_none() || link.is_some() && link != present {
            return;
        }
        leader.links.remove(&session);
        let is_lost =
            |operation: &Operation| operation.session == session && !operation.is_under_way;
        leader.operations.retain(|_, operation| !is_lost(operation));
        let shown = leader.clock.at(now);
        leader.manager.disconnected(shown, session);
        self.run_leader(term);
    }

    pub fn end_session(&mut self, term: u64, session: SessionId, end: SessionEnd) {
        let now = self.now;
        let end = match self.is(Mistake::ForgetGuestsOfCrashed) {
            true => SessionEnd::LeaseEnded,
            false => end,
        };
        let leader = self.leader(term);
        if leader.ended.insert(session) {
            let shown = leader.clock.at(now);
            leader.links.remove(&session);
            leader.manager.session_ended(shown, session, end);
            self.run_leader(term);
        }
    }

    /// Carries out what the manager wants, and arms its timer.
    pub fn run_leader(&mut self, term: u64) {
        loop {
            let mut reads = Vec::new();
            while let Some(action) = self.leader(term).manager.next_action() {
                reads.extend(self.on_action(term, action));
            }
            if reads.is_empty() {
                break;
            }
            for operation in reads {
                self.read(term, operation);
            }
        }
        let now = self.now;
        let leader = self.leader(term);
        if let Some(wakeup) = leader.manager.next_wakeup() {
            let at = leader.clock.when(wakeup).max(now + 1);
            if leader.tick_at.is_none_or(|tick_at| at < tick_at) {
                leader.tick_at = Some(at);
                self.at(at, Event::LeaderTick { term });
            }
        }
    }

    /// An operation to read for, if the action lets one go on.
    fn on_action(&mut self, term: u64, action: Action) -> Option<OperationId> {
        match action {
            Action::Send {
                session,
                link,
                message,
            } => {
                if self.is(Mistake::GrantBeforeAnswer) {
                    if let ToHolder::Recall { ino, grant, keep } = message {
                        let now = self.now;
                        let leader = self.leader(term);
                        let shown = leader.clock.at(now);
                        let forged = ToManager::Dropped {
                            ino,
                            grant,
                            kept: keep,
                        };
                        leader.manager.receive(shown, session, link, forged);
                    }
                }
                let packet = ToHost::Capabilities(message);
                self.send_to_host(session, link, packet);
            }
            Action::Proceed { operation } => return self.proceed(term, operation),
            Action::Refuse { operation, .. } => {
                let operation = self.leader(term).operations.remove(&operation);
                if let Some(operation) = operation {
                    self.reply(&operation, Outcome::Failed);
                }
            }
            Action::Late { session, ino, .. } => {
                if self.is(Mistake::FenceWhenLate) && ino.is_some() {
                    self.end_session(term, session, SessionEnd::LeaseEnded);
                }
            }
            Action::Fenced { session } => {
                if self.is_current(term) {
                    self.lose_buffered(session);
                    self.after(5 * MILLI, Event::RemoveSession { term, session });
                }
            }
            Action::Reclaimed => {}
            Action::Close { session, limit } => panic!("{session:?} is honest: {limit}"),
        }
        None
    }

    fn proceed(&mut self, term: u64, id: OperationId) -> Option<OperationId> {
        let now = self.now;
        let is_healed = self.is_healed();
        let operations = &mut self.leader(term).operations;
        let operation = operations.get_mut(&id).expect("what goes on has begun");
        operation.is_under_way = true;
        let waited = now - operation.began;
        let request = operation.request;
        if is_healed && self.is_current(term) {
            self.checker.wait_max = self.checker.wait_max.max(waited);
            if waited > 6 * SECOND {
                self.checker.late = Some(format!("{request:?} waited for {waited} ns"));
            }
        }
        match request.body {
            Body::Names(_) | Body::File(_) => Some(id),
            Body::Change { .. } | Body::WriteBack { .. } => {
                let after = self.rng.random_range(MILLI..=8 * MILLI);
                self.after(
                    after,
                    Event::Commit {
                        term,
                        operation: id,
                    },
                );
                None
            }
        }
    }

    fn read(&mut self, term: u64, id: OperationId) {
        let now = self.now;
        let is_mistaken = self.is(Mistake::CacheAnyChild);
        let namespace = self.leader(term).frozen.clone();
        let namespace = namespace.unwrap_or_else(|| self.namespace.clone());
        let leader = self.leader(term);
        let operation = leader.operations.remove(&id).expect("it is under way");
        let session = operation.session;
        let may_cache = |ino: Ino| is_mistaken || leader.manager.may_cache_child(session, ino);
        let outcome = match operation.request.body {
            Body::Names(ino) => {
                let children = files_of(ino).into_iter().filter(|file| may_cache(*file));
                let children = children.map(|file| (file, namespace.value(file))).collect();
                Outcome::Names {
                    value: namespace.value(ino),
                    children,
                }
            }
            Body::File(ino) => Outcome::File {
                value: namespace.value(ino),
                is_cacheable: may_cache(ino),
            },
            Body::Change { .. } | Body::WriteBack { .. } => unreachable!("it changes something"),
        };
        let shown = leader.clock.at(now);
        self.reply(&operation, outcome);
        self.leader(term).manager.end(shown, id);
    }

    /// A log entry is committed, unless its leader was lost.
    pub fn commit(&mut self, term: u64, id: OperationId) {
        if !self.is_current(term) || self.leader(term).is_deposed {
            return;
        }
        let now = self.now;
        let operation = self
            .leader(term)
            .operations
            .remove(&id)
            .expect("it is under way");
        let outcome = self.apply(&operation);
        self.reply(&operation, outcome);
        let leader = self.leader(term);
        let shown = leader.clock.at(now);
        leader.manager.end(shown, id);
        self.run_leader(term);
    }

    fn apply(&mut self, operation: &Operation) -> Outcome {
        let Request { id, body } = operation.request;
        if !self.namespace.sessions.contains(&operation.session) {
            return Outcome::Failed;
        }
        if !self.namespace.done.insert(id) {
            return Outcome::Done;
        }
        match body {
            Body::Names(_) | Body::File(_) => {}
            Body::Change { ino, value, guest } => {
                self.check_alone(ino, operation.host, guest, "is changed");
                self.namespace.values.insert(ino, value);
                self.checker.changes += 1;
                self.checker.change(ino, value, self.now);
            }
            Body::WriteBack { ino, value } => {
                let current = self.checker.current(ino);
                let holder = &self.hosts[operation.host];
                if current != value && holder.session == Some(operation.session) {
                    let what = format!("{value} is written back to {ino:?}, which is {current}");
                    self.checker.fail(self.now, what);
                }
                self.namespace.values.insert(ino, value);
                self.checker.change(ino, value, self.now);
            }
        }
        Outcome::Done
    }

    fn reply(&mut self, operation: &Operation, outcome: Outcome) {
        let id = operation.request.id;
        if operation.session == SessionId::NONE {
            let (Body::File(ino), Outcome::File { value, .. }) = (operation.request.body, outcome)
            else {
                unreachable!("a leader reads files");
            };
            self.checker
                .read(ino, value, operation.began, self.now, "a leader");
            return;
        }
        self.send_to_host(
            operation.session,
            operation.link,
            ToHost::Reply { id, outcome },
        );
    }
}
