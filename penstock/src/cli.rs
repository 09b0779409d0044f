//! The command line: nouns, verbs and options, and nothing of what they do.

mod cluster;
mod join;
mod rdma;

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use vhost_backend::blk::MAX_QUEUES;

use crate::config::{DeviceSpec, Poll, Preallocation, StoreKind};
use crate::size::{NewSize, Size};

pub use cluster::{DeviceCommand, EventsArgs, NodeCommand, PoolCommand};
pub use join::{InitArgs, JoinArgs, PeerArgs, TokenCommand};
pub use rdma::RdmaCommand;

/// Virtual storage appliance: serves disks to virtual machines over vhost-user, straight out of guest memory.
#[derive(Debug, Parser)]
#[command(
    name = "penstock",
    version,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that stand before or after the verb.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// Print JSON instead of text
    #[arg(long, global = true, display_order = 100)]
    pub json: bool,
    /// Admin endpoint, the path of a daemon's socket
    #[arg(
        long,
        global = true,
        value_name = "ADDR",
        env = "PENSTOCK_API",
        display_order = 101
    )]
    pub api: Option<String>,
    /// Data directory of the daemon [default: /var/lib/penstock for root, else $XDG_DATA_HOME/penstock]
    #[arg(long, global = true, value_name = "DIR", display_order = 102)]
    pub data: Option<PathBuf>,
}

/// Nouns, and verbs that need none.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon: one node with all roles, data below --data
    Serve(ServeArgs),
    /// Make a cluster that other nodes can join, with this as its first node
    Init(InitArgs),
    /// Make this a node of a cluster
    Join(JoinArgs),
    /// Make tokens with which nodes join
    #[command(subcommand)]
    Token(TokenCommand),
    /// Show the node at a glance
    Status,
    /// Say in one line what is wrong, since when, and what is done about it; exit code 1 if anything is
    Health,
    /// Show what happened in the cluster
    Events(EventsArgs),
    /// Create, list, change, fill and read volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Serve a volume on a vhost-user socket
    #[command(subcommand)]
    Attach(AttachCommand),
    /// Show what is attached
    #[command(subcommand)]
    Attachments(AttachmentsCommand),
    /// End an attachment
    Detach(DetachArgs),
    /// List, show, empty and remove nodes
    #[command(subcommand)]
    Node(NodeCommand),
    /// List, add and remove devices
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Create, list, show and delete pools
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Print what libvirt needs
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// Check this machine's RDMA
    #[command(subcommand)]
    Rdma(RdmaCommand),
    /// Serve one volume of a data directory that no daemon uses, by QEMU's vhost-user backend program conventions
    VhostUserBlk(BackendProgramArgs),
    /// Print a completion script
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
    /// Print the man page, or write one page for each command into a directory
    Man {
        /// Directory to write penstock.1, penstock-volume.1 and so on into
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// `penstock serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// TOML file; options given here override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What the daemon stores into and how it runs
    #[command(flatten)]
    pub node: NodeArgs,
    /// Its network and its place among other nodes
    #[command(flatten)]
    pub peers: PeerArgs,
}

/// Options of whatever runs a node.
#[derive(Debug, Default, Args)]
pub struct NodeArgs {
    /// Where data go; `null` drops them, for benchmarks only
    #[arg(long, value_name = "KIND")]
    pub store: Option<StoreKind>,
    /// Block device or file to own, may be repeated; SIZE creates a file [default: one file below the data directory]
    #[arg(long, value_name = "PATH[:SIZE]")]
    pub device: Vec<DeviceSpec>,
    /// Size of the default device file when it is created [default: half of the free space]
    #[arg(long, value_name = "SIZE")]
    pub device_size: Option<Size>,
    /// How device files that are created get their space [default: falloc]
    #[arg(long, value_name = "HOW")]
    pub preallocation: Option<Preallocation>,
    /// Data threads
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// CPUs to pin the data threads to, like 2,3
    #[arg(long, value_name = "CPUS", value_delimiter = ',')]
    pub pin: Option<Vec<usize>>,
    /// When data threads spin instead of sleeping
    #[arg(long, value_name = "WHEN")]
    pub poll: Option<Poll>,
}

/// `penstock volume …`.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create an empty volume
    Create {
        /// Name of the new volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Size, like 10G
        size: Size,
        /// Pool to create it in
        #[arg(long, value_name = "POOL")]
        pool: Option<String>,
    },
    /// List volumes
    List,
    /// Show one volume
    Show {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
    },
    /// Change a volume's size; guests see it at once
    Resize {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// New size, like 20G, or what to add, like +10G
        size: NewSize,
        /// Do not ask before shrinking, which loses what lies beyond
        #[arg(long)]
        yes: bool,
    },
    /// Delete a volume and its data
    Delete {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Fill a volume from a raw or qcow2 image; creates it if it does not exist
    Import {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Image file or block device
        file: PathBuf,
        /// Pool to create it in
        #[arg(long, value_name = "POOL")]
        pool: Option<String>,
        /// Format of the image, instead of asking qemu-img
        #[arg(long)]
        format: Option<ImageFormat>,
        /// Do not ask before replacing the content of an existing volume
        #[arg(long)]
        yes: bool,
    },
    /// Copy a volume into a file
    Export {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// File to write, `-` for standard output
        file: PathBuf,
        /// Format of the file
        #[arg(long, default_value = "raw")]
        format: ImageFormat,
        /// Overwrite FILE if it exists
        #[arg(long)]
        force: bool,
        /// Copy although a guest is connected; the copy is not of one point in time
        #[arg(long)]
        live: bool,
    },
}

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ImageFormat {
    /// The bytes as they are.
    Raw,
    /// QEMU's format; qemu-img converts.
    Qcow2,
}

/// `penstock attach …`.
#[derive(Debug, Subcommand)]
pub enum AttachCommand {
    /// Serve a volume as a disk
    Volume {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// vhost-user socket to listen on
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// Virtqueues to offer
        #[arg(long, value_name = "N", default_value_t = crate::api::types::queues_default(), value_parser = queues())]
        queues: u16,
        /// Let guests only read
        #[arg(long)]
        read_only: bool,
        /// Where data go over RDMA: copy the guest's data instead of pinning its memory, which so can be ballooned, swapped and overcommitted
        #[arg(long)]
        no_pin: bool,
    },
}

/// `penstock detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Socket of the attachment, or name of its volume
    #[arg(value_name = "SOCKET|NAME", value_parser = NonEmptyStringValueParser::new())]
    pub target: String,
    /// If it is on another node, which is down: forget it, so that the volume can be attached elsewhere. Should that node only be
    /// cut off, its guest loses the disk
    #[arg(long)]
    pub force: bool,
    /// Name or number of the node, if several have an attachment of that name
    #[arg(long, value_name = "NODE", requires = "force")]
    pub node: Option<String>,
    /// Do not ask, even if a guest is connected
    #[arg(long)]
    pub yes: bool,
}

/// `penstock attachments …`.
#[derive(Debug, Subcommand)]
pub enum AttachmentsCommand {
    /// List attachments
    List,
}

/// `penstock libvirt …`.
#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Print the <disk> element for an attached volume
    DiskXml {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Device name in the guest
        #[arg(long, value_name = "DEV", default_value = "vdb")]
        target: String,
    },
}

/// `penstock vhost-user-blk`: options as QEMU's docs/interop/vhost-user.rst asks of back-end programs.
#[derive(Debug, Args)]
pub struct BackendProgramArgs {
    /// Print what this program can do as JSON, and exit
    #[arg(long)]
    pub print_capabilities: bool,
    /// Socket to listen on
    #[arg(long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,
    /// File descriptor of a connected or listening socket
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<i32>,
    /// Name of the volume to serve
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Let the guest only read
    #[arg(long)]
    pub read_only: bool,
    /// Virtqueues to offer
    #[arg(long, value_name = "N", default_value_t = crate::api::types::queues_default(), value_parser = queues())]
    pub queues: u16,
    /// How the node runs
    #[command(flatten)]
    pub node: NodeArgs,
}

/// How many queues a disk may have.
fn queues() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_options_stand_before_or_after_the_verb() {
        for words in [
            ["penstock", "--json", "--data", "/d", "volume", "list"],
            ["penstock", "volume", "list", "--json", "--data", "/d"],
            ["penstock", "volume", "--json", "list", "--data", "/d"],
        ] {
            let cli = Cli::try_parse_from(words).unwrap();
            assert!(cli.global.json);
            assert_eq!(cli.global.data, Some("/d".into()));
        }
    }
}
