//! Applies batches: every request runs on its own transaction, which is kept if it is granted.

use records::{Read, ReadError, Txn, Writes};

use crate::error::{Error, Failure};
use crate::ids::{FilesystemId, Ino, SessionId, Time};
use crate::keys::{FILESYSTEM, INODES, Key, Table};
use crate::operation::{Attributes, Batch, Operation, Outcome, Reply, Request};
use crate::read::usable_inode;
use crate::record::{Filesystem, Inode, Statistics};
use crate::session::Admission;
use crate::{
    attributes, copy, directory, extents, reap, removal, rename, segments, session, xattr,
};

/// Applies the operations of a log entry to a filesystem, in order.
///
/// # Errors
/// Only when the records cannot be read. The writes made until then must be dropped.
pub fn apply(
    records: &mut Txn<'_>,
    filesystem: FilesystemId,
    batch: &Batch,
) -> Result<Vec<Reply>, ReadError> {
    let operations = batch.operations.iter();
    operations
        .map(|request| apply_one(records, filesystem, request))
        .collect()
}

fn apply_one(
    records: &mut Txn<'_>,
    filesystem: FilesystemId,
    request: &Request,
) -> Result<Reply, ReadError> {
    if request.session == SessionId::NONE {
        if !request.operation.is_of_leader() {
            return Ok(Err(Error::Stale));
        }
        let (reply, writes) = run(records, filesystem, request)?;
        records.absorb(writes);
        return Ok(reply);
    }
    match session::admit(&*records, filesystem, request)? {
        Admission::New => {}
        Admission::Repeated(reply) => return Ok(reply),
        Admission::Refused(error) => return Ok(Err(error)),
    }
    let (reply, writes) = run(records, filesystem, request)?;
    records.absorb(writes);
    session::keep(records, filesystem, request, &reply);
    Ok(reply)
}

/// The reply, and what is to be written for it: nothing if it is a refusal.
fn run(
    records: &Txn<'_>,
    filesystem: FilesystemId,
    request: &Request,
) -> Result<(Reply, Writes), ReadError> {
    let mut txn = Txn::over(records);
    match run_in(&mut txn, filesystem, request) {
        Ok(outcome) => Ok((Ok(outcome), txn.into_writes())),
        Err(Failure::Refused(error)) => Ok((Err(error), Writes::new())),
        Err(Failure::Records(error)) => Err(error),
    }
}

fn run_in(
    txn: &mut Txn<'_>,
    filesystem: FilesystemId,
    request: &Request,
) -> Result<Outcome, Failure> {
    let found = FILESYSTEM.get(txn, filesystem, &())?;
    if let Operation::DropFilesystem { limit } = request.operation {
        return removal::step(txn, filesystem, found, limit);
    }
    let old = match (&request.operation, found) {
        // It is being removed.
        (_, Some(found)) if found.removed_below.is_some() => return Err(Error::Stale.into()),
        (Operation::CreateFilesystem { .. }, Some(_)) => return Ok(Outcome::Done),
        (Operation::CreateFilesystem { .. }, None) => None,
        (_, Some(found)) => Some(found),
        (_, None) => return Err(Error::Stale.into()),
    };
    let mut update = Update {
        totals: old.clone().unwrap_or_else(directory::no_filesystem),
        txn,
        filesystem,
        at: request.at,
        session: request.session,
    };
    let outcome = dispatch(&mut update, &request.operation)?;
    let totals = update.totals;
    if old.as_ref() != Some(&totals) {
        FILESYSTEM.put(txn, filesystem, &(), &totals);
    }
    Ok(outcome)
}

fn dispatch(update: &mut Update<'_, '_>, operation: &Operation) -> Result<Outcome, Failure> {
    match operation {
        Operation::CreateFilesystem { mode, uid, gid } => {
            directory::make_root(update, *mode, (*uid, *gid))
        }
        // Done before there is an update: it removes what an update would write.
        Operation::DropFilesystem { .. } => Err(Error::Invalid.into()),
        Operation::OpenSession { node, incarnation } => session::open(update, *node, *incarnation),
        Operation::EndSession { session } => session::end(update, *session),
        Operation::Make(make) => directory::make(update, make),
        Operation::Symlink {
            parent,
            name,
            target,
            uid,
            gid,
        } => directory::symlink(update, (*parent, name), target, (*uid, *gid)),
        Operation::Link { ino, parent, name } => directory::link(update, *ino, *parent, name),
        Operation::Unlink {
            parent,
            name,
            openers,
        } => directory::unlink(update, *parent, name, openers),
        Operation::Rmdir {
            parent,
            name,
            openers,
        } => directory::rmdir(update, *parent, name, openers),
        Operation::Rename(request) => rename::rename(update, request),
        Operation::SetAttributes(request) => attributes::set(update, request),
        Operation::SetAccessTime { ino, atime } => attributes::access(update, *ino, *atime),
        Operation::SetXattr {
            ino,
            name,
            value,
            mode,
        } => xattr::set(update, *ino, name, value, *mode),
        Operation::RemoveXattr { ino, name } => xattr::remove(update, *ino, name),
        Operation::Commit(commit) => extents::commit(update, commit),
        Operation::Punch(punch) => extents::punch(update, punch),
        Operation::CopyRange(range) => copy::copy(update, range),
        Operation::ReleaseOrphan { ino, session } => reap::close(update, *ino, *session),
        Operation::Reap { ino, limit } => reap::reap(update, *ino, *limit),
        Operation::NewSegment => segments::new(update),
        Operation::SealSegment { segment, length } => segments::seal(update, *segment, *length),
        Operation::Reclaimed {
            segment,
            address,
            length,
        } => segments::reclaimed(update, *segment, *address, *length),
        Operation::DropSegment { segment } => segments::forget(update, *segment),
        Operation::RaiseNumbers => {
            update.totals.raise_numbers();
            Ok(Outcome::Done)
        }
        Operation::MakeTemporary(make) => directory::make_temporary(update, make),
    }
}

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
