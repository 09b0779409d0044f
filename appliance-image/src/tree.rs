//! The appliance's root: Debian's tree, the kernel's modules, Penstock's package, and the files of `tree/`.
//!
//! The root is read-only and the same on every machine. What a machine keeps lies below `/var`, which begins
//! empty and is furnished at each boot by tmpfiles, from what the packages put there.

use std::fmt::Write as _;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::run_within;
use crate::roots::{Roots, copy_tree, unpack};
use crate::{Build, Work};

/// Parts of `/var` that only a system uses which installs packages.
const VAR_DROPPED: &[&str] = &[
    "backups", "cache", "lib/apt", "lib/dpkg", "lib/ucf", "log", "mail", "tmp",
];
/// Within the tree, with Penstock's package as `/build/penstock.deb`: installs it, and takes away what a
/// read-only system of this kind has no use for.
const FURNISH: &str = include_str!("furnish.sh");

/// Makes the tree, and returns where it is.
pub(crate) fn make(build: &Build<'_>, roots: &Roots, work: &Work<'_>) -> Result<PathBuf> {
    let tree = work.path("tree");
    std::fs::create_dir(&tree)?;
    unpack(&roots.appliance, &tree).context("unpack Debian's tree")?;
    copy_tree(&roots.kernel.join("usr/lib/modules"), &tree.join("usr/lib"))?;
    std::fs::copy(build.package, work.path("penstock.deb"))
        .with_context(|| format!("copy {}", build.package.display()))?;
    lay_over(&build.source.join("appliance-image/tree"), &tree)
        .context("copy the appliance's own files")?;
    write(
        &tree,
        "usr/share/penstock/update-key.pub",
        &build.signer.public_key_file()?,
    )?;
    name_release(&tree, build.version)?;
    run_within(&tree, Some(work.directory), work.epoch, FURNISH).context("furnish the root")?;
    keep_var(&tree).context("move /var out of the root")?;
    Ok(tree)
}

/// Copies files over the tree: directories 0755, programs 0755, all else 0644, owned by root.
fn lay_over(from: &Path, to: &Path) -> Result<()> {
    for entry in std::fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            if !target.is_dir() {
                std::fs::create_dir(&target)?;
            }
            lay_over(&source, &target)?;
        } else {
            std::fs::copy(&source, &target)
                .with_context(|| format!("copy {}", source.display()))?;
            let is_program = entry.metadata()?.mode() & 0o100 != 0;
            let mode = if is_program { 0o755 } else { 0o644 };
            std::fs::set_permissions(&target, std::fs::Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

fn write(tree: &Path, path: &str, text: &str) -> Result<()> {
    let target = tree.join(path);
    if let Some(directory) = target.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&target, text).with_context(|| format!("write {}", target.display()))
}

/// Adds which image this is to what Debian says of itself (os-release(5)).
fn name_release(tree: &Path, version: &str) -> Result<()> {
    let path = tree.join("usr/lib/os-release");
    let mut text = std::fs::read_to_string(&path).context("read os-release")?;
    text = text
        .lines()
        .filter(|line| !line.starts_with("PRETTY_NAME="))
        .fold(String::new(), |mut text, line| {
            text.push_str(line);
            text.push('\n');
            text
        });
    writeln!(text, "PRETTY_NAME=\"Penstock appliance {version}\"")?;
    writeln!(text, "IMAGE_ID=penstock\nIMAGE_VERSION={version}")?;
    std::fs::write(&path, text).context("write os-release")
}

/// Empties `/var` and leaves, for tmpfiles, lines that make its directories again, and copies of its files.
fn keep_var(tree: &Path) -> Result<()> {
    let var = tree.join("var");
    for dropped in VAR_DROPPED {
        let path = var.join(dropped);
        if path.is_dir() && !path.is_symlink() {
            std::fs::remove_dir_all(&path)?;
        }
    }
    let factory = tree.join("usr/share/factory");
    std::fs::create_dir_all(&factory)?;
    let mut lines = String::from("# What the packages put into /var, which begins empty.\n");
    describe(&var, &factory.join("var"), "/var", &mut lines)?;
    write(tree, "usr/lib/tmpfiles.d/00-appliance-var.conf", &lines)?;
    std::fs::remove_dir_all(&var)?;
    // Services that start before the state partition is mounted have their private directories made here.
    for (directory, mode) in [("", 0o755), ("tmp", 0o1777)] {
        let path = var.join(directory);
        std::fs::create_dir(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// A line of tmpfiles.d(5) for all that is below `directory`, whose path in the appliance is `path`; files
/// are kept below `kept`. In the order of names, so that two builds agree.
fn describe(directory: &Path, kept: &Path, path: &str, lines: &mut String) -> Result<()> {
    let mut entries = std::fs::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let (path, meta) = (format!("{path}/{name}"), entry.metadata()?);
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        if meta.is_dir() {
            writeln!(lines, "d {path} {mode:04o} {uid} {gid} -")?;
            describe(&entry.path(), &kept.join(&name), &path, lines)?;
        } else if meta.is_symlink() {
            let target = std::fs::read_link(entry.path())?;
            writeln!(lines, "L {path} - - - - {}", target.display())?;
        } else if meta.is_file() {
            std::fs::create_dir_all(kept)?;
            std::fs::copy(entry.path(), kept.join(&name))?;
            writeln!(lines, "C {path} {mode:04o} {uid} {gid} -")?;
        }
    }
    Ok(())
}
