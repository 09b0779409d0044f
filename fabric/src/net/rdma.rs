//! Requests to replicas on other nodes over RDMA. So far what comes before the first request: the layer that speaks to devices
//! ([`verbs`]), what a machine has ([`survey`]), which port carries a node's data ([`choice`]), and what an operator is told of it ([`check`]).

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
