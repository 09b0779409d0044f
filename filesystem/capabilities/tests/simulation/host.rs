//! A host: the holder, the caches of its owner, its guests, and what they have asked for.

use std::collections::BTreeMap;

use fs_capabilities::{GuestId, Holder, HolderAction, Instant, Kind, Link, Scope};
use namespace::{Ino, SessionId};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::clock::Clock;
use crate::event::{Body, Event, GuestReply, Outcome, Request, ToHost, ToLeader};
use crate::plan::{LEASE, MILLI, Mistake};
use crate::tasks::{State, Task, What};
use crate::world::{INODES, World, files_of, parent_of};

/// Acts that a guest has under way at most.
const TASKS_MAX: usize = 3;

/// What the owner knows without asking.
#[derive(Debug, Default)]
pub struct Cache {
    /// Directories.
    pub names: BTreeMap<Ino, u64>,
    /// Files' attributes that were told with their directory.
    pub children: BTreeMap<Ino, u64>,
    pub files: BTreeMap<Ino, u64>,
    /// What is buffered.
    pub dirty: BTreeMap<Ino, u64>,
}

/// A guest's kernel.
#[derive(Debug)]
pub struct Guest {
    clock: Clock,
    /// Values, and until when they may be used.
    cached: BTreeMap<Ino, (u64, Instant)>,
    /// Its own changes under way, and since when.
    changing: BTreeMap<Ino, u64>,
    last_reply: u64,
}

impl Guest {
    pub fn cached(&self, ino: Ino, now: u64) -> Option<u64> {
        let (value, until) = self.cached.get(&ino)?;
        (self.clock.at(now) < *until).then_some(*value)
    }
}

/// A request that was not answered.
#[derive(Debug)]
struct Asked {
    request: Request,
    task: Option<u64>,
    /// The connection on which it was sent first.
    link: Option<Link>,
}

pub struct Host {
    pub clock: Clock,
    pub is_up: bool,
    pub is_cut: bool,
    pub session: Option<SessionId>,
    pub holder: Option<Holder>,
    pub link: Option<Link>,
    pub guests: Vec<Guest>,
    pub tasks: BTreeMap<u64, Task>,
    pub cache: Cache,
    asked: BTreeMap<u64, Asked>,
    tick_at: Option<u64>,
    pub to_leader_at: u64,
    pub to_host_at: u64,
}

impl Host {
    pub fn new(rng: &mut ChaCha8Rng, guests: usize) -> Self {
        let guest = |rng: &mut ChaCha8Rng| Guest {
            clock: Clock::draw(rng),
            cached: BTreeMap::new(),
            changing: BTreeMap::new(),
            last_reply: 0,
        };
        Self {
            clock: Clock::draw(rng),
            is_up: true,
            is_cut: false,
            session: None,
            holder: None,
            link: None,
            guests: (0..guests).map(|_| guest(rng)).collect(),
            tasks: BTreeMap::new(),
            cache: Cache::default(),
            asked: BTreeMap::new(),
            tick_at: None,
            to_leader_at: 0,
            to_host_at: 0,
        }
    }

    /// Loses the session and all that belongs to it: the session, and files that had buffered data.
    pub fn forget(&mut self) -> Option<(SessionId, Vec<Ino>)> {
        self.holder = None;
        self.link = None;
        self.tasks.clear();
        self.asked.clear();
        let cache = std::mem::take(&mut self.cache);
        for guest in &mut self.guests {
            // An error is all that it hears of its changes.
            for ino in std::mem::take(&mut guest.changing).into_keys() {
                guest.cached.remove(&ino);
            }
        }
        let session = self.session.take()?;
        Some((session, cache.dirty.into_keys().collect()))
    }
}

/// What an inode's value is of what a capability covers.
pub fn scope(under: Ino, ino: Ino) -> Scope {
    match under == ino {
        true => Scope::Itself,
        false => Scope::Child(ino),
    }
}

impl World {
    pub fn shown(&self, host: usize) -> Instant {
        self.hosts[host].clock.at(self.now)
    }

    pub fn may(&mut self, host: usize, ino: Ino) -> Option<Kind> {
        let now = self.shown(host);
        self.hosts[host].holder.as_mut()?.may(now, ino)
    }

    /// Whether the host has something that it may tell without asking.
    pub fn may_answer(&mut self, host: usize, ino: Ino) -> bool {
        let cache = &self.hosts[host].cache;
        let Some(parent) = parent_of(ino) else {
            return cache.names.contains_key(&ino) && self.may(host, ino).is_some();
        };
        let is_child = cache.children.contains_key(&ino);
        let is_file = cache.files.contains_key(&ino) || cache.dirty.contains_key(&ino);
        is_file && self.may(host, ino).is_some() || is_child && self.may(host, parent).is_some()
    }

    pub fn host_opens(&mut self, host: usize, session: SessionId) {
        let settings = self.plan.holder_settings();
        let now = self.shown(host);
        let lease_until = match self.is(Mistake::HolderIgnoresLease) {
            true => Instant::from_nanos(u64::MAX),
            false => now + LEASE,
        };
        let opened = &mut self.hosts[host];
        opened.session = Some(session);
        opened.holder = Some(Holder::new(now, lease_until, settings));
        self.run_host(host);
    }

    pub fn host_connects(&mut self, host: usize, term: u64) {
        let now = self.shown(host);
        let connected = &mut self.hosts[host];
        let holder = connected.holder.as_mut().expect("it has a session");
        let Some(link) = holder.connected(now, term) else {
            return;
        };
        connected.link = Some(link);
        self.run_host(host);
        let asked: Vec<Request> = self.hosts[host]
            .asked
            .values()
            .map(|asked| asked.request)
            .collect();
        for request in asked {
            self.send_to_leader(host, link, ToLeader::Request(request));
        }
    }

    pub fn host_receives(&mut self, host: usize, session: SessionId, link: Link, packet: ToHost) {
        let now = self.shown(host);
        let receiver = &mut self.hosts[host];
        if receiver.session != Some(session) {
            return;
        }
        match packet {
            ToHost::Capabilities(message) => {
                let is_mistaken = self.plan.mistake == Some(Mistake::AcceptOldMessages);
                let link = match is_mistaken {
                    true => receiver.link.unwrap_or(link),
                    false => link,
                };
                let holder = receiver.holder.as_mut().expect("it has a session");
                holder.receive(now, link, message);
            }
            ToHost::Reply { id, outcome } => {
                if let Some(asked) = self.hosts[host].asked.remove(&id) {
                    self.on_reply(host, link, &asked, outcome);
                }
            }
        }
        self.run_host(host);
    }

    pub fn host_tick(&mut self, host: usize) {
        let shown = self.shown(host);
        if self.hosts[host].tick_at != Some(self.now) {
            return;
        }
        self.hosts[host].tick_at = None;
        if let Some(holder) = &mut self.hosts[host].holder {
            holder.tick(shown);
        }
        self.run_host(host);
    }

    /// Carries out what the holder wants, goes on with what guests asked for, and arms the timer.
    pub fn run_host(&mut self, host: usize) {
        loop {
            while let Some(action) = self.next_action(host) {
                self.on_holder_action(host, action);
            }
            let tasks: Vec<u64> = self.hosts[host].tasks.keys().copied().collect();
            let mut has_moved = false;
            for task in tasks {
                has_moved |= self.step(host, task);
            }
            if !has_moved {
                break;
            }
        }
        let now = self.now;
        let armed = &mut self.hosts[host];
        let wakeup = armed.holder.as_ref().and_then(Holder::next_wakeup);
        if let Some(wakeup) = wakeup {
            let at = armed.clock.when(wakeup).max(now + 1);
            if armed
                .tick_at
                .is_none_or(|tick_at| at < tick_at || tick_at <= now)
            {
                armed.tick_at = Some(at);
                self.at(at, Event::HostTick { host });
            }
        }
    }

    fn next_action(&mut self, host: usize) -> Option<HolderAction> {
        self.hosts[host].holder.as_mut()?.next_action()
    }

    fn on_holder_action(&mut self, host: usize, action: HolderAction) {
        match action {
            HolderAction::Send { link, message } => {
                self.send_to_leader(host, link, ToLeader::Capabilities(message));
            }
            HolderAction::Granted { ino, kind } => {
                if self.may(host, ino).is_some() {
                    self.check_held(ino, host, kind);
                }
                self.wake(host, ino);
            }
            HolderAction::Refused { ino, .. } => self.wake(host, ino),
            HolderAction::WriteBack { ino } => self.write_back(host, ino),
            HolderAction::Invalidate { ino } => {
                let cache = &mut self.hosts[host].cache;
                cache.names.remove(&ino);
                cache.files.remove(&ino);
                for child in files_of(ino) {
                    cache.children.remove(&child);
                }
            }
            HolderAction::SessionOver => {
                self.forget_session(host);
                self.after(10 * MILLI, Event::OpenSession { host });
            }
        }
    }

    /// Tasks that wait for a capability of the inode look again.
    fn wake(&mut self, host: usize, ino: Ino) {
        for task in self.hosts[host].tasks.values_mut() {
            if task.state == State::Wanted && task.what.ino() == ino {
                task.state = State::Ready;
            }
        }
    }

    fn write_back(&mut self, host: usize, ino: Ino) {
        let is_mistaken = self.is(Mistake::RecallWithoutFlush);
        let dirty = self.hosts[host].cache.dirty.get(&ino).copied();
        match dirty.filter(|_| !is_mistaken) {
            Some(value) => {
                self.ask(host, None, Body::WriteBack { ino, value });
            }
            None => {
                self.hosts[host].cache.dirty.remove(&ino);
                self.written_back(host, ino);
            }
        }
    }

    fn written_back(&mut self, host: usize, ino: Ino) {
        let now = self.shown(host);
        if let Some(holder) = &mut self.hosts[host].holder {
            holder.written_back(now, ino);
        }
    }

    /// Asks the leader, now or when there is a connection.
    pub fn ask(&mut self, host: usize, task: Option<u64>, body: Body) -> u64 {
        let id = self.next_number();
        let request = Request { id, body };
        let link = self.hosts[host].link;
        self.hosts[host].asked.insert(
            id,
            Asked {
                request,
                task,
                link,
            },
        );
        if let Some(link) = link {
            self.send_to_leader(host, link, ToLeader::Request(request));
        }
        id
    }

    fn on_reply(&mut self, host: usize, link: Link, asked: &Asked, outcome: Outcome) {
        let is_first_try = asked.link == Some(link);
        match (asked.request.body, outcome) {
            (_, Outcome::Failed) => {
                // The session has ended, and the host will find out.
                let id = asked.request.id;
                let request = asked.request;
                let again = Asked {
                    request,
                    task: asked.task,
                    link: None,
                };
                self.hosts[host].asked.insert(id, again);
            }
            (Body::Names(ino), Outcome::Names { value, children }) => {
                self.learn_names(host, ino, value, children);
                let is_kept = self.hosts[host].cache.names.contains_key(&ino);
                self.finish_read(host, asked.task, ino, value, is_kept.then_some(ino));
            }
            (
                Body::File(ino),
                Outcome::File {
                    value,
                    is_cacheable,
                },
            ) => {
                let under = self.learn_file(host, ino, value, is_cacheable);
                self.finish_read(host, asked.task, ino, value, under);
            }
            (Body::Change { ino, value, .. }, _) => {
                self.finish_change(host, asked.task, ino, value, is_first_try);
            }
            (Body::WriteBack { ino, value }, _) => {
                let here = &mut self.hosts[host];
                here.cache.dirty.remove(&ino);
                here.cache.files.insert(ino, value);
                self.written_back(host, ino);
            }
            (body, outcome) => unreachable!("{body:?} was answered {outcome:?}"),
        }
    }

    fn learn_names(&mut self, host: usize, ino: Ino, value: u64, children: Vec<(Ino, u64)>) {
        if self.may(host, ino).is_none() || self.is_changing(host, ino) {
            return;
        }
        self.hosts[host].cache.names.insert(ino, value);
        for (child, value) in children {
            // What the host may buffer itself, it knows better.
            let is_own = self.may(host, child) == Some(Kind::FileExclusive);
            let is_dirty = self.hosts[host].cache.dirty.contains_key(&child);
            if !is_own && !is_dirty && !self.is_changing(host, child) {
                self.hosts[host].cache.children.insert(child, value);
            }
        }
    }

    /// The inode under whose capability the value is kept.
    fn learn_file(&mut self, host: usize, ino: Ino, value: u64, is_cacheable: bool) -> Option<Ino> {
        let parent = parent_of(ino).expect("a file has a directory");
        let is_dirty = self.hosts[host].cache.dirty.contains_key(&ino);
        if is_dirty || self.is_changing(host, ino) {
            return None;
        }
        if self.may(host, ino).is_some() {
            self.hosts[host].cache.files.insert(ino, value);
            return Some(ino);
        }
        if is_cacheable && self.may(host, parent).is_some() {
            self.hosts[host].cache.children.insert(ino, value);
            return Some(parent);
        }
        None
    }

    pub fn is_changing(&self, host: usize, ino: Ino) -> bool {
        let holder = self.hosts[host].holder.as_ref();
        holder.is_some_and(|holder| holder.is_changing(ino, Scope::Itself))
    }

    /// Tells a guest a value, which it may go on using if the capability of `under` allows it.
    pub fn answer(&mut self, host: usize, task: &Task, value: u64, under: Option<Ino>) {
        let now = self.shown(host);
        let guest = task.guest;
        let ino = task.what.ino();
        let mut is_valid = false;
        if let (Some(under), Some(holder)) = (under, &mut self.hosts[host].holder) {
            let validity = holder.validity(now, under, scope(under, ino), GuestId(guest as u64));
            is_valid = !validity.is_zero() || self.is(Mistake::PromiseAlways);
        }
        let began = task.began;
        self.tell(
            host,
            guest,
            GuestReply::Read {
                ino,
                value,
                began,
                is_valid,
            },
        );
    }

    /// A guest gets its replies in order, and each within the delay that is allowed for.
    pub fn tell(&mut self, host: usize, guest: usize, reply: GuestReply) {
        let delay = match self.rng.random_ratio(1, 4) {
            true => self.rng.random_range(0..45 * MILLI),
            false => self.rng.random_range(0..MILLI),
        };
        let told = &mut self.hosts[host].guests[guest];
        let at = (self.now + delay).max(told.last_reply + 1);
        told.last_reply = at;
        self.at(at, Event::GuestReply { host, guest, reply });
    }

    pub fn guest_hears(&mut self, host: usize, guest: usize, reply: GuestReply) {
        let now = self.now;
        let told = &mut self.hosts[host].guests[guest];
        match reply {
            GuestReply::Read {
                ino,
                value,
                began,
                is_valid,
            } => {
                if is_valid {
                    let until = told.clock.at(now) + std::time::Duration::from_secs(1);
                    told.cached.insert(ino, (value, until));
                } else {
                    told.cached.remove(&ino);
                }
                let who = format!("guest {host}.{guest}");
                self.checker.read(ino, value, began, now, &who);
            }
            GuestReply::Changed { ino } => {
                told.cached.remove(&ino);
                told.changing.remove(&ino);
            }
        }
    }

    pub fn guest_act(&mut self, host: usize, guest: usize) {
        let after = self.rng.random_range(MILLI..=self.plan.pace);
        if self.now + after < self.plan.stop_at {
            self.after(after, Event::GuestAct { host, guest });
        }
        let ino = INODES[self.rng.random_range(0..INODES.len())];
        let chance = self.rng.random_range(0..100);
        let now = self.now;
        let acting = &mut self.hosts[host].guests[guest];
        let is_change = chance < self.plan.changes + self.plan.writes;
        if !is_change {
            if let Some(value) = acting.cached(ino, now) {
                // Its own change may be applied before it hears of it.
                let began = acting.changing.get(&ino).copied().unwrap_or(now);
                let who = format!("guest {host}.{guest}, from its own cache,");
                self.checker.cached_reads += 1;
                self.checker.read(ino, value, began, now, &who);
                return;
            }
        }
        let acts = self.hosts[host]
            .tasks
            .values()
            .filter(|task| task.guest == guest)
            .count();
        if self.hosts[host].holder.is_none() || acts >= TASKS_MAX {
            return;
        }
        let acting = &mut self.hosts[host].guests[guest];
        if is_change && acting.changing.contains_key(&ino) {
            return;
        }
        let is_write = parent_of(ino).is_some() && chance < self.plan.writes;
        let what = match (is_change, is_write) {
            (false, _) => What::Read(ino),
            (true, false) => What::Change(ino),
            (true, true) => What::Write(ino),
        };
        if is_change {
            acting.changing.insert(ino, now);
        }
        let id = self.next_number();
        let task = Task {
            guest,
            what,
            began: now,
            state: State::New,
            is_begun: false,
        };
        self.hosts[host].tasks.insert(id, task);
        self.run_host(host);
    }

    pub fn next_number(&mut self) -> u64 {
        self.checker.numbers += 1;
        self.checker.numbers
    }
}
