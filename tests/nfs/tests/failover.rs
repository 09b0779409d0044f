//! An export through all that happens to its NFS nodes. A client sees pauses, and nothing else.

use anyhow::{Result, ensure};
use guest_rig::Form;
use nfs_rig::load::{self, Protocol};
use nfs_rig::{Fleet, NFS_NODES, STORE, other};

/// Rounds of moves and kills over each protocol in the long form.
const ROUNDS: usize = 5;
/// The export of these tests.
const CREATE: &str =
    "nfs export create data --volume data --size 320M --address 10.9.0.50/24 --no-root-squash";

/// What cannot be exported is told in one line, and leaves nothing.
fn refuse_what_cannot_be(fleet: &mut Fleet) -> Result<()> {
    let [first, second] = NFS_NODES;
    fleet.ok(STORE, "volume create foreign 64M")?;
    fleet.ok(first, "attach volume foreign --block 2> /dev/null")?;
    fleet.sh(first, "mke2fs -q $(readlink /dev/penstock/foreign)")?;
    let export = "nfs export create bad --clients 10.9.0.0/24 --volume";
    let told = fleet.refused(second, &format!("{export} foreign"))?;
    ensure!(
        told.contains("attached") && told.contains("foreign"),
        "{told}"
    );
    fleet.ok(first, "detach foreign --yes 2> /dev/null")?;
    for (number, words, expected) in [
        (
            first,
            format!("{export} foreign"),
            "ext2, which is never overwritten",
        ),
        (
            STORE,
            format!("{export} new --size 320M"),
            "run this on an NFS node: gw2, gw3",
        ),
        (first, format!("{export} nope"), "--size"),
        (
            first,
            format!("{export} foreign --size 1G"),
            "exists already",
        ),
        (first, format!("{export} small --size 16M"), "mkfs.xfs"),
        (
            first,
            "nfs export create bad --volume foreign --clients 10.9.0.7/24".into(),
            "10.9.0.0/24",
        ),
        (
            first,
            "nfs export create bad --volume foreign --clients x".into(),
            "'x' is no network",
        ),
        (
            first,
            "nfs export create bad --volume foreign".into(),
            "--clients",
        ),
        (
            first,
            format!("{export} foreign --address 10.8.0.1/24"),
            "10.8.0.0/24",
        ),
        (
            first,
            format!("{export} foreign --address 10.9.0.2/24"),
            "already",
        ),
        (first, "nfs export move nope --to gw3".into(), "nope"),
        (first, "nfs export delete nope --yes".into(), "nope"),
    ] {
        let told = fleet.refused(number, &words)?;
        ensure!(told.contains(expected), "{words}: {told}");
    }
    fleet.sh(second, "rmmod nfsd")?;
    let told = fleet.refused(second, &format!("{export} new --size 320M"))?;
    ensure!(told.contains("nfsd"), "{told}");
    fleet.sh(second, "insmod /modules/nfsd.ko")?;
    let left = fleet.ok(
        STORE,
        "nfs export list --json && penstock --data /run/penstock volume list",
    )?;
    ensure!(
        left.starts_with("[]") && !left.contains("small") && !left.contains("new"),
        "{left}"
    );
    fleet
        .ok(STORE, "volume delete foreign --yes 2> /dev/null")
        .map(drop)
}

/// Waits until another node says that NFS node `number` serves the export.
fn is_served_by(fleet: &mut Fleet, number: u8) -> Result<()> {
    let listed =
        format!("penstock --data /run/penstock nfs export list | grep -q 'gw{number} .*served'");
    fleet.until(STORE, &listed).map(drop)
}

fn report(fleet: &mut Fleet, what: &str, protocol: Protocol) -> Result<()> {
    load::progress(fleet)?;
    let pause = load::take_pause(fleet)?;
    eprintln!(
        "pause of a client over {}: {what}: {pause:.1} s",
        protocol.name()
    );
    Ok(())
}

fn hand_over(fleet: &mut Fleet, protocol: Protocol) -> Result<()> {
    let from = fleet.active()?;
    load::take_pause(fleet)?;
    fleet.ok(
        STORE,
        &format!("nfs export move data --to gw{} 2> /dev/null", other(from)),
    )?;
    report(fleet, "planned move", protocol)?;
    // The NFS node before has let go of everything.
    fleet.until(
        from,
        "! grep -q exports/data /proc/mounts && ! ip addr show eth0 | grep -q 10.9.0.50",
    )?;
    ensure!(fleet.active()? == other(from), "the export did not move");
    Ok(())
}

fn kill_the_daemon(fleet: &mut Fleet, protocol: Protocol) -> Result<()> {
    let from = fleet.active()?;
    load::take_pause(fleet)?;
    fleet.kill_daemon(from)?;
    is_served_by(fleet, other(from))?;
    report(fleet, "kill -9 of the daemon", protocol)?;
    // With nobody left to remove it, the kernel has removed the address.
    fleet.sh(from, "! ip addr show eth0 | grep -q 10.9.0.50")?;
    // It comes back, with a file system mounted that is another's by now.
    fleet.sh(from, "grep -q exports/data /proc/mounts")?;
    fleet.serve(from)?;
    fleet.until(
        from,
        "! grep -q exports/data /proc/mounts && ! ls /dev/vduse/penstock-* 2> /dev/null",
    )?;
    load::progress(fleet)
}

/// The NFS node hears nobody and nobody hears it, while it serves on.
fn cut_off(fleet: &mut Fleet, protocol: Protocol) -> Result<()> {
    let from = fleet.active()?;
    load::take_pause(fleet)?;
    fleet.sh(from, "ip link set eth0 down")?;
    is_served_by(fleet, other(from))?;
    report(fleet, "cut off", protocol)?;
    // The address goes with the lease, before anybody can hear this machine again.
    fleet.until(from, "! ip addr show eth0 | grep -q 10.9.0.50")?;
    fleet.sh(from, "ip link set eth0 up")?;
    fleet.until(
        from,
        "! grep -q exports/data /proc/mounts && ! ls /dev/vduse/penstock-* 2> /dev/null",
    )?;
    load::progress(fleet)
}

fn cut_the_power(fleet: &mut Fleet, protocol: Protocol) -> Result<()> {
    let from = fleet.active()?;
    load::take_pause(fleet)?;
    fleet.cut_power(from)?;
    is_served_by(fleet, other(from))?;
    report(fleet, "power cut", protocol)
}

#[test]
fn a_client_sees_pauses_and_no_errors_whatever_happens_to_nfs_nodes() -> Result<()> {
    let form = Form::of_this_run();
    let mut fleet = Fleet::start()?;
    refuse_what_cannot_be(&mut fleet)?;
    fleet.ok(NFS_NODES[0], CREATE)?;
    let told = fleet.refused(STORE, "volume delete data --yes")?;
    ensure!(told.contains("nfs export delete data"), "{told}");
    let told = fleet.ok(NFS_NODES[0], "nfs status")?;
    ensure!(
        told.contains("rdma 20049") && told.contains("tcp 2049"),
        "{told}"
    );

    load::start(&mut fleet, Protocol::Tcp)?;
    for _ in 0..form.pick(1, ROUNDS) {
        hand_over(&mut fleet, Protocol::Tcp)?;
        kill_the_daemon(&mut fleet, Protocol::Tcp)?;
    }
    for _ in 0..form.pick(1, ROUNDS) {
        cut_off(&mut fleet, Protocol::Tcp)?;
    }
    load::finish(&mut fleet)?;
    load::start(&mut fleet, Protocol::Rdma)?;
    for _ in 0..form.pick(0, ROUNDS) {
        hand_over(&mut fleet, Protocol::Rdma)?;
        kill_the_daemon(&mut fleet, Protocol::Rdma)?;
        cut_off(&mut fleet, Protocol::Rdma)?;
    }
    cut_the_power(&mut fleet, Protocol::Rdma)?;
    load::finish(&mut fleet)?;

    let told = fleet.ok(STORE, "events")?;
    ensure!(told.contains("takes NFS export data over"), "{told}");
    fleet.ok(STORE, "nfs export delete data --yes 2> /dev/null")?;
    let active = NFS_NODES
        .into_iter()
        .find(|number| fleet.vm(*number).is_ok());
    let active = active.expect("one NFS node has power");
    fleet.sh(
        active,
        "test $(cat /proc/fs/nfsd/threads) = 0 && ! grep -q exports/data /proc/mounts",
    )?;
    fleet
        .ok(STORE, "volume delete data --yes 2> /dev/null")
        .map(drop)
}
