//! Verbs of the bootable image.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `penstock appliance …`.
#[derive(Debug, Subcommand)]
pub enum ApplianceCommand {
    /// List this machine's disks, and what is on them
    Disks,
    /// Set name, network and keys up, as the seed has them; run at every boot
    #[command(hide = true)]
    Prepare,
    /// Make this machine a node, as the seed has it; run until it is one
    #[command(hide = true)]
    FirstBoot,
    /// Give the network card that the seed names a soft RoCE device; run at every boot
    #[command(hide = true)]
    SoftRoce,
    /// The page on the console
    #[command(hide = true)]
    Console {
        /// Begin with the rescue menu
        #[arg(long)]
        rescue: bool,
    },
}

/// `penstock update …`.
#[derive(Debug, Subcommand)]
pub enum UpdateCommand {
    /// Write an update into the slot that does not run, and start it. If the machine is not well with it
    /// within ten minutes, or does not start, the version before runs again
    Install(UpdateInstallArgs),
    /// Install an update on all nodes of a cluster, one after the other, by ssh. Each is restarted only while
    /// `penstock health` is ok; the first that fails ends it, and the same command goes on
    Cluster(UpdateClusterArgs),
    /// Show which version runs, and what the last update did
    Status,
    /// Keep the version that runs if the machine is well with it; run at every boot
    #[command(hide = true)]
    CheckBoot {
        /// Seconds that the machine may take until it is well
        #[arg(long, default_value_t = 600)]
        limit: u64,
    },
}

/// `penstock update install`.
#[derive(Debug, Args)]
pub struct UpdateInstallArgs {
    /// The update; its signature lies beside it, with .minisig behind its name
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Leave the restart to a later time; any restart tries the update then
    #[arg(long)]
    pub no_restart: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

/// `penstock update cluster`.
#[derive(Debug, Args)]
pub struct UpdateClusterArgs {
    /// The update; its signature lies beside it, with .minisig behind its name
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Address of a node, which names the others; its own turn comes last
    #[arg(long, value_name = "ADDRESS")]
    pub node: String,
    /// Key for ssh, if not the usual one
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

/// `penstock support …`.
#[derive(Debug, Subcommand)]
pub enum SupportCommand {
    /// Write state, configuration and logs of this machine into one file, without keys or tokens
    Bundle(SupportBundleArgs),
}

/// `penstock support bundle`.
#[derive(Debug, Args)]
pub struct SupportBundleArgs {
    /// File to write, which must not exist [default: penstock-support-HOST-TIME.tar.gz here]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
