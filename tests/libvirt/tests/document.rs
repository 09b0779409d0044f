//! What docs/LIBVIRT.md tells people to type works when it is typed.

use anyhow::{Context, Result, ensure};
use cluster_rig::document::console_lines;
use guest_rig::GuestImage;
use libvirt_rig::document::document;
use libvirt_rig::{Host, Release};

/// Most commands from an installed package to a guest on a Penstock disk.
const FIRST_GUEST_MAX: usize = 8;
/// Stands for systemd, which a namespace has not: it starts what the units start.
const SYSTEMCTL: &str = "#!/bin/sh
case \"$*\" in
'enable --now penstock')
    setsid penstock serve --config /run/penstock.toml > /run/penstock.log 2>&1 &
    until penstock status > /dev/null 2>&1; do sleep 0.1; done ;;
'restart libvirtd')
    test -e /run/libvirtd.pid && kill $(cat /run/libvirtd.pid)
    while pidof libvirtd > /dev/null; do sleep 0.1; done
    libvirtd --daemon --pid-file /run/libvirtd.pid > /run/libvirtd.log 2>&1
    until virsh version > /dev/null 2>&1; do sleep 0.1; done ;;
*) echo \"systemctl $*: unexpected\" >&2; exit 1 ;;
esac
";

/// The document's domain, which the rig's guest can run in where there is neither KVM nor a network.
fn domain(text: &str, channel: &str) -> Result<String> {
    let block = text.split("```xml\n").nth(1).context("no XML")?;
    let block = block.split("```").next().unwrap_or_default();
    let mut xml = String::new();
    for line in block.lines() {
        let line = line
            .replace("type='kvm'", "type='qemu'")
            .replace("host-passthrough", "maximum")
            .replace("<console type='pty'/>", channel);
        if !line.contains("<interface") {
            xml.push_str(&line);
            xml.push('\n');
        }
    }
    for expected in ["'qemu'", "'maximum'", channel] {
        ensure!(xml.contains(expected), "no {expected} in {xml}");
    }
    Ok(xml)
}

#[test]
fn the_commands_of_the_document_lead_to_a_guest_and_back() -> Result<()> {
    let text = document()?;
    let lines = |heading: &str| console_lines(&text, heading);
    let first = lines("## From an empty host to a guest");
    ensure!((6..=FIRST_GUEST_MAX).contains(&first.len()), "{first:?}");

    let mut host = Host::bare(Release::Installed)?;
    host.install_systemctl(SYSTEMCTL)?;
    let image = GuestImage::get(|line| eprintln!("{line}"))?;
    let disk = image.boot_disk();
    let here = host.directory().display().to_string();
    host.ok(&format!(
        "cd {here} && qemu-img convert -O qcow2 {} debian.qcow2",
        disk.display()
    ))?;
    let xml = domain(&text, &host.channel_xml("web"))?;
    host.write("web.xml", &xml)?;
    host.validate("web.xml", "domain", &xml)?;

    let mut channel = Some(host.channel("web")?);
    for line in &first {
        type_line(&mut host, &line.command)?;
    }
    let mut guest = host.greet("web", channel.take().context("the guest's channel")?)?;
    let root = guest.sh("awk '$2 == \"/\" && $3 != \"rootfs\" {print $1}' /proc/mounts")?;
    assert_eq!(root, "/dev/vda1");

    for line in lines("## While the guest runs") {
        type_line(&mut host, &line.command)?;
        if line.command.contains("volume resize logs 2G") {
            guest.sh_until("test $(blockdev --getsize64 /dev/vdb) = $((2 << 30))")?;
        }
    }
    guest.sh("test ! -e /dev/vdb && echo kept > /left && sync")?;
    guest.expect_no_io_errors()?;

    let metadata = lines("## Which volumes a domain uses");
    ensure!(metadata.len() == 4, "{metadata:?}");
    for line in metadata {
        if line.command.starts_with("virsh start") {
            channel = Some(host.channel("web")?);
        }
        let printed = type_line(&mut host, &line.command)?;
        if line.command.starts_with("penstock attachments") {
            ensure!(!printed.contains("web"), "{printed}");
        }
    }
    let mut guest = host.greet("web", channel.context("the second start")?)?;
    assert_eq!(guest.sh("cat /left")?, "kept");

    for line in lines("## Undoing it") {
        type_line(&mut host, &line.command)?;
    }
    drop(guest);
    ensure!(host.attached()?.is_empty());
    let left = host.ok("virsh list --all --name; ls /etc/libvirt/hooks/qemu.d")?;
    assert_eq!(left.trim(), "");
    Ok(())
}

fn type_line(host: &mut Host, command: &str) -> Result<String> {
    eprintln!("$ {command}");
    host.ok(command)
}
