//! Rename: one name takes another's place, or two change places.
//!
//! A replaced name keeps its cookie, since the name is there throughout; so do two that are exchanged, and
//! one that leads to a whiteout afterwards.

use crate::directory::{
    add_name, check_empty, check_name, contents, count_subdirectory, drop_directory, drop_link,
    find, live_directory, make_whiteout, redirect_name, remove_name,
};
use crate::error::{Error, Failure};
use crate::ids::Ino;
use crate::operation::{Outcome, Removed, Rename, RenameMode};
use crate::record::{Body, Dentry, Kind};
use crate::update::Update;

/// Levels below the root of a directory that another directory may be moved to: the way up is walked, so
/// that no directory comes to lie in itself. Below it, ELOOP. Directories may be made deeper.
pub const DEPTH_MAX: usize = 8192;

pub(crate) fn rename(update: &mut Update<'_, '_>, request: &Rename) -> Result<Outcome, Failure> {
    check_name(&request.name)?;
    check_name(&request.new_name)?;
    live_directory(update, request.new_parent)?;
    let source = find(update, request.parent, &request.name)?.ok_or(Error::NotFound)?;
    let target = find(update, request.new_parent, &request.new_name)?;
    match (request.mode, target) {
        (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists.into()),
        (RenameMode::Whiteout(whiteout), Some(_)) if whiteout.no_replace => {
            return Err(Error::Exists.into());
        }
        (RenameMode::Exchange, None) => return Err(Error::NotFound.into()),
        _ => {}
    }
    if is_within(update, request, request.new_parent, &source)? {
        return Err(Error::Invalid.into());
    }
    let Some(target) = target else {
        move_name(update, request, &source)?;
        return Ok(Outcome::Removed(None));
    };
    let exchanges = request.mode == RenameMode::Exchange;
    if is_within(update, request, request.parent, &target)? {
        let error = match exchanges {
            true => Error::Invalid,
            // The target holds the source.
            false => Error::NotEmpty,
        };
        return Err(error.into());
    }
    if source.ino == target.ino {
        return Ok(Outcome::Removed(None));
    }
    if exchanges {
        exchange(update, request, &source, &target)?;
        return Ok(Outcome::Removed(None));
    }
    let removed = replace(update, request, &source, &target)?;
    Ok(Outcome::Removed(Some(removed)))
}

/// Whether a directory is that of an entry, or below it. Within one directory it cannot be.
fn is_within(
    update: &Update<'_, '_>,
    request: &Rename,
    directory: Ino,
    entry: &Dentry,
) -> Result<bool, Failure> {
    if entry.kind != Kind::Directory || request.parent == request.new_parent {
        return Ok(false);
    }
    let mut at = directory;
    for _ in 0..DEPTH_MAX {
        if at == entry.ino {
            return Ok(true);
        }
        if at == Ino::ROOT {
            return Ok(false);
        }
        at = contents(&update.inode(at)?).parent;
    }
    Err(Error::TooDeep.into())
}

/// The moved inode: its ctime, and what says where it lies.
fn moved(update: &mut Update<'_, '_>, entry: &Dentry, from: Ino, to: Ino) -> Result<(), Failure> {
    update.change(entry.ino, |inode| match &mut inode.body {
        Body::Directory(directory) => directory.parent = to,
        _ => inode.parent = inode.parent.map(|_| to),
    })?;
    if entry.kind == Kind::Directory && from != to {
        count_subdirectory(update, from, false)?;
        count_subdirectory(update, to, true)?;
    }
    Ok(())
}

/// Removes the old name, or points it at a whiteout.
fn leave_name(
    update: &mut Update<'_, '_>,
    request: &Rename,
    source: &Dentry,
) -> Result<(), Failure> {
    let RenameMode::Whiteout(whiteout) = request.mode else {
        return remove_name(update, request.parent, &request.name, source);
    };
    let owner = (whiteout.uid, whiteout.gid);
    let dentry = Dentry {
        ino: make_whiteout(update, request.parent, owner)?,
        kind: Kind::CharacterDevice,
        cookie: source.cookie,
    };
    redirect_name(update, request.parent, &request.name, dentry)
}

fn move_name(
    update: &mut Update<'_, '_>,
    request: &Rename,
    source: &Dentry,
) -> Result<(), Failure> {
    leave_name(update, request, source)?;
    let inode = (source.ino, source.kind);
    add_name(update, request.new_parent, &request.new_name, inode)?;
    moved(update, source, request.parent, request.new_parent)
}

fn replace(
    update: &mut Update<'_, '_>,
    request: &Rename,
    source: &Dentry,
    target: &Dentry,
) -> Result<Removed, Failure> {
    match (source.kind, target.kind) {
        (Kind::Directory, Kind::Directory) => check_empty(update, target.ino)?,
        (Kind::Directory, _) => return Err(Error::NotDirectory.into()),
        (_, Kind::Directory) => return Err(Error::IsDirectory.into()),
        _ => {}
    }
    leave_name(update, request, source)?;
    let dentry = Dentry {
        cookie: target.cookie,
        ..*source
    };
    redirect_name(update, request.new_parent, &request.new_name, dentry)?;
    moved(update, source, request.parent, request.new_parent)?;
    match target.kind {
        Kind::Directory => drop_directory(update, request.new_parent, target.ino, &request.openers),
        _ => drop_link(update, target.ino, &request.openers),
    }
}

fn exchange(
    update: &mut Update<'_, '_>,
    request: &Rename,
    source: &Dentry,
    target: &Dentry,
) -> Result<(), Failure> {
    let (there, here) = (
        Dentry {
            cookie: target.cookie,
            ..*source
        },
        Dentry {
            cookie: source.cookie,
            ..*target
        },
    );
    redirect_name(update, request.new_parent, &request.new_name, there)?;
    redirect_name(update, request.parent, &request.name, here)?;
    moved(update, source, request.parent, request.new_parent)?;
    moved(update, target, request.new_parent, request.parent)
}
