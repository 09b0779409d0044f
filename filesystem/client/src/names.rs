//! Names: looking them up, making, moving and removing them.

use fuse_codec::{Errno, Header, PERMISSIONS_MASK, RenameFlags};
use namespace::{
    Attributes, Body, Ino, Make, NewNode, Openers, Operation, Outcome, Removed, Rename, RenameMode,
};

use crate::attributes::entry;
use crate::backend::Backend;
use crate::client::Client;
use crate::failure::Failure;
use crate::mount::Served;
use crate::operation::LookupTarget;
use crate::reply::OwnedReply;

/// A name that is not there is answered as an error, which no kernel keeps.
pub(crate) async fn lookup<B: Backend>(
    client: &Client<B>,
    parent: Ino,
    name: &LookupTarget,
) -> Served {
    let (ino, inode) = match name {
        LookupTarget::Name(name) => client.lookup(parent, name).await?,
        LookupTarget::Itself => (parent, client.inode(parent).await?),
        LookupTarget::Parent => match client.inode(parent).await?.body {
            Body::Directory(directory) => (directory.parent, client.inode(directory.parent).await?),
            _ => return Err(Errno::ENOTDIR),
        },
    };
    Ok(OwnedReply::Entry(entry(&Attributes::of(ino, &inode))))
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
    client: &Client<B>,
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
    client: &Client<B>,
    ino: Ino,
    parent: Ino,
    name: Vec<u8>,
) -> Served {
    entry_of(client.apply(Operation::Link { ino, parent, name }).await?)
}

/// The reply about an inode that got a name.
pub(crate) fn entry_of(outcome: Outcome) -> Served {
    match outcome {
        Outcome::Inode(attributes) => Ok(OwnedReply::Entry(entry(&attributes))),
        other => Err(Failure::unfit(&other).into()),
    }
}

pub(crate) async fn unlink<B: Backend>(client: &Client<B>, parent: Ino, name: Vec<u8>) -> Served {
    let unlink = Operation::Unlink {
        parent,
        name,
        openers: OPENERS,
    };
    removed(client, client.apply(unlink).await?)
}

pub(crate) async fn rmdir<B: Backend>(client: &Client<B>, parent: Ino, name: Vec<u8>) -> Served {
    let rmdir = Operation::Rmdir {
        parent,
        name,
        openers: OPENERS,
    };
    removed(client, client.apply(rmdir).await?)
}

pub(crate) async fn rename<B: Backend>(
    client: &Client<B>,
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
        },
        openers: OPENERS,
    });
    removed(client, client.apply(rename).await?)
}

/// Who may have an inode open that loses its name: any host. This one, too, though nothing may be open here
/// now: a guest may open the file before the leader has removed its name. What is not open is let go of right
/// after.
const OPENERS: Openers = Openers::All { own: true };

/// The reply about a name that is gone. If its inode has none any more and is kept, this session may hold it.
fn removed<B: Backend>(client: &Client<B>, outcome: Outcome) -> Served {
    match outcome {
        Outcome::Removed(None) => {}
        Outcome::Removed(Some(Removed { ino, nlink, kept })) => {
            if nlink == 0 && kept {
                client.open.note_orphan(ino, client.open.moment());
            }
        }
        other => return Err(Failure::unfit(&other).into()),
    }
    Ok(OwnedReply::Done)
}
