//! An inode that a guest's kernel has looked up stays until the kernel forgets it: a name that always exists
//! can always be opened, whichever guest replaces its file.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions};
use filesystem_rig::scripts::{LIMIT, passes};
use filesystem_rig::{PROGRAM_NAME as NAME, attach, attach_as, mounted_with};
use guest_rig::paths::penstock_binary;
use guest_rig::process::wait_until;
use guest_rig::{Form, Vm};

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
/// Tag with which the second guest mounts the tree from the first guest's node.
const SAME_NODE: &str = "same-node";

/// Two guests. The second mounts the tree from its own node and from the first guest's node.
struct Pair {
    cluster: Cluster,
    one: Vm,
    two: Vm,
}

impl Pair {
    fn boot() -> Result<Self> {
        let cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
        cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
        let programs = [(Path::new(PROGRAM), NAME)];
        let (here, there) = (cluster.node(1)?.daemon(), cluster.node(2)?.daemon());
        let one = mounted_with(vec![attach(here, "tree", &[])?], &programs)?;
        let trees = vec![
            attach(there, "tree", &[])?,
            attach_as(here, "tree", SAME_NODE)?,
        ];
        let mut two = mounted_with(trees, &programs)?;
        two.sh(&format!(
            "mkdir /run/{SAME_NODE} && mount -t virtiofs {SAME_NODE} /run/{SAME_NODE}"
        ))?;
        Ok(Self { cluster, one, two })
    }

    /// One process of the first guest replaces a file while other processes open it: another one of the first
    /// guest, and two of the second guest, one on each mount.
    fn replace_and_open(&mut self, seconds: u64) -> Result<()> {
        let Self { one, two, .. } = self;
        one.sh(&format!("{NAME} replace /mnt/f 1"))?;
        let limit = LIMIT + Duration::from_secs(2 * seconds);
        let run = |vm: &mut Vm, commands: &[String]| -> Result<()> {
            let commands = commands
                .iter()
                .map(|command| format!("{NAME} {command} {seconds} 2>&1 & pids=\"$pids $!\"\n"));
            let script = format!(
                "pids=\n{}code=0\nfor pid in $pids; do wait $pid || code=1; done\nexit $code",
                commands.collect::<String>()
            );
            let output = vm.run(&script, limit)?;
            eprintln!("{}", output.text.trim_end());
            ensure!(output.code == 0, "{}", output.text);
            Ok(())
        };
        let of_one = ["replace /mnt/f", "reopen /mnt/f"].map(str::to_owned);
        let of_two = [
            "reopen /mnt/f".to_owned(),
            format!("reopen /run/{SAME_NODE}/f"),
        ];
        std::thread::scope(|scope| {
            let first = scope.spawn(|| run(one, &of_one).context("the guest that replaces it"));
            let second = run(two, &of_two).context("the other guest");
            first.join().expect("it does not panic").and(second)
        })
    }

    /// Checks that no inode is kept that no kernel knows.
    fn end(mut self) -> Result<()> {
        self.one.sh("rm -r /mnt/* && umount /mnt")?;
        self.two.sh(&format!("umount /mnt /run/{SAME_NODE}"))?;
        let daemon = self.cluster.node(1)?.daemon();
        let is_empty = wait_until(LIMIT, || {
            let shown = daemon.json(&["fs", "show", "tree"])?;
            Ok((shown["inodes"] == 1).then_some(()))
        });
        is_empty.with_context(|| format!("{:?}", daemon.cli(&["fs", "show", "tree"])))?;
        self.one.power_off()?;
        self.two.power_off()?;
        Ok(())
    }
}

#[test]
fn a_name_that_always_exists_always_opens_while_it_is_replaced() -> Result<()> {
    let seconds = Form::of_this_run().pick(15, 600);
    let mut pair = Pair::boot()?;
    passes(&mut pair.one, &format!("{NAME} looked-up /mnt"))?;
    pair.replace_and_open(seconds)
        .with_context(|| pair.cluster.report())?;
    pair.end()
}
