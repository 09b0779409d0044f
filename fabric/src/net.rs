//! How requests reach replicas, behind [`crate::core::client::Transport`].

pub mod mem;
