//! Verbs on NFS exports.

use std::path::PathBuf;

use api::size::Size;
use api::types::ExportFs;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

/// `penstock nfs …`.
#[derive(Debug, Subcommand)]
pub enum NfsCommand {
    /// Create, list, show, move and delete exports
    #[command(subcommand)]
    Export(ExportCommand),
    /// Show this node as an NFS node: its NFS server, what it exports, and what it lacks
    Status,
}

/// `penstock nfs export …`.
#[derive(Debug, Subcommand)]
pub enum ExportCommand {
    /// Export a volume from this NFS node; the other NFS nodes take over when it fails
    Create(ExportCreateArgs),
    /// List exports
    List,
    /// Show one export, and how clients mount it
    Show {
        /// Name of the export
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
    },
    /// Move an export to another NFS node; clients see a pause
    Move {
        /// Name of the export
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Name or number of the NFS node that is to serve it
        #[arg(long, value_name = "NODE")]
        to: String,
    },
    /// Take an export down. Its volume and data stay
    Delete {
        /// Name of the export
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock nfs export create`.
#[derive(Debug, Args)]
pub struct ExportCreateArgs {
    /// Name of the export: clients mount ADDRESS:/NAME
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub name: String,
    /// Volume to export. It is empty, or has the file system already; it is created if it does not exist
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub volume: String,
    /// Size of a new volume, like 100G
    #[arg(long, value_name = "SIZE")]
    pub size: Option<Size>,
    /// Pool of a new volume
    #[arg(long, value_name = "POOL", requires = "size")]
    pub pool: Option<String>,
    /// File system of an empty volume
    #[arg(long, value_name = "KIND", default_value = "xfs")]
    pub fs: ExportFs,
    /// Network of clients that may mount it, may be repeated [default: that of the address]
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',')]
    pub clients: Vec<String>,
    /// Let clients only read
    #[arg(long)]
    pub read_only: bool,
    /// Let root of a client be root on the export
    #[arg(long)]
    pub no_root_squash: bool,
    /// Address that moves with the export from NFS node to NFS node, with the prefix of its network, like
    /// 10.0.0.9/24. Without one, clients of an NFS node that fails mount anew
    #[arg(long, value_name = "CIDR")]
    pub address: Option<String>,
}

/// `penstock nfs-helper`.
#[derive(Debug, Args)]
pub struct NfsHelperArgs {
    /// Socket to listen on [default: what systemd hands over, else /run/penstock-nfs.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Number of the user that may connect, besides root
    #[arg(long, value_name = "UID", default_value_t = 0)]
    pub uid: u32,
    /// Directory of its mount points and notes
    #[arg(long, value_name = "DIR", default_value = nfs::helper::DIR)]
    pub dir: PathBuf,
}
