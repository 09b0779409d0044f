//! A volume as a block device of the node that serves it.

use std::time::Duration;

use anyhow::{Result, ensure};
use block_rig::Machine;
use guest_rig::Form;

/// Kills of the daemon, and of its helper, while fio verifies; by the form of the test.
const KILLS: (u32, u32) = (3, 30);
/// Writes, reads back and compares, over and over, with flushes.
const VERIFY: &str = "( rm -f /run/stop /run/result; runs=0
    while [ ! -e /run/stop ]; do
        fio --name=verify --filename=$(readlink /dev/penstock/web) --direct=1 --ioengine=libaio --iodepth=16 \
            --rw=randwrite --bsrange=4k-64k --blockalign=4k --size=32M --fsync=32 --verify=crc32c \
            --verify_fatal=1 --verify_state_save=0 --randrepeat=0 > /run/fio.log 2>&1 \
            || { echo failed > /run/result; exit; }
        runs=$((runs + 1))
    done
    echo $runs > /run/result ) > /dev/null 2>&1 &";
/// A verify under load takes its time in an emulated machine.
const VERIFY_LIMIT: Duration = Duration::from_secs(300);

/// More requests are done than were.
const PROGRESS: &str = "dev=$(basename $(readlink /dev/penstock/web))
    set -- $(cat /sys/block/$dev/stat); before=$(($1 + $5))
    for i in $(seq 900); do
        set -- $(cat /sys/block/$dev/stat); test $(($1 + $5)) -gt $((before + 50)) && exit 0; sleep 0.1
    done; dmesg | tail -n 20; tail -n 30 /run/penstock.log; cat /run/fio.log; exit 1";

fn expect_verified(machine: &mut Machine) -> Result<()> {
    machine.sh("touch /run/stop")?;
    machine.vm().sh_until("test -e /run/result", VERIFY_LIMIT)?;
    let runs = machine.sh("cat /run/result")?;
    let log = machine.sh("cat /run/fio.log")?;
    ensure!(
        runs.parse::<u32>().is_ok_and(|runs| runs > 0),
        "fio: {runs}\n{log}"
    );
    let errors = machine.vm().io_errors()?;
    ensure!(errors.is_empty(), "{errors:?}");
    Ok(())
}

#[test]
fn a_block_device_outlives_daemon_and_helper() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.ok("volume create web 256M")?;
    assert_eq!(
        machine.ok("attach volume web --block --queues 2 2>/dev/null")?,
        "/dev/penstock/web"
    );
    machine.sh(VERIFY)?;
    machine.vm().run(PROGRESS, VERIFY_LIMIT)?;
    for _ in 0..Form::of_this_run().pick(KILLS.0, KILLS.1) {
        machine.sh(PROGRESS)?;
        machine.kill_daemon()?;
        machine.serve()?;
        machine.sh(PROGRESS)?;
        // The daemon ends with its helper, and somebody starts it again.
        machine.sh("for one in /proc/[0-9]*; do
                 ! grep -q block-device-helper $one/cmdline || kill -9 ${one#/proc/}
             done 2> /dev/null")?;
        machine.until("! kill -0 $(cat /run/penstock.pid) 2> /dev/null")?;
        machine.serve()?;
        machine.sh(PROGRESS)?;
    }
    expect_verified(&mut machine)?;
    machine.ok("detach web")?;
    machine.sh("test ! -e /dev/penstock/web && ! ls /dev/vduse/penstock-* 2> /dev/null")?;
    Ok(())
}

/// The kernel has no VDUSE: its nbd client makes the device. A kill costs a pause of half a minute.
#[test]
fn without_vduse_a_block_device_is_made_by_nbd() -> Result<()> {
    let mut machine = Machine::start_without_vduse()?;
    machine.ok("volume create web 320M")?;
    let told = machine.ok("status")?;
    ensure!(told.contains("nbd"), "{told}");
    machine.ok("attach volume web --block 2>/dev/null")?;
    let told = machine.ok("attachment list --json")?;
    ensure!(told.contains("\"block_device\": \"/dev/nbd"), "{told}");
    machine.sh(VERIFY)?;
    for _ in 0..Form::of_this_run().pick(1, KILLS.1) {
        machine.sh(PROGRESS)?;
        machine.kill_daemon()?;
        machine.serve()?;
        machine.sh(PROGRESS)?;
    }
    expect_verified(&mut machine)?;

    machine.sh("mkfs.xfs -q /dev/penstock/web && mount -t xfs /dev/penstock/web /mnt")?;
    machine.sh("dd if=/dev/urandom of=/mnt/a bs=1M count=64 2> /dev/null && sync")?;
    machine.sh("md5sum /mnt/a > /run/sum")?;
    let told = machine.refused("detach web")?;
    ensure!(told.contains("in use"), "{told}");
    machine.ok("volume resize web 512M")?;
    machine.until("test $(blockdev --getsize64 /dev/penstock/web) = 536870912")?;
    machine
        .sh("xfs_growfs /mnt > /dev/null; echo 3 > /proc/sys/vm/drop_caches; md5sum -c /run/sum")?;
    machine.sh("umount /mnt && xfs_repair -n /dev/penstock/web 2> /dev/null")?;
    machine.sh("blkdiscard /dev/penstock/web && cmp -n 67108864 /dev/zero /dev/penstock/web")?;
    machine.ok("detach web")?;
    machine.sh("test ! -e /dev/penstock/web && ! grep -q penstock /sys/block/nbd*/backend")?;
    machine.ok("attach volume web --block --read-only")?;
    machine.sh("test $(blockdev --getro /dev/penstock/web) = 1")?;
    machine.ok("detach web")?;
    let errors = machine.vm().io_errors()?;
    ensure!(errors.is_empty(), "{errors:?}");
    Ok(())
}

#[test]
fn a_block_device_is_a_disk_to_the_node() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.ok("volume create web 320M")?;
    machine.ok("attach volume web --block")?;
    let told = machine.ok("attachment list --json")?;
    ensure!(told.contains("\"block_device\": \"/dev/vd"), "{told}");
    let told = machine.ok("status")?;
    ensure!(told.contains("vduse"), "{told}");
    // The kernel knows the volume by its serial.
    let serial = machine.sh("cat /sys/block/$(basename $(readlink /dev/penstock/web))/serial")?;
    let shown = machine.ok("volume show web --json")?.replace('-', "");
    ensure!(shown.contains(&serial), "{serial}: {shown}");

    // A file system; what was synced outlives a kill, and space comes back.
    machine.sh("mkfs.xfs -q /dev/penstock/web && mount -t xfs /dev/penstock/web /mnt")?;
    machine.sh("dd if=/dev/urandom of=/mnt/a bs=1M count=64 2> /dev/null && sync")?;
    machine.sh("md5sum /mnt/a > /run/sum")?;
    machine.kill_daemon()?;
    machine.serve()?;
    machine.sh("echo 3 > /proc/sys/vm/drop_caches; md5sum -c /run/sum")?;
    let told = machine.refused("detach web")?;
    ensure!(
        told.contains("in use") && told.contains("unmount"),
        "{told}"
    );
    machine.sh("touch /mnt/b && sync")?;

    // It grows while it is mounted.
    machine.ok("volume resize web 512M")?;
    machine.until("test $(blockdev --getsize64 /dev/penstock/web) = 536870912")?;
    machine.sh("xfs_growfs /mnt > /dev/null && umount /mnt && xfs_repair -n /dev/penstock/web")?;

    // Discarded blocks are zeroes, and are given back.
    machine.sh("blkdiscard /dev/penstock/web && cmp -n 67108864 /dev/zero /dev/penstock/web")?;
    machine.until(
        "used=$(penstock --data /run/penstock status --json \
             | sed -n 's/.*\"used_bytes\": \\([0-9]*\\).*/\\1/p')
         test $used -lt 16777216 || { echo $used; exit 1; }",
    )?;

    for (words, told) in [
        ("attach volume web --block", "/dev/penstock/web"),
        ("attach volume nope --block", "nope"),
        ("attach volume web --block --socket /run/a.sock", "--socket"),
        ("attach volume web --block --incoming", "--incoming"),
        ("attach volume web", "--socket"),
    ] {
        let line = machine.refused(words)?;
        ensure!(line.contains(told), "{words}: {line}");
    }
    machine.ok("detach web")?;
    machine.ok("attach volume web --block --read-only")?;
    machine.sh("test $(blockdev --getro /dev/penstock/web) = 1")?;
    machine.sh("! dd if=/dev/zero of=$(readlink /dev/penstock/web) bs=4k count=1 oflag=direct 2> /dev/null")?;
    machine.ok("detach web")?;
    machine.ok("volume delete web --yes")?;
    Ok(())
}
