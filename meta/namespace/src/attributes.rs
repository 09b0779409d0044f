//! Attributes of inodes.

use crate::apply::Update;
use crate::directory::{PERMISSIONS, SET_GROUP_ID, SET_USER_ID};
use crate::error::{Error, Failure};
use crate::extents;
use crate::ids::Ino;
use crate::ids::Time;
use crate::keys::XATTRS;
use crate::operation::{Outcome, SetAttributes, SetTime};
use crate::record::{Body, Inode};
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
    if request.clear_privileges {
        clear_privileges(update, ino, &mut inode)?;
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

fn time(set: Option<SetTime>, now: Time) -> Option<Time> {
    set.map(|set| match set {
        SetTime::Now => now,
        SetTime::To(time) => time,
    })
}

/// What Linux takes from a file that an unprivileged process changes.
pub(crate) fn clear_privileges(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
) -> Result<(), Failure> {
    if !matches!(inode.body, Body::Directory(_)) {
        inode.mode &= !SET_USER_ID;
        // Without that bit, set-group-id means mandatory locks and is no privilege.
        if inode.mode & GROUP_EXECUTES != 0 {
            inode.mode &= !SET_GROUP_ID;
        }
    }
    if inode.xattr_bytes > 0 {
        if let Some(value) = update.get(&XATTRS, &(ino, CAPABILITY))? {
            xattr::take_away(update, ino, inode, CAPABILITY, &value);
        }
    }
    Ok(())
}
