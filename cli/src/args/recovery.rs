//! Backups of the metadata, and going on after a disaster.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use uuid::Uuid;

use super::PeerArgs;

/// `penstock meta …`.
#[derive(Debug, Subcommand)]
pub enum MetaCommand {
    /// Write all metadata of the cluster into a file, while it runs. On a node with the role meta the file
    /// holds the key by which nodes are let in: keep it as you keep that
    Backup {
        /// File to write
        file: PathBuf,
        /// Overwrite FILE if it exists
        #[arg(long)]
        force: bool,
    },
    /// Have this node, which does not run, begin anew with the metadata of a backup
    Restore(RestoreArgs),
    /// After a restore, when all devices are back: decide by what they say which replicas count, and let
    /// I/O go on
    Resume {
        /// Go on without devices that are not back. What only they have is lost
        #[arg(long)]
        without_missing: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// After a recovery: give back the space of volumes that the metadata do not know
    ForgetUnknown {
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock meta restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The backup
    pub file: PathBuf,
    /// Do it: what was changed after the backup is lost. Without this the backup is only looked at
    #[arg(long)]
    pub accept_data_loss: bool,
    /// TOML file; options given here override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Number of the node that this machine is, if its data directory is lost, too
    #[arg(long, value_name = "NUMBER")]
    pub node: Option<u64>,
    /// This node, if its data directory is lost
    #[command(flatten)]
    pub peers: PeerArgs,
}

/// `penstock cluster …`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Have this node, which does not run, go on without a majority of the metadata nodes, which is gone for
    /// good. Without --accept-data-loss it says how new this node's metadata are
    Recover {
        /// Do it: what only the lost nodes had is lost
        #[arg(long)]
        accept_data_loss: bool,
        /// A node that is left has newer metadata and may not have the role meta: all I/O waits for `penstock
        /// meta resume`, as after a restore
        #[arg(long, requires = "accept_data_loss")]
        choose_replicas: bool,
        /// TOML file of the node
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Have this node, which does not run, follow a node that was recovered or restored. It keeps its number
    /// and its devices, and gets its metadata anew
    Rejoin(RejoinArgs),
}

/// `penstock cluster rejoin`.
#[derive(Debug, Args)]
pub struct RejoinArgs {
    /// What `penstock cluster recover` or `penstock meta restore` printed
    pub history: Uuid,
    /// TOML file; options given here override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Backup to make the node's identity of, if its data directory is lost
    #[arg(long, value_name = "FILE", requires = "node")]
    pub backup: Option<PathBuf>,
    /// Number of the node that this machine is, if its data directory is lost
    #[arg(long, value_name = "NUMBER", requires = "backup")]
    pub node: Option<u64>,
    /// This node, if its data directory is lost
    #[command(flatten)]
    pub peers: PeerArgs,
}
