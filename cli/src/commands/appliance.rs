//! What the bootable image runs, and its updates.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use api::failure::{Context, Failure, Kind, Result};
use api::types::Health;
use appliance::console::Console;
use appliance::machine::Machine;
use appliance::update::cluster::{Rollout, Ssh};
use appliance::update::{self, Outcome, Places, Record};
use appliance::{disks, first_boot, prepare};
use serde::Serialize;

use crate::args::{ApplianceCommand, UpdateClusterArgs, UpdateCommand, UpdateInstallArgs};

use super::confirm::confirm;
use super::{print, print_json};

/// A disk, for programs.
#[derive(Serialize)]
struct DiskShown<'a> {
    path: &'a Path,
    bytes: u64,
    model: &'a str,
    serial: &'a str,
    content: Option<&'a str>,
}

/// Which version runs, for programs.
#[derive(Serialize)]
struct UpdateStatus {
    version: String,
    last: Option<Record>,
    message: Option<String>,
}

fn failed(error: anyhow::Error) -> Failure {
    Failure::plain(Kind::Failed, format!("{error:#}"))
}

/// `penstock appliance …`.
pub fn run(verb: &ApplianceCommand, json: bool) -> Result<()> {
    let machine = Machine::default();
    match verb {
        ApplianceCommand::Disks => list_disks(json),
        ApplianceCommand::Prepare => prepare::prepare(&machine).map_err(failed),
        ApplianceCommand::SoftRoce => appliance::soft_roce::set_up(&machine).map_err(failed),
        ApplianceCommand::FirstBoot => {
            first_boot::run_to_end(&machine, &program()?).map_err(failed)
        }
        ApplianceCommand::Console { rescue } => {
            let console = Console {
                machine: &machine,
                program: program()?,
                fingerprint,
            };
            console.run(*rescue).map_err(failed)
        }
    }
}

/// `penstock update …`.
pub fn update(verb: &UpdateCommand, json: bool) -> Result<()> {
    let (machine, places) = (Machine::default(), Places::default());
    match verb {
        UpdateCommand::Install(args) => install(&machine, &places, args),
        UpdateCommand::Cluster(args) => update_cluster(args),
        UpdateCommand::Status => status(&machine, &places, json),
        UpdateCommand::CheckBoot { limit } => {
            check_boot(&machine, &places, Duration::from_secs(*limit))
        }
    }
}

fn list_disks(json: bool) -> Result<()> {
    let disks = disks::list().map_err(failed)?;
    if json {
        let shown = disks.iter().map(|disk| DiskShown {
            path: &disk.path,
            bytes: disk.bytes,
            model: &disk.model,
            serial: &disk.serial,
            content: disk.content.as_deref(),
        });
        return print_json(&shown.collect::<Vec<_>>());
    }
    print(|out| {
        disks
            .iter()
            .try_for_each(|disk| writeln!(out, "{}", disks::describe(disk)))
    })
}

fn install(machine: &Machine, places: &Places, args: &UpdateInstallArgs) -> Result<()> {
    let update = update::verify(places, &args.file).map_err(failed)?;
    let before = places.running_version().map_err(failed)?;
    let then = if args.no_restart {
        ""
    } else {
        " and restart it"
    };
    let what = format!(
        "update this machine from version {before} to {}{then}",
        update.manifest.version
    );
    confirm(&what, args.yes)?;
    let say = |text: &str| eprintln!("penstock: {text}");
    let installed = update::install(machine, places, update, &say).map_err(failed)?;
    print(|out| {
        writeln!(
            out,
            "version {} in slot {}",
            installed.version, installed.slot
        )
    })?;
    if args.no_restart {
        eprintln!("penstock: the next restart tries it; `systemctl reboot` is one");
        return Ok(());
    }
    eprintln!("penstock: the machine restarts");
    systemctl("reboot")
}

fn update_cluster(args: &UpdateClusterArgs) -> Result<()> {
    let version = update::manifest(&args.file).map_err(failed)?.version;
    let identity = args.identity.iter();
    let options = identity.flat_map(|file| ["-i".to_owned(), file.display().to_string()]);
    let mut ssh = Ssh::new(options.collect());
    let mut rollout = Rollout {
        shell: &mut ssh,
        file: &args.file,
        version: &version,
        say: &|line| eprintln!("penstock: {line}"),
    };
    let nodes = rollout.nodes(&args.node).map_err(failed)?;
    let names: Vec<&str> = nodes.iter().map(|node| &*node.name).collect();
    let what = format!(
        "update {} to version {version}, and restart them one after the other",
        names.join(", ")
    );
    confirm(&what, args.yes)?;
    rollout.run(&nodes).map_err(failed)?;
    print(|out| writeln!(out, "all nodes run version {version}"))
}

fn status(machine: &Machine, places: &Places, json: bool) -> Result<()> {
    let version = places.running_version().map_err(failed)?;
    let last = Record::load(machine).map_err(failed)?;
    if json {
        let message = machine.message();
        return print_json(&UpdateStatus {
            version,
            last,
            message,
        });
    }
    print(|out| {
        writeln!(out, "version  {version}")?;
        if let Some(last) = &last {
            let state = match last.state {
                update::State::Writing => "was not written to its end",
                update::State::Written => "is tried at the next start",
                update::State::Good => "runs, and stays",
                update::State::FellBack => "was taken back",
            };
            writeln!(
                out,
                "update   from {} to {}: {state}",
                last.before, last.version
            )?;
        }
        if let Some(message) = machine.message() {
            writeln!(out, "message  {message}")?;
        }
        Ok(())
    })
}

fn check_boot(machine: &Machine, places: &Places, limit: Duration) -> Result<()> {
    let program = program()?;
    let mut unwell = || match machine.is_node() {
        false => None,
        true => problems(&program),
    };
    let outcome = update::boot_check(machine, places, limit, &mut unwell);
    match outcome.map_err(failed)? {
        Outcome::Restart => systemctl("reboot"),
        Outcome::NoTrial | Outcome::Kept | Outcome::FellBack => Ok(()),
    }
}

/// What `penstock health` finds wrong. Warnings are no reason to go back to another version.
fn problems(program: &Path) -> Option<String> {
    let output = match Command::new(program).args(["health", "--json"]).output() {
        Ok(output) => output,
        Err(e) => return Some(e.to_string()),
    };
    let Ok(health) = serde_json::from_slice::<Health>(&output.stdout) else {
        let told = String::from_utf8_lossy(&output.stderr);
        let failure = told.lines().last().map(serde_json::from_str::<Failure>);
        return Some(match failure {
            Some(Ok(failure)) => failure.to_string(),
            _ => told.trim().replace('\n', "; "),
        });
    };
    let wrong = health.problems.iter().filter(|one| !one.is_warning);
    let wrong: Vec<&str> = wrong.map(|one| one.what.as_str()).collect();
    (!wrong.is_empty()).then(|| wrong.join("; "))
}

fn systemctl(verb: &str) -> Result<()> {
    let status = Command::new("systemctl")
        .arg(verb)
        .status()
        .context(|| "start systemctl".into())?;
    match status.success() {
        true => Ok(()),
        false => Err(Failure::plain(
            Kind::Failed,
            format!("systemctl {verb}: {status}"),
        )),
    }
}

fn program() -> Result<PathBuf> {
    std::env::current_exe().context(|| "find this program".into())
}

/// SHA-256 of a certificate in PEM, as `init` and tokens know it.
fn fingerprint(certificate: &str) -> Option<String> {
    let hash = meta::pki::fingerprint(certificate).ok()?;
    let pairs: Vec<String> = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(pairs.join(":"))
}
