//! The command line: nouns, verbs and options, and nothing of what they do.

mod appliance;
mod cluster;
mod config;
#[cfg(test)]
mod documents;
mod fs;
mod join;
mod libvirt;
pub mod merge;
mod nfs;
mod privileges;
mod rdma;
mod recovery;
mod span;
mod stats;
mod volume;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use ::config::{DeviceSpec, Poll, Preallocation, StoreKind};
use api::size::Size;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use vhost_backend::blk::MAX_QUEUES;
use vhost_backend::ring::MAX_QUEUE_SIZE;

pub use self::config::ConfigCommand;
pub use self::nfs::{ExportCommand, ExportCreateArgs, NfsCommand, NfsHelperArgs};
pub use appliance::{
    ApplianceCommand, SupportBundleArgs, SupportCommand, UpdateClusterArgs, UpdateCommand,
    UpdateInstallArgs,
};
pub use cluster::{DeviceCommand, EventsArgs, NodeCommand, PoolCommand, ScrubCommand};
pub use fs::{AttachFsArgs, FsCommand};
pub use join::{InitArgs, JoinArgs, PeerArgs, TokenCommand};
pub use libvirt::*;
pub use privileges::PrivilegeArgs;
pub use rdma::RdmaCommand;
pub use recovery::{ClusterCommand, MetaCommand, RejoinArgs, RestoreArgs};
pub use stats::StatsArgs;
pub use volume::{OnFull, VolumeCommand};

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
    /// Socket of the daemon to talk to, like unix:/run/penstock.sock [env: PENSTOCK_API]
    #[arg(long, global = true, value_name = "ADDR", display_order = 101)]
    pub api: Option<String>,
    /// Data directory of the daemon [env: PENSTOCK_DATA] [default: /var/lib/penstock for root, else
    /// $XDG_DATA_HOME/penstock; a command finds the daemon of this machine if none runs there]
    #[arg(long, global = true, value_name = "DIR", display_order = 102)]
    pub data: Option<PathBuf>,
    /// How long the daemon's answer is waited for, like 30s or 5m [default: 10s; 2m for what changes
    /// something]
    #[arg(long, global = true, value_name = "TIME", display_order = 103, value_parser = span::parse)]
    pub timeout: Option<Duration>,
}

/// Environment variable for `--api`.
const API_ENV: &str = "PENSTOCK_API";
/// Environment variable for `--data`.
const DATA_ENV: &str = "PENSTOCK_DATA";

/// What names the daemon that a command talks to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// The path of its socket.
    Address(String),
    /// Its data directory.
    Data(PathBuf),
    /// Nothing: the one in the default data directory, or the only one that runs.
    Any,
}

impl Global {
    /// The data directory that was named, if any. The option overrides the environment; an empty variable
    /// names nothing.
    pub fn data_dir(&self) -> Option<PathBuf> {
        let from_env = || variable(DATA_ENV).map(PathBuf::from);
        self.data.clone().or_else(from_env)
    }

    /// What names the daemon. An option overrides both variables.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint_with(variable)
    }

    fn endpoint_with(&self, variable: impl Fn(&str) -> Option<OsString>) -> Endpoint {
        let address = |text: OsString| Endpoint::Address(text.to_string_lossy().into_owned());
        match (&self.api, &self.data) {
            (Some(api), _) => Endpoint::Address(api.clone()),
            (None, Some(dir)) => Endpoint::Data(dir.clone()),
            (None, None) => variable(API_ENV)
                .map(address)
                .or_else(|| variable(DATA_ENV).map(|dir| Endpoint::Data(dir.into())))
                .unwrap_or(Endpoint::Any),
        }
    }
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Nouns, and verbs that need none.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon. Without a configuration it is one node with all roles
    Serve(ServeArgs),
    /// Make a cluster, with this node as its first one
    Init(InitArgs),
    /// Make this machine a node of an existing cluster
    Join(JoinArgs),
    /// Make, list and revoke tokens that let nodes join
    #[command(subcommand)]
    Token(TokenCommand),
    /// Show this node at a glance
    Status,
    /// Say what is wrong, since when, and what is done or to be done about it; exit code 1 if anything is
    /// wrong
    Health {
        /// Each problem in full: times, and its section of the runbook
        #[arg(long, short)]
        verbose: bool,
    },
    /// Show the cluster's log of events
    Events(EventsArgs),
    /// Create, list, resize, delete, import and export volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Create, list, show and delete filesystems, which guests on all nodes can mount at once
    #[command(subcommand)]
    Fs(FsCommand),
    /// Create, list, watch and delete attachments: sockets that serve volumes and filesystems to guests
    #[command(subcommand)]
    Attachment(AttachmentCommand),
    /// Serve a volume or filesystem on a vhost-user socket; short for `attachment create`
    #[command(subcommand)]
    Attach(AttachCommand),
    /// List attachments; `attachments list` is short for `attachment list`
    #[command(subcommand)]
    Attachments(AttachmentsCommand),
    /// End an attachment; short for `attachment delete`
    Detach(DetachArgs),
    /// List, show, drain and remove nodes
    #[command(subcommand)]
    Node(NodeCommand),
    /// List, add and remove devices
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Create, list, show and delete pools
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Back up the metadata, and restore them
    #[command(subcommand)]
    Meta(MetaCommand),
    /// Go on without nodes that are gone for good
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Export volumes over NFS, from NFS nodes that take over for each other
    #[command(subcommand)]
    Nfs(NfsCommand),
    /// Give libvirt's domains disks and filesystems: attach, detach, check, and the hook that does it at
    /// every start
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// Check this machine's RDMA
    #[command(subcommand)]
    Rdma(RdmaCommand),
    /// Collect what support needs
    #[command(subcommand)]
    Support(SupportCommand),
    /// Update machines that run the appliance
    #[command(subcommand)]
    Update(UpdateCommand),
    /// What the appliance's services run, and the disks of this machine
    #[command(subcommand)]
    Appliance(ApplianceCommand),
    /// Serve one volume without a daemon, by QEMU's conventions for vhost-user back-end programs
    VhostUserBlk(BackendProgramArgs),
    /// The daemon's helper for block devices, which it starts itself
    #[command(hide = true)]
    BlockDeviceHelper {
        /// Directory of its files
        #[arg(long)]
        dir: PathBuf,
    },
    /// The helper of an NFS node, which its service runs as root: mounts, exports and sets addresses
    #[command(hide = true)]
    NfsHelper(NfsHelperArgs),
    /// Check configurations, and show what a daemon goes by
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a completion script
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
    /// Print the man page, or write those of all commands and of the configuration into a directory
    Man {
        /// Directory to write penstock.1, penstock-volume.1 and so on into
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// `penstock serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// TOML file; options given here override it [env: PENSTOCK_CONFIG] [default: for root
    /// /etc/penstock/penstock.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What the daemon stores into and how it runs
    #[command(flatten)]
    pub node: NodeArgs,
    /// Its network and its place among other nodes
    #[command(flatten)]
    pub peers: PeerArgs,
    /// Address of another node, at which this node also looks for peers; may be repeated. Needed if the
    /// addresses of all nodes changed
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub peer: Vec<String>,
    /// Who it is
    #[command(flatten)]
    pub privileges: PrivilegeArgs,
}

/// Options of whatever runs a node.
#[derive(Debug, Default, Clone, Args)]
pub struct NodeArgs {
    /// Where data are stored; `null` drops them, for benchmarks only
    #[arg(long, value_name = "KIND")]
    pub store: Option<StoreKind>,
    /// Block device or file to use, may be repeated; SIZE creates a file [default: a file in the data
    /// directory]
    #[arg(long, value_name = "PATH[:SIZE]")]
    pub device: Vec<DeviceSpec>,
    /// Size of the default device file when it is created [default: half of the free space]
    #[arg(long, value_name = "SIZE")]
    pub device_size: Option<Size>,
    /// How a new device file gets its space [default: falloc]
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

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ImageFormat {
    /// The bytes as they are.
    Raw,
    /// QEMU's format; qemu-img converts.
    Qcow2,
}

/// `penstock attachment …`.
#[derive(Debug, Subcommand)]
pub enum AttachmentCommand {
    /// Serve a volume or filesystem on a vhost-user socket
    #[command(subcommand)]
    Create(AttachCommand),
    /// List attachments of this node, or of others as the metadata have them
    List(AttachmentListArgs),
    /// Move an attachment that no guest uses to another node
    Move {
        /// Socket of the attachment, or name of its volume
        #[arg(value_name = "SOCKET|NAME", value_parser = NonEmptyStringValueParser::new())]
        target: String,
        /// Name or number of the node that is to serve it
        #[arg(long, value_name = "NODE")]
        to: String,
        /// Socket to listen on there [default: the same path as here]
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
    },
    /// Offer an attachment to another node, which may then take it over; needed before a live migration
    Offer {
        /// Socket of the attachment, or name of its volume
        #[arg(value_name = "SOCKET|NAME", value_parser = NonEmptyStringValueParser::new())]
        target: String,
        /// Name or number of the node that the guest is migrated to
        #[arg(long, value_name = "NODE")]
        to: String,
        /// Time in which that node may make its incoming attachment, like 30m or 2h; at most 24h. Once made,
        /// the attachment may take over for 24h: end it with `penstock attachment withdraw`
        #[arg(long, value_name = "TIME", default_value = "10m", value_parser = offer_time)]
        expires: Duration,
    },
    /// Withdraw an offer, and end the incoming attachment that it allowed
    Withdraw {
        /// Socket of the attachment that was offered, or name of its volume
        #[arg(value_name = "SOCKET|NAME", value_parser = NonEmptyStringValueParser::new())]
        target: String,
    },
    /// Show what an attachment did and how long its requests took: in all, or in each interval
    Stats(StatsArgs),
    /// End an attachment
    Delete(DetachArgs),
}

/// `penstock attach …` and `penstock attachment create …`.
#[derive(Debug, Subcommand)]
pub enum AttachCommand {
    /// Serve a volume as a disk
    Volume {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// vhost-user socket to listen on
        #[arg(long, value_name = "PATH", required_unless_present = "block")]
        socket: Option<PathBuf>,
        /// Make it a block device of this machine, /dev/penstock/NAME, and print its path
        #[arg(long, conflicts_with_all = ["socket", "incoming", "no_pin"])]
        block: bool,
        /// Virtqueues to offer
        #[arg(
            long,
            value_name = "N",
            default_value_t = api::types::queues_default(),
            value_parser = queues()
        )]
        queues: u16,
        /// Size of the virtual machine's virtqueues, its queue-size: it limits the segments of a request,
        /// which matters to guests without indirect descriptors [default: 128, as in QEMU]
        #[arg(
            long,
            value_name = "N",
            value_parser = queue_size,
            conflicts_with = "block"
        )]
        queue_size: Option<u16>,
        /// Serve the volume read-only
        #[arg(long)]
        read_only: bool,
        /// With RDMA: copy the guest's data instead of pinning its memory. The memory can then be ballooned,
        /// swapped and overcommitted
        #[arg(long)]
        no_pin: bool,
        /// Destination of a live migration: another node has the volume attached and has offered it to this
        /// one. The socket exists at once; requests wait until the guest runs here
        #[arg(long)]
        incoming: bool,
    },
    /// Serve a filesystem, and print the options that give it to a QEMU guest
    Fs(AttachFsArgs),
}

/// `penstock detach` and `penstock attachment delete`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Socket of the attachment, or name of its volume or filesystem
    #[arg(value_name = "SOCKET|NAME", value_parser = NonEmptyStringValueParser::new())]
    pub target: String,
    /// Forget an attachment of another node that is down, on a node with the role meta. A volume can then be
    /// attached elsewhere. If that node is only cut off, its guest loses the disk or filesystem
    #[arg(long)]
    pub force: bool,
    /// Name or number of that node, if several have an attachment of this name
    #[arg(long, value_name = "NODE", requires = "force")]
    pub node: Option<String>,
    /// Do not ask, even if a guest is connected
    #[arg(long)]
    pub yes: bool,
}

/// `penstock attachments …`.
#[derive(Debug, Subcommand)]
pub enum AttachmentsCommand {
    /// List attachments of this node, or of others as the metadata have them
    List(AttachmentListArgs),
}

/// `penstock attachment list`.
#[derive(Debug, Args)]
pub struct AttachmentListArgs {
    /// Those of all nodes; only a node itself knows whether a guest is there
    #[arg(long)]
    pub all: bool,
    /// Those of this node, by its name
    #[arg(long, value_name = "NODE", conflicts_with = "all")]
    pub node: Option<String>,
}

/// `penstock vhost-user-blk`: options as QEMU's docs/interop/vhost-user.rst asks of back-end programs.
#[derive(Debug, Args)]
pub struct BackendProgramArgs {
    /// Print the program's capabilities as JSON, and exit
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
    /// Serve the volume read-only
    #[arg(long)]
    pub read_only: bool,
    /// Virtqueues to offer
    #[arg(
        long,
        value_name = "N",
        default_value_t = api::types::queues_default(),
        value_parser = queues()
    )]
    pub queues: u16,
    /// Size of the virtual machine's virtqueues, its queue-size [default: 128, as in QEMU]
    #[arg(long, value_name = "N", value_parser = queue_size)]
    pub queue_size: Option<u16>,
    /// How the node runs
    #[command(flatten)]
    pub node: NodeArgs,
}

/// Parses the size of a virtqueue.
fn queue_size(text: &str) -> Result<u16, String> {
    let size = text.parse().ok();
    let size = size.filter(|size: &u16| size.is_power_of_two() && *size <= MAX_QUEUE_SIZE);
    size.ok_or_else(|| format!("use a power of two up to {MAX_QUEUE_SIZE}"))
}

fn offer_time(text: &str) -> Result<Duration, String> {
    let span = span::parse(text)?;
    match span <= meta::OFFER_TIME_MAX {
        true => Ok(span),
        false => Err("give at most 24h".to_owned()),
    }
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
    fn an_offer_lasts_at_most_a_day() {
        assert_eq!(offer_time("10m"), Ok(meta::OFFER_TIME_DEFAULT));
        assert_eq!(offer_time("24h"), Ok(meta::OFFER_TIME_MAX));
        for bad in ["25h", "2d", "0s", "10"] {
            assert!(offer_time(bad).is_err(), "{bad}");
        }
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

    #[test]
    fn an_option_names_the_daemon_before_any_variable() {
        let global = |api: Option<&str>, data: Option<&str>| Global {
            json: false,
            api: api.map(str::to_owned),
            data: data.map(PathBuf::from),
            timeout: None,
        };
        let none = |_: &str| None;
        let both = |name: &str| Some(OsString::from(name));
        let data_only = |name: &str| (name == DATA_ENV).then(|| "/env".into());
        let named = global(Some("/a"), Some("/d"));
        assert_eq!(named.endpoint_with(both), Endpoint::Address("/a".into()));
        let named = global(None, Some("/d"));
        assert_eq!(named.endpoint_with(both), Endpoint::Data("/d".into()));
        let unnamed = global(None, None);
        assert_eq!(
            unnamed.endpoint_with(both),
            Endpoint::Address(API_ENV.into())
        );
        assert_eq!(
            unnamed.endpoint_with(data_only),
            Endpoint::Data("/env".into())
        );
        assert_eq!(unnamed.endpoint_with(none), Endpoint::Any);
    }
}
