//! The session's link to the leader: what is said on it, and what its beginning and end mean for the cache.

use fs_capabilities::{GuestId, Holder, Instant, Link, MESSAGES_MAX, ToHolder, ToManager};
use namespace::SessionId;

use super::{Cache, State};
use crate::backend::Reader;
use crate::sync::lock;

impl Cache {
    /// Whether a session and its link would be of use.
    pub(crate) fn is_link_wanted(&self) -> bool {
        lock(&self.state).interest.is_link_wanted()
    }

    /// There is a session with this lease, and a leader of this term: begins a link. None if the lease has
    /// ended, or another leader is known, or guests may still use what they were told under a former lease.
    pub(crate) fn connect(
        &self,
        now: Instant,
        session: SessionId,
        lease_until: Instant,
        term: u64,
    ) -> Option<Reader> {
        let mut state = lock(&self.state);
        state.at(now);
        state.connect(session, lease_until, term)
    }

    /// The link is gone. What is held stays.
    pub(crate) fn disconnected(&self, reader: Reader) {
        let mut state = lock(&self.state);
        if state.link == Some(reader.link) {
            state.disconnect();
        }
        drop(state);
        self.settled.notify();
    }

    /// Whether this is the link.
    pub(crate) fn is_linked(&self, reader: Reader) -> bool {
        let state = lock(&self.state);
        (state.session, state.link) == (Some(reader.session), Some(reader.link))
    }

    /// Messages came on a link, behind number `behind`. How many have come by now.
    pub(crate) fn receive(
        &self,
        now: Instant,
        reader: Reader,
        behind: u64,
        messages: Vec<ToHolder>,
    ) -> u64 {
        let mut state = lock(&self.state);
        state.at(now);
        for (number, message) in (behind + 1..).zip(messages) {
            if state.link == Some(reader.link) && number == state.received + 1 {
                state.receive(reader.link, number, message);
            }
        }
        let received = state.received;
        drop(state);
        self.settled.notify();
        self.to_load.notify();
        received
    }

    /// Messages to send on the link, as many as the leader takes in one call, and the number of the first.
    pub(crate) fn outgoing(&self) -> Option<(u64, Vec<ToManager>)> {
        let state = lock(&self.state);
        let mut weight = 0;
        let messages = state.outgoing.iter().take_while(|message| {
            weight += message.weight();
            weight <= MESSAGES_MAX
        });
        let messages: Vec<_> = messages.cloned().collect();
        (!messages.is_empty()).then_some((state.first, messages))
    }

    /// Messages up to this number were taken.
    pub(crate) fn sent(&self, reader: Reader, last: u64) {
        let mut state = lock(&self.state);
        while state.link == Some(reader.link) && state.first <= last {
            state.outgoing.pop_front();
            state.first += 1;
        }
    }

    /// Time has passed, and the lease ends then, as far as that is known. When this is to be called again.
    pub(crate) fn tick(&self, now: Instant, lease_until: Option<Instant>) -> Option<Instant> {
        let mut state = lock(&self.state);
        state.at(now);
        let now = state.now;
        let holder = state.holder.as_mut()?;
        if let Some(until) = lease_until {
            holder.lease_until(now, until);
        }
        holder.tick(now);
        state.act(0);
        state.holder.as_ref()?.next_wakeup()
    }

    /// A session was found to have ended.
    pub(crate) fn session_ended(&self, session: SessionId) {
        let mut state = lock(&self.state);
        if state.session == Some(session) {
            state.end_session();
        }
        drop(state);
        self.wake.notify();
        self.settled.notify();
    }

    /// Whether there was a link.
    pub(crate) fn has_session(&self) -> bool {
        lock(&self.state).session.is_some()
    }

    /// Gives up all that is held, as no guest is there any more: a new link, and the message that says so.
    pub(crate) fn farewell(
        &self,
        now: Instant,
        lease_until: Instant,
        term: u64,
    ) -> Option<(Reader, Vec<ToManager>)> {
        let mut state = lock(&self.state);
        state.at(now);
        let (now, session) = (state.now, state.session?);
        state.end_session();
        let holder = state.holder.as_mut()?;
        holder.restart(now, lease_until);
        let link = holder.connected(now, term)?;
        state.link = Some(link);
        state.act(0);
        let messages = state.outgoing.drain(..).collect();
        state.end_session();
        Some((Reader { session, link }, messages))
    }
}

impl State {
    fn connect(&mut self, session: SessionId, lease_until: Instant, term: u64) -> Option<Reader> {
        let now = self.now;
        self.disconnect();
        if lease_until <= now {
            return None;
        }
        if self.session != Some(session) {
            self.begin_session(session, lease_until);
        }
        let holder = self.holder.as_mut()?;
        holder.lease_until(now, lease_until);
        holder.tick(now);
        if holder.next_wakeup().is_none() {
            // Its lease had ended, and it lives on. The next claims say that nothing is held.
            if now < self.promised.last() {
                return None;
            }
            self.lost_all();
            let holder = self.holder.as_mut()?;
            holder.restart(now, lease_until);
        }
        let holder = self.holder.as_mut()?;
        let link = holder.connected(now, term)?;
        self.link = Some(link);
        self.store.claimed();
        self.act(0);
        self.request_wished();
        Some(Reader { session, link })
    }

    fn begin_session(&mut self, session: SessionId, lease_until: Instant) {
        let now = self.now;
        self.lost_all();
        self.former_promises = self.promised.last();
        self.session = Some(session);
        let mut holder = Holder::new(now, lease_until, self.limits.settings.clone());
        for ((ino, scope), count) in &self.changing {
            for _ in 0..*count {
                holder.begin_change(now, *ino, *scope, GuestId::default());
            }
        }
        self.holder = Some(holder);
    }

    /// The session is over: nothing is held. If its lease has not ended, guests may still go by what they
    /// were told.
    fn end_session(&mut self) {
        let now = self.now;
        self.former_promises = self.promised.last();
        if let Some(holder) = &mut self.holder {
            // A lease that ends now has ended.
            holder.restart(now, now);
            holder.tick(now);
        }
        self.act(0);
    }

    fn disconnect(&mut self) {
        if let Some(holder) = &mut self.holder {
            holder.disconnected();
        }
        self.link = None;
        self.received = 0;
        self.outgoing.clear();
        self.first = 1;
        self.requested.clear();
    }

    fn receive(&mut self, link: Link, number: u64, message: ToHolder) {
        let now = self.now;
        self.received = number;
        if let ToHolder::Recall { ino, .. } = message {
            self.recalls += 1;
            self.interest.recalled(ino, now);
        }
        if let Some(holder) = &mut self.holder {
            holder.receive(now, link, message);
        }
        self.act(number);
    }
}
