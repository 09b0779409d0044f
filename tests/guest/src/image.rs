//! The rig's guest, built once into the cache: a Debian kernel, an initramfs with what the tests run, and the
//! image of a whole disk that the firmware boots from.
//!
//! A [`Recipe`] says what is in it. The recipe, the sources and [`FORMAT`] name the directory, so that
//! whatever changes is built anew beside the old one.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::paths::guest_cache;
use crate::process::{fetch, run};

mod boot_disk;
mod packing;

/// Counts changes of how guests are built that the recipes do not show.
const FORMAT: u32 = 4;
/// The Debian release of guests that need no later kernel.
pub const DEBIAN_12: &str = "bookworm";
/// Linux 6.12.
pub const DEBIAN_13: &str = "trixie";
/// Where its packages come from.
const MIRROR: &str = "http://deb.debian.org/debian";
/// The keys that sign them.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// First process of the guest.
const INIT: &str = include_str!("../guest/init.sh");
/// The helper that runs in the guest, by file; the first is its root.
const RIGIO: [(&str, &str); 2] = [
    ("rigio.rs", include_str!("../guest/rigio.rs")),
    ("trees.rs", include_str!("../guest/trees.rs")),
];

/// What a guest consists of. All of it is Debian's; a program under test comes in when the guest boots
/// ([`crate::VmConfig::with_file`]).
#[derive(Debug, Clone, Copy, Hash)]
pub struct Recipe {
    /// First word of its directory's name in the cache.
    pub name: &'static str,
    /// Its Debian release.
    pub suite: &'static str,
    /// Packages besides the essential ones, separated by commas.
    pub packages: &'static str,
    /// The kernel's metapackage, which decides its flavour.
    pub kernel_package: &'static str,
    /// Kernel modules in the order in which they load.
    pub modules: &'static [&'static str],
    /// Programs of the initramfs besides busybox, below the Debian root; their libraries come with them.
    pub programs: &'static [&'static str],
    /// Other files of the initramfs, or directories with all that is below them.
    pub files: &'static [&'static str],
    /// Whether there is an image of a disk to boot from, too.
    pub boot_disk: bool,
}

/// The guest that uses disks: the kernel's flavour for virtual machines, file systems, fio.
pub const DISKS: Recipe = Recipe {
    name: DEBIAN_12,
    suite: DEBIAN_12,
    packages: "fio,e2fsprogs,xfsprogs,util-linux,busybox-static",
    kernel_package: "linux-image-cloud-amd64",
    modules: &[
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "virtio_blk",
        "virtio_console",
        "libcrc32c",
        "xfs",
    ],
    programs: &[
        "usr/bin/fio",
        "usr/bin/rigio",
        "sbin/mke2fs",
        "sbin/e2fsck",
        "sbin/resize2fs",
        "sbin/mkfs.xfs",
        "sbin/xfs_repair",
        "usr/sbin/xfs_growfs",
        "usr/sbin/xfs_io",
        "sbin/fstrim",
        "sbin/blkdiscard",
        "sbin/blockdev",
        "bin/lsblk",
    ],
    files: &["etc/mke2fs.conf"],
    boot_disk: true,
};

/// A built guest.
#[derive(Debug, Clone)]
pub struct GuestImage {
    directory: PathBuf,
}

impl GuestImage {
    /// [`Self::of`] the guest that uses disks.
    pub fn get(say: impl Fn(&str)) -> Result<Self> {
        Self::of(&DISKS, say)
    }

    /// Takes the guest of `recipe` from the cache, or builds it there; `say` is told when it has to be built.
    /// Concurrent callers wait for one builder.
    pub fn of(recipe: &Recipe, say: impl Fn(&str)) -> Result<Self> {
        let cache = guest_cache()?;
        let directory = cache.join(format!("{}-{:016x}", recipe.name, recipe_hash(recipe)));
        if !directory.is_dir() {
            std::fs::create_dir_all(&cache)
                .with_context(|| format!("create {}", cache.display()))?;
            let lock =
                std::fs::File::create(cache.join("lock")).context("open the guest cache's lock")?;
            flock(&lock, FlockOperation::LockExclusive).context("lock the guest cache")?;
            if !directory.is_dir() {
                say(&format!(
                    "building the guest once into {} (a minute or two)",
                    directory.display()
                ));
                let partial = tempfile::tempdir_in(&cache)
                    .context("make a directory to build the guest in")?;
                build(recipe, partial.path()).context("build the guest")?;
                std::fs::rename(partial.path().join("out"), &directory)
                    .context("move the built guest into place")?;
            }
        }
        Ok(Self { directory })
    }

    /// Where the guest lives.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The kernel, for direct boot.
    pub fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// The initramfs with everything that the tests run.
    pub fn initramfs(&self) -> PathBuf {
        self.directory.join("initramfs.cpio")
    }

    /// An initramfs that only says that it booted.
    pub fn probe_initramfs(&self) -> PathBuf {
        self.directory.join("probe.cpio")
    }

    /// A raw disk with a boot loader and a Debian root, to be imported into a volume and booted from; there
    /// only if the recipe says so.
    pub fn boot_disk(&self) -> PathBuf {
        self.directory.join("boot-disk.raw")
    }
}

fn recipe_hash(recipe: &Recipe) -> u64 {
    let mut hasher = DefaultHasher::new();
    (FORMAT, INIT, RIGIO, recipe).hash(&mut hasher);
    (
        crate::accel::probe_init(),
        boot_disk::CONFIG,
        boot_disk::ROOT_MIB,
    )
        .hash(&mut hasher);
    hasher.finish()
}

/// Builds everything below `work`; the result is `work/out`.
fn build(recipe: &Recipe, work: &Path) -> Result<()> {
    let out = work.join("out");
    let root = work.join("root");
    let kernel = work.join("kernel");
    for directory in [&out, &root, &kernel] {
        std::fs::create_dir(directory)?;
    }
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetch_kernel(recipe, work, &kernel));
        let compiled = scope.spawn(|| compile_rigio(work));
        bootstrap_root(recipe, work, &root)?;
        fetched
            .join()
            .expect("fetching the kernel does not panic")?;
        compiled.join().expect("compiling rigio does not panic")
    })?;
    std::fs::copy(packing::find_kernel(&kernel)?, out.join("vmlinuz"))
        .context("copy the kernel")?;
    packing::install(&root, "sbin/rig-init", INIT.as_bytes())?;
    packing::install(&root, "usr/bin/rigio", &std::fs::read(work.join("rigio"))?)?;
    packing::pack_initramfs(recipe, work, &root, &kernel, &out.join("initramfs.cpio"))?;
    packing::pack_probe(work, &root, &out.join("probe.cpio"))?;
    if recipe.boot_disk {
        boot_disk::make(recipe, work, &root, &kernel, &out.join("boot-disk.raw"))?;
    }
    Ok(())
}

/// Debian's own bootstrap, as a tarball, so that no privilege is needed to unpack it (device nodes are left
/// out: the guest mounts devtmpfs).
fn bootstrap_root(recipe: &Recipe, work: &Path, root: &Path) -> Result<()> {
    let packages = recipe.packages;
    let tarball = work.join("root.tar");
    let without = |path: &str| format!("--dpkgopt=path-exclude={path}");
    fetch(|| {
        run(Command::new("mmdebstrap")
            .args(["--variant=minbase", &format!("--include={packages}")])
            .args([
                without("/usr/share/doc/*"),
                without("/usr/share/man/*"),
                without("/usr/share/locale/*"),
            ])
            .args(["--aptopt=APT::Install-Recommends \"false\"", recipe.suite])
            .arg(&tarball)
            .arg(MIRROR))
    })?;
    run(Command::new("tar")
        .arg("-C")
        .arg(root)
        .arg("-xf")
        .arg(&tarball)
        .args(["--exclude=./dev/*", "--no-same-owner"]))?;
    std::fs::remove_file(&tarball).context("remove the bootstrap's tarball")
}

/// Downloads the kernel package that the flavour's metapackage names, and unpacks it without installing it.
fn fetch_kernel(recipe: &Recipe, work: &Path, kernel: &Path) -> Result<()> {
    let metapackage = recipe.kernel_package;
    let apt = apt_of(recipe.suite, work)?;
    let depends =
        run(Command::new("apt-cache")
            .args(&apt)
            .args(["depends", "--important", metapackage]))
        .context("ask apt for the guest's kernel")?;
    let package = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .with_context(|| format!("apt knows no kernel behind {metapackage}"))?;
    fetch(|| {
        run(Command::new("apt-get")
            .args(&apt)
            .args(["download", package])
            .current_dir(kernel))
    })?;
    let deb = std::fs::read_dir(kernel)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt downloaded no kernel package")?;
    run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(kernel))?;
    Ok(())
}

/// What apt is told so that it knows the packages of a release, whichever this machine runs; their lists are
/// below `work`.
fn apt_of(suite: &str, work: &Path) -> Result<Vec<String>> {
    let dir = work.join("apt");
    std::fs::create_dir_all(dir.join("lists/partial"))?;
    let sources = dir.join("sources.list");
    let line = format!("deb [signed-by={KEYRING}] {MIRROR} {suite} main\n");
    std::fs::write(&sources, line).context("write apt's sources")?;
    let set = |name: &str, value: String| ["-o".to_owned(), format!("{name}={value}")];
    let options = [
        set("Dir::Etc::sourcelist", sources.display().to_string()),
        set("Dir::Etc::sourceparts", "-".to_owned()),
        set("Dir::State", dir.display().to_string()),
        set("Dir::State::status", "/dev/null".to_owned()),
        set("Dir::Cache", dir.join("cache").display().to_string()),
    ];
    let options: Vec<String> = options.into_iter().flatten().collect();
    let update = ["update", "--error-on=any"];
    fetch(|| run(Command::new("apt-get").args(&options).args(update)))
        .with_context(|| format!("fetch the lists of packages of {suite}"))?;
    Ok(options)
}

fn compile_rigio(work: &Path) -> Result<()> {
    let sources = work.join("rigio-sources");
    std::fs::create_dir(&sources)?;
    for (name, text) in RIGIO {
        std::fs::write(sources.join(name), text)?;
    }
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "-O",
            "-C",
            "target-feature=+crt-static",
            "-o",
        ])
        .arg(work.join("rigio"))
        .arg(sources.join(RIGIO[0].0))
        .current_dir(work))?;
    Ok(())
}
