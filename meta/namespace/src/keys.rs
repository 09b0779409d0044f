//! Where each record lies in key space, and how it is written.
//!
//! A key is 0x8000 plus the shard (two bytes), the filesystem (four), one byte for the table, then the
//! record's own key. Numbers are big-endian so that they sort; names are as they are. The shard leads so that
//! a filesystem can spread over groups by ranges of keys. Nothing makes another shard than 0 yet.
//!
//! A value is a version byte and the record in postcard. Another version than the table's is refused: the
//! record is damaged, or a newer program wrote it. Of the inode and dentry of a small file, postcard makes
//! less than half the bytes of fixed structs and a seventh of JSON's: 73, 158 and 493. It reads both in about
//! 90 ns, where structs take 12 (`examples/record_size.rs`); the bytes are what a million files cost.
//!
//! | byte | table | key | value |
//! |---|---|---|---|
//! | 0x01 | the filesystem | none | [`Filesystem`] |
//! | 0x02 | inodes | inode | [`Inode`] |
//! | 0x03 | dentries | directory, name | [`Dentry`] |
//! | 0x04 | entries in the order of readdir | directory, cookie | [`CookieEntry`] |
//! | 0x05 | extended attributes | inode, name | [`Xattr`] |
//! | 0x06 | extents of files that have more than one | inode, offset in the file | [`Run`] |
//! | 0x07 | inodes without a name | inode | [`Orphan`] |
//! | 0x08 | orphans by session | session, inode | nothing |
//! | 0x09 | sessions | session | [`Session`] |
//! | 0x0a | replies kept for retries | session, slot | [`Slot`] |
//! | 0x0b | segments | segment | [`Segment`] |
//! | 0x0c | space to give back | segment, address | length in bytes |
//! | 0x0d | space that several extents name | segment, address | [`Shared`] |

use std::marker::PhantomData;

use records::{Direction, Read, ReadError, Txn};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ids::{FilesystemId, Ino, SegmentId, SessionId};
use crate::record::{
    CookieEntry, Dentry, Filesystem, Inode, Orphan, Run, Segment, Session, Shared, Slot, Xattr,
};

/// A key within a table, or the first part of one.
pub(crate) trait Key {
    /// The shard that the record belongs to.
    fn shard(&self) -> u16 {
        0
    }

    fn extend(&self, bytes: &mut Vec<u8>);
}

impl Key for () {
    fn extend(&self, _: &mut Vec<u8>) {}
}

impl Key for &[u8] {
    fn extend(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self);
    }
}

impl Key for u64 {
    fn extend(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_be_bytes());
    }
}

impl Key for u16 {
    fn extend(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_be_bytes());
    }
}

impl Key for Ino {
    fn shard(&self) -> u16 {
        Ino::shard(*self)
    }

    fn extend(&self, bytes: &mut Vec<u8>) {
        self.0.extend(bytes);
    }
}

impl Key for SessionId {
    fn extend(&self, bytes: &mut Vec<u8>) {
        self.0.extend(bytes);
    }
}

impl Key for SegmentId {
    fn extend(&self, bytes: &mut Vec<u8>) {
        self.0.extend(bytes);
    }
}

impl<A: Key, B: Key> Key for (A, B) {
    fn shard(&self) -> u16 {
        self.0.shard()
    }

    fn extend(&self, bytes: &mut Vec<u8>) {
        self.0.extend(bytes);
        self.1.extend(bytes);
    }
}

/// Bytes before a record's own key: shard, filesystem, table.
const PREFIX_LENGTH: usize = 7;

/// The first of these bytes: the shard's.
pub(crate) const SHARD_BYTES: usize = 2;

/// Room for most records, so that writing one allocates once.
const RECORD_CAPACITY: usize = 128;

/// What the keys of all tables of a filesystem begin with, in the only shard that there is yet.
pub(crate) fn prefix_of(filesystem: FilesystemId) -> Vec<u8> {
    let mut prefix = FILESYSTEM.key(filesystem, &());
    prefix.truncate(PREFIX_LENGTH - 1);
    prefix
}

/// Set in the first byte of every key of a namespace; the tables of the cluster map lie below it.
const NAMESPACE_BIT: u16 = 0x8000;

/// A table: its byte, the version of its records, and their type.
pub(crate) struct Table<V> {
    byte: u8,
    version: u8,
    record: PhantomData<fn() -> V>,
}

pub(crate) const FILESYSTEM: Table<Filesystem> = Table::new(0x01, 1);
pub(crate) const INODES: Table<Inode> = Table::new(0x02, 1);
pub(crate) const DENTRIES: Table<Dentry> = Table::new(0x03, 1);
pub(crate) const COOKIES: Table<CookieEntry> = Table::new(0x04, 1);
pub(crate) const XATTRS: Table<Xattr> = Table::new(0x05, 1);
pub(crate) const EXTENTS: Table<Run> = Table::new(0x06, 1);
pub(crate) const ORPHANS: Table<Orphan> = Table::new(0x07, 1);
pub(crate) const HOLDS: Table<()> = Table::new(0x08, 1);
pub(crate) const SESSIONS: Table<Session> = Table::new(0x09, 1);
pub(crate) const SLOTS: Table<Slot> = Table::new(0x0a, 1);
pub(crate) const SEGMENTS: Table<Segment> = Table::new(0x0b, 1);
pub(crate) const FREED: Table<u64> = Table::new(0x0c, 1);
pub(crate) const SHARED: Table<Shared> = Table::new(0x0d, 1);

/// Called with a record's own key and the record; returns whether to go on.
pub(crate) type VisitRecord<'a, V> = dyn FnMut(&[u8], V) -> Result<bool, ReadError> + 'a;

impl<V: Serialize + DeserializeOwned> Table<V> {
    const fn new(byte: u8, version: u8) -> Self {
        Self {
            byte,
            version,
            record: PhantomData,
        }
    }

    pub(crate) fn key(&self, filesystem: FilesystemId, key: &dyn Key) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PREFIX_LENGTH + 16);
        bytes.extend_from_slice(&(NAMESPACE_BIT | key.shard()).to_be_bytes());
        bytes.extend_from_slice(&filesystem.0.to_be_bytes());
        bytes.push(self.byte);
        key.extend(&mut bytes);
        bytes
    }

    pub(crate) fn get(
        &self,
        view: &dyn Read,
        filesystem: FilesystemId,
        key: &dyn Key,
    ) -> Result<Option<V>, ReadError> {
        let key = self.key(filesystem, key);
        match view.get(&key)? {
            Some(value) => Ok(Some(self.decode(&key, &value)?)),
            None => Ok(None),
        }
    }

    pub(crate) fn put(
        &self,
        txn: &mut Txn<'_>,
        filesystem: FilesystemId,
        key: &dyn Key,
        record: &V,
    ) {
        txn.put(self.key(filesystem, key), self.encode(record));
    }

    pub(crate) fn delete(&self, txn: &mut Txn<'_>, filesystem: FilesystemId, key: &dyn Key) {
        txn.delete(self.key(filesystem, key));
    }

    /// Visits the records whose key begins with `part`, from `from` on.
    pub(crate) fn scan(
        &self,
        view: &dyn Read,
        filesystem: FilesystemId,
        part: &dyn Key,
        from: &dyn Key,
        visit: &mut VisitRecord<'_, V>,
    ) -> Result<(), ReadError> {
        self.scan_towards(view, filesystem, (part, from), Direction::Forward, visit)
    }

    /// Visits the records whose key begins with `part`, from the last at or before `from` downwards.
    pub(crate) fn scan_back(
        &self,
        view: &dyn Read,
        filesystem: FilesystemId,
        part: &dyn Key,
        from: &dyn Key,
        visit: &mut VisitRecord<'_, V>,
    ) -> Result<(), ReadError> {
        self.scan_towards(view, filesystem, (part, from), Direction::Backward, visit)
    }

    fn scan_towards(
        &self,
        view: &dyn Read,
        filesystem: FilesystemId,
        (part, from): (&dyn Key, &dyn Key),
        direction: Direction,
        visit: &mut VisitRecord<'_, V>,
    ) -> Result<(), ReadError> {
        let (prefix, first) = (self.key(filesystem, part), self.key(filesystem, from));
        view.scan_towards(&prefix, &first, direction, &mut |key, value| {
            visit(&key[PREFIX_LENGTH..], self.decode(key, value)?)
        })
    }

    pub(crate) fn encode(&self, record: &V) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(RECORD_CAPACITY);
        bytes.push(self.version);
        postcard::to_extend(record, bytes).expect("a vector takes any record")
    }

    pub(crate) fn decode(&self, key: &[u8], value: &[u8]) -> Result<V, ReadError> {
        let Some((version, rest)) = value.split_first() else {
            return Err(ReadError::new(key, "it is empty"));
        };
        if *version != self.version {
            let detail = format!("it is damaged, or newer: version {version}");
            return Err(ReadError::new(key, detail));
        }
        match postcard::take_from_bytes(rest) {
            Ok((record, [])) => Ok(record),
            Ok((_, left)) => Err(ReadError::new(
                key,
                format!("{} bytes too many", left.len()),
            )),
            Err(error) => Err(ReadError::new(key, error)),
        }
    }
}

/// The number at this position of a record's own key.
pub(crate) fn number_at(key: &[u8], position: usize) -> Result<u64, ReadError> {
    match key.get(position..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => Ok(u64::from_be_bytes(*bytes)),
        None => Err(ReadError::new(key, "its key is too short")),
    }
}
