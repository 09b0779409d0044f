//! Calls of Cargo from within Cargo.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use guest_rig::paths::cache_root;
use serde::Deserialize;

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
/// on, and with the features that the tests enable; they add modules which the binaries do not use.
pub fn build() -> Result<()> {
    let features = features_of_tests()?.join(",");
    check(cargo()?.args(["build", "--workspace", "--bins", "--features", &features]))?;
    choose_penstock_binary()
}

/// The features of the workspace's packages that dev-dependencies enable, as `PACKAGE/FEATURE`.
fn features_of_tests() -> Result<Vec<String>> {
    let command = &mut cargo()?;
    command.args(["metadata", "--no-deps", "--format-version", "1"]);
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.context("run cargo metadata")?;
    if !output.status.success() {
        let status = guest_rig::process::describe(output.status);
        bail!("cargo metadata failed: {status}");
    }
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("what cargo metadata prints")?;
    let names: BTreeSet<&str> = metadata
        .packages
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    let dependencies = metadata.packages.iter().flat_map(|one| &one.dependencies);
    let ours = dependencies
        .filter(|one| one.kind.as_deref() == Some("dev") && names.contains(one.name.as_str()));
    let features = ours.flat_map(|one| {
        one.features
            .iter()
            .map(|name| format!("{}/{name}", one.name))
    });
    let mut found: BTreeSet<String> = features.collect();
    // Those that they enable in optional dependencies (`PACKAGE?/FEATURE`) are not enabled by them where only
    // binaries are built.
    for package in &metadata.packages {
        for (feature, enables) in &package.features {
            if !found.contains(&format!("{}/{feature}", package.name)) {
                continue;
            }
            let others = enables.iter().filter_map(|one| one.split_once('/'));
            let others = others.map(|(name, feature)| (name.trim_end_matches('?'), feature));
            let others = others.filter(|(name, _)| names.contains(name));
            found.extend(others.map(|(name, feature)| format!("{name}/{feature}")));
        }
    }
    Ok(found.into_iter().collect())
}

/// What `cargo metadata` tells, as far as it is used.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    features: BTreeMap<String, Vec<String>>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `dev`, `build`, or nothing.
    kind: Option<String>,
    features: Vec<String>,
}

/// Makes the rigs that run within xtask use the `penstock` that [`build`] builds. Cargo builds xtask itself
/// into another directory unless `CARGO_TARGET_DIR` is set, so a binary beside xtask is older or missing.
fn choose_penstock_binary() -> Result<()> {
    guest_rig::paths::choose_penstock_binary(binary("penstock")?);
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The demonstration of the appliance once looked for it beside xtask, where it is missing in a fresh
    /// clone.
    #[test]
    fn rigs_within_xtask_run_the_binary_that_xtask_builds() {
        choose_penstock_binary().unwrap();
        let run = guest_rig::paths::penstock_binary().unwrap();
        assert_eq!(run, binary("penstock").unwrap());
    }
}
