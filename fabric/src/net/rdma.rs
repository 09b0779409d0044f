//! Requests to replicas on other nodes over RDMA: the layer that speaks to devices ([`verbs`]), what a
//! machine has ([`inventory`]), which port carries a node's data ([`choice`]), what an operator is told of it
//! ([`check`]), and one end of a queue pair beside a connection ([`endpoint`]), over a device ([`card`]) or
//! what a test puts there.

pub mod card;
pub mod check;
pub mod choice;
pub mod endpoint;
#[cfg(test)]
pub(crate) mod fake;
pub mod inventory;
pub mod message;
pub mod pair;
pub mod pairing;
pub mod regions;
pub mod registrar;
pub mod slots;
#[cfg(test)]
mod testing;
pub mod trial;
pub mod verbs;
