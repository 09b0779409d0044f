//! Power that goes away at any step of a first boot and at any moment of an update: the machine comes up
//! again, and goes on or says what became of it. In the short form once each: at one step, at one moment.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use appliance_rig::images::{FIRST, SECOND};
use appliance_rig::payload::{MOUNT, PLACE};
use appliance_rig::{Config, Images, Machine, Seed, Way};
use guest_rig::{Form, Nic};

/// For what a loaded machine under TCG does within a minute.
const LIMIT: Duration = Duration::from_secs(400);
const SEED: &str = "hostname: one\nnetwork: {version: 2, ethernets: {lan: {match: {macaddress: \
    '52:54:00:00:00:01'}, addresses: [10.0.0.1/24]}}}\npenstock: {init: {replicas: 1}, devices: all-empty, \
    wire: crc}\n";

fn config() -> Config {
    Config {
        nics: vec![Nic::new(1)],
        disks_mib: vec![1024],
        ..Config::new(Some(Seed {
            way: Way::FwCfg,
            text: SEED.to_owned(),
        }))
    }
}

fn is_well(machine: &mut Machine) -> Result<()> {
    machine.sh_until("test -e /var/lib/appliance/node", LIMIT)?;
    machine.sh_until("penstock health", LIMIT)?;
    let devices = machine.sh("penstock device list --json")?;
    ensure!(devices.contains("virtio-data0"), "{devices}");
    Ok(())
}

#[test]
fn a_first_boot_goes_on_after_a_loss_of_power() -> Result<()> {
    let images = Images::get()?;
    let (steps, moments): (&[&str], &[u64]) = match Form::of_this_run() {
        Form::Short => (&["/var/lib/appliance/devices.json"], &[12]),
        Form::Long => (
            &[
                "/var/lib/appliance/penstock.toml",
                "/var/lib/appliance/seed.yaml",
                "/var/lib/appliance/devices.json",
                "/var/lib/penstock/cluster",
                "/var/lib/appliance/node",
            ],
            &[4, 8, 12, 15, 18, 22, 26, 30],
        ),
    };
    // Partitions are made and filesystems grown meanwhile.
    let mut moments = moments.iter();
    for step in steps {
        let mut machine = Machine::new(&images, config())?;
        for seconds in moments.by_ref().take(2) {
            machine.start_and_cut(Duration::from_secs(*seconds))?;
        }
        machine.start()?;
        machine.loses_power_at(step, LIMIT)?;
        machine.start()?;
        is_well(&mut machine).map_err(|error| error.context(format!("power lost at {step}")))?;
    }
    Ok(())
}

#[test]
fn an_update_that_loses_power_leaves_one_of_two_versions() -> Result<()> {
    let images = Images::get()?;
    let mut files = Vec::new();
    for version in [FIRST, SECOND] {
        let update = images.update(version);
        files.push(update.with_extension("update.minisig"));
        files.push(update);
    }
    let mut machine = Machine::boot(&images, Config { files, ..config() })?;
    is_well(&mut machine)?;
    let install = |version: &str| {
        format!(
            "penstock update install {PLACE}/penstock-appliance-{version}.update --no-restart --yes"
        )
    };
    let is_long = Form::of_this_run() == Form::Long;
    let mut runs = FIRST.to_owned();
    // How long an update writes, about; the long form measures it.
    let mut whole = Duration::from_secs(6);
    if is_long {
        machine.sh(MOUNT)?;
        machine.begins_to_install(&install(SECOND), LIMIT)?;
        let begin = Instant::now();
        let written = "grep -q '\"written\"' /var/lib/appliance/update.json";
        machine.sh_until(written, LIMIT)?;
        whole = begin.elapsed();
        machine.restart()?;
        runs = settles(&mut machine)?;
        ensure!(
            runs == SECOND,
            "version {runs} runs after an update to {SECOND}"
        );
    }
    let moments: &[f64] = match is_long {
        false => &[0.6],
        true => &[0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0],
    };
    for &moment in moments {
        let target = if runs == FIRST { SECOND } else { FIRST };
        machine.sh(MOUNT)?;
        machine.begins_to_install(&install(target), LIMIT)?;
        std::thread::sleep(whole.mul_f64(moment));
        machine.cut_power();
        machine.start()?;
        let now = settles(&mut machine)?;
        let status = machine.sh("penstock update status")?;
        ensure!(
            now == target || (now == runs && status.contains("taken back")),
            "power lost at {moment}: version {now} runs, {runs} did before:\n{status}"
        );
        runs = now;
    }
    if !is_long {
        return Ok(());
    }
    // And then it goes through.
    let target = if runs == FIRST { SECOND } else { FIRST };
    machine.sh(MOUNT)?;
    machine.sh(&format!("{} 2>&1", install(target)))?;
    machine.restart()?;
    ensure!(settles(&mut machine)? == target);
    Ok(())
}

/// Waits until the machine has decided which version stays, and returns that.
fn settles(machine: &mut Machine) -> Result<String> {
    machine.sh_until("systemctl is-active penstock-boot-check.service", LIMIT)?;
    is_well(machine)?;
    let status = machine.sh("penstock update status --json")?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    Ok(status["version"].as_str().unwrap_or_default().to_owned())
}
