//! Reads.

use records::{Direction, Read, ReadError};
use serde::{Deserialize, Serialize};

use crate::directory::check_name;
use crate::error::{Error, Failure};
use crate::extents::{file_content, in_range};
use crate::ids::{FilesystemId, Ino, SegmentId, SessionId};
use crate::keys::{
    COOKIES, DENTRIES, FILESYSTEM, FREED, HOLDS, INODES, ORPHANS, SEGMENTS, SESSIONS, SHARD_BYTES,
    XATTRS, number_at, prefix_of,
};
use crate::operation::Attributes;
use crate::record::{
    Body, CookieEntry, Dentry, Extent, Inode, Kind, Orphan, Segment, SegmentState, Session,
    Statistics, Xattr,
};
use crate::xattr;

/// A filesystem to read.
#[derive(Clone, Copy)]
pub struct Namespace<'a> {
    pub(crate) records: &'a dyn Read,
    pub(crate) filesystem: FilesystemId,
}

/// A name in the order of readdir.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Where the listing continues behind it.
    pub cookie: u64,
    /// The name.
    #[serde(with = "crate::bytes")]
    pub name: Vec<u8>,
    /// The inode.
    pub ino: Ino,
    /// Its kind.
    pub kind: Kind,
}

/// Space to give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freed {
    /// The segment.
    pub segment: SegmentId,
    /// Where it begins, in bytes.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

/// The filesystems that a group's records hold, also those that are being removed.
///
/// # Errors
/// Records cannot be read.
pub fn filesystems(records: &dyn Read) -> Result<Vec<FilesystemId>, ReadError> {
    let prefix = &prefix_of(FilesystemId(0))[..SHARD_BYTES];
    let mut found = Vec::new();
    let mut next = Some(0_u32);
    while let Some(from) = next {
        next = None;
        let first = prefix_of(FilesystemId(from));
        records.scan_towards(prefix, &first, Direction::Forward, &mut |key, _| {
            let id = key[SHARD_BYTES..]
                .first_chunk()
                .map(|id| u32::from_be_bytes(*id));
            let id = id.ok_or_else(|| ReadError::new(key, "its key is too short"))?;
            found.push(FilesystemId(id));
            next = id.checked_add(1);
            Ok(false)
        })?;
    }
    Ok(found)
}

/// An inode that operations and reads may use: not one that is being emptied.
pub(crate) fn usable_inode(
    records: &dyn Read,
    filesystem: FilesystemId,
    ino: Ino,
) -> Result<Inode, Failure> {
    let inode = INODES.get(records, filesystem, &ino)?.ok_or(Error::Stale)?;
    if inode.nlink == 0 && ORPHANS.get(records, filesystem, &ino)? == Some(Orphan::Emptying) {
        return Err(Error::Stale.into());
    }
    Ok(inode)
}

impl<'a> Namespace<'a> {
    /// A filesystem of these records.
    pub fn new(records: &'a dyn Read, filesystem: FilesystemId) -> Self {
        Self {
            records,
            filesystem,
        }
    }

    /// What the filesystem holds; nothing if it is not there, or is being removed.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn statistics(&self) -> Result<Option<Statistics>, ReadError> {
        let found = FILESYSTEM.get(self.records, self.filesystem, &())?;
        let found = found.filter(|found| found.removed_below.is_none());
        Ok(found.map(|found| found.statistics))
    }

    /// An inode: its attributes ([`Attributes::of`]), and a small file's only extent.
    ///
    /// # Errors
    /// ESTALE if it is not there, or is being emptied.
    pub fn inode(&self, ino: Ino) -> Result<Inode, Failure> {
        usable_inode(self.records, self.filesystem, ino)
    }

    /// The attributes of an inode.
    ///
    /// # Errors
    /// ESTALE if it is not there, or is being emptied.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes, Failure> {
        Ok(Attributes::of(ino, &self.inode(ino)?))
    }

    fn check_directory(&self, ino: Ino) -> Result<(), Failure> {
        match self.inode(ino)?.body {
            Body::Directory(_) => Ok(()),
            _ => Err(Error::NotDirectory.into()),
        }
    }

    /// The inode of a name.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, ENAMETOOLONG, EINVAL for what cannot be a name, ESTALE if there is no such directory.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<(Ino, Inode), Failure> {
        check_name(name)?;
        self.check_directory(parent)?;
        let dentry = DENTRIES.get(self.records, self.filesystem, &(parent, name))?;
        let ino = dentry.ok_or(Error::NotFound)?.ino;
        Ok((ino, self.inode(ino)?))
    }

    /// At most `max` names behind a cookie, in the order of cookies. Begin at 0.
    ///
    /// # Errors
    /// ENOTDIR, ESTALE.
    pub fn readdir(&self, parent: Ino, behind: u64, max: usize) -> Result<Vec<Entry>, Failure> {
        self.check_directory(parent)?;
        let mut found = Vec::new();
        let Some(from) = behind.checked_add(1).filter(|_| max > 0) else {
            return Ok(found);
        };
        let (records, start) = (self.records, (parent, from));
        COOKIES.scan(
            records,
            self.filesystem,
            &parent,
            &start,
            &mut |key, entry| {
                let CookieEntry { name, ino, kind } = entry;
                let cookie = number_at(key, 8)?;
                found.push(Entry {
                    cookie,
                    name,
                    ino,
                    kind,
                });
                Ok(found.len() < max)
            },
        )?;
        Ok(found)
    }

    /// At most `max` names from a name on, in the order of their bytes. Begin at the empty name.
    ///
    /// # Errors
    /// ENOTDIR, ESTALE.
    pub fn list(
        &self,
        parent: Ino,
        from: &[u8],
        max: usize,
    ) -> Result<Vec<(Vec<u8>, Dentry)>, Failure> {
        self.check_directory(parent)?;
        let mut found = Vec::new();
        if max == 0 {
            return Ok(found);
        }
        let (records, start) = (self.records, (parent, from));
        DENTRIES.scan(
            records,
            self.filesystem,
            &parent,
            &start,
            &mut |key, dentry| {
                // The name follows the inode's number.
                found.push((key[8..].to_vec(), dentry));
                Ok(found.len() < max)
            },
        )?;
        Ok(found)
    }

    /// What a symbolic link refers to.
    ///
    /// # Errors
    /// EINVAL if it is none, ESTALE.
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>, Failure> {
        match self.inode(ino)?.body {
            Body::Symlink(target) => Ok(target),
            _ => Err(Error::Invalid.into()),
        }
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// ENODATA, EOPNOTSUPP, ERANGE, EINVAL, ESTALE.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Failure> {
        xattr::check_name(name)?;
        // No further look where there are none.
        if self.inode(ino)?.xattr_list_bytes == 0 {
            return Err(Error::NoAttribute.into());
        }
        let found = XATTRS.get(self.records, self.filesystem, &(ino, name))?;
        let Xattr(value) = found.ok_or(Error::NoAttribute)?;
        Ok(value)
    }

    /// The names of all extended attributes, in the order of their bytes.
    ///
    /// # Errors
    /// ESTALE.
    pub fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, Failure> {
        let mut found = Vec::new();
        if self.inode(ino)?.xattr_list_bytes == 0 {
            return Ok(found);
        }
        XATTRS.scan(self.records, self.filesystem, &ino, &ino, &mut |key, _| {
            found.push(key[8..].to_vec());
            Ok(true)
        })?;
        Ok(found)
    }

    /// At most `max` extents that reach into a range of a file, in the order of their offsets. What lies
    /// between them is a hole.
    ///
    /// # Errors
    /// EISDIR, EINVAL if it is no regular file, ESTALE.
    pub fn extents(&self, ino: Ino, range: (u64, u64), max: usize) -> Result<Vec<Extent>, Failure> {
        let content = file_content(&self.inode(ino)?)?;
        if max == 0 {
            return Ok(Vec::new());
        }
        let file = (ino, content);
        Ok(in_range(self.records, self.filesystem, file, range, max)?)
    }

    /// At most `max` orphans from an inode's number on.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn orphans(&self, from: Ino, max: usize) -> Result<Vec<(Ino, Orphan)>, ReadError> {
        let mut found = Vec::new();
        ORPHANS.scan(
            self.records,
            self.filesystem,
            &(),
            &from,
            &mut |key, orphan| {
                if found.len() < max {
                    found.push((Ino(number_at(key, 0)?), orphan));
                }
                Ok(found.len() < max)
            },
        )?;
        Ok(found)
    }

    /// At most `max` of the orphans that a session holds, from an inode's number on.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn held(&self, session: SessionId, from: Ino, max: usize) -> Result<Vec<Ino>, ReadError> {
        let (mut found, start) = (Vec::new(), (session, from));
        HOLDS.scan(
            self.records,
            self.filesystem,
            &session,
            &start,
            &mut |key, ()| {
                if found.len() < max {
                    // The inode's number follows the session's.
                    found.push(Ino(number_at(key, 8)?));
                }
                Ok(found.len() < max)
            },
        )?;
        Ok(found)
    }

    /// At most `max` sessions from a number on.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn sessions(
        &self,
        from: SessionId,
        max: usize,
    ) -> Result<Vec<(SessionId, Session)>, ReadError> {
        let mut found = Vec::new();
        SESSIONS.scan(
            self.records,
            self.filesystem,
            &(),
            &from,
            &mut |key, session| {
                if found.len() < max {
                    found.push((SessionId(number_at(key, 0)?), session));
                }
                Ok(found.len() < max)
            },
        )?;
        Ok(found)
    }

    /// At most `max` segments from a number on.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn segments(
        &self,
        from: SegmentId,
        max: usize,
    ) -> Result<Vec<(SegmentId, Segment)>, ReadError> {
        let mut found = Vec::new();
        SEGMENTS.scan(
            self.records,
            self.filesystem,
            &(),
            &from,
            &mut |key, segment| {
                if found.len() < max {
                    found.push((SegmentId(number_at(key, 0)?), segment));
                }
                Ok(found.len() < max)
            },
        )?;
        Ok(found)
    }

    /// At most `max` ranges to give back, of sealed segments, from a segment and an address on.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn freed(&self, from: (SegmentId, u64), max: usize) -> Result<Vec<Freed>, ReadError> {
        let (mut found, mut next) = (Vec::new(), Some(from));
        while let Some(from) = next.filter(|_| found.len() < max) {
            next = self.freed_until_open(from, max, &mut found)?;
        }
        Ok(found)
    }

    /// Adds freed ranges up to the next segment that is written. Where to go on behind it.
    fn freed_until_open(
        &self,
        from: (SegmentId, u64),
        max: usize,
        found: &mut Vec<Freed>,
    ) -> Result<Option<(SegmentId, u64)>, ReadError> {
        let (records, filesystem) = (self.records, self.filesystem);
        let (mut sealed, mut next) = (None, None);
        FREED.scan(records, filesystem, &(), &from, &mut |key, length| {
            let (segment, address) = (SegmentId(number_at(key, 0)?), number_at(key, 8)?);
            if sealed != Some(segment) {
                let record = SEGMENTS.get(records, filesystem, &segment)?;
                if record.is_none_or(|record| record.state != SegmentState::Sealed) {
                    next = Some((SegmentId(segment.0 + 1), 0));
                    return Ok(false);
                }
                sealed = Some(segment);
            }
            found.push(Freed {
                segment,
                address,
                length,
            });
            Ok(found.len() < max)
        })?;
        Ok(next)
    }
}
