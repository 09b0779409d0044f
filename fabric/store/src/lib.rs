//! The chunk store: where a storage node keeps its chunks on one device.
//!
//! [`format`](fn@format) makes an empty store, [`open`] recovers one and gives its shards, [`api`] says how
//! to use them, and [`mod@format`] what is on the device and why it survives a crash. Begin with [`api`].
//!
//! A shard ([`ShardCore`]) is a machine without a device: it says what is to be read, written and flushed,
//! and in which order, and is told the outcomes. [`file`] and [`uring`] are the devices that ship,
//! `testing::sim_disk` is one that loses, tears and reorders what a device may.
//!
//! Invariants: what was flushed is there after a loss of power; a block is read as it was written, or not at
//! all (checksum); memory is bounded by [`api::CoreParams`].

mod alloc;
pub mod api;
mod arena;
mod bitmap;
pub mod device;
pub mod error;
pub mod file;
pub mod format;
mod leaf;
mod log;
pub mod metrics;
pub mod recovery;
mod shard;
mod table;
#[cfg(feature = "testing")]
pub mod testing;
pub mod uring;

pub use error::OpenError;
pub use recovery::{format, open};
pub use shard::ShardCore;
