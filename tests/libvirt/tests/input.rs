//! Wrong input: one line that names the fix, and nothing left half attached.

use anyhow::{Result, ensure};
use libvirt_rig::{DomainXml, Host, Release};

/// The domain's XML, and the attachments.
fn state(host: &mut Host, domain: &str) -> Result<(String, Vec<String>)> {
    let xml = host.ok(&format!("virsh dumpxml {domain} --inactive"))?;
    Ok((xml, host.attached()?))
}

#[test]
fn a_disk_that_cannot_be_attached_leaves_nothing_behind() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.ok("penstock volume create web 64M && penstock volume create busy 64M")?;
    host.define(&DomainXml::new("d"))?;
    let mut private = DomainXml::new("private");
    private.is_shared = false;
    host.define(&private)?;
    host.ok("penstock attach volume busy --socket /run/busy.sock")?;
    let before = state(&mut host, "d")?;
    for (command, told, fix) in [
        ("attach nope web", "no domain 'nope'", "virsh list --all"),
        ("attach d nope", "nope", "volume list"),
        (
            "attach private web",
            "not shared",
            "<access mode='shared'/>",
        ),
        ("attach d busy", "busy.sock", "detach"),
        ("attach d web --live", "does not run", "leave --live out"),
        ("attach d web --socket /nowhere/web.sock", "/nowhere", ""),
        ("attach d web --target sdb", "sdb", "vdb"),
        ("attach d web --connect bad:///uri", "bad", ""),
        ("detach d web", "no disk of domain", "virsh domblklist"),
        ("detach nope web", "no domain 'nope'", "virsh list --all"),
        ("check nope", "no domain 'nope'", "virsh list --all"),
        (
            "disk-xml web",
            "not attached",
            "penstock attach volume web --socket /run/penstock/web.sock",
        ),
        ("disk-xml busy --queues 5", "offers 4 queues", "--queues 5"),
        ("disk-xml busy --queue-size 100", "100", "power of two"),
        ("disk-xml busy --boot-order 0", "0", ""),
    ] {
        let line = host.refused(&format!("penstock libvirt {command}"))?;
        ensure!(
            line.contains(told) && line.contains(fix),
            "{command}: {line}"
        );
        assert_eq!(state(&mut host, "d")?, before, "{command}");
    }

    // A directory that QEMU's user may not pass: found out before a guest would wait for ever.
    host.ok("chmod 700 /run/penstock")?;
    let line = host.refused("penstock libvirt attach d web")?;
    ensure!(line.contains("may not pass /run/penstock"), "{line}");
    ensure!(line.contains("chmod o+x /run/penstock"), "{line}");
    assert_eq!(state(&mut host, "d")?, before);
    host.ok("chmod 755 /run/penstock")?;

    // virsh refuses what was attached for it.
    host.ok("penstock libvirt attach d web --target vdc")?;
    let with_disk = state(&mut host, "d")?;
    let line = host.refused("penstock libvirt attach d web")?;
    ensure!(line.contains("as vdc"), "{line}");
    host.ok("penstock volume create more 64M")?;
    let line = host.refused("penstock libvirt attach d more --target vdc")?;
    ensure!(line.contains("has a disk vdc already"), "{line}");
    assert_eq!(state(&mut host, "d")?, with_disk);
    host.ok("penstock libvirt detach d web")?;
    assert_eq!(state(&mut host, "d")?, before);

    host.stop_libvirt()?;
    for command in ["attach d web", "detach d web", "check d"] {
        let line = host.refused(&format!("penstock libvirt {command}"))?;
        ensure!(
            line.contains("systemctl start libvirtd"),
            "{command}: {line}"
        );
    }
    assert_eq!(host.attached()?, before.1);
    host.kill_penstock()?;
    host.start_libvirt()?;
    for command in ["attach d web", "detach d web", "check d", "disk-xml web"] {
        let line = host.refused(&format!("penstock libvirt {command}"))?;
        ensure!(line.contains("penstock serve"), "{command}: {line}");
    }
    let path = host.ok("echo $PATH")?;
    let line = host.refused(&format!(
        "PATH={} penstock libvirt check d",
        program_only(&path)
    ))?;
    ensure!(line.contains("install libvirt-clients"), "{line}");
    Ok(())
}

/// The first directory of a search path, in which the program under test is alone.
fn program_only(path: &str) -> &str {
    path.trim().split(':').next().unwrap_or_default()
}

#[test]
fn a_failure_of_virsh_takes_the_attachment_back() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.ok("penstock volume create web 64M")?;
    host.define(&DomainXml::new("full"))?;
    let _channel = host.channel("full")?;
    host.ok("virsh start full --paused")?;
    let xml = host.ok("virsh dumpxml full --inactive")?;
    let mut last = String::new();
    // More disks than there are places for.
    for count in 0..16 {
        let name = format!("v{count}");
        host.ok(&format!("penstock volume create {name} 16M"))?;
        let command = format!("penstock libvirt attach full {name} --live 2>&1");
        let typed = host.machine().type_in(&command)?;
        if typed.status != 0 {
            last = typed.stdout;
            ensure!(
                !host
                    .attached()?
                    .contains(&format!("/run/penstock/{name}.sock")),
                "{last}"
            );
            break;
        }
    }
    ensure!(last.contains("pcie-root-port"), "{last}");
    assert_eq!(last.lines().count(), 1, "{last}");
    assert_eq!(host.ok("virsh dumpxml full --inactive")?, xml);
    host.ok("virsh destroy full").map(drop)
}
