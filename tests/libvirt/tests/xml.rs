//! Every XML that is emitted is libvirt's, and `check` says what is missing.

use anyhow::{Context, Result, ensure};
use libvirt_rig::{DomainXml, Host, Release};
use serde_json::Value;

/// What `disk-xml` prints for some options, in the domain that virsh takes it into.
#[test]
fn every_emitted_disk_is_valid_and_taken_by_libvirt() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.define(&DomainXml::new("d"))?;
    host.ok("penstock volume create a--b 64M && penstock volume create ro 64M")?;
    let odd = "/run/penstock/it\\'s_\\&_\\<odd\\>.sock";
    host.ok(&format!(
        "penstock attach volume a--b --socket {odd} --queues 8 && penstock attach volume ro --socket \
         /run/penstock/ro.sock --read-only"
    ))?;
    for (target, command) in [
        ("vdb", "disk-xml a--b"),
        ("vdd", "disk-xml a--b --target vdd --queues 1"),
        (
            "vdaa",
            "disk-xml a--b --target vdaa --queue-size 1024 --boot-order 2",
        ),
        ("vdb", "disk-xml ro"),
    ] {
        let disk = host.ok(&format!("penstock libvirt {command}"))?;
        // The schema is of whole domains.
        let xml = host.ok("virsh dumpxml d --inactive")?;
        let with_disk = xml.replacen("</emulator>", &format!("</emulator>{disk}"), 1);
        host.validate("with-disk.xml", "domain", &with_disk)
            .with_context(|| command.to_owned())?;
        let path = host.write("disk.xml", &disk)?;
        host.ok(&format!(
            "virsh attach-device d {} --config",
            path.display()
        ))?;
        let listed = host.ok("virsh domblklist d --inactive")?;
        ensure!(listed.contains(&format!(" {target} ")), "{listed}");
        host.ok(&format!(
            "virsh detach-device d {} --config",
            path.display()
        ))?;
    }
    let read_only = host.ok("penstock libvirt disk-xml ro")?;
    ensure!(read_only.contains("read-only"), "{read_only}");
    Ok(())
}

fn finding<'a>(report: &'a Value, check: &str) -> Result<&'a Value> {
    let findings = report["findings"].as_array().context("no findings")?;
    let found = findings.iter().find(|one| one["check"] == check);
    found.with_context(|| format!("no {check} in {report}"))
}

#[test]
fn check_names_what_is_wrong_and_what_helps() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.ok("penstock volume create web 64M")?;
    let mut domain = DomainXml::new("bad");
    domain.is_shared = false;
    domain.devices =
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='8'/>\
                      <source type='unix' path='/run/penstock/web.sock'/><target dev='vda' \
                      bus='virtio'/></disk>"
            .to_owned();
    host.define(&domain)?;
    host.ok("penstock attach volume web --socket /run/penstock/web.sock --queues 2")?;
    host.ok("chmod 600 /run/penstock/web.sock && chown root /run/penstock/web.sock")?;
    let typed = host
        .machine()
        .type_in("penstock libvirt check bad --json")?;
    assert_eq!(typed.status, 1);
    let report: Value = serde_json::from_str(&typed.stdout)?;
    assert_eq!(report["state"], "fail");
    for (check, state, fix) in [
        ("shared memory", "fail", "<access mode='shared'/>"),
        (
            "reconnect",
            "fail",
            "<reconnect enabled='yes' timeout='1'/>",
        ),
        ("queues", "fail", "queues='2'"),
        ("socket", "fail", "socket_owner = \":libvirt-qemu\""),
        ("attachment", "ok", ""),
        ("queue size", "ok", ""),
        ("machine", "ok", ""),
        ("apparmor", "ok", ""),
    ] {
        // A machine that confines with AppArmor lacks the rule, too.
        let found = finding(&report, check)?;
        let is_expected = found["state"] == state || check == "apparmor";
        let has_fix =
            fix.is_empty() || found["fix"].as_str().is_some_and(|text| text.contains(fix));
        ensure!(is_expected && has_fix, "{found}");
    }

    // With what it says to paste, it is satisfied.
    host.ok("penstock detach web")?;
    host.define(&DomainXml::new("good"))?;
    host.ok("penstock libvirt attach good web")?;
    let text = host.ok("penstock libvirt check good")?;
    ensure!(
        !text.contains("fail") && text.contains("ok    vda reconnect"),
        "{text}"
    );
    Ok(())
}
