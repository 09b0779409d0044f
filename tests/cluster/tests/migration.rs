//! Attachments that move between nodes: a guest that is migrated live under load, and disks without a guest.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use cluster_rig::guest::{SOON, check, cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Load, Promise, Requests, load};
use guest_rig::paths::penstock_binary;
use guest_rig::{BANDWIDTH_MAX, Destination, Disk, Form, GuestImage, MigrationState, Vm, VmConfig};
use serde_json::Value;

/// Migrations there and back, by the form of the test.
const ROUND_TRIPS: (u32, u32) = (1, 5);
/// So slow, in bytes in a second, that the guest's memory takes minutes.
const SLOW: u64 = 512 << 10;
/// An offset that no block of the ledger covers.
const BESIDE_THE_LEDGER: u64 = 4096;
/// A run of fio under translation on a busy machine.
const LONG: Duration = Duration::from_secs(300);

/// A guest under fio on node 1 of a cluster of three.
struct Rig {
    cluster: Cluster,
    image: GuestImage,
    vm: Vm,
    rings: Rings,
    /// The node that the guest is on.
    at: u8,
    /// Each migration: from, to, QEMU's downtime and our pause, in milliseconds.
    pauses: Vec<(u8, u8, u64, u64)>,
}

/// What virtqueues the guest's driver chooses.
#[derive(Clone, Copy)]
enum Rings {
    Split,
    Packed,
}

fn config(socket: PathBuf, rings: Rings) -> VmConfig {
    let disk = Disk::new(socket);
    let mut config = VmConfig::new(vec![match rings {
        Rings::Split => disk,
        Rings::Packed => disk.packed(),
    }]);
    config.memory_mib = 512;
    config
}

/// The attachment of the disk on a node, if it has one.
fn attachment(cluster: &Cluster, node: u8) -> Result<Option<Value>> {
    let list = cluster.node(node)?.daemon().json(&["attachment", "list"])?;
    let list = list.as_array().context("no list")?;
    Ok(list.iter().find(|one| one["volume"] == "disk").cloned())
}

/// Offers the disk of node `from` to node `to`, and creates the incoming attachment there. Returns its
/// socket.
fn incoming(cluster: &Cluster, from: u8, to: u8) -> Result<PathBuf> {
    let name = format!("node{to}");
    let offer = ["attachment", "offer", "disk", "--to", &name];
    cluster.node(from)?.daemon().cli(&offer)?;
    cluster.node(to)?.daemon().attach_incoming("disk")
}

impl Rig {
    fn start(rings: Rings) -> Result<Self> {
        let image = GuestImage::get(|line| eprintln!("{line}"))?;
        let (cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
        let mut vm = Vm::boot(&image, &config(socket, rings))?;
        // What fio writes it reads back and compares, over and over.
        vm.sh("( runs=0
               while [ ! -e /run/stop ]; do
                   fio --name=verify --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=8 \
                       --rw=randwrite --bsrange=512-16k --blockalign=512 --size=8M --fsync=64 \
                       --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randrepeat=0 \
                       > /run/fio.log 2>&1 || { echo failed > /run/result; exit; }
                   runs=$((runs + 1))
               done
               echo $runs > /run/result ) > /dev/null 2>&1 &")?;
        Ok(Self {
            cluster,
            image,
            vm,
            rings,
            at: 1,
            pauses: Vec::new(),
        })
    }

    /// Waits until the guest's requests are answered, wherever it is.
    fn goes_on(&mut self, after: &str) -> Result<()> {
        let progress = "set -- $(cat /sys/block/vda/stat); before=$(($1 + $5)); \
                        for i in $(seq 600); do set -- $(cat /sys/block/vda/stat); \
                        test $(($1 + $5)) -gt $((before + 100)) && exit 0; sleep 0.1; done; exit 1";
        let output = self.vm.run(progress, LONG)?;
        ensure!(
            output.code == 0,
            "after {after} the guest's requests are not answered\n{}",
            self.cluster.report()
        );
        Ok(())
    }

    fn destination(&self, node: u8) -> Result<Destination> {
        let socket = incoming(&self.cluster, self.at, node)?;
        Destination::start(&self.image, &config(socket, self.rings))
    }

    /// The guest is on `to` now, by all that can be asked.
    fn arrived(&mut self, to: u8, downtime_ms: u64) -> Result<()> {
        let from = self.at;
        self.at = to;
        self.goes_on("a migration")?;
        self.cluster
            .wait("the source has nothing", SOON, |cluster| {
                Ok(attachment(cluster, from)?.is_none().then_some(()))
            })?;
        let there = attachment(&self.cluster, to)?.context("nothing at the destination")?;
        ensure!(
            there["state"] == "connected" && there["incoming"] == false,
            "{there}"
        );
        let pause = there["takeover_pause_ms"].as_u64().context("no pause")?;
        self.pauses.push((from, to, downtime_ms, pause));
        Ok(())
    }

    fn migrate(&mut self, to: u8) -> Result<()> {
        let destination = self.destination(to)?;
        let downtime_ms = self.vm.migrate(destination).map_err(|error| {
            error.context(format!("migrate to node {to}\n{}", self.cluster.report()))
        })?;
        self.arrived(to, downtime_ms)
    }

    fn finish(mut self) -> Result<()> {
        for (from, to, downtime_ms, pause_ms) in &self.pauses {
            eprintln!("{from} -> {to}: QEMU's downtime {downtime_ms} ms, our pause {pause_ms} ms");
        }
        self.vm.sh("touch /run/stop")?;
        self.vm.sh_until("test -e /run/result", LONG)?;
        let runs = self.vm.sh("cat /run/result")?;
        ensure!(
            runs.parse::<u32>().is_ok_and(|runs| runs > 0),
            "fio: {runs}\n{}",
            self.vm.sh("cat /run/fio.log")?
        );
        let errors = self.vm.io_errors()?;
        ensure!(errors.is_empty(), "{}", errors.join("\n"));
        self.vm.power_off()
    }
}

#[test]
fn guest_under_load_migrates_there_and_back() -> Result<()> {
    migrates_there_and_back(Rings::Split)
}

#[test]
fn guest_with_packed_rings_migrates_there_and_back() -> Result<()> {
    migrates_there_and_back(Rings::Packed)
}

fn migrates_there_and_back(rings: Rings) -> Result<()> {
    let mut rig = Rig::start(rings)?;
    for _ in 0..Form::of_this_run().pick(ROUND_TRIPS.0, ROUND_TRIPS.1) {
        rig.migrate(2)?;
        rig.migrate(1)?;
    }
    rig.finish()
}

#[test]
fn migration_is_called_off_retried_and_outlives_its_source() -> Result<()> {
    let mut rig = Rig::start(Rings::Split)?;
    // It comes to no end, and is called off: the guest stays where it is.
    let destination = rig.destination(2)?;
    rig.vm.begin_migration(&destination, SLOW)?;
    rig.goes_on("the begin of a migration")?;
    rig.vm.cancel_migration()?;
    let ended = rig.vm.wait_migration()?;
    ensure!(matches!(ended, MigrationState::Failed(_)), "{ended:?}");
    drop(destination);
    rig.goes_on("a migration that was called off")?;
    rig.cluster
        .node(2)?
        .daemon()
        .cli(&["detach", "disk", "--yes"])?;
    rig.goes_on("the end of the destination")?;

    // It is tried again.
    let destination = rig.destination(2)?;
    rig.vm.begin_migration(&destination, SLOW)?;
    rig.goes_on("the begin of the next one")?;
    rig.vm.limit_migration(BANDWIDTH_MAX)?;
    match rig.vm.wait_migration()? {
        MigrationState::Completed { downtime_ms } => {
            rig.vm.continue_at(destination)?;
            rig.arrived(2, downtime_ms)?;
        }
        other => bail!("{other:?}\n{}", rig.cluster.report()),
    }

    // The host that it comes from dies right after the switch.
    let destination = rig.destination(1)?;
    rig.vm.begin_migration(&destination, BANDWIDTH_MAX)?;
    let ended = rig.vm.wait_migration()?;
    rig.cluster.node_mut(2)?.kill()?;
    ensure!(
        matches!(ended, MigrationState::Completed { .. }),
        "{ended:?}"
    );
    rig.vm.continue_at(destination)?;
    rig.goes_on("the death of the source")?;
    rig.cluster.node_mut(2)?.start()?;
    rig.cluster
        .wait("the source has nothing", SOON, |cluster| {
            Ok(attachment(cluster, 2)?.is_none().then_some(()))
        })?;
    rig.finish()
}

#[test]
fn migration_goes_on_when_both_daemons_are_killed_in_its_middle() -> Result<()> {
    goes_on_when_both_daemons_are_killed(Rings::Split)
}

#[test]
fn migration_with_packed_rings_goes_on_when_both_daemons_are_killed() -> Result<()> {
    goes_on_when_both_daemons_are_killed(Rings::Packed)
}

fn goes_on_when_both_daemons_are_killed(rings: Rings) -> Result<()> {
    let mut rig = Rig::start(rings)?;
    let destination = rig.destination(2)?;
    rig.vm.begin_migration(&destination, SLOW)?;
    rig.goes_on("the begin of a migration")?;
    for node in [2, 1] {
        let daemon = rig.cluster.node_mut(node)?;
        daemon.kill()?;
        daemon.start()?;
        rig.goes_on(&format!("a kill of node {node}'s daemon"))?;
    }
    rig.vm.limit_migration(BANDWIDTH_MAX)?;
    match rig.vm.wait_migration()? {
        MigrationState::Completed { downtime_ms } => {
            let there = rig.vm.continue_at(destination);
            there.with_context(|| rig.cluster.report())?;
            rig.arrived(2, downtime_ms)?;
        }
        other => bail!("{other:?}\n{}", rig.cluster.report()),
    }
    rig.finish()
}

#[test]
fn requests_of_a_destination_wait_while_the_source_writes() -> Result<()> {
    let (cluster, old) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&old, ledger());
    goes_on(&cluster, &load, "the start")?;
    let new = incoming(&cluster, 1, 2)?;
    goes_on(&cluster, &load, "the destination's attachment")?;
    // A second guest on the same disk must not write: its request waits, and that is reported.
    let socket = new.clone();
    let intruder = std::thread::spawn(move || Requests::connect(&socket)?.write(BESIDE_THE_LEDGER));
    cluster.wait("node 2 reports that a guest waits", SOON, waits_at_two)?;
    goes_on(&cluster, &load, "the second guest")?;
    ensure!(!intruder.is_finished(), "two guests wrote");
    let mut ledger = load.stop()?;
    // The first guest has gone: the second one's request is answered, and the first one's socket is removed.
    let answered = intruder
        .join()
        .map_err(|_| anyhow!("the second guest panicked"))?;
    answered.with_context(|| format!("the second guest\n{}", cluster.report()))?;
    cluster.wait("the source has nothing", SOON, |cluster| {
        Ok((attachment(cluster, 1)?.is_none() && !old.exists()).then_some(()))
    })?;
    load::check(&new, &mut ledger, Promise::Acknowledged)
}

/// Whether node 2 says that a guest waits there.
fn waits_at_two(cluster: &Cluster) -> Result<Option<()>> {
    let status = cluster.node(2)?.daemon().json(&["status"])?;
    let told = status["health"].to_string();
    Ok(told.contains("waits for the lease").then_some(()))
}

#[test]
fn write_of_a_destination_that_has_gone_is_never_done() -> Result<()> {
    let (mut cluster, old) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&old, ledger());
    goes_on(&cluster, &load, "the start")?;
    let new = incoming(&cluster, 1, 2)?;
    let mut intruder = Requests::connect(&new)?;
    intruder.begin_write(BESIDE_THE_LEDGER);
    cluster.wait("its request waits", SOON, waits_at_two)?;
    drop(intruder);
    cluster.wait("it has gone", SOON, |cluster| {
        let there = attachment(cluster, 2)?.context("nothing at the destination")?;
        Ok((there["state"] != "connected").then_some(()))
    })?;
    goes_on(&cluster, &load, "the end of the destination")?;
    // Nothing takes the volume while nobody runs there.
    let mut ledger = load.stop()?;
    std::thread::sleep(Duration::from_secs(3));
    ensure!(attachment(&cluster, 1)?.is_some(), "it was taken over");
    load::check(&old, &mut ledger, Promise::Acknowledged)?;
    let found = Requests::connect_long(&old)?.read_long(BESIDE_THE_LEDGER, 4096)?;
    ensure!(
        found.iter().all(|byte| *byte == 0),
        "a dead guest's write was done"
    );

    // One that waits holds up neither the end of its attachment nor that of its daemon.
    let load = Load::start(&old, ledger);
    goes_on(&cluster, &load, "the second load")?;
    let mut intruder = Requests::connect(&new)?;
    intruder.begin_write(BESIDE_THE_LEDGER);
    cluster.wait("its request waits", SOON, waits_at_two)?;
    cluster.node_mut(2)?.stop()?;
    cluster.node_mut(2)?.start()?;
    let mut intruder = Requests::connect(&new)?;
    intruder.begin_write(BESIDE_THE_LEDGER);
    cluster.wait("its request waits again", SOON, waits_at_two)?;
    let two = cluster.node(2)?.daemon();
    two.cli(&["detach", "disk", "--yes"])?;
    cluster.wait("the destination has nothing", SOON, |cluster| {
        Ok(attachment(cluster, 2)?.is_none().then_some(()))
    })?;
    goes_on(&cluster, &load, "the end of the second destination")?;
    load::check(&old, &mut load.stop()?, Promise::Acknowledged)
}

#[test]
fn guest_that_shuts_down_keeps_its_disk_unless_it_was_offered() -> Result<()> {
    let (cluster, old) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&old, ledger());
    goes_on(&cluster, &load, "the start")?;
    let two = cluster.node(2)?.daemon();
    let refused = |why: &str| -> Result<()> {
        let error = two.attach_incoming("disk").expect_err(why);
        ensure!(format!("{error:#}").contains(why), "{error:#}");
        Ok(())
    };
    refused("run `penstock attachment offer disk --to node2` on node \"node1\"")?;
    // A withdrawn offer ends the incoming attachment at the destination and allows no other.
    let new = incoming(&cluster, 1, 2)?;
    let one = cluster.node(1)?.daemon();
    one.cli(&["attachment", "withdraw", "disk"])?;
    cluster.wait("the destination has nothing", SOON, |cluster| {
        Ok((attachment(cluster, 2)?.is_none() && !new.exists()).then_some(()))
    })?;
    goes_on(&cluster, &load, "an offer that was withdrawn")?;
    let ledger = load.stop()?;
    refused("has not offered it")?;
    ensure!(
        attachment(&cluster, 1)?.is_some(),
        "the destination took over"
    );
    let load = Load::start(&old, ledger);
    goes_on(&cluster, &load, "another start of the guest")?;
    check(&cluster, &old, load)
}

#[test]
fn attachment_without_a_guest_moves_to_another_node() -> Result<()> {
    let (cluster, old) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&old, ledger());
    goes_on(&cluster, &load, "the start")?;
    let one = cluster.node(1)?.daemon();
    let new = cluster.node(2)?.daemon().data().join("moved.sock");
    let path = new.to_str().context("the path is not UTF-8")?;
    let to_two = [
        "attachment",
        "move",
        "disk",
        "--to",
        "node2",
        "--socket",
        path,
    ];
    let refused = |args: &[&str], why: &str| -> Result<()> {
        let error = format!("{:#}", one.cli(args).expect_err(why));
        ensure!(error.contains(why), "{error}");
        Ok(())
    };
    refused(&to_two, "a guest uses")?;
    let ledger = load.stop()?;
    refused(
        &["attachment", "move", "disk", "--to", "node9"],
        "there is no node",
    )?;
    refused(&["attachment", "move", "disk", "--to", "node1"], "already")?;
    refused(
        &["attachment", "move", "nothing", "--to", "node2"],
        "nothing is attached",
    )?;
    // The path looks like the socket of another volume.
    one.cli(&["volume", "create", "other", "1M"])?;
    let others = new.with_file_name("other.sock");
    let others = others.to_str().context("the path is not UTF-8")?;
    let to_others = [&to_two[..6], &[others]].concat();
    refused(&to_others, "did not take")?;
    // A directory that the other node has no sockets in.
    refused(
        &["attachment", "move", "disk", "--to", "node2"],
        "did not take",
    )?;
    let load = Load::start(&old, ledger);
    goes_on(&cluster, &load, "a move that was refused")?;
    let ledger = load.stop()?;
    cluster.wait("the guest has gone", SOON, |cluster| {
        let state = attachment(cluster, 1)?.context("the attachment is gone")?;
        Ok((state["state"] == "listening").then_some(()))
    })?;
    one.cli(&to_two)?;
    ensure!(attachment(&cluster, 1)?.is_none(), "it is still on node 1");
    let load = Load::start(&new, ledger);
    goes_on(&cluster, &load, "the move")?;
    check(&cluster, &new, load)
}
