//! The Penstock binary: `penstock serve` and the command line that talks to it.

mod api;
mod cli;
mod commands;
mod config;
mod failure;
mod identity;
mod image;
mod libvirt;
mod moment;
mod registry;
mod serve;
mod size;
mod table;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use failure::{Failure, Kind};

fn main() -> ExitCode {
    let result = match cli::Cli::try_parse() {
        Ok(cli) => commands::run(cli),
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            // A closed pipe behind `penstock --help | head` is no failure.
            let _ = e.print();
            Ok(ExitCode::SUCCESS)
        }
        Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = e.print();
            Ok(ExitCode::from(2))
        }
        Err(e) => Err(usage_failure(&e)),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("penstock: error: {failure}");
        ExitCode::from(failure.exit_code())
    })
}

/// clap explains over several lines; this is its explanation in one.
fn usage_failure(e: &clap::Error) -> Failure {
    let text = e.to_string();
    let told: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .map(|line| line.strip_prefix("error: ").unwrap_or(line))
        .collect();
    Failure::new(Kind::Invalid, told.join(" "), "see `penstock help`")
}
