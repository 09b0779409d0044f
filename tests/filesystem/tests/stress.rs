//! Guests of two nodes make, change and remove at random in one tree at once, each process in a directory of
//! its own, whose content it knows, or all of them in the same. Then both mount afresh, and read the same.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cluster_rig::{Cluster, ClusterOptions};
use filesystem_rig::scripts::passes_within;
use filesystem_rig::{PROGRAM_NAME as NAME, attach, mounted_with};
use guest_rig::paths::penstock_binary;
use guest_rig::{Form, Vm};

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
const MOUNT: &str = "mount -t virtiofs tree /mnt";
/// Processes of each kind in a guest.
const PROCESSES: u64 = 2;
/// Besides the time that it is told to take.
const LIMIT: Duration = Duration::from_secs(900);

struct Guest {
    vm: Vm,
    number: u8,
}

impl Guest {
    fn boot(cluster: &Cluster, number: u8) -> Result<Self> {
        let tree = attach(cluster.node(number)?.daemon(), "tree", &[])?;
        let vm = mounted_with(vec![tree], &[(Path::new(PROGRAM), NAME)])?;
        Ok(Self { vm, number })
    }

    /// Where the processes of this guest have their own directories.
    fn own(&self) -> impl Iterator<Item = String> + use<> {
        let number = self.number;
        (0..PROCESSES).map(move |process| format!("own{number}{process}"))
    }

    fn stress(&mut self, seed: u64, seconds: u64) -> Result<()> {
        let mut script = format!(
            "pids=
             run() {{ $@ 2> /run/error.$name > /run/model.$name & pids=\"$pids $!\"; }}
             stress='{NAME} stress'\n"
        );
        for (process, own) in self.own().enumerate() {
            let seed = seed + u64::from(self.number) * 100 + process as u64;
            script += &format!(
                "name={own}; run $stress own /mnt/{own} {seed} {seconds}
                 name=shared{process}; run $stress shared /mnt/shared {seed} {seconds}\n"
            );
        }
        script += "code=0
             for pid in $pids; do wait $pid || code=1; done
             cat /run/error.*; exit $code";
        let output = self.vm.run(&script, LIMIT + Duration::from_secs(seconds))?;
        ensure!(output.code == 0, "guest {}: {}", self.number, output.text);
        eprintln!("guest {}: {}", self.number, output.text.trim_end());
        Ok(())
    }

    fn mount_afresh(&mut self) -> Result<()> {
        passes_within(&mut self.vm, &format!("umount /mnt && {MOUNT}"), LIMIT)
    }

    fn digest(&mut self, args: &str) -> Result<String> {
        let output = self.vm.run(&format!("{NAME} digest {args}"), LIMIT)?;
        ensure!(output.code == 0, "guest {}: {}", self.number, output.text);
        Ok(output.text)
    }
}

/// The first lines that differ.
fn same(what: &str, one: &str, two: &str) -> Result<()> {
    if one == two {
        return Ok(());
    }
    let (mut one, mut two) = (one.lines(), two.lines());
    loop {
        let (left, right) = (one.next(), two.next());
        if left != right {
            bail!("{what}:\n{left:?}\n{right:?}");
        }
    }
}

/// One round, with directories of its own.
fn round(guests: &mut [Guest; 2], seed: u64, seconds: u64) -> Result<()> {
    let [one, two] = guests;
    one.vm.sh("mkdir /mnt/shared")?;
    std::thread::scope(|scope| {
        let first = scope.spawn(|| one.stress(seed, seconds));
        let second = two.stress(seed, seconds);
        first.join().expect("it does not panic").and(second)
    })?;
    let mut models = Vec::new();
    for guest in &mut *guests {
        for own in guest.own() {
            let model = guest.vm.run(&format!("cat /run/model.{own}"), LIMIT)?.text;
            models.push((own, model));
        }
        guest.mount_afresh()?;
    }
    let [one, two] = guests;
    let (first, second) = (one.digest("/mnt times")?, two.digest("/mnt times")?);
    same("what the guests read", &first, &second)?;
    for (own, model) in &models {
        for guest in [&mut *one, &mut *two] {
            let found = guest.digest(&format!("/mnt/{own}"))?;
            let what = format!("seed {seed}, {own} as guest {} reads it", guest.number);
            same(&what, model, &found)?;
        }
    }
    eprintln!("{} entries are the same", first.lines().count());
    passes_within(&mut one.vm, "rm -r /mnt/*", LIMIT)
}

#[test]
fn two_guests_that_change_a_tree_at_random_agree_on_it() -> Result<()> {
    // With the hour of fsx two hours.
    let (rounds, seconds) = Form::of_this_run().pick((1, 25), (6, 600));
    let cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
    let mut guests = [Guest::boot(&cluster, 1)?, Guest::boot(&cluster, 2)?];
    for seed in 1..=rounds {
        round(&mut guests, seed * 1000, seconds)
            .with_context(|| format!("round {seed}\n{}", cluster.report()))?;
    }
    for guest in guests {
        guest.vm.power_off()?;
    }
    Ok(())
}
