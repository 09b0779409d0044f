//! The version of Penstock before this one, for the tests of an upgrade: built once from this repository's
//! history.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::build::{binary, cargo, check, target_directory, workspace};

/// Holds the commit of that version.
const COMMIT_FILE: &str = "tests/cluster/previous-version";

/// The built binary, or `None` where the history does not reach back to that version, as in a shallow clone.
pub fn previous() -> Result<Option<PathBuf>> {
    let commit = std::fs::read_to_string(workspace().join(COMMIT_FILE))
        .with_context(|| format!("read {COMMIT_FILE}"))?;
    let commit = commit.trim();
    let kept = target_directory()?.join("previous").join(commit);
    let built = kept.join("penstock");
    if built.is_file() {
        return Ok(Some(built));
    }
    if !is_known(commit)? {
        return Ok(None);
    }
    eprintln!("xtask: building the version to upgrade from, {commit}");
    let source = kept.join("source");
    extract(commit, &source)?;
    build(&source)?;
    // Only a whole file ever bears the name.
    let partial = kept.join("penstock.partial");
    std::fs::copy(binary("penstock")?, &partial).context("keep the built version")?;
    std::fs::rename(&partial, &built).context("keep the built version")?;
    std::fs::remove_dir_all(&source).with_context(|| format!("remove {}", source.display()))?;
    Ok(Some(built))
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(workspace());
    git
}

fn is_known(commit: &str) -> Result<bool> {
    let mut look = git();
    look.args(["cat-file", "-e", &format!("{commit}^{{commit}}")]);
    let status = look.stderr(Stdio::null()).status();
    Ok(status.context("run git")?.success())
}

fn extract(commit: &str, source: &Path) -> Result<()> {
    if source.exists() {
        // Of an attempt that did not come to its end.
        std::fs::remove_dir_all(source).with_context(|| format!("remove {}", source.display()))?;
    }
    std::fs::create_dir_all(source).with_context(|| format!("make {}", source.display()))?;
    let mut archive = git()
        .args(["archive", "--format=tar", commit])
        .stdout(Stdio::piped())
        .spawn()
        .context("run git archive")?;
    let Some(stream) = archive.stdout.take() else {
        bail!("git archive has no output");
    };
    check(
        Command::new("tar")
            .arg("-xC")
            .arg(source)
            .stdin(Stdio::from(stream)),
    )?;
    let status = archive.wait().context("wait for git archive")?;
    ensure!(status.success(), "git archive {commit} failed");
    Ok(())
}

/// In the same place as everything else, so that RocksDB is not compiled once more: with what all packages
/// together want of their dependencies, as [`crate::build::build`] does it.
fn build(source: &Path) -> Result<()> {
    let features = "vhost-backend/fuzzing";
    let what = ["build", "--workspace", "--bin", "penstock", "--locked"];
    check(
        cargo()?
            .current_dir(source)
            .args(what)
            .args(["--features", features]),
    )
}
