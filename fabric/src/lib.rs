//! The storage fabric: wire types, chunk store, replication cores and transports.

pub mod checksum;
pub mod core;
pub mod engine;
pub mod io;
pub mod net;
pub mod proto;
pub mod store;
pub mod testing;
