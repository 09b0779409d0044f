//! A host's side: what it holds, what it may promise to guests, and how it gives it up.

mod held;
mod promises;
mod scope;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use namespace::Ino;

use crate::kind::Kind;
use crate::manager::WAITING_MAX;
use crate::message::{Claim, GrantId, Link, Refusal, ToHolder, ToManager};
use crate::settings::Settings;
use crate::time::Instant;
use held::{Dropping, Held, HeldTable};
use promises::Promises;
pub use scope::Scope;
use scope::{Changed, Changing, Promised};

/// Capabilities that a session has asked for and not got. It is refused a further one. The manager lets twice
/// as much wait, so that operations have room.
pub const WANTED_MAX: usize = WAITING_MAX / 2;

/// How often a holder looks for what it did not use.
const SCAN_EVERY: Duration = Duration::from_secs(1);

/// A guest of this host: a kernel that caches what it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GuestId(pub u64);

/// What the holder's owner has to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HolderAction {
    /// Send a message to the leader on this connection. It is dropped if the connection is not there any
    /// more.
    Send {
        /// The connection.
        link: Link,
        /// The message.
        message: ToManager,
    },
    /// A capability was granted. It replaces what was held of that inode.
    Granted {
        /// The inode.
        ino: Ino,
        /// What may be done.
        kind: Kind,
    },
    /// A capability that was asked for is not granted.
    Refused {
        /// The inode.
        ino: Ino,
        /// What was asked for.
        kind: Kind,
        /// Why.
        refusal: Refusal,
    },
    /// Nothing more may be buffered for a file. Write back what is, commit it, and say
    /// [`Holder::written_back`].
    WriteBack {
        /// The file.
        ino: Ino,
    },
    /// Forget what is cached of an inode, and of a directory's children what was told with it, before
    /// anything else is done.
    Invalidate {
        /// The inode.
        ino: Ino,
    },
    /// The session is over. Forget all that is cached and all that is buffered. The holder is of no use any
    /// more, unless the session turns out to live on: [`Holder::restart`].
    SessionOver,
}

#[derive(Debug, Clone, Copy)]
struct Wanted {
    kind: Kind,
    parent: Option<Ino>,
    /// On the connection that is there now.
    is_sent: bool,
}

/// The capabilities that one session of a host holds of one filesystem.
///
/// Whoever answers a guest asks [`Holder::may`] just before each answer from a cache, and
/// [`Holder::validity`] just before the reply is published. What a reply of the leader says is cached only if
/// it came on the present connection, and `may` says so when it has come.
#[derive(Debug)]
pub struct Holder {
    settings: Settings,
    lease_until: Instant,
    is_over: bool,
    link: Option<Link>,
    /// The newest connection, also if it broke.
    last: Link,
    held: HeldTable,
    wanted: BTreeMap<Ino, Wanted>,
    changing: Changing,
    changed: Changed,
    promised: Promised,
    scan_at: Instant,
    actions: VecDeque<HolderAction>,
}

impl Holder {
    /// A new session's. Its heartbeat lease ends at `lease_until`.
    pub fn new(now: Instant, lease_until: Instant, settings: Settings) -> Self {
        Self {
            settings,
            lease_until,
            is_over: false,
            link: None,
            last: Link { term: 0, round: 0 },
            held: HeldTable::default(),
            wanted: BTreeMap::new(),
            changing: Changing::default(),
            changed: Changed::default(),
            promised: Promised::default(),
            scan_at: now + SCAN_EVERY,
            actions: VecDeque::new(),
        }
    }

    /// A heartbeat was answered. The lease counts from when it was sent, and is shorter than what the leader
    /// of group 0 counts, by the drift bound. A lease that has ended is not renewed.
    pub fn lease_until(&mut self, now: Instant, until: Instant) {
        if !self.is_over_at(now) {
            self.lease_until = self.lease_until.max(until);
        }
    }

    /// The lease had ended, but the session lives on, with a new lease: it holds nothing, and its next claims
    /// say so. Guests must not use any more what they were told under the old lease. Changes that have begun
    /// are still under way.
    pub fn restart(&mut self, now: Instant, lease_until: Instant) {
        self.lease_until = lease_until;
        self.is_over = false;
        self.link = None;
        self.held.clear();
        self.wanted.clear();
        self.actions.clear();
        self.scan_at = now + SCAN_EVERY;
    }

    /// There is a connection to the leader of this term: claims what is held, and asks again for what is
    /// wanted. None if a later leader is known.
    pub fn connected(&mut self, now: Instant, term: u64) -> Option<Link> {
        self.link = None;
        if self.is_over_at(now) || term < self.last.term {
            return None;
        }
        self.last = Link {
            term,
            round: self.last.round + 1,
        };
        self.link = Some(self.last);
        let claims = self.held.iter().map(|(ino, held)| {
            let (grant, kind) = (held.grant, held.kind);
            Claim { ino, grant, kind }
        });
        let claims: Vec<Claim> = claims.collect();
        self.send_claims(&claims);
        let wanted: Vec<Ino> = self.wanted.keys().copied().collect();
        for ino in wanted {
            self.wanted
                .entry(ino)
                .and_modify(|wanted| wanted.is_sent = false);
            self.ask(ino);
        }
        self.tick(now);
        self.link
    }

    /// The connection broke. What is held stays so until the session's lease ends.
    pub fn disconnected(&mut self) {
        self.link = None;
    }

    /// A message of the leader came on this connection. Those of old connections are ignored.
    pub fn receive(&mut self, now: Instant, link: Link, message: ToHolder) {
        if self.is_over_at(now) || self.link != Some(link) {
            return;
        }
        match message {
            ToHolder::Grant { ino, grant, kind } => self.granted(now, ino, grant, kind),
            ToHolder::Refuse { ino, kind, refusal } => {
                // More may have been asked for since.
                if self
                    .wanted
                    .get(&ino)
                    .is_some_and(|wanted| wanted.kind == kind)
                {
                    self.wanted.remove(&ino);
                }
                let refused = HolderAction::Refused { ino, kind, refusal };
                self.actions.push_back(refused);
            }
            ToHolder::Recall { ino, grant, keep } => {
                match self.held.get(ino).filter(|held| held.grant == grant) {
                    Some(_) => self.give_up(now, ino, keep),
                    // It was given up already, and the two messages crossed.
                    None => self.send(ToManager::Dropped {
                        ino,
                        grant,
                        kept: None,
                    }),
                }
            }
        }
        self.tick(now);
    }

    /// Asks for a capability, with a file's directory as in [`ToManager::Request`]. True if it is held;
    /// otherwise [`HolderAction::Granted`] or [`HolderAction::Refused`] follows, over any number of leaders.
    pub fn acquire(&mut self, now: Instant, ino: Ino, kind: Kind, parent: Option<Ino>) -> bool {
        let may = self.may(now, ino);
        if may.is_some_and(|may| may.includes(kind)) {
            return true;
        }
        let is_new = !self.wanted.contains_key(&ino);
        if self.is_over || is_new && self.wanted.len() >= WANTED_MAX {
            let refusal = match self.is_over {
                true => Refusal::SessionEnded,
                false => Refusal::TooMany,
            };
            let refused = HolderAction::Refused { ino, kind, refusal };
            self.actions.push_back(refused);
            return false;
        }
        let wanted = Wanted {
            kind,
            parent,
            is_sent: false,
        };
        let before = self.wanted.entry(ino).or_insert(wanted);
        if !before.kind.includes(kind) {
            *before = wanted;
        }
        self.ask(ino);
        false
    }

    /// What may be done to an inode without asking the leader: the capability that is held of it.
    pub fn may(&mut self, now: Instant, ino: Ino) -> Option<Kind> {
        if self.is_over_at(now) {
            return None;
        }
        let held = self.held.get_mut(ino)?;
        held.used_at = now;
        held.usable()
    }

    /// For how long a guest may use an entry or attributes that it is told under the capability of `ino`,
    /// from now, when the reply is published: [`Settings::validity`] or nothing. A directory's capability is
    /// asked for its entries, and for attributes of children that were told with them. `scope` says which of
    /// these it is; [`Scope::All`] is for whoever does not know.
    ///
    /// It is promised only if it was quiet for [`Settings::quiet`]: no change of this host has touched the
    /// scope, and the capability was held, so that nobody else has changed anything.
    pub fn validity(&mut self, now: Instant, ino: Ino, scope: Scope, guest: GuestId) -> Duration {
        let until = now + self.settings.promise();
        // A guest goes on without its host, so nothing is promised for longer than the session lives.
        if self.is_over_at(now) || until > self.lease_until || self.is_changing(ino, scope) {
            return Duration::ZERO;
        }
        let quiet = self.settings.quiet;
        let changed = self.changed.at((ino, scope));
        let held = self.held.get_mut(ino);
        let held = held.filter(|held| {
            let quiet_since = changed.map_or(held.quiet_since, |at| at.max(held.quiet_since));
            held.dropping.is_none() && now.since(quiet_since) >= quiet
        });
        let Some(held) = held else {
            return Duration::ZERO;
        };
        held.promises.give(now, guest, until);
        let is_known = scope != Scope::All && self.promised.give(now, (ino, scope), guest, until);
        if !is_known {
            held.promises_of_any.give(now, guest, until);
        }
        self.settings.validity
    }

    /// A guest's change begins of a scope of what the capability of `ino` covers, and it may be sent to the
    /// leader, or buffered, at the returned time: when no other guest of this host uses what it was told of
    /// that. Each inode is named whose capability covers what changes, with each scope. Until
    /// [`Holder::end_change`] nothing of the scope is promised.
    ///
    /// What the change makes untrue must not be told from the cache meanwhile: others may know of the change
    /// before its reply is here.
    pub fn begin_change(
        &mut self,
        now: Instant,
        ino: Ino,
        scope: Scope,
        guest: GuestId,
    ) -> Instant {
        self.changing.begin(ino, scope);
        let Some(held) = self.held.get(ino) else {
            return now;
        };
        let end = match scope {
            Scope::All => held.promises.end_beside(guest),
            _ => {
                let end = self.promised.end_beside((ino, scope), guest);
                end.unwrap_or(now)
                    .max(held.promises_of_any.end_beside(guest))
            }
        };
        end.max(now)
    }

    /// A guest's change that has begun moves something. Its kernel goes on using what it caches of it where
    /// it is afterwards, so that this counts as told there: a name that is renamed, and the attributes of
    /// what it leads to. When the change may be sent as far as this goes: if nothing can be promised there,
    /// once the guest uses what it was told no more. From [`Scope::All`], it always waits.
    pub fn carry(
        &mut self,
        now: Instant,
        from: (Ino, Scope),
        to: (Ino, Scope),
        guest: GuestId,
    ) -> Instant {
        let Some(held) = self.held.get(from.0) else {
            return now;
        };
        if from.1 == Scope::All {
            return held.promises.end_of(guest).max(now);
        }
        let end = self.promised.end_of(from, guest);
        let end = end.max(Some(held.promises_of_any.end_of(guest)));
        let Some(end) = end.filter(|end| *end > now) else {
            return now;
        };
        let held = self.held.get_mut(to.0);
        let Some(held) = held.filter(|held| held.dropping.is_none()) else {
            return end;
        };
        held.promises.give(now, guest, end);
        if !self.promised.give(now, to, guest, end) {
            held.promises_of_any.give(now, guest, end);
        }
        now
    }

    /// A change that began is done, or will never be.
    ///
    /// # Panics
    /// If none has begun.
    pub fn end_change(&mut self, now: Instant, ino: Ino, scope: Scope) {
        self.changing.end(ino, scope);
        let Some(held) = self.held.get_mut(ino) else {
            return;
        };
        let since = now.before(self.settings.quiet);
        if scope == Scope::All || !self.changed.note(now, (ino, scope), since) {
            held.quiet_since = held.quiet_since.max(now);
        }
    }

    /// Whether a change of this host itself is under way that touches the scope.
    pub fn is_changing(&self, ino: Ino, scope: Scope) -> bool {
        self.changing.touches(ino, scope)
    }

    /// Gives a capability up, unless more is wanted of that inode.
    pub fn release(&mut self, now: Instant, ino: Ino) {
        let is_kept = self.wanted.contains_key(&ino) || self.is_over_at(now);
        if !is_kept && self.held.get(ino).is_some() {
            self.give_up(now, ino, None);
        }
    }

    /// What was buffered for a file is committed, as [`HolderAction::WriteBack`] asked.
    ///
    /// # Panics
    /// If it did not ask, unless the session is over.
    pub fn written_back(&mut self, now: Instant, ino: Ino) {
        if self.is_over_at(now) {
            return;
        }
        let held = self
            .held
            .get_mut(ino)
            .expect("what is written back is held");
        let grant = held.grant;
        let dropping = held.dropping.as_mut().filter(|dropping| !dropping.is_clean);
        let dropping = dropping.expect("a file is written back when that was asked for");
        dropping.is_clean = true;
        match dropping.keep {
            // What is kept covers all validities that guests were given.
            Some(kept) => {
                held.kind = kept;
                held.dropping = None;
                let kept = Some(kept);
                self.send(ToManager::Dropped { ino, grant, kept });
                self.ask(ino);
            }
            None => {
                let end = held.promises.end();
                self.held.wait_until(end, ino);
                self.actions.push_back(HolderAction::Invalidate { ino });
            }
        }
        self.tick(now);
    }

    /// Time has passed: [`Holder::next_wakeup`] is reached.
    pub fn tick(&mut self, now: Instant) {
        if self.is_over_at(now) {
            return;
        }
        if self.scan_at <= now {
            self.scan_at = now + SCAN_EVERY;
            self.release_idle(now);
        }
        while let Some(ino) = self.held.take_end(now) {
            let held = self.held.remove(ino).expect("what is given up is held");
            let grant = held.grant;
            self.send(ToManager::Dropped {
                ino,
                grant,
                kept: None,
            });
            self.ask(ino);
        }
    }

    /// When [`Holder::tick`] is due; none once the session is over.
    pub fn next_wakeup(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let due = self.scan_at.min(self.lease_until);
        Some(self.held.next_end().map_or(due, |end| end.min(due)))
    }

    /// The next thing to do. Ask until there is none, at the time of the last call, before anything else is
    /// passed in.
    pub fn next_action(&mut self) -> Option<HolderAction> {
        self.actions.pop_front()
    }

    /// Capabilities that are held, with those that are being given up.
    pub fn count(&self) -> usize {
        self.held.len()
    }

    /// Whether the session is over. The moment its lease ends nothing is held any more.
    fn is_over_at(&mut self, now: Instant) -> bool {
        if !self.is_over && now >= self.lease_until {
            self.is_over = true;
            self.link = None;
            self.held.clear();
            self.wanted.clear();
            self.actions.clear();
            self.actions.push_back(HolderAction::SessionOver);
        }
        self.is_over
    }

    fn granted(&mut self, now: Instant, ino: Ino, grant: GrantId, kind: Kind) {
        let wanted = self.wanted.get(&ino);
        if wanted.is_some_and(|wanted| kind.includes(wanted.kind)) {
            self.wanted.remove(&ino);
        }
        match self.held.get_mut(ino) {
            // The leader grants nothing while it waits for an answer: what is given up, it has not asked for.
            Some(held) if held.dropping.is_some() => held.grant = grant,
            Some(held) => {
                held.grant = grant;
                held.kind = kind;
            }
            None => {
                let held = Held {
                    grant,
                    kind,
                    used_at: now,
                    quiet_since: now,
                    promises: Promises::default(),
                    promises_of_any: Promises::default(),
                    dropping: None,
                };
                self.held.insert(ino, held);
            }
        }
        self.actions.push_back(HolderAction::Granted { ino, kind });
        self.make_room(now);
    }

    /// Begins to give a capability up, down to what is kept.
    fn give_up(&mut self, now: Instant, ino: Ino, keep: Option<Kind>) {
        let held = self.held.get_mut(ino).expect("what is given up is held");
        if let Some(dropping) = &mut held.dropping {
            dropping.keep = dropping.keep.filter(|_| keep.is_some());
            return;
        }
        let (grant, kind) = (held.grant, held.kind);
        if keep.is_some_and(|keep| keep.includes(kind)) {
            self.send(ToManager::Dropped {
                ino,
                grant,
                kept: keep,
            });
            return;
        }
        let is_clean = kind != Kind::FileExclusive;
        held.dropping = Some(Dropping { keep, is_clean });
        if is_clean {
            let end = held.promises.end().max(now);
            self.held.wait_until(end, ino);
            self.actions.push_back(HolderAction::Invalidate { ino });
        } else {
            self.actions.push_back(HolderAction::WriteBack { ino });
        }
    }

    /// Sends what is wanted of an inode, unless what is held of it has to be given up first.
    fn ask(&mut self, ino: Ino) {
        let held = self.held.get(ino);
        let is_dropping = held.is_some_and(|held| held.dropping.is_some());
        let Some(wanted) = self.wanted.get_mut(&ino) else {
            return;
        };
        if self.link.is_none() || is_dropping || wanted.is_sent {
            return;
        }
        wanted.is_sent = true;
        let (kind, parent) = (wanted.kind, wanted.parent);
        self.send(ToManager::Request { ino, kind, parent });
    }

    /// Sends claims for all held capabilities, split into messages that the leader accepts.
    fn send_claims(&mut self, claims: &[Claim]) {
        let mut messages: Vec<&[Claim]> = claims.chunks(self.settings.claims_at_once).collect();
        // Who holds nothing says so.
        let last = messages.pop().unwrap_or_default();
        for claims in messages {
            self.send(ToManager::SomeClaims(claims.to_vec()));
        }
        self.send(ToManager::Claims(last.to_vec()));
    }

    fn send(&mut self, message: ToManager) {
        if let Some(link) = self.link {
            self.actions.push_back(HolderAction::Send { link, message });
        }
    }

    /// Gives up what was not used for long.
    fn release_idle(&mut self, now: Instant) {
        let idle = self.settings.idle;
        for (ino, used_at) in self.held.scan() {
            let is_used = now.since(used_at) < idle || self.is_changing(ino, Scope::All);
            if !is_used {
                self.release(now, ino);
            }
        }
    }

    /// Gives up one that was not used for long, as far as a short search finds it, if there are too many.
    fn make_room(&mut self, now: Instant) {
        let max = self.settings.capabilities_max;
        // Before the leader has to recall some, which it chooses without knowing what is used.
        if self.held.len() <= max - max / 16 {
            return;
        }
        let scanned = self.held.scan().into_iter();
        let oldest = scanned.min_by_key(|(ino, used_at)| (*used_at, *ino));
        if let Some((ino, _)) = oldest {
            self.release(now, ino);
        }
    }
}
