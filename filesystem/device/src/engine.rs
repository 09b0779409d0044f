//! The engine of a data thread: its [`Service`], and what the thread's queues share.

use std::os::fd::BorrowedFd;

use fabric_types::io::Tag;
use fuse_codec::MAX_BATCH_FORGET_BYTES;
use vhost_backend::device::DeviceEngine;

use crate::queue::FsQueue;
use crate::service::{Reply, Service};

/// Carries out the requests of a data thread's queues by a service.
#[derive(Debug)]
pub struct FsEngine<S> {
    pub(crate) service: S,
    /// One request without its payload at a time, copied out of guest memory. As long as the longest; the
    /// system gives memory only for what is used of it.
    pub(crate) control: Box<[u8]>,
}

impl<S: Service> FsEngine<S> {
    /// An engine for one thread.
    pub fn new(service: S) -> Self {
        Self {
            service,
            control: vec![0; MAX_BATCH_FORGET_BYTES].into_boxed_slice(),
        }
    }

    /// The service.
    pub fn service(&self) -> &S {
        &self.service
    }
}

impl<S: Service> DeviceEngine for FsEngine<S> {
    type Queue = FsQueue<S>;
    type Outcome<'a> = Reply<'a>;

    #[inline]
    fn kick(&mut self) {
        self.service.kick();
    }

    #[inline]
    fn reap<'r>(&'r mut self, done: &'r mut dyn FnMut(Tag, Reply<'_>)) -> usize {
        self.service.reap(done)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.service.in_flight()
    }

    #[inline]
    fn must_reap(&self) -> bool {
        self.service.must_reap()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.service.wait_fd()
    }
}
