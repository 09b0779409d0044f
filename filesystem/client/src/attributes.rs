//! Attributes of inodes, and of the filesystem.

use std::time::Duration;

use fuse_codec::{
    Attr, DeviceNumber, Entry, Errno, FsStats, Kind, NAME_BYTES_MAX, NodeId, PERMISSIONS_MASK,
    SetAttr, SetTime, Timestamp,
};
use namespace::{Attributes, BLOCK, Body, Ino, Outcome, SetAttributes, Time};

use crate::backend::{Backend, Space};
use crate::cache::Told;
use crate::caller::Caller;
use crate::client::Client;
use crate::data::resize;
use crate::failure::Failure;
use crate::mount::Served;
use crate::reply::OwnedReply;
use crate::sync::Mode;

/// Validity of what a change replies: it is not cached here either.
pub(crate) const CHANGED: Duration = Duration::ZERO;

/// Inodes that can be made, as statfs(2) says it. Their numbers do not run out before.
const INODES_FREE: u64 = 1 << 40;

/// Bytes that are free where the pool's space is not known.
const FREE_BYTES_UNKNOWN: u64 = 1 << 50;

/// The attributes of an inode as FUSE has them.
pub(crate) fn attr(attributes: &Attributes) -> Attr {
    let kind = kind_of(attributes.kind);
    Attr {
        ino: attributes.ino.0,
        kind,
        permissions: attributes.mode.into(),
        nlink: attributes.nlink,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: DeviceNumber::from_wire(attributes.rdev),
        // Programs take a directory of no bytes for one of a pseudo filesystem.
        size: match kind {
            Kind::Directory => BLOCK,
            _ => attributes.size,
        },
        allocated_bytes: attributes.allocated,
        atime: timestamp(attributes.atime),
        mtime: timestamp(attributes.mtime),
        ctime: timestamp(attributes.ctime),
        btime: Some(timestamp(attributes.btime)),
        block_bytes: BLOCK as u32,
    }
}

/// The entry of a name as FUSE has it, in the reply to a change.
pub(crate) fn entry(attributes: &Attributes) -> Entry {
    told_entry(&Told::once(attributes.clone()))
}

/// The entry of a name as FUSE has it.
pub(crate) fn told_entry(told: &Told) -> Entry {
    Entry {
        nodeid: NodeId(told.attributes.ino.0),
        entry_valid: told.entry_valid,
        attr_valid: told.attr_valid,
        attr: attr(&told.attributes),
    }
}

pub(crate) fn kind_of(kind: namespace::Kind) -> Kind {
    match kind {
        namespace::Kind::File => Kind::Regular,
        namespace::Kind::Directory => Kind::Directory,
        namespace::Kind::Symlink => Kind::Symlink,
        namespace::Kind::Fifo => Kind::Fifo,
        namespace::Kind::Socket => Kind::Socket,
        namespace::Kind::CharacterDevice => Kind::CharDevice,
        namespace::Kind::BlockDevice => Kind::BlockDevice,
    }
}

fn timestamp(time: Time) -> Timestamp {
    Timestamp {
        secs: time.seconds,
        nanos: time.nanoseconds,
    }
}

fn set_time(time: SetTime) -> namespace::SetTime {
    match time {
        SetTime::Now => namespace::SetTime::Now,
        SetTime::At(at) => namespace::SetTime::To(Time {
            seconds: at.secs,
            nanoseconds: at.nanos,
        }),
    }
}

pub(crate) async fn set<B: Backend>(client: Caller<'_, B>, ino: Ino, set: &SetAttr) -> Served {
    let change = SetAttributes {
        ino,
        mode: set.permissions.map(|bits| (bits & PERMISSIONS_MASK) as u16),
        uid: set.uid,
        gid: set.gid,
        atime: set.atime.map(set_time),
        mtime: set.mtime.map(set_time),
        // As Linux does when an owner changes, whoever asks.
        clear_privileges: set.kill_suidgid || set.uid.is_some() || set.gid.is_some(),
        ..SetAttributes::default()
    };
    let attributes = match set.size {
        Some(size) => resize::resize(client, change, size).await?,
        None => set_alone(client, change).await?,
    };
    Ok(OwnedReply::Attr(attr(&attributes), CHANGED))
}

/// Changes attributes but for the size. What is buffered of a file stays there.
async fn set_alone<B: Backend>(
    client: Caller<'_, B>,
    change: SetAttributes,
) -> Result<Attributes, Failure> {
    let (ino, sets_mtime) = (change.ino, change.mtime.is_some());
    let _turn = client.changing.lock(ino, Mode::Exclusive).await;
    let session = client.session().await?;
    // While it is pinned, nobody else is waited for.
    client.settle_doubts(&session).await?;
    let moment = client.buffer.moment();
    let change = namespace::Operation::SetAttributes(change);
    if let Some(pin) = client.pin(ino).await {
        match client.apply_held(&session, ino, change.clone()).await {
            Ok(Outcome::Changed { attributes, .. }) => {
                pin.changed(sets_mtime.then_some(attributes.mtime));
                return client.replied(attributes, moment).await;
            }
            Ok(other) => return Err(Failure::unfit(&other)),
            // What was buffered is lost.
            Err(Failure::SessionOver) => {}
            Err(failure) => return Err(failure),
        }
    }
    match client.apply(change).await? {
        Outcome::Changed { attributes, .. } => client.replied(attributes, moment).await,
        other => Err(Failure::unfit(&other)),
    }
}

pub(crate) async fn readlink<B: Backend>(client: &Client<B>, ino: Ino) -> Served {
    match client.inode(ino).await?.body {
        Body::Symlink(target) => Ok(OwnedReply::Bytes(target)),
        _ => Err(Errno::EINVAL),
    }
}

pub(crate) async fn statfs<B: Backend>(client: &Client<B>) -> Served {
    let statistics = client.statistics().await?;
    let used_bytes = statistics
        .named_bytes
        .saturating_add(statistics.freed_bytes);
    let space = client.backend.space().unwrap_or(Space {
        total_bytes: FREE_BYTES_UNKNOWN.saturating_add(used_bytes),
        free_bytes: FREE_BYTES_UNKNOWN,
    });
    let blocks_free = space.free_bytes / BLOCK;
    Ok(OwnedReply::Stats(FsStats {
        blocks: space.total_bytes / BLOCK,
        blocks_free,
        blocks_available: blocks_free,
        inodes: statistics.inodes.saturating_add(INODES_FREE),
        inodes_free: INODES_FREE,
        block_bytes: BLOCK as u32,
        name_bytes_max: NAME_BYTES_MAX as u32,
    }))
}
