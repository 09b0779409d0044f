//! The rig for clusters: several real daemons on one machine, each in a network namespace, to be cut off, killed, robbed of
//! their power and replaced. Guests and the CLI stay outside: they reach a node through sockets in its data directory.

pub mod network;

pub use fault_rig::Survival;
pub use network::{Network, Way};
