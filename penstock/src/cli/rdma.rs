//! `penstock rdma …`.

use std::net::IpAddr;

use clap::{Args, Subcommand};

/// Verbs of `penstock rdma`.
#[derive(Debug, Subcommand)]
pub enum RdmaCommand {
    /// Look at this machine's RDMA devices, try them out, and say what to mend; exit code 1 if none can be used
    Check(CheckArgs),
}

/// `penstock rdma check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The node's data address: its device is the one that is tried out [default: every port with an address]
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
}
