//! `penstock libvirt check`.

use std::path::Path;
use std::process::ExitCode;

use api::client::{Client, encode};
use api::failure::Result;
use api::types::{Attachment, Volume};
use libvirt::access::QemuUser;
use libvirt::apparmor;
use libvirt::check::{self, Device, Finding, Level, Served, ServedFilesystem, Service};
use libvirt::domain::{Domain, VhostUserDisk, VirtioFilesystem};
use libvirt::hook;
use libvirt::virsh::Virsh;
use libvirt::xml::Element;
use serde::Serialize;

use crate::args::{Global, LibvirtCheckArgs};
use crate::commands::{locate, print, print_json};

use super::{attachments, filesystem, virsh_failure};

/// What is printed for programs.
#[derive(Serialize)]
struct Report<'a> {
    domain: &'a str,
    /// `ok`, `warn` or `fail`, the worst of all.
    state: Level,
    findings: &'a [Finding],
}

/// Runs the verb.
pub async fn run(args: LibvirtCheckArgs, global: &Global) -> Result<ExitCode> {
    let virsh = Virsh::new(args.connect.connect);
    let (domain, _) = virsh.domain(&args.domain, false).map_err(virsh_failure)?;
    let capabilities = virsh.capabilities().map_err(virsh_failure)?;
    let client = locate::client(global).await?;
    let attachments = attachments::list(&client).await?;
    let mut services = Vec::new();
    for disk in &domain.disks {
        services.push(service(&client, &domain, disk, &attachments).await);
    }
    let filesystems = filesystems(&client, &domain).await?;
    let is_running = virsh.is_running(&args.domain).map_err(virsh_failure)?;
    let is_served = services
        .iter()
        .all(|service| matches!(service, Service::Here(_)))
        && filesystems.iter().all(|(_, served)| served.is_some());
    let mut findings = findings(&domain, &capabilities, &services, &filesystems);
    findings.extend(host_findings(&domain, is_running, is_served));
    let worst = findings.iter().map(|finding| finding.level).max();
    let worst = worst.unwrap_or(Level::Ok);
    match global.json {
        true => print_json(&Report {
            domain: &domain.name,
            state: worst,
            findings: &findings,
        })?,
        false => print_findings(&domain, worst, &findings)?,
    }
    Ok(match worst {
        Level::Fail => ExitCode::FAILURE,
        Level::Ok | Level::Warn => ExitCode::SUCCESS,
    })
}

/// What serves a disk.
async fn service(
    client: &Client,
    domain: &Domain,
    disk: &VhostUserDisk,
    attachments: &[Attachment],
) -> Service {
    if let Some(here) = attachments.iter().find(|one| one.socket == disk.socket) {
        return Service::Here(Served {
            volume: here.volume.clone(),
            queues: here.queues,
            is_read_only: here.read_only,
        });
    }
    let Some(name) = domain.volume_of(disk) else {
        return Service::Nothing;
    };
    // A volume that is not there is attached nowhere; the finding says how to attach it.
    let path = format!("/v1/volumes/{}", encode(name));
    let volume = client.get::<Volume>(&path).await;
    let is_here = |socket: &String| {
        let mut here = attachments.iter();
        here.any(|one| one.volume == name && one.socket == *socket)
    };
    let sockets = volume.map(|volume| volume.attached).unwrap_or_default();
    match sockets.into_iter().find(|socket| !is_here(socket)) {
        Some(place) => Service::Elsewhere(place),
        None => Service::Nothing,
    }
}

/// The domain's virtio-fs devices that are Penstock's, with what serves them; others are none of our concern.
async fn filesystems<'a>(
    client: &Client,
    domain: &'a Domain,
) -> Result<Vec<(&'a VirtioFilesystem, Option<ServedFilesystem>)>> {
    if domain.filesystems.is_empty() {
        return Ok(Vec::new());
    }
    let attachments = filesystem::list(client).await?;
    let served = |device: &VirtioFilesystem| {
        let mut here = attachments.iter();
        let here = here.find(|one| one.socket == device.socket)?;
        Some(ServedFilesystem {
            filesystem: here.filesystem.clone(),
            tag: here.tag.clone(),
            is_read_only: here.read_only,
        })
    };
    let devices = domain.filesystems.iter();
    let devices = devices.map(|device| (device, served(device)));
    let is_ours = |(device, served): &(&VirtioFilesystem, Option<_>)| {
        served.is_some() || domain.filesystem_of(device).is_some()
    };
    Ok(devices.filter(is_ours).collect())
}

fn host_findings(domain: &Domain, is_running: bool, is_served: bool) -> Vec<Finding> {
    let pages = check::huge_pages(Path::new(check::HUGE_PAGES));
    // Somebody else's script at its place is not ours.
    let has_hook = hook::is_installed(Path::new(hook::DIRECTORY)).unwrap_or(false);
    let pages = check::free_huge_pages(domain, is_running, &pages);
    let hook = check::hook(domain, has_hook, is_served);
    pages.into_iter().chain(hook).collect()
}

fn findings(
    domain: &Domain,
    capabilities: &Element,
    services: &[Service],
    filesystems: &[(&VirtioFilesystem, Option<ServedFilesystem>)],
) -> Vec<Finding> {
    let mut findings = check::domain(domain);
    let user = QemuUser::of(domain, capabilities);
    let is_confined = apparmor::is_in_force(capabilities);
    let reach = |device: Device<'_>, is_there: bool| {
        let user = user.as_ref().filter(|_| is_there);
        // Of a socket that is not there nothing can be told.
        let socket = user.map(|user| {
            let may_connect = user.may_connect(Path::new(device.socket()));
            check::socket(device, &may_connect)
        });
        let allows = || apparmor::allows(Path::new("/"), &domain.uuid, device.socket());
        let confinement = check::confinement(device, is_confined.then(allows));
        socket.into_iter().chain([confinement])
    };
    for (disk, service) in domain.disks.iter().zip(services) {
        findings.extend(check::disk(domain, disk, service));
        let is_there = matches!(service, Service::Here(_));
        findings.extend(reach(Device::Disk(disk), is_there));
    }
    for (device, served) in filesystems {
        findings.extend(check::filesystem(domain, device, served.as_ref()));
        findings.extend(reach(Device::Filesystem(device), served.is_some()));
    }
    findings
}

fn print_findings(domain: &Domain, worst: Level, findings: &[Finding]) -> Result<()> {
    print(|out| {
        for finding in findings {
            let of = finding.disk.as_ref().or(finding.filesystem.as_ref());
            let of = of.map(|of| format!("{of} "));
            let (of, state) = (of.unwrap_or_default(), finding.level.word());
            writeln!(out, "{state:4}  {of}{}: {}", finding.check, finding.found)?;
            if let Some(fix) = &finding.fix {
                writeln!(out, "      {fix}")?;
            }
        }
        let name = &domain.name;
        let summary = match worst {
            Level::Ok => "is as it should be",
            Level::Warn => "works; see the warnings above",
            Level::Fail => "does not work with Penstock; see what failed above",
        };
        writeln!(out, "domain {name} {summary}")
    })
}
