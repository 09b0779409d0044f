//! One guest's mount: which operation is served by what.

use std::sync::{Arc, Mutex};

use fs_capabilities::GuestId;
use fuse_codec::{AccessMode, Agreed, Errno, Handle, Header, Kind, NodeId};
use namespace::{Ino, NewNode};

use crate::backend::Backend;
use crate::buffer::ErrorMark;
use crate::caller::Caller;
use crate::client::Client;
use crate::data_cache::Sequences;
use crate::handles::{GuestSession, Handles, OpenFile};
use crate::open_inodes::{OpenKind, Telling};
use crate::operation::OwnedOperation;
use crate::reply::OwnedReply;
use crate::sync::lock;
use crate::{attributes, data, directory, files, names, xattr};

/// What serving an operation ends with.
pub(crate) type Served = Result<OwnedReply, Errno>;

/// A guest's mount.
pub struct Mount<B: Backend> {
    pub(crate) client: Arc<Client<B>>,
    guest: GuestId,
    pub(crate) read_only: bool,
    pub(crate) handles: Handles,
    pub(crate) sequences: Sequences,
    /// Write-back failures that SYNCFS has reported.
    told: Mutex<ErrorMark>,
}

/// One request.
pub(crate) struct Call<'a, B: Backend> {
    pub(crate) mount: &'a Mount<B>,
    pub(crate) client: Caller<'a, B>,
    pub(crate) header: Header,
    pub(crate) agreed: &'a Agreed,
    /// The session of the guest that it came in.
    pub(crate) session: GuestSession,
    /// Present if the reply may contain inodes.
    pub(crate) telling: Option<Telling>,
}

/// The inode of a node id, which a guest may forge.
pub(crate) fn ino_of(node: NodeId) -> Result<Ino, Errno> {
    match node.0 {
        0 => Err(Errno::ESTALE),
        number if number > i64::MAX as u64 => Err(Errno::ESTALE),
        number => Ok(Ino(number)),
    }
}

impl<B: Backend> Mount<B> {
    pub(crate) fn new(client: Arc<Client<B>>, guest: GuestId, read_only: bool) -> Self {
        let told = Mutex::new(client.buffer.mark());
        let handles = Handles::default();
        client.open.add_guest(guest, handles.session());
        Self {
            client,
            guest,
            read_only,
            handles,
            sequences: Sequences::default(),
            told,
        }
    }

    /// Serves one request. `payload` is that of WRITE, else empty.
    pub async fn serve(
        &self,
        header: Header,
        agreed: &Agreed,
        operation: OwnedOperation,
        payload: Vec<u8>,
    ) -> OwnedReply {
        let client = &*self.client;
        client.counters.request(header.opcode);
        let _under_way = match client.life.enter() {
            Ok(under_way) => under_way,
            Err(errno) => return OwnedReply::Error(errno),
        };
        if self.read_only && operation.changes() {
            return OwnedReply::Error(Errno::EROFS);
        }
        let session = self.handles.session();
        let tells = operation.tells_of_inodes();
        let call = Call {
            mount: self,
            client: client.caller(self.guest),
            header,
            agreed,
            session,
            telling: tells.then(|| client.open.begin_telling(self.guest, session)),
        };
        call.serve(operation, payload).await.into()
    }

    /// Subtracts lookups that the guest's kernel gives up with FORGET. An inode without a name is removed
    /// when no guest has it open or looked up.
    pub fn forget(&self, node: NodeId, lookups: u64) {
        if let Ok(ino) = ino_of(node) {
            self.client.open.forget(self.guest, ino, lookups);
        }
    }

    /// Ends the guest's mount: closes its files, forgets its lookups, writes back buffered data without
    /// delay, and releases orphans that no other guest uses.
    /// Requests of it that are still under way open nothing any more.
    pub fn end_session(&self) {
        let next = self.handles.end_session();
        self.client.open.add_guest(self.guest, next);
        self.client.buffer.hurry();
        // The next session of the guest has lost nothing yet.
        *lock(&self.told) = self.client.buffer.mark();
    }
}

impl<B: Backend> Drop for Mount<B> {
    fn drop(&mut self) {
        self.end_session();
        self.client.open.remove_guest(self.guest);
    }
}

impl<B: Backend> Call<'_, B> {
    async fn serve(&self, operation: OwnedOperation, payload: Vec<u8>) -> Served {
        if self.telling.is_some() {
            // The session must exist before the reply: hosts that remove the inode's name make this session
            // hold it.
            self.client.session().await?;
        }
        let by_number = operation.looks_up_by_number();
        let reply = self.dispatch(operation, payload).await?;
        if let OwnedReply::Entry(entry) | OwnedReply::Created(entry, _) = &reply {
            let has_name = !by_number || entry.attr.nlink > 0;
            self.tell(ino_of(entry.nodeid)?, has_name)?;
        }
        Ok(reply)
    }

    /// Counts a lookup of an inode by the guest's kernel; see [`Telling::tell`].
    pub(crate) fn tell(&self, ino: Ino, has_name: bool) -> Result<(), Errno> {
        let telling = self.telling.as_ref();
        telling
            .expect("the operation may return inodes")
            .tell(ino, has_name)
    }

    /// Counts lookups of all inodes of a listing, as [`Telling::tell_all`].
    pub(crate) fn tell_all(&self, inodes: &[Ino]) -> Result<(), Errno> {
        match (inodes, &self.telling) {
            ([], _) => Ok(()),
            (_, telling) => telling
                .as_ref()
                .expect("a reply with inodes was expected")
                .tell_all(inodes),
        }
    }

    async fn dispatch(&self, operation: OwnedOperation, payload: Vec<u8>) -> Served {
        use OwnedOperation as Op;
        match operation {
            Op::Lookup { .. }
            | Op::Symlink { .. }
            | Op::Mknod { .. }
            | Op::Mkdir { .. }
            | Op::Unlink { .. }
            | Op::Rmdir { .. }
            | Op::Rename { .. }
            | Op::Link { .. } => self.serve_names(operation).await,
            Op::Read(_)
            | Op::Write(_)
            | Op::Fallocate(_)
            | Op::Lseek { .. }
            | Op::CopyFileRange(_) => self.serve_data(operation, payload).await,
            Op::Getattr { .. }
            | Op::Setattr(_)
            | Op::Statx { .. }
            | Op::Readlink
            | Op::Setxattr { .. }
            | Op::Getxattr { .. }
            | Op::Listxattr { .. }
            | Op::Removexattr { .. }
            | Op::Statfs => self.serve_attributes(operation).await,
            _ => self.serve_handles(operation).await,
        }
    }

    async fn serve_names(&self, operation: OwnedOperation) -> Served {
        use OwnedOperation as Op;
        let (client, parent) = (self.client, self.ino()?);
        match operation {
            Op::Lookup { name } => names::lookup(client, parent, &name).await,
            Op::Symlink { name, target } => {
                names::symlink(client, &self.header, parent, name, target).await
            }
            Op::Mknod {
                name,
                kind,
                permissions,
                device,
            } => {
                let node = match kind {
                    Kind::Regular => NewNode::File,
                    Kind::Fifo => NewNode::Fifo,
                    Kind::Socket => NewNode::Socket,
                    Kind::CharDevice => NewNode::CharacterDevice(device.to_wire()),
                    Kind::BlockDevice => NewNode::BlockDevice(device.to_wire()),
                    Kind::Directory | Kind::Symlink => return Err(Errno::EINVAL),
                };
                let make = names::make(&self.header, parent, name, permissions, node);
                names::entry_of(client.apply(make).await?)
            }
            Op::Mkdir { name, permissions } => {
                let node = NewNode::Directory;
                let make = names::make(&self.header, parent, name, permissions, node);
                names::entry_of(client.apply(make).await?)
            }
            Op::Unlink { name } => names::unlink(client, parent, name).await,
            Op::Rmdir { name } => names::rmdir(client, parent, name).await,
            Op::Rename {
                name,
                new_parent,
                new_name,
                flags,
            } => {
                let new = (ino_of(new_parent)?, new_name);
                names::rename(client, &self.header, (parent, name), new, flags).await
            }
            Op::Link { inode, name } => names::link(client, ino_of(inode)?, parent, name).await,
            _ => Err(Errno::ENOSYS),
        }
    }

    async fn serve_attributes(&self, operation: OwnedOperation) -> Served {
        use OwnedOperation as Op;
        if operation == Op::Statfs {
            return attributes::statfs(&self.client).await;
        }
        let (client, ino) = (self.client, self.ino()?);
        match operation {
            Op::Getattr { handle } => {
                self.check_any(handle)?;
                let told = client.attributes(ino).await?;
                Ok(OwnedReply::Attr(
                    attributes::attr(&told.attributes),
                    told.attr_valid,
                ))
            }
            Op::Statx { handle } => {
                self.check_any(handle)?;
                let told = client.attributes(ino).await?;
                Ok(OwnedReply::Statx(
                    attributes::attr(&told.attributes),
                    told.attr_valid,
                ))
            }
            Op::Setattr(set) => {
                self.check_any(set.handle)?;
                attributes::set(client, ino, &set).await
            }
            Op::Readlink => attributes::readlink(&client, ino).await,
            Op::Setxattr { name, value, mode } => xattr::set(client, ino, name, value, mode).await,
            Op::Getxattr { name, size } => xattr::get(&client, ino, &name, size).await,
            Op::Listxattr { size } => xattr::list(&client, ino, size).await,
            Op::Removexattr { name } => xattr::remove(client, ino, name).await,
            _ => Err(Errno::ENOSYS),
        }
    }

    async fn serve_data(&self, operation: OwnedOperation, payload: Vec<u8>) -> Served {
        use OwnedOperation as Op;
        match operation {
            Op::Read(read) => data::read::serve(self, &read).await,
            Op::Write(write) => data::write::serve(self, &write, payload).await,
            Op::Fallocate(fallocate) => data::allocate::serve(self, &fallocate).await,
            Op::Lseek {
                handle,
                offset,
                whence,
            } => data::seek::serve(self, handle, offset, whence).await,
            Op::CopyFileRange(copy) => data::copy::serve(self, &copy).await,
            _ => Err(Errno::ENOSYS),
        }
    }

    async fn serve_handles(&self, operation: OwnedOperation) -> Served {
        use OwnedOperation as Op;
        match operation {
            Op::Open {
                flags,
                kill_suidgid,
            } => files::open(self, flags, kill_suidgid).await,
            Op::Create(create) => files::create(self, &create).await,
            Op::Tmpfile { flags, permissions } => {
                files::create_temporary(self, flags, permissions).await
            }
            Op::Release { handle } | Op::Releasedir { handle } => {
                files::release(self, handle).await
            }
            Op::Fsync { handle } => {
                self.check_any(Some(handle))?;
                self.client.write_back(self.ino()?).await;
                self.check_written(handle).map(|()| OwnedReply::Done)
            }
            // What is buffered is written back later; what could not be is told.
            Op::Flush { handle } => {
                self.check_any(Some(handle))?;
                self.check_written(handle).map(|()| OwnedReply::Done)
            }
            // Names that were answered are in the log of the namespace.
            Op::Fsyncdir { handle } => self.check_any(Some(handle)).map(|()| OwnedReply::Done),
            Op::Syncfs => {
                self.client.write_back_all().await;
                let told = self.client.buffer.check_all(&mut lock(&self.mount.told));
                told.map(|()| OwnedReply::Done)
            }
            Op::Unanswered => Ok(OwnedReply::Done),
            Op::Opendir => directory::open(self).await,
            Op::Readdir {
                layout,
                handle,
                cookie,
                size,
            } => directory::list(self, layout, handle, cookie, size).await,
            _ => Err(Errno::ENOSYS),
        }
    }

    /// The inode that the request is about.
    pub(crate) fn ino(&self) -> Result<Ino, Errno> {
        ino_of(self.header.nodeid)
    }

    /// The file that a handle opened. Kernels that opened it by themselves have 0.
    pub(crate) fn file(&self, handle: Handle, node: NodeId) -> Result<OpenFile, Errno> {
        let ino = ino_of(node)?;
        if handle.0 == 0 && self.mount.read_only && self.agreed.zero_message_open() {
            return Ok(OpenFile {
                ino,
                kind: OpenKind::File,
                access: AccessMode::Read,
            });
        }
        match self.mount.handles.get(handle, ino)? {
            open if open.kind == OpenKind::File => Ok(open),
            _ => Err(Errno::EISDIR),
        }
    }

    /// The directory that a handle opened, likewise.
    pub(crate) fn directory(&self, handle: Handle) -> Result<Ino, Errno> {
        let ino = self.ino()?;
        if handle.0 == 0 && self.mount.read_only && self.agreed.zero_message_opendir() {
            return Ok(ino);
        }
        match self.mount.handles.get(handle, ino)? {
            open if open.kind == OpenKind::Directory => Ok(ino),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// Fails if something that was written to the file of a handle was lost, once.
    pub(crate) fn check_written(&self, handle: Handle) -> Result<(), Errno> {
        let buffer = &self.client.buffer;
        self.mount.handles.check_written(handle, buffer)
    }

    /// Refuses a handle that is not one of the request's inode.
    fn check_any(&self, handle: Option<Handle>) -> Result<(), Errno> {
        let Some(handle) = handle else {
            return Ok(());
        };
        let opens_itself = self.agreed.zero_message_open() || self.agreed.zero_message_opendir();
        if handle.0 == 0 && self.mount.read_only && opens_itself {
            return Ok(());
        }
        self.mount.handles.get(handle, self.ino()?).map(|_| ())
    }
}
