//! Extended attributes.

use fuse_codec::{Errno, XattrMode};
use namespace::{Ino, Operation, XATTR_NAME_MAX};

use crate::backend::Backend;
use crate::caller::Caller;
use crate::client::Client;
use crate::mount::Served;
use crate::reply::OwnedReply;
use crate::sync::Mode;

/// The reply to who has room for `size` bytes; with 0 it asks for their number.
fn sized(bytes: Vec<u8>, size: u32) -> Served {
    match size {
        // A value has at most 64 KiB, and so has a list.
        0 => Ok(OwnedReply::XattrSize(bytes.len() as u32)),
        size if bytes.len() <= size as usize => Ok(OwnedReply::Bytes(bytes)),
        _ => Err(Errno::ERANGE),
    }
}

/// A write takes these away.
const CAPABILITY: &[u8] = b"security.capability";

/// Whether this can be the name of an attribute. The namespace refuses others.
fn may_be_name(name: &[u8]) -> bool {
    let classes: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    let mut rests = classes.iter().filter_map(|class| name.strip_prefix(*class));
    let has_rest = rests.any(|rest| !rest.is_empty());
    has_rest && name.len() <= XATTR_NAME_MAX && !name.contains(&0)
}

pub(crate) async fn get<B: Backend>(
    client: &Client<B>,
    ino: Ino,
    name: &[u8],
    size: u32,
) -> Served {
    if may_be_name(name) && client.inode_has_no_xattrs(ino) {
        return Err(Errno::ENODATA);
    }
    if name == CAPABILITY {
        client.write_back(ino).await;
    }
    sized(client.xattr(ino, name).await?, size)
}

pub(crate) async fn list<B: Backend>(client: &Client<B>, ino: Ino, size: u32) -> Served {
    let mut list = Vec::new();
    if client.inode_has_no_xattrs(ino) {
        return sized(list, size);
    }
    client.write_back(ino).await;
    for name in client.xattr_names(ino).await? {
        list.extend(name);
        list.push(0);
    }
    sized(list, size)
}

pub(crate) async fn set<B: Backend>(
    client: Caller<'_, B>,
    ino: Ino,
    name: Vec<u8>,
    value: Vec<u8>,
    mode: XattrMode,
) -> Served {
    let set = Operation::SetXattr {
        ino,
        name,
        value,
        mode: match mode {
            XattrMode::Set => namespace::XattrMode::Set,
            XattrMode::Create => namespace::XattrMode::Create,
            XattrMode::Replace => namespace::XattrMode::Replace,
        },
    };
    // Else a capability that is set would be taken away by what was written before.
    let _turn = client.turn(ino, Mode::Exclusive).await;
    client.apply(set).await?;
    Ok(OwnedReply::Done)
}

pub(crate) async fn remove<B: Backend>(client: Caller<'_, B>, ino: Ino, name: Vec<u8>) -> Served {
    let _turn = client.turn(ino, Mode::Exclusive).await;
    client.apply(Operation::RemoveXattr { ino, name }).await?;
    Ok(OwnedReply::Done)
}
