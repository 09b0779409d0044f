//! `penstock libvirt check`.

use std::path::Path;
use std::process::ExitCode;

use libvirt::access::QemuUser;
use libvirt::apparmor;
use libvirt::check::{self, Finding, Level, Served};
use libvirt::domain::Domain;
use libvirt::virsh::Virsh;
use libvirt::xml::Element;
use serde::Serialize;

use super::{attachments, virsh_failure};
use crate::api::types::Attachment;
use crate::cli::{Global, LibvirtCheckArgs};
use crate::commands::{locate, print, print_json};
use crate::failure::Result;

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
    let findings = findings(&domain, &capabilities, &attachments);
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

fn findings(domain: &Domain, capabilities: &Element, attachments: &[Attachment]) -> Vec<Finding> {
    let mut findings = check::domain(domain);
    let user = QemuUser::of(domain, capabilities);
    let is_confined = apparmor::is_in_force(capabilities);
    for disk in &domain.disks {
        let attachment = attachments.iter().find(|one| one.socket == disk.socket);
        let served = attachment.map(|one| Served {
            volume: one.volume.clone(),
            queues: one.queues,
        });
        findings.extend(check::disk(domain, disk, served.as_ref()));
        // Of a socket that is not there nothing can be told.
        if let (Some(user), Some(_)) = (&user, attachment) {
            let may_connect = user.may_connect(Path::new(&disk.socket));
            findings.push(check::socket(disk, &may_connect));
        }
        let allows = || apparmor::allows(Path::new("/"), &domain.uuid, &disk.socket);
        findings.push(check::confinement(disk, is_confined.then(allows)));
    }
    findings
}

fn print_findings(domain: &Domain, worst: Level, findings: &[Finding]) -> Result<()> {
    print(|out| {
        for finding in findings {
            let of = finding.disk.as_deref().map(|disk| format!("{disk} "));
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
            Level::Fail => "does not work with Penstock's disks; see what failed above",
        };
        writeln!(out, "domain {name} {summary}")
    })
}
