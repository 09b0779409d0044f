//! The package in a Debian machine with systemd: installed, killed, restarted, removed and purged, and in the
//! long form also upgraded under load, hung and rebooted, on both releases.
//!
//! A load stands for a guest: a front end in the machine, with the rights of libvirt's QEMU, that writes and
//! checks what it wrote ([`ring-load`](../src/bin/ring_load.rs)).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::document::console_lines;
use guest_rig::Form;
use package_rig::{Equipment, Machine, Payload, Release};

/// For what a loaded machine under TCG does within seconds.
const LIMIT: Duration = Duration::from_secs(120);
/// Older and newer, as Debian compares them.
const VERSIONS: [&str; 2] = ["0.1~before", "0.1"];
/// Number that Debian reserves for libvirt's QEMU and its group.
const QEMU: &str = "setpriv --reuid=64055 --regid=64055 --clear-groups";
const PID: &str = "systemctl show --property=MainPID --value penstock";

/// A package with what libvirt's own scripts do about its user and group, in their order.
const LIBVIRT: &str = "mkdir -p /opt/libvirt/DEBIAN /opt/libvirt/usr/lib/systemd/system && cd /opt && \
    echo '[Unit]' > libvirt/usr/lib/systemd/system/libvirt-guests.service && \
    printf 'Package: libvirt\\nVersion: 1\\nArchitecture: all\\nMaintainer: a <a@b>\\nDescription: a\\n' \
    > libvirt/DEBIAN/control && \
    printf '#!/bin/sh\\nset -e\\ngetent passwd libvirt-qemu >/dev/null || \
    useradd --system --uid 64055 --gid kvm libvirt-qemu\\n\
    getent group libvirt-qemu >/dev/null || { groupadd --system --gid 64055 libvirt-qemu; \
    usermod -aG libvirt-qemu libvirt-qemu; }\\n' > libvirt/DEBIAN/postinst && \
    chmod 755 libvirt/DEBIAN/postinst && dpkg-deb --root-owner-group -Zgzip --build libvirt libvirt.deb";

fn payload() -> Result<Payload> {
    let load = Path::new(env!("CARGO_BIN_EXE_ring-load"));
    let payload = Payload::new()?.with(load, "ring-load")?;
    let mut versions = VERSIONS.iter().enumerate();
    versions.try_fold(payload, |payload, (index, version)| {
        payload.with_package(version, &format!("{index}.deb"))
    })
}

/// The commands below a heading of docs/INSTALL.md that are typed on the machine called `prompt`. This one
/// has no network.
fn document(heading: &str, prompt: &str) -> Result<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/INSTALL.md");
    let text = std::fs::read_to_string(&path).context("read docs/INSTALL.md")?;
    let lines = console_lines(&text, heading).into_iter();
    let typed = lines.filter(|line| line.prompt == prompt);
    let typed = typed.map(|line| line.command.replace("10.0.0.1", "127.0.0.1"));
    let typed: Vec<String> = typed.collect();
    ensure!(typed.len() >= 3, "{heading}: {typed:?}");
    Ok(typed)
}

fn install(machine: &mut Machine, index: usize) -> Result<String> {
    machine.sh(&format!("dpkg -i {}/{index}.deb 2>&1", Payload::IN_MACHINE))
}

#[test]
fn package_serves_guests_and_leaves_their_data() -> Result<()> {
    let form = Form::of_this_run();
    for release in form.pick(
        &[Release::Bookworm][..],
        &[Release::Bookworm, Release::Trixie],
    ) {
        let mut machine = Machine::boot(*release, Equipment::Bare, payload()?)?;
        let qemu = |machine: &mut Machine| machine.sh("id -nG libvirt-qemu");
        // Both orders.
        if *release == Release::Trixie {
            machine.sh(&format!("{LIBVIRT} && dpkg -i libvirt.deb"))?;
            installed(&mut machine)?;
        } else {
            installed(&mut machine)?;
            machine.sh(&format!("{LIBVIRT} && dpkg -i libvirt.deb"))?;
        }
        let groups = qemu(&mut machine)?;
        ensure!(groups.contains("libvirt-qemu"), "QEMU's groups: {groups}");
        discovered(&mut machine)?;
        confined(&mut machine, *release)?;
        started(&mut machine, *release)?;
        sockets(&mut machine)?;
        if *release == Release::Bookworm {
            disk_added(&mut machine)?;
        }
        killed(&mut machine, *release, form.pick(1, 10))?;
        served_without_the_daemon(&mut machine)?;
        installed_beside_a_mount(&mut machine)?;
        if form == Form::Long {
            upgraded(&mut machine)?;
            hung(&mut machine)?;
            machine = rebooted(machine)?;
        }
        match release {
            Release::Bookworm => second_node(&mut machine)?,
            Release::Trixie => machine = block_device(machine)?,
        }
        removed(&mut machine)?;
        purged(&mut machine)?;
    }
    Ok(())
}

/// Nothing runs after the installation, and all is there for `init`.
fn installed(machine: &mut Machine) -> Result<()> {
    let printed = install(machine, 0)?;
    ensure!(
        printed.contains("systemctl enable --now penstock"),
        "{printed}"
    );
    machine.refused("systemctl is-active penstock")?;
    machine.refused("systemctl is-enabled penstock")?;
    let groups = machine.sh("id -nG penstock")?;
    ensure!(groups == "penstock libvirt-qemu", "groups {groups}");
    let dirs = machine.sh("stat -c '%U %G %a' /var/lib/penstock /run/penstock")?;
    ensure!(
        dirs == "penstock penstock 700\npenstock penstock 711",
        "{dirs}"
    );
    let left = machine.sh("ls -A /var/lib/penstock")?;
    ensure!(left.is_empty(), "made at the installation: {left}");
    Ok(())
}

/// Who looks for back ends by QEMU's conventions finds a program that runs and says what it can do.
fn discovered(machine: &mut Machine) -> Result<()> {
    let printed = machine.sh("cat /usr/share/qemu/vhost-user/*-penstock-blk.json")?;
    let printed: serde_json::Value = serde_json::from_str(&printed)?;
    let program = printed["binary"]
        .as_str()
        .context("the file names no program")?;
    let can = machine.sh(&format!("{program} --print-capabilities"))?;
    let can: serde_json::Value = serde_json::from_str(&can)?;
    ensure!(
        printed["type"] == "block" && can["type"] == "block",
        "{printed} {can}"
    );
    Ok(())
}

/// systemd finds no fault with the services, and rates them as safe.
fn confined(machine: &mut Machine, release: Release) -> Result<()> {
    for unit in ["penstock.service", "penstock@.service"] {
        let printed = machine.sh(&format!(
            "systemd-analyze verify --man=no /usr/lib/systemd/system/{unit} 2>&1"
        ))?;
        ensure!(!printed.contains("penstock"), "{unit}: {printed}");
    }
    let rating =
        machine.sh("systemd-analyze security --no-pager --threshold=40 penstock.service")?;
    let line = rating.lines().last().unwrap_or_default();
    println!("Debian {}: {line}", release.suite());
    Ok(())
}

/// A node of a cluster on the one release, a node of its own on the other.
fn started(machine: &mut Machine, release: Release) -> Result<()> {
    match release {
        Release::Bookworm => {
            for command in document("## A node of a cluster", "one")? {
                // It stays the only one for a while.
                let command = match command.starts_with("penstock init") {
                    true => format!("{command} --replicas 1"),
                    false => command,
                };
                let printed = machine.sh(&format!("{command} 2>&1"))?;
                if command.starts_with("penstock init") {
                    ensure!(
                        printed.contains("systemctl enable --now penstock"),
                        "{printed}"
                    );
                    let foreign = machine.sh("find /var/lib/penstock ! -user penstock")?;
                    ensure!(foreign.is_empty(), "not the daemon's: {foreign}");
                }
            }
            machine.sh("penstock volume create web 64M")?;
            machine.sh("penstock attach volume web --socket /run/penstock/web.sock")?;
        }
        Release::Trixie => {
            for command in document("## A node of its own", "")? {
                let printed = machine.sh(&format!("{command} 2>&1"))?;
                ensure!(
                    !command.contains("disk-xml") || printed.contains("/run/penstock/web.sock"),
                    "{printed}"
                );
            }
        }
    }
    machine.sh("penstock status && penstock health")?;
    // Nothing that a human would have to act upon, in a start on a fresh machine.
    machine.sh("! journalctl --unit=penstock --no-pager | grep -E ' (WARN|ERROR) '")?;
    let ids = machine.sh(&format!(
        "awk '/^(Uid|CapEff|NoNewPrivs|Seccomp):/ {{print $2}}' /proc/$({PID})/status; id -u penstock"
    ))?;
    let words: Vec<&str> = ids.lines().collect();
    ensure!(
        words.len() == 5 && words[0] == words[4] && words[2..4] == ["1", "2"],
        "identity, capabilities, and what is in force: {words:?}"
    );
    // IPC_LOCK alone.
    ensure!(words[1] == "0000000000004000", "capabilities {}", words[1]);
    Ok(())
}

/// libvirt's QEMU connects, and nobody else.
fn sockets(machine: &mut Machine) -> Result<()> {
    let socket = machine.sh("stat -c '%U %G %a' /run/penstock/web.sock")?;
    ensure!(socket == "penstock libvirt-qemu 660", "{socket}");
    let load = format!(
        "{}/ring-load /run/penstock/web.sock /dev/null",
        Payload::IN_MACHINE
    );
    let kvm = "setpriv --reuid=65534 --regid=$(getent group kvm | cut -d: -f3) --clear-groups";
    let printed = machine.refused(&format!("{kvm} {load} /tmp/report 2>&1"))?;
    ensure!(printed.contains("Permission denied"), "{printed}");
    machine.sh(&format!("{QEMU} {load} /tmp/report"))?;
    let printed = machine
        .refused("setpriv --reuid=65534 --regid=65534 --clear-groups penstock status 2>&1")?;
    ensure!(printed.contains("penstock: error:"), "{printed}");
    Ok(())
}

/// A disk of root's is taken into use by the confined daemon, which goes on as the same process, and let go.
fn disk_added(machine: &mut Machine) -> Result<()> {
    let (disk, default) = (Machine::SPARE, "/var/lib/penstock/devices/0.img");
    let old = machine.sh(PID)?;
    let add = format!("penstock device add {disk} 2>&1");
    let printed = machine.refused(&add)?;
    ensure!(
        printed.contains(&format!("name {disk} and {default} under `devices`")),
        "{printed}"
    );
    machine.sh(&format!(
        "sed -i '1i devices = [\"{default}\", \"{disk}\"]' /etc/penstock/penstock.toml"
    ))?;
    let printed = machine.sh(&add)?;
    ensure!(printed.contains("is in service"), "{printed}");
    let now = machine.sh(PID)?;
    ensure!(
        now == old,
        "the daemon was started anew: it was {old} and is {now}"
    );
    // The next start opens it by the configuration.
    machine.sh("systemctl restart penstock")?;
    let in_service = format!("penstock device list | grep -E '{disk} +ok'");
    machine.sh_until(&in_service, LIMIT)?;
    machine.sh(&format!("penstock device remove {disk} --yes 2>&1"))?;
    machine.sh_until(
        &format!(
            "penstock device list > /run/devices && ! grep {disk} /run/devices && \
             sed -i 1d /etc/penstock/penstock.toml"
        ),
        LIMIT,
    )?;
    Ok(())
}

/// The program that tools find serves a volume while the daemon is stopped.
fn served_without_the_daemon(machine: &mut Machine) -> Result<()> {
    let socket = "/run/penstock/alone.sock";
    machine.sh("penstock volume create alone 64M && systemctl stop penstock")?;
    machine.sh(&format!(
        "systemd-run --quiet --unit=alone --property=User=penstock --property=LimitMEMLOCK=infinity \
         --property=RuntimeDirectory=penstock --property=RuntimeDirectoryPreserve=yes \
         /usr/libexec/penstock/vhost-user-blk --data /var/lib/penstock --volume alone --socket-path {socket}"
    ))?;
    machine
        .sh_until(&format!("test -S {socket}"), LIMIT)
        .context("the program makes no socket")?;
    machine.sh("rm -f /tmp/report /tmp/stop")?;
    let load = format!(
        "{}/ring-load {socket} /tmp/stop /tmp/report",
        Payload::IN_MACHINE
    );
    machine.sh(&format!("(sleep 3; touch /tmp/stop) & {load}"))?;
    let seen: serde_json::Value = serde_json::from_str(&machine.sh("cat /tmp/report")?)?;
    ensure!(
        seen["wrong_blocks"] == 0 && seen["writes"].as_u64() > Some(0),
        "{seen}"
    );
    machine.sh("systemctl stop alone && systemctl start penstock")?;
    machine.sh_until("penstock volume delete alone --yes", LIMIT)?;
    Ok(())
}

/// Writes beside what is done to the daemon; returns what the load saw.
fn under_load(
    machine: &mut Machine,
    act: impl FnOnce(&mut Machine) -> Result<()>,
) -> Result<serde_json::Value> {
    machine.sh(&format!(
        "rm -rf /run/load && mkdir /run/load && chown 64055 /run/load && \
         systemd-run --quiet --unit=load {QEMU} {}/ring-load /run/penstock/web.sock /run/load/stop \
         /run/load/report && sleep 2",
        Payload::IN_MACHINE
    ))?;
    act(machine)?;
    machine.sh("sleep 2; touch /run/load/stop")?;
    let report = machine
        .sh_until(
            "cat /run/load/report || { systemctl is-failed load && exit 0; exit 1; }",
            LIMIT,
        )
        .context("the load tells nothing")?;
    let journal = machine.sh("journalctl --unit=load --no-pager | tail -5")?;
    let seen: serde_json::Value =
        serde_json::from_str(&report).with_context(|| format!("{report}\n{journal}"))?;
    ensure!(seen["wrong_blocks"] == 0, "{seen}");
    Ok(seen)
}

/// Kills the daemon; systemd starts it again, and the guest sees a pause.
fn killed(machine: &mut Machine, release: Release, kills: u64) -> Result<()> {
    let seen = under_load(machine, |machine| {
        for _ in 0..kills {
            let old = machine.sh(PID)?;
            machine.sh(&format!("kill -9 {old}"))?;
            back(machine, &old)?;
            machine.sh("sleep 2")?;
        }
        Ok(())
    })?;
    println!("Debian {}: kill -9, {kills} times: {seen}", release.suite());
    ensure!(seen["reconnects"].as_u64() >= Some(kills), "{seen}");
    let seen = under_load(machine, |machine| {
        machine.sh("systemctl restart penstock")?;
        Ok(())
    })?;
    println!("Debian {}: systemctl restart: {seen}", release.suite());
    ensure!(seen["reconnects"].as_u64() >= Some(1), "{seen}");
    // An emulated machine is at times too slow for the watchdog.
    machine.sh(
        "! journalctl --unit=penstock --no-pager | grep -v 'the watchdog is not told' \
         | grep -E ' ERROR |panicked'",
    )?;
    Ok(())
}

/// Waits until another process than `old` serves.
fn back(machine: &mut Machine, old: &str) -> Result<()> {
    let new = format!("systemctl is-active penstock && test $({PID}) != {old}");
    machine.sh_until(&new, LIMIT)?;
    Ok(())
}

/// A package leaves a daemon alone whose filesystem a guest has mounted, says so, and restarts it once the
/// guest is gone. A process that holds the connection stands for the guest.
fn installed_beside_a_mount(machine: &mut Machine) -> Result<()> {
    let socket = "/run/penstock/tree.sock";
    let connected = format!("penstock attachment list | grep {socket} | grep -qw connected");
    machine.sh(&format!(
        "penstock fs create tree && penstock attach fs tree --socket {socket} --tag tree && \
         systemd-run --quiet --unit=mount perl -MIO::Socket::UNIX \
         -e 'push @guest, IO::Socket::UNIX->new(Peer => shift) || die; sleep' {socket}"
    ))?;
    machine.sh_until(&connected, LIMIT)?;
    let old = machine.sh(PID)?;
    let printed = install(machine, 0)?;
    ensure!(
        printed.contains("penstock.service was not restarted")
            && printed.contains("systemctl restart penstock.service"),
        "{printed}"
    );
    let now = machine.sh(PID)?;
    ensure!(now == old, "restarted beside a mount: {old}, {now}");
    machine.sh("systemctl is-active mount && systemctl stop mount")?;
    machine.sh_until(&format!("! {{ {connected}; }}"), LIMIT)?;
    let printed = install(machine, 0)?;
    ensure!(!printed.contains("was not restarted"), "{printed}");
    back(machine, &old)?;
    machine.sh_until(&format!("penstock detach {socket} --yes"), LIMIT)?;
    machine.sh("penstock fs delete tree --yes")?;
    Ok(())
}

/// The new version is taken into use while a guest writes, and an edited configuration stays.
fn upgraded(machine: &mut Machine) -> Result<()> {
    machine.sh("echo '# mine' >> /etc/penstock/penstock.toml")?;
    let old = machine.sh(PID)?;
    let seen = under_load(machine, |machine| install(machine, 1).map(drop))?;
    println!("upgrade: {seen}");
    ensure!(seen["reconnects"].as_u64() >= Some(1), "{seen}");
    back(machine, &old)?;
    let version = machine.sh("dpkg-query --show --showformat='${Version}' penstock")?;
    ensure!(version == VERSIONS[1], "{version}");
    machine.sh("grep -qx '# mine' /etc/penstock/penstock.toml && systemctl is-enabled penstock")?;
    Ok(())
}

/// The watchdog ends a daemon that hangs, and systemd starts another.
fn hung(machine: &mut Machine) -> Result<()> {
    machine.sh(
        "mkdir -p /run/systemd/system/penstock.service.d && \
         printf '[Service]\\nWatchdogSec=10\\n' > /run/systemd/system/penstock.service.d/watchdog.conf && \
         systemctl daemon-reload && systemctl restart penstock && sleep 25",
    )?;
    // A daemon that is well is left alone.
    let old = machine.sh(PID)?;
    machine.sh("! journalctl --unit=penstock --no-pager | grep -i 'watchdog timeout'")?;
    machine.sh(&format!("kill -STOP {old}"))?;
    back(machine, &old)?;
    machine.sh("journalctl --unit=penstock --no-pager | grep -i 'watchdog timeout'")?;
    machine.sh("rm -r /run/systemd/system/penstock.service.d && systemctl daemon-reload")?;
    Ok(())
}

/// The service and its attachments are there after a reboot.
fn rebooted(machine: Machine) -> Result<Machine> {
    let mut machine = machine.reboot()?;
    machine.sh_until("systemctl is-active penstock", LIMIT)?;
    let socket = machine.sh("stat -c '%U %G %a' /run/penstock/web.sock")?;
    ensure!(socket == "penstock libvirt-qemu 660", "{socket}");
    under_load(&mut machine, |_| Ok(()))?;
    Ok(machine)
}

/// A further node on this machine, by the template.
fn second_node(machine: &mut Machine) -> Result<()> {
    let token = machine.sh("penstock token create --roles meta,storage,host 2> /dev/null")?;
    for command in document("## More nodes on one machine", "")? {
        machine.sh(&format!("{} 2>&1", command.replace("TOKEN", &token)))?;
    }
    machine.sh_until("penstock health --data /var/lib/penstock-b", LIMIT)?;
    // Without the warning of a machine that is too slow to have a metadata leader all the time.
    let nodes = machine.sh("penstock node list --data /var/lib/penstock 2> /dev/null")?;
    ensure!(nodes.lines().count() == 3, "{nodes}");
    Ok(())
}

/// A volume is a disk of the machine, within the service's limits, and outlives the daemon and the machine.
fn block_device(mut machine: Machine) -> Result<Machine> {
    // One shell types them all: they use variables.
    let typed = document("## A volume as a disk of the host", "")?;
    machine.sh(&typed.join(" 2>&1 && "))?;
    machine.sh(
        "head -c 8000000 /dev/urandom > /srv/logs/a && sync && md5sum /srv/logs/a > /root/sum",
    )?;
    for stop in ["kill -9 $OLD", "systemctl restart penstock"] {
        let old = machine.sh(PID)?;
        machine.sh(&format!("OLD={old}; {stop}"))?;
        back(&mut machine, &old)?;
        machine.sh(
            "echo 3 > /proc/sys/vm/drop_caches; md5sum -c /root/sum && touch /srv/logs/b && sync",
        )?;
    }
    let printed = machine.refused("penstock detach logs 2>&1")?;
    ensure!(printed.contains("unmount"), "{printed}");
    let mut machine = machine.reboot()?;
    machine.sh_until("mountpoint /srv/logs", LIMIT)?;
    machine.sh("md5sum -c /root/sum && umount /srv/logs && sed -i /srv.logs/d /etc/fstab")?;
    machine.sh("penstock detach logs && penstock volume delete logs --yes")?;
    machine.sh("! ls /dev/vduse/penstock-* && test ! -e /dev/penstock/logs")?;
    machine.sh("! dmesg | grep -iE 'I/O error|ext4.*error'")?;
    Ok(machine)
}

/// The package goes, and nothing else; installed again, it goes on.
fn removed(machine: &mut Machine) -> Result<()> {
    machine.sh("mkdir -p /etc/libvirt && penstock libvirt hook install")?;
    machine.sh("dpkg -r penstock 2>&1")?;
    machine.refused("systemctl is-active penstock penstock@b")?;
    machine.sh("test ! -e /usr/bin/penstock && test -e /etc/penstock/penstock.toml")?;
    install(machine, 1)?;
    // What ran runs again.
    machine.sh_until(
        "penstock volume show web --data /var/lib/penstock && systemctl is-active penstock",
        LIMIT,
    )?;
    Ok(())
}

/// No trace is left but the volumes' data, and the administrator is told where those are.
fn purged(machine: &mut Machine) -> Result<()> {
    machine.sh("rm -f /etc/penstock/b.toml; test -e /etc/libvirt/hooks/qemu.d/50-penstock")?;
    let printed = machine.sh("dpkg -P penstock 2>&1")?;
    machine.refused("test -e /etc/libvirt/hooks/qemu.d/50-penstock")?;
    ensure!(printed.contains("rm -r /var/lib/penstock"), "{printed}");
    machine.sh("test -s /var/lib/penstock/devices/0.img")?;
    let left = machine.sh(
        "find /etc /usr /run /var -xdev -name '*penstock*' ! -path '/var/lib/penstock*' ! -path '/var/log/*' \
         ! -path '/run/systemd/*'; systemctl list-unit-files --no-legend 'penstock*' || true",
    )?;
    ensure!(left.is_empty(), "left after the purge: {left}");
    Ok(())
}
