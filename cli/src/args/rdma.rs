//! `penstock rdma …`.

use std::net::IpAddr;

use clap::{Args, Subcommand};

/// Verbs of `penstock rdma`.
#[derive(Debug, Subcommand)]
pub enum RdmaCommand {
    /// Check and try this machine's RDMA devices: ok, warn or fail, and how to fix it; exit code 1 for fail
    Check(CheckArgs),
}

/// `penstock rdma check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The node's data address; its device is tried [default: every port with an address]
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
}
