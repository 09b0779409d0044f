//! Several nodes: a tree in two guests, then a guest on a disk with three copies, while nodes are killed, cut
//! off, robbed of their power and replaced.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions, CutDirection};
use guest_rig::process::run as run_command;
use guest_rig::{Accel, Disk, GuestImage, Vm, VmConfig};

use super::table::{Table, seconds};
use super::{path_str, say, tool, tree};
use crate::build::{binary, build};

/// Size of each node's device.
const DEVICE_BYTES: u64 = 2 << 30;
/// The guest's disk.
const DISK_MIB: u64 = 512;
/// How long the guest is watched before and after each event.
const WATCHED: Duration = Duration::from_secs(3);
/// How long a node stays away.
const AWAY: Duration = Duration::from_secs(10);
/// Longest round of fio, waits included.
const FIO_LIMIT: Duration = Duration::from_secs(300);
/// Everything that a guest writes here it reads back and compares, again and again until it is told to stop.
const VERIFY: &str = "rm -f /tmp/stop /tmp/result; (
    rounds=0
    while [ ! -e /tmp/stop ]; do
        fio --name=verify --filename=/mnt/verify --size=8M --rw=randwrite --bs=4k --direct=1 \
        --ioengine=libaio \
            --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randrepeat=0 \
            --output=/tmp/verify.log || { echo failed > /tmp/result; exit; }
        rounds=$((rounds + 1))
    done
    echo $rounds > /tmp/result ) > /dev/null 2>&1 &";
/// One write at a time, some hundreds in a second, each timed: the slowest one is the pause.
const PULSE: &str = "rm -f /tmp/pulse*; fio --name=pulse --filename=/mnt/pulse --size=8M --rw=randwrite \
    --bs=4k --direct=1 \
    --ioengine=psync --time_based --runtime=3600 --thinktime=2ms --write_lat_log=/tmp/pulse \
    --output=/tmp/pulse.out \
    > /dev/null 2>&1 & echo $! > /tmp/pulse.pid";

/// Runs the demonstration with `nodes` nodes.
pub fn run(nodes: u8) -> Result<()> {
    say("building penstock (the first time, RocksDB takes some minutes)");
    build()?;
    let image = GuestImage::get(say)?;
    let accel = Accel::probe(&image)?;
    say(&format!(
        "starting {nodes} nodes in network namespaces, and a guest ({}) on a disk of node 1",
        accel.name()
    ));
    let start = Instant::now();
    let options = ClusterOptions::new(binary("penstock")?, nodes).powered(DEVICE_BYTES);
    let cluster = Cluster::start(options)?;
    let size = format!("{DISK_MIB}M");
    cluster.node(1)?.daemon().disk("demo", &size, 2)?;
    let vm = boot(&cluster, &image)?;
    let mut demo = Demo {
        table: Table::new(&["event", "pause", "resynced", "verified", "time"]),
        vm: Some(vm),
        cluster,
        image,
    };
    demo.guest()?
        .sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt")?;
    demo.table.cells(&[
        &format!("{nodes} nodes, a volume, a guest"),
        "",
        "",
        "mkfs, mount",
        &seconds(start.elapsed()),
    ]);
    tree::show(&demo.cluster, &mut demo.table)?;
    demo.kill(nodes)?;
    demo.cut_off(2)?;
    demo.lose_power()?;
    demo.replace(nodes)?;
    demo.finish()
}

/// What goes on.
struct Demo {
    table: Table,
    // The guest goes before the daemon that serves it.
    vm: Option<Vm>,
    cluster: Cluster,
    image: GuestImage,
}

fn boot(cluster: &Cluster, image: &GuestImage) -> Result<Vm> {
    let socket = cluster.node(1)?.daemon().data().join("demo.sock");
    let mut config = VmConfig::new(vec![Disk::new(socket).queues(2)]);
    config.memory_mib = 512;
    Vm::boot(image, &config)
}

/// Bytes brought to each node's replicas, with the number of the start that the daemon counts from.
type Resynced = BTreeMap<u8, (u32, u64)>;

fn resynced(cluster: &Cluster) -> Result<Resynced> {
    let running = cluster.nodes().iter();
    running
        .filter(|node| node.daemon().is_started())
        .map(|node| {
            let bytes = node.daemon().metric("penstock_resync_bytes_total")? as u64;
            Ok((node.number(), (node.daemon().starts(), bytes)))
        })
        .collect()
}

fn resynced_since(before: &Resynced, after: &Resynced) -> u64 {
    let since = |(number, (starts, bytes)): (&u8, &(u32, u64))| match before.get(number) {
        Some((then, counted)) if then == starts => bytes - counted,
        _ => *bytes,
    };
    after.iter().map(since).sum()
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl Demo {
    fn guest(&mut self) -> Result<&mut Vm> {
        self.vm.as_mut().context("the guest is off")
    }

    /// Does something to the cluster under a guest that writes and verifies, and tells what the guest saw.
    fn under_load(
        &mut self,
        event: &str,
        act: impl FnOnce(&mut Cluster) -> Result<()>,
    ) -> Result<()> {
        say(event);
        let begin = Instant::now();
        let before = resynced(&self.cluster)?;
        let guest = self.guest()?;
        guest.sh(VERIFY)?;
        guest.sh(PULSE)?;
        std::thread::sleep(WATCHED);
        act(&mut self.cluster)?;
        std::thread::sleep(WATCHED);
        let copied = resynced_since(&before, &resynced(&self.cluster)?);
        let guest = self.guest()?;
        let pause = pause(guest)?;
        let rounds = verified(guest)?;
        self.table.cells(&[
            event,
            &seconds(pause),
            &mib(copied),
            &format!("{rounds} x 8 MiB"),
            &seconds(begin.elapsed()),
        ]);
        Ok(())
    }

    fn kill(&mut self, node: u8) -> Result<()> {
        self.under_load("nothing", |_| Ok(()))?;
        // No node was killed or cut off so far.
        self.cluster.ensure_no_complaints()?;
        self.under_load(&format!("kill -9 of node {node}"), |cluster| {
            cluster.node_mut(node)?.kill()?;
            std::thread::sleep(AWAY);
            Ok(())
        })?;
        self.under_load(&format!("node {node} comes back"), |cluster| {
            cluster.node_mut(node)?.start()?;
            cluster.wait_ready()?;
            Ok(())
        })
    }

    fn cut_off(&mut self, node: u8) -> Result<()> {
        let event = format!("node {node} cut off, both ways");
        self.under_load(&event, |cluster| {
            cluster.network()?.cut(node, CutDirection::Both)?;
            std::thread::sleep(AWAY);
            Ok(())
        })?;
        self.under_load(&format!("node {node} reachable again"), |cluster| {
            cluster.network()?.heal(node)?;
            cluster.wait_ready()?;
            Ok(())
        })
    }

    /// All machines at once, the guest's among them.
    fn lose_power(&mut self) -> Result<()> {
        say(
            "the power fails: every daemon and the guest are killed, and devices lose what was not flushed",
        );
        let begin = Instant::now();
        let guest = self.guest()?;
        guest.sh("cp -r /etc /usr /mnt && sync && (cd /mnt && find etc usr -type f | sort | xargs sha256sum) \
                  > /tmp/sums")?;
        let sums = guest.sh("cat /tmp/sums")?;
        // Under way when it happens, and not synced.
        guest.sh(VERIFY)?;
        guest.sh("dd if=/dev/urandom of=/mnt/unsynced bs=64k count=2000 > /dev/null 2>&1 &")?;
        std::thread::sleep(WATCHED);
        let before = BTreeMap::new();
        let lost: usize = self.cluster.cut_power_of_all(1)?.iter().sum();
        self.vm = None;
        let back = Instant::now();
        self.cluster.start_all()?;
        self.cluster.wait_ready()?;
        let away = back.elapsed();
        let copied = resynced_since(&before, &resynced(&self.cluster)?);
        let mut vm = boot(&self.cluster, &self.image)?;
        vm.sh("mount /dev/vda /mnt")?;
        let found = vm.sh("cd /mnt && find etc usr -type f | sort | xargs sha256sum")?;
        ensure!(found == sums, "synced files are not what they were");
        let files = sums.lines().count();
        self.vm = Some(vm);
        self.table.cells(&[
            &format!("power of all lost, {lost} blocks gone"),
            &format!("{} *", seconds(away)),
            &mib(copied),
            &format!("{files} synced files"),
            &seconds(begin.elapsed()),
        ]);
        Ok(())
    }

    fn replace(&mut self, node: u8) -> Result<()> {
        self.under_load(&format!("node {node} is lost for good"), |cluster| {
            cluster.discard(node)
        })?;
        self.under_load(&format!("node {} takes its place", node + 1), |cluster| {
            cluster.join()?;
            cluster.forget(node)?;
            cluster.wait_ready()?;
            Ok(())
        })
    }

    fn finish(mut self) -> Result<()> {
        say("checking the bytes from outside, on another node than the guest's");
        let begin = Instant::now();
        let mut vm = self.vm.take().context("the guest is off")?;
        let errors = vm.io_errors()?;
        ensure!(
            errors.is_empty(),
            "the guest's kernel saw errors:\n{}",
            errors.join("\n")
        );
        vm.sh("umount /mnt")?;
        vm.power_off()?;
        let one = self.cluster.node(1)?.daemon();
        one.cli(&["detach", "demo", "--yes"])?;
        let exported = self.cluster.directory().join("demo.raw");
        let two = self.cluster.node(2)?.daemon();
        two.cli(&["volume", "export", "demo", path_str(&exported)?])?;
        run_command(tool("e2fsck")?.arg("-fn").arg(&exported))
            .context("the filesystem in the exported volume")?;
        let numbers: Vec<u8> = self
            .cluster
            .nodes()
            .iter()
            .map(|node| node.number())
            .collect();
        for number in numbers {
            self.cluster.node_mut(number)?.stop()?;
        }
        self.table.cells(&[
            "end: export, e2fsck, SIGTERM",
            "",
            "",
            "clean",
            &seconds(begin.elapsed()),
        ]);
        self.table.print();
        println!(
            "pause: the slowest of the guest's writes, one after the other; * from power until all copies \
             are well"
        );
        Ok(())
    }
}

/// Ends the pulse, and reads how long its slowest write took.
fn pause(guest: &mut Vm) -> Result<Duration> {
    guest.sh("kill -INT $(cat /tmp/pulse.pid)")?;
    guest.sh_until("! kill -0 $(cat /tmp/pulse.pid) 2> /dev/null", FIO_LIMIT)?;
    let slowest = guest.sh(
        "cat /tmp/pulse_lat*.log | awk -F, '$2 + 0 > most {most = $2 + 0} END {printf \"%.0f\", most}'",
    )?;
    let slowest: u64 = slowest
        .trim()
        .parse()
        .with_context(|| format!("fio's log says {slowest:?}"))?;
    ensure!(slowest > 0, "fio has logged no write");
    Ok(Duration::from_nanos(slowest))
}

/// Ends the verifying load; returns how often it wrote and read everything.
fn verified(guest: &mut Vm) -> Result<u32> {
    guest.sh("touch /tmp/stop")?;
    guest.sh_until("test -e /tmp/result", FIO_LIMIT)?;
    let rounds = guest.sh("cat /tmp/result")?;
    match rounds.parse() {
        Ok(rounds) if rounds > 0 => Ok(rounds),
        _ => anyhow::bail!("fio: {rounds}\n{}", guest.sh("cat /tmp/verify.log")?),
    }
}
