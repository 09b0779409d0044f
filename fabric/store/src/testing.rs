//! For tests of the store and of what stands on it: a simulated disk that delays, reorders, drops and tears
//! what was not flushed ([`sim_disk`]), where the pages of the map lie on it ([`map_pages`]), a shard alone
//! on one ([`shard`]), a disk as programs without counts leave it ([`uncounted`]), and random sources that a
//! failure names ([`seeds`]).

pub mod factory;
pub mod map_pages;
pub mod seeds;
pub mod shard;
pub mod sim_disk;
pub mod uncounted;
