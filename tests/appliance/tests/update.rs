//! A machine from its first boot through updates: one that is kept, and in the long form one whose slot is
//! damaged and one with which the machine is not well; by UEFI, in the long form also by BIOS from SATA.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use appliance_rig::images::{FIRST, SECOND, UNWELL};
use appliance_rig::payload::{MOUNT, PLACE};
use appliance_rig::{Bus, Config, Firmware, Images, Machine, Seed, Way};
use guest_rig::{Form, Nic};

/// For what a loaded machine under TCG does within a minute.
const LIMIT: Duration = Duration::from_secs(400);
const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJQ9yO2x3gY0n3mJmYpXc0fZ0Wc3a4v0m0Qm0kq1Zr0T rig";
/// Sizes of the disks, in MiB: one is empty, one has a filesystem.
const DISKS_MIB: [u32; 2] = [2048, 64];

fn seed() -> String {
    format!(
        "hostname: one\nssh_authorized_keys: ['{KEY}']\n\
         network: {{version: 2, ethernets: {{lan: {{match: {{macaddress: '52:54:00:00:00:01'}}, \
         addresses: [10.0.0.1/24]}}}}}}\n\
         penstock: {{init: {{replicas: 1}}, devices: all-empty, wire: crc}}\n"
    )
}

fn machine(images: &Images, firmware: Firmware, bus: Bus, way: Way) -> Result<Machine> {
    let mut files = Vec::new();
    let versions = [FIRST, SECOND, UNWELL];
    for version in &versions[..Form::of_this_run().pick(2, 3)] {
        let update = images.update(version);
        files.push(update.with_extension("update.minisig"));
        files.push(update);
    }
    let mut machine = Machine::new(
        images,
        Config {
            firmware,
            bus,
            nics: vec![Nic::new(1)],
            disks_mib: DISKS_MIB.to_vec(),
            files,
            ..Config::new(Some(Seed { way, text: seed() }))
        },
    )?;
    guest_rig::process::run(
        std::process::Command::new("mke2fs")
            .args(["-q", "-F", "-L", "treasure"])
            .arg(machine.data_disk(1)),
    )?;
    machine.start()?;
    Ok(machine)
}

#[test]
fn a_machine_becomes_a_node_and_is_updated() -> Result<()> {
    let images = Images::get()?;
    let long = Form::of_this_run() == Form::Long;
    life(&images, Firmware::Uefi, Bus::Virtio, Way::FwCfg, long)?;
    if long {
        life(&images, Firmware::Bios, Bus::Sata, Way::NoCloud, long)?;
    }
    Ok(())
}

fn life(images: &Images, firmware: Firmware, bus: Bus, way: Way, long: bool) -> Result<()> {
    let mut machine = machine(images, firmware, bus, way)?;
    let treasure = std::fs::read(machine.data_disk(1))?;
    becomes_a_node(&mut machine)?;
    is_closed(&mut machine)?;
    let sum = fill(&mut machine)?;
    is_refused(&mut machine)?;

    install(&mut machine, SECOND)?;
    machine.restart()?;
    machine.sh_until("penstock update status | grep -q 'runs, and stays'", LIMIT)?;
    runs(&mut machine, SECOND)?;
    ensure!(machine.starts() == 2, "{} starts", machine.starts());
    has(&mut machine, &sum)?;
    let again = machine.refused(&format!(
        "penstock update install {PLACE}/penstock-appliance-{SECOND}.update --yes 2>&1"
    ))?;
    ensure!(again.contains("already"), "{again}");

    if long {
        // The slot is damaged after it was verified: the kernel does not get to its root, and gives up.
        install(&mut machine, FIRST)?;
        machine.sh(
            "dd if=/dev/urandom of=/dev/penstock-boot/penstock-root-a bs=1M count=8 conv=fsync,notrunc 2>&1",
        )?;
        machine.restart()?;
        ensure!(machine.starts() == 4, "{} starts", machine.starts());
        fell_back(&mut machine, FIRST, "did not start")?;
        has(&mut machine, &sum)?;

        install(&mut machine, UNWELL)?;
        machine.restart()?;
        machine.restarts(LIMIT * 2)?;
        fell_back(&mut machine, UNWELL, "penstock")?;
        has(&mut machine, &sum)?;
        // A slot that was given up can be written again.
        install(&mut machine, FIRST)?;
        machine.restart()?;
        machine.sh_until("penstock update status | grep -q 'runs, and stays'", LIMIT)?;
        runs(&mut machine, FIRST)?;
        has(&mut machine, &sum)?;
    }
    ensure!(
        std::fs::read(machine.data_disk(1))? == treasure,
        "a disk with a filesystem on it was written to"
    );
    Ok(())
}

fn becomes_a_node(machine: &mut Machine) -> Result<()> {
    machine.sh_until("test -e /var/lib/appliance/node", LIMIT)?;
    machine.sh_until("penstock health", LIMIT)?;
    ensure!(machine.sh("hostname")? == "one");
    let devices = machine.sh("penstock device list --json")?;
    let devices: serde_json::Value = serde_json::from_str(&devices)?;
    let devices = devices.as_array().context("a list")?;
    ensure!(devices.len() == 1, "{devices:?}");
    let path = devices[0]["path"].as_str().unwrap_or_default();
    ensure!(
        path.starts_with("/dev/disk/by-id/") && path.contains("data0"),
        "{path}"
    );
    // As an NFS node makes it, in the service's own sandbox.
    machine.sh(
        "penstock volume create scratch 64M && penstock attach volume scratch --block 2> /dev/null && \
         penstock attachment list --json | grep -q '\"block_device\": \"/dev/vd' && \
         penstock detach scratch --yes && penstock volume delete scratch --yes 2>&1",
    )?;
    // A machine that is slow, or recovers a file system, needs longer than systemd's 90 s.
    for mount in ["var.mount", "var-lib-penstock.mount"] {
        let limit = machine.sh(&format!("systemctl show --value -p TimeoutUSec {mount}"))?;
        ensure!(limit == "10min", "{mount} has {limit}");
    }
    let failed = machine.sh("systemctl --failed --no-legend --plain")?;
    ensure!(failed.is_empty(), "units failed:\n{failed}");
    // The screen follows the daemon by some seconds.
    let screen = machine.screen_shows("Health       ok", LIMIT)?;
    for word in ["one", "10.0.0.1/24", "SHA-256", "token create"] {
        ensure!(screen.contains(word), "no {word} on the screen:\n{screen}");
    }
    Ok(())
}

/// Nobody gets in without a credential, and nothing of the root changes.
fn is_closed(machine: &mut Machine) -> Result<()> {
    ensure!(machine.sh("passwd -S root")?.starts_with("root L"));
    machine.sh("systemctl is-active ssh.service")?;
    let ssh = machine.sh("sshd -T")?;
    for line in [
        "passwordauthentication no",
        "kbdinteractiveauthentication no",
    ] {
        ensure!(ssh.lines().any(|one| one == line), "no {line} in\n{ssh}");
    }
    machine.refused("touch /usr/changed")?;
    machine.sh("veritysetup status root | grep -q 'status: *verified'")?;
    machine.types("s")?;
    machine.screen_shows("Press any key", LIMIT)?;
    machine.types("b")?;
    machine.types("r")?;
    let menu = machine.screen_shows("Rescue", LIMIT)?;
    ensure!(!menu.to_lowercase().contains("shell"), "{menu}");
    machine.types("b")?;
    machine.screen_shows("r rescue", LIMIT)?;
    machine.sh(MOUNT)?;
    Ok(())
}

fn fill(machine: &mut Machine) -> Result<String> {
    machine.sh("dd if=/dev/urandom of=/var/tmp/image bs=1M count=16 2>/dev/null")?;
    machine.sh("penstock volume import keep /var/tmp/image 2>&1")?;
    let sum = machine.sh("sha256sum < /var/tmp/image")?;
    machine.sh("rm /var/tmp/image")?;
    Ok(sum)
}

fn has(machine: &mut Machine, sum: &str) -> Result<()> {
    machine.sh_until("penstock health", LIMIT)?;
    let export = "rm -f /run/image; penstock volume export keep /run/image 2>&1 >/dev/null; \
        sha256sum < /run/image";
    let now = machine.sh_until(export, LIMIT)?;
    ensure!(
        now.ends_with(sum),
        "the volume has other data: {now}, was {sum}"
    );
    machine.sh("mountpoint -q /run/payload || (mkdir -p /run/payload; mount -o ro /dev/disk/by-label/payload \
        /run/payload)")?;
    Ok(())
}

/// What is no update of this publisher changes nothing.
fn is_refused(machine: &mut Machine) -> Result<()> {
    let update = format!("{PLACE}/penstock-appliance-{SECOND}.update");
    for (make, word) in [
        ("true", "no such file"),
        ("printf 'not an update' > /var/tmp/u", "belongs beside"),
        (
            &*format!(
                "head -c 1000000 {update} > /var/tmp/u; cp {update}.minisig /var/tmp/u.minisig"
            ),
            "not right",
        ),
    ] {
        machine.sh(make)?;
        let said = machine.refused("penstock update install /var/tmp/u --yes 2>&1")?;
        ensure!(said.to_lowercase().contains(word), "{make}: {said}");
    }
    machine.sh("rm -f /var/tmp/u /var/tmp/u.minisig")?;
    runs(machine, FIRST)
}

fn install(machine: &mut Machine, version: &str) -> Result<()> {
    let update = format!("{PLACE}/penstock-appliance-{version}.update");
    machine.sh(&format!(
        "penstock update install {update} --no-restart --yes 2>&1"
    ))?;
    Ok(())
}

fn runs(machine: &mut Machine, version: &str) -> Result<()> {
    let status = machine.sh("penstock update status")?;
    ensure!(
        status
            .lines()
            .any(|line| line == format!("version  {version}")),
        "{status}"
    );
    Ok(())
}

fn fell_back(machine: &mut Machine, version: &str, why: &str) -> Result<()> {
    let status = machine.sh_until("penstock update status | grep 'taken back'", LIMIT)?;
    ensure!(status.contains(version) && status.contains(why), "{status}");
    runs(machine, SECOND)
}

/// An operator's files fill the state partition: the machine says so, and goes on.
#[test]
fn a_full_state_partition_is_named_and_costs_nothing() -> Result<()> {
    let images = Images::get()?;
    let mut machine = machine(&images, Firmware::Uefi, Bus::Virtio, Way::Smbios)?;
    machine.sh_until("penstock health", LIMIT)?;
    let sum = fill(&mut machine)?;
    machine.sh("dd if=/dev/zero of=/var/tmp/big bs=1M 2> /dev/null; df /var | grep -q '100%'")?;
    machine.screen_shows("State        0 MiB are free on the state partition", LIMIT)?;
    machine.sh_until(
        "journalctl --no-pager | grep -q 'MiB are free on the state partition'",
        LIMIT,
    )?;
    machine.sh("penstock health")?;
    machine.sh(MOUNT)?;
    let update = format!("{PLACE}/penstock-appliance-{SECOND}.update");
    let told = machine.refused(&format!("penstock update install {update} --yes 2>&1"))?;
    ensure!(told.contains("No space left on device"), "{told}");

    if Form::of_this_run() == Form::Short {
        runs(&mut machine, FIRST)?;
        return has(&mut machine, &sum);
    }

    machine.restart()?;
    machine.sh_until("penstock health", LIMIT)?;
    machine.screen_shows("State        0 MiB are free", LIMIT)?;
    runs(&mut machine, FIRST)?;
    has(&mut machine, &sum)?;

    machine.sh("rm /var/tmp/big")?;
    install(&mut machine, SECOND)?;
    machine.restart()?;
    machine.sh_until("penstock update status | grep -q 'runs, and stays'", LIMIT)?;
    runs(&mut machine, SECOND)?;
    has(&mut machine, &sum)
}
