//! Requests to replicas on other nodes over RDMA. So far its lowest layer only: [`verbs`].

pub mod verbs;
