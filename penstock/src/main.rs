//! The Penstock binary: `penstock serve` and the command line that talks to it.

mod routes;
mod serve;

use std::process::ExitCode;

use api::failure::Result;
use cli::DaemonVerb;

fn main() -> ExitCode {
    cli::run(std::env::args_os(), daemon)
}

fn daemon(verb: DaemonVerb) -> Result<()> {
    match verb {
        DaemonVerb::Serve {
            args,
            data,
            is_by_variable,
        } => serve::run(args, data, is_by_variable),
        DaemonVerb::BackendProgram { args, data } => serve::backend_program::run(args, data),
        DaemonVerb::BlockDeviceHelper { dir } => serve::block_device_helper::run_helper(&dir),
        DaemonVerb::NfsHelper(args) => serve::nfs_helper::run(&args),
    }
}
