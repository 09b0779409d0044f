//! `penstock rdma …` of a build that has none.

use std::process::ExitCode;

use api::failure::{Failure, Kind, Result};

use crate::args::RdmaCommand;

/// Runs a verb.
pub fn run(_: RdmaCommand, _: bool) -> Result<ExitCode> {
    Err(Failure::new(
        Kind::Failed,
        "this penstock was built without RDMA",
        "use a build that has it: the packages have, and cargo's feature `rdma` is on by default",
    ))
}
