//! What guests' kernels make of a file by themselves: mappings, O_DIRECT, access times, locks.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use cluster_rig::{Cluster, ClusterOptions};
use filesystem_rig::scripts::{LIMIT, ended, has_marked, in_background, passes};
use filesystem_rig::{PROGRAM_NAME as NAME, READ_ONLY_TAG, attach, attach_read_only, mounted_with};
use guest_rig::Vm;
use guest_rig::paths::penstock_binary;
use guest_rig::process::wait_until;

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
/// What is noted in the background can be seen within this.
const NOTED_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of the file that is mapped.
const MAPPED: &str = "256k";

/// Guests of two nodes.
struct Pair {
    one: Vm,
    two: Vm,
    cluster: Cluster,
}

impl Pair {
    fn boot() -> Result<Self> {
        let cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
        cluster.any()?.daemon().cli(&["fs", "create", "tree"])?;
        let programs = [(Path::new(PROGRAM), NAME)];
        let one = cluster.node(1)?.daemon();
        let two = cluster.node(2)?.daemon();
        let twice = vec![attach(two, "tree", &[])?, attach_read_only(two, "tree")?];
        Ok(Self {
            one: mounted_with(vec![attach(one, "tree", &[])?], &programs)?,
            two: mounted_with(twice, &programs)?,
            cluster,
        })
    }

    /// A store into a mapping is the other guest's after msync, and before the mapping ends.
    fn mapping(&mut self) -> Result<()> {
        let Self { one, two, .. } = self;
        one.sh(&format!("truncate -s {MAPPED} /mnt/mapped"))?;
        two.sh("tr -d '\\0' < /mnt/mapped | wc -c | grep -qx 0")?;
        // One call of msync after each page, for as long as it is not stopped.
        let store = format!(
            "fio --name=store --filename=/mnt/mapped --ioengine=mmap --rw=write --bs=4k --size={MAPPED} \
             --buffer_pattern=0x61 --fsync=1 --time_based --runtime=1000"
        );
        one.sh(&format!("{store} > /run/store 2>&1 & echo $! > /run/pid"))?;
        let all = "[ $(tr -dc a < /mnt/mapped | wc -c) = 262144 ]";
        two.sh_until(all, LIMIT).context("nothing is published")?;
        one.sh("kill -0 $(cat /run/pid) && kill $(cat /run/pid)")?;
        one.sh_until("! kill -0 $(cat /run/pid) 2> /dev/null", LIMIT)?;

        // What others store is seen by whoever maps it the next time.
        let load = |byte: &str| {
            format!(
                "fio --name=load --filename=/mnt/mapped --ioengine=mmap --rw=read --bs=4k --size={MAPPED} \
                 --verify=pattern --verify_pattern={byte} --verify_fatal=1"
            )
        };
        passes(two, &load("0x61"))?;
        for (byte, letter) in [("0x62", "b"), ("0x63", "c")] {
            let write = "dd of=/mnt/mapped bs=4k conv=notrunc,fsync iflag=fullblock";
            let zeros = format!("head -c 262144 /dev/zero | tr '\\0' {letter}");
            passes(one, &format!("{zeros} | {write}"))?;
            passes(two, &load(byte)).with_context(|| format!("after {letter}"))?;
        }
        Ok(())
    }

    /// The end of a mapping publishes what was stored into it, while the file stays open.
    fn unmapping(&mut self) -> Result<()> {
        let Self { one, two, .. } = self;
        let map = format!("{NAME} map /mnt/unmapped 262144 u munmap /run/mark");
        in_background(one, &map)?;
        has_marked(one, "/run/mark")?;
        two.sh("[ $(tr -dc u < /mnt/unmapped | wc -c) = 262144 ]")?;
        one.sh("test -e /run/mark && rm /run/mark")?;
        ended(one)?;
        // Linux 6.1 cannot.
        one.sh(&format!(
            "[ \"$({NAME} map-appended /mnt/unmapped a)\" = 'no device' ]"
        ))
        .map(drop)
    }

    /// Locks are those of the guest: another guest's are not seen.
    fn locks(&mut self) -> Result<()> {
        let Self { one, two, .. } = self;
        let look = format!("{NAME} locks look /mnt/locked");
        one.sh("echo > /mnt/locked")?;
        in_background(one, &format!("{NAME} locks hold /mnt/locked /run/mark"))?;
        has_marked(one, "/run/mark")?;
        one.sh(&format!("[ $({look}) = held ]"))?;
        two.sh(&format!("[ $({look}) = free ]"))?;
        one.sh("rm /run/mark")?;
        ended(one)?;
        one.sh(&format!("[ $({look}) = free ]")).map(drop)
    }

    /// A read-only mount sees what changes, by size and time of the last change.
    fn read_only(&mut self) -> Result<()> {
        let Self { one, two, .. } = self;
        one.sh("echo first > /mnt/changed")?;
        two.sh(&format!(
            "mkdir /run/read && mount -t virtiofs {READ_ONLY_TAG} /run/read"
        ))?;
        two.sh("[ $(cat /run/read/changed) = first ]")?;
        for word in ["other", "third", "longer", "short"] {
            one.sh(&format!("echo {word} > /mnt/changed"))?;
            two.sh(&format!("[ $(cat /run/read/changed) = {word} ]"))?;
        }
        two.sh("! echo > /run/read/changed && umount /run/read")
            .map(drop)
    }

    /// Past the cache and through it, in both guests, the same bytes are there.
    fn direct(&mut self) -> Result<()> {
        let Self { one, two, .. } = self;
        let size = "bs=64k count=8";
        for round in 0..4 {
            let (writer, reader) = match round % 2 {
                0 => (&mut *one, &mut *two),
                _ => (&mut *two, &mut *one),
            };
            let flags = if round < 2 {
                "oflag=direct"
            } else {
                "conv=fsync"
            };
            let sum = writer.sh(&format!(
                "dd if=/dev/urandom of=/run/data {size} iflag=fullblock 2> /dev/null
                 dd if=/run/data of=/mnt/direct {size} {flags} 2> /dev/null
                 md5sum < /run/data"
            ))?;
            let check = format!(
                "for flag in direct fullblock; do
                     [ \"$(dd if=/mnt/direct {size} iflag=$flag 2> /dev/null | md5sum)\" = '{sum}' ] || exit 1
                 done"
            );
            for vm in [reader, writer] {
                passes(vm, &check).with_context(|| format!("round {round}"))?;
            }
        }
        Ok(())
    }

    /// As relatime.
    fn access_times(&mut self) -> Result<()> {
        let Self { one, two, .. } = self;
        one.sh("echo x > /mnt/read && touch -d @1000000000 /mnt/read && touch -a -d @900000000 /mnt/read")?;
        two.sh("[ $(stat -c %X /mnt/read) = 900000000 ] && cat /mnt/read")?;
        // It was not newer than mtime.
        let accessed = two.sh_until(
            "a=$(stat -c %X /mnt/read); [ $a -gt 1000000000 ] && echo $a",
            NOTED_LIMIT,
        )?;
        // It is newer, and not old: another read changes nothing.
        let again = "umount /mnt && mount -t virtiofs tree /mnt && cat /mnt/read";
        two.sh(&format!("sleep 3; {again} && sleep 5"))?;
        two.sh(&format!("[ $(stat -c %X /mnt/read) = {accessed} ]"))?;
        // It is newer than mtime, and more than a day old.
        one.sh("touch -a -d @1200000000 /mnt/read")?;
        two.sh(&format!(
            "[ $(stat -c %X /mnt/read) = 1200000000 ] && {again}"
        ))?;
        noted(two, one, 1_200_000_000)?;
        two.sh("[ $(stat -c %Y /mnt/read) = 1000000000 ]").map(drop)
    }
}

/// The access time that one guest's read has set, as the other is told: newer than this. A host tells what it
/// has cached until something else of the file changes.
fn noted(by: &mut Vm, to: &mut Vm, than: u64) -> Result<u64> {
    let seen = wait_until(NOTED_LIMIT, || {
        by.sh("chmod 600 /mnt/read && chmod 644 /mnt/read")?;
        let told: u64 = to.sh("stat -c %X /mnt/read")?.parse()?;
        Ok((told > than).then_some(told))
    });
    seen.context("no access time is noted")
}

#[test]
fn mappings_direct_reads_access_times_and_locks_are_as_promised() -> Result<()> {
    let mut pair = Pair::boot()?;
    let steps = [Pair::mapping, Pair::unmapping, Pair::locks, Pair::read_only];
    for step in steps {
        step(&mut pair).with_context(|| pair.cluster.report())?;
    }
    pair.direct()?;
    pair.access_times()?;
    pair.one.power_off()?;
    pair.two.power_off()
}
