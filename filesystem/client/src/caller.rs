//! A client on behalf of one guest.

use std::ops::Deref;
use std::sync::Arc;

use fs_capabilities::GuestId;
use namespace::{Attributes, Entry, Ino, Operation, Outcome};

use crate::backend::Backend;
use crate::cache::{Found, Told};
use crate::client::Client;
use crate::failure::Failure;
use crate::session::Session;

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

    /// The attributes of an inode.
    pub(crate) async fn attributes(&self, ino: Ino) -> Result<Told, Failure> {
        if let Some(told) = self.counted(self.told(ino)) {
            return Ok(told);
        }
        let inode = self.ask_inode(ino).await?;
        // It may be cached by now.
        let told = self.told(ino);
        Ok(told.unwrap_or_else(|| Told::once(Attributes::of(ino, &inode))))
    }

    fn told(&self, ino: Ino) -> Option<Told> {
        let now = self.backend.monotonic();
        self.cache.attributes(now, self.guest, ino)
    }

    /// The inode that a name leads to.
    pub(crate) async fn find(&self, parent: Ino, name: &[u8]) -> Result<Found, Failure> {
        if let Some(found) = self.counted(self.found(parent, name)) {
            return Ok(found);
        }
        let answer = self.ask_name(parent, name).await;
        if let Some(found) = self.found(parent, name) {
            return Ok(found);
        }
        let (ino, inode) = answer?;
        Ok(Found::Inode(Told::once(Attributes::of(ino, &inode))))
    }

    fn found(&self, parent: Ino, name: &[u8]) -> Option<Found> {
        if !crate::names::may_be_name(name) {
            return None;
        }
        let now = self.backend.monotonic();
        self.cache.lookup(now, self.guest, parent, name)
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
        let names = self.ask_names(dir, behind, max).await?.into_iter();
        let names = names.map(|(entry, inode)| {
            let told = with_inodes.then(|| match self.found(dir, &entry.name) {
                Some(Found::Inode(told)) if told.attributes.ino == entry.ino => told,
                _ => Told::once(Attributes::of(entry.ino, &inode)),
            });
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
        let now = self.backend.monotonic();
        let guest = with_inodes.then_some(self.guest);
        let names = self.cache.list(now, guest, dir, behind, max as usize)?;
        let is_whole = !with_inodes || names.iter().all(|(_, told)| told.is_some());
        is_whole.then_some(names)
    }
}
