//! A filesystem in memory, to try the device and its protocol with tests and with real guests.
//!
//! It is whole as far as one guest can tell: directories, files with holes, symlinks, hard and special files,
//! extended attributes, renames of every kind. It is no model of speed: one lock is held for each operation.
//! Nothing outlives the process, and nothing bounds it but the machine's memory.

mod content;
mod directory;
mod inode;
mod serve;
mod tree;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fabric_types::io::Tag;
use fuse_codec::Agreed;
use rustix::event::{EventfdFlags, eventfd};

use crate::service::{Filesystem, FsRequest, Reply, Service, Submit};
use tree::Tree;

/// The filesystem, shared by the threads that serve it.
#[derive(Debug, Default)]
pub struct MemoryFilesystem {
    tree: Mutex<Tree>,
}

impl MemoryFilesystem {
    /// An empty one.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Number of inodes, with the root.
    pub fn inodes(&self) -> usize {
        self.lock().inode_count()
    }

    /// Open files and directories.
    pub fn open_handles(&self) -> usize {
        self.lock().handle_count()
    }

    fn lock(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Filesystem for MemoryFilesystem {
    fn begin_session(&self, _agreed: &Agreed) {}

    fn end_session(&self) {
        self.lock().end_session();
    }
}

/// Serves it at once, in `submit`.
#[derive(Debug)]
pub struct MemoryService {
    /// Bytes of the reply that was given last.
    buffer: Vec<u8>,
    never: OwnedFd,
}

impl MemoryService {
    /// A service for one thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            buffer: Vec::new(),
            never: eventfd(0, EventfdFlags::CLOEXEC)?,
        })
    }
}

impl Service for MemoryService {
    type Filesystem = MemoryFilesystem;

    fn submit<'s>(
        &'s mut self,
        filesystem: &Arc<MemoryFilesystem>,
        request: &FsRequest<'_>,
    ) -> Submit<'s> {
        Submit::Done(serve::serve(
            &mut filesystem.lock(),
            request,
            &mut self.buffer,
        ))
    }

    fn kick(&mut self) {}

    fn reap(&mut self, _: &mut dyn FnMut(Tag, Reply<'_>)) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}

/// Requests that a [`DeferringService`] holds; one more is answered busy.
pub const DEFERRED_MAX: usize = 2048;

/// A reply that another thread gives back, in memory of its own.
#[derive(Debug)]
struct Deferred {
    tag: Tag,
    reply: Reply<'static>,
    /// What a [`Reply::Bytes`] has.
    bytes: Option<Vec<u8>>,
}

/// Serves the same filesystem, and has the replies come back from other threads, in whatever order these
/// choose.
#[derive(Debug)]
pub struct DeferringService {
    inner: MemoryService,
    inbox: crate::Inbox<Deferred>,
    arrived: VecDeque<Deferred>,
    in_flight: usize,
    outbox: std::sync::mpsc::SyncSender<Deferred>,
}

impl DeferringService {
    /// A service whose replies wait with another thread. Before each of them that thread asks `order` for a
    /// number, and gives back the reply at that place, modulo the number of replies that wait.
    /// While `order` does not return, nothing is given back.
    pub fn new(mut order: impl FnMut(usize) -> usize + Send + 'static) -> io::Result<Self> {
        let inbox = crate::Inbox::new(DEFERRED_MAX)?;
        let (outbox, waiting) = std::sync::mpsc::sync_channel::<Deferred>(DEFERRED_MAX);
        let sender = inbox.sender();
        let run = move || {
            let mut held = Vec::new();
            while let Ok(first) = waiting.recv() {
                held.push(first);
                while !held.is_empty() {
                    let next = order(held.len());
                    held.extend(waiting.try_iter());
                    let next = next % held.len();
                    let sent = sender.post(held.swap_remove(next));
                    sent.expect("room for as many as can be in flight");
                }
            }
        };
        std::thread::Builder::new()
            .name("deferred".into())
            .spawn(run)?;
        Ok(Self {
            inner: MemoryService::new()?,
            inbox,
            arrived: VecDeque::with_capacity(DEFERRED_MAX),
            in_flight: 0,
            outbox,
        })
    }
}

impl Service for DeferringService {
    type Filesystem = MemoryFilesystem;

    fn submit<'s>(
        &'s mut self,
        filesystem: &Arc<MemoryFilesystem>,
        request: &FsRequest<'_>,
    ) -> Submit<'s> {
        if !self.has_room(filesystem) {
            return Submit::Busy;
        }
        let reply = serve::serve(&mut filesystem.lock(), request, &mut self.inner.buffer);
        let (reply, bytes) = match reply {
            Reply::Bytes(bytes) => (Reply::Done, Some(bytes.to_vec())),
            other => (without_bytes(other), None),
        };
        let tag = request.tag;
        self.in_flight += 1;
        let sent = self.outbox.send(Deferred { tag, reply, bytes });
        sent.expect("the other thread lives as long as this service");
        Submit::Pending
    }

    fn has_room(&self, _filesystem: &Arc<MemoryFilesystem>) -> bool {
        self.in_flight < DEFERRED_MAX
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut dyn FnMut(Tag, Reply<'_>)) -> usize {
        let count = self.inbox.take(&mut self.arrived);
        self.in_flight -= count;
        for deferred in self.arrived.drain(..) {
            match &deferred.bytes {
                Some(bytes) => done(deferred.tag, Reply::Bytes(bytes)),
                None => done(deferred.tag, deferred.reply),
            }
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.inbox.wait_fd()
    }
}

/// The same reply, which borrows nothing.
fn without_bytes(reply: Reply<'_>) -> Reply<'static> {
    match reply {
        Reply::Error(errno) => Reply::Error(errno),
        Reply::Done | Reply::Bytes(_) => Reply::Done,
        Reply::Entry(entry) => Reply::Entry(entry),
        Reply::NoEntry(valid) => Reply::NoEntry(valid),
        Reply::Attr(attr, valid) => Reply::Attr(attr, valid),
        Reply::Statx(attr, valid) => Reply::Statx(attr, valid),
        Reply::Opened(opened) => Reply::Opened(opened),
        Reply::Created(entry, opened) => Reply::Created(entry, opened),
        Reply::Data(bytes) => Reply::Data(bytes),
        Reply::Written(bytes) => Reply::Written(bytes),
        Reply::Stats(stats) => Reply::Stats(stats),
        Reply::XattrSize(bytes) => Reply::XattrSize(bytes),
        Reply::Offset(offset) => Reply::Offset(offset),
    }
}
