//! The whole cluster in one process, from a seed.
//!
//! What runs is what ships: [`fabric_replication::client::Client`] on hosts,
//! [`fabric_replication::replica::Replica`] and the chunk store on storage nodes, `meta`'s state machine and
//! planner. Everything around them is simulated: clock, network, disks, crashes, and guests whose reads are
//! [checked](checker). All chance comes from one seed, so a run can be repeated to the letter.
//!
//! | file | what it is |
//! |---|---|
//! | [`plan`] | what a run is made of |
//! | [`sim`] | the machine: one event after the other; its parts: hosts, nodes, network, faults |
//! | [`pace`] | how often what recurs is done |
//! | [`node`] | a storage machine: processes that come and go over a disk that stays |
//! | [`host`] | a host: data threads, their connections, guests |
//! | [`metadata`] | meta's state machine and the watch of its leader, without the Raft group |
//! | [`mutation`] | mistakes made on purpose, to see that they are noticed |
//! | [`checker`] | what guests may see |
//! | [`invariants`] | what must hold after every step |

pub mod checker;
pub mod host;
pub mod invariants;
pub mod metadata;
pub mod mutation;
pub mod node;
pub mod pace;
pub mod plan;
pub mod queue;
pub mod sim;
pub mod trace;
pub mod workload;

pub use mutation::Mutation;
pub use plan::Plan;
pub use sim::{Failure, Outcome, Sim};
