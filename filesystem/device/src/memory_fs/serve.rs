//! Operations on the tree.

use std::time::Duration;

use fuse_codec::{
    AccessMode, Cookie, CopyFileRange, Create, DirBuffer, DirLayout, DirRecord, Entry, Errno,
    Fallocate, FallocateMode, FsStats, Handle, Header, Kind, LookupName, NAME_BYTES_MAX, NodeId,
    OpenFlags, OpenOptions, Opened, Operation, Read, SetAttr, SetXattr, Tmpfile, Whence, Write,
    XattrMode,
};

use super::content::{BLOCK_BYTES, Content};
use super::directory::{DOT_COOKIE, DOT_DOT_COOKIE, Directory};
use super::inode::{Body, Inode, Ownership, time_of};
use super::tree::Tree;
use crate::service::{FsRequest, Reply};

/// How long the kernel may go by names and attributes: nobody else changes them.
const VALID: Duration = Duration::from_secs(1);
/// Longest file: what fits into memory somehow.
const FILE_BYTES_MAX: u64 = 1 << 40;
/// Most blocks that one FALLOCATE takes: 1 GiB.
const ALLOCATE_BLOCKS_MAX: u64 = 1 << 18;
/// Most bytes that one COPY_FILE_RANGE copies; the kernel asks again.
const COPY_BYTES_MAX: u64 = 1 << 20;
/// What STATFS tells: 16 GiB, and as many inodes as blocks.
const STATS: FsStats = FsStats {
    blocks: 1 << 22,
    blocks_free: 1 << 22,
    blocks_available: 1 << 22,
    inodes: 1 << 22,
    inodes_free: 1 << 22,
    block_bytes: BLOCK_BYTES as u32,
    name_bytes_max: NAME_BYTES_MAX as u32,
};

type Outcome<'a> = Result<Reply<'a>, Errno>;

/// Carries out one operation. `buffer` is for the bytes of the reply.
pub fn serve<'b>(tree: &mut Tree, request: &FsRequest<'_>, buffer: &'b mut Vec<u8>) -> Reply<'b> {
    buffer.clear();
    let mut call = Call {
        tree,
        request,
        node: request.header.nodeid,
        buffer,
    };
    let outcome = match call.names() {
        Some(outcome) => outcome,
        None => match call.files() {
            Some(outcome) => outcome,
            None => return call.bytes(),
        },
    };
    outcome.unwrap_or_else(Reply::Error)
}

struct Call<'t, 'b, 'r> {
    tree: &'t mut Tree,
    request: &'t FsRequest<'r>,
    node: NodeId,
    buffer: &'b mut Vec<u8>,
}

impl<'b> Call<'_, 'b, '_> {
    /// Operations on names and attributes.
    fn names(&mut self) -> Option<Outcome<'static>> {
        let request = self.request;
        let (node, header) = (self.node, &request.header);
        let tree = &mut *self.tree;
        Some(match request.operation {
            Operation::Lookup { name } => lookup(tree, node, name),
            Operation::Forget { lookups } => {
                tree.forget(node, lookups);
                Ok(Reply::Done)
            }
            Operation::BatchForget(forgets) => {
                forgets
                    .iter()
                    .for_each(|(node, lookups)| tree.forget(node, lookups));
                Ok(Reply::Done)
            }
            Operation::Getattr { .. } => attr(tree, node),
            Operation::Statx { .. } => tree
                .inode(node)
                .map(|inode| Reply::Statx(inode.attr(node), VALID)),
            Operation::Setattr(set) => set_attr(tree, node, &set),
            Operation::Symlink { name, target } => {
                let body = Body::Symlink(target.as_bytes().to_vec());
                make(tree, header, name.as_bytes(), body, 0o777)
            }
            Operation::Mknod {
                name,
                kind,
                permissions,
                device,
                ..
            } => {
                let body = match kind {
                    Kind::Regular => Body::File(Content::default()),
                    kind => Body::Special(kind, device),
                };
                make(tree, header, name.as_bytes(), body, permissions)
            }
            Operation::Mkdir {
                name, permissions, ..
            } => {
                let body = Body::Directory(Directory::new(node));
                make(tree, header, name.as_bytes(), body, permissions)
            }
            Operation::Unlink { name } => tree.unlink(node, name.as_bytes()).map(done),
            Operation::Rmdir { name } => tree.rmdir(node, name.as_bytes()).map(done),
            Operation::Rename {
                name,
                new_parent,
                new_name,
                flags,
            } => {
                let (from, to) = ((node, name.as_bytes()), (new_parent, new_name.as_bytes()));
                tree.rename(from, to, flags, owner(header, 0)).map(done)
            }
            Operation::Link { inode, name } => tree
                .link(inode, node, name.as_bytes())
                .and_then(|()| entry(tree, inode)),
            Operation::Setxattr(set) => set_xattr(tree, node, &set),
            Operation::Removexattr { name } => remove_xattr(tree, node, name.as_bytes()),
            Operation::Statfs => Ok(Reply::Stats(STATS)),
            _ => return None,
        })
    }

    /// Operations on open files.
    fn files(&mut self) -> Option<Outcome<'static>> {
        let request = self.request;
        let node = self.node;
        let tree = &mut *self.tree;
        Some(match request.operation {
            Operation::Open {
                flags,
                kill_suidgid,
            } => open(tree, node, flags, kill_suidgid),
            Operation::Create(create) => create_file(tree, &request.header, &create),
            Operation::Tmpfile(tmpfile) => create_temporary(tree, &request.header, &tmpfile),
            Operation::Opendir { .. } => open_directory(tree, node),
            Operation::Read(read) => self.read(&read),
            Operation::Write(write) => self.write(&write),
            Operation::Release(release) => tree.close(node, release.handle).map(done),
            Operation::Releasedir { handle } => tree.close(node, handle).map(done),
            Operation::Flush { handle, .. }
            | Operation::Fsync { handle, .. }
            | Operation::Fsyncdir { handle, .. } => tree.check_handle(node, handle).map(done),
            Operation::Syncfs | Operation::Interrupt { .. } => Ok(Reply::Done),
            Operation::Fallocate(fallocate) => allocate(tree, node, &fallocate),
            Operation::Lseek { offset, whence, .. } => seek(tree, node, offset, whence),
            Operation::CopyFileRange(copy) => self.copy(&copy),
            _ => return None,
        })
    }

    /// Operations whose replies are bytes, and what is not served.
    fn bytes(self) -> Reply<'b> {
        let outcome = match self.request.operation {
            Operation::Readlink => match self.tree.inode(self.node).map(|inode| &inode.body) {
                Ok(Body::Symlink(target)) => {
                    self.buffer.extend_from_slice(target);
                    Ok(())
                }
                Ok(_) => Err(Errno::EINVAL),
                Err(errno) => Err(errno),
            },
            Operation::Readdir {
                layout,
                handle,
                cookie,
                size,
            } => self
                .check_open(handle)
                .and_then(|()| list(self.tree, self.node, layout, cookie, size, self.buffer)),
            Operation::Getxattr { name, size } => {
                let inode = self.tree.inode(self.node);
                let value = inode.and_then(|inode| {
                    let value = inode.xattrs.get(name.as_bytes());
                    value.ok_or(Errno::ENODATA)
                });
                match value {
                    Ok(value) if size == 0 => return Reply::XattrSize(value.len() as u32),
                    Ok(value) => {
                        self.buffer.extend_from_slice(value);
                        fits(self.buffer, size)
                    }
                    Err(errno) => Err(errno),
                }
            }
            Operation::Listxattr { size } => match self.tree.inode(self.node) {
                Ok(inode) => {
                    for name in inode.xattrs.keys() {
                        self.buffer.extend_from_slice(name);
                        self.buffer.push(0);
                    }
                    if size == 0 {
                        return Reply::XattrSize(self.buffer.len() as u32);
                    }
                    fits(self.buffer, size)
                }
                Err(errno) => Err(errno),
            },
            _ => Err(Errno::ENOSYS),
        };
        match outcome {
            Ok(()) => Reply::Bytes(self.buffer),
            Err(errno) => Reply::Error(errno),
        }
    }

    /// A read-only kernel opens by itself.
    fn check_open(&self, handle: Handle) -> Result<(), Errno> {
        if self.request.read_only && handle.0 == 0 {
            return Ok(());
        }
        self.tree.check_handle(self.node, handle).map(|_| ())
    }

    fn read(&mut self, read: &Read) -> Outcome<'static> {
        self.check_open(read.handle)?;
        let inode = self.tree.inode_mut(self.node)?;
        let Body::File(content) = &inode.body else {
            return Err(Errno::EISDIR);
        };
        content.read(read.offset, read.size.into(), self.buffer);
        self.request.data.write_at(0, self.buffer);
        Ok(Reply::Data(self.buffer.len() as u32))
    }

    fn write(&mut self, write: &Write) -> Outcome<'static> {
        let open = self.tree.check_handle(self.node, write.handle)?;
        if open.access == AccessMode::Read {
            return Err(Errno::EBADF);
        }
        self.buffer.resize(write.size as usize, 0);
        self.request.data.copy_to(self.buffer);
        let inode = self.tree.inode_mut(self.node)?;
        let Body::File(content) = &mut inode.body else {
            return Err(Errno::EINVAL);
        };
        let appends = write.flags.append() && !write.from_page_cache;
        let offset = if appends {
            content.size()
        } else {
            write.offset
        };
        if offset + u64::from(write.size) > FILE_BYTES_MAX {
            return Err(Errno::EFBIG);
        }
        content.write(offset, self.buffer);
        if write.kill_suidgid {
            inode.kill_privileges();
        }
        inode.modified();
        Ok(Reply::Written(write.size))
    }

    fn copy(&mut self, copy: &CopyFileRange) -> Outcome<'static> {
        let (from, to) = (self.node, copy.to_inode);
        let source = self.tree.check_handle(from, copy.from)?;
        let target = self.tree.check_handle(to, copy.to)?;
        if source.access == AccessMode::Write || target.access == AccessMode::Read {
            return Err(Errno::EBADF);
        }
        let Body::File(content) = &self.tree.inode(from)?.body else {
            return Err(Errno::EINVAL);
        };
        content.read(
            copy.from_offset,
            copy.length.min(COPY_BYTES_MAX),
            self.buffer,
        );
        if copy.to_offset + self.buffer.len() as u64 > FILE_BYTES_MAX {
            return Err(Errno::EFBIG);
        }
        let inode = self.tree.inode_mut(to)?;
        let Body::File(content) = &mut inode.body else {
            return Err(Errno::EINVAL);
        };
        content.write(copy.to_offset, self.buffer);
        inode.modified();
        Ok(Reply::Written(self.buffer.len() as u32))
    }
}

fn done<T>(_: T) -> Reply<'static> {
    Reply::Done
}

fn fits(bytes: &[u8], size: u32) -> Result<(), Errno> {
    match bytes.len() <= size as usize {
        true => Ok(()),
        false => Err(Errno::ERANGE),
    }
}

fn entry_of(tree: &mut Tree, node: NodeId) -> Result<Entry, Errno> {
    tree.count_lookup(node)?;
    Ok(Entry {
        nodeid: node,
        entry_valid: VALID,
        attr_valid: VALID,
        attr: tree.inode(node)?.attr(node),
    })
}

fn entry(tree: &mut Tree, node: NodeId) -> Outcome<'static> {
    entry_of(tree, node).map(Reply::Entry)
}

fn attr(tree: &Tree, node: NodeId) -> Outcome<'static> {
    tree.inode(node)
        .map(|inode| Reply::Attr(inode.attr(node), VALID))
}

fn lookup(tree: &mut Tree, node: NodeId, name: LookupName<'_>) -> Outcome<'static> {
    let found = match name {
        LookupName::Name(name) => match tree.find(node, name.as_bytes()) {
            Err(Errno::ENOENT) => return Ok(Reply::NoEntry(VALID)),
            found => found?,
        },
        LookupName::Itself => node,
        LookupName::Parent => tree.directory(node)?.parent,
    };
    entry(tree, found)
}

fn make(
    tree: &mut Tree,
    header: &Header,
    name: &[u8],
    body: Body,
    permissions: u32,
) -> Outcome<'static> {
    let node = tree.make(header.nodeid, name, body, owner(header, permissions))?;
    entry(tree, node)
}

fn owner(header: &Header, permissions: u32) -> Ownership {
    Ownership {
        permissions,
        uid: header.uid,
        gid: header.gid,
    }
}

fn set_attr(tree: &mut Tree, node: NodeId, set: &SetAttr) -> Outcome<'static> {
    let inode = tree.inode_mut(node)?;
    if let Some(size) = set.size {
        truncate(inode, size)?;
    }
    if set.kill_suidgid || set.uid.is_some() || set.gid.is_some() {
        inode.kill_privileges();
    }
    if let Some(permissions) = set.permissions {
        inode.owner.permissions = permissions;
    }
    inode.owner.uid = set.uid.unwrap_or(inode.owner.uid);
    inode.owner.gid = set.gid.unwrap_or(inode.owner.gid);
    inode.changed();
    if let Some(time) = set.atime {
        inode.atime = time_of(time);
    }
    if let Some(time) = set.mtime {
        inode.mtime = time_of(time);
    }
    if let Some(time) = set.ctime {
        inode.ctime = time;
    }
    attr(tree, node)
}

fn truncate(inode: &mut Inode, size: u64) -> Result<(), Errno> {
    if size > FILE_BYTES_MAX {
        return Err(Errno::EFBIG);
    }
    match &mut inode.body {
        Body::File(content) => content.set_size(size),
        Body::Directory(_) => return Err(Errno::EISDIR),
        _ => return Err(Errno::EINVAL),
    }
    inode.modified();
    Ok(())
}

fn opened(handle: Handle) -> Opened {
    Opened {
        handle,
        options: OpenOptions::NONE,
    }
}

fn open(tree: &mut Tree, node: NodeId, flags: OpenFlags, kill: bool) -> Outcome<'static> {
    check_open(tree, node, flags, kill)?;
    tree.open(node, flags.access())
        .map(|handle| Reply::Opened(opened(handle)))
}

/// Does what opening a file does to it.
fn check_open(tree: &mut Tree, node: NodeId, flags: OpenFlags, kill: bool) -> Result<(), Errno> {
    let inode = tree.inode_mut(node)?;
    if inode.is_directory() {
        return Err(Errno::EISDIR);
    }
    if flags.truncate() {
        truncate(inode, 0)?;
        if kill {
            inode.kill_privileges();
        }
    }
    Ok(())
}

fn open_directory(tree: &mut Tree, node: NodeId) -> Outcome<'static> {
    tree.directory(node)?;
    let handle = tree.open(node, AccessMode::Read)?;
    Ok(Reply::Opened(opened(handle)))
}

fn create_file(tree: &mut Tree, header: &Header, create: &Create<'_>) -> Outcome<'static> {
    let (parent, name) = (header.nodeid, create.name.as_bytes());
    let body = Body::File(Content::default());
    let node = match tree.find(parent, name) {
        Ok(_) if create.flags.exclusive() => return Err(Errno::EEXIST),
        Ok(node) => {
            check_open(tree, node, create.flags, create.kill_suidgid)?;
            node
        }
        Err(Errno::ENOENT) => tree.make(parent, name, body, owner(header, create.permissions))?,
        Err(errno) => return Err(errno),
    };
    let handle = tree.open(node, create.flags.access())?;
    Ok(Reply::Created(entry_of(tree, node)?, opened(handle)))
}

fn create_temporary(tree: &mut Tree, header: &Header, tmpfile: &Tmpfile) -> Outcome<'static> {
    let node = tree.make_temporary(header.nodeid, owner(header, tmpfile.permissions))?;
    let handle = tree.open(node, tmpfile.flags.access())?;
    Ok(Reply::Created(entry_of(tree, node)?, opened(handle)))
}

fn allocate(tree: &mut Tree, node: NodeId, fallocate: &Fallocate) -> Outcome<'static> {
    let open = tree.check_handle(node, fallocate.handle)?;
    if open.access == AccessMode::Read {
        return Err(Errno::EBADF);
    }
    let inode = tree.inode_mut(node)?;
    let Body::File(content) = &mut inode.body else {
        return Err(Errno::ENODEV);
    };
    let (offset, length) = (fallocate.offset, fallocate.length);
    if offset + length > FILE_BYTES_MAX {
        return Err(Errno::EFBIG);
    }
    let keep_size = match fallocate.mode {
        FallocateMode::PunchHole => {
            content.zero(offset, length);
            true
        }
        FallocateMode::Allocate { keep_size } | FallocateMode::Zero { keep_size } => {
            if matches!(fallocate.mode, FallocateMode::Zero { .. }) {
                content.zero(offset, length);
            }
            if !content.allocate(offset, length, ALLOCATE_BLOCKS_MAX) {
                return Err(Errno::ENOSPC);
            }
            keep_size
        }
    };
    if !keep_size && offset + length > content.size() {
        content.set_size(offset + length);
    }
    inode.modified();
    Ok(Reply::Done)
}

fn seek(tree: &Tree, node: NodeId, offset: u64, whence: Whence) -> Outcome<'static> {
    let Body::File(content) = &tree.inode(node)?.body else {
        return Err(Errno::EINVAL);
    };
    if offset >= content.size() {
        return Err(Errno::ENXIO);
    }
    content
        .seek(offset, whence)
        .map(Reply::Offset)
        .ok_or(Errno::ENXIO)
}

fn set_xattr(tree: &mut Tree, node: NodeId, set: &SetXattr<'_>) -> Outcome<'static> {
    let inode = tree.inode_mut(node)?;
    let name = set.name.as_bytes();
    // There are no access control lists.
    if name.starts_with(b"system.") {
        return Err(Errno::EOPNOTSUPP);
    }
    match (set.mode, inode.xattrs.contains_key(name)) {
        (XattrMode::Create, true) => return Err(Errno::EEXIST),
        (XattrMode::Replace, false) => return Err(Errno::ENODATA),
        _ => {}
    }
    inode.xattrs.insert(name.to_vec(), set.value.to_vec());
    inode.changed();
    Ok(Reply::Done)
}

fn remove_xattr(tree: &mut Tree, node: NodeId, name: &[u8]) -> Outcome<'static> {
    let inode = tree.inode_mut(node)?;
    inode.xattrs.remove(name).ok_or(Errno::ENODATA)?;
    inode.changed();
    Ok(Reply::Done)
}

/// Lists entries behind a cookie, as many as `size` bytes have room for.
fn list(
    tree: &mut Tree,
    node: NodeId,
    layout: DirLayout,
    cookie: Cookie,
    size: u32,
    out: &mut Vec<u8>,
) -> Result<(), Errno> {
    out.resize(size as usize, 0);
    let directory = tree.directory(node)?;
    let mut buffer = DirBuffer::new(out, layout);
    let dots = [
        (DOT_COOKIE, &b"."[..], node),
        (DOT_DOT_COOKIE, b"..", directory.parent),
    ];
    let dots = dots.into_iter().filter(|(dot, ..)| *dot > cookie.raw());
    let mut counted = Vec::new();
    let mut is_cut = false;
    for (at, name, child) in dots.chain(directory.after(cookie)) {
        let inode = tree.inode(child)?;
        let is_dot = at <= DOT_DOT_COOKIE;
        let entry = (layout == DirLayout::Plus && !is_dot).then(|| Entry {
            nodeid: child,
            entry_valid: VALID,
            attr_valid: VALID,
            attr: inode.attr(child),
        });
        let record = DirRecord {
            name,
            ino: child.0,
            kind: inode.kind(),
            cookie: Cookie::new(at).ok_or(Errno::EOVERFLOW)?,
            entry,
        };
        if !buffer.push(&record) {
            is_cut = true;
            break;
        }
        counted.extend(entry.is_some().then_some(child));
    }
    let len = buffer.len();
    if is_cut && len == 0 {
        return Err(Errno::EINVAL);
    }
    out.truncate(len);
    counted
        .into_iter()
        .try_for_each(|child| tree.count_lookup(child))
}
