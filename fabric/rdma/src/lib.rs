//! RDMA devices: the layer that speaks to them ([`verbs`]), what a machine has ([`inventory`]), which port
//! carries a node's data ([`choice`]), what an operator is told of it ([`check`]), and queue pairs on one
//! ([`card`]), which are given to the transport's
//! [`endpoint`](fabric_transport::queue_pair::endpoint)s.
//!
//! Begin with [`card`]. Invariant: memory that the other side may reach stays registered and valid until the
//! queue pair that it was given to has ended.

pub mod card;
pub mod check;
pub mod choice;
pub mod inventory;
#[cfg(test)]
mod testing;
pub mod trial;
pub mod verbs;
