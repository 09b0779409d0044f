//! Keeps the session's link, and loads directories.

use std::future::{Future, pending};
use std::pin::Pin;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{Either, FutureExt, select};
use futures_util::stream::FuturesUnordered;
use namespace::{ITEMS_MAX, Ino, Query};

use crate::backend::{Backend, LinkBroken, Reader};
use crate::client::Client;
use crate::sync::Mode;

use super::interest::Expected;

/// Pause before a link is begun anew, and before a lease is looked for again. Doubled each time that nothing
/// came of it, up to the maximum: there may be no session to be had any more.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// See [`PAUSE_MIN`].
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How long a lister waits for the directory's capability. Then it goes on without.
const GRANT_WAIT_MAX: Duration = Duration::from_millis(100);

/// How long whoever looks a name up waits for it: several round trips, and less than it takes another host to
/// give something up.
const LOOKUP_WAIT_MAX: Duration = Duration::from_millis(5);

/// Directories that are loaded at a time.
const LOADS_MAX: usize = 8;

/// How often the end of the lease is looked at, at least and at most.
const LEASE_LOOK: Duration = Duration::from_secs(1);
const TICK_MIN: Duration = Duration::from_millis(1);

impl<B: Backend> Client<B> {
    /// Works until the client is being ended.
    pub(crate) async fn run_cache(&self) {
        let work = select(
            Box::pin(self.keep_link()),
            Box::pin(self.load_directories()),
        );
        let closing = async {
            loop {
                let closing = self.life.closing.listen();
                if self.life.is_closing() {
                    return;
                }
                // A signal that is gone is one that came.
                let _ = closing.await;
            }
        };
        select(work, Box::pin(closing)).await;
    }

    async fn keep_link(&self) {
        let mut pause = PAUSE_MIN;
        loop {
            let wake = self.cache.wake.listen();
            if self.sessions.current().is_none() && !self.cache.is_link_wanted() {
                // A signal that is gone is one that came.
                let _ = wake.await;
                continue;
            }
            drop(wake);
            let before = pause;
            pause = (pause * 2).min(PAUSE_MAX);
            if let Some(reader) = self.connect().await {
                if self.serve_link(reader).await {
                    pause = PAUSE_MIN;
                }
                self.cache.disconnected(reader);
            }
            self.backend.sleep(before.min(pause)).await;
        }
    }

    /// Begins a link to the present leader, if there is one and the session's lease is known.
    async fn connect(&self) -> Option<Reader> {
        self.backend.lease_until()?;
        let session = self.session().await.ok()?;
        let term = self.backend.leader_term().await.ok()?;
        let lease_until = self.backend.lease_until()?;
        let now = self.backend.monotonic();
        self.cache.connect(now, session.id, lease_until, term)
    }

    /// Sends and receives until the link breaks. Whether the leader had taken the claims.
    async fn serve_link(&self, reader: Reader) -> bool {
        let mut sending: Option<Pin<Box<_>>> = None;
        // The link is there once the leader has taken the claims.
        let mut receiving: Option<Pin<Box<_>>> = None;
        loop {
            let wake = self.cache.wake.listen();
            let now = self.backend.monotonic();
            let lease_until = self.backend.lease_until();
            let due = self.cache.tick(now, lease_until);
            let (Some(due), true) = (due, self.cache.is_linked(reader)) else {
                return receiving.is_some();
            };
            if sending.is_none() {
                let outgoing = self.cache.outgoing();
                sending = outgoing.map(|(first, messages)| {
                    let last = first + messages.len() as u64 - 1;
                    let sent = self.backend.send(reader, first, messages);
                    Box::pin(sent.map(move |sent| sent.map(|()| last)))
                });
            }
            // The lease is renewed well before it ends.
            let lease = lease_until.map_or(LEASE_LOOK, |until| until.since(now) / 2);
            let tick = due.since(now).min(LEASE_LOOK).min(lease);
            let tick = self.backend.sleep(tick.max(TICK_MIN));
            let timers = select(wake, Box::pin(tick));
            let received = Box::pin(wait_for(&mut receiving));
            let links = select(received, Box::pin(wait_for(&mut sending)));
            let event = match select(links, timers).await {
                Either::Left((Either::Left((received, _)), _)) => Event::Received(received),
                Either::Left((Either::Right((sent, _)), _)) => Event::Sent(sent),
                Either::Right(_) => Event::Woken,
            };
            match event {
                Event::Woken => {}
                Event::Received(Err(LinkBroken)) | Event::Sent(Err(LinkBroken)) => {
                    return receiving.is_some();
                }
                Event::Received(Ok(behind)) => {
                    receiving = Some(Box::pin(self.receive(reader, behind)));
                }
                Event::Sent(Ok(last)) => {
                    self.cache.sent(reader, last);
                    sending = None;
                    receiving.get_or_insert_with(|| Box::pin(self.receive(reader, 0)));
                }
            }
        }
    }

    /// Receives messages behind a number. The number of the last that came.
    async fn receive(&self, reader: Reader, behind: u64) -> Result<u64, LinkBroken> {
        let messages = self.backend.receive(reader, behind).await?;
        let now = self.backend.monotonic();
        Ok(self.cache.receive(now, reader, behind, messages))
    }

    /// Loads directories that were granted for that.
    async fn load_directories(&self) {
        let mut loads = FuturesUnordered::new();
        loop {
            let to_load = self.cache.to_load.listen();
            while loads.len() < LOADS_MAX {
                let Some(dir) = self.cache.next_load() else {
                    break;
                };
                loads.push(self.load_directory(dir));
            }
            let next = async {
                match loads.next().await {
                    Some(()) => {}
                    None => pending().await,
                }
            };
            select(to_load, Box::pin(next)).await;
        }
    }

    async fn load_directory(&self, dir: Ino) {
        while !self.cache.is_complete(dir) && self.load_page(dir, None).await {}
        self.cache.loaded(dir);
    }

    /// If a directory is being loaded, loads the next page of it, or waits for who does. Whether there may
    /// be names now that were not there before.
    pub(crate) async fn join_load(&self, dir: Ino) -> bool {
        if self.cache.expects_names(dir) == Some(Expected::Granted) {
            self.await_grant(dir, LOOKUP_WAIT_MAX).await;
            if self.cache.is_requested(dir) {
                self.cache.note_slow(dir);
            }
        }
        let is_loading = self.cache.expects_names(dir) == Some(Expected::Loading);
        if is_loading {
            self.load_page(dir, None).await;
        }
        is_loading
    }

    /// Loads the next page of a directory, if it goes on behind this cookie, or anywhere with none. Whether
    /// there is more to load.
    async fn load_page(&self, dir: Ino, behind: Option<u64>) -> bool {
        let _turn = self.loading.lock(dir, Mode::Exclusive).await;
        let now = self.backend.monotonic();
        let is_begin = behind.is_some_and(|behind| behind < namespace::FIRST_COOKIE);
        let from = self.cache.load_from(now, dir, is_begin);
        let Some(from) = from.filter(|from| behind.is_none_or(|behind| behind == *from)) else {
            return false;
        };
        if from < namespace::FIRST_COOKIE && self.cache.inode(now, dir).is_none() {
            // Whoever opens it looks at it.
            let _ = self.ask_inode(dir).await;
        }
        let page = Query::Readdir {
            parent: dir,
            behind: from,
            max: ITEMS_MAX as u32,
        };
        // Whoever wants the names asks again if this fails.
        let is_answered = self.ask(page).await.is_ok();
        let reached = self.cache.load_from(now, dir, false);
        is_answered && reached.is_some_and(|reached| reached != from)
    }

    /// Has a directory's names loaded from a cookie on, if they may be cached.
    pub(crate) async fn load_names(&self, dir: Ino, behind: u64) {
        if behind < namespace::FIRST_COOKIE {
            self.await_directory(dir).await;
        }
        self.load_page(dir, Some(behind)).await;
    }

    /// Asks for a directory's capability, and waits a short while for it.
    async fn await_directory(&self, dir: Ino) {
        if self.cache.request_directory(self.backend.monotonic(), dir) {
            self.await_grant(dir, GRANT_WAIT_MAX).await;
        }
    }

    /// Waits for a capability that was asked for to be granted or refused.
    async fn await_grant(&self, dir: Ino, wait_max: Duration) {
        let mut patience = Box::pin(self.backend.sleep(wait_max));
        loop {
            let settled = self.cache.settled.listen();
            if !self.cache.is_requested(dir) {
                return;
            }
            if let Either::Right(_) = select(settled, &mut patience).await {
                return;
            }
        }
    }

    /// Gives up what is held, so that nobody waits for this client.
    pub(crate) async fn say_farewell(&self) {
        if !self.cache.has_session() {
            return;
        }
        let Ok(term) = self.backend.leader_term().await else {
            return;
        };
        let Some(lease_until) = self.backend.lease_until() else {
            return;
        };
        let now = self.backend.monotonic();
        if let Some((reader, messages)) = self.cache.farewell(now, lease_until, term) {
            // If it does not arrive, others wait until the session has ended.
            let _ = self.backend.send(reader, 1, messages).await;
        }
    }
}

/// Waits for what is under way, or for ever.
async fn wait_for<T>(under_way: &mut Option<Pin<Box<impl Future<Output = T>>>>) -> T {
    match under_way {
        Some(future) => future.await,
        None => pending().await,
    }
}

/// What happens on a link.
enum Event {
    Woken,
    /// Messages came, the last with this number.
    Received(Result<u64, LinkBroken>),
    /// Messages were taken, the last with this number.
    Sent(Result<u64, LinkBroken>),
}
