//! Commands whose failure says what they printed, on this machine and within a tree.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::Work;

/// Lines of a failed command's output that the error quotes.
const QUOTED_LINES: usize = 20;

/// Whether this process may make files of other users: asked of the owner of its own entry in /proc.
pub(crate) fn is_root() -> Result<bool> {
    let own = std::fs::metadata("/proc/self").context("look at /proc/self")?;
    Ok(own.uid() == 0)
}

/// Runs to the end and returns what it printed on stdout.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| {
        format!("start {name}: is it installed? `cargo xtask packages` does it")
    })?;
    if !output.status.success() {
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines[lines.len().saturating_sub(QUOTED_LINES)..].join("\n");
        bail!("{command:?}: {}\n{tail}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What runs a script within a tree: with its own mounts, which end with it whatever becomes of this process.
const ENTER: &str = "set -e\n\
    mount -t proc proc \"$1/proc\"\n\
    mount -t sysfs -o ro sysfs \"$1/sys\"\n\
    mount --rbind /dev \"$1/dev\"\n\
    mount -t tmpfs tmpfs \"$1/tmp\"\n\
    if [ -n \"$2\" ]; then mkdir -p \"$1/build\"; mount --bind \"$2\" \"$1/build\"; fi\n\
    exec chroot \"$1\" /bin/sh -euc \"$3\"\n";

/// Runs the shell script `script` with `root` as its root directory; `work` is its `/build`.
pub(crate) fn run_within(
    root: &Path,
    work: Option<&Path>,
    epoch: u64,
    script: &str,
) -> Result<String> {
    let work = work.unwrap_or(Path::new(""));
    run(Command::new("unshare")
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ])
        .args(["sh", "-c", ENTER, "sh"])
        .args([root, work])
        .arg(script)
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .env("LC_ALL", "C.UTF-8")
        .env("TZ", "UTC")
        .env("HOME", "/root")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("SOURCE_DATE_EPOCH", epoch.to_string()))
}

impl Work<'_> {
    /// Runs a script among the tools, with this place as its `/build`.
    pub(crate) fn script(&self, script: &str) -> Result<String> {
        run_within(self.tools, Some(self.directory), self.epoch, script)
    }
}
