//! Directories: opening and listing them.

use fuse_codec::{
    AccessMode, Cookie, DirBuffer, DirLayout, DirRecord, Errno, Handle, Kind, OpenOptions, Opened,
};
use namespace::{Body, FIRST_COOKIE, Ino};

use crate::attributes::{kind_of, told_entry};
use crate::backend::Backend;
use crate::failure::Failure;
use crate::mount::{Call, Served};
use crate::open_inodes::OpenKind;
use crate::reply::OwnedReply;

/// Cookies of `.` and `..`; those of names follow.
const DOT_COOKIE: u64 = 1;
const DOT_DOT_COOKIE: u64 = 2;

/// Bytes of a listing. Kernels ask for as much as a request may have; this is all that one gets.
const LISTING_BYTES_MAX: u32 = 1 << 20;

pub(crate) async fn open<B: Backend>(call: &Call<'_, B>) -> Served {
    let ino = call.ino()?;
    let client = call.client;
    // Whoever removes the directory on another host has this session hold it.
    client.session().await?;
    let guard = client.open.open(ino, OpenKind::Directory);
    let guard = guard.ok_or(Errno::ESTALE)?;
    let inode = client.inode(ino).await?;
    if !matches!(inode.body, Body::Directory(_)) {
        return Err(Errno::ENOTDIR);
    }
    if inode.nlink == 0 {
        if !client.open.has_user(ino) {
            return Err(Errno::ESTALE);
        }
        client.note_orphan(ino);
    }
    let handles = &call.mount.handles;
    let handle = handles.insert(call.session, guard, AccessMode::Read, client.buffer.mark())?;
    Ok(OwnedReply::Opened(Opened {
        handle,
        options: OpenOptions::NONE,
    }))
}

/// Lists names behind a cookie, as many as `size` bytes have room for.
pub(crate) async fn list<B: Backend>(
    call: &Call<'_, B>,
    layout: DirLayout,
    handle: Handle,
    cookie: Cookie,
    size: u32,
) -> Served {
    let ino = call.directory(handle)?;
    let client = call.client;
    let size = size.min(LISTING_BYTES_MAX) as usize;
    let mut bytes = vec![0; size];
    let mut buffer = DirBuffer::new(&mut bytes, layout);
    let mut is_cut = false;
    if cookie.raw() < DOT_DOT_COOKIE {
        let Body::Directory(directory) = client.inode(ino).await?.body else {
            return Err(Errno::ENOTDIR);
        };
        is_cut = !push_dots(&mut buffer, cookie.raw(), ino, directory.parent);
    }
    // As many as fit if all names are short; and one more, to know whether there is one.
    let names_max = size / DirBuffer::record_bytes(layout, 1) + 1;
    let behind = cookie.raw().max(FIRST_COOKIE - 1);
    let is_plus = layout == DirLayout::Plus;
    let names = client.list(ino, behind, names_max as u32, is_plus).await?;
    let mut listed = Vec::new();
    for (name, told) in names {
        if is_cut {
            break;
        }
        let record = DirRecord {
            name: &name.name,
            ino: name.ino.0,
            kind: kind_of(name.kind),
            cookie: Cookie::new(name.cookie).ok_or(Errno::EOVERFLOW)?,
            entry: told.as_ref().map(told_entry),
        };
        if record.name.is_empty() || record.name.len() > fuse_codec::NAME_BYTES_MAX {
            return Err(Failure::unfit(&name).into());
        }
        is_cut = !buffer.push(&record);
        if !is_cut && told.is_some() {
            listed.push(name.ino);
        }
    }
    let len = buffer.len();
    if is_cut && len == 0 {
        return Err(Errno::EINVAL);
    }
    // Kernels take each record with attributes for a lookup.
    call.tell_all(&listed)?;
    bytes.truncate(len);
    Ok(OwnedReply::Bytes(bytes))
}

/// Whether what is behind the cookie of `.` and `..` fitted.
fn push_dots(buffer: &mut DirBuffer<'_>, behind: u64, ino: Ino, parent: Ino) -> bool {
    let dots = [
        (DOT_COOKIE, b".".as_slice(), ino),
        (DOT_DOT_COOKIE, b"..", parent),
    ];
    let mut dots = dots.into_iter().filter(|(cookie, ..)| *cookie > behind);
    dots.all(|(cookie, name, ino)| {
        buffer.push(&DirRecord {
            name,
            ino: ino.0,
            kind: Kind::Directory,
            cookie: Cookie::new(cookie).expect("a small cookie"),
            entry: None,
        })
    })
}
