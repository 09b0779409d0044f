//! Orphans: inodes without a name, which stay while sessions have them open, and go in bounded steps. A file
//! that is made without a name is one from the start.

use crate::STEP_MAX;
use crate::error::{Error, Failure};
use crate::ids::{Ino, SessionId};
use crate::keys::{HOLDS, INODES, ORPHANS, SESSIONS, XATTRS, number_at};
use crate::operation::{Openers, Outcome};
use crate::record::{Body, Content, Inode, Orphan};
use crate::update::Update;
use crate::{extents, xattr};

/// Extents of a file that goes together with its last name. A file with more is emptied in steps.
const EXTENTS_AT_ONCE_MAX: u64 = 64;

/// An inode lost its last name. Whether its record is still there.
pub(crate) fn orphan(
    update: &mut Update<'_, '_>,
    ino: Ino,
    openers: &Openers,
) -> Result<bool, Failure> {
    let holders = holders(update, openers)?;
    for session in &holders {
        update.put(&HOLDS, &(*session, ino), &());
    }
    if holders.is_empty() {
        return Ok(!let_go(update, ino, STEP_MAX)?.gone);
    }
    update.put(&ORPHANS, &ino, &Orphan::Held(holders));
    Ok(true)
}

/// An inode was made without a name: the session that asks holds it.
pub(crate) fn hold_temporary(update: &mut Update<'_, '_>, ino: Ino) {
    let session = update.session;
    update.put(&HOLDS, &(session, ino), &());
    update.put(&ORPHANS, &ino, &Orphan::Temporary(session));
}

/// An inode without a name gets one. Only what never had one may, and only from the session that made it.
pub(crate) fn adopt(update: &mut Update<'_, '_>, ino: Ino) -> Result<(), Failure> {
    let session = update.session;
    if update.get(&ORPHANS, &ino)? != Some(Orphan::Temporary(session)) {
        return Err(Error::NotFound.into());
    }
    update.delete(&HOLDS, &(session, ino));
    update.delete(&ORPHANS, &ino);
    Ok(())
}

/// The open sessions among those that may have an inode open, in the order of their numbers.
fn holders(update: &Update<'_, '_>, openers: &Openers) -> Result<Vec<SessionId>, Failure> {
    let mut holders = Vec::new();
    match openers {
        Openers::All { own } => {
            let (view, filesystem) = (update.view(), update.filesystem);
            // As many as there may be, which is bounded by SESSIONS_MAX.
            SESSIONS.scan(view, filesystem, &(), &(), &mut |key, session| {
                let id = SessionId(number_at(key, 0)?);
                if !session.ending && (*own || id != update.session) {
                    holders.push(id);
                }
                Ok(true)
            })?;
        }
        Openers::Named(sessions) => {
            for session in sessions {
                let is_open = update.get(&SESSIONS, session)?;
                if is_open.is_some_and(|session| !session.ending) {
                    holders.push(*session);
                }
            }
            holders.sort_unstable();
            holders.dedup();
        }
    }
    Ok(holders)
}

/// What emptying an inode did.
struct Emptied {
    /// Records removed.
    spent: usize,
    /// Its own record went too.
    gone: bool,
}

/// Nobody has an orphan open: it goes, unless it has many extents or more than about `limit` records.
fn let_go(update: &mut Update<'_, '_>, ino: Ino, limit: usize) -> Result<Emptied, Failure> {
    let inode = update.inode(ino)?;
    let mut emptied = Emptied {
        spent: 0,
        gone: false,
    };
    let extents = match inode.body {
        Body::File(Content::Table(count)) => count,
        _ => 1,
    };
    if extents <= EXTENTS_AT_ONCE_MAX {
        emptied = empty(update, ino, inode, limit)?;
    }
    if !emptied.gone {
        update.put(&ORPHANS, &ino, &Orphan::Emptying);
    }
    Ok(emptied)
}

pub(crate) fn close(
    update: &mut Update<'_, '_>,
    ino: Ino,
    session: SessionId,
) -> Result<Outcome, Failure> {
    release(update, ino, session, STEP_MAX)?;
    Ok(Outcome::Done)
}

/// A session no longer has an orphan open. How many records that took, about `limit` at most.
pub(crate) fn release(
    update: &mut Update<'_, '_>,
    ino: Ino,
    session: SessionId,
    limit: usize,
) -> Result<usize, Failure> {
    let mut holders = match update.get(&ORPHANS, &ino)? {
        Some(Orphan::Held(holders)) => holders,
        Some(Orphan::Temporary(holder)) => vec![holder],
        Some(Orphan::Emptying) | None => return Ok(0),
    };
    let Ok(position) = holders.binary_search(&session) else {
        return Ok(0);
    };
    holders.remove(position);
    update.delete(&HOLDS, &(session, ino));
    if holders.is_empty() {
        return Ok(1 + let_go(update, ino, limit)?.spent);
    }
    update.put(&ORPHANS, &ino, &Orphan::Held(holders));
    Ok(1)
}

pub(crate) fn reap(update: &mut Update<'_, '_>, ino: Ino, limit: u32) -> Result<Outcome, Failure> {
    match update.get(&ORPHANS, &ino)? {
        None => return Ok(Outcome::Step { done: true }),
        Some(Orphan::Held(_) | Orphan::Temporary(_)) => return Err(Error::Busy.into()),
        Some(Orphan::Emptying) => {}
    }
    let inode = update.get(&INODES, &ino)?.ok_or(Error::Stale)?;
    let limit = (limit as usize).clamp(1, STEP_MAX);
    let done = empty(update, ino, inode, limit)?.gone;
    Ok(Outcome::Step { done })
}

/// Removes about so many extents and attributes, and then the inode if nothing is left of it.
fn empty(
    update: &mut Update<'_, '_>,
    ino: Ino,
    mut inode: Inode,
    limit: usize,
) -> Result<Emptied, Failure> {
    let mut spent = extents::remove_from_end(update, ino, &mut inode, 0, limit)?.spent;
    let left = limit.saturating_sub(spent);
    let mut names = Vec::new();
    let filesystem = update.filesystem;
    if left > 0 && inode.xattr_list_bytes > 0 {
        XATTRS.scan(update.view(), filesystem, &ino, &ino, &mut |key, value| {
            // The name follows the inode's number.
            names.push((key[8..].to_vec(), value));
            Ok(names.len() < left)
        })?;
    }
    spent += names.len();
    for (name, value) in names {
        xattr::take_away(update, ino, &mut inode, &name, &value);
    }
    if inode.allocated > 0 || inode.xattr_list_bytes > 0 {
        update.put(&INODES, &ino, &inode);
        return Ok(Emptied { spent, gone: false });
    }
    update.delete(&INODES, &ino);
    update.delete(&ORPHANS, &ino);
    update.statistics().inodes -= 1;
    Ok(Emptied { spent, gone: true })
}
