//! Questions to the namespace, each with the answer that fits it.

use namespace::{Answer, Entry, Extent, Ino, Inode, Query, SessionId, Statistics};

use crate::backend::Backend;
use crate::client::Client;
use crate::failure::Failure;

/// A file and some of its extents, of one moment.
pub(crate) struct Look {
    pub(crate) inode: Inode,
    /// Those that reach into the range that was asked for, in the order of their offsets.
    pub(crate) extents: Vec<Extent>,
}

impl<B: Backend> Client<B> {
    pub(crate) async fn ask(&self, query: Query) -> Result<Answer, Failure> {
        self.counters.questions.add(1);
        let answer = self.backend.read(query).await?;
        answer.map_err(Failure::Refused)
    }

    pub(crate) async fn inode(&self, ino: Ino) -> Result<Inode, Failure> {
        match self.ask(Query::Inode(ino)).await? {
            Answer::Inode(_, inode) => Ok(*inode),
            other => Err(Failure::unfit(&other)),
        }
    }

    pub(crate) async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<(Ino, Inode), Failure> {
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
        match self.ask(Query::Content { ino, range, max }).await? {
            Answer::Content(inode, extents) => Ok(Look {
                inode: *inode,
                extents,
            }),
            other => Err(Failure::unfit(&other)),
        }
    }

    /// At most `max` names behind a cookie.
    pub(crate) async fn names(
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
