//! Calls of Cargo from within Cargo.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use guest_rig::paths::cache_root;

/// The root of the workspace, whichever directory the caller stands in. Cargo names it when it runs xtask:
/// what it named while xtask was built may be another clone, because clones share what is built.
pub fn workspace() -> &'static Path {
    static WORKSPACE: LazyLock<PathBuf> = LazyLock::new(|| {
        let own = std::env::var_os("CARGO_MANIFEST_DIR");
        let own = own.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        own.parent().unwrap_or(Path::new(".")).to_owned()
    });
    &WORKSPACE
}

/// Where builds go: `CARGO_TARGET_DIR`, or a place beside the other caches that several checkouts share,
/// because RocksDB takes minutes to compile.
pub fn target_directory() -> Result<PathBuf> {
    match std::env::var_os("CARGO_TARGET_DIR").filter(|value| !value.is_empty()) {
        Some(directory) => Ok(workspace().join(directory)),
        None => Ok(cache_root()?.join("target")),
    }
}

/// A call of Cargo in the workspace.
///
/// Cargo tells xtask which package it is of, in its environment. A build script that asks for such variables
/// (that of `ring` does) would run again for every change between `cargo xtask` and Cargo by hand, and nearly
/// everything would be compiled again: it is not passed on.
pub fn cargo() -> Result<Command> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(workspace())
        .env("CARGO_TARGET_DIR", target_directory()?);
    for (name, _) in std::env::vars_os() {
        let is_ours = |prefix: &str| name.as_encoded_bytes().starts_with(prefix.as_bytes());
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].into_iter().any(is_ours) {
            command.env_remove(&name);
        }
    }
    Ok(command)
}

/// Builds the workspace's binaries, of the very crates that the tests are built of, so that nothing is
/// compiled twice. For that all packages are built at once, which fixes the features of what they depend
/// on, and with the feature that the tests enable; it adds modules which the binaries do not use.
pub fn build() -> Result<()> {
    let features = "vhost-backend/fuzzing";
    check(cargo()?.args(["build", "--workspace", "--bins", "--features", features]))
}

/// The built binary called `name`.
pub fn binary(name: &str) -> Result<PathBuf> {
    Ok(target_directory()?.join("debug").join(name))
}

/// Runs a command that talks to the terminal itself; its failure is ours.
pub fn check(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("run {:?}", command.get_program()))?;
    if !status.success() {
        bail!(
            "{command:?} failed: {}",
            guest_rig::process::describe(status)
        );
    }
    Ok(())
}

/// Whether `cargo NAME` exists.
pub fn has_subcommand(name: &str) -> bool {
    guest_rig::paths::find_program(&format!("cargo-{name}")).is_some() || in_cargo_home(name)
}

fn in_cargo_home(name: &str) -> bool {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")));
    home.is_some_and(|home| home.join("bin").join(format!("cargo-{name}")).is_file())
}
