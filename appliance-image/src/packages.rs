//! Debian's packages: fetched once, checked by apt against the archive's signatures, kept as an archive of
//! our own. What is built of them is therefore the same until somebody asks for newer ones.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::run;
use crate::signing::sha256_hex;

/// The release.
pub(crate) const SUITE: &str = "trixie";
/// Where packages come from.
const SOURCES: &[(&str, &str)] = &[
    ("http://deb.debian.org/debian", SUITE),
    ("http://deb.debian.org/debian", "trixie-updates"),
    ("http://deb.debian.org/debian-security", "trixie-security"),
];
/// The keys that sign them.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Counts changes of how packages are kept.
const FORMAT: u32 = 1;

/// The kernel: unpacked, not installed, because an installed one makes an initramfs of its own.
pub(crate) const KERNEL: &str = "linux-image-amd64";

/// What the appliance has besides Debian's essential packages.
pub(crate) const APPLIANCE: &[&str] = &[
    // First process, network, clock, names, partitions, verity.
    "systemd",
    "systemd-sysv",
    "systemd-boot-efi",
    "systemd-cryptsetup",
    "systemd-repart",
    "systemd-resolved",
    "systemd-timesyncd",
    "libnss-myhostname",
    "dbus",
    "udev",
    "cryptsetup-bin",
    // Disks and filesystems.
    "dosfstools",
    "e2fsprogs",
    "fdisk",
    "util-linux",
    "xfsprogs",
    // Network.
    "iproute2",
    "iputils-ping",
    "nftables",
    "openssh-server",
    // What Penstock needs, and NFS for nodes that serve it.
    "ibverbs-providers",
    "kmod",
    "libibverbs1",
    "librdmacm1t64",
    "libstdc++6",
    "nfs-kernel-server",
    // To look around.
    "less",
    "procps",
    "rdma-core",
];

/// What the tools' tree has besides these: they must be of the same versions.
pub(crate) const TOOLS: &[&str] = &[
    "binutils",
    "dracut",
    "erofs-utils",
    "grub-common",
    "grub-pc-bin",
    "mtools",
    "systemd-boot",
    "systemd-boot-tools",
    "systemd-ukify",
    "zstd",
];

/// An archive of fetched packages.
#[derive(Debug, Clone)]
pub(crate) struct Packages {
    pub(crate) directory: PathBuf,
    /// Names its content: the hash of its index, in which each package's hash stands.
    pub(crate) id: String,
}

impl Packages {
    /// The line of apt's sources that names it. It is trusted because apt checked each package when it came,
    /// and nobody but root writes here.
    pub(crate) fn source(&self) -> String {
        format!("deb [trusted=yes] copy://{} ./", self.directory.display())
    }

    /// The file of the package whose name begins with `prefix`.
    pub(crate) fn file(&self, prefix: &str) -> Result<PathBuf> {
        let entries = std::fs::read_dir(&self.directory)?;
        let mut found: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(prefix) && name.ends_with(".deb")
            })
            .collect();
        found.sort();
        found
            .pop()
            .with_context(|| format!("no package {prefix}… in {}", self.directory.display()))
    }
}

/// The packages in `cache`, which are fetched if they are not there, or if `refresh` asks for newer ones.
pub(crate) fn get(cache: &Path, refresh: bool, say: &dyn Fn(&str)) -> Result<Packages> {
    let wanted = format!("{FORMAT} {KERNEL} {APPLIANCE:?} {TOOLS:?} {SOURCES:?}");
    let directory = cache.join(format!("packages-{}", &sha256_hex(wanted.as_bytes())[..16]));
    if refresh || !directory.join("Packages").is_file() {
        say(&format!(
            "fetches Debian's packages into {}",
            directory.display()
        ));
        let partial = tempfile::Builder::new()
            .prefix("packages-")
            .tempdir_in(cache)
            .context("make a directory for packages")?;
        let fetched = fetch(partial.path()).context("fetch Debian's packages")?;
        if directory.exists() {
            std::fs::remove_dir_all(&directory).context("remove the packages before")?;
        }
        std::fs::rename(fetched, &directory).context("move the packages into place")?;
    }
    let index = std::fs::read(directory.join("Packages")).context("read the packages' index")?;
    let id = sha256_hex(&index)[..16].to_owned();
    Ok(Packages { directory, id })
}

fn fetch(work: &Path) -> Result<PathBuf> {
    let apt = work.join("apt");
    let archive = work.join("archive");
    std::fs::create_dir_all(apt.join("lists/partial"))?;
    std::fs::create_dir_all(archive.join("partial"))?;
    let sources = apt.join("sources.list");
    let lines: Vec<String> = SOURCES
        .iter()
        .map(|(uri, suite)| format!("deb [signed-by={KEYRING}] {uri} {suite} main\n"))
        .collect();
    std::fs::write(&sources, lines.concat()).context("write apt's sources")?;
    let set = |name: &str, value: String| ["-o".to_owned(), format!("{name}={value}")];
    let options: Vec<String> = [
        set("Dir::Etc::sourcelist", sources.display().to_string()),
        set("Dir::Etc::sourceparts", "-".to_owned()),
        set("Dir::State", apt.display().to_string()),
        // Nothing is installed, so all that is needed is fetched.
        set("Dir::State::status", "/dev/null".to_owned()),
        set("Dir::Cache", apt.join("cache").display().to_string()),
        set("Dir::Cache::archives", archive.display().to_string()),
        set("APT::Architecture", "amd64".to_owned()),
        set("APT::Install-Recommends", "false".to_owned()),
        set("APT::Sandbox::User", "root".to_owned()),
    ]
    .concat();
    run(Command::new("apt-get").args(&options).arg("update"))?;
    run(Command::new("apt-get")
        .args(&options)
        .args(["install", "--yes", "--download-only"])
        .args(["?essential", "?priority(required)", "apt", KERNEL])
        .args(APPLIANCE)
        .args(TOOLS))?;
    std::fs::remove_dir_all(archive.join("partial")).context("remove apt's directory")?;
    let _ = std::fs::remove_file(archive.join("lock"));
    let index = run(Command::new("dpkg-scanpackages")
        .args(["--multiversion", "."])
        .current_dir(&archive))?;
    std::fs::write(archive.join("Packages"), index).context("write the packages' index")?;
    Ok(archive)
}
