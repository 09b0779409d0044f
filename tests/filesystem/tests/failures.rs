//! What guests see of daemons that die, of nodes that lose their power, and of a host that is cut off.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions, CutDirection};
use filesystem_rig::scripts::{LIMIT, has_marked, in_background, passes};
use filesystem_rig::{PROGRAM_NAME as NAME, attach, mounted_with, tree_of};
use guest_rig::paths::penstock_binary;
use guest_rig::{Daemon, Form, Tree, Vm};

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
/// The cluster has ended a host's session within this.
const SESSION_LIMIT: Duration = Duration::from_secs(60);

/// Files that are flushed, by name and content.
const WRITE: &str = "
    mkdir $dir
    for i in $(seq $files); do
        dd if=/dev/urandom of=$dir/$i bs=$((i * 1000)) count=1 conv=fsync 2> /dev/null
        md5sum < $dir/$i > $dir/$i.sum
        sync $dir/$i.sum
    done";
const CHECK: &str = "
    [ $(ls $dir | wc -l) = $((2 * files)) ]
    for i in $(seq $files); do
        [ $(stat -c %s $dir/$i) = $((i * 1000)) ]
        [ \"$(md5sum < $dir/$i)\" = \"$(cat $dir/$i.sum)\" ]
    done";

fn with(dir: &str, files: u32, script: &str) -> String {
    format!("dir={dir} files={files}\n{script}")
}

/// What a mapping's msync has flushed.
const MAPPED: &str = "
    [ $(stat -c %s $dir.mapped) = 262144 ]
    [ $(tr -dc m < $dir.mapped | wc -c) = 262144 ]";
/// What a mount's end has.
const UNMOUNTED: &str = "
    [ $(stat -c %s $dir.unmounted) = 400000 ]
    [ $(tr -dc k < $dir.unmounted | wc -c) = 400000 ]";

/// Before every other cut a file is mapped, and some are written that nobody flushes; before the others the
/// mount ends with something that was not flushed before.
fn flush_otherwise(vm: &mut Vm, cut: u64, dir: &str) -> Result<()> {
    if cut % 2 == 0 {
        let map = format!("{NAME} map {dir}.mapped 262144 m msync /run/mark");
        in_background(vm, &map)?;
        has_marked(vm, "/run/mark")?;
        let write = "for i in 1 2 3 4; do head -c 500000 /dev/urandom > $dir.$i; done";
        return passes(vm, &with(dir, 0, write));
    }
    // The cut comes before 5 seconds have passed, after which anything is written back, unless the machine is
    // loaded.
    let unmount = "head -c 400000 /dev/zero | tr '\\0' k > $dir.unmounted
        umount /mnt";
    passes(vm, &with(dir, 0, unmount))
}

fn guest_of(cluster: &Cluster, number: u8) -> Result<Vm> {
    guest_at(attach(cluster.node(number)?.daemon(), "tree", &[])?)
}

fn guest_at(tree: Tree) -> Result<Vm> {
    mounted_with(vec![tree], &[(Path::new(PROGRAM), NAME)])
}

#[test]
fn a_daemon_that_dies_takes_the_mount_along_and_nothing_else() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "1G", "--preallocation", "off"];
    let mut daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let mut vm = guest_at(attach(&daemon, "tree", &[])?)?;
    passes(&mut vm, &with("/mnt/files", 20, WRITE))?;
    // One writes on when the daemon dies.
    vm.sh(
        "(i=0; while i=$((i + 1)) && echo $i > /mnt/more && sync /mnt/more; do echo $i > /run/flushed; done) \
             > /dev/null 2>&1 &",
    )?;
    vm.sh_until("[ $(cat /run/flushed) -gt 5 ]", LIMIT)?;
    daemon.kill()?;
    // QEMU neither tells the guest, nor connects such a device again: calls wait. None succeeds, and the
    // guest is fine but for that.
    vm.sh(
        "(cat /mnt/files/7 > /run/asked; echo $? > /run/status) > /dev/null 2>&1 &
           sleep 5; [ ! -s /run/asked ] && ! grep -qx 0 /run/status 2> /dev/null",
    )?;
    let flushed: u64 = vm.sh("cat /run/flushed")?.parse()?;
    drop(vm);

    daemon.start_again()?;
    let mut vm = guest_at(tree_of(&daemon, "tree"))?;
    passes(&mut vm, &with("/mnt/files", 20, CHECK))?;
    // What was flushed, or what was written when it was not flushed yet: truncated, or whole.
    let more = vm.sh("cat /mnt/more")?;
    let is_next = more.is_empty() || more.parse() == Ok(flushed + 1);
    ensure!(
        more == flushed.to_string() || is_next,
        "{more:?} is there, {flushed} was flushed"
    );
    vm.sh("echo on > /mnt/files/on && rm -r /mnt/*")?;
    vm.power_off()
}

#[test]
fn what_was_flushed_outlives_the_power_of_all_nodes() -> Result<()> {
    let cuts = Form::of_this_run().pick(2, 10);
    let options = ClusterOptions::new(penstock_binary()?, 3).powered(1 << 30);
    let mut cluster = Cluster::start(options)?;
    cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
    let mut vm = guest_of(&cluster, 1)?;
    for cut in 1..=cuts {
        let dir = format!("/mnt/cut{cut}");
        passes(&mut vm, &with(&dir, 20, WRITE))?;
        flush_otherwise(&mut vm, cut, &dir)?;
        let lost = cluster.cut_power_of_all(cut)?;
        drop(vm);
        eprintln!("lost blocks of each node: {lost:?}");
        for number in 1..=3 {
            cluster.node_mut(number)?.spawn()?;
        }
        cluster.wait_ready()?;
        vm = guest_at(tree_of(cluster.node(1)?.daemon(), "tree"))?;
        for before in 1..=cut {
            let dir = format!("/mnt/cut{before}");
            let flushed = if before % 2 == 0 { MAPPED } else { UNMOUNTED };
            for check in [CHECK, flushed] {
                passes(&mut vm, &with(&dir, 20, check)).with_context(|| cluster.report())?;
            }
        }
        // Of the others some may be there. They can be removed, and made again.
        vm.sh("rm -f /mnt/cut*.[0-9]")?;
    }
    vm.power_off()
}

#[test]
fn a_host_that_is_cut_off_has_nothing_stale_when_it_is_back() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
    let mut one = guest_of(&cluster, 1)?;
    let mut two = guest_of(&cluster, 2)?;
    two.sh("mkdir /mnt/d && echo old > /mnt/d/file && echo old > /mnt/d/renamed && sync && cat /mnt/d/*")?;
    one.sh("cat /mnt/d/* && ls /mnt/d")?;
    // It has them cached, holds one open that it has not read, and writes another one all the time.
    two.sh(
        "echo gone > /mnt/d/gone; mkfifo /run/go
         (exec 5< /mnt/d/gone; cat /run/go > /dev/null; cat <&5 > /run/gone; echo $? > /run/gone.status) \
             > /dev/null 2>&1 &
         (i=0; while :; do
             i=$((i + 1)); echo $i > /mnt/d/two && sync /mnt/d/two; echo $? >> /run/wrote
         done) > /dev/null 2>&1 &
         sleep 2; cat /mnt/d/file; stat /mnt/d/* > /dev/null
         ls -l /proc/[0-9]*/fd 2> /dev/null | grep -q /mnt/d/gone",
    )?;
    cluster.network()?.cut(2, CutDirection::Both)?;

    // Whoever changes what it has cached waits until its session is ended.
    let change = "cd /mnt/d
        echo new > file
        mv renamed other
        echo new > renamed
        mkdir made
        rm -f two gone
        sync
        [ $(cat file) = new ]
        cd /";
    passes(&mut one, change).with_context(|| cluster.report())?;
    // A call of the guest that is cut off waits, or fails. It does not succeed with what was.
    two.sh("cat /mnt/d/file > /run/cut 2> /dev/null &
         sleep 3; [ ! -s /run/cut ]")?;
    cluster.network()?.heal_all()?;
    let check = "[ $(cat /mnt/d/file) = new ] && [ $(cat /mnt/d/other) = old ] && \
                 [ $(cat /mnt/d/renamed) = new ] && [ -d /mnt/d/made ]";
    two.sh_until(check, SESSION_LIMIT)
        .with_context(|| cluster.report())?;
    two.sh("! grep -q old /run/cut")?;
    // What it had open, and others have removed, is gone.
    two.sh("echo > /run/go")?;
    two.sh_until("test -e /run/gone.status", LIMIT)?;
    two.sh("[ ! -s /run/gone ] && [ $(cat /run/gone.status) != 0 ]")?;
    // It writes on, too.
    let wrote = two.sh("wc -l < /run/wrote")?;
    two.sh_until(
        &format!("[ $(grep -cx 0 /run/wrote) -gt {wrote} ]"),
        SESSION_LIMIT,
    )?;
    one.power_off()?;
    two.power_off()
}

#[test]
fn a_host_that_dies_while_it_writes_leaves_whole_files() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
    let mut one = guest_of(&cluster, 1)?;
    let mut two = guest_of(&cluster, 2)?;
    passes(&mut two, &with("/mnt/flushed", 20, WRITE))?;
    two.sh("mkdir /mnt/dirty
            (i=0; while :; do
                i=$((i + 1)); head -c 300000 /dev/zero | tr '\\0' x > /mnt/dirty/$i; echo $i > /run/last
            done) > /dev/null 2>&1 &")?;
    two.sh_until("[ $(cat /run/last) -gt 5 ]", LIMIT)?;
    cluster.node_mut(2)?.kill()?;
    drop(two);

    passes(&mut one, &with("/mnt/flushed", 20, CHECK)).with_context(|| cluster.report())?;
    // What is there of the others has no bytes but those that were written, or holes.
    passes(
        &mut one,
        "for file in /mnt/dirty/*; do
             [ $(stat -c %s $file) -le 300000 ]
             [ $(tr -d 'x\\0' < $file | wc -c) = 0 ]
             echo again > $file
             [ $(cat $file) = again ]
         done
         rm -r /mnt/dirty /mnt/flushed",
    )
    .with_context(|| cluster.report())?;
    cluster.node_mut(2)?.spawn()?;
    cluster.wait_ready()?;
    let mut two = guest_at(tree_of(cluster.node(2)?.daemon(), "tree"))?;
    two.sh("[ -z \"$(ls -A /mnt)\" ] && echo two > /mnt/two && sync")?;
    one.sh("[ $(cat /mnt/two) = two ]")?;
    one.power_off()?;
    two.power_off()
}
