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
    host.ok(
        "penstock attach volume a--b --socket /run/penstock/a_--_b.sock --queues 8 && penstock attach \
         volume ro --socket /run/penstock/ro.sock --read-only",
    )?;
    let before = host.ok("virsh dumpxml d --inactive")?;
    for (target, command) in [
        ("vdb", "disk-xml a--b"),
        ("vdd", "disk-xml a--b --target vdd --queues 1"),
        (
            "vdaa",
            "disk-xml a--b --target vdaa --queue-size 256 --boot-order 2",
        ),
        ("vdb", "disk-xml ro"),
        ("vde", "disk-xml a--b --target vde --packed"),
    ] {
        let disk = host.ok(&format!("penstock libvirt {command}"))?;
        // The schema is of whole domains.
        let xml = host.ok("virsh dumpxml d --inactive")?;
        let with_disk = xml.replacen("</emulator>", &format!("</emulator>{disk}"), 1);
        host.validate("with-disk.xml", "domain", &with_disk)
            .with_context(|| command.to_owned())?;
        if command.contains("--boot-order") {
            // libvirt takes one order or the other, and completes every domain with the order of <os>.
            let without = with_disk.replacen("<boot dev='hd'/>", "", 1);
            let path = host.write("ordered.xml", &without)?;
            host.ok(&format!("virsh define --validate {}", path.display()))?;
            let xml = host.ok("virsh dumpxml d --inactive")?;
            ensure!(xml.contains("<boot order='2'/>"), "{xml}");
            let path = host.write("plain.xml", &before)?;
            host.ok(&format!("virsh define {}", path.display()))?;
            continue;
        }
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
    // libvirt would write such a path into the domain as it is, and not read it again.
    host.ok(
        "penstock volume create odd 64M && penstock attach volume odd --socket \"/run/penstock/it's.sock\"",
    )?;
    for command in [
        "disk-xml odd",
        "attach d odd --socket '/run/penstock/a&b.sock'",
    ] {
        let told = host.refused(&format!("penstock libvirt {command}"))?;
        ensure!(told.contains("plain name"), "{told}");
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

/// What `check` says of a domain that does not work.
fn failed_check(host: &mut Host, domain: &str) -> Result<Value> {
    let command = format!("penstock libvirt check {domain} --json");
    let typed = host.machine().type_in(&command)?;
    assert_eq!(typed.status, 1, "{command}");
    let report: Value = serde_json::from_str(&typed.stdout)?;
    ensure!(report["state"] == "fail", "{report}");
    Ok(report)
}

/// A domain whose disk does not connect again.
fn domain() -> DomainXml {
    let mut domain = DomainXml::new("bad");
    domain.devices =
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='8'/>\
                      <source type='unix' path='/run/penstock/web.sock'/><target dev='vda' \
                      bus='virtio'/></disk>"
            .to_owned();
    domain
}

#[test]
fn check_names_what_is_wrong_and_what_helps() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.ok("penstock volume create web 64M")?;
    let mut private = DomainXml::new("private");
    private.is_shared = false;
    host.define(&private)?;
    let report = failed_check(&mut host, "private")?;
    let memory = finding(&report, "shared memory")?;
    ensure!(memory["state"] == "fail", "{memory}");
    let fix = memory["fix"].as_str().unwrap_or_default();
    ensure!(fix.contains("<access mode='shared'/>"), "{memory}");

    host.define(&domain())?;
    host.ok("penstock attach volume web --socket /run/penstock/web.sock --queues 2")?;
    host.ok("chmod 600 /run/penstock/web.sock && chown root /run/penstock/web.sock")?;
    let report = failed_check(&mut host, "bad")?;
    for (check, state, fix) in [
        ("shared memory", "ok", ""),
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

/// What the domain asks for, and what its attachment gives.
#[test]
fn check_tells_who_may_write_and_whether_the_hook_is_there() -> Result<()> {
    let mut host = Host::start(Release::Installed)?;
    host.ok("penstock volume create web 64M")?;
    host.define(&domain())?;
    host.ok("penstock attach volume web --socket /run/penstock/web.sock --queues 8 --read-only")?;
    let report = failed_check(&mut host, "bad")?;
    let access = finding(&report, "access")?;
    ensure!(access["state"] == "warn", "{access}");
    host.ok(
        "virsh metadata bad urn:penstock:libvirt:1 --key penstock --config --set \
         \"<disk volume='web' target='vda' readonly='yes'/>\"",
    )?;
    let report = failed_check(&mut host, "bad")?;
    for (check, state, fix) in [
        ("access", "ok", ""),
        ("hook", "fail", "penstock libvirt hook install"),
    ] {
        let found = finding(&report, check)?;
        let has_fix =
            fix.is_empty() || found["fix"].as_str().is_some_and(|text| text.contains(fix));
        ensure!(found["state"] == state && has_fix, "{found}");
    }
    host.ok("penstock libvirt hook install")?;
    let report = failed_check(&mut host, "bad")?;
    ensure!(finding(&report, "hook")?["state"] == "ok", "{report}");
    host.ok("penstock libvirt hook remove")?;
    Ok(())
}
