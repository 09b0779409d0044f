//! What sessions and data threads ask of a device, whatever it serves. A block device ([`crate::blk`]) is
//! one, the virtio-fs device of the crate `fs-device` another.
//!
//! There are three traits, one for each owner:
//!
//! | trait | owner | what it is |
//! |---|---|---|
//! | [`Device`] | shared by everybody | what the guest sees: features, configuration space, reset |
//! | [`DeviceQueue`] | the data thread of one queue | turns requests of that queue into work for the engine |
//! | [`DeviceEngine`] | one data thread | carries out the requests of all its queues |
//!
//! The engine names its queues and the queue names its device, so [`Threads`](crate::data_thread::Threads)
//! and [`Attachment`](crate::session::Attachment) are compiled for one kind of device: no request goes
//! through a table of functions.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fabric_types::io::Tag;

use crate::ring::{Chain, RingError};
use crate::session::message::protocol;

/// What a device offers to its guest. Sessions, data threads and the control plane share it.
pub trait Device: Send + Sync + 'static {
    /// Why a write of the configuration space was refused.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The virtio features on offer, with those of our rings ([`crate::ring::FEATURES`]). The session adds
    /// those of vhost-user itself.
    fn features(&self) -> u64;

    /// The protocol features of vhost-user on offer, some of [`protocol::OFFERED`].
    fn protocol_features(&self) -> u64 {
        protocol::OFFERED
    }

    /// Number of queues, at least 1.
    fn queues(&self) -> u16;

    /// Copies the configuration space from `offset`. What lies past its end reads as zeroes, as front ends
    /// expect that ask for more than the device has.
    fn read_config(&self, offset: u32, out: &mut [u8]);

    /// Writes the configuration space.
    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Puts what the guest can change back to its defaults when its driver begins anew.
    fn reset(&self);
}

/// What became of a request that was handed to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// It is done. So many bytes of the chain's writable part were written.
    Done(u32),
    /// The engine has it; its tag comes back from [`DeviceEngine::reap`].
    Pending,
    /// The engine had no room and knows nothing of it. It is read and submitted anew later.
    Busy,
    /// A part of it was carried out, or the engine has it, and there was no room for the rest:
    /// [`DeviceQueue::resume`] goes on.
    Partial,
}

/// A device's part of one queue. It is made when the queue starts, and dropped when the queue stops, once no
/// request of it is with the engine.
pub trait DeviceQueue: Send + Sized {
    /// Whose queue it is.
    type Device: Device;
    /// Who carries out its requests.
    type Engine: DeviceEngine<Queue = Self>;
    /// What is kept of a request from [`Self::submit`] until it is answered. There is one per entry of the
    /// ring from the start, so that a request allocates nothing.
    type Request: Default + Send;

    /// Starts queue `index`, which the device has, of `size` entries. `features` are those that the guest's
    /// driver accepted.
    fn start(device: &Arc<Self::Device>, index: u16, size: u16, features: u64) -> Self;

    /// Reads one request and carries it out, or hands it to the engine. `request` holds what an earlier
    /// request left there. Bits 16 to 31 of `tag` are zero and the device's own: it may submit several pieces
    /// of one request under different tags. An error means that the guest broke the rules of this device;
    /// its queue is served no more.
    ///
    /// All that the device writes for the request lies in the writable part of the chain, and is written
    /// before the request is done. A live migration copies that part, and nothing else, once more.
    ///
    /// # Safety
    /// The pieces of the chain stay mapped until the request is over: until this returns an error,
    /// [`Submitted::Done`] or [`Submitted::Busy`], [`Self::resume`] returns [`Submitted::Done`],
    /// [`Self::abandon`] returns false, or [`Self::complete`] returns an answer.
    unsafe fn submit(
        &mut self,
        engine: &mut Self::Engine,
        tag: Tag,
        chain: &mut Chain,
        request: &mut Self::Request,
    ) -> Result<Submitted, RingError>;

    /// Goes on with a request that was [`Submitted::Partial`]. Never called for a device without such.
    fn resume(
        &mut self,
        _engine: &mut Self::Engine,
        _tag: Tag,
        _request: &mut Self::Request,
    ) -> Submitted {
        unreachable!("this device submits no request in parts")
    }

    /// The rest of a request that was [`Submitted::Partial`] will not be submitted, as the queue is broken.
    /// Returns whether the engine has a part of it, so that [`Self::complete`] is still to come.
    fn abandon(&mut self, _request: &mut Self::Request) -> bool {
        unreachable!("this device submits no request in parts")
    }

    /// The engine is done with a request, or with a piece of it. Returns how many bytes of the chain's
    /// writable part were written, once that answers the request.
    fn complete(
        &mut self,
        tag: Tag,
        outcome: <Self::Engine as DeviceEngine>::Outcome<'_>,
        request: &mut Self::Request,
    ) -> Option<u32>;

    /// Whether it makes sense to submit again what was answered busy.
    #[inline]
    fn has_room(&self, _engine: &Self::Engine) -> bool {
        true
    }

    /// Requests are about to be taken off the ring. Called once for those that are taken together.
    #[inline(always)]
    fn taking(&mut self) {}

    /// The guest sees all answers, and so many requests are still between the ring and their answer.
    #[inline(always)]
    fn published(&mut self, _in_flight: usize) {}

    /// So many requests are between the ring and their answer.
    #[inline(always)]
    fn set_in_flight(&mut self, _requests: usize) {}

    /// The guest was interrupted.
    #[inline]
    fn interrupted(&mut self) {}
}

/// Carries out requests for one data thread. [`fabric_types::io::Engine`] tells the life of a request.
pub trait DeviceEngine: Send + Sized {
    /// The queues whose requests it carries out.
    type Queue: DeviceQueue<Engine = Self>;
    /// What became of a request. It may borrow from the engine.
    type Outcome<'a>;

    /// Hands everything submitted so far to the devices.
    fn kick(&mut self);

    /// Reports finished requests, at most a bounded number per call; returns how many. Never blocks.
    fn reap<'r>(&'r mut self, done: &'r mut dyn FnMut(Tag, Self::Outcome<'_>)) -> usize;

    /// Number of requests accepted and not yet reported.
    fn in_flight(&self) -> usize;

    /// Whether `reap` has to be called.
    #[inline]
    fn must_reap(&self) -> bool {
        self.in_flight() > 0
    }

    /// Becomes readable when `reap` has something to do.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}

/// The device that an engine serves.
pub type DeviceOf<E> = <<E as DeviceEngine>::Queue as DeviceQueue>::Device;
