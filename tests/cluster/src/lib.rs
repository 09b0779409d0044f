//! The rig for clusters: several real daemons on one machine, each in a network namespace, to be cut off,
//! killed, robbed of their power and replaced. Guests and the CLI stay outside: they reach a node through
//! sockets in its data directory.

mod clock;
pub mod cluster;
pub mod document;
pub mod guest;
pub mod ledger;
pub mod load;
pub mod machine;
pub mod network;
pub mod trace;
pub mod typing;

pub use cluster::{Cluster, ClusterOptions, Node};
pub use fault_rig::Survival;
pub use ledger::{Ledger, Promise};
pub use load::Load;
pub use load::Requests;
pub use machine::Machine;
pub use network::{CutDirection, Network};
pub use trace::Trace;
