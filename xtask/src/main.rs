//! `cargo xtask`: the main job as a demonstration, the tests, the benchmarks, and what CI checks.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod build;
mod checks;
mod coverage;
mod demo;
#[cfg(test)]
mod documents;
mod image;
mod long;
mod package;
mod packages;
mod readme;
mod widths;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    about = "Builds, shows, tests and measures Penstock"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the main job: a Debian guest formats, writes, verifies and survives daemon kills on a Penstock
    /// disk
    Demo {
        /// Nodes, each in a network namespace; from three on, nodes are killed, cut off, robbed of power and
        /// replaced
        #[arg(long, default_value_t = 1, value_parser = nodes)]
        nodes: u8,
        /// Three machines that run the appliance, and a client; needs root
        #[arg(long, conflicts_with = "nodes")]
        appliance: bool,
    },
    /// Run the tests; arguments go to cargo-nextest (or to cargo test where that is missing)
    Test {
        /// Run the long forms of the tests that have one, and nothing else; takes hours
        #[arg(long)]
        long: bool,
        /// Run the commands of the documents in a fresh clone of HEAD, with a clean environment; with --long
        /// also the slow ones. Needs root
        #[arg(long, conflicts_with = "args")]
        readme: bool,
        /// Run in this checkout, which is the clone
        #[arg(long, requires = "readme", hide = true)]
        in_clone: bool,
        /// Filters and options, as cargo-nextest takes them; `rdma` as the first: the tests in virtual
        /// machines with RDMA devices
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run a benchmark: `blk` measures disks side by side with qemu-storage-daemon, `block` block devices of
    /// the node beside guests' disks, `cluster` replicated disks beside Ceph, `neighbours` a quiet guest
    /// beside a greedy one, `fs` a filesystem in a guest beside virtiofsd and NFS
    Bench {
        /// Benchmark and its options; `bench cluster --help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run whole clusters in one process, from seeds: `sim --seeds 1000 --from 1`; `sim --help` lists the
    /// options. `sim --coverage` lists what of the cores the standard seeds never run
    Sim {
        /// Options of the simulator
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Check what CI checks: formatting, lints, tests, and licences where cargo-deny is installed
    Prepush,
    /// Check that no line of Rust or Markdown is longer than 110 columns
    Widths,
    /// Build the Debian package, with the optimisations that only it has
    Package(package::Options),
    /// Build the appliance: images to boot, and the update; needs root
    Image(image::Options),
    /// Install the Debian packages that the other commands need
    Packages,
}

fn main() -> ExitCode {
    if let Some(code) = coverage::wrap_rustc() {
        return code;
    }
    guest_rig::process::exit_code("xtask", run())
}

fn run() -> Result<()> {
    match Cli::parse().command {
        Command::Demo { nodes, appliance } => {
            packages::install()?;
            match appliance {
                true => demo::run_appliance(),
                false => demo::run(nodes),
            }
        }
        Command::Test {
            long,
            readme,
            in_clone,
            args,
        } => {
            packages::install()?;
            match (readme, long) {
                (true, long) if in_clone => readme::test_in_clone(long),
                (true, long) => readme::test(long),
                (false, true) => long::test(&args),
                (false, false) => checks::test(&args),
            }
        }
        Command::Bench { args } => {
            packages::install()?;
            checks::bench(&args)
        }
        Command::Sim { args } => checks::sim(&args),
        Command::Prepush => {
            packages::install()?;
            checks::prepush()
        }
        Command::Widths => widths::check(),
        Command::Package(options) => {
            packages::install()?;
            package::package(options.profile)
        }
        Command::Image(options) => {
            packages::install()?;
            image::image(&options)
        }
        Command::Packages => packages::install(),
    }
}

/// One, or enough for three copies on nodes of their own and one that is lost; more than a few are more than
/// a machine runs.
fn nodes(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(nodes @ (1 | 3..=5)) => Ok(nodes),
        _ => Err("give 1, or 3 to 5".to_owned()),
    }
}
