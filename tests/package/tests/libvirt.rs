//! docs/LIBVIRT.md in a Debian machine with systemd, libvirt and AppArmor: from the installed package to a
//! guest on a Penstock disk, by the commands as they stand there.
//!
//! The guest runs in a machine that is emulated itself, and takes minutes to mount its disk: there is only a
//! long form.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::document::console_lines;
use guest_rig::GuestImage;
use guest_rig::process::{run, wait_until};
use libvirt_rig::document::document;
use package_rig::{Equipment, Machine, Payload, Release};
use serde_json::Value;

/// For what a loaded machine under TCG does within seconds.
const LIMIT: Duration = Duration::from_secs(120);
/// For a guest within such a machine to boot.
const GUEST_LIMIT: Duration = Duration::from_secs(1200);
/// Most commands from an installed package to a guest on a Penstock disk.
const COMMANDS_MAX: usize = 8;

/// The block with this first line, without its fences.
fn block<'a>(text: &'a str, first: &str) -> Result<&'a str> {
    let begin = text.find(first).with_context(|| format!("no {first}"))?;
    let rest = &text[begin..];
    Ok(&rest[..rest.find("```").context("a block does not end")?])
}

/// The document's domain, where there is no KVM.
fn domain(text: &str) -> Result<String> {
    let xml = block(text, "<domain type='kvm'>\n")?;
    let xml = xml.replace("type='kvm'", "type='qemu'");
    Ok(xml.replace("host-passthrough", "maximum"))
}

fn payload(text: &str) -> Result<Payload> {
    let files = tempfile::tempdir()?;
    let disk = files.path().join("debian.qcow2");
    let image = GuestImage::get(|line| eprintln!("{line}"))?;
    run(Command::new("qemu-img")
        .args(["convert", "-c", "-O", "qcow2"])
        .arg(image.boot_disk())
        .arg(&disk))?;
    let xml = files.path().join("web.xml");
    std::fs::write(&xml, domain(text)?)?;
    Payload::new()?
        .with_package("0.1", "penstock.deb")?
        .with(&disk, "debian.qcow2")?
        .with(&xml, "web.xml")
}

/// What the guest wrote to its disk so far, in requests.
fn writes(machine: &mut Machine) -> Result<u64> {
    let told = machine.sh("penstock attachment stats web --json")?;
    let told: Value = serde_json::from_str(&told)?;
    let told = told.get(0).unwrap_or(&told);
    told["writes"]["requests"]
        .as_u64()
        .with_context(|| format!("no writes in {told}"))
}

#[test]
fn eight_commands_lead_from_the_package_to_a_confined_guest() -> Result<()> {
    let text = document()?;
    let commands = console_lines(&text, "## From an empty host to a guest");
    ensure!((4..=COMMANDS_MAX).contains(&commands.len()), "{commands:?}");
    for release in [Release::Bookworm, Release::Trixie] {
        let mut machine = Machine::boot(release, Equipment::Libvirt, payload(&text)?)?;
        let enabled = machine.sh("cat /sys/module/apparmor/parameters/enabled")?;
        ensure!(enabled == "Y", "AppArmor is switched off: {enabled}");
        machine.sh_until("virsh capabilities | grep -q '<model>apparmor'", LIMIT)?;
        let place = Payload::IN_MACHINE;
        machine.sh(&format!("dpkg -i {place}/penstock.deb 2>&1"))?;

        for line in &commands {
            if line.command.starts_with("penstock libvirt attach") {
                is_not_allowed_yet(&mut machine, &text)?;
            }
            eprintln!("$ {}", line.command);
            machine.sh(&format!("cd {place} && {} 2>&1", line.command))?;
        }
        serves_a_confined_guest(&mut machine)?;

        machine.sh("virsh destroy web")?;
        let left = machine.sh("penstock attachments list --json")?;
        ensure!(left == "[]", "left attached: {left}");
        machine.sh("! journalctl --unit=penstock --no-pager | grep -E ' ERROR |panicked'")?;
    }
    Ok(())
}

/// The rules of libvirt's profiles leave the sockets out: that is said, with what helps.
fn is_not_allowed_yet(machine: &mut Machine, text: &str) -> Result<()> {
    let place = Payload::IN_MACHINE;
    let told = machine.refused(&format!(
        "cd {place} && penstock libvirt attach web web 2>&1"
    ))?;
    ensure!(told.contains("AppArmor"), "{told}");
    let disks = machine.sh("virsh domblklist web --details | grep -c vhostuser || true")?;
    ensure!(disks == "0", "the domain has a disk nevertheless");
    machine.sh(block(text, "mkdir -p /etc/apparmor.d/local")?)?;
    Ok(())
}

fn serves_a_confined_guest(machine: &mut Machine) -> Result<()> {
    let profile = machine.sh("cat /proc/$(pidof qemu-system-x86_64)/attr/current")?;
    ensure!(
        profile.contains("libvirt-") && profile.contains("enforce"),
        "QEMU is not confined: {profile}"
    );
    wait_until(GUEST_LIMIT, || {
        std::thread::sleep(Duration::from_secs(1));
        Ok((writes(machine)? > 0).then_some(()))
    })
    .context("the guest never wrote to its disk")?;
    machine.sh("! dmesg | grep -E 'apparmor=.DENIED.*penstock'")?;
    Ok(())
}
