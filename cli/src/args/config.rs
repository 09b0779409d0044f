//! `penstock config`.

use std::path::PathBuf;

use clap::Subcommand;

/// `penstock config …`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say what is wrong with a configuration, before a daemon reads it; exit code 2 if anything is
    Check {
        /// TOML file [default: the one that `serve` reads]
        file: Option<PathBuf>,
    },
    /// Show what the running daemon goes by, and where each value comes from
    Show,
}
