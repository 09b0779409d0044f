//! One tree in guests on several nodes: what one of them does, the others' next calls see, whichever node
//! leads, dies or comes back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions};
use filesystem_rig::scripts::{DATA, LIMIT, TREE, passes, passes_within};
use filesystem_rig::{attach, boot, gives_back, mounted};
use guest_rig::paths::penstock_binary;
use guest_rig::{Daemon, Form, Vm};

const MOUNT: &str = "mount -t virtiofs tree /mnt";
/// One round of a race, in which each call waits for the other guest's, on a machine that others share.
const ROUND_LIMIT: Duration = Duration::from_millis(200);

#[test]
fn linux_uses_a_tree_of_one_node_and_gets_all_space_back() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "4G", "--preallocation", "off"];
    let mut daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let before = daemon.used_bytes()?;
    let tree = attach(&daemon, "tree", &["--queues", "2"])?;
    let mut vm = boot(vec![tree.queues(2)])?;
    vm.sh(MOUNT)?;
    passes(&mut vm, TREE)?;
    passes(&mut vm, DATA)?;
    vm.sh("mount -t virtiofs tree /mnt && echo kept > /mnt/kept && umount /mnt")?;
    let refused = daemon.cli(&["fs", "delete", "tree", "--yes"]);
    ensure!(refused.is_err(), "a filesystem was deleted under its guest");
    vm.power_off()?;

    // A new process serves what the former one acknowledged. It dies in its turn as soon as some of what was
    // removed is given back.
    daemon.kill()?;
    daemon.start_again()?;
    let held = daemon.used_bytes()?;
    daemon.wait_used(LIMIT, |used| used < held)?;
    daemon.kill()?;
    daemon.start_again()?;
    let tree = filesystem_rig::tree_of(&daemon, "tree");
    let mut vm = boot(vec![tree.queues(2)])?;
    vm.sh(MOUNT)?;
    ensure!(vm.sh("cat /mnt/kept")? == "kept");
    vm.sh("rm -r /mnt/*; umount /mnt")?;
    vm.power_off()?;
    gives_back(&daemon, before)?;
    daemon.cli(&["detach", "tree"])?;
    daemon.cli(&["fs", "delete", "tree", "--yes"])?;
    guest_rig::process::wait_until(LIMIT, || {
        let all = daemon.json(&["fs", "list"])?;
        Ok(all.as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    let status = daemon.stop()?;
    ensure!(status.success(), "the daemon ended with {status}");
    Ok(())
}

/// Two guests that have mounted the same tree.
struct Pair {
    one: Vm,
    two: Vm,
    /// Their nodes.
    nodes: [u8; 2],
    /// The node that serves neither.
    third: u8,
}

/// The node that leads the tree's names.
fn leader(cluster: &Cluster) -> Result<u8> {
    cluster.wait("somebody leads", LIMIT, |cluster| {
        let shown = cluster.any()?.daemon().json(&["fs", "show", "tree"])?;
        let name = shown["leader"].as_str();
        let number = name.and_then(|name| name.strip_prefix("node")?.parse().ok());
        Ok(number)
    })
}

impl Pair {
    /// On the two nodes that do not lead.
    fn boot(cluster: &Cluster) -> Result<Self> {
        let third = leader(cluster)?;
        let nodes = match third {
            1 => [2, 3],
            2 => [1, 3],
            _ => [1, 2],
        };
        let guest = |number| mounted(cluster.node(number)?.daemon(), "tree");
        Ok(Self {
            one: guest(nodes[0])?,
            two: guest(nodes[1])?,
            nodes,
            third,
        })
    }

    /// What one does, the other's next call sees.
    fn see_each_other(&mut self) -> Result<()> {
        let steps = [
            // Written, and read at once; a name that was not there is; a size; a mode.
            ("echo hello > /mnt/a", "[ \"$(cat /mnt/a)\" = hello ]"),
            (
                "echo again >> /mnt/a",
                "[ \"$(stat -c %s /mnt/a)\" = 12 ] && [ \"$(tail -1 /mnt/a)\" = again ]",
            ),
            ("! cat /mnt/b 2> /dev/null", "echo b > /mnt/b"),
            ("[ \"$(cat /mnt/b)\" = b ]", "mv /mnt/b /mnt/c"),
            (
                "[ ! -e /mnt/b ] && [ \"$(cat /mnt/c)\" = b ]",
                "chmod 600 /mnt/c",
            ),
            ("[ \"$(stat -c %a /mnt/c)\" = 600 ]", "rm /mnt/c"),
            (
                "! stat /mnt/c 2> /dev/null",
                "mkdir -p /mnt/d/e && ln /mnt/a /mnt/d/e/f",
            ),
            (
                "[ \"$(stat -c %h /mnt/a)\" = 2 ]",
                "truncate -s 3 /mnt/d/e/f",
            ),
            ("[ \"$(cat /mnt/a)\" = hel ]", "rm -r /mnt/d"),
            ("[ \"$(ls /mnt)\" = a ]", "printf 'HEL' > /mnt/a"),
            ("[ \"$(cat /mnt/a)\" = HEL ]", "touch -d @1000000000 /mnt/a"),
            // Equal size and time: what was cached of it is not used when it is opened.
            (
                "printf 'lol' > /mnt/a && touch -d @1000000000 /mnt/a",
                "[ \"$(cat /mnt/a)\" = lol ]",
            ),
            (
                "[ \"$(stat -c %Y /mnt/a)\" = 1000000000 ] && rm /mnt/a",
                "[ -z \"$(ls /mnt)\" ]",
            ),
        ];
        for (at, (first, second)) in steps.iter().enumerate() {
            passes(&mut self.one, first).with_context(|| format!("step {at}, one"))?;
            passes(&mut self.two, second).with_context(|| format!("step {at}, two"))?;
        }
        Ok(())
    }

    /// Runs a script in both at a time; `$me` is one or two.
    fn both(&mut self, script: &str) -> Result<()> {
        self.both_within(script, LIMIT)
    }

    fn both_within(&mut self, script: &str, limit: Duration) -> Result<()> {
        let run = |vm: &mut Vm, me: &str| passes_within(vm, &format!("me={me}\n{script}"), limit);
        std::thread::scope(|scope| {
            let one = scope.spawn(|| run(&mut self.one, "one"));
            let two = run(&mut self.two, "two");
            one.join().expect("it does not panic")?;
            two
        })
    }

    fn race(&mut self, rounds: u32) -> Result<()> {
        self.one
            .sh("mkdir /mnt/races /mnt/names && touch /mnt/log")?;
        // Both guests append records, race to create the same directories and files, and rename files of
        // their own to the same name.
        let script = format!(
            "for i in $(seq {rounds}); do
                 echo \"$me $i\" >> /mnt/log
                 if mkdir /mnt/races/$i 2> /dev/null; then echo $i >> /run/won; fi
                 if (set -C; echo $me > /mnt/races/file$i) 2> /dev/null; then echo $i >> /run/made; fi
                 echo $me > /mnt/names/$me$i
                 mv /mnt/names/$me$i /mnt/names/final
             done"
        );
        self.both_within(&script, LIMIT + ROUND_LIMIT * rounds)?;
        let check = format!(
            "[ $(sort -u /mnt/log | wc -l) = {0} ]
             [ $(wc -l < /mnt/log) = {0} ]
             [ $(ls /mnt/races | wc -l) = {0} ]
             [ \"$(ls /mnt/names)\" = final ]
             grep -qx 'one\\|two' /mnt/names/final",
            2 * rounds
        );
        self.both(&check)?;
        for (list, what) in [("won", "directories"), ("made", "files")] {
            let count = |vm: &mut Vm| -> Result<u32> {
                Ok(vm
                    .sh(&format!("cat /run/{list} 2> /dev/null | wc -l"))?
                    .parse()?)
            };
            let (one, two) = (count(&mut self.one)?, count(&mut self.two)?);
            ensure!(
                one + two == rounds,
                "{one} and {two} of {rounds} {what} were made"
            );
        }
        self.both("rm -f /run/won /run/made")?;
        self.one.sh("rm -r /mnt/*")?;
        Ok(())
    }

    /// Records of one request each, that both append: none is lost, and none has bytes of another one.
    fn append_long_records(&mut self) -> Result<()> {
        for (size, records) in [("64k", 20), ("1M", 4)] {
            self.both(&format!(
                "head -c 1048576 /dev/zero | tr '\\0' ${{me%??}} > /run/record
                 for i in $(seq {records}); do
                     dd if=/run/record of=/mnt/long bs={size} count=1 oflag=append conv=notrunc 2> /dev/null
                 done"
            ))?;
            let check = format!(
                "for i in $(seq 0 $((2 * {records} - 1))); do
                     dd if=/mnt/long bs={size} skip=$i count=1 iflag=fullblock 2> /dev/null > /run/record
                     [ $(stat -c %s /run/record) -ge 65536 ]
                     [ $(tr -d o < /run/record | wc -c) = 0 ] || [ $(tr -d t < /run/record | wc -c) = 0 ]
                     head -c 1 /run/record
                 done > /run/letters
                 [ $(tr -dc o < /run/letters | wc -c) = {records} ]
                 [ $(tr -dc t < /run/letters | wc -c) = {records} ]
                 [ $(dd if=/mnt/long bs={size} skip=$((2 * {records})) 2> /dev/null | wc -c) = 0 ]"
            );
            self.both(&check)?;
            self.one.sh("rm /mnt/long")?;
        }
        Ok(())
    }

    /// A file that is removed on one host is read on where it is open, and is gone after.
    fn unlink_while_open(&mut self, cluster: &Cluster) -> Result<()> {
        self.one.sh("echo content > /mnt/open")?;
        self.two.sh("mkfifo /run/go
             (exec 5< /mnt/open; cat /run/go > /dev/null; cat <&5 > /run/read; echo >> /run/done) \
                 > /dev/null 2>&1 &")?;
        // It has it open by then.
        self.two.sh_until(
            "ls -l /proc/[0-9]*/fd 2> /dev/null | grep -q /mnt/open",
            LIMIT,
        )?;
        self.one.sh("rm /mnt/open && [ ! -e /mnt/open ]")?;
        std::thread::sleep(Duration::from_secs(5));
        self.two.sh("echo > /run/go")?;
        self.two.sh_until("test -e /run/done", LIMIT)?;
        ensure!(self.two.sh("cat /run/read")? == "content");
        self.two.sh("rm /run/go /run/done /run/read")?;
        // A removed file stays as long as the cache of a guest's kernel has it.
        for guest in [&mut self.one, &mut self.two] {
            guest.sh("sync && echo 2 > /proc/sys/vm/drop_caches")?;
        }
        cluster.wait("the file is gone", LIMIT, |cluster| {
            let shown = cluster.any()?.daemon().json(&["fs", "show", "tree"])?;
            Ok((shown["inodes"] == 1).then_some(()))
        })
    }

    /// Files are made and checked while the node that serves neither guest is killed and comes back.
    fn outlive_a_node(&mut self, cluster: &mut Cluster, files: u32) -> Result<()> {
        let victim = self.third;
        let make = format!(
            "mkdir /mnt/load
             for i in $(seq {files}); do
                 head -c $((i * 131)) /dev/zero | tr '\\0' x > /mnt/load/$i
             done"
        );
        std::thread::scope(|scope| -> Result<()> {
            let load = scope.spawn(|| passes(&mut self.one, &make));
            std::thread::sleep(Duration::from_secs(3));
            cluster.node_mut(victim)?.kill()?;
            std::thread::sleep(Duration::from_secs(10));
            cluster.node_mut(victim)?.spawn()?;
            load.join().expect("it does not panic")
        })?;
        let check = format!(
            "[ $(ls /mnt/load | wc -l) = {files} ]
             for i in $(seq {files}); do
                 [ $(tr -d x < /mnt/load/$i | wc -c) = 0 ]
                 [ $(stat -c %s /mnt/load/$i) = $((i * 131)) ]
             done"
        );
        passes(&mut self.two, &check)?;
        self.two.sh("rm -r /mnt/load")?;
        cluster.wait_ready()?;
        Ok(())
    }
}

#[test]
fn two_guests_on_two_nodes_see_one_tree() -> Result<()> {
    let (rounds, files, kills) = match Form::of_this_run() {
        Form::Short => (100, 100, 1),
        Form::Long => (5000, 1000, 6),
    };
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
    let mut pair = Pair::boot(&cluster)?;
    // The one that leads; later ones may.
    pair.outlive_a_node(&mut cluster, files)?;
    pair.see_each_other()?;
    pair.race(rounds)?;
    pair.append_long_records()?;
    pair.unlink_while_open(&cluster)?;
    for _ in 1..kills {
        pair.outlive_a_node(&mut cluster, files)?;
    }
    let Pair {
        one, two, nodes, ..
    } = pair;
    two.power_off()?;

    // The host of a guest dies: what was synced is there.
    let mut one = one;
    one.sh("for i in $(seq 20); do echo $i > /mnt/file$i; done; sync")?;
    cluster.node_mut(nodes[0])?.kill()?;
    drop(one);
    let other = cluster.node(nodes[1])?.daemon();
    other.cli(&["detach", "tree"])?;
    let tree = attach(other, "tree", &["--read-only"])?;
    let mut two = boot(vec![tree])?;
    two.sh(MOUNT)?;
    passes(
        &mut two,
        "for i in $(seq 20); do [ $(cat /mnt/file$i) = $i ]; done",
    )?;
    passes(&mut two, "fails touch /mnt/new")?;
    two.power_off()?;
    Ok(())
}
