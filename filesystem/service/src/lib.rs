//! Serves the requests of the virtio-fs device by a filesystem's client: what it has cached at once, and
//! else each by a task of a runtime, whose answer comes back to the data thread by the thread's inbox.
//!
//! - [`MountedFilesystem`] is what one attachment shows to its guest.
//! - [`ClientService`] is one data thread's way to it. A thousand requests under way are as many tasks, and
//!   no thread waits for any.
//!
//! A request that is being served keeps its guest's memory mapped, so a queue stops only when all its
//! requests are answered: whoever ends for good has the client's [`Backend`] give up.

mod room;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use fabric_types::io::Tag;
use fs_client::{Backend, Client, Mount, OwnedOperation, OwnedReply};
use fs_device::{Filesystem, FsRequest, Inbox, InboxSender, Reply, Service, Submit};
use fuse_codec::{Agreed, Errno, Operation};
use tokio::runtime::Handle;

use room::Room;

/// Requests of a data thread that are under way; a further one is answered busy.
pub const REQUESTS_MAX: usize = 4096;
/// Bytes of data of these requests, likewise: they are copied, and one guest must not use up the host's
/// memory.
pub const BYTES_MAX: usize = 256 << 20;

/// What one attachment shows to its guest.
pub struct MountedFilesystem<B: Backend> {
    mount: Arc<Mount<B>>,
}

impl<B: Backend> MountedFilesystem<B> {
    /// A filesystem for one guest.
    pub fn new(client: &Arc<Client<B>>, read_only: bool) -> Arc<Self> {
        let mount = Arc::new(client.attach(read_only));
        Arc::new(Self { mount })
    }
}

impl<B: Backend> Filesystem for MountedFilesystem<B> {
    fn begin_session(&self, _: &Agreed) {}

    fn end_session(&self) {
        self.mount.end_session();
    }
}

/// An answer on its way to the data thread.
struct Answer {
    tag: Tag,
    /// Bytes of data of the request.
    bytes: usize,
    reply: OwnedReply,
}

/// Answers a request when it is dropped, also if its task panicked or was ended.
struct Answering {
    tag: Tag,
    bytes: usize,
    outbox: InboxSender<Answer>,
    /// None if somebody else answers.
    reply: Option<OwnedReply>,
}

impl Answering {
    fn by(mut self, reply: OwnedReply) {
        self.reply = Some(reply);
    }

    /// The answer, for whoever is on the data thread.
    fn at_once(mut self, reply: OwnedReply) -> Answer {
        self.reply = None;
        let (tag, bytes) = (self.tag, self.bytes);
        Answer { tag, bytes, reply }
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let Some(reply) = self.reply.take() else {
            return;
        };
        let (tag, bytes) = (self.tag, self.bytes);
        let posted = self.outbox.post(Answer { tag, bytes, reply });
        posted.expect("an inbox has room for all requests under way");
    }
}

/// Serves the operations of one data thread.
pub struct ClientService<B> {
    runtime: Handle,
    inbox: Inbox<Answer>,
    arrived: VecDeque<Answer>,
    /// Where the data of READs go, by tag.
    rooms: HashMap<u64, Room>,
    in_flight: usize,
    /// Bytes of data of the requests under way.
    bytes: usize,
    backend: std::marker::PhantomData<fn() -> B>,
}

impl<B> ClientService<B> {
    /// For one thread, with tasks of `runtime`.
    pub fn new(runtime: Handle) -> io::Result<Self> {
        Ok(Self {
            runtime,
            inbox: Inbox::new(REQUESTS_MAX)?,
            arrived: VecDeque::with_capacity(REQUESTS_MAX),
            rooms: HashMap::new(),
            in_flight: 0,
            bytes: 0,
            backend: std::marker::PhantomData,
        })
    }
}

impl<B> ClientService<B> {
    /// What is cached is answered at once, on the data thread. What has to wait is polled again by its task,
    /// so that nobody has to wake it from here.
    fn poll_once<T>(&self, serving: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        let _runtime = self.runtime.enter();
        serving.poll(&mut Context::from_waker(Waker::noop()))
    }
}

impl<B: Backend> Service for ClientService<B> {
    type Filesystem = MountedFilesystem<B>;

    fn submit<'s>(
        &'s mut self,
        filesystem: &Arc<MountedFilesystem<B>>,
        request: &FsRequest<'_>,
    ) -> Submit<'s> {
        match request.operation {
            Operation::Forget { lookups } => {
                filesystem.mount.forget(request.header.nodeid, lookups);
                return Submit::Done(Reply::Done);
            }
            Operation::BatchForget(forgets) => {
                for (node, lookups) in forgets.iter() {
                    filesystem.mount.forget(node, lookups);
                }
                return Submit::Done(Reply::Done);
            }
            _ => {}
        }
        if !self.has_room(filesystem) {
            return Submit::Busy;
        }
        let tag = request.tag;
        let payload = match request.operation {
            Operation::Read(_) => {
                self.rooms.insert(tag.0, Room::new(&request.data));
                Vec::new()
            }
            _ => {
                let mut payload = vec![0; request.data.len()];
                request.data.copy_to(&mut payload);
                payload
            }
        };
        let answering = Answering {
            tag,
            bytes: request.data.len(),
            outbox: self.inbox.sender(),
            reply: Some(OwnedReply::Error(Errno::EIO)),
        };
        let mount = Arc::clone(&filesystem.mount);
        let (header, agreed) = (request.header, *request.agreed);
        let operation = OwnedOperation::from(request.operation);
        self.in_flight += 1;
        self.bytes += request.data.len();
        let mut serving =
            Box::pin(async move { mount.serve(header, &agreed, operation, payload).await });
        match self.poll_once(serving.as_mut()) {
            Poll::Ready(reply) => self.arrived.push_back(answering.at_once(reply)),
            Poll::Pending => drop(
                self.runtime
                    .spawn(async move { answering.by(serving.await) }),
            ),
        }
        Submit::Pending
    }

    fn has_room(&self, _: &Arc<MountedFilesystem<B>>) -> bool {
        self.in_flight < REQUESTS_MAX && self.bytes < BYTES_MAX
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut dyn FnMut(Tag, Reply<'_>)) -> usize {
        self.inbox.take(&mut self.arrived);
        let count = self.arrived.len();
        for Answer { tag, bytes, reply } in self.arrived.drain(..) {
            self.in_flight -= 1;
            self.bytes -= bytes;
            let room = self.rooms.remove(&tag.0);
            match (&reply, room) {
                (OwnedReply::Data(data), Some(room)) if data.len() <= room.len() => {
                    // SAFETY: the device keeps the memory mapped until it has the reply.
                    unsafe { room.fill(data) };
                    done(tag, reply.borrow());
                }
                (OwnedReply::Data(_), _) => done(tag, Reply::Error(Errno::EIO)),
                _ => done(tag, reply.borrow()),
            }
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn must_reap(&self) -> bool {
        !self.arrived.is_empty() || self.inbox.has_messages()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.inbox.wait_fd()
    }
}
