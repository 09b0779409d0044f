//! `penstock libvirt …`.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use libvirt::disk::{QUEUE_SIZE_MAX, is_target};

/// `penstock libvirt …`.
#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Print the <disk> element for an attached volume
    DiskXml(DiskXmlArgs),
    /// Print the <filesystem> element for an attached filesystem
    FsXml(FsXmlArgs),
    /// Give a domain a volume as a disk: attach the volume, then the disk. What was done is undone if a later
    /// step fails
    Attach(LibvirtAttachArgs),
    /// Take a volume's disk from a domain, then end the attachment
    Detach(LibvirtDetachArgs),
    /// Say what keeps a domain from its Penstock disks and filesystems, with the XML that helps; exit code
    /// 1 if anything does
    Check(LibvirtCheckArgs),
    /// Attach volumes and filesystems when domains start and detach them when they end, by a hook that
    /// libvirt runs
    #[command(subcommand)]
    Hook(HookCommand),
}

/// `penstock libvirt disk-xml`.
#[derive(Debug, Args)]
pub struct DiskXmlArgs {
    /// Name of the volume
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub name: String,
    /// Device name in libvirt's tools
    #[arg(long, value_name = "DEV", default_value = "vdb", value_parser = target)]
    pub target: String,
    /// Virtqueues that the guest uses [default: all that the attachment offers]
    #[arg(long, value_name = "N", value_parser = super::queues())]
    pub queues: Option<u16>,
    /// Entries of each virtqueue, a power of two [default: 1024, which QEMU 10.0 needs]
    #[arg(long, value_name = "N", value_parser = queue_size)]
    pub queue_size: Option<u16>,
    /// Place in the order in which the firmware tries devices, from 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub boot_order: Option<u32>,
    /// Let the guest use packed virtqueues
    #[arg(long)]
    pub packed: bool,
}

/// `penstock libvirt fs-xml`.
#[derive(Debug, Args)]
pub struct FsXmlArgs {
    /// Name of the filesystem
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub name: String,
    /// Socket of the attachment, if the filesystem has several
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Which hypervisor.
#[derive(Debug, Args)]
pub struct Connect {
    /// URI of the hypervisor, as virsh takes it [default: what virsh uses]
    #[arg(long, value_name = "URI")]
    pub connect: Option<String>,
}

/// Which state of a domain is changed.
#[derive(Debug, Clone, Copy, Args)]
pub struct ScopeArgs {
    /// Change the running guest only
    #[arg(long, conflicts_with = "config")]
    pub live: bool,
    /// Change what the domain has at its next start only [default: that, and the guest if it runs]
    #[arg(long)]
    pub config: bool,
}

/// `penstock libvirt attach`.
#[derive(Debug, Args)]
pub struct LibvirtAttachArgs {
    /// Name, number or UUID of the domain
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub domain: String,
    /// Name of the volume
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub volume: String,
    /// Device name in libvirt's tools [default: the first free one]
    #[arg(long, value_name = "DEV", value_parser = target)]
    pub target: Option<String>,
    /// vhost-user socket to listen on [default: /run/penstock/VOLUME.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Virtqueues [default: one for each vCPU, up to 4]
    #[arg(long, value_name = "N", value_parser = super::queues())]
    pub queues: Option<u16>,
    /// Serve the volume read-only
    #[arg(long)]
    pub read_only: bool,
    /// Let the guest use packed virtqueues
    #[arg(long)]
    pub packed: bool,
    /// Which state is changed
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Which hypervisor
    #[command(flatten)]
    pub connect: Connect,
}

/// `penstock libvirt detach`.
#[derive(Debug, Args)]
pub struct LibvirtDetachArgs {
    /// Name, number or UUID of the domain
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub domain: String,
    /// Name of the volume
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub volume: String,
    /// Which state is changed. The attachment ends once neither uses it
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Which hypervisor
    #[command(flatten)]
    pub connect: Connect,
}

/// `penstock libvirt check`.
#[derive(Debug, Args)]
pub struct LibvirtCheckArgs {
    /// Name, number or UUID of the domain
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub domain: String,
    /// Which hypervisor
    #[command(flatten)]
    pub connect: Connect,
}

/// `penstock libvirt hook …`.
#[derive(Debug, Subcommand)]
pub enum HookCommand {
    /// Write /etc/libvirt/hooks/qemu.d/50-penstock. Global options given here are used by the hook, too
    Install,
    /// Remove that file, if `install` wrote it
    Remove,
    /// What libvirt runs, with a domain's XML on standard input; not for people
    Run {
        /// The domain's name, what happens, when, and one more
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn target(text: &str) -> Result<String, String> {
    match is_target(text) {
        true => Ok(text.to_owned()),
        false => Err("use a virtio disk's name, like vdb".to_owned()),
    }
}

fn queue_size(text: &str) -> Result<u16, String> {
    let size = text.parse().ok();
    let size = size.filter(|size: &u16| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX);
    size.ok_or_else(|| format!("use a power of two up to {QUEUE_SIZE_MAX}"))
}
