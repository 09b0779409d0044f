//! The hook: volumes and filesystems are attached when a domain starts, and detached when it ends.

use anyhow::{Context, Result, ensure};
use guest_rig::Form;
use libvirt_rig::{DomainXml, Host, Release};

fn disk(target: &str, socket: &str) -> String {
    format!(
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='2'/>\
         <source type='unix' path='{socket}'><reconnect enabled='yes' timeout='1'/></source>\
         <target dev='{target}' bus='virtio'/></disk>"
    )
}

/// A domain with a disk that its metadata name, and one that its socket names.
fn two_disks(name: &str) -> DomainXml {
    let mut domain = DomainXml::new(name);
    domain.metadata = "<metadata><penstock:disks xmlns:penstock='urn:penstock:libvirt:1'>\
                       <penstock:disk volume='web' target='vda'/></penstock:disks></metadata>"
        .to_owned();
    domain.devices =
        disk("vda", "/run/penstock/other-name.sock") + &disk("vdb", "/run/penstock/logs.sock");
    domain
}

fn domain_with_the_hook_starts_and_ends(release: Release) -> Result<()> {
    let mut host = Host::bare(release)?;
    host.start_penstock()?;
    host.ok("penstock libvirt hook install 2>&1 | grep -q 'restart libvirt'")?;
    host.start_libvirt()?;
    host.ok("penstock volume create web 64M && penstock volume create logs 64M")?;
    host.define(&two_disks("d"))?;
    host.define(&two_disks("rival"))?;
    ensure!(host.attached()?.is_empty());

    let mut guest = host.boot("d")?;
    let both = ["/run/penstock/logs.sock", "/run/penstock/other-name.sock"];
    assert_eq!(host.attached()?, both);
    guest.sh_until("test -b /dev/vda -a -b /dev/vdb")?;
    guest.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /init /mnt && sync")?;

    // libvirt ends a domain that could not start, hook and all: the other one keeps its disks.
    let told = host.fails("virsh start rival")?;
    let line = hook_line(&told)?;
    ensure!(
        line.contains("volume 'web' is a disk of domain 'd'"),
        "{line}"
    );
    assert_eq!(host.attached()?, both);
    guest.sh("cp /init /mnt/again && sync")?;

    // A disk that comes while it runs is the domain's, too.
    host.ok("penstock volume create extra 64M && penstock libvirt attach d extra --live")?;
    let all = host.attached()?;
    assert_eq!(all.len(), 3, "{all:?}");

    // libvirt restarts, and finds the guest with its disks; then the daemon does.
    host.stop_libvirt()?;
    host.start_libvirt()?;
    host.machine()
        .until_ok("test $(virsh domstate d | head -1) = running")?;
    assert_eq!(host.attached()?, all);
    guest.sh("cmp /init /mnt/again && sync")?;
    host.kill_penstock()?;
    host.start_penstock()?;
    guest.sh("cp /init /mnt/third && sync")?;
    guest.expect_no_io_errors()?;

    host.ok("virsh destroy d")?;
    ensure!(host.attached()?.is_empty(), "the domain has ended");

    // What a domain saved is what it finds when it is restored.
    let mut guest = host.boot("d")?;
    guest.sh_until("mount /dev/vda /mnt && cmp /init /mnt/third")?;
    host.ok("virsh save d /run/d.save")?;
    ensure!(host.attached()?.is_empty(), "the domain is saved");
    let channel = host.channel("d")?;
    host.ok("virsh restore /run/d.save")?;
    assert_eq!(host.attached()?, both);
    host.ok("virsh destroy d")?;
    drop(channel);

    // A guest that arrives from another host.
    let told =
        host.refused("virsh dumpxml d --inactive | penstock libvirt hook run d migrate begin -")?;
    ensure!(told.contains("a cluster of its own"), "{told}");
    ensure!(host.attached()?.is_empty());

    // Half of what a domain needs is nothing.
    host.ok("penstock volume delete logs --yes")?;
    let _channel = host.channel("d")?;
    let told = host.fails("virsh start d")?;
    ensure!(hook_line(&told)?.contains("logs"), "{told}");
    ensure!(host.attached()?.is_empty(), "the other one was taken back");

    // Without the daemon only domains without its disks start.
    host.define(&DomainXml::new("plain"))?;
    host.kill_penstock()?;
    let told = host.fails("virsh start d")?;
    ensure!(hook_line(&told)?.contains("no daemon answers"), "{told}");
    let _plain = host.channel("plain")?;
    host.ok("virsh start plain && virsh destroy plain")?;

    host.ok("touch /etc/libvirt/hooks/qemu.d/60-other && penstock libvirt hook remove")?;
    let left = host.ok("ls -A /etc/libvirt/hooks/qemu.d")?;
    assert_eq!(left.trim(), "60-other");
    host.ok("echo '#!/bin/sh' > /etc/libvirt/hooks/qemu.d/50-penstock")?;
    for verb in ["install", "remove"] {
        let told = host.refused(&format!("penstock libvirt hook {verb}"))?;
        ensure!(told.contains("was not written by"), "{told}");
    }
    Ok(())
}

/// A host with the daemon, the hook and libvirt.
fn host_with_hook() -> Result<Host> {
    let mut host = Host::bare(Release::Installed)?;
    host.start_penstock()?;
    host.ok("penstock libvirt hook install")?;
    host.start_libvirt()?;
    Ok(host)
}

/// What the domain's socket does not say is in its metadata, and holds at each start.
#[test]
fn read_only_disks_and_other_sockets_outlive_the_domains_end() -> Result<()> {
    let mut host = host_with_hook()?;
    host.ok("penstock volume create web 64M && penstock volume create logs 64M")?;
    host.define(&DomainXml::new("d"))?;
    let config = "virsh dumpxml d --inactive";
    let plain = host.ok(config)?;
    // Nothing is left of what fails.
    host.refused("penstock libvirt attach d nope --read-only")?;
    assert_eq!(host.ok(config)?, plain);
    host.ok("penstock libvirt attach d web --read-only")?;
    host.ok("penstock libvirt attach d logs --socket /run/penstock/elsewhere.sock")?;
    let xml = host.ok(config)?;
    host.validate("asked.xml", "domain", &xml)?;
    for _ in 0..2 {
        let mut guest = host.boot("d")?;
        guest.sh_until("test $(cat /sys/block/vda/ro) = 1 -a $(cat /sys/block/vdb/ro) = 0")?;
        // A guest whose channel closes would end by itself.
        host.ok("virsh destroy d")?;
        drop(guest);
        ensure!(host.attached()?.is_empty(), "the hook has detached them");
    }
    // Metadata that make no sense keep a domain from its start, and a guest that runs goes on.
    let guest = host.boot("d")?;
    let broken =
        "virsh metadata d urn:penstock:libvirt:1 --key penstock --set '<disk/>' --live --config";
    host.ok(broken)?;
    host.ok(
        "virsh dumpxml d | /etc/libvirt/hooks/qemu.d/50-penstock d reconnect begin - 2> /dev/null",
    )?;
    host.ok(
        "echo nonsense | /etc/libvirt/hooks/qemu.d/50-penstock d reconnect begin - 2> /dev/null",
    )?;
    host.ok("virsh destroy d")?;
    drop(guest);
    ensure!(host.attached()?.is_empty(), "the hook has detached them");
    let told = host.fails("virsh start d")?;
    ensure!(hook_line(&told)?.contains("names no volume"), "{told}");
    host.ok("virsh metadata d urn:penstock:libvirt:1 --remove --config")?;
    host.ok("penstock libvirt detach d web && penstock libvirt attach d web --read-only")?;
    ensure!(host.ok(config)?.contains("readonly"), "asked for again");
    host.ok("penstock libvirt detach d web")?;
    ensure!(
        !host.ok(config)?.contains("readonly"),
        "the metadata have gone with the disk"
    );
    Ok(())
}

/// Two domains use one filesystem at once, each by an attachment of its own. The filesystem is named by the
/// first one's socket, and by the second one's metadata.
#[test]
fn filesystems_of_domains_are_attached_and_detached() -> Result<()> {
    let mut host = host_with_hook()?;
    let (first, second) = ("/run/penstock/tree.sock", "/run/penstock/second.sock");
    host.ok(&format!(
        "penstock fs create tree && penstock attach fs tree --socket {first} --tag home"
    ))?;
    let device = host.ok("penstock libvirt fs-xml tree")?;
    host.ok("penstock detach tree")?;
    let mut domain = DomainXml::new("d");
    domain.devices = device.clone();
    host.define(&domain)?;
    let mut reader = DomainXml::new("reader");
    reader.devices = device.replace(first, second);
    reader.metadata = "<metadata><penstock:disks xmlns:penstock='urn:penstock:libvirt:1'>\
                       <penstock:filesystem name='tree' target='home' readonly='yes'/>\
                       </penstock:disks></metadata>"
        .to_owned();
    host.define(&reader)?;
    ensure!(host.attached()?.is_empty());

    // The guest has the device: virtio's number for filesystems is 26.
    let has_device = "grep -qx 0x001a /sys/bus/virtio/devices/*/device";
    let mut guest = host.boot("d")?;
    guest.sh(has_device)?;
    assert_eq!(host.attached()?, [first]);
    let mut other = host.boot("reader")?;
    other.sh(has_device)?;
    assert_eq!(host.attached()?, [second, first]);
    let list = host.ok("penstock attachment list")?;
    let line = |socket: &str| list.lines().find(|line| line.contains(socket));
    for (socket, mode) in [(first, " rw "), (second, " ro ")] {
        let line = line(socket).with_context(|| format!("{socket}: {list}"))?;
        ensure!(line.contains("connected") && line.contains(mode), "{line}");
    }
    let told = host.refused("penstock fs delete tree --yes")?;
    ensure!(told.contains("in use at"), "{told}");

    // A domain that wants a socket that is in use does not start, and the other one goes on.
    let mut rival = DomainXml::new("rival");
    rival.devices = device.clone();
    host.define(&rival)?;
    let told = host.fails("virsh start rival")?;
    ensure!(hook_line(&told)?.contains("domain 'd'"), "{told}");
    guest.sh("true")?;
    host.ok("virsh destroy reader")?;
    assert_eq!(host.attached()?, [first]);
    host.ok("virsh destroy d")?;
    ensure!(host.attached()?.is_empty(), "both have ended");

    // A filesystem that is not there keeps its domain from starting.
    let mut last = DomainXml::new("last");
    last.devices = device.replace("tree.sock", "nope.sock");
    host.define(&last)?;
    let told = host.fails("virsh start last")?;
    ensure!(
        hook_line(&told)?.contains("no filesystem \"nope\""),
        "{told}"
    );
    ensure!(host.attached()?.is_empty());
    host.ok("penstock fs delete tree --yes").map(drop)
}

/// The one line of the hook's in what virsh says: it stands behind libvirt's own words.
fn hook_line(told: &str) -> Result<&str> {
    let mut lines = told.lines().filter(|line| line.contains("penstock: "));
    let line = lines.next().with_context(|| told.to_owned())?;
    ensure!(lines.next().is_none(), "more than one line:\n{told}");
    let begin = line
        .find("penstock: error: ")
        .with_context(|| told.to_owned())?;
    Ok(&line[begin..])
}

#[test]
fn a_domain_with_the_hook_gets_its_disks_and_gives_them_back() -> Result<()> {
    domain_with_the_hook_starts_and_ends(Release::Installed)?;
    match Form::of_this_run() {
        Form::Short => Ok(()),
        Form::Long => {
            domain_with_the_hook_starts_and_ends(Release::Debian13).context("on Debian 13")
        }
    }
}

#[test]
fn a_hook_that_is_run_by_hand_says_so_in_one_line() -> Result<()> {
    let mut host = Host::bare(Release::Installed)?;
    for (command, told) in [
        ("run < /dev/null", "four arguments"),
        ("run a b < /dev/null", "four arguments"),
        ("run d prepare begin - < /dev/null", "no XML element"),
        ("run d release end - < /dev/null", "no XML element"),
        ("run d prepare begin - < /etc/passwd", "not"),
        ("run d prepare begin - < /dev/urandom", "not read"),
        ("run d prepare begin - <<< '<network/>'", "<network>"),
    ] {
        let typed = host
            .machine()
            .type_in(&format!("penstock libvirt hook {command} 2>&1"))?;
        assert_eq!(typed.status, 1, "{command}: {}", typed.stdout);
        let line = typed.stdout.trim_end();
        ensure!(
            line.starts_with("penstock: error: ") && !line.contains('\n') && line.contains(told),
            "{command}: {line}"
        );
    }
    // What libvirt says beyond what we know is nothing to fail for.
    host.ok("penstock libvirt hook run d invented later - < /dev/null")?;
    Ok(())
}
