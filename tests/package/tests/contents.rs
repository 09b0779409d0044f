//! What is in the package, without a machine to install it in.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use guest_rig::paths::penstock_binary;
use guest_rig::process::run;
use packaging::{Compression, Package};

/// A time long past.
const EPOCH: u64 = 1_700_000_000;

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> Result<String> {
    let path = source().join(path);
    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

fn assemble(directory: &Path) -> Result<PathBuf> {
    let package = Package {
        source: &source(),
        binary: &penstock_binary()?,
        version: "1.2",
        epoch: EPOCH,
        compression: Compression::Fast,
    };
    package.assemble(directory)
}

#[test]
fn package_of_the_same_binary_has_the_same_bytes() -> Result<()> {
    let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let first = assemble(one.path())?;
    let second = assemble(two.path())?;
    ensure!(
        first.file_name() == second.file_name() && std::fs::read(first)? == std::fs::read(second)?,
        "two packages of one binary differ"
    );
    Ok(())
}

#[test]
fn package_holds_what_an_operator_expects() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let package = assemble(dir.path())?;
    let listed = run(Command::new("dpkg-deb").arg("-c").arg(&package))?;
    for file in [
        "./usr/bin/penstock",
        "./usr/share/man/man1/penstock.1.gz",
        "./usr/share/man/man1/penstock-volume-create.1.gz",
        "./usr/share/man/man5/penstock.toml.5.gz",
        "./usr/share/bash-completion/completions/penstock",
        "./usr/share/zsh/vendor-completions/_penstock",
        "./usr/share/fish/vendor_completions.d/penstock.fish",
        "./usr/lib/systemd/system/penstock.service",
        "./usr/lib/systemd/system/penstock@.service",
        "./etc/penstock/penstock.toml",
        "./usr/libexec/penstock/vhost-user-blk",
        "./usr/share/qemu/vhost-user/50-penstock-blk.json",
        "./usr/share/penstock/prometheus/penstock.rules.yml",
        "./usr/share/penstock/grafana/penstock.json",
        "./usr/share/doc/penstock/copyright",
        "./usr/share/doc/penstock/changelog.gz",
    ] {
        let is_there = |line: &str| line.ends_with(&format!(" {file}"));
        ensure!(listed.lines().any(is_there), "no {file} in\n{listed}");
    }
    let owned = |line: &str| line.split_whitespace().nth(1) == Some("root/root");
    ensure!(listed.lines().all(owned), "not all is root's:\n{listed}");
    let fields = run(Command::new("dpkg-deb").arg("-f").arg(&package))?;
    for library in ["libc6", "libstdc++6", "libibverbs1"] {
        ensure!(fields.contains(library), "no {library} in\n{fields}");
    }
    Ok(())
}

/// Names in a text that look like metrics of ours or of the process.
fn metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_metric = |word: &&str| word.starts_with("penstock_") || word.starts_with("process_");
    words.filter(is_metric).map(str::to_owned).collect()
}

/// Another test compares that page with the code.
#[test]
fn alerts_and_dashboard_name_metrics_that_exist() -> Result<()> {
    let known = metrics(&read("docs/METRICS.md")?);
    for file in ["penstock.rules.yml", "penstock.json"] {
        let used = metrics(&read(&format!("packaging/monitoring/{file}"))?);
        ensure!(used.len() > 8, "{file} names only {used:?}");
        let unknown: Vec<_> = used.difference(&known).collect();
        ensure!(unknown.is_empty(), "{file} names {unknown:?}");
    }
    let board: serde_json::Value =
        serde_json::from_str(&read("packaging/monitoring/penstock.json")?)?;
    let panels = board["panels"].as_array().context("no panels")?;
    ensure!(panels.len() > 10, "only {} panels", panels.len());
    Ok(())
}

/// A counter of lost data is useful only with an alert.
#[test]
fn each_counter_of_lost_data_has_an_alert() -> Result<()> {
    let known = metrics(&read("docs/METRICS.md")?);
    let alerts = metrics(&read("packaging/monitoring/penstock.rules.yml")?);
    let lost: Vec<_> = known
        .iter()
        .filter(|name| name.contains("_lost_"))
        .collect();
    ensure!(lost.len() >= 2, "only {lost:?}");
    let silent: Vec<_> = lost
        .iter()
        .filter(|name| !alerts.contains(**name))
        .collect();
    ensure!(silent.is_empty(), "no alert on {silent:?}");
    Ok(())
}

/// The template differs from the service in its name, its configuration and its directory alone.
#[test]
fn template_is_as_confined_as_the_service() -> Result<()> {
    let plain = |text: String| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    };
    let mut service = plain(read("packaging/systemd/penstock.service")?);
    let template = plain(read("packaging/systemd/penstock@.service")?);
    for (of_service, of_template) in [
        (
            "Description=Penstock: disks for virtual machines",
            "Description=Penstock: disks for virtual machines (node %i)",
        ),
        (
            "ExecStart=!/usr/bin/penstock serve --config /etc/penstock/penstock.toml",
            "ExecStart=!/usr/bin/penstock serve --config /etc/penstock/%i.toml --data /var/lib/penstock-%i",
        ),
        ("StateDirectory=penstock", "StateDirectory=penstock-%i"),
    ] {
        let at = service.iter().position(|line| line == of_service);
        let at = at.with_context(|| format!("no {of_service} in {service:#?}"))?;
        of_template.clone_into(&mut service[at]);
    }
    ensure!(service == template, "{service:#?}\n{template:#?}");
    Ok(())
}
