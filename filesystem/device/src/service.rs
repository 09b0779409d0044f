//! What serves the operations behind the device, as two traits: [`Filesystem`] is what an attachment shows,
//! shared by all threads; [`Service`] is one data thread's way to it.
//!
//! The life of a request: [`Service::submit`] (any number), one [`Service::kick`], then [`Service::reap`]
//! until its tag comes back. What is done at once has its reply from `submit` and no tag comes back.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fabric_types::io::Tag;
pub use fuse_codec::Reply;
use fuse_codec::{Agreed, Header, Operation};

use crate::pieces::GuestData;

/// What one attachment shows to its guest.
///
/// Node ids are inode numbers: an inode is found by its number as long as it exists, and LOOKUP of `.` and
/// `..` is served for every inode ([`fuse_codec::LookupName`]). An inode that the guest has looked up and not
/// forgotten exists even if it has no name any more.
pub trait Filesystem: Send + Sync + 'static {
    /// A guest has mounted it. Called by a data thread before INIT is answered, so no other request comes
    /// before it returns; it must not wait.
    fn begin_session(&self, agreed: &Agreed);

    /// The guest has unmounted it, or its driver begins anew: lookups and open files of it are gone. The same
    /// for sessions that end without a word, once the next one begins. It must not wait. Requests that are
    /// still in flight then are answered as before.
    fn end_session(&self);
}

/// One request. `operation` borrows from a buffer that the next request overwrites: what is kept beyond
/// [`Service::submit`] has to be copied.
#[derive(Debug)]
pub struct FsRequest<'a> {
    /// Comes back with the reply.
    pub tag: Tag,
    /// Who asks, about which inode. Node ids and handles may be forged: ESTALE, EBADF.
    pub header: Header,
    /// What is asked. INIT and DESTROY are the device's, as is what has no meaning for it (locks, IOCTL,
    /// POLL, unknown operations).
    pub operation: Operation<'a>,
    /// What holds for the mount.
    pub agreed: &'a Agreed,
    /// The attachment is read-only: operations that would change something do not come. OPEN and OPENDIR do
    /// not come either where the kernel can do without
    /// ([`Agreed::zero_message_open`], [`Agreed::zero_message_opendir`]); handles are 0 then.
    pub read_only: bool,
    /// WRITE: its payload. READ: room for as much as it asks. Else nothing.
    pub data: GuestData<'a>,
}

/// What became of a request.
#[derive(Debug)]
pub enum Submit<'a> {
    /// It is over; no tag comes back.
    Done(Reply<'a>),
    /// The service has it; its tag comes back from [`Service::reap`].
    Pending,
    /// A bound was reached and nothing was done. It is submitted again after the next `reap` that returns
    /// something, if [`Service::has_room`] says so.
    Busy,
}

/// Serves operations for one data thread, of all attachments that the thread has queues of. It is made on the
/// thread that uses it, and used by no other.
pub trait Service: Send + 'static {
    /// What attachments show.
    type Filesystem: Filesystem;

    /// Takes a request. Never waits.
    ///
    /// The memory of [`FsRequest::data`] stays mapped until the request is answered. Its guest may change it
    /// at any time: no decision may rest on reading a byte twice.
    fn submit<'s>(
        &'s mut self,
        filesystem: &Arc<Self::Filesystem>,
        request: &FsRequest<'_>,
    ) -> Submit<'s>;

    /// Whether it makes sense to submit again what was answered busy.
    fn has_room(&self, _filesystem: &Arc<Self::Filesystem>) -> bool {
        true
    }

    /// Hands everything submitted so far on.
    fn kick(&mut self);

    /// Reports finished requests, at most a bounded number per call; returns how many. Never waits.
    fn reap(&mut self, done: &mut dyn FnMut(Tag, Reply<'_>)) -> usize;

    /// Number of requests taken and not yet reported.
    fn in_flight(&self) -> usize;

    /// Whether `reap` has to be called.
    fn must_reap(&self) -> bool {
        self.in_flight() > 0
    }

    /// Readable when `reap` has something to do; watched edge-triggered. A service that waits for several
    /// descriptors gives an epoll of them. An [`Inbox`](crate::Inbox) has one.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}
