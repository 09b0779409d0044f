//! Block devices by the kernel's nbd client, where it has no VDUSE. The helper is the nbd server at the other
//! end of a socket pair, and to the daemon a guest: it puts requests on a ring of its own.
//!
//! Every kernel has this client. It copies all data through the socket, and finds out that its server has
//! gone by a request's time limit ([`kernel::REQUEST_LIMIT`]): a pause of so long after a kill.
//!
//! | part | what it does |
//! |---|---|
//! | `kernel` | makes, takes up and removes devices, by generic netlink |
//! | `protocol` | requests and answers: pure |
//! | `memory` | the ring, and buffers beside it |
//! | `requests` | which requests are under way, and on which buffers: pure |
//! | `server` | two threads a device, between the kernel and the daemon |

pub mod kernel;
mod memory;
mod protocol;
mod requests;
mod server;

pub use server::{Parts, Server};
