//! How requests reach replicas, behind [`crate::core::client::Transport`].

pub mod mem;
pub mod rdma;
pub mod tcp;
