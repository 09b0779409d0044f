//! Everything: hosts, guests, leaders, the network, and what goes wrong.

use std::collections::BTreeMap;

use fs_capabilities::{Instant, Kind, Link, SessionEnd};
use namespace::{Ino, SessionId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::checker::Checker;
use crate::clock::Clock;
use crate::event::{Event, ToHost, ToLeader};
use crate::host::Host;
use crate::leader::{Leader, Namespace};
use crate::plan::{DRIFT_BOUND, LEASE, MILLI, Mistake, Plan, SECOND};

/// Two directories, and files in them.
pub const INODES: [Ino; 6] = [Ino(2), Ino(3), Ino(20), Ino(21), Ino(22), Ino(30)];

/// The directory of a file; none of a directory.
pub fn parent_of(ino: Ino) -> Option<Ino> {
    (ino.0 >= 10).then_some(Ino(ino.0 / 10))
}

pub fn files_of(directory: Ino) -> Vec<Ino> {
    let files = INODES.into_iter();
    files
        .filter(|ino| parent_of(*ino) == Some(directory))
        .collect()
}

/// What was wrong with a run.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Somebody saw, or could have seen, what must not be seen.
    #[error("{0}")]
    Unsafe(String),
    /// Something waited for too long.
    #[error("stuck: {0}")]
    Stuck(String),
}

/// Who watches heartbeats: group 0.
struct Watch {
    clock: Clock,
    heard: BTreeMap<SessionId, Instant>,
    ended: BTreeMap<SessionId, SessionEnd>,
}

pub struct World {
    pub now: u64,
    pub plan: Plan,
    pub rng: ChaCha8Rng,
    pub hosts: Vec<Host>,
    pub leaders: Vec<Leader>,
    pub namespace: Namespace,
    pub checker: Checker,
    events: BTreeMap<(u64, u64), Event>,
    sequence: u64,
    watch: Watch,
    /// What ended sessions had buffered.
    buffered: BTreeMap<SessionId, Vec<Ino>>,
    host_of: BTreeMap<SessionId, usize>,
}

impl World {
    pub fn new(seed: u64, draw: impl FnOnce(&mut ChaCha8Rng) -> Plan) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let plan = draw(&mut rng);
        let clock = Clock::draw(&mut rng);
        let hosts = (0..plan.hosts)
            .map(|_| Host::new(&mut rng, plan.guests))
            .collect();
        let mut world = Self {
            now: 0,
            plan,
            rng,
            hosts,
            leaders: Vec::new(),
            namespace: Namespace::default(),
            checker: Checker::default(),
            events: BTreeMap::new(),
            sequence: 0,
            watch: Watch {
                clock,
                heard: BTreeMap::new(),
                ended: BTreeMap::new(),
            },
            buffered: BTreeMap::new(),
            host_of: BTreeMap::new(),
        };
        world.new_leader(1);
        world.start();
        world
    }

    fn start(&mut self) {
        for host in 0..self.hosts.len() {
            self.after(MILLI, Event::OpenSession { host });
            self.after(2 * MILLI, Event::Heartbeat { host });
            for guest in 0..self.plan.guests {
                self.after(10 * MILLI, Event::GuestAct { host, guest });
            }
        }
        self.after(MILLI, Event::Watch);
        self.again(self.plan.breaks, Event::BreakOne);
        self.again(self.plan.failovers, Event::Depose);
        self.again(self.plan.crashes, Event::Crash);
        self.again(self.plan.cuts, Event::Cut);
        self.at(self.plan.heal_at, Event::HealAll);
    }

    /// Runs to the end, or to the first thing that must not be.
    pub fn run(&mut self) -> Result<&Checker, Failure> {
        while let Some(((at, _), event)) = self.events.pop_first() {
            if at > self.plan.end_at {
                break;
            }
            self.now = at;
            self.on_event(event);
            if let Some(late) = self.checker.late.take() {
                return Err(Failure::Stuck(late));
            }
            if let Some(failure) = self.checker.failure.take() {
                return Err(Failure::Unsafe(failure));
            }
        }
        self.check_quiet().map_err(Failure::Stuck)?;
        Ok(&self.checker)
    }

    /// In the end nobody waits.
    fn check_quiet(&mut self) -> Result<(), String> {
        for (index, host) in self.hosts.iter().enumerate() {
            if !host.tasks.is_empty() {
                return Err(format!("host {index} has not done {:?}", host.tasks));
            }
        }
        let leader = self.leaders.last().expect("there is a leader");
        let counts = leader.manager.counts();
        let is_quiet = (counts.waiting, counts.under_way, counts.recalls) == (0, 0, 0);
        if !is_quiet || leader.manager.is_reclaiming() {
            return Err(format!("the last leader has {counts:?}"));
        }
        Ok(())
    }

    pub fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events
            .insert((time.max(self.now), self.sequence), event);
    }

    pub fn after(&mut self, nanoseconds: u64, event: Event) {
        self.at(self.now + nanoseconds, event);
    }

    /// Lets a failure happen some time later, before all is healed.
    fn again(&mut self, every: u64, event: Event) {
        if every == 0 {
            return;
        }
        let at = self.now + self.rng.random_range(every / 4..=every * 2);
        if at < self.plan.heal_at {
            self.at(at, event);
        }
    }

    pub fn is(&self, mistake: Mistake) -> bool {
        self.plan.mistake == Some(mistake)
    }

    pub fn leader(&mut self, term: u64) -> &mut Leader {
        let index = usize::try_from(term).expect("terms are few") - 1;
        &mut self.leaders[index]
    }

    pub fn is_current(&self, term: u64) -> bool {
        self.leaders
            .last()
            .is_some_and(|leader| leader.term == term)
    }

    /// Whether failures are over, and their consequences too.
    pub fn is_healed(&self) -> bool {
        self.now > self.plan.heal_at + 12 * SECOND
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::HostTick { host } => self.host_tick(host),
            Event::RunTasks { host } => self.run_host(host),
            Event::LeaderTick { term } => self.leader_tick(term),
            Event::LeadLease { term } => self.lead_lease(term),
            Event::OwnRead { term } => self.own_read(term),
            Event::ToLeader {
                host,
                session,
                link,
                packet,
            } => {
                if self.arrives(host, link, matches!(packet, ToLeader::Capabilities(_))) {
                    self.leader_receives(host, session, link, packet);
                }
            }
            Event::ToHost {
                host,
                session,
                link,
                packet,
            } => {
                if self.arrives(host, link, matches!(packet, ToHost::Capabilities(_))) {
                    self.host_receives(host, session, link, packet);
                }
            }
            Event::Commit { term, operation } => self.commit(term, operation),
            Event::RemoveSession { term, session } => {
                if self.is_current(term) && !self.leader(term).is_deposed {
                    self.namespace.sessions.remove(&session);
                }
            }
            Event::GuestAct { host, guest } => self.guest_act(host, guest),
            Event::GuestReply { host, guest, reply } => self.guest_hears(host, guest, reply),
            Event::Heartbeat { .. }
            | Event::HeartbeatHeard { .. }
            | Event::HeartbeatAnswered { .. }
            | Event::Watch => self.on_heartbeat(event),
            Event::OpenSession { host } => self.open_session(host),
            Event::Connect { host } => self.connect(host),
            Event::Break { host, link } => {
                if link.is_some() && self.hosts[host].link == link {
                    self.break_link(host);
                }
            }
            Event::Noticed { session, link } => self.disconnect(link.term, session, Some(link)),
            _ => self.on_failure(event),
        }
    }

    fn on_failure(&mut self, event: Event) {
        let host = self.rng.random_range(0..self.hosts.len());
        match event {
            Event::BreakOne => {
                self.break_link(host);
                self.again(self.plan.breaks, Event::BreakOne);
            }
            Event::Depose => self.depose(),
            Event::Elect => {
                self.elect();
                self.again(self.plan.failovers, Event::Depose);
            }
            Event::Crash => {
                self.crash(host);
                let after = self.rng.random_range(10 * MILLI..8 * SECOND);
                self.after(after, Event::Restart { host });
                self.again(self.plan.crashes, Event::Crash);
            }
            Event::Restart { host } => self.restart(host),
            Event::Cut => {
                self.break_link(host);
                self.hosts[host].is_cut = true;
                let after = self.rng.random_range(100 * MILLI..8 * SECOND);
                self.after(after, Event::Heal { host });
                self.again(self.plan.cuts, Event::Cut);
            }
            Event::Heal { host } => self.hosts[host].is_cut = false,
            Event::HealAll => {
                for host in 0..self.hosts.len() {
                    self.hosts[host].is_cut = false;
                    self.restart(host);
                }
            }
            other => unreachable!("{other:?} is no failure"),
        }
    }

    /// The present leader is lost: it crashes, or it is cut off from its group and does not know.
    fn depose(&mut self) {
        let crashes = self.rng.random_ratio(1, 2);
        let leader = self.leaders.last_mut().expect("there is a leader");
        leader.is_deposed = true;
        leader.is_up = !crashes;
        let after = leader.lease_end.max(self.now) - self.now + self.rng.random_range(1..SECOND);
        if crashes {
            for host in 0..self.hosts.len() {
                self.break_link(host);
            }
        }
        self.after(after, Event::Elect);
    }

    fn leader_tick(&mut self, term: u64) {
        let now = self.now;
        let leader = self.leader(term);
        if leader.tick_at == Some(now) {
            leader.tick_at = None;
            if leader.is_up {
                let shown = leader.clock.at(now);
                leader.manager.tick(shown);
                self.run_leader(term);
            }
        }
    }

    fn delay(&mut self) -> u64 {
        let usual = 5 * MILLI.min(self.plan.delay);
        let latest = match self.rng.random_ratio(1, 10) {
            true => self.plan.delay,
            false => usual,
        };
        self.rng.random_range(MILLI / 10..=latest)
    }

    /// Whether a message comes: what was on a connection that broke is lost, or late if it is one that says
    /// which connection it is of.
    fn arrives(&mut self, host: usize, link: Link, is_told_apart: bool) -> bool {
        let is_present = self.hosts[host].link == Some(link);
        is_present || is_told_apart && self.rng.random_ratio(1, 2)
    }

    pub fn send_to_leader(&mut self, host: usize, link: Link, packet: ToLeader) {
        let delay = self.delay();
        let Some(session) = self.hosts[host].session else {
            return;
        };
        let sender = &mut self.hosts[host];
        let at = (self.now + delay).max(sender.to_leader_at + 1);
        sender.to_leader_at = at;
        self.at(
            at,
            Event::ToLeader {
                host,
                session,
                link,
                packet,
            },
        );
    }

    pub fn send_to_host(&mut self, session: SessionId, link: Link, packet: ToHost) {
        let delay = self.delay();
        let host = self.host_of[&session];
        let receiver = &mut self.hosts[host];
        let at = (self.now + delay).max(receiver.to_host_at + 1);
        receiver.to_host_at = at;
        self.at(
            at,
            Event::ToHost {
                host,
                session,
                link,
                packet,
            },
        );
    }

    pub fn break_link(&mut self, host: usize) {
        let broken = &mut self.hosts[host];
        if let (Some(link), Some(session)) = (broken.link.take(), broken.session) {
            if let Some(holder) = &mut broken.holder {
                holder.disconnected();
            }
            let noticed = self.rng.random_range(0..100 * MILLI);
            self.after(noticed, Event::Noticed { session, link });
            let again = self.rng.random_range(MILLI..200 * MILLI);
            self.after(again, Event::Connect { host });
        }
    }

    fn connect(&mut self, host: usize) {
        let present = &self.hosts[host];
        if present.link.is_some() || present.holder.is_none() {
            return;
        }
        // Sometimes the old leader is still taken for the present one.
        let count = self.leaders.len();
        let index = match count > 1 && self.rng.random_ratio(1, 6) {
            true => count - 2,
            false => count - 1,
        };
        let leader = &self.leaders[index];
        let (term, is_up) = (leader.term, leader.is_up);
        if is_up && !present.is_cut {
            self.host_connects(host, term);
        }
        let link = self.hosts[host].link;
        if link.is_none() {
            self.after(50 * MILLI, Event::Connect { host });
        } else if !self.is_current(term) {
            // A leader that was deposed finds out, and closes its connections.
            let after = self.rng.random_range(MILLI..500 * MILLI);
            self.after(after, Event::Break { host, link });
        }
    }

    fn on_heartbeat(&mut self, event: Event) {
        match event {
            Event::Heartbeat { host } => {
                let sender = &self.hosts[host];
                if let (Some(session), false) = (sender.session, sender.is_cut) {
                    let (delay, sent) = (self.delay(), self.now);
                    self.after(
                        delay,
                        Event::HeartbeatHeard {
                            host,
                            session,
                            sent,
                        },
                    );
                }
                self.after(300 * MILLI, Event::Heartbeat { host });
            }
            Event::HeartbeatHeard {
                host,
                session,
                sent,
            } => {
                if self.watch.ended.contains_key(&session) {
                    return;
                }
                let shown = self.watch.clock.at(self.now);
                self.watch.heard.insert(session, shown);
                if !self.hosts[host].is_cut {
                    let delay = self.delay();
                    self.after(
                        delay,
                        Event::HeartbeatAnswered {
                            host,
                            session,
                            sent,
                        },
                    );
                }
            }
            Event::HeartbeatAnswered {
                host,
                session,
                sent,
            } => {
                let now = self.now;
                let renewed = &mut self.hosts[host];
                if renewed.session == Some(session) {
                    let until = renewed.clock.at(sent) + LEASE;
                    let shown = renewed.clock.at(now);
                    if let Some(holder) = &mut renewed.holder {
                        holder.lease_until(shown, until);
                    }
                    self.run_host(host);
                }
            }
            _ => self.watch_sessions(),
        }
    }

    fn watch_sessions(&mut self) {
        let shown = self.watch.clock.at(self.now);
        // Longer than a host counts, by the true drift bound also where machines forget about it.
        let lease = LEASE + LEASE / DRIFT_BOUND + std::time::Duration::from_nanos(1);
        for (session, heard) in &self.watch.heard {
            if shown >= *heard + lease {
                self.watch
                    .ended
                    .entry(*session)
                    .or_insert(SessionEnd::LeaseEnded);
            }
        }
        let ended = self.watch.ended.clone();
        self.watch
            .heard
            .retain(|session, _| !ended.contains_key(session));
        let leader = self.leaders.last().expect("there is a leader");
        let (term, is_led) = (leader.term, !leader.is_deposed);
        for (session, end) in ended {
            if is_led && self.namespace.sessions.contains(&session) {
                self.end_session(term, session, end);
            }
        }
        self.after(50 * MILLI, Event::Watch);
    }

    fn open_session(&mut self, host: usize) {
        let leader = self.leaders.last().expect("there is a leader");
        let (term, is_led) = (leader.term, !leader.is_deposed);
        let opener = &self.hosts[host];
        if opener.session.is_some() || !opener.is_up {
            return;
        }
        if opener.is_cut || !is_led {
            self.after(100 * MILLI, Event::OpenSession { host });
            return;
        }
        self.namespace.last_session += 1;
        let session = SessionId(self.namespace.last_session);
        self.namespace.sessions.insert(session);
        self.host_of.insert(session, host);
        self.watch
            .heard
            .insert(session, self.watch.clock.at(self.now));
        self.leader(term).manager.session_opened(session);
        self.host_opens(host, session);
        self.after(MILLI, Event::Connect { host });
    }

    /// The daemon dies. Its guests' kernels go on.
    fn crash(&mut self, host: usize) {
        self.break_link(host);
        self.forget_session(host);
        self.hosts[host].is_up = false;
    }

    fn restart(&mut self, host: usize) {
        if self.hosts[host].is_up {
            return;
        }
        self.hosts[host].is_up = true;
        // Its registration ends what its last incarnation had.
        for (session, owner) in &self.host_of {
            if *owner == host {
                self.watch
                    .ended
                    .entry(*session)
                    .or_insert(SessionEnd::Restarted);
            }
        }
        self.after(MILLI, Event::OpenSession { host });
    }

    /// A host has lost its session, with what it had buffered.
    pub fn forget_session(&mut self, host: usize) {
        let lost = self.hosts[host].forget();
        if let Some((session, inodes)) = lost {
            self.buffered.insert(session, inodes);
        }
    }

    /// An ended session is fenced: nobody will ever see what it had buffered and not committed.
    pub fn lose_buffered(&mut self, session: SessionId) {
        for ino in self.buffered.remove(&session).unwrap_or_default() {
            let value = self.namespace.value(ino);
            self.checker.change(ino, value, self.now);
        }
    }

    /// Nobody but this guest may use anything cached of an inode that changes now.
    pub fn check_alone(&mut self, ino: Ino, by_host: usize, by_guest: usize, what: &str) {
        for host in 0..self.hosts.len() {
            if host != by_host && self.may_answer(host, ino) {
                let what = format!("{ino:?} {what} while host {host} may answer from its cache");
                self.checker.fail(self.now, what);
            }
            for guest in 0..self.plan.guests {
                let is_own = (host, guest) == (by_host, by_guest);
                if !is_own
                    && self.hosts[host].guests[guest]
                        .cached(ino, self.now)
                        .is_some()
                {
                    let what = format!("{ino:?} {what} while guest {host}.{guest} has it cached");
                    self.checker.fail(self.now, what);
                }
            }
        }
    }

    /// Whoever got this just now must be the only one to hold what conflicts.
    pub fn check_held(&mut self, ino: Ino, by_host: usize, kind: Kind) {
        for host in (0..self.hosts.len()).filter(|host| *host != by_host) {
            let other = self.may(host, ino);
            let is_conflict = match kind {
                Kind::FileExclusive => other.is_some(),
                Kind::FileRead | Kind::DirectoryRead => other == Some(Kind::FileExclusive),
            };
            if is_conflict {
                let what =
                    format!("{by_host} is granted {kind:?} of {ino:?}, {host} has {other:?}");
                self.checker.fail(self.now, what);
            }
        }
    }
}
