//! Questions about a filesystem that travel: what [`Namespace`] answers, for whoever does not have the
//! records.

use records::{Read, ReadError};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Failure};
use crate::ids::{FilesystemId, Ino, SegmentId, SessionId};
use crate::read::{Entry, Freed, Namespace};
use crate::record::{Extent, Inode, Orphan, Segment, Session, Statistics};
use crate::search::{Named, NamedBlock, RECORDS_MAX, SearchFrom, SearchStep};

/// A question about a filesystem. One that is not there, or is being removed, has statistics alone, and they
/// are nothing; any other question is refused with ESTALE. Lists have at most `max` items, and fewer if
/// they would be too long; there are more behind the last one, unless there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Query {
    /// [`Namespace::statistics`].
    Statistics,
    /// [`Namespace::inode`].
    Inode(Ino),
    /// [`Namespace::lookup`].
    Lookup {
        /// The directory.
        parent: Ino,
        /// The name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
    },
    /// [`Namespace::readdir`], with the inode of each name.
    Readdir {
        /// The directory.
        parent: Ino,
        /// The cookie of the last name that is known; 0 at first.
        behind: u64,
        /// Names.
        max: u32,
    },
    /// [`Namespace::xattr`].
    Xattr {
        /// The inode.
        ino: Ino,
        /// The attribute.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
    },
    /// [`Namespace::xattr_names`].
    XattrNames(Ino),
    /// [`Namespace::extents`].
    Extents {
        /// The file.
        ino: Ino,
        /// Begin and end in the file, in bytes.
        range: (u64, u64),
        /// Extents.
        max: u32,
    },
    /// [`Namespace::inode`] and [`Namespace::extents`] of one moment: what a read, or a change of a part,
    /// needs to know of a file.
    Content {
        /// The file.
        ino: Ino,
        /// Begin and end in the file, in bytes.
        range: (u64, u64),
        /// Extents.
        max: u32,
    },
    /// [`Namespace::orphans`].
    Orphans {
        /// The first.
        from: Ino,
        /// Orphans.
        max: u32,
    },
    /// [`Namespace::held`].
    Held {
        /// The session.
        session: SessionId,
        /// The first.
        from: Ino,
        /// Orphans.
        max: u32,
    },
    /// [`Namespace::sessions`].
    Sessions {
        /// The first.
        from: SessionId,
        /// Sessions.
        max: u32,
    },
    /// [`Namespace::segments`].
    Segments {
        /// The first.
        from: SegmentId,
        /// Segments.
        max: u32,
    },
    /// [`Namespace::freed`].
    Freed {
        /// Segment and address of the first.
        from: (SegmentId, u64),
        /// Ranges.
        max: u32,
    },
    /// [`Namespace::files_at`].
    FilesAt {
        /// Segments, and addresses of blocks in them.
        blocks: Vec<(SegmentId, u64)>,
        /// Where to go on.
        from: SearchFrom,
        /// Records to look at.
        max: u32,
    },
    /// [`Namespace::name_of`].
    NameOf {
        /// The inode.
        ino: Ino,
        /// The cookie to go on behind.
        behind: u64,
        /// Names to look at.
        max: u32,
    },
}

/// The answer to a [`Query`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Statistics`; nothing if there is no such filesystem, or not any more.
    Statistics(Option<Statistics>),
    /// To `Inode` and `Lookup`.
    Inode(Ino, Box<Inode>),
    /// To `Readdir`.
    Names(Vec<(Entry, Inode)>),
    /// To `Xattr`.
    Xattr(#[serde(with = "crate::bytes")] Vec<u8>),
    /// To `XattrNames`.
    XattrNames(Vec<Vec<u8>>),
    /// To `Extents`.
    Extents(Vec<Extent>),
    /// To `Content`.
    Content(Box<Inode>, Vec<Extent>),
    /// To `Orphans`.
    Orphans(Vec<(Ino, Orphan)>),
    /// To `Held`.
    Held(Vec<Ino>),
    /// To `Sessions`.
    Sessions(Vec<(SessionId, Session)>),
    /// To `Segments`.
    Segments(Vec<(SegmentId, Segment)>),
    /// To `Freed`.
    Freed(Vec<Freed>),
    /// To `FilesAt`.
    FilesAt(SearchStep<Vec<NamedBlock>, SearchFrom>),
    /// To `NameOf`.
    NameOf(SearchStep<Option<Named>, u64>),
}

/// Most items of a list in one answer.
pub const ITEMS_MAX: usize = 4096;

/// Answers a question by the records of a metadata group. A list ends with the item with which it has
/// `list_bytes` or more, encoded.
///
/// # Errors
/// The records cannot be read. What the filesystem refuses is an answer.
pub fn answer(
    records: &dyn Read,
    filesystem: FilesystemId,
    query: &Query,
    list_bytes: usize,
) -> Result<Result<Answer, Error>, ReadError> {
    match find(Namespace::new(records, filesystem), query, list_bytes) {
        Ok(answer) => Ok(Ok(answer)),
        Err(Failure::Refused(error)) => Ok(Err(error)),
        Err(Failure::Records(error)) => Err(error),
    }
}

fn find(namespace: Namespace<'_>, query: &Query, list_bytes: usize) -> Result<Answer, Failure> {
    let bounded = |max: u32| (max as usize).min(ITEMS_MAX);
    // No step looks at nothing: whoever repeats it comes to an end.
    let records = |max: u32| (max as usize).clamp(1, RECORDS_MAX);
    if *query != Query::Statistics && namespace.statistics()?.is_none() {
        return Err(Error::Stale.into());
    }
    Ok(match query {
        Query::Statistics => Answer::Statistics(namespace.statistics()?),
        Query::Inode(ino) => Answer::Inode(*ino, Box::new(namespace.inode(*ino)?)),
        Query::Lookup { parent, name } => {
            let (ino, inode) = namespace.lookup(*parent, name)?;
            Answer::Inode(ino, Box::new(inode))
        }
        Query::Readdir {
            parent,
            behind,
            max,
        } => {
            let mut names = Vec::new();
            let mut bytes = 0;
            for entry in namespace.readdir(*parent, *behind, bounded(*max))? {
                let inode = namespace.inode(entry.ino)?;
                let item = (entry, inode);
                bytes += postcard::experimental::serialized_size(&item).unwrap_or(list_bytes);
                names.push(item);
                if bytes >= list_bytes {
                    break;
                }
            }
            Answer::Names(names)
        }
        Query::Xattr { ino, name } => Answer::Xattr(namespace.xattr(*ino, name)?),
        Query::XattrNames(ino) => Answer::XattrNames(namespace.xattr_names(*ino)?),
        Query::Extents { ino, range, max } => {
            Answer::Extents(namespace.extents(*ino, *range, bounded(*max))?)
        }
        Query::Content { ino, range, max } => {
            let extents = namespace.extents(*ino, *range, bounded(*max))?;
            Answer::Content(Box::new(namespace.inode(*ino)?), extents)
        }
        Query::Orphans { from, max } => Answer::Orphans(namespace.orphans(*from, bounded(*max))?),
        Query::Held { session, from, max } => {
            Answer::Held(namespace.held(*session, *from, bounded(*max))?)
        }
        Query::Sessions { from, max } => {
            Answer::Sessions(namespace.sessions(*from, bounded(*max))?)
        }
        Query::Segments { from, max } => {
            Answer::Segments(namespace.segments(*from, bounded(*max))?)
        }
        Query::Freed { from, max } => Answer::Freed(namespace.freed(*from, bounded(*max))?),
        Query::FilesAt { blocks, from, max } => {
            Answer::FilesAt(namespace.files_at(blocks, *from, records(*max))?)
        }
        Query::NameOf { ino, behind, max } => {
            Answer::NameOf(namespace.name_of(*ino, *behind, records(*max))?)
        }
    })
}
