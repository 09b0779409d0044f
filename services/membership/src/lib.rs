//! Membership service: the metadata service of this node and its network ([`Control`]), the cluster's nodes,
//! join tokens, and backups of the metadata ([`Nodes`]).

mod cluster_runtime;
mod control;
mod daemon;
mod nodes;
mod recovery;
mod routes;
mod tokens;

pub use control::{Control, Membership, WaitsForLeader};
pub use nodes::Nodes;
pub use routes::paths;
