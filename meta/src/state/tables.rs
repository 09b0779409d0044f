//! Where each record lies in key space.
//!
//! A key is one byte for the table, then the record's key: numbers in big-endian so that they sort, names as
//! they are. Values are JSON: readable with RocksDB's own tools, and a field added later has a default in
//! older records.
//!
//! | byte | table | key | value |
//! |---|---|---|---|
//! | 0x00 | kept by the storage layer: last applied entry and membership | | |
//! | 0x01 | the cluster | none | [`Cluster`] |
//! | 0x02 | next numbers | none | [`Counters`] |
//! | 0x03 | nodes | node id | [`Node`] |
//! | 0x04 | devices | device id | [`Device`] |
//! | 0x05 | pools | name | [`Pool`] |
//! | 0x06 | placement groups | pool id, index | [`PlacementGroup`] |
//! | 0x07 | volumes | name | [`Volume`] |
//! | 0x08 | volume names | volume id | [`Name`] |
//! | 0x09 | leases | volume id | [`Lease`] |
//! | 0x0a | attachments | attachment id | [`Attachment`] |
//! | 0x0b | attachments by socket, of volumes and filesystems | node id, path | [`AttachmentId`] |
//! | 0x0c | attachments by volume | volume id, attachment id | nothing |
//! | 0x0d | volumes by pool | pool id, volume id | nothing |
//! | 0x0e | events | number | [`Event`] |
//! | 0x0f | health of pools, counted | pool id | [`PoolHealth`] |
//! | 0x10 | join tokens | SHA-256 of the token | [`Token`] |
//! | 0x11 | removed nodes | node id | [`UnixMillis`] |
//! | 0x12 | NFS exports | name | [`Export`] |
//! | 0x13 | what devices say, after a restoration | device id | [`DeviceEvidence`] |
//! | 0x14 | namespace groups | group id | [`NamespaceGroup`] |
//! | 0x15 | filesystems | name | [`Filesystem`] |
//! | 0x16 | attachments of filesystems | attachment id | [`FilesystemAttachment`] |
//! | 0x80 and up | kept free for the namespace, whose keys begin with a shard number | | |

use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::kv::{Read, ReadError, Txn};
use crate::ids::{
    AttachmentId, DeviceId, NamespaceGroupId, NodeId, PgIndex, PoolId, UnixMillis, VolumeId,
};
use crate::model::{
    Attachment, Cluster, Device, DeviceEvidence, Event, Export, Filesystem, FilesystemAttachment,
    Lease, Name, NamespaceGroup, Node, PlacementGroup, Pool, PoolHealth, Token, Volume,
};
use crate::pki::TokenHash;

/// The numbers to give out next. They only grow, so a number is never used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    pub(crate) device: u64,
    pub(crate) pool: u32,
    pub(crate) volume: u64,
    pub(crate) attachment: u64,
    pub(crate) event: u64,
    pub(crate) node: u64,
    pub(crate) filesystem: u32,
    pub(crate) namespace_group: u32,
}

impl Default for Counters {
    /// Numbers begin at 1, so that 0 is never a valid one.
    fn default() -> Self {
        Self {
            device: 1,
            pool: 1,
            volume: 1,
            attachment: 1,
            event: 1,
            node: 1,
            filesystem: 1,
            namespace_group: 1,
        }
    }
}

/// A key, or the first part of one.
pub(crate) trait Key {
    fn extend(&self, bytes: &mut Vec<u8>);
}

impl Key for () {
    fn extend(&self, _: &mut Vec<u8>) {}
}

impl Key for str {
    fn extend(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.as_bytes());
    }
}

impl Key for TokenHash {
    fn extend(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.bytes());
    }
}

impl Key for u64 {
    fn extend(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_be_bytes());
    }
}

macro_rules! number_keys {
    ($($name:ty),*) => {$(
        impl Key for $name {
            fn extend(&self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.0.to_be_bytes());
            }
        }
    )*};
}
number_keys!(
    NodeId,
    DeviceId,
    PoolId,
    PgIndex,
    VolumeId,
    AttachmentId,
    NamespaceGroupId
);

impl Key for String {
    fn extend(&self, bytes: &mut Vec<u8>) {
        self.as_str().extend(bytes);
    }
}

impl<A: Key, B: Key> Key for (A, B) {
    fn extend(&self, bytes: &mut Vec<u8>) {
        self.0.extend(bytes);
        self.1.extend(bytes);
    }
}

/// A table: its byte, and the types of its keys and values.
pub(crate) struct Table<K: ?Sized, V> {
    prefix: u8,
    types: PhantomData<fn(&K) -> V>,
}

pub(crate) const CLUSTER: Table<(), Cluster> = Table::new(0x01);
pub(crate) const COUNTERS: Table<(), Counters> = Table::new(0x02);
pub(crate) const NODES: Table<NodeId, Node> = Table::new(0x03);
pub(crate) const DEVICES: Table<DeviceId, Device> = Table::new(0x04);
pub(crate) const POOLS: Table<str, Pool> = Table::new(0x05);
pub(crate) const PLACEMENT_GROUPS: Table<(PoolId, PgIndex), PlacementGroup> = Table::new(0x06);
pub(crate) const VOLUMES: Table<str, Volume> = Table::new(0x07);
pub(crate) const VOLUME_NAMES: Table<VolumeId, Name> = Table::new(0x08);
pub(crate) const LEASES: Table<VolumeId, Lease> = Table::new(0x09);
pub(crate) const ATTACHMENTS: Table<AttachmentId, Attachment> = Table::new(0x0a);
pub(crate) const ATTACHMENTS_BY_SOCKET: Table<(NodeId, String), AttachmentId> = Table::new(0x0b);
pub(crate) const ATTACHMENTS_BY_VOLUME: Table<(VolumeId, AttachmentId), AttachmentId> =
    Table::new(0x0c);
pub(crate) const VOLUMES_BY_POOL: Table<(PoolId, VolumeId), VolumeId> = Table::new(0x0d);

pub(crate) const EVENTS: Table<u64, Event> = Table::new(0x0e);
pub(crate) const TOKENS: Table<TokenHash, Token> = Table::new(0x10);
pub(crate) const REMOVED_NODES: Table<NodeId, UnixMillis> = Table::new(0x11);
pub(crate) const EXPORTS: Table<str, Export> = Table::new(0x12);
pub(crate) const EVIDENCE: Table<DeviceId, DeviceEvidence> = Table::new(0x13);
pub(crate) const NAMESPACE_GROUPS: Table<NamespaceGroupId, NamespaceGroup> = Table::new(0x14);
pub(crate) const FILESYSTEMS: Table<str, Filesystem> = Table::new(0x15);
pub(crate) const FILESYSTEM_ATTACHMENTS: Table<AttachmentId, FilesystemAttachment> =
    Table::new(0x16);
pub(crate) const POOL_HEALTH: Table<PoolId, PoolHealth> = Table::new(0x0f);

impl<K: Key + ?Sized, V: Serialize + DeserializeOwned> Table<K, V> {
    const fn new(prefix: u8) -> Self {
        Self {
            prefix,
            types: PhantomData,
        }
    }

    pub(crate) const fn prefix(&self) -> u8 {
        self.prefix
    }

    fn key<P: Key + ?Sized>(&self, key: &P) -> Vec<u8> {
        let mut bytes = vec![self.prefix];
        key.extend(&mut bytes);
        bytes
    }

    pub(crate) fn get(&self, view: &dyn Read, key: &K) -> Result<Option<V>, ReadError> {
        let key = self.key(key);
        match view.get(&key)? {
            Some(value) => Ok(Some(decode(&key, &value)?)),
            None => Ok(None),
        }
    }

    /// A value that was found under a key of this table.
    pub(crate) fn decode(&self, key: &[u8], value: &[u8]) -> Result<V, ReadError> {
        decode(key, value)
    }

    /// All records, in the order of their keys.
    pub(crate) fn all(&self, view: &dyn Read) -> Result<Vec<V>, ReadError> {
        self.all_below(view, &())
    }

    /// All records whose key begins with a part of it, in the order of their keys.
    pub(crate) fn all_below<P: Key + ?Sized>(
        &self,
        view: &dyn Read,
        part: &P,
    ) -> Result<Vec<V>, ReadError> {
        let mut found = Vec::new();
        view.scan(&self.key(part), &mut |key, value| {
            found.push(decode(key, value)?);
            Ok(true)
        })?;
        Ok(found)
    }

    /// Records from a key on, in the order of their keys, at most `limit`.
    pub(crate) fn from(&self, view: &dyn Read, key: &K, limit: usize) -> Result<Vec<V>, ReadError> {
        let (first, mut found) = (self.key(key), Vec::new());
        view.scan_from(&[self.prefix], &first, &mut |key, value| {
            if found.len() < limit {
                found.push(decode(key, value)?);
            }
            Ok(found.len() < limit)
        })?;
        Ok(found)
    }

    /// The first record whose key begins with a part of it.
    pub(crate) fn first_below<P: Key + ?Sized>(
        &self,
        view: &dyn Read,
        part: &P,
    ) -> Result<Option<V>, ReadError> {
        let mut found = None;
        view.scan(&self.key(part), &mut |key, value| {
            found = Some(decode(key, value)?);
            Ok(false)
        })?;
        Ok(found)
    }

    pub(crate) fn put(&self, txn: &mut Txn<'_>, key: &K, value: &V) {
        let bytes =
            serde_json::to_vec(value).expect("records have text keys and finite numbers only");
        txn.put(self.key(key), bytes);
    }

    pub(crate) fn delete(&self, txn: &mut Txn<'_>, key: &K) {
        txn.delete(self.key(key));
    }
}

fn decode<V: DeserializeOwned>(key: &[u8], value: &[u8]) -> Result<V, ReadError> {
    serde_json::from_slice(value).map_err(|error| ReadError::new(key, error))
}
