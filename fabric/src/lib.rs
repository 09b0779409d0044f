//! The storage fabric: wire types, chunk store, replication cores and transports.

pub mod io;
pub mod store;
pub mod testing;
