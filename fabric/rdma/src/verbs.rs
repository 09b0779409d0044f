//! Verbs, the interface to RDMA devices, as types that cannot be misused in memory
//! (`docs/decisions/0008-rdma-verbs.md`).
//!
//! Each object holds what it was made of: a queue pair its completion queues and its protection domain, these
//! the opened device. So whatever is dropped first, the library sees things destroyed in the order that it
//! demands. What cannot be destroyed is logged.
//!
//! All promises about memory are made in one place, [`memory::ProtectionDomain::register`]: the memory stays
//! mapped while the region lives, and nobody relies on the bytes staying as they are while the device may
//! write there. Everything after that is safe: work requests name [`memory::Segment`]s that a region gave
//! out, and a key of a region that is gone is refused by the device.
//!
//! Nothing here waits: completions and events are polled, and what can be waited for gives out a descriptor.
//! Posting and polling allocate nothing.
//!
//! [`gid`], [`sysfs`], [`status`], [`event`] and [`address`] are plain values without a device.

pub mod address;
pub mod completion;
pub mod context;
pub mod device;
pub mod error;
pub mod event;
pub mod fork;
pub mod gid;
pub mod memory;
pub mod post;
pub mod queue_pair;
pub mod status;
pub mod sysfs;
pub mod window;
