//! Names: looking them up, making, moving and removing them.

use fuse_codec::{Errno, Header, PERMISSIONS_MASK, RenameFlags};
use namespace::{
    Body, Ino, Make, NAME_MAX, NewNode, Openers, Operation, Outcome, Removed, Rename, RenameMode,
    Whiteout,
};

use crate::attributes::{entry, told_entry};
use crate::backend::Backend;
use crate::cache::Found;
use crate::caller::Caller;
use crate::failure::Failure;
use crate::mount::Served;
use crate::operation::LookupTarget;
use crate::reply::OwnedReply;

/// Whether these bytes can be a name. The namespace refuses others.
pub(crate) fn may_be_name(name: &[u8]) -> bool {
    let is_reserved = name.is_empty() || name == b"." || name == b"..";
    !is_reserved && name.len() <= NAME_MAX && !name.contains(&0) && !name.contains(&b'/')
}

/// A name that is not there is answered as an error, unless the kernel may go by its absence for a while.
pub(crate) async fn lookup<B: Backend>(
    client: Caller<'_, B>,
    parent: Ino,
    name: &LookupTarget,
) -> Served {
    let told = match name {
        LookupTarget::Name(name) => match client.find(parent, name).await? {
            Found::Inode(told) => told,
            Found::Absent { entry_valid } if entry_valid.is_zero() => return Err(Errno::ENOENT),
            Found::Absent { entry_valid } => return Ok(OwnedReply::NoEntry(entry_valid)),
        },
        LookupTarget::Itself => client.attributes(parent).await?,
        LookupTarget::Parent => match client.inode(parent).await?.body {
            Body::Directory(directory) => client.attributes(directory.parent).await?,
            _ => return Err(Errno::ENOTDIR),
        },
    };
    Ok(OwnedReply::Entry(told_entry(&told)))
}

/// The operation that makes an inode which is no symbolic link.
pub(crate) fn make(
    header: &Header,
    parent: Ino,
    name: Vec<u8>,
    permissions: u32,
    node: NewNode,
) -> Operation {
    Operation::Make(Make {
        parent,
        name,
        mode: (permissions & PERMISSIONS_MASK) as u16,
        uid: header.uid,
        gid: header.gid,
        node,
    })
}

pub(crate) async fn symlink<B: Backend>(
    client: Caller<'_, B>,
    header: &Header,
    parent: Ino,
    name: Vec<u8>,
    target: Vec<u8>,
) -> Served {
    let symlink = Operation::Symlink {
        parent,
        name,
        target,
        uid: header.uid,
        gid: header.gid,
    };
    entry_of(client.apply(symlink).await?)
}

pub(crate) async fn link<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    parent: Ino,
    name: Vec<u8>,
) -> Served {
    let moment = client.buffer.moment();
    match client.apply(Operation::Link { ino, parent, name }).await? {
        Outcome::Inode(attributes) => {
            let attributes = client.replied(attributes, moment).await?;
            Ok(OwnedReply::Entry(entry(&attributes)))
        }
        other => Err(Failure::unfit(&other).into()),
    }
}

/// The reply about an inode that got a name.
pub(crate) fn entry_of(outcome: Outcome) -> Served {
    match outcome {
        Outcome::Inode(attributes) => Ok(OwnedReply::Entry(entry(&attributes))),
        other => Err(Failure::unfit(&other).into()),
    }
}

pub(crate) async fn unlink<B: Backend>(
    client: Caller<'_, B>,
    parent: Ino,
    name: Vec<u8>,
) -> Served {
    let unlink = Operation::Unlink {
        parent,
        name,
        openers: OPENERS,
    };
    removed(client, client.apply(unlink).await?)
}

pub(crate) async fn rmdir<B: Backend>(client: Caller<'_, B>, parent: Ino, name: Vec<u8>) -> Served {
    let rmdir = Operation::Rmdir {
        parent,
        name,
        openers: OPENERS,
    };
    removed(client, client.apply(rmdir).await?)
}

pub(crate) async fn rename<B: Backend>(
    client: Caller<'_, B>,
    header: &Header,
    (parent, name): (Ino, Vec<u8>),
    (new_parent, new_name): (Ino, Vec<u8>),
    flags: RenameFlags,
) -> Served {
    let rename = Operation::Rename(Rename {
        parent,
        name,
        new_parent,
        new_name,
        mode: match flags {
            RenameFlags::Replace => RenameMode::Replace,
            RenameFlags::NoReplace => RenameMode::NoReplace,
            RenameFlags::Exchange => RenameMode::Exchange,
            RenameFlags::Whiteout { no_replace } => RenameMode::Whiteout(Whiteout {
                no_replace,
                uid: header.uid,
                gid: header.gid,
            }),
        },
        openers: OPENERS,
    });
    removed(client, client.apply(rename).await?)
}

/// Sessions that hold an inode which loses its last name: all, including this host's, even if none of its
/// guests uses the inode now. A guest may look it up before the leader removes the name. Unused inodes are
/// released right after.
const OPENERS: Openers = Openers::All { own: true };

/// The reply about a name that is gone. If its inode has none any more and is kept, this session may hold it.
fn removed<B: Backend>(client: Caller<'_, B>, outcome: Outcome) -> Served {
    match outcome {
        Outcome::Removed(None) => {}
        Outcome::Removed(Some(Removed { ino, nlink, kept })) => {
            if nlink == 0 && kept {
                client.note_orphan(ino);
            }
        }
        other => return Err(Failure::unfit(&other).into()),
    }
    Ok(OwnedReply::Done)
}
