//! `penstock libvirt …`.

mod attachments;
mod check;
mod claims;
mod disk;
mod filesystem;
mod hook;

use std::path::Path;
use std::process::ExitCode;

use api::failure::{Failure, Kind, Result};
use api::types::Attachment;
use libvirt::disk::{DiskElement, QUEUE_SIZE_MAX, unkeepable};
use libvirt::domain::{DomainError, socket_of};
use libvirt::virsh::{Scope, Virsh, VirshError};

use crate::args::{DiskXmlArgs, Global, HookCommand, LibvirtCommand, ScopeArgs};

use super::{locate, print, refuse_json};

/// Runs a verb.
pub async fn run(command: LibvirtCommand, global: &Global) -> Result<ExitCode> {
    match command {
        LibvirtCommand::DiskXml(args) => disk_xml(&args, global).await?,
        LibvirtCommand::FsXml(args) => filesystem::xml(&args, global).await?,
        LibvirtCommand::Attach(args) => disk::attach(args, global).await?,
        LibvirtCommand::Detach(args) => disk::detach(args, global).await?,
        LibvirtCommand::Check(args) => return check::run(args, global).await,
        LibvirtCommand::Hook(verb) => {
            refuse_json(global.json, "nothing, or a line of text,")?;
            match verb {
                HookCommand::Install => hook::install(global)?,
                HookCommand::Remove => hook::remove()?,
                HookCommand::Run { arguments } => hook::run(&arguments, global).await?,
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn disk_xml(args: &DiskXmlArgs, global: &Global) -> Result<()> {
    refuse_json(global.json, "libvirt's XML")?;
    let client = locate::client(global).await?;
    let attachments: Vec<Attachment> = client.get("/v1/attachments").await?;
    let name = &args.name;
    // A block device of this machine is no socket.
    let mut sockets = attachments
        .iter()
        .filter(|a| !Path::new(&a.socket).starts_with(block_device::helper::LINKS));
    let attachment = sockets.find(|a| a.volume == *name);
    let attachment = attachment.ok_or_else(|| {
        Failure::new(
            Kind::NotFound,
            format!("volume '{name}' is not attached"),
            format!(
                "run `penstock attach volume {name} --socket {}` first",
                socket_of(name)
            ),
        )
    })?;
    check_socket(&attachment.socket)?;
    let offered = attachment.queues;
    let queues = args.queues.unwrap_or(offered);
    if queues > offered {
        return Err(Failure::invalid(
            format!("the attachment offers {offered} queues, not {queues}"),
            format!("ask for {offered} at most, or attach the volume with --queues {queues}"),
        ));
    }
    let element = DiskElement {
        socket: attachment.socket.clone(),
        target: args.target.clone(),
        queues,
        queue_size: args.queue_size.unwrap_or(QUEUE_SIZE_MAX),
        boot_order: args.boot_order,
        is_packed: args.packed,
    };
    let xml = element.to_xml();
    // A comment must not contain two hyphens in a row; the volume's name could.
    let volume = name.replace("--", "- -");
    let access = match attachment.read_only {
        true => ", read-only: the guest learns that from the disk itself",
        false => "",
    };
    print(|out| {
        write!(
            out,
            "<!-- Penstock volume {volume}{access}. The domain needs memory that the daemon can map:\n     \
             {} -->\n{xml}",
            libvirt::disk::SHARED_MEMORY
        )
    })
}

/// Refuses a socket that libvirt would break a domain with.
fn check_socket(socket: &str) -> Result<()> {
    match unkeepable(socket) {
        None => Ok(()),
        Some(bad) => Err(Failure::invalid(
            format!("libvirt does not keep a socket's path that has {bad:?} in it: {socket}"),
            "attach it on a socket with a plain name",
        )),
    }
}

/// Which state of a domain is changed: without options what there is, as virsh's users expect.
fn scope(virsh: &Virsh, domain: &str, args: ScopeArgs) -> Result<Scope> {
    let is_running = virsh.is_running(domain).map_err(virsh_failure)?;
    if args.live && !is_running {
        return Err(Failure::new(
            Kind::Conflict,
            format!("domain '{domain}' does not run"),
            "leave --live out: the disk is there at the next start",
        ));
    }
    let is_persistent = virsh.is_persistent(domain).map_err(virsh_failure)?;
    if args.config && !is_persistent {
        return Err(Failure::new(
            Kind::Conflict,
            format!("domain '{domain}' is transient: it has no next start"),
            "leave --config out",
        ));
    }
    Ok(Scope {
        is_live: is_running && !args.config,
        is_config: is_persistent && !args.live,
    })
}

/// virsh's error with what helps.
fn virsh_failure(error: VirshError) -> Failure {
    let kind = match &error {
        VirshError::Missing | VirshError::NoDomain(_) => Kind::NotFound,
        VirshError::Unreachable(_) => Kind::Unreachable,
        VirshError::Run(_)
        | VirshError::Refused { .. }
        | VirshError::Domain(_)
        | VirshError::Xml(_) => Kind::Failed,
    };
    let hint = match &error {
        VirshError::Missing => "install libvirt-clients",
        VirshError::NoDomain(_) => "see `virsh list --all`",
        VirshError::Unreachable(_) => {
            "start it: systemctl start libvirtd; or name another one with --connect URI"
        }
        VirshError::Refused { message, .. } if message.contains("No more available PCI slots") => {
            "add <controller type='pci' model='pcie-root-port'/> with `virsh edit` and start the domain anew"
        }
        // 9.0 forgets, when it restarts, how the memory of a domain without NUMA cells is made.
        VirshError::Refused { message, .. } if message.contains("requires shared memory") => {
            "if the domain's memory is shared, libvirt has forgotten it at a restart: shut the domain down \
             and start it, or attach with --config"
        }
        VirshError::Run(_)
        | VirshError::Refused { .. }
        | VirshError::Domain(_)
        | VirshError::Xml(_) => return Failure::plain(kind, error),
    };
    Failure::new(kind, error, hint)
}

fn domain_failure(error: &DomainError) -> Failure {
    Failure::new(
        Kind::Failed,
        error,
        "see docs/LIBVIRT.md for what a domain's metadata may say",
    )
}
