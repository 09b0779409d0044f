//! Packs the unpacked Debian root and the kernel's modules into initramfs archives.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::Recipe;
use crate::accel::probe_init;
use crate::process::{describe, run};

/// Writes an executable file below `root`.
pub(super) fn install(root: &Path, path: &str, content: &[u8]) -> Result<()> {
    let target = root.join(path);
    std::fs::create_dir_all(
        target
            .parent()
            .context("a path below the root has a parent")?,
    )?;
    std::fs::write(&target, content).with_context(|| format!("write {}", target.display()))?;
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Installs a file below `root`, or all files below a directory of it.
fn install_all(root: &Path, tree: &Path, path: &str) -> Result<()> {
    let source = root.join(path);
    if !source.is_dir() {
        let content = std::fs::read(&source).with_context(|| format!("read {path}"))?;
        return install(tree, path, &content);
    }
    for entry in std::fs::read_dir(&source).with_context(|| format!("list {path}"))? {
        let name = entry?.file_name();
        install_all(root, tree, &format!("{path}/{}", name.to_string_lossy()))?;
    }
    Ok(())
}

/// The kernel in an unpacked kernel package.
pub(super) fn find_kernel(kernel: &Path) -> Result<PathBuf> {
    std::fs::read_dir(kernel.join("boot"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        })
        .context("the kernel package holds no vmlinuz")
}

/// The initramfs of the tests: busybox, the recipe's programs with their libraries, files and modules.
pub(super) fn pack_initramfs(
    recipe: &Recipe,
    work: &Path,
    root: &Path,
    kernel: &Path,
    archive: &Path,
) -> Result<()> {
    let tree = work.join("initramfs");
    make_skeleton(root, &tree, &std::fs::read(root.join("sbin/rig-init"))?)?;
    for program in recipe.programs {
        install(
            &tree,
            &in_usr(program),
            &std::fs::read(root.join(program)).with_context(|| format!("read {program}"))?,
        )?;
    }
    for library in libraries(recipe, root)? {
        let target = Path::new("/").join(
            library
                .strip_prefix(root)
                .context("a library outside the root")?,
        );
        let content =
            std::fs::read(&library).with_context(|| format!("read {}", library.display()))?;
        install(&tree, &in_usr(&target.to_string_lossy()), &content)?;
    }
    for file in ["etc/os-release", "etc/debian_version"]
        .iter()
        .chain(recipe.files)
    {
        install_all(root, &tree, file)?;
    }
    for (name, target) in [("mkfs.ext4", "mke2fs"), ("fsck.ext4", "e2fsck")] {
        if tree.join("usr/sbin").join(target).exists() {
            std::os::unix::fs::symlink(target, tree.join("usr/sbin").join(name))?;
        }
    }
    copy_modules(recipe, kernel, &tree)?;
    pack(&tree, archive)
}

/// The initramfs of the boot disk: the recipe's modules and what it takes to go on to the root filesystem.
pub(super) fn pack_loader(
    recipe: &Recipe,
    work: &Path,
    root: &Path,
    kernel: &Path,
    archive: &Path,
) -> Result<()> {
    let tree = work.join("loader");
    make_skeleton(root, &tree, &std::fs::read(root.join("sbin/rig-init"))?)?;
    copy_modules(recipe, kernel, &tree)?;
    pack(&tree, archive)
}

/// The initramfs of the KVM probe.
pub(super) fn pack_probe(work: &Path, root: &Path, archive: &Path) -> Result<()> {
    let tree = work.join("probe");
    make_skeleton(root, &tree, probe_init().as_bytes())?;
    pack(&tree, archive)
}

fn make_skeleton(root: &Path, tree: &Path, init: &[u8]) -> Result<()> {
    for directory in [
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "mnt",
        "root",
    ] {
        std::fs::create_dir_all(tree.join(directory))?;
    }
    for merged in ["bin", "sbin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{merged}"), tree.join(merged))?;
    }
    install(
        tree,
        "usr/bin/busybox",
        &std::fs::read(root.join("bin/busybox"))?,
    )?;
    std::os::unix::fs::symlink("busybox", tree.join("usr/bin/sh"))?;
    install(tree, "init", init)
}

/// `sbin/x` → `usr/sbin/x`: both trees have merged directories, and a file must not replace a link to one.
fn in_usr(path: &str) -> String {
    let path = path.trim_start_matches('/');
    if path.starts_with("usr/") {
        path.to_owned()
    } else {
        format!("usr/{path}")
    }
}

/// The shared libraries of the recipe's programs and of libraries among its files, found by the root's own
/// loader, which needs no chroot and no privilege.
fn libraries(recipe: &Recipe, root: &Path) -> Result<BTreeSet<PathBuf>> {
    let loader = root.join("usr/lib64/ld-linux-x86-64.so.2");
    let lib = root.join("usr/lib/x86_64-linux-gnu");
    let path = format!("{}:{}", lib.display(), lib.join("ceph").display());
    let mut found = BTreeSet::from([loader.clone()]);
    for program in recipe.programs.iter().chain(recipe.files) {
        let listed = Command::new(&loader)
            .args(["--library-path", &path, "--list"])
            .arg(root.join(program))
            .stdin(Stdio::null())
            .output()
            .context("run the guest's loader")?;
        // A static program, and what is no program, makes the loader fail; it needs nothing.
        if !listed.status.success() {
            continue;
        }
        for line in String::from_utf8_lossy(&listed.stdout).lines() {
            if line.contains("not found") {
                bail!("{program} in the guest misses a library: {}", line.trim());
            }
            if let Some(library) = line
                .split("=> ")
                .nth(1)
                .and_then(|rest| rest.split(" (").next())
            {
                found.insert(PathBuf::from(library));
            }
        }
    }
    found.retain(|library| library.starts_with(root));
    Ok(found)
}

fn copy_modules(recipe: &Recipe, kernel: &Path, tree: &Path) -> Result<()> {
    let listed = run(Command::new("find")
        // Debian 13 has its modules below usr/lib.
        .arg(kernel)
        .args(["-name", "*.ko", "-o", "-name", "*.ko.xz"]))?;
    let mut order = String::new();
    for module in recipe.modules {
        let file = format!("{module}.ko");
        let path = listed
            .lines()
            .find(|line| line.trim_end_matches(".xz").ends_with(&format!("/{file}")))
            .with_context(|| format!("the kernel package holds no {file}"))?;
        install(tree, &format!("modules/{file}"), &unpacked(path)?)?;
        order.push_str(&file);
        order.push('\n');
    }
    std::fs::write(tree.join("modules.load"), order)?;
    Ok(())
}

/// A module, unpacked: insmod of the guest unpacks nothing.
fn unpacked(path: &str) -> Result<Vec<u8>> {
    if !path.ends_with(".xz") {
        return Ok(std::fs::read(path)?);
    }
    let output = Command::new("xz")
        .args(["--decompress", "--stdout", path])
        .stdin(Stdio::null())
        .output()
        .context("run xz: install xz-utils")?;
    if !output.status.success() {
        bail!("xz {} on {path}", describe(output.status));
    }
    Ok(output.stdout)
}

/// `find | cpio`, everything owned by root.
fn pack(tree: &Path, archive: &Path) -> Result<()> {
    let names = run(Command::new("find").arg(".").current_dir(tree))?;
    let list = archive.with_extension("list");
    std::fs::write(&list, names)?;
    let status = Command::new("cpio")
        .args(["--create", "--format=newc", "--owner=0:0", "--quiet"])
        .current_dir(tree)
        .stdin(std::fs::File::open(&list)?)
        .stdout(std::fs::File::create(archive)?)
        .status()
        .context("run cpio")?;
    if !status.success() {
        bail!("cpio {}", describe(status));
    }
    std::fs::remove_file(&list)?;
    Ok(())
}
