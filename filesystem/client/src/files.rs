//! Opening and closing files.

use std::time::Duration;

use fuse_codec::{AccessMode, Errno, Handle, OpenFlags, OpenOptions, Opened, PERMISSIONS_MASK};
use namespace::{Attributes, Ino, Kind, MakeTemporary, NewNode, Operation, Outcome, SetAttributes};

use crate::attributes::entry;
use crate::backend::Backend;
use crate::data::resize;
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::names;
use crate::open_inodes::{OpenGuard, OpenKind};
use crate::operation::OwnedCreate;
use crate::reply::OwnedReply;

/// How often CREATE begins anew when the name comes and goes at the wrong moments.
const CREATE_TRIES_MAX: u32 = 16;

/// How the guest's kernel treats an open file. Its cached pages are dropped at each open, and follow size and
/// mtime. A kernel computes where an append goes by the end that it knows; without its page cache it leaves
/// that to the write here. Whoever cannot write has nothing to hear of at close: no FLUSH is sent.
fn opened(handle: Handle, flags: OpenFlags) -> Opened {
    let writes = flags.access() != AccessMode::Read;
    Opened {
        handle,
        options: OpenOptions::NONE
            .with_if(writes && flags.append(), OpenOptions::DIRECT_IO)
            .with_if(!writes, OpenOptions::NOFLUSH),
    }
}

pub(crate) async fn open<B: Backend>(
    call: &Call<'_, B>,
    flags: OpenFlags,
    kill_suidgid: bool,
) -> Served {
    let ino = call.ino()?;
    let (_, opened) = open_inode(call, ino, flags, kill_suidgid).await?;
    Ok(OwnedReply::Opened(opened))
}

/// Opens an inode that is there.
async fn open_inode<B: Backend>(
    call: &Call<'_, B>,
    ino: Ino,
    flags: OpenFlags,
    kill_suidgid: bool,
) -> Result<(Attributes, Opened), Errno> {
    let client = call.client;
    // Whoever removes the last name on another host has this session hold the inode.
    client.session().await?;
    let guard = client.open.open(ino, OpenKind::File).ok_or(Errno::ESTALE)?;
    let mut attributes = Attributes::of(ino, &client.inode(ino).await?);
    match attributes.kind {
        Kind::File => {}
        Kind::Directory => return Err(Errno::EISDIR),
        Kind::Symlink => return Err(Errno::ELOOP),
        // Kernels open these by themselves.
        _ => return Err(Errno::ENXIO),
    }
    // The background finds what the session holds. It is not noted here: a file that was made without a name
    // may have got its first one since this look.
    if attributes.nlink == 0 && !client.open.has_user(ino) {
        return Err(Errno::ESTALE);
    }
    if flags.truncate() {
        let change = SetAttributes {
            ino,
            clear_privileges: kill_suidgid,
            ..SetAttributes::default()
        };
        attributes = resize::resize(client, change, 0).await?;
    }
    let handles = &call.mount.handles;
    let handle = handles.insert(call.session, guard, flags.access(), client.buffer.mark())?;
    Ok((attributes, opened(handle, flags)))
}

pub(crate) async fn create<B: Backend>(call: &Call<'_, B>, create: &OwnedCreate) -> Served {
    let (client, parent) = (call.client, call.ino()?);
    let (flags, name) = (create.flags, &create.name);
    for tries in 0..CREATE_TRIES_MAX {
        let make = names::make(
            &call.header,
            parent,
            name.clone(),
            create.permissions,
            NewNode::File,
        );
        match client.apply(make).await {
            Ok(Outcome::Inode(attributes)) => {
                let guard = client.open.open(attributes.ino, OpenKind::File);
                let guard = guard.ok_or(Errno::ESTALE)?;
                return created(call, &attributes, guard, (Some(parent), flags));
            }
            Ok(other) => return Err(Failure::unfit(&other).into()),
            Err(Failure::Refused(namespace::Error::Exists)) if !flags.exclusive() => {}
            Err(failure) => return Err(failure.into()),
        }
        let ino = match client.lookup(parent, name).await {
            Ok((_, inode)) if inode.body.kind() == Kind::Directory => return Err(Errno::EISDIR),
            // The kernel did not expect that, and looks the name up again.
            Ok((_, inode)) if inode.body.kind() != Kind::File => return Err(Errno::ESTALE),
            Ok((ino, _)) => ino,
            Err(Failure::Refused(namespace::Error::NotFound)) => {
                client.pause(tries).await;
                continue;
            }
            Err(failure) => return Err(failure.into()),
        };
        match open_inode(call, ino, flags, create.kill_suidgid).await {
            // Removed since it was looked up.
            Err(Errno::ESTALE) => client.pause(tries).await,
            Err(errno) => return Err(errno),
            Ok((attributes, opened)) => {
                return Ok(OwnedReply::Created(entry(&attributes), opened));
            }
        }
    }
    Err(Errno::EIO)
}

/// Time for which the kernel need not look up a file that was made without a name: no name leads to it. Linux
/// would look up a name that it made up, and take the file for removed when that is not there. Overlay
/// filesystems use such a file by what the kernel has of it at its creation, even once it has a name.
const NAMELESS_VALID: Duration = Duration::from_secs(u32::MAX as u64);

/// Opens a file that was just made, in this directory or without a name.
fn created<B: Backend>(
    call: &Call<'_, B>,
    attributes: &Attributes,
    guard: OpenGuard,
    (parent, flags): (Option<Ino>, OpenFlags),
) -> Served {
    let client = call.client;
    if flags.access() != AccessMode::Read {
        client.expect_writes(attributes.ino, parent);
    }
    let handles = &call.mount.handles;
    let handle = handles.insert(call.session, guard, flags.access(), client.buffer.mark())?;
    let mut entry = entry(attributes);
    if parent.is_none() {
        entry.entry_valid = NAMELESS_VALID;
    }
    Ok(OwnedReply::Created(entry, opened(handle, flags)))
}

/// Makes a file without a name and opens it: O_TMPFILE. The guest's kernel refuses to link one that was
/// opened with O_EXCL.
pub(crate) async fn create_temporary<B: Backend>(
    call: &Call<'_, B>,
    flags: OpenFlags,
    permissions: u32,
) -> Served {
    let (client, parent) = (call.client, call.ino()?);
    let make = Operation::MakeTemporary(MakeTemporary {
        parent,
        mode: (permissions & PERMISSIONS_MASK) as u16,
        uid: call.header.uid,
        gid: call.header.gid,
    });
    let attributes = match client.apply(make).await? {
        Outcome::Inode(attributes) => attributes,
        other => return Err(Failure::unfit(&other).into()),
    };
    let guard = client.open.open(attributes.ino, OpenKind::File);
    let guard = guard.ok_or(Errno::ESTALE)?;
    // This session holds it already.
    client.note_orphan(attributes.ino);
    created(call, &attributes, guard, (None, flags))
}

/// Closes a file or directory. If it was the last handle of an orphan, that goes.
pub(crate) async fn release<B: Backend>(call: &Call<'_, B>, handle: Handle) -> Served {
    drop(call.mount.handles.remove(handle, call.ino()?)?);
    call.client.release_noted_orphans().await;
    Ok(OwnedReply::Done)
}
