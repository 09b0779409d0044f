//! Sessions, and the replies that are kept for retries.

use records::{Read, ReadError, Txn};

use crate::error::{Error, Failure};
use crate::ids::{FilesystemId, Ino, SessionId};
use crate::keys::{FILESYSTEM, SESSIONS, SLOTS, number_at};
use crate::operation::{Operation, Outcome, Reply, Request};
use crate::read::Namespace;
use crate::record::{Session, Slot};
use crate::update::Update;
use crate::{STEP_MAX, reap, segments};

/// Slots of a session: how many requests it may have under way. A request of a further slot is refused with
/// EINVAL.
pub const SLOTS_MAX: u16 = 1024;

/// Sessions of a filesystem. A further one is refused with ENOSPC.
pub const SESSIONS_MAX: usize = 4096;

/// Whether a request is to be applied.
pub(crate) enum Admission {
    New,
    /// It was applied, with this reply.
    Repeated(Reply),
    Refused(Error),
}

pub(crate) fn admit(
    view: &dyn Read,
    filesystem: FilesystemId,
    request: &Request,
) -> Result<Admission, ReadError> {
    let session = SESSIONS.get(view, filesystem, &request.session)?;
    let is_being_removed = FILESYSTEM
        .get(view, filesystem, &())?
        .is_none_or(|found| found.removed_below.is_some());
    if is_being_removed || session.is_none_or(|session| session.ending) {
        return Ok(Admission::Refused(Error::Stale));
    }
    let is_allowed = match request.operation {
        // It has closed an orphan itself.
        Operation::ReleaseOrphan { session, .. } => session == request.session,
        ref operation => !operation.is_of_leader(),
    };
    if request.slot >= SLOTS_MAX || !is_allowed {
        return Ok(Admission::Refused(Error::Invalid));
    }
    let kept = SLOTS.get(view, filesystem, &(request.session, request.slot))?;
    let last = kept.as_ref().map_or(0, |kept| kept.sequence);
    Ok(match kept {
        Some(kept) if request.sequence == last => Admission::Repeated(kept.reply),
        _ if last.checked_add(1) == Some(request.sequence) => Admission::New,
        _ => Admission::Refused(Error::OutOfSequence),
    })
}

/// Keeps the reply of a request for its retry.
pub(crate) fn keep(txn: &mut Txn<'_>, filesystem: FilesystemId, request: &Request, reply: &Reply) {
    let slot = Slot {
        sequence: request.sequence,
        reply: reply.clone(),
    };
    let key = (request.session, request.slot);
    SLOTS.put(txn, filesystem, &key, &slot);
}

pub(crate) fn open(
    update: &mut Update<'_, '_>,
    node: u64,
    incarnation: u128,
) -> Result<Outcome, Failure> {
    let (mut count, mut found) = (0, None);
    let filesystem = update.filesystem;
    SESSIONS.scan(update.view(), filesystem, &(), &(), &mut |key, session| {
        count += 1;
        if (session.node, session.incarnation) == (node, incarnation) {
            found = Some((SessionId(number_at(key, 0)?), session.ending));
        }
        Ok(found.is_none())
    })?;
    match found {
        Some((session, false)) => return Ok(Outcome::Session(session)),
        Some((_, true)) => return Err(Error::Stale.into()),
        None if count >= SESSIONS_MAX => return Err(Error::NoSpace.into()),
        None => {}
    }
    let id = SessionId(update.totals.next_session);
    update.totals.next_session += 1;
    let session = Session {
        node,
        incarnation,
        opened_at: update.at,
        ending: false,
        open_segments: Vec::new(),
    };
    update.put(&SESSIONS, &id, &session);
    Ok(Outcome::Session(id))
}

/// Ends a session: first its segments, then its orphans, then its slots and itself. A step takes about
/// [`STEP_MAX`] records of all these; an orphan that is emptied in part is left to be reaped.
pub(crate) fn end(update: &mut Update<'_, '_>, id: SessionId) -> Result<Outcome, Failure> {
    let Some(mut session) = update.get(&SESSIONS, &id)? else {
        return Ok(Outcome::Step { done: true });
    };
    let mut left = STEP_MAX;
    while left > 0 {
        let Some(segment) = session.open_segments.pop() else {
            break;
        };
        let spent = segments::seal_as_written(update, segment)?;
        left = left.saturating_sub(spent);
    }
    session.ending = true;
    update.put(&SESSIONS, &id, &session);
    let namespace = Namespace::new(update.view(), update.filesystem);
    for ino in namespace.held(id, Ino(0), left)? {
        if left == 0 {
            break;
        }
        let spent = reap::release(update, ino, id, left)?;
        left = left.saturating_sub(spent);
    }
    let slots = kept_slots(update, id, left)?;
    for slot in &slots {
        update.delete(&SLOTS, &(id, slot.as_slice()));
    }
    // Not even one record more would have been taken.
    if slots.len() >= left {
        return Ok(Outcome::Step { done: false });
    }
    update.delete(&SESSIONS, &id);
    Ok(Outcome::Step { done: true })
}

/// Keys of a session's slots, at most `max`.
fn kept_slots(
    update: &Update<'_, '_>,
    id: SessionId,
    max: usize,
) -> Result<Vec<Vec<u8>>, ReadError> {
    let mut slots = Vec::new();
    let filesystem = update.filesystem;
    SLOTS.scan(update.view(), filesystem, &id, &id, &mut |key, _| {
        if slots.len() < max {
            // The slot's number follows the session's.
            slots.push(key[8..].to_vec());
        }
        Ok(slots.len() < max)
    })?;
    Ok(slots)
}
