//! From addresses of segments back to files, and from inodes to names. No record leads that way, since only
//! damage asks for it: the whole filesystem is looked through, in bounded steps.

use std::collections::BTreeSet;

use records::ReadError;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Failure};
use crate::extents::extent_of;
use crate::ids::{Ino, SegmentId};
use crate::keys::{COOKIES, EXTENTS, INODES, number_at};
use crate::query::ITEMS_MAX;
use crate::read::Namespace;
use crate::record::{Body, Content, CookieEntry, Extent};

/// Most blocks that are looked for at once. More are refused with EINVAL.
pub const BLOCKS_MAX: usize = 1024;
/// Records that a step looks at, at most. Each takes about a microsecond.
pub(crate) const RECORDS_MAX: usize = 8192;

/// How far a search for files has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SearchFrom {
    /// At this inode. Files with one extent have it there.
    Inode(Ino),
    /// At this offset of this file, in the table of extents.
    Extent(Ino, u64),
}

impl SearchFrom {
    /// The beginning of a search.
    pub const START: Self = Self::Inode(Ino(0));
}

/// A block of a segment that a file names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamedBlock {
    /// The segment.
    pub segment: SegmentId,
    /// Where the block begins in it, in bytes.
    pub address: u64,
    /// The file.
    pub ino: Ino,
    /// Where the block begins in the file, in bytes.
    pub offset: u64,
}

/// The name of an inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// The directory.
    pub parent: Ino,
    /// The name in it.
    #[serde(with = "crate::bytes")]
    pub name: Vec<u8>,
}

/// A step of a search.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchStep<T, P> {
    /// What was found.
    pub found: T,
    /// Where to go on; none at the end.
    pub next: Option<P>,
}

/// Blocks that are looked for, by segment and address.
struct Wanted(BTreeSet<(SegmentId, u64)>);

impl Wanted {
    /// Those in an extent of a file.
    fn in_extent(&self, ino: Ino, extent: &Extent, found: &mut Vec<NamedBlock>) {
        let (segment, from) = (extent.segment, extent.address);
        let range = (segment, from)..(segment, from + extent.length);
        found.extend(self.0.range(range).map(|(segment, address)| NamedBlock {
            segment: *segment,
            address: *address,
            ino,
            offset: extent.offset + (address - from),
        }));
    }
}

impl Namespace<'_> {
    /// One step of the search for the files that name blocks of segments: looks at `max` records. Begin at
    /// [`SearchFrom::START`]. A file that changes meanwhile may be missed.
    ///
    /// # Errors
    /// EINVAL for more blocks than [`BLOCKS_MAX`].
    pub fn files_at(
        &self,
        blocks: &[(SegmentId, u64)],
        from: SearchFrom,
        max: usize,
    ) -> Result<SearchStep<Vec<NamedBlock>, SearchFrom>, Failure> {
        if blocks.len() > BLOCKS_MAX {
            return Err(Error::Invalid.into());
        }
        let wanted = Wanted(blocks.iter().copied().collect());
        Ok(match from {
            SearchFrom::Inode(ino) => self.search_inodes(&wanted, ino, max)?,
            SearchFrom::Extent(ino, offset) => self.search_extents(&wanted, (ino, offset), max)?,
        })
    }

    fn search_inodes(
        &self,
        wanted: &Wanted,
        from: Ino,
        max: usize,
    ) -> Result<SearchStep<Vec<NamedBlock>, SearchFrom>, ReadError> {
        let (mut found, mut looked_at) = (Vec::new(), 0);
        // Behind the last inode come the extents of files that have several.
        let mut next = SearchFrom::Extent(Ino(0), 0);
        let (records, filesystem) = (self.records, self.filesystem);
        INODES.scan(records, filesystem, &(), &from, &mut |key, inode| {
            let ino = Ino(number_at(key, 0)?);
            if looked_at >= max || found.len() >= ITEMS_MAX {
                next = SearchFrom::Inode(ino);
                return Ok(false);
            }
            looked_at += 1;
            if let Body::File(Content::Inline(extent)) = &inode.body {
                wanted.in_extent(ino, extent, &mut found);
            }
            Ok(true)
        })?;
        let next = Some(next);
        Ok(SearchStep { found, next })
    }

    fn search_extents(
        &self,
        wanted: &Wanted,
        from: (Ino, u64),
        max: usize,
    ) -> Result<SearchStep<Vec<NamedBlock>, SearchFrom>, ReadError> {
        let (mut found, mut looked_at, mut next) = (Vec::new(), 0, None);
        let (records, filesystem) = (self.records, self.filesystem);
        EXTENTS.scan(records, filesystem, &(), &from, &mut |key, run| {
            let (ino, offset) = (Ino(number_at(key, 0)?), number_at(key, 8)?);
            if looked_at >= max || found.len() >= ITEMS_MAX {
                next = Some(SearchFrom::Extent(ino, offset));
                return Ok(false);
            }
            looked_at += 1;
            wanted.in_extent(ino, &extent_of(key, run)?, &mut found);
            Ok(true)
        })?;
        Ok(SearchStep { found, next })
    }

    /// One step of the search for the only name of an inode, and the directory that it is in: looks at `max`
    /// names of that one behind a cookie. Begin at 0. What has or had several names is not found.
    ///
    /// # Errors
    /// ESTALE if it is not there.
    pub fn name_of(
        &self,
        ino: Ino,
        behind: u64,
        max: usize,
    ) -> Result<SearchStep<Option<Named>, u64>, Failure> {
        let inode = self.inode(ino)?;
        let (mut found, mut looked_at, mut next) = (None, 0, None);
        let parent = match &inode.body {
            Body::Directory(directory) => Some(directory.parent),
            _ => inode.parent,
        };
        let Some(parent) = parent else {
            return Ok(SearchStep { found, next });
        };
        let (records, start) = (self.records, (parent, behind.saturating_add(1)));
        let mut visit = |key: &[u8], entry: CookieEntry| {
            if entry.ino == ino {
                let name = entry.name;
                found = Some(Named { parent, name });
                return Ok(false);
            }
            looked_at += 1;
            if looked_at >= max {
                next = Some(number_at(key, 8)?);
                return Ok(false);
            }
            Ok(true)
        };
        COOKIES.scan(records, self.filesystem, &parent, &start, &mut visit)?;
        Ok(SearchStep { found, next })
    }
}
