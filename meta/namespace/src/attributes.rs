//! Attributes of inodes.

use crate::directory::{PERMISSIONS, SET_GROUP_ID, SET_USER_ID};
use crate::error::{Error, Failure};
use crate::extents;
use crate::ids::Ino;
use crate::ids::Time;
use crate::keys::{INODES, XATTRS};
use crate::operation::{Attributes, Outcome, SetAttributes, SetTime};
use crate::record::{Body, Inode};
use crate::update::Update;
use crate::xattr;

const GROUP_EXECUTES: u16 = 0o010;

/// The attribute that gives a program capabilities.
const CAPABILITY: &[u8] = b"security.capability";

pub(crate) fn set(
    update: &mut Update<'_, '_>,
    request: &SetAttributes,
) -> Result<Outcome, Failure> {
    let ino = request.ino;
    let mut inode = update.inode(ino)?;
    check_unchanged(&inode, request.expected)?;
    let times = [request.atime, request.mtime];
    let is_valid = |time: &SetTime| match time {
        SetTime::Now => true,
        SetTime::To(time) => time.is_valid(),
    };
    if !times.iter().flatten().all(is_valid) {
        return Err(Error::Invalid.into());
    }
    let done = match request.size {
        Some(size) => {
            let done = extents::resize(update, ino, &mut inode, size, request.tail)?;
            inode.mtime = update.at;
            done
        }
        None if request.tail.is_some() => return Err(Error::Invalid.into()),
        None => true,
    };
    let is_new = request.size.is_some() || request.uid.is_some() || request.gid.is_some();
    match is_new {
        true => take_privileges(update, ino, &mut inode, request.clear_privileges)?,
        false if request.clear_privileges => clear_set_ids(&mut inode),
        false => {}
    }
    if let Some(mode) = request.mode {
        inode.mode = mode & PERMISSIONS;
    }
    inode.uid = request.uid.unwrap_or(inode.uid);
    inode.gid = request.gid.unwrap_or(inode.gid);
    inode.atime = time(request.atime, update.at).unwrap_or(inode.atime);
    inode.mtime = time(request.mtime, update.at).unwrap_or(inode.mtime);
    let attributes = update.put_changed(ino, &mut inode);
    Ok(Outcome::Changed { attributes, done })
}

/// Refuses to change what is not as the caller has seen it.
pub(crate) fn check_unchanged(inode: &Inode, expected: Option<u64>) -> Result<(), Error> {
    match expected.is_none_or(|expected| expected == inode.change) {
        true => Ok(()),
        false => Err(Error::Changed),
    }
}

fn time(set: Option<SetTime>, now: Time) -> Option<Time> {
    set.map(|set| match set {
        SetTime::Now => now,
        SetTime::To(time) => time,
    })
}

/// Notes an access, which is no change.
pub(crate) fn access(
    update: &mut Update<'_, '_>,
    ino: Ino,
    atime: Time,
) -> Result<Outcome, Failure> {
    let mut inode = update.inode(ino)?;
    if !atime.is_valid() {
        return Err(Error::Invalid.into());
    }
    inode.atime = atime;
    update.put(&INODES, &ino, &inode);
    Ok(Outcome::Changed {
        attributes: Attributes::of(ino, &inode),
        done: true,
    })
}

/// What Linux takes from a file with new content or a new owner: its capabilities, whoever asks, and the
/// set-user-id bits, if that is asked for.
pub(crate) fn take_privileges(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    clears_set_ids: bool,
) -> Result<(), Failure> {
    if clears_set_ids {
        clear_set_ids(inode);
    }
    let has_attributes = inode.xattr_list_bytes > 0;
    if has_attributes && !matches!(inode.body, Body::Directory(_)) {
        if let Some(value) = update.get(&XATTRS, &(ino, CAPABILITY))? {
            xattr::take_away(update, ino, inode, CAPABILITY, &value);
        }
    }
    Ok(())
}

fn clear_set_ids(inode: &mut Inode) {
    if matches!(inode.body, Body::Directory(_)) {
        return;
    }
    inode.mode &= !SET_USER_ID;
    // Without that bit, set-group-id means mandatory locks and is no privilege.
    if inode.mode & GROUP_EXECUTES != 0 {
        inode.mode &= !SET_GROUP_ID;
    }
}
