//! Questions to the namespace, each with the answer that fits it.

use namespace::{
    Answer, Entry, Extent, ITEMS_MAX, Ino, Inode, Query, SIZE_MAX, SessionId, Statistics,
};

use crate::backend::{Answered, Backend};
use crate::client::Client;
use crate::failure::Failure;

/// A file and some of its extents, of one moment.
pub(crate) struct Look {
    pub(crate) ino: Ino,
    pub(crate) inode: Inode,
    /// Those that reach into the range that was asked for, in the order of their offsets.
    pub(crate) extents: Vec<Extent>,
}

impl<B: Backend> Client<B> {
    /// Counts a look at the cache.
    pub(crate) fn counted<T>(&self, cached: Option<T>) -> Option<T> {
        match cached {
            Some(_) => self.counters.hits.add(1),
            None => self.counters.misses.add(1),
        }
        cached
    }

    /// Asks the leader. What may be cached of the answer is.
    pub(crate) async fn ask(&self, query: Query) -> Result<Answer, Failure> {
        self.counters.questions.add(1);
        let question = self.cache.ask();
        let answered = self.backend.read(query.clone(), question.reader()).await?;
        let Answered { answer, sent } = answered;
        question.answered(self.backend.monotonic(), sent, &query, &answer);
        if let Ok(Answer::Names(names)) = &answer {
            self.counters.listed_names.add(names.len() as u64);
        }
        answer.map_err(Failure::Refused)
    }

    /// An inode's record, with what is buffered.
    pub(crate) async fn inode(&self, ino: Ino) -> Result<Inode, Failure> {
        loop {
            self.expire();
            let moment = self.buffer.moment();
            let cached = self.cache.inode(self.backend.monotonic(), ino);
            let mut inode = match self.counted(cached) {
                Some(inode) => inode,
                None => self.ask_inode(ino).await?,
            };
            self.expire();
            self.buffer.cover_inode(ino, &mut inode);
            // Else what was buffered may be missing in the record that was answered before.
            if !self.buffer.is_since(ino, moment) {
                return Ok(inode);
            }
        }
    }

    pub(crate) async fn ask_inode(&self, ino: Ino) -> Result<Inode, Failure> {
        match self.ask(Query::Inode(ino)).await? {
            Answer::Inode(_, inode) => Ok(*inode),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// The inode that a name leads to.
    pub(crate) async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<(Ino, Inode), Failure> {
        let now = self.backend.monotonic();
        let is_name = crate::names::may_be_name(name);
        let cached = is_name.then(|| self.cache.named(now, parent, name));
        match self.counted(cached.flatten()) {
            Some(Some(found)) => Ok(found),
            Some(None) => Err(Failure::Refused(namespace::Error::NotFound)),
            None => self.ask_name(parent, name).await,
        }
    }

    pub(crate) async fn ask_name(&self, parent: Ino, name: &[u8]) -> Result<(Ino, Inode), Failure> {
        let name = name.to_vec();
        match self.ask(Query::Lookup { parent, name }).await? {
            Answer::Inode(ino, inode) => Ok((ino, *inode)),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// A regular file, and at most `max` extents that reach into a range of it.
    pub(crate) async fn look(
        &self,
        ino: Ino,
        range: (u64, u64),
        max: u32,
    ) -> Result<Look, Failure> {
        let now = self.backend.monotonic();
        let cached = self.cache.content(now, ino, range, max as usize);
        match self.counted(cached) {
            Some((inode, extents)) => Ok(Look {
                ino,
                inode,
                extents,
            }),
            None => self.ask_content(ino, range, max).await,
        }
    }

    /// The same for whoever reads, and is likely to read on: a file that has been read since it was changed
    /// is asked for as a whole, to be cached.
    pub(crate) async fn look_to_read(
        &self,
        ino: Ino,
        range: (u64, u64),
        max: u32,
    ) -> Result<Look, Failure> {
        if self.cache.wants_extents(self.backend.monotonic(), ino) {
            let all = (0, SIZE_MAX);
            self.ask_content(ino, all, ITEMS_MAX as u32).await?;
        }
        self.look(ino, range, max).await
    }

    /// The same, as the leader has it now.
    pub(crate) async fn ask_content(
        &self,
        ino: Ino,
        range: (u64, u64),
        max: u32,
    ) -> Result<Look, Failure> {
        match self.ask(Query::Content { ino, range, max }).await? {
            Answer::Content(inode, extents) => Ok(Look {
                ino,
                inode: *inode,
                extents,
            }),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// At most `max` names behind a cookie.
    pub(crate) async fn ask_names(
        &self,
        parent: Ino,
        behind: u64,
        max: u32,
    ) -> Result<Vec<(Entry, Inode)>, Failure> {
        let query = Query::Readdir {
            parent,
            behind,
            max,
        };
        match self.ask(query).await? {
            Answer::Names(names) => Ok(names),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// Whether an inode is known to have no extended attributes.
    pub(crate) fn inode_has_no_xattrs(&self, ino: Ino) -> bool {
        let cached = self.cache.inode(self.backend.monotonic(), ino);
        let cached = cached.filter(|inode| inode.xattr_list_bytes == 0);
        self.counted(cached).is_some()
    }

    pub(crate) async fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Failure> {
        let name = name.to_vec();
        match self.ask(Query::Xattr { ino, name }).await? {
            Answer::Xattr(value) => Ok(value),
            other => Err(Failure::unfit(&other)),
        }
    }

    pub(crate) async fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, Failure> {
        match self.ask(Query::XattrNames(ino)).await? {
            Answer::XattrNames(names) => Ok(names),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// What the filesystem holds.
    pub(crate) async fn statistics(&self) -> Result<Statistics, Failure> {
        match self.ask(Query::Statistics).await? {
            Answer::Statistics(Some(statistics)) => Ok(statistics),
            Answer::Statistics(None) => Err(Failure::Refused(namespace::Error::Stale)),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// At most `max` orphans that a session holds, from an inode's number on.
    pub(crate) async fn held(
        &self,
        session: SessionId,
        from: Ino,
        max: u32,
    ) -> Result<Vec<Ino>, Failure> {
        let query = Query::Held { session, from, max };
        match self.ask(query).await? {
            Answer::Held(held) => Ok(held),
            other => Err(Failure::unfit(&other)),
        }
    }
}
