//! The virtio-fs device (virtio 1.2, section 5.11; device id 26): requests of a guest's queues to operations
//! of a filesystem, and its replies into guest memory.
//!
//! # Where to begin
//!
//! - [`FsDevice`] is what the guest sees. It, [`FsQueue`] and [`FsEngine`] are the implementors of
//!   [`vhost_backend::device`]'s traits.
//! - [`Filesystem`] and [`Service`] are for who serves the operations. The example `memory_fs` is a small but
//!   whole filesystem on a socket.
//! - [`Inbox`] brings answers of other threads back to a data thread.
//!
//! # What the device does itself
//!
//! It negotiates INIT, and ends the session on DESTROY, on a reset, and at the next INIT: QEMU before 8.2
//! does not tell its back end of a reset, so a guest that boots again just sends INIT again. Requests before
//! INIT are answered EIO. It answers ENOSYS to what has no meaning here, EROFS to changes of a read-only
//! attachment. What it makes of a malformed chain:
//!
//! | chain | answer |
//! |---|---|
//! | less readable bytes than a header, or one of the other byte order | the queue is broken |
//! | readable bytes other than the header's `len`, arguments that do not parse | the error of [`Malformed`] |
//! | less writable bytes than the longest reply needs | EIO; the service is not asked |
//! | less than a reply's header | used length 0; the service is not asked |
//! | FORGET, BATCH_FORGET, INTERRUPT, whatever they hold | used length 0 |
//!
//! # Invariants
//!
//! - Control bytes are copied out of guest memory once, and only the copy is looked at. The payload of WRITE
//!   and the data of READ are never copied by the device.
//! - The used length is that of the reply's header.
//! - A request allocates nothing in the device.
//! - What a guest does breaks its own queue at most.
//!
//! # Front ends
//!
//! QEMU's `vhost-user-fs-pci`, of 7.2 as of 10, has the tag and the number of request queues from its own
//! command line, and shows its guest those; it never reads the back end's configuration space. It wants
//! `num-request-queues` + 1 queues, and refuses to start if GET_QUEUE_NUM says less. It acknowledges of the
//! virtio features VERSION_1, INDIRECT_DESC, EVENT_IDX, and RING_PACKED with `packed=on`.
//!
//! - CONFIG is not offered: a QEMU whose device does not use it warns of it, and some before 8.0 crash (fixed
//!   by "hw/virtio/vhost-user: don't suppress F_CONFIG when supported" and what followed). GET_CONFIG is
//!   answered all the same.
//! - INFLIGHT_SHMFD is not offered: the next daemon would carry out an operation a second time, which is
//!   another thing for MKDIR than for a write to a disk. QEMU cannot reconnect such a device anyway.
//! - DEVICE_STATE is not offered, so QEMU refuses to migrate a guest with such a device.
//! - QEMU's default `queue-size` is 128, which limits requests to 124 pages. 1 MiB needs 1024. Without
//!   indirect descriptors the reply to INIT is limited to what fits the rings.
//!
//! Sources: QEMU's `hw/virtio/vhost-user-fs.c` and `vhost-user.c`, Linux's `fs/fuse/virtio_fs.c`.
//!
//! [`Malformed`]: fuse_codec::Malformed

mod access;
mod counters;
mod device;
mod engine;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod inbox;
#[cfg(feature = "testing")]
pub mod memory_fs;
mod pieces;
mod queue;
mod reply;
mod service;
mod session;
mod slot;
#[cfg(feature = "testing")]
pub mod testing;

pub use counters::{FsCounters, LatencyClass, OpClass, QueueCounters};
pub use device::{
    CONFIG_BYTES, FsDevice, FsError, FsOptions, IO_BYTES_MAX, REQUEST_QUEUES_MAX, TAG_BYTES_MAX,
};
pub use engine::FsEngine;
pub use inbox::{Inbox, InboxFull, InboxSender};
pub use pieces::GuestData;
pub use queue::FsQueue;
pub use service::{Filesystem, FsRequest, Reply, Service, Submit};
pub use slot::FsSlot;

#[cfg(test)]
mod tests;
