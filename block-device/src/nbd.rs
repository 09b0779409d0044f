//! Block devices by the kernel's nbd client, for kernels without VDUSE. The helper is the nbd server, on one
//! end of a socket pair. To the daemon it is a vhost-user front end with one virtqueue.
//!
//! All data is copied through the socket. The kernel requeues the requests of a dead connection when they
//! time out ([`kernel::REQUEST_LIMIT`]): I/O pauses that long after the daemon was killed.
//!
//! | part | what it does |
//! |---|---|
//! | `kernel` | creates, reconnects and removes devices, by generic netlink |
//! | `protocol` | parses requests, encodes replies: pure |
//! | `memory` | the virtqueue and the request buffers |
//! | `requests` | requests in flight, and the slots that they use: pure |
//! | `server` | two threads a device, between the kernel and the daemon |

pub mod kernel;
mod memory;
mod protocol;
mod requests;
mod server;

pub use server::{Parts, Server};
