//! The chunk store: where a storage node keeps its chunks on one device.
//!
//! [`format`](fn@format) makes an empty store, [`open`] recovers one and gives its shards, [`api`] says how
//! to use them, and [`mod@format`] what is on the device and why it survives a crash.

mod alloc;
pub mod api;
mod arena;
mod bitmap;
pub mod core;
pub mod device;
pub mod error;
pub mod file;
pub mod format;
pub(crate) mod iov;
mod leaf;
mod log;
pub mod metrics;
pub mod recovery;
mod table;
pub mod uring;

pub use self::core::ShardCore;
pub use error::OpenError;
pub use recovery::{format, open};
