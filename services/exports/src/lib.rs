//! NFS export service: this node serves the NFS exports that are assigned to it, and takes over those of NFS
//! nodes that are down ([`Exports`]).

mod daemon;
mod exports;
mod health;
mod keeper;
mod routes;
mod steps;
mod verbs;

pub use exports::Exports;
pub use routes::paths;
