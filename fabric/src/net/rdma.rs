//! Requests to replicas on other nodes over RDMA: the layer that speaks to devices ([`verbs`]), what a machine has ([`survey`]), which port carries a
//! node's data ([`choice`]), what an operator is told of it ([`check`]), and one end of a queue pair beside a connection ([`beside`]), over a
//! device ([`card`]) or what a test puts there.

pub mod beside;
pub mod card;
pub mod check;
pub mod choice;
#[cfg(test)]
pub(crate) mod fake;
pub mod message;
pub mod pair;
pub mod pairing;
pub mod regions;
pub mod registrar;
pub mod slots;
pub mod survey;
#[cfg(test)]
mod testing;
pub mod trial;
pub mod verbs;
