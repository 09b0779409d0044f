//! Attachment service: volumes served to guests over vhost-user-blk, and as block devices of this node
//! ([`Attachments`]). Meta remembers attachments, sessions serve them.

mod attachments;
mod block;
mod block_devices;
mod daemon;
mod leftover_device;
mod lost;
mod metrics;
mod migration;
mod moves;
mod offers;
mod options;
mod routes;
mod shown;
pub mod sockets;
mod stats;
mod write_cache;

pub use attachments::{Attachments, Parts, device};
pub use block_devices::{BlockDevices, HELPER_VERB, interface};
pub use leftover_device::FailingDevice;
pub use routes::paths;
