//! Benchmarks of Penstock's disks and filesystems. `penstock-bench blk` drives the vhost-user socket from a
//! polling driver on one core, the back end on another, side by side with qemu-storage-daemon in one run;
//! `penstock-bench block` compares block devices of the node with that path; `penstock-bench cluster`
//! measures three nodes, side by side with Ceph; `penstock-bench neighbours` shows what a guest that asks
//! for everything costs another one; `penstock-bench fs` measures a filesystem in a guest, side by side with
//! virtiofsd and NFS.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod allocations;
mod backend;
mod blk;
mod block;
mod clock;
mod cluster;
mod driver;
mod fs;
mod idle;
mod median;
mod neighbours;
mod ping_pong;
mod usage;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    about = "Measures Penstock beside qemu-storage-daemon, Ceph, virtiofsd and NFS on this machine"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Disks over vhost-user: a null back end, a file with O_DIRECT, and an idle daemon
    Blk(blk::Options),
    /// Block devices of a node beside the vhost-user path, in one virtual machine
    Block(block::Options),
    /// Drives a socket; `block` calls it in its machine
    #[command(hide = true)]
    Drive(block::DriveOptions),
    /// Disks replicated over three nodes on this machine, over both wires, beside Ceph if wanted
    Cluster(cluster::Options),
    /// A quiet guest beside one that asks for everything
    Neighbours(neighbours::Options),
    /// A filesystem in a guest beside virtiofsd and the kernel's NFS; as root
    Fs(fs::Options),
}

fn main() -> ExitCode {
    guest_rig::process::exit_code("penstock-bench", run())
}

fn run() -> Result<()> {
    match Cli::parse().command {
        Command::Blk(options) => blk::run(&options),
        Command::Block(options) => block::run(&options),
        Command::Drive(options) => block::drive(&options),
        Command::Cluster(options) => cluster::run(&options),
        Command::Neighbours(options) => neighbours::run(&options),
        Command::Fs(options) => fs::run(&options),
    }
}
