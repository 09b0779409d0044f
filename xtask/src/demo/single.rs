//! One node: the main job, with the daemon killed under the guest.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_rig::complaints::LogMark;
use guest_rig::process::run as run_command;
use guest_rig::{Accel, Daemon, DaemonOptions, Disk, GuestImage, Vm, VmConfig};

use super::table::Table;
use super::{path_str, say, sources, tool};
use crate::build::{binary, build};

/// Size of the node's device file; sparse.
const DEVICE_SIZE: &str = "4G";
/// The disk, before and after it is resized under the guest.
const DISK_MIB: (u64, u64) = (1024, 2048);
/// kill -9 of the daemon while fio writes and verifies.
const KILLS: u32 = 5;
/// Longest fio run, restarts included.
const FIO_LIMIT: Duration = Duration::from_secs(300);
/// A resize reaches the guest at once, freed space comes back within a checkpoint or two.
const SOON: Duration = Duration::from_secs(60);
/// What fio does in the guest: everything it writes it reads back and compares.
const FIO: &str = "--name=verify --filename=/mnt/fio --size=32M --rw=randwrite --bs=4k --direct=1 \
    --ioengine=libaio \
                   --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randrepeat=0";

/// Runs the demonstration.
pub fn run() -> Result<()> {
    let start = Instant::now();
    say("building penstock (the first time, RocksDB takes some minutes)");
    build()?;
    let mut table = Table::default();
    table.row("build", "penstock", start.elapsed());

    let start = Instant::now();
    let image = GuestImage::get(say)?;
    let accel = Accel::probe(&image)?;
    table.row(
        "guest",
        &format!("Debian kernel and tools, runs under {}", accel.name()),
        start.elapsed(),
    );

    let scratch = tempfile::Builder::new()
        .prefix("penstock-demo-")
        .tempdir()
        .context("make a directory for the node")?;
    let mut node = start_node(&mut table, scratch.path())?;
    let mut vm = boot(&mut table, &node, &image)?;
    format_and_copy(&mut table, &mut vm)?;
    node.ensure_no_complaints(LogMark::default())?;
    verify_through_kills(&mut table, &mut vm, &mut node)?;
    // The kills are over: later log lines must contain no warnings or errors.
    let quiet = node.log_mark();
    resize(&mut table, &mut vm, &node)?;
    trim(&mut table, &mut vm, &node)?;
    finish_guest(&mut table, vm)?;
    check_from_outside(&mut table, &node, scratch.path())?;
    let begin = Instant::now();
    let status = node.stop()?;
    ensure!(
        status.success(),
        "penstock serve {} on SIGTERM",
        guest_rig::process::describe(status)
    );
    node.ensure_no_complaints(quiet)?;
    table.row(
        "log",
        "no warning or error outside of the kills",
        begin.elapsed(),
    );
    table.row(
        "stop",
        "SIGTERM: drained and closed; nothing is left running",
        begin.elapsed(),
    );
    table.print();
    Ok(())
}

fn start_node(table: &mut Table, scratch: &Path) -> Result<Daemon> {
    say("starting an embedded node, creating a volume, importing this source tree as a second one");
    let begin = Instant::now();
    let data = scratch.join("data");
    let node = Daemon::start_with(
        &data,
        DaemonOptions::new(binary("penstock")?, &["--device-size", DEVICE_SIZE]),
    )?;
    table.row(
        "serve",
        "embedded node with all roles answers",
        begin.elapsed(),
    );

    let begin = Instant::now();
    node.disk("demo", &format!("{}M", DISK_MIB.0), 2)?;
    table.row(
        "volume",
        &format!("created and attached, {} MiB, 2 queues", DISK_MIB.0),
        begin.elapsed(),
    );

    let begin = Instant::now();
    let archive = sources::archive(scratch)?;
    // Import would refuse a tar archive without `--format raw`.
    let import = ["volume", "import", "sources", path_str(&archive)?];
    node.cli(&[&import[..], &["--format", "raw"]].concat())?;
    let socket = data.join("sources.sock");
    node.cli(&[
        "attach",
        "volume",
        "sources",
        "--socket",
        path_str(&socket)?,
        "--queues",
        "1",
        "--read-only",
    ])?;
    table.row(
        "import",
        "this source tree as a tar, attached read-only",
        begin.elapsed(),
    );
    Ok(node)
}

fn boot(table: &mut Table, node: &Daemon, image: &GuestImage) -> Result<Vm> {
    say("booting the guest");
    let begin = Instant::now();
    let data = node.data();
    let config = VmConfig::new(vec![
        Disk::new(data.join("demo.sock")).queues(2),
        Disk::new(data.join("sources.sock")),
    ]);
    let mut vm = Vm::boot(image, &config)?;
    let release = vm.sh(". /etc/os-release; echo \"$PRETTY_NAME, Linux $(uname -r)\"")?;
    table.row("boot", &release, begin.elapsed());
    Ok(vm)
}

fn format_and_copy(table: &mut Table, vm: &mut Vm) -> Result<()> {
    say("in the guest: mkfs.ext4, mount, copy the source tree");
    let begin = Instant::now();
    vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt")?;
    table.row("mkfs.ext4", "formatted and mounted", begin.elapsed());
    let begin = Instant::now();
    vm.sh("mkdir /mnt/src && tar -C /mnt/src -xf /dev/vdb && sync")?;
    let files = vm.sh("find /mnt/src -type f | wc -l")?;
    table.row(
        "copy",
        &format!("{files} source files from the second disk"),
        begin.elapsed(),
    );
    Ok(())
}

fn verify_through_kills(table: &mut Table, vm: &mut Vm, node: &mut Daemon) -> Result<()> {
    say("in the guest: fio writes and verifies, while the daemon is killed and restarted");
    let begin = Instant::now();
    vm.sh(&format!(
        "( runs=0
           while [ ! -e /tmp/stop ]; do
               fio {FIO} --output=/tmp/fio.log || {{ echo failed > /tmp/result; exit; }}
               runs=$((runs + 1))
           done
           echo $runs > /tmp/result ) > /dev/null 2>&1 &"
    ))?;
    let mut longest = Duration::ZERO;
    for _ in 0..KILLS {
        std::thread::sleep(Duration::from_millis(1500));
        let down = Instant::now();
        node.kill()?;
        node.start_again()?;
        longest = longest.max(down.elapsed());
    }
    vm.sh("touch /tmp/stop")?;
    vm.sh_until("test -e /tmp/result", FIO_LIMIT)?;
    let runs = vm.sh("cat /tmp/result")?;
    ensure!(
        runs.parse::<u32>().is_ok_and(|runs| runs > 0),
        "fio: {runs}\n{}",
        vm.sh("cat /tmp/fio.log")?
    );
    let errors = vm.io_errors()?;
    ensure!(
        errors.is_empty(),
        "the guest's kernel saw errors:\n{}",
        errors.join("\n")
    );
    table.row(
        "fio --verify",
        &format!("32 MiB of 4 KiB random writes, rounds written and verified: {runs}, no error"),
        begin.elapsed(),
    );
    table.row(
        "kill -9",
        &format!("{KILLS} times under load; longest until it answered again"),
        longest,
    );
    Ok(())
}

fn resize(table: &mut Table, vm: &mut Vm, node: &Daemon) -> Result<()> {
    say("resizing the disk while it is mounted");
    let begin = Instant::now();
    node.cli(&["volume", "resize", "demo", &format!("{}M", DISK_MIB.1)])?;
    vm.sh_until(
        &format!(
            "test $(blockdev --getsize64 /dev/vda) = {}",
            DISK_MIB.1 << 20
        ),
        SOON,
    )?;
    table.row(
        "resize",
        &format!("{} to {} MiB, seen by the guest", DISK_MIB.0, DISK_MIB.1),
        begin.elapsed(),
    );
    let begin = Instant::now();
    vm.sh("resize2fs /dev/vda")?;
    table.row("resize2fs", "the mounted filesystem grown", begin.elapsed());
    Ok(())
}

fn trim(table: &mut Table, vm: &mut Vm, node: &Daemon) -> Result<()> {
    say("in the guest: a file written and removed, then fstrim");
    vm.sh("rm -f /mnt/fio && dd if=/dev/urandom of=/mnt/big bs=1M count=128 2>/dev/null && sync")?;
    let before = node.used_bytes()?;
    let begin = Instant::now();
    vm.sh("rm /mnt/big && sync && fstrim /mnt")?;
    let after = node.wait_used(SOON, |used| used + (100 << 20) <= before)?;
    let mib = |bytes: u64| bytes >> 20;
    table.row(
        "fstrim",
        &format!(
            "the device's use fell from {} to {} MiB",
            mib(before),
            mib(after)
        ),
        begin.elapsed(),
    );
    Ok(())
}

fn finish_guest(table: &mut Table, mut vm: Vm) -> Result<()> {
    let begin = Instant::now();
    vm.sh("umount /mnt")?;
    vm.power_off()?;
    table.row("power off", "unmounted, guest gone", begin.elapsed());
    Ok(())
}

/// Exports the volume and looks at the bytes with e2fsck and debugfs, which know nothing of Penstock.
fn check_from_outside(table: &mut Table, node: &Daemon, scratch: &Path) -> Result<()> {
    say("checking the bytes from outside");
    let begin = Instant::now();
    let exported = scratch.join("demo.raw");
    node.cli(&["volume", "export", "demo", path_str(&exported)?])?;
    table.row("export", "the volume as a raw image", begin.elapsed());

    let begin = Instant::now();
    run_command(tool("e2fsck")?.arg("-fn").arg(&exported))
        .context("the filesystem in the exported volume")?;
    table.row("e2fsck -fn", "clean", begin.elapsed());

    let begin = Instant::now();
    let back = scratch.join("back");
    std::fs::create_dir(&back)?;
    run_command(
        tool("debugfs")?
            .arg("-R")
            .arg(format!("rdump /src {}", back.display()))
            .arg(&exported),
    )?;
    run_command(
        Command::new("diff")
            .args(["-r", "--no-dereference"])
            .arg(scratch.join("sources"))
            .arg(back.join("src")),
    )
    .context("the source tree came back different")?;
    table.row(
        "diff -r",
        "every byte of the source tree is as it was",
        begin.elapsed(),
    );
    Ok(())
}
