//! Volumes as block devices of the machine that serves them (`/dev/penstock/NAME`).
//!
//! The kernel's own virtio-blk driver is the "guest": VDUSE gives its rings to a process. A helper hands them
//! to the daemon by the protocol that QEMU uses, so data threads, recovery after `kill -9` and resize are the
//! ones of guests' disks. Why so: `docs/decisions/0012-local-block-devices.md`.
//!
//! | part | what it does |
//! |---|---|
//! | [`client`] | the daemon's end: starts the helper and asks it |
//! | [`helper`] | the process with the rights: makes, takes up and removes devices |
//! | `bridge` | one thread a device, between driver and daemon |
//! | `frontend` | the vhost-user front end that it is |
//! | `record` | the record of requests in flight, for the next helper |
//! | `vduse`, `kernel` | the kernel's interfaces |
//! | `nbd` | the same by the kernel's nbd client, where it has no VDUSE |
//! | `session_loop` | what the threads of both have in common |
//! | [`wire`] | messages between daemon and helper, and whoever else sends a descriptor |

mod bridge;
pub mod client;
mod frontend;
pub mod helper;
mod kernel;
mod nbd;
mod record;
mod session_loop;
mod vduse;
pub mod wire;

pub use frontend::RING_SIZE_MAX;

/// The descriptor by which a helper talks to its daemon.
pub const HELPER_FD: i32 = 3;
