//! The suites that others test filesystems with, in a guest: pjdfstest asks for each call and error of POSIX,
//! fsx does at random to one file what it knows the content of.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use filesystem_rig::{attach, boot_with};
use guest_rig::{Daemon, Form, Tool, Vm};

const PJDFSTEST: Tool = Tool {
    name: "pjdfstest",
    version: "0.2.2",
    is_static: true,
    needs: "libacl1-dev, which `cargo xtask packages` installs",
};
/// Of all its tests that are not left out, at least so many in a thousand pass.
const PASSED_PER_MILLE_MIN: u64 = 995;
/// Of all of it, on an emulated machine that others use as well.
const LIMIT: Duration = Duration::from_secs(1200);

/// Tests that fail, by the names that pjdfstest gives them, and why. It is an error if one of them passes.
const FAILURES: [(&str, &str); 0] = [];

/// Tests that it leaves out, by a part of their names, and why.
const LEFT_OUT: [(&str, &str); 2] = [
    (
        "link::link_count_max",
        "the C library knows no limit of links of a FUSE filesystem; tests/limits.rs reaches it",
    ),
    (
        REMOUNTING,
        "open::einval_invalid_combination leaves a file open for writing, on any filesystem of Linux, and \
         none can be made read-only after it: these run on their own",
    ),
];
/// What of it the short form runs: the calls that change most at once.
const SHORT: &[&str] = &[
    "-c /run/pjdfstest.toml rename::",
    "-c /run/pjdfstest.toml unlink::",
];
/// Tests for which the filesystem is made read-only.
const REMOUNTING: &str = "::erofs";

const FSX: Tool = Tool {
    name: "fsx",
    version: "0.3.2",
    is_static: true,
    needs: "libc6-dev",
};
/// Calls of fsx with one seed.
const CALLS: u32 = 2000;
/// All that it can do; most of its files are longer than one of our extents of a small write.
const FSX_CONFIG: &str = "
flen = 3000000
[opsize]
max = 300000
[weights]
close_open = 3
read = 10
write = 10
mapread = 10
mapwrite = 10
invalidate = 2
truncate = 5
fsync = 1
fdatasync = 1
posix_fallocate = 2
punch_hole = 5
sendfile = 3
posix_fadvise = 3
copy_file_range = 5
";

/// The users that it takes, and what it may expect.
fn set_up(vm: &mut Vm) -> Result<()> {
    let expected: Vec<String> = FAILURES
        .iter()
        .map(|(name, _)| format!("{name:?}"))
        .collect();
    vm.sh(&format!(
        "set -e
         mount -t virtiofs tree /mnt
         printf 'root:x:0:0::/:/bin/sh\\nnobody:x:65534:65534::/:/bin/sh\\ntests:x:1000:1000::/:/bin/sh\\n' \\
             > /etc/passwd
         printf 'root:x:0:\\nnobody:x:65534:\\ntests:x:1000:\\n' > /etc/group
         chmod 755 /mnt
         cat > /run/pjdfstest.toml <<'END'
[features]
posix_fallocate = {{}}
rename_ctime = {{}}
utime_now = {{}}
utimensat = {{}}
[settings]
naptime = 0.01
allow_remount = false
expected_failures = [{}]
END
         sed 's/allow_remount = false/allow_remount = true/' /run/pjdfstest.toml > /run/remounting.toml",
        expected.join(", ")
    ))
    .map(drop)
}

/// How many tests came to what.
#[derive(Debug, Default)]
struct Counts {
    passed: u64,
    failed: u64,
    left_out: u64,
}

impl Counts {
    /// Adds those of a run, by what pjdfstest printed.
    fn add(&mut self, printed: &str) -> Result<()> {
        for (name, how) in printed.lines().filter_map(verdict) {
            match how {
                "ok" => self.passed += 1,
                "failed as expected" => self.failed += 1,
                "skipped" if LEFT_OUT.iter().any(|(part, _)| name.contains(part)) => {
                    self.left_out += 1;
                }
                _ => bail!("{name}: {how}"),
            }
        }
        Ok(())
    }
}

/// What a line says of a test: its name, and how it ended.
fn verdict(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.split_once(' ')?;
    let is_name = name.contains("::") && !name.starts_with('\t');
    is_name.then_some((name, rest.trim()))
}

#[test]
fn pjdfstest_passes_but_for_what_is_listed() -> Result<()> {
    let program = PJDFSTEST.binary()?;
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "2G", "--preallocation", "off"];
    let daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let tree = attach(&daemon, "tree", &[])?;
    let mut vm = boot_with(vec![tree], &[(&program, "pjdfstest")])?;
    set_up(&mut vm)?;
    let mut counts = Counts::default();
    let remounting = format!("-c /run/remounting.toml {REMOUNTING}");
    let rest = Form::of_this_run().pick(SHORT, &["-c /run/pjdfstest.toml"]);
    for args in [&[remounting.as_str()], rest].concat() {
        let run = format!("NO_COLOR=1 pjdfstest -p /mnt -s /tmp {args} 2>&1");
        let output = vm.run(&run, LIMIT)?;
        eprintln!("{}", output.text);
        let before = counts.passed;
        counts.add(&output.text)?;
        ensure!(counts.passed > before, "no test passed: pjdfstest {args}");
        ensure!(output.code == 0, "pjdfstest ended with {}", output.code);
    }
    eprintln!("{counts:?}");
    ensure!(counts.failed == FAILURES.len() as u64, "{counts:?}");
    let all = counts.passed + counts.failed;
    ensure!(
        counts.passed > 0 && counts.passed * 1000 >= PASSED_PER_MILLE_MIN * all,
        "{counts:?}"
    );
    vm.sh("umount /mnt")?;
    vm.power_off()
}

/// Runs fsx with one seed after the other, until so many seconds have passed; then all that it left is
/// compared with what a fresh mount reads.
fn random_calls(vm: &mut Vm, name: &str, seconds: u64, first_seed: u64) -> Result<u64> {
    let script = format!(
        "set -e
         mkdir /mnt/{name} /run/{name}
         cat > /run/{name}/config <<'END'
{FSX_CONFIG}
END
         end=$(($(date +%s) + {seconds})) seed={first_seed}
         while :; do
             fsx -f /run/{name}/config -N {CALLS} -S $seed -P /run/{name} /mnt/{name}/$seed \\
                 > /run/{name}/out 2>&1 || {{ echo seed $seed; tail -n 60 /run/{name}/out; exit 1; }}
             # The last few are kept.
             rm -f /mnt/{name}/$((seed - 4))
             seed=$((seed + 1))
             [ $(date +%s) -lt $end ] || break
         done
         echo $((seed - {first_seed}))"
    );
    let limit = LIMIT + Duration::from_secs(seconds);
    let output = vm.run(&script, limit)?;
    ensure!(output.code == 0, "fsx: {}", output.text);
    output.text.trim().parse().context("how many seeds")
}

#[test]
fn fsx_reads_what_it_wrote() -> Result<()> {
    // Half of the two hours; the other half is that of the stress of a tree.
    let seconds = Form::of_this_run().pick(20, 3600);
    let program = FSX.binary()?;
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "4G", "--preallocation", "off"];
    let daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let tree = attach(&daemon, "tree", &[])?;
    let mut vm = boot_with(vec![tree], &[(&program, "fsx")])?;
    vm.sh("mount -t virtiofs tree /mnt")?;
    let seeds = random_calls(&mut vm, "fsx", seconds, 1)?;
    eprintln!("{seeds} seeds of {CALLS} calls");
    let sums = "cd /mnt && md5sum $(find . -type f | sort); cd /";
    let before = vm.sh(sums)?;
    vm.sh("umount /mnt && mount -t virtiofs tree /mnt")?;
    let after = vm.sh(sums)?;
    ensure!(!before.is_empty() && before == after, "{before}\n{after}");
    vm.sh("umount /mnt")?;
    vm.power_off()
}
