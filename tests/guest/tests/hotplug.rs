//! Disks come and go while the guest runs: many on one guest, and one that is unplugged under load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_rig::process::wait_until;
use guest_rig::{Daemon, Disk, Form, GuestImage, Vm, VmConfig};
use serde_json::Value;
use tempfile::TempDir;

/// A change reaches the guest, or the daemon, within this.
const SOON: Duration = Duration::from_secs(60);
/// Longest single script, under translation on a busy machine.
const LONG: Duration = Duration::from_secs(300);
/// Disks on one guest, by the form.
const DISKS: (u8, u8) = (8, 28);
/// How often they all are unplugged and plugged again.
const ROUNDS: (u8, u8) = (1, 3);
/// How often a disk is unplugged under load.
const UNPLUGS: (u64, u64) = (2, 10);
const QUEUES: u16 = 2;
const MIB: u64 = 1 << 20;

/// A volume that is attached, and can be plugged into a guest.
struct Pluggable {
    name: String,
    serial: String,
    disk: Disk,
}

/// A daemon, and a guest without disks.
struct Rig {
    node: Daemon,
    vm: Vm,
    _scratch: TempDir,
}

impl Rig {
    fn start(ports: u8) -> Result<Self> {
        let image = GuestImage::get(|line| eprintln!("{line}"))?;
        let scratch = tempfile::tempdir()?;
        let node = Daemon::start(&scratch.path().join("data"), &["--device-size", "4G"])?;
        let config = VmConfig::new(Vec::new()).with_hotplug_ports(ports);
        let vm = Vm::boot(&image, &config)?;
        Ok(Self {
            node,
            vm,
            _scratch: scratch,
        })
    }

    fn volume(&self, name: &str, mib: u64) -> Result<Pluggable> {
        let socket = self.node.disk(name, &format!("{mib}M"), QUEUES)?;
        let volume = self.node.json(&["volume", "show", name])?;
        let serial = volume["serial"].as_str().context("a volume has a serial")?;
        Ok(Pluggable {
            name: name.to_owned(),
            serial: serial.to_owned(),
            disk: Disk::new(socket).queues(QUEUES),
        })
    }

    /// Waits until the guest has the disk of this serial, and returns the guest's name for it.
    fn device(&mut self, serial: &str) -> Result<String> {
        let script = format!(
            "for disk in /sys/block/vd*; do
                 [ \"$(cat $disk/serial 2> /dev/null)\" = {serial} ] && basename $disk && exit
             done; exit 1"
        );
        self.vm.sh_until(&script, SOON)
    }

    /// Waits until so many guests are connected.
    fn wait_connected(&self, count: usize) -> Result<()> {
        wait_until(SOON, || {
            let attachments = self.node.json(&["attachment", "list"])?;
            let all = attachments.as_array().context("a list")?;
            let connected = all.iter().filter(|a| a["state"] == "connected").count();
            Ok((connected == count).then_some(()))
        })
        .with_context(|| format!("never {count} attachments with a guest"))
    }

    /// Waits until nobody is connected to this attachment.
    fn wait_listening(&self, volume: &str) -> Result<()> {
        wait_until(SOON, || {
            let stats = self.stats(volume)?;
            let is_idle = stats["queues_running"] == 0 && stats["in_flight"] == 0;
            Ok((stats["state"] == "listening" && is_idle).then_some(()))
        })
        .with_context(|| format!("the attachment of {volume} never listens again"))
    }

    fn stats(&self, volume: &str) -> Result<Value> {
        self.node.json(&["attachment", "stats", volume])
    }

    /// Requests of a guest that were completed, as the daemon counts them.
    fn requests(&self, volume: &str) -> Result<u64> {
        let stats = self.stats(volume)?;
        let of = |kind: &str| stats[kind]["requests"].as_u64();
        let sum = of("reads").zip(of("writes")).map(|(r, w)| r + w);
        sum.context("stats count requests")
    }

    /// Waits until the guest has done so many more requests on a disk.
    fn wait_load(&self, volume: &str, more: u64) -> Result<()> {
        let from = self.requests(volume)?;
        wait_until(LONG, || {
            Ok((self.requests(volume)? >= from + more).then_some(()))
        })
        .with_context(|| format!("the guest does not use {volume}"))
    }
}

/// Plugs the volumes in, into the ports in this order, and returns the guest's names of the disks.
fn plug_all(rig: &mut Rig, volumes: &[&Pluggable]) -> Result<Vec<String>> {
    for (port, volume) in (0..).zip(volumes) {
        rig.vm.plug(port, &volume.disk)?;
    }
    let devices = volumes.iter().map(|volume| rig.device(&volume.serial));
    let devices: Vec<String> = devices.collect::<Result<_>>()?;
    rig.wait_connected(volumes.len())?;
    Ok(devices)
}

/// A script that prints the checksum of the first MiB of each disk, one a line.
fn checksums(devices: &[String]) -> String {
    let words = devices.join(" ");
    format!(
        "for disk in {words}; do
             dd if=/dev/$disk bs=256k count=4 iflag=direct 2> /dev/null | sha256sum
         done"
    )
}

#[test]
fn many_disks_on_one_guest_keep_their_own_data() -> Result<()> {
    let form = Form::of_this_run();
    let count = form.pick(DISKS.0, DISKS.1);
    let mut rig = Rig::start(count)?;
    let volumes = (0..count).map(|index| rig.volume(&format!("d{index}"), 64 + u64::from(index)));
    let volumes: Vec<Pluggable> = volumes.collect::<Result<_>>()?;
    let mut order: Vec<&Pluggable> = volumes.iter().collect();
    let mut devices = plug_all(&mut rig, &order)?;
    for (index, device) in (0_u64..).zip(&devices) {
        let bytes = rig.vm.sh(&format!("blockdev --getsize64 /dev/{device}"))?;
        assert_eq!(bytes, ((64 + index) * MIB).to_string());
    }

    // All at once: each gets other random bytes.
    let words = devices.join(" ");
    let written = rig.vm.sh(&format!(
        "for disk in {words}; do dd if=/dev/urandom of=/run/$disk bs=256k count=4 2> /dev/null; done
         for disk in {words}; do
             dd if=/run/$disk of=/dev/$disk bs=64k oflag=direct conv=fsync 2> /dev/null &
         done
         wait
         for disk in {words}; do sha256sum < /run/$disk; done"
    ))?;
    let distinct: std::collections::BTreeSet<&str> = written.lines().collect();
    assert_eq!(distinct.len(), usize::from(count), "{written}");
    assert_eq!(rig.vm.sh(&checksums(&devices))?, written);

    // A daemon that dies comes back to all of them.
    rig.node.kill()?;
    rig.node.start_again()?;
    assert_eq!(rig.vm.sh(&checksums(&devices))?, written);

    for (volume, device) in order.iter().zip(&devices) {
        rig.node.cli(&["volume", "resize", &volume.name, "128M"])?;
        let script = format!("test $(blockdev --getsize64 /dev/{device}) = {}", 128 * MIB);
        rig.vm.sh_until(&script, SOON)?;
    }

    let mut written: Vec<&str> = written.lines().collect();
    for _ in 0..form.pick(ROUNDS.0, ROUNDS.1) {
        (0..count).try_for_each(|port| rig.vm.unplug(port))?;
        rig.wait_connected(0)?;
        assert_eq!(rig.vm.sh("ls /sys/block | grep -c ^vd || true")?, "0");
        // Each into another port.
        order.rotate_left(1);
        written.rotate_left(1);
        devices = plug_all(&mut rig, &order)?;
        let found = rig.vm.sh(&checksums(&devices))?;
        assert_eq!(found.lines().collect::<Vec<_>>(), written);
    }
    (0..count).try_for_each(|port| rig.vm.unplug(port))?;
    for volume in &volumes {
        rig.wait_listening(&volume.name)?;
        // Nobody uses it: nothing is asked.
        rig.node.cli(&["detach", &volume.name])?;
    }
    assert_eq!(rig.vm.io_errors()?, Vec::<String>::new());
    assert_eq!(rig.node.cli(&["health"])?.trim(), "ok");
    rig.vm.power_off()
}

/// Writes and verifies on a disk until `/run/stop` is there; the result is in `/run/result`.
fn start_neighbour(vm: &mut Vm, device: &str) -> Result<()> {
    vm.sh(&format!(
        "( runs=0
           while [ ! -e /run/stop ]; do
               fio --filename=/dev/{device} --direct=1 --ioengine=libaio --verify=crc32c \
                   --verify_fatal=1 --verify_state_save=0 --randrepeat=0 \
                   --name=neighbour --rw=randwrite --bs=4k --size=8M --iodepth=8 --fsync=64 \
                   > /run/neighbour.log 2>&1 || {{ echo failed > /run/result; exit; }}
               runs=$((runs + 1))
           done
           echo $runs > /run/result ) > /dev/null 2>&1 &"
    ))?;
    Ok(())
}

/// Reads and writes on a disk until that is gone; then `/run/victim` is.
fn start_victim(vm: &mut Vm, device: &str) -> Result<()> {
    vm.sh(&format!(
        "touch /run/victim
         ( fio --filename=/dev/{device} --direct=1 --ioengine=libaio --name=victim --rw=randrw \
               --bs=4k --size=32M --iodepth=16 --time_based --runtime=100000
           rm /run/victim ) > /dev/null 2>&1 &"
    ))?;
    Ok(())
}

#[test]
fn unplug_under_load_leaves_the_neighbour_alone() -> Result<()> {
    let mut rig = Rig::start(2)?;
    let (victim, neighbour) = (rig.volume("victim", 64)?, rig.volume("neighbour", 64)?);
    rig.vm.plug(1, &neighbour.disk)?;
    let kept = rig.device(&neighbour.serial)?;
    start_neighbour(&mut rig.vm, &kept)?;
    let pid = rig.node.pid()?;
    for round in 0..Form::of_this_run().pick(UNPLUGS.0, UNPLUGS.1) {
        rig.vm.plug(0, &victim.disk)?;
        let device = rig.device(&victim.serial)?;
        if round > 0 {
            let first = rig.vm.sh(&format!(
                "dd if=/dev/{device} bs=4k count=1 iflag=direct skip=8192 2> /dev/null | head -c 5"
            ))?;
            assert_eq!(first, format!("mark{}", round - 1));
        }
        rig.vm.sh(&format!(
            "echo mark{round} | dd of=/dev/{device} bs=4k seek=8192 conv=sync,fsync 2> /dev/null"
        ))?;
        start_victim(&mut rig.vm, &device)?;
        rig.wait_load("victim", 100 + 17 * round)?;
        rig.vm.unplug(0)?;
        rig.vm.sh_until("test ! -e /run/victim", LONG)?;
        rig.wait_listening("victim")?;
        rig.wait_load("neighbour", 50)?;
        if round % 2 == 0 {
            rig.node.cli(&["detach", "victim"])?;
            rig.node.attach("victim", QUEUES)?;
        }
    }
    rig.vm.sh("touch /run/stop")?;
    rig.vm.sh_until("test -e /run/result", LONG)?;
    let runs = rig.vm.sh("cat /run/result")?;
    ensure!(
        runs.parse::<u32>().is_ok_and(|runs| runs > 0),
        "fio: {runs}\n{}\ndaemon:\n{}",
        rig.vm.sh("cat /run/neighbour.log")?,
        rig.node.log()
    );
    // Whoever used the other disk was told that it is gone.
    let errors = rig.vm.io_errors()?;
    let of_neighbour: Vec<&String> = errors.iter().filter(|line| line.contains(&kept)).collect();
    assert_eq!(of_neighbour, Vec::<&String>::new());
    assert_eq!(rig.stats("neighbour")?["errors"], 0);
    assert_eq!(rig.node.pid()?, pid, "the daemon was not started again");
    assert_eq!(rig.node.cli(&["health"])?.trim(), "ok");
    rig.vm.power_off()
}
