//! `test --readme`: runs the commands of the documents as a new user types them.
//!
//! HEAD is cloned into an empty folder, and the commands run there, with an environment that only has the
//! paths of the programs and of the build caches. `plan.rs` states for each command block how it is run, or
//! why it is not; a unit test fails if a block has no entry.

mod blocks;
mod plan;
mod scenes;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use guest_rig::paths::cache_root;

use self::blocks::{Block, command_blocks};
use self::plan::{DOCUMENTS, Way, entry_of};
use self::scenes::by_scene;
use crate::build::{build, check, target_directory, workspace};

/// Variables that a clean environment keeps: program paths and network settings.
const KEPT: [&str; 8] = [
    "PATH",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
];

/// Clones HEAD and runs the commands of the clone's documents with the clone's xtask.
pub fn test(long: bool) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the documents' commands need root: run this as root (with sudo, keep HOME and CARGO_HOME)"
    );
    let place = tempfile::Builder::new()
        .prefix("penstock-readme-")
        .tempdir()
        .context("make a directory for the clone")?;
    let (clone, home) = (place.path().join("penstock"), place.path().join("home"));
    check(
        Command::new("git")
            .args(["clone", "--quiet", "--no-local"])
            .arg(workspace())
            .arg(&clone),
    )?;
    let changes = Command::new("git")
        .args(["status", "--porcelain"])
        .current_dir(workspace())
        .output();
    if changes.is_ok_and(|output| !output.stdout.is_empty()) {
        eprintln!("xtask: changes that are not committed are not in the clone");
    }
    link_caches(&home)?;
    let mut command = Command::new("cargo");
    command
        .args(["xtask", "test", "--readme", "--in-clone"])
        .args(long.then_some("--long"))
        .current_dir(&clone)
        .env_clear()
        .envs(clean_environment(&home)?);
    check(&mut command)
}

/// Creates a home directory with links to this one's caches. They are links instead of variables: without
/// `CARGO_TARGET_DIR` a clone's xtask is built in the clone and Penstock in the cache, as for a new user.
fn link_caches(home: &Path) -> Result<()> {
    let own = cache_root()?;
    let cache = home.join(".cache/penstock");
    std::fs::create_dir_all(&cache).with_context(|| format!("make {}", cache.display()))?;
    let target = target_directory()?;
    std::fs::create_dir_all(&target).with_context(|| format!("make {}", target.display()))?;
    symlink(&target, cache.join("target")).context("link the directory of builds")?;
    for entry in std::fs::read_dir(&own).into_iter().flatten() {
        let entry = entry.with_context(|| format!("list {}", own.display()))?;
        if entry.file_name() != "target" {
            symlink(entry.path(), cache.join(entry.file_name())).context("link a cache")?;
        }
    }
    Ok(())
}

fn clean_environment(home: &Path) -> Result<Vec<(String, std::ffi::OsString)>> {
    let own = std::env::var_os("HOME").context("HOME is not set: set it")?;
    let kept = KEPT
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), std::env::var_os(name)?)));
    let mut environment: Vec<_> = kept.collect();
    for (name, default) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
        let given = std::env::var_os(name);
        let value = given.unwrap_or_else(|| PathBuf::from(&own).join(default).into());
        environment.push((name.to_owned(), value));
    }
    environment.push(("HOME".to_owned(), home.into()));
    Ok(environment)
}

/// Runs the commands of this checkout's documents. The checkout is a fresh clone.
pub fn test_in_clone(long: bool) -> Result<()> {
    let blocks = all_blocks()?;
    let begin = Instant::now();
    build()?;
    eprintln!("readme: built in {} s", begin.elapsed().as_secs());
    let begin = Instant::now();
    let typed = blocks.iter().filter_map(|(block, way)| match way {
        Way::Typed(scene) => Some((*scene, block)),
        _ => None,
    });
    for (scene, blocks) in by_scene(typed) {
        eprintln!("readme: {scene:?}");
        scene.play(&blocks)?;
    }
    eprintln!("readme: typed in {} s", begin.elapsed().as_secs());
    if long {
        for (block, _) in blocks.iter().filter(|(_, way)| *way == Way::InClone) {
            run_in_clone(block)?;
        }
    }
    report(&blocks, long);
    Ok(())
}

/// Types a block at a shell in the clone.
fn run_in_clone(block: &Block) -> Result<()> {
    for command in &block.commands {
        eprintln!("{}:{}: $ {}", block.document, block.line, command.text);
        let mut shell = Command::new("bash");
        shell.args(["--noprofile", "--norc", "-c", &command.text]);
        for (name, _) in std::env::vars_os() {
            // Cargo sets variables for the program that it runs. The shell must not inherit them.
            if name.as_encoded_bytes().starts_with(b"CARGO_") && name != "CARGO_HOME" {
                shell.env_remove(&name);
            }
        }
        let result = check(shell.current_dir(workspace()));
        result.with_context(|| format!("{}:{}", block.document, block.line))?;
    }
    Ok(())
}

fn all_blocks() -> Result<Vec<(Block, Way)>> {
    let mut all = Vec::new();
    for document in DOCUMENTS {
        let path = workspace().join(document);
        let text = std::fs::read_to_string(&path);
        let text = text.with_context(|| format!("read {}", path.display()))?;
        for block in command_blocks(document, &text) {
            let entry = entry_of(&block).with_context(|| {
                format!(
                    "{document}:{}: xtask/src/readme/plan.rs has no entry for this block",
                    block.line
                )
            })?;
            all.push((block, entry.way));
        }
    }
    Ok(all)
}

fn report(blocks: &[(Block, Way)], long: bool) {
    for (block, way) in blocks {
        let how = match way {
            Way::Typed(scene) => format!("typed ({scene:?})"),
            Way::InClone if long => "typed in the clone".to_owned(),
            Way::InClone => "slow: run with `cargo xtask test --readme --long`".to_owned(),
            Way::Test(package, test) => format!("typed by {package} {test}"),
            Way::Excepted(reason) => format!("not run: {reason}"),
        };
        println!("{}:{} {how}", block.document, block.line);
    }
}

#[cfg(test)]
mod tests;
