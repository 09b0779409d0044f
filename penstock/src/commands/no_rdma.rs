//! `penstock rdma …` of a build that has none.

use std::process::ExitCode;

use crate::cli::RdmaCommand;
use crate::failure::{Failure, Kind, Result};

/// Runs a verb.
pub fn run(_: RdmaCommand, _: bool) -> Result<ExitCode> {
    Err(Failure::new(
        Kind::Failed,
        "this penstock was built without RDMA",
        "use a build that has it: the packages have, and cargo's feature `rdma` is on by default",
    ))
}
