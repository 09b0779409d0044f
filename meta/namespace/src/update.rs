//! Access of operations to the records of one filesystem, in one transaction.

use records::{Read, ReadError, Txn};

use crate::error::Failure;
use crate::ids::{FilesystemId, Ino, SessionId, Time};
use crate::keys::{INODES, Key, Table};
use crate::operation::Attributes;
use crate::read::usable_inode;
use crate::record::{Filesystem, Inode, Statistics};

/// A request that is being applied.
pub(crate) struct Update<'t, 'a> {
    pub(crate) txn: &'t mut Txn<'a>,
    pub(crate) filesystem: FilesystemId,
    /// The filesystem's record; written at the end if it changed.
    pub(crate) totals: Filesystem,
    /// When the request was proposed.
    pub(crate) at: Time,
    pub(crate) session: SessionId,
}

impl Update<'_, '_> {
    pub(crate) fn view(&self) -> &dyn Read {
        &*self.txn
    }

    pub(crate) fn get<V>(&self, table: &Table<V>, key: &dyn Key) -> Result<Option<V>, ReadError>
    where
        V: serde::Serialize + serde::de::DeserializeOwned,
    {
        table.get(&*self.txn, self.filesystem, key)
    }

    pub(crate) fn put<V>(&mut self, table: &Table<V>, key: &dyn Key, record: &V)
    where
        V: serde::Serialize + serde::de::DeserializeOwned,
    {
        table.put(self.txn, self.filesystem, key, record);
    }

    pub(crate) fn delete<V>(&mut self, table: &Table<V>, key: &dyn Key)
    where
        V: serde::Serialize + serde::de::DeserializeOwned,
    {
        table.delete(self.txn, self.filesystem, key);
    }

    pub(crate) fn statistics(&mut self) -> &mut Statistics {
        &mut self.totals.statistics
    }

    /// An inode that operations may use: not one that is being emptied.
    pub(crate) fn inode(&self, ino: Ino) -> Result<Inode, Failure> {
        usable_inode(self.view(), self.filesystem, ino)
    }

    /// Changes an inode, and its ctime.
    pub(crate) fn change(
        &mut self,
        ino: Ino,
        change: impl FnOnce(&mut Inode),
    ) -> Result<Inode, Failure> {
        let mut inode = self.inode(ino)?;
        change(&mut inode);
        self.put_changed(ino, &mut inode);
        Ok(inode)
    }

    /// Writes a changed inode, with its ctime.
    pub(crate) fn put_changed(&mut self, ino: Ino, inode: &mut Inode) -> Attributes {
        inode.ctime = self.at;
        inode.change += 1;
        self.put(&INODES, &ino, inode);
        Attributes::of(ino, inode)
    }
}
