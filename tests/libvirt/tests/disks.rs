//! Disks of a domain: attached, used, resized and detached with the commands that operators type.

use anyhow::{Context, Result, ensure};
use guest_rig::Form;
use libvirt_rig::{DomainXml, Guest, Host, Release};

/// Feature bit of packed virtqueues.
const RING_PACKED: usize = 34;

/// What a domain has, running or not.
fn disks(host: &mut Host, domain: &str, option: &str) -> Result<String> {
    host.ok(&format!("virsh domblklist {domain} {option}"))
}

/// The daemon dies while the guest writes to a file or disk; nothing of that is lost.
fn goes_on_after_a_kill(host: &mut Host, guest: &mut Guest, to: &str) -> Result<()> {
    guest.sh(&format!(
        "rm -f /run/dd /run/begun; (dd if=/dev/zero bs=64k count=8 2> /dev/null > {to}; touch /run/begun; dd \
         if=/dev/urandom of={to} bs=64k count=800 conv=fsync 2> /run/dd.log; echo $? > /run/dd) > /dev/null \
         2>&1 &"
    ))?;
    guest.sh_until("test -e /run/begun")?;
    host.kill_penstock()?;
    host.start_penstock()?;
    guest.sh_until("test -s /run/dd")?;
    let ended = guest.sh("cat /run/dd /run/dd.log")?;
    ensure!(ended.starts_with('0'), "{ended}");
    Ok(())
}

fn guest_uses_a_disk_from_attach_to_detach(release: Release) -> Result<()> {
    let mut host = Host::start(release)?;
    host.define(&DomainXml::new("d"))?;
    // Packed rings here; the disks that come later have split ones.
    host.ok("penstock volume create web 256M && penstock libvirt attach d web --packed")?;
    let mut guest = host.boot("d")?;
    for option in ["", "--inactive"] {
        let listed = disks(&mut host, "d", option)?;
        ensure!(
            listed.contains("vda      /run/penstock/web.sock"),
            "{listed}"
        );
    }
    let xml = host.ok("virsh dumpxml d")?;
    host.validate("live.xml", "domain", &xml)?;
    guest.sh_until("test -b /dev/vda")?;
    let serial = guest.sh("cat /sys/block/vda/serial")?;
    ensure!(!serial.is_empty(), "the disk has no serial");
    let features = guest.sh("cat /sys/block/vda/device/features")?;
    assert_eq!(features.as_bytes().get(RING_PACKED), Some(&b'1'));
    guest.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /init /mnt && sync")?;

    // libvirt has no resize for such disks; Penstock's own reaches the guest.
    let refused = host.fails("virsh blockresize d vda 512M")?;
    ensure!(
        refused.contains("not supported for vhostuser disk"),
        "{refused}"
    );
    host.ok("penstock volume resize web 512M")?;
    guest.sh_until("test $(blockdev --getsize64 /dev/vda) = $((512 << 20))")?;

    goes_on_after_a_kill(&mut host, &mut guest, "/mnt/big")?;
    guest.sh("echo 3 > /proc/sys/vm/drop_caches && cmp /init /mnt/init")?;

    // A check of this domain finds nothing that does not work.
    let checked = host.json("penstock libvirt check d --json")?;
    ensure!(checked["state"] != "fail", "{checked}");
    ensure!(checked.to_string().contains("packed"), "{checked}");

    // A second disk with --config (from the next start on), then with --live (until the domain stops).
    host.ok(
        "penstock volume create next 64M && penstock libvirt attach d next --config --target vdc",
    )?;
    ensure!(!disks(&mut host, "d", "")?.contains("next.sock"));
    ensure!(disks(&mut host, "d", "--inactive")?.contains("vdc      /run/penstock/next.sock"));
    host.ok("penstock volume create now 64M")?;
    let told = host.ok("penstock libvirt attach d now --live 2>&1")?;
    ensure!(!disks(&mut host, "d", "--inactive")?.contains("now.sock"));
    guest.sh_until("test -b /dev/vdb")?;
    // libvirt 9.0 tells QEMU not to connect again for a disk that comes while the guest runs.
    let is_warned = told.contains("libvirt 9.0 does not let");
    assert_eq!(is_warned, release == Release::Installed, "{told}");
    if !is_warned {
        goes_on_after_a_kill(&mut host, &mut guest, "/dev/vdb")?;
    }
    host.ok("penstock libvirt detach d now")?;
    guest.sh_until("test ! -e /dev/vdb")?;

    // Taken from the running guest alone, the attachment stays for the next start.
    guest.sh("umount /mnt")?;
    host.ok("penstock libvirt detach d web --live")?;
    guest.sh_until("test ! -e /dev/vda")?;
    assert_eq!(
        host.attached()?,
        ["/run/penstock/next.sock", "/run/penstock/web.sock"]
    );
    host.ok("penstock libvirt detach d web --config && penstock libvirt detach d next")?;
    ensure!(host.attached()?.is_empty());
    ensure!(!disks(&mut host, "d", "--inactive")?.contains("penstock"));
    guest.expect_no_io_errors()?;
    host.ok("virsh destroy d").map(drop)
}

#[test]
fn a_guest_uses_a_disk_from_attach_to_detach() -> Result<()> {
    guest_uses_a_disk_from_attach_to_detach(Release::Installed)?;
    match Form::of_this_run() {
        Form::Short => Ok(()),
        Form::Long => {
            guest_uses_a_disk_from_attach_to_detach(Release::Debian13).context("on Debian 13")
        }
    }
}

/// A guest that stands still answers no request to let a disk go.
#[test]
fn a_disk_stays_whole_if_the_guest_keeps_it() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.define(&DomainXml::new("stuck"))?;
    let _channel = host.channel("stuck")?;
    host.ok("virsh start stuck --paused")?;
    host.ok("penstock volume create web 64M && penstock libvirt attach stuck web")?;
    let told = host.refused("penstock libvirt detach stuck web")?;
    ensure!(told.contains("does not let vda go"), "{told}");
    for option in ["", "--inactive"] {
        ensure!(disks(&mut host, "stuck", option)?.contains("web.sock"));
    }
    assert_eq!(host.attached()?, ["/run/penstock/web.sock"]);
    host.ok("virsh destroy stuck && penstock libvirt detach stuck web")?;
    ensure!(host.attached()?.is_empty());
    Ok(())
}
