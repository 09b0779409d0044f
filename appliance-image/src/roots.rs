//! Two trees of Debian's packages: what the appliance is made of, and the tools that make it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::packages::{APPLIANCE, KERNEL, Packages, SUITE, TOOLS};
use crate::process::{run, run_within};
use crate::signing::sha256_hex;

/// Left out of both trees.
const EXCLUDED: &[&str] = &[
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    // Debian's own, which the appliance's kernel and tools never read.
    "/usr/share/bug/*",
    "/usr/share/lintian/*",
];
/// Modules of devices that no storage node has.
const EXCLUDED_MODULES: &[&str] = &[
    "sound",
    "drivers/bluetooth",
    "drivers/gpu",
    "drivers/iio",
    "drivers/media",
    "drivers/net/wireless",
    "drivers/staging",
    "net/bluetooth",
    "net/mac80211",
    "net/wireless",
];
/// Counts changes of how the trees are made that the lists do not show.
const FORMAT: u32 = 1;

/// Both trees, and the kernel.
#[derive(Debug, Clone)]
pub(crate) struct Roots {
    /// Archive of the appliance's tree.
    pub(crate) appliance: PathBuf,
    /// Root of the tools' tree.
    pub(crate) tools: PathBuf,
    /// Root of the unpacked kernel: `boot/vmlinuz-…` and `usr/lib/modules`.
    pub(crate) kernel: PathBuf,
    /// Its release, like `6.12.118+deb13-amd64`.
    pub(crate) kernel_release: String,
}

/// The trees of `packages` in `cache`; those that are not there are made.
pub(crate) fn get(cache: &Path, packages: &Packages, say: &dyn Fn(&str)) -> Result<Roots> {
    let recipe = format!("{FORMAT} {} {EXCLUDED:?} {EXCLUDED_MODULES:?}", packages.id);
    let directory = cache.join(format!("roots-{}", &sha256_hex(recipe.as_bytes())[..16]));
    if !directory.is_dir() {
        say("makes Debian's trees once, which takes minutes");
        let partial = tempfile::Builder::new()
            .prefix("roots-")
            .tempdir_in(cache)
            .context("make a directory for trees")?;
        let made = partial.path().join("roots");
        make(packages, &made)?;
        std::fs::rename(&made, &directory).context("move the trees into place")?;
    }
    let kernel = directory.join("kernel");
    let kernel_release = only_entry(&kernel.join("usr/lib/modules"))?;
    Ok(Roots {
        appliance: directory.join("appliance.tar"),
        tools: directory.join("tools"),
        kernel,
        kernel_release,
    })
}

fn make(packages: &Packages, directory: &Path) -> Result<()> {
    std::fs::create_dir(directory)?;
    bootstrap(packages, APPLIANCE, &directory.join("appliance.tar"))?;
    let archive = directory.join("tools.tar");
    let all: Vec<&str> = APPLIANCE.iter().chain(TOOLS).copied().collect();
    bootstrap(packages, &all, &archive)?;
    let tools = directory.join("tools");
    std::fs::create_dir(&tools)?;
    unpack(&archive, &tools)?;
    std::fs::remove_file(&archive).context("remove the tools' archive")?;

    let kernel = directory.join("kernel");
    std::fs::create_dir(&kernel)?;
    let package = packages.file(&versioned_kernel(packages)?)?;
    run(Command::new("dpkg-deb").arg("-x").arg(package).arg(&kernel))?;
    let modules = kernel.join("usr/lib/modules");
    let release = only_entry(&modules)?;
    for excluded in EXCLUDED_MODULES {
        let path = modules.join(&release).join("kernel").join(excluded);
        if path.exists() {
            std::fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    copy_tree(&modules, &tools.join("usr/lib"))?;
    run_within(&tools, None, 0, &format!("depmod {release}"))?;
    // The appliance gets the lists of modules that were made here.
    std::fs::remove_dir_all(&modules).context("replace the modules")?;
    copy_tree(&tools.join("usr/lib/modules"), &kernel.join("usr/lib"))
}

/// The name that the metapackage stands for, which has the kernel's version in it, and an underscore.
fn versioned_kernel(packages: &Packages) -> Result<String> {
    let package = packages.file(&format!("{KERNEL}_"))?;
    let depends = run(Command::new("dpkg-deb")
        .arg("-f")
        .arg(package)
        .arg("Depends"))?;
    let name = depends
        .split([',', ' ', '\n'])
        .find(|word| word.starts_with("linux-image-"))
        .context("the kernel's metapackage depends on no kernel")?;
    Ok(format!("{name}_"))
}

fn bootstrap(packages: &Packages, include: &[&str], archive: &Path) -> Result<()> {
    let excluded = EXCLUDED
        .iter()
        .map(|path| format!("--dpkgopt=path-exclude={path}"));
    run(Command::new("mmdebstrap")
        .args(["--variant=apt", "--mode=root", "--format=tar"])
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .args(excluded)
        .arg(format!("--include={}", include.join(",")))
        .arg(SUITE)
        .arg(archive)
        .arg(packages.source())
        .env("SOURCE_DATE_EPOCH", "0"))
    .context("make a tree of Debian's packages")?;
    Ok(())
}

/// Unpacks an archive as it is; device nodes are the kernel's to make.
pub(crate) fn unpack(archive: &Path, root: &Path) -> Result<()> {
    run(Command::new("tar")
        .arg("-C")
        .arg(root)
        .args([
            "--numeric-owner",
            "--same-owner",
            "--same-permissions",
            "--xattrs",
        ])
        .args(["--exclude=./dev/*", "-xf"])
        .arg(archive))?;
    Ok(())
}

/// Copies the directory `from` into the directory `into`, with all that files bear.
pub(crate) fn copy_tree(from: &Path, into: &Path) -> Result<()> {
    run(Command::new("cp")
        .args(["-a", "--no-target-directory"])
        .arg(from)
        .arg(into.join(from.file_name().context("a directory to copy has a name")?)))?;
    Ok(())
}

fn only_entry(directory: &Path) -> Result<String> {
    let mut names = std::fs::read_dir(directory)
        .with_context(|| format!("read {}", directory.display()))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()?;
    anyhow::ensure!(
        names.len() == 1,
        "{} has not one entry: {names:?}",
        directory.display()
    );
    Ok(names.remove(0))
}
