//! The chunk store: where a storage node keeps its chunks on one device.

pub mod api;
pub mod device;
pub mod file;
pub mod metrics;
pub mod uring;
