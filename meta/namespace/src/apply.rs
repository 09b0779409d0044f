//! Applies batches: every request runs on its own transaction, which is kept if it is granted.

use records::{ReadError, Txn, Writes};

use crate::error::{Error, Failure};
use crate::ids::{FilesystemId, SessionId};
use crate::keys::FILESYSTEM;
use crate::operation::{Batch, Operation, Outcome, Reply, Request};
use crate::session::Admission;
use crate::update::Update;
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
