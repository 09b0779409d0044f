//! Names: making, linking and removing them.
//!
//! A name is two records, one for its directory's order of bytes and one for its order of cookies. Cookies
//! come from the directory's counter, so a listing in their order shows every name that is there throughout
//! exactly once, whatever happens between its calls.

use crate::error::{Error, Failure};
use crate::ids::Ino;
use crate::keys::{COOKIES, DENTRIES, INODES};
use crate::operation::{Attributes, Make, MakeTemporary, NewNode, Openers, Outcome, Removed};
use crate::reap;
use crate::record::{
    Body, Content, CookieEntry, Dentry, Directory, Filesystem, Inode, Kind, Statistics,
};
use crate::update::Update;

/// Bytes of a name. A longer one is refused with ENAMETOOLONG.
pub const NAME_MAX: usize = 255;

/// Bytes of a symbolic link's target: Linux's PATH_MAX without its 0. A longer one is refused with
/// ENAMETOOLONG.
pub const TARGET_MAX: usize = 4095;

/// Names of a file. A further one is refused with EMLINK.
pub const LINKS_MAX: u32 = 65_000;

/// The first cookie of a directory: 1 and 2 are "." and "..", which the caller makes.
pub const FIRST_COOKIE: u64 = 3;

/// Number of the character device that is a whiteout: major and minor 0.
const WHITEOUT_DEVICE: u32 = 0;

pub(crate) const SET_USER_ID: u16 = 0o4000;
pub(crate) const SET_GROUP_ID: u16 = 0o2000;
pub(crate) const PERMISSIONS: u16 = 0o7777;

/// The record of a filesystem that is about to be made.
pub(crate) fn no_filesystem() -> Filesystem {
    Filesystem {
        next_inode: Ino::ROOT.0 + 1,
        next_session: 1,
        next_segment: 1,
        statistics: Statistics::default(),
        removed_below: None,
    }
}

pub(crate) fn make_root(
    update: &mut Update<'_, '_>,
    mode: u16,
    owner: (u32, u32),
) -> Result<Outcome, Failure> {
    let mut root = new_inode(update, mode, owner, empty_directory(Ino::ROOT));
    root.nlink = 2;
    update.put(&INODES, &Ino::ROOT, &root);
    update.statistics().inodes += 1;
    Ok(Outcome::Done)
}

fn empty_directory(parent: Ino) -> Body {
    Body::Directory(Directory {
        parent,
        entries: 0,
        next_cookie: FIRST_COOKIE,
    })
}

fn new_inode(update: &Update<'_, '_>, mode: u16, (uid, gid): (u32, u32), body: Body) -> Inode {
    let at = update.at;
    Inode {
        mode: mode & PERMISSIONS,
        uid,
        gid,
        nlink: 1,
        parent: None,
        size: 0,
        atime: at,
        mtime: at,
        ctime: at,
        btime: at,
        change: 1,
        allocated: 0,
        xattr_list_bytes: 0,
        xattr_value_bytes: 0,
        body,
    }
}

/// Refuses what cannot be a name.
pub(crate) fn check_name(name: &[u8]) -> Result<(), Error> {
    if name.len() > NAME_MAX {
        return Err(Error::NameTooLong);
    }
    let is_reserved = name.is_empty() || name == b"." || name == b"..";
    match is_reserved || name.contains(&0) || name.contains(&b'/') {
        true => Err(Error::Invalid),
        false => Ok(()),
    }
}

/// A directory in which names may be made: it was not removed.
pub(crate) fn live_directory(update: &Update<'_, '_>, ino: Ino) -> Result<Inode, Failure> {
    let inode = update.inode(ino)?;
    match inode.body {
        Body::Directory(_) if inode.nlink > 0 => Ok(inode),
        Body::Directory(_) => Err(Error::NotFound.into()),
        _ => Err(Error::NotDirectory.into()),
    }
}

/// A name of a directory.
pub(crate) fn find(
    update: &Update<'_, '_>,
    parent: Ino,
    name: &[u8],
) -> Result<Option<Dentry>, Failure> {
    check_name(name)?;
    live_directory(update, parent)?;
    Ok(update.get(&DENTRIES, &(parent, name))?)
}

/// The fields that only directories have.
pub(crate) fn contents(inode: &Inode) -> Directory {
    match inode.body {
        Body::Directory(directory) => directory,
        _ => panic!("an entry that says directory leads to one"),
    }
}

/// Makes a name, which must not be there, with the directory's next cookie.
pub(crate) fn add_name(
    update: &mut Update<'_, '_>,
    parent: Ino,
    name: &[u8],
    (ino, kind): (Ino, Kind),
) -> Result<(), Failure> {
    let mut cookie = 0;
    let at = update.at;
    update.change(parent, |inode| {
        let mut directory = contents(inode);
        cookie = directory.next_cookie;
        directory.next_cookie += 1;
        directory.entries += 1;
        inode.body = Body::Directory(directory);
        inode.mtime = at;
    })?;
    put_name(update, parent, name, Dentry { ino, kind, cookie });
    Ok(())
}

/// Points an existing name at another inode. The name keeps its place.
pub(crate) fn redirect_name(
    update: &mut Update<'_, '_>,
    parent: Ino,
    name: &[u8],
    dentry: Dentry,
) -> Result<(), Failure> {
    let at = update.at;
    update.change(parent, |inode| inode.mtime = at)?;
    put_name(update, parent, name, dentry);
    Ok(())
}

fn put_name(update: &mut Update<'_, '_>, parent: Ino, name: &[u8], dentry: Dentry) {
    let entry = CookieEntry {
        name: name.to_vec(),
        ino: dentry.ino,
        kind: dentry.kind,
    };
    update.put(&DENTRIES, &(parent, name), &dentry);
    update.put(&COOKIES, &(parent, dentry.cookie), &entry);
}

pub(crate) fn remove_name(
    update: &mut Update<'_, '_>,
    parent: Ino,
    name: &[u8],
    dentry: &Dentry,
) -> Result<(), Failure> {
    let at = update.at;
    update.change(parent, |inode| {
        let mut directory = contents(inode);
        directory.entries -= 1;
        inode.body = Body::Directory(directory);
        inode.mtime = at;
    })?;
    update.delete(&DENTRIES, &(parent, name));
    update.delete(&COOKIES, &(parent, dentry.cookie));
    Ok(())
}

/// Counts a subdirectory that came or went.
pub(crate) fn count_subdirectory(
    update: &mut Update<'_, '_>,
    parent: Ino,
    came: bool,
) -> Result<(), Failure> {
    update.change(parent, |inode| match came {
        true => inode.nlink += 1,
        false => inode.nlink -= 1,
    })?;
    Ok(())
}

/// Makes an inode with its first name.
fn create(
    update: &mut Update<'_, '_>,
    (parent, name): (Ino, &[u8]),
    (mode, uid, gid): (u16, u32, u32),
    size: u64,
    body: Body,
) -> Result<Outcome, Failure> {
    if find(update, parent, name)?.is_some() {
        return Err(Error::Exists.into());
    }
    let kind = body.kind();
    let (ino, mut inode) = inherit(update, parent, (mode, uid, gid), body)?;
    inode.size = size;
    if kind == Kind::Directory {
        inode.nlink = 2;
        count_subdirectory(update, parent, true)?;
    } else {
        inode.parent = Some(parent);
    }
    update.put(&INODES, &ino, &inode);
    add_name(update, parent, name, (ino, kind))?;
    Ok(Outcome::Inode(Attributes::of(ino, &inode)))
}

/// Numbers a new inode, and gives it what it inherits from its directory. The caller writes the record.
fn inherit(
    update: &mut Update<'_, '_>,
    parent: Ino,
    (mode, uid, gid): (u16, u32, u32),
    body: Body,
) -> Result<(Ino, Inode), Failure> {
    let directory = live_directory(update, parent)?;
    // As Linux does: the group comes down with the bit, and the bit itself into directories.
    let inherits = directory.mode & SET_GROUP_ID != 0;
    let gid = if inherits { directory.gid } else { gid };
    let inherited = match inherits && body.kind() == Kind::Directory {
        true => SET_GROUP_ID,
        false => 0,
    };
    let ino = Ino::new(parent.shard(), update.totals.next_inode);
    update.totals.next_inode += 1;
    update.statistics().inodes += 1;
    Ok((ino, new_inode(update, mode | inherited, (uid, gid), body)))
}

/// Makes a whiteout, to which the caller points a name of the directory.
pub(crate) fn make_whiteout(
    update: &mut Update<'_, '_>,
    parent: Ino,
    (uid, gid): (u32, u32),
) -> Result<Ino, Failure> {
    let body = Body::CharacterDevice(WHITEOUT_DEVICE);
    let (ino, mut inode) = inherit(update, parent, (0, uid, gid), body)?;
    inode.parent = Some(parent);
    update.put(&INODES, &ino, &inode);
    Ok(ino)
}

pub(crate) fn make_temporary(
    update: &mut Update<'_, '_>,
    make: &MakeTemporary,
) -> Result<Outcome, Failure> {
    let owner = (make.mode, make.uid, make.gid);
    let (ino, mut inode) = inherit(update, make.parent, owner, Body::File(Content::Empty))?;
    inode.nlink = 0;
    update.put(&INODES, &ino, &inode);
    reap::hold_temporary(update, ino);
    Ok(Outcome::Inode(Attributes::of(ino, &inode)))
}

pub(crate) fn make(update: &mut Update<'_, '_>, make: &Make) -> Result<Outcome, Failure> {
    let body = match make.node {
        NewNode::File => Body::File(Content::Empty),
        NewNode::Directory => empty_directory(make.parent),
        NewNode::Fifo => Body::Fifo,
        NewNode::Socket => Body::Socket,
        NewNode::CharacterDevice(number) => Body::CharacterDevice(number),
        NewNode::BlockDevice(number) => Body::BlockDevice(number),
    };
    let place = (make.parent, make.name.as_slice());
    create(update, place, (make.mode, make.uid, make.gid), 0, body)
}

pub(crate) fn symlink(
    update: &mut Update<'_, '_>,
    place: (Ino, &[u8]),
    target: &[u8],
    (uid, gid): (u32, u32),
) -> Result<Outcome, Failure> {
    match target.len() {
        0 => return Err(Error::NotFound.into()),
        length if length > TARGET_MAX => return Err(Error::NameTooLong.into()),
        _ if target.contains(&0) => return Err(Error::Invalid.into()),
        _ => {}
    }
    let size = target.len() as u64;
    let body = Body::Symlink(target.to_vec());
    create(update, place, (0o777, uid, gid), size, body)
}

pub(crate) fn link(
    update: &mut Update<'_, '_>,
    ino: Ino,
    parent: Ino,
    name: &[u8],
) -> Result<Outcome, Failure> {
    if find(update, parent, name)?.is_some() {
        return Err(Error::Exists.into());
    }
    let inode = update.inode(ino)?;
    let kind = inode.body.kind();
    match inode.nlink {
        _ if kind == Kind::Directory => return Err(Error::NotPermitted.into()),
        0 => reap::adopt(update, ino)?,
        LINKS_MAX.. => return Err(Error::TooManyLinks.into()),
        _ => {}
    }
    let inode = update.change(ino, |inode| {
        inode.parent = (inode.nlink == 0).then_some(parent);
        inode.nlink += 1;
    })?;
    add_name(update, parent, name, (ino, kind))?;
    Ok(Outcome::Inode(Attributes::of(ino, &inode)))
}

pub(crate) fn unlink(
    update: &mut Update<'_, '_>,
    parent: Ino,
    name: &[u8],
    openers: &Openers,
) -> Result<Outcome, Failure> {
    let dentry = find(update, parent, name)?.ok_or(Error::NotFound)?;
    if dentry.kind == Kind::Directory {
        return Err(Error::IsDirectory.into());
    }
    remove_name(update, parent, name, &dentry)?;
    Ok(Outcome::Removed(Some(drop_link(
        update, dentry.ino, openers,
    )?)))
}

/// An inode that is no directory lost a name.
pub(crate) fn drop_link(
    update: &mut Update<'_, '_>,
    ino: Ino,
    openers: &Openers,
) -> Result<Removed, Failure> {
    let changed = update.change(ino, |inode| {
        inode.nlink -= 1;
        inode.parent = None;
    })?;
    let nlink = changed.nlink;
    let kept = match nlink {
        0 => reap::orphan(update, ino, openers)?,
        _ => true,
    };
    Ok(Removed { ino, nlink, kept })
}

pub(crate) fn rmdir(
    update: &mut Update<'_, '_>,
    parent: Ino,
    name: &[u8],
    openers: &Openers,
) -> Result<Outcome, Failure> {
    let dentry = find(update, parent, name)?.ok_or(Error::NotFound)?;
    if dentry.kind != Kind::Directory {
        return Err(Error::NotDirectory.into());
    }
    check_empty(update, dentry.ino)?;
    remove_name(update, parent, name, &dentry)?;
    let removed = drop_directory(update, parent, dentry.ino, openers)?;
    Ok(Outcome::Removed(Some(removed)))
}

pub(crate) fn check_empty(update: &Update<'_, '_>, ino: Ino) -> Result<(), Failure> {
    match contents(&update.inode(ino)?).entries {
        0 => Ok(()),
        _ => Err(Error::NotEmpty.into()),
    }
}

/// An empty directory lost its name in `parent`.
pub(crate) fn drop_directory(
    update: &mut Update<'_, '_>,
    parent: Ino,
    ino: Ino,
    openers: &Openers,
) -> Result<Removed, Failure> {
    count_subdirectory(update, parent, false)?;
    update.change(ino, |inode| inode.nlink = 0)?;
    let kept = reap::orphan(update, ino, openers)?;
    Ok(Removed {
        ino,
        nlink: 0,
        kept,
    })
}
