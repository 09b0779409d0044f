//! A client on behalf of one guest.

use std::ops::Deref;
use std::sync::Arc;

use fs_capabilities::{GuestId, Instant};
use namespace::{Attributes, Entry, Ino, Operation, Outcome};

use crate::backend::Backend;
use crate::buffer::Moment;
use crate::cache::{Change, Found, Told};
use crate::client::Client;
use crate::failure::Failure;
use crate::session::Session;

/// Pages of a directory that is being loaded for which whoever looks a name up waits.
const JOINED_PAGES_MAX: u32 = 2;

/// A client on behalf of one guest. A change waits for what guests were told with a validity, unless only
/// this one was told it.
pub(crate) struct Caller<'a, B: Backend> {
    client: &'a Client<B>,
    guest: GuestId,
}

impl<B: Backend> Clone for Caller<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Caller<'_, B> {}

impl<B: Backend> Deref for Caller<'_, B> {
    type Target = Client<B>;

    fn deref(&self) -> &Client<B> {
        self.client
    }
}

impl<'a, B: Backend> Caller<'a, B> {
    pub(crate) fn new(client: &'a Client<B>, guest: GuestId) -> Self {
        Self { client, guest }
    }

    /// As [`Client::apply`].
    pub(crate) async fn apply(&self, operation: Operation) -> Result<Outcome, Failure> {
        self.client.apply_for(self.guest, operation).await
    }

    /// As [`Client::apply_in`].
    pub(crate) async fn apply_in(
        &self,
        session: &Arc<Session>,
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        let client = self.client;
        client.apply_in_for(self.guest, session, operation).await
    }

    /// As [`Client::apply_held`].
    pub(crate) async fn apply_held(
        &self,
        session: &Arc<Session>,
        ino: Ino,
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        let (client, guest) = (self.client, Some(self.guest));
        let at = client.backend.now();
        client
            .apply_held(guest, session, (at, ino), operation)
            .await
    }

    /// A write begins that is to be buffered: [`Cache::begin_buffered`](crate::cache::Cache).
    pub(crate) fn begin_buffered(&self, now: Instant, ino: Ino) -> (Change, Instant) {
        self.cache.begin_buffered(now, self.guest, ino)
    }

    /// The attributes of an inode.
    pub(crate) async fn attributes(&self, ino: Ino) -> Result<Told, Failure> {
        if let Some(told) = self.counted(self.told(ino)) {
            return Ok(told);
        }
        loop {
            let moment = self.buffer.moment();
            let inode = self.ask_inode(ino).await?;
            // It may be cached by now.
            if let Some(told) = self.told(ino) {
                return Ok(told);
            }
            let told = self.covered(Told::once(Attributes::of(ino, &inode)), moment);
            if let Some(told) = told {
                return Ok(told);
            }
        }
    }

    /// What is cached, with what is buffered.
    fn told(&self, ino: Ino) -> Option<Told> {
        self.expire();
        let moment = self.buffer.moment();
        let now = self.backend.monotonic();
        let told = self.cache.attributes(now, self.guest, ino)?;
        self.covered(told, moment)
    }

    /// An inode as it was told to this host, with what is buffered. None if something may have been written
    /// back since: it is to be looked at anew.
    fn covered(&self, mut told: Told, moment: Moment) -> Option<Told> {
        let ino = told.attributes.ino;
        #[cfg(feature = "testing")]
        if self.options.mistake == Some(crate::cache::Mistake::AttributesPastBuffer) {
            return Some(told);
        }
        self.expire();
        self.buffer.cover_attributes(&mut told.attributes);
        (!self.buffer.is_since(ino, moment)).then_some(told)
    }

    /// Attributes that the leader replied to an operation which began at this moment, with what is buffered.
    pub(crate) async fn replied(
        &self,
        attributes: Attributes,
        moment: Moment,
    ) -> Result<Attributes, Failure> {
        let ino = attributes.ino;
        match self.covered(Told::once(attributes), moment) {
            Some(told) => Ok(told.attributes),
            None => Ok(self.attributes(ino).await?.attributes),
        }
    }

    /// The inode that a name leads to.
    pub(crate) async fn find(&self, parent: Ino, name: &[u8]) -> Result<Found, Failure> {
        if let Some(found) = self.counted(self.found(parent, name)) {
            return Ok(found);
        }
        // One question for a page of names rather than one for each. Of a large directory, one name does not
        // wait for all.
        for _ in 0..JOINED_PAGES_MAX {
            if !self.join_load(parent).await {
                break;
            }
            if let Some(found) = self.found(parent, name) {
                return Ok(found);
            }
        }
        let moment = self.buffer.moment();
        let answer = self.ask_name(parent, name).await;
        if let Some(found) = self.found(parent, name) {
            return Ok(found);
        }
        let (ino, inode) = answer?;
        let told = self.covered(Told::once(Attributes::of(ino, &inode)), moment);
        Ok(Found::Inode(match told {
            Some(told) => told,
            None => self.attributes(ino).await?,
        }))
    }

    fn found(&self, parent: Ino, name: &[u8]) -> Option<Found> {
        if !crate::names::may_be_name(name) {
            return None;
        }
        self.expire();
        let moment = self.buffer.moment();
        let now = self.backend.monotonic();
        match self.cache.lookup(now, self.guest, parent, name)? {
            Found::Inode(told) => self.covered(told, moment).map(Found::Inode),
            absent => Some(absent),
        }
    }

    /// At most `max` names behind a cookie. `with_inodes`: each comes with the attributes of its inode.
    pub(crate) async fn list(
        &self,
        dir: Ino,
        behind: u64,
        max: u32,
        with_inodes: bool,
    ) -> Result<Vec<(Entry, Option<Told>)>, Failure> {
        if let Some(names) = self.counted(self.listed(dir, behind, max, with_inodes)) {
            return Ok(names);
        }
        self.load_names(dir, behind).await;
        if let Some(names) = self.listed(dir, behind, max, with_inodes) {
            return Ok(names);
        }
        let moment = self.buffer.moment();
        let names = self.ask_names(dir, behind, max).await?.into_iter();
        let names = names.map(|(entry, inode)| {
            let told = match self.found(dir, &entry.name) {
                _ if !with_inodes => None,
                Some(Found::Inode(told)) if told.attributes.ino == entry.ino => Some(told),
                // Without attributes, the guest looks for them when it needs them.
                _ => self.covered(Told::once(Attributes::of(entry.ino, &inode)), moment),
            };
            (entry, told)
        });
        Ok(names.collect())
    }

    /// The same, if it is cached.
    fn listed(
        &self,
        dir: Ino,
        behind: u64,
        max: u32,
        with_inodes: bool,
    ) -> Option<Vec<(Entry, Option<Told>)>> {
        self.expire();
        let moment = self.buffer.moment();
        let now = self.backend.monotonic();
        let guest = with_inodes.then_some(self.guest);
        let names = self.cache.list(now, guest, dir, behind, max as usize)?;
        let names = names.into_iter().map(|(entry, told)| {
            let told = told.and_then(|told| self.covered(told, moment));
            (entry, told)
        });
        let names: Vec<_> = names.collect();
        let is_whole = !with_inodes || names.iter().all(|(_, told)| told.is_some());
        is_whole.then_some(names)
    }
}
