//! A real guest on disks of a real daemon: what it writes it reads back, whatever happens to the daemon.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_rig::process::{run as run_command, wait_until};
use guest_rig::{Daemon, Disk, Form, GuestImage, Vm, VmConfig};
use tempfile::TempDir;

/// A change that the daemon makes in the background reaches everyone within this.
const SOON: Duration = Duration::from_secs(60);
/// Longest single script: fio, or filling a disk, under translation on a busy machine.
const LONG: Duration = Duration::from_secs(300);
/// `kill -9` of the daemon in one test, by its form.
const KILLS: (u64, u64) = (8, 100);
const MIB: u64 = 1 << 20;
/// Feature bit of packed virtqueues.
const RING_PACKED: usize = 34;

/// A daemon in a directory of its own, and the guest's image.
struct Rig {
    node: Daemon,
    image: GuestImage,
    scratch: TempDir,
}

impl Rig {
    fn start(device_size: &str) -> Result<Self> {
        let image = GuestImage::get(|line| eprintln!("{line}"))?;
        let scratch = tempfile::tempdir()?;
        let node = Daemon::start(
            &scratch.path().join("data"),
            &["--device-size", device_size],
        )?;
        Ok(Self {
            node,
            image,
            scratch,
        })
    }

    fn boot(&self, disks: Vec<Disk>) -> Result<Vm> {
        Vm::boot(&self.image, &VmConfig::new(disks))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Requests that the guest's kernel has completed on `device`.
fn completed(vm: &mut Vm, device: &str) -> Result<u64> {
    let stat = vm.sh(&format!("cat /sys/block/{device}/stat"))?;
    let fields: Vec<u64> = stat
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let [reads, _, _, _, writes, ..] = fields.as_slice() else {
        anyhow::bail!("/sys/block/{device}/stat: {stat}");
    };
    Ok(reads + writes)
}

fn expect_no_io_errors(vm: &mut Vm) -> Result<()> {
    let errors = vm.io_errors()?;
    ensure!(
        errors.is_empty(),
        "the guest's kernel saw errors:\n{}",
        errors.join("\n")
    );
    Ok(())
}

/// Runs fio over and over in the background until `/run/stop` is there; the result is in `/run/result`.
fn start_fio(vm: &mut Vm) -> Result<()> {
    let common = "--filename=/dev/vda --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 \
                  --verify_state_save=0 --randrepeat=0 --group_reporting";
    vm.sh(&format!(
        "( runs=0
           while [ ! -e /run/stop ]; do
               fio {common} \
                   --name=small --rw=randwrite --bsrange=512-16k --blockalign=512 --size=12M \
                       --iodepth=16 --fsync=64 --offset=0 \
                   --name=large --rw=randwrite --bs=256k --size=32M --iodepth=8 --offset=64M \
                   > /run/fio.log 2>&1 || {{ echo failed > /run/result; exit; }}
               runs=$((runs + 1))
           done
           echo $runs > /run/result ) > /dev/null 2>&1 &"
    ))?;
    Ok(())
}

#[test]
fn guest_verifies_every_byte_while_the_daemon_is_killed() -> Result<()> {
    let mut rig = Rig::start("2G")?;
    let socket = rig.node.disk("victim", "128M", 2)?;
    verifies_every_byte(&mut rig, Disk::new(socket).queues(2))
}

#[test]
fn guest_with_packed_rings_verifies_every_byte_too() -> Result<()> {
    let mut rig = Rig::start("2G")?;
    let socket = rig.node.disk("victim", "128M", 2)?;
    verifies_every_byte(&mut rig, Disk::new(socket).queues(2).packed())
}

/// Whether the driver of the guest's first disk has chosen packed rings.
fn uses_packed_rings(vm: &mut Vm) -> Result<bool> {
    let features = vm.sh("cat /sys/block/vda/device/features")?;
    Ok(features.as_bytes().get(RING_PACKED) == Some(&b'1'))
}

fn verifies_every_byte(rig: &mut Rig, disk: Disk) -> Result<()> {
    let is_packed = disk.is_packed;
    let mut vm = rig.boot(vec![disk])?;
    assert_eq!(uses_packed_rings(&mut vm)?, is_packed);
    start_fio(&mut vm)?;
    let mut before = completed(&mut vm, "vda")?;
    for round in 0..Form::of_this_run().pick(KILLS.0, KILLS.1) {
        // Killed only under load: once requests have been completed since the last restart.
        let target = before + 200 + 37 * round;
        vm.sh_until(
            &format!("set -- $(cat /sys/block/vda/stat); test $(($1 + $5)) -gt {target}"),
            SOON,
        )?;
        rig.node.kill()?;
        // A kill in the middle of everything, and once in a while a long absence.
        std::thread::sleep(Duration::from_millis(if round % 4 == 3 { 3000 } else { 0 }));
        rig.node.start_again()?;
        before = completed(&mut vm, "vda")?;
    }
    vm.sh("touch /run/stop")?;
    vm.sh_until("test -e /run/result", LONG)?;
    let runs = vm.sh("cat /run/result")?;
    ensure!(
        runs.parse::<u32>().is_ok_and(|runs| runs > 0),
        "fio: {runs}\n{}\ndaemon:\n{}",
        vm.sh("cat /run/fio.log")?,
        rig.node.log()
    );
    expect_no_io_errors(&mut vm)?;
    vm.power_off()
}

/// Whether the daemon takes the first disk's write cache for switched off.
fn write_through(rig: &Rig) -> Result<bool> {
    let attachments = rig.node.json(&["attachments", "list"])?;
    attachments[0]["write_through"]
        .as_bool()
        .context("attachments list tells the write cache mode")
}

#[test]
fn write_cache_switched_off_in_a_vm_stays_off_after_a_kill() -> Result<()> {
    let mut rig = Rig::start("512M")?;
    let socket = rig.node.disk("through", "64M", 1)?;
    let mut vm = rig.boot(vec![Disk::new(socket)])?;
    ensure!(!write_through(&rig)?, "a new disk caches writes");
    vm.sh("echo 'write through' > /sys/block/vda/cache_type")?;
    assert_eq!(vm.sh("cat /sys/block/vda/cache_type")?, "write through");
    ensure!(write_through(&rig)?, "the daemon was not told");
    rig.node.kill()?;
    rig.node.start_again()?;
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=4k count=16 oflag=direct")?;
    ensure!(write_through(&rig)?, "the daemon forgot");
    assert_eq!(vm.sh("cat /sys/block/vda/cache_type")?, "write through");
    expect_no_io_errors(&mut vm)?;
    vm.power_off()
}

#[test]
fn requests_of_every_shape_read_back() -> Result<()> {
    let rig = Rig::start("2G")?;
    rig.node.cli(&["volume", "create", "shapes", "256M"])?;
    let main = rig
        .node
        .attach_with("shapes", 2, &["--queue-size", "512"])?;
    rig.node.cli(&["volume", "create", "frozen", "64M"])?;
    let frozen = rig.path("frozen.sock");
    rig.node.cli(&[
        "attach",
        "volume",
        "frozen",
        "--socket",
        text(&frozen)?,
        "--queues",
        "1",
        "--read-only",
    ])?;
    let mut vm = rig.boot(vec![
        Disk::new(main).queues(2).queue_size(512),
        Disk::new(frozen),
    ])?;

    for (attribute, least) in [("max_segments", 256), ("max_sectors_kb", 1024)] {
        let value: u64 = vm
            .sh(&format!("cat /sys/block/vda/queue/{attribute}"))?
            .parse()?;
        ensure!(value >= least, "{attribute} is {value}");
    }
    for (device, volume) in [("vda", "shapes"), ("vdb", "frozen")] {
        let serial = vm.sh(&format!("cat /sys/block/{device}/serial"))?;
        let told = rig.node.json(&["volume", "show", volume])?;
        assert_eq!(told["serial"], serial.as_str());
    }

    let before = completed(&mut vm, "vda")?;
    assert_eq!(vm.sh("rigio segments /dev/vda 1")?, "segments: ok");
    let requests = completed(&mut vm, "vda")? - before;
    assert_eq!(
        requests,
        2 * 24,
        "1 MiB in 256 segments is one request, not several"
    );
    for mode in ["sectors", "unaligned"] {
        for seed in 2..4 {
            assert_eq!(
                vm.sh(&format!("rigio {mode} /dev/vda {seed}"))?,
                format!("{mode}: ok")
            );
        }
    }
    expect_no_io_errors(&mut vm)?;

    assert_eq!(vm.sh("blockdev --getro /dev/vdb")?, "1");
    let refused = vm.run(
        "dd if=/dev/zero of=/dev/vdb bs=4k count=1 conv=fsync oflag=direct",
        LONG,
    )?;
    assert_ne!(refused.code, 0, "a read-only disk took a write");
    vm.power_off()
}

/// Firmware and kernel use rings without indirect tables: the requests that the device offers must fit.
#[test]
fn guest_without_indirect_descriptors_boots_and_carries_every_request() -> Result<()> {
    let rig = Rig::start("3G")?;
    let boot_disk = rig.image.boot_disk();
    rig.node
        .cli(&["volume", "import", "root", text(&boot_disk)?])?;
    let root = rig.node.attach_with("root", 1, &["--queue-size", "16"])?;
    let usual = rig.node.disk("usual", "256M", 2)?;
    let packed = rig.node.disk("packed", "256M", 1)?;
    let disks = vec![
        Disk::new(root).queue_size(16).direct(),
        Disk::new(usual).queues(2).queue_size(128).direct(),
        Disk::new(packed).queue_size(128).direct().packed(),
    ];
    let config = VmConfig::new(disks).from_first_disk();
    let mut vm = Vm::boot(&rig.image, &config)?;
    for (device, segments) in [("vda", 14), ("vdb", 126), ("vdc", 126)] {
        let limit = vm.sh(&format!("cat /sys/block/{device}/queue/max_segments"))?;
        assert_eq!(limit, segments.to_string());
    }
    for device in ["vdb", "vdc"] {
        for mode in ["segments", "sectors", "unaligned"] {
            let done = vm.sh(&format!("rigio {mode} /dev/{device} 1"))?;
            assert_eq!(done, format!("{mode}: ok"));
        }
        vm.sh(&format!("blkdiscard /dev/{device}"))?;
    }
    vm.sh(
        "dd if=/dev/urandom of=/file bs=1M count=32 2> /dev/null && sync && sha256sum < /file > /sum \
         && echo 3 > /proc/sys/vm/drop_caches && sha256sum < /file | cmp - /sum",
    )?;
    expect_no_io_errors(&mut vm)?;
    vm.power_off()
}

/// What differs between the filesystems.
struct Filesystem {
    device: &'static str,
    make: &'static str,
    grow: &'static str,
    check: &'static str,
}

const FILESYSTEMS: [Filesystem; 2] = [
    Filesystem {
        device: "/dev/vda",
        make: "mkfs.ext4 -q",
        grow: "resize2fs /dev/vda",
        check: "e2fsck -fn",
    },
    Filesystem {
        device: "/dev/vdb",
        make: "mkfs.xfs -q",
        grow: "xfs_growfs /mnt",
        check: "xfs_repair -n",
    },
];

#[test]
fn filesystems_grow_while_mounted_and_give_space_back() -> Result<()> {
    let rig = Rig::start("4G")?;
    let disks = ["one", "two"].map(|name| rig.node.disk(name, "512M", 2));
    let [one, two] = disks;
    let mut vm = rig.boot(vec![Disk::new(one?).queues(2), Disk::new(two?).queues(2)])?;
    for (filesystem, volume) in FILESYSTEMS.iter().zip(["one", "two"]) {
        let Filesystem {
            device,
            make,
            grow,
            check,
        } = filesystem;
        vm.sh(&format!(
            "{make} {device} && mount {device} /mnt && cp -r /etc /usr /mnt && sync && echo 3 > \
             /proc/sys/vm/drop_caches \
             && diff -r /usr /mnt/usr"
        ))
        .with_context(|| (*make).to_owned())?;

        rig.node.cli(&["volume", "resize", volume, "+256M"])?;
        vm.sh_until(
            &format!("test $(blockdev --getsize64 {device}) = {}", 768 * MIB),
            SOON,
        )?;
        vm.sh(grow)?;
        let blocks: u64 = vm.sh("df -k /mnt | tail -1 | awk '{print $2}'")?.parse()?;
        ensure!(blocks > 600 * 1024, "{grow}: {blocks} KiB");

        vm.sh("dd if=/dev/urandom of=/mnt/big bs=1M count=128 2> /dev/null && sync")?;
        let full = rig.node.used_bytes()?;
        vm.sh("rm /mnt/big")?;
        // XFS frees a removed file's extents in the background, and a trim passes over those it is not yet
        // done with.
        wait_until(SOON, || {
            vm.sh("sync && fstrim /mnt")?;
            Ok((rig.node.used_bytes()? + 110 * MIB <= full).then_some(()))
        })
        .with_context(|| format!("fstrim of {make}, from {full} bytes"))?;
        vm.sh(&format!(
            "diff -r /usr /mnt/usr && umount /mnt && {check} {device}"
        ))?;
    }
    expect_no_io_errors(&mut vm)?;
    vm.power_off()
}

#[test]
fn guest_boots_from_its_disk_and_finds_what_it_left() -> Result<()> {
    let mut rig = Rig::start("2G")?;
    rig.node
        .cli(&["volume", "import", "root", text(&rig.image.boot_disk())?])?;
    let socket = rig.node.attach("root", 2)?;
    let config = VmConfig::new(vec![Disk::new(socket).queues(2)]).from_first_disk();

    let mut vm = Vm::boot(&rig.image, &config)?;
    assert_eq!(
        vm.sh("awk '$2 == \"/\" && $3 != \"rootfs\" {print $1, $3}' /proc/mounts")?,
        "/dev/vda1 ext4"
    );
    // The root filesystem itself waits for the daemon.
    vm.sh("dd if=/dev/urandom of=/left bs=1M count=16 2> /dev/null && sync")?;
    rig.node.kill()?;
    rig.node.start_again()?;
    let sum =
        vm.sh("cp /left /copy && sync && echo 3 > /proc/sys/vm/drop_caches && sha256sum < /copy")?;
    expect_no_io_errors(&mut vm)?;
    vm.power_off()?;

    let status = rig.node.stop()?;
    ensure!(status.success(), "SIGTERM: {status}");
    rig.node.start_again()?;
    let mut vm = Vm::boot(&rig.image, &config)?;
    assert_eq!(vm.sh("sha256sum < /left")?, sum);
    assert_eq!(vm.sh("sha256sum < /copy")?, sum);
    expect_no_io_errors(&mut vm)?;
    vm.power_off()
}

#[test]
fn full_store_is_an_io_error_until_space_comes_back() -> Result<()> {
    let rig = Rig::start("512M")?;
    let ballast = rig.path("ballast.raw");
    run_command(
        Command::new("dd")
            .arg("if=/dev/urandom")
            .arg(format!("of={}", text(&ballast)?))
            .args(["bs=1M", "count=128"]),
    )?;
    rig.node
        .cli(&["volume", "import", "ballast", text(&ballast)?])?;
    let socket = rig.node.disk("thin", "1G", 1)?;
    let mut vm = rig.boot(vec![Disk::new(socket)])?;
    let write = |megabyte: u64, count: u64| {
        format!(
            "dd if=/dev/urandom of=/dev/vda bs=1M seek={megabyte} count={count} oflag=direct conv=fsync"
        )
    };

    vm.sh(&write(0, 16))?;
    let sum = vm.sh("dd if=/dev/vda bs=1M count=16 iflag=direct 2> /dev/null | sha256sum")?;
    let full = vm.run(&write(16, 800), LONG)?;
    ensure!(
        full.code != 0,
        "800 MiB went into what is left of 512 MiB: {}",
        full.text
    );
    ensure!(
        full.text.contains("error writing"),
        "the guest should see an I/O error: {}",
        full.text
    );
    // What was written before is there.
    let found = vm.sh("dd if=/dev/vda bs=1M count=16 iflag=direct 2> /dev/null | sha256sum")?;
    assert_eq!(found, sum);

    // An operator makes room by deleting another volume.
    rig.node.cli(&["volume", "delete", "ballast", "--yes"])?;
    vm.sh_until(&write(16, 100), LONG)?;
    // The guest makes room by discarding.
    let full = vm.run(&write(16, 800), LONG)?;
    assert_ne!(full.code, 0);
    vm.sh(&format!(
        "blkdiscard -o {} -l {} /dev/vda",
        16 * MIB,
        512 * MIB
    ))?;
    vm.sh_until(&write(600, 100), LONG)?;
    let found = vm.sh("dd if=/dev/vda bs=1M count=16 iflag=direct 2> /dev/null | sha256sum")?;
    assert_eq!(found, sum);
    vm.power_off()
}
