//! The version of Penstock before this one, for the tests of an upgrade: built once from this repository's
//! history.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::build::{cargo, check, target_directory, workspace};

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
    let binary = build(&source, &kept)?;
    // Only a whole file ever bears the name.
    let partial = kept.join("penstock.partial");
    std::fs::copy(binary, &partial).context("keep the built version")?;
    std::fs::rename(&partial, &built).context("keep the built version")?;
    for left in [source, kept.join("target")] {
        std::fs::remove_dir_all(&left).with_context(|| format!("remove {}", left.display()))?;
    }
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

/// In a place of its own, with the RocksDB that this version has compiled already if there is one: that alone
/// would take longer than all the rest. Both versions' bindings are of one release of it.
fn build(source: &Path, kept: &Path) -> Result<PathBuf> {
    let target = kept.join("target");
    let mut command = cargo()?;
    command
        .current_dir(source)
        .args(["build", "-p", "penstock", "--bin", "penstock", "--locked"])
        .arg("--target-dir")
        .arg(&target);
    reuse_rocksdb(&mut command, source)?;
    check(&mut command)?;
    Ok(target.join("debug/penstock"))
}

/// Makes a build of the sources in `source` link the RocksDB that the tests' build has compiled, and says
/// whether there is one.
pub fn reuse_rocksdb(build: &mut Command, source: &Path) -> Result<bool> {
    let Some(directory) = compiled_rocksdb(source)? else {
        return Ok(false);
    };
    build
        .env("ROCKSDB_LIB_DIR", directory)
        .env("ROCKSDB_STATIC", "1")
        // Whoever compiles RocksDB also links the library of C++.
        .args(["--config", "build.rustflags = [\"-Clink-arg=-lstdc++\"]"]);
    Ok(true)
}

/// Where this version's build has left RocksDB, if it is of the release that the other version binds to.
fn compiled_rocksdb(source: &Path) -> Result<Option<PathBuf>> {
    if rocksdb_of(source)? != rocksdb_of(workspace())? {
        return Ok(None);
    }
    let Ok(units) = std::fs::read_dir(target_directory()?.join("debug/build")) else {
        return Ok(None);
    };
    let outputs = units.flatten().map(|unit| unit.path().join("out"));
    // A build that was cut short has no library, or has not told of its end.
    let finished = |out: &PathBuf| {
        let told = out.with_file_name("output");
        out.join("librocksdb.a").is_file() && told.is_file()
    };
    Ok(outputs.filter(finished).max_by_key(|out| {
        let library = std::fs::metadata(out.join("librocksdb.a"));
        library.and_then(|library| library.modified()).ok()
    }))
}

/// The line of `Cargo.lock` that names the release of RocksDB's bindings.
fn rocksdb_of(workspace: &Path) -> Result<Option<String>> {
    let lock = workspace.join("Cargo.lock");
    let lock =
        std::fs::read_to_string(&lock).with_context(|| format!("read {}", lock.display()))?;
    let mut lines = lock.lines();
    let named = lines.find(|line| *line == "name = \"librocksdb-sys\"");
    Ok(named.and(lines.next()).map(str::to_owned))
}
