//! The Debian packages that building, testing and the demonstration need.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use guest_rig::paths::find_program;

/// Package, and what for.
const PACKAGES: &[(&str, &str)] = &[
    ("g++", "compiles RocksDB"),
    ("make", "compiles RocksDB"),
    ("libclang-dev", "binds to RocksDB and to verbs"),
    ("libibverbs-dev", "has the verbs of RDMA devices"),
    ("librdmacm-dev", "is bound to beside them"),
    ("pkgconf", "finds these two"),
    (
        "binutils",
        "leaves debugging information out of the package",
    ),
    (
        "dpkg-dev",
        "finds the libraries that the package depends on",
    ),
    ("libc6-dev", "links the guest's helper statically"),
    ("libacl1-dev", "is linked into pjdfstest"),
    ("qemu-system-x86", "boots guests"),
    (
        "qemu-system-common",
        "has qemu-storage-daemon, which the rig and the benchmarks compare with",
    ),
    ("qemu-utils", "converts disk images"),
    ("mmdebstrap", "builds the guest"),
    ("cpio", "packs the guest"),
    (
        "xz-utils",
        "unpacks the kernel modules of Debian 13's guests",
    ),
    (
        "debian-archive-keyring",
        "checks the packages of Debian 13's guests",
    ),
    (
        "grub-common",
        "makes the boot loader of the guest that boots from a disk",
    ),
    (
        "grub-pc-bin",
        "makes the boot loader of the guest that boots from a disk",
    ),
    ("e2fsprogs", "makes and checks filesystems"),
    ("fdisk", "makes the partitions of the appliance's image"),
    ("mtools", "makes disks that tell an appliance what to be"),
    ("ovmf", "boots the appliance by UEFI in its tests"),
    ("util-linux", "pins processes to processors"),
    ("iproute2", "makes networks of namespaces"),
    ("nftables", "cuts nodes off in networks of namespaces"),
    (
        "libvirt-daemon-system",
        "runs the domains that libvirt's tests attach disks to",
    ),
    ("libvirt-daemon-driver-qemu", "is its driver for QEMU"),
    ("libvirt-clients", "has virsh, and checks domains' XML"),
    ("libxml2-utils", "has xmllint, which that check calls"),
];

/// All QEMU packages must be of one version: they share files.
const QEMU: &[&str] = &["qemu-system-x86", "qemu-system-common", "qemu-utils"];
/// Belongs to them where it is installed.
const QEMU_EXTRA: &str = "qemu-block-extra";

/// Programs that stand for the peer's packages where there is no dpkg to ask.
const CEPH_PROGRAMS: &[&str] = &["ceph-mon", "ceph-osd", "ceph", "rbd", "monmaptool"];

/// Likewise, of every command.
const PROGRAMS: &[&str] = &[
    "c++",
    "make",
    "pkg-config",
    "qemu-system-x86_64",
    "qemu-storage-daemon",
    "qemu-img",
    "mmdebstrap",
    "cpio",
    "xz",
    "grub-mkimage",
    "dpkg-deb",
    "dpkg-shlibdeps",
    "strip",
    "mke2fs",
    "mformat",
    "taskset",
    "ip",
    "nft",
    "libvirtd",
    "virsh",
    "xmllint",
];

/// What `bench cluster --peer ceph` needs beyond that.
const CEPH: &[(&str, &str)] = &[
    ("ceph-mon", "the peer's monitor"),
    ("ceph-osd", "the peer's storage"),
    ("ceph-common", "sets the peer up"),
    (
        "qemu-block-extra",
        "has librbd for qemu-storage-daemon, which serves the peer's disk",
    ),
];

/// What `bench fs` needs beyond that: its peer is built from crates.io.
const VIRTIOFSD: &[(&str, &str)] = &[
    ("libcap-ng-dev", "is linked into virtiofsd"),
    ("libseccomp-dev", "is linked into virtiofsd"),
];

/// Installs what is missing, and says so.
pub fn install() -> Result<()> {
    if find_program("dpkg-query").is_none() {
        return check_programs(PROGRAMS);
    }
    install_missing(PACKAGES)
}

/// Installs what the benchmark's peer needs, too.
pub fn install_ceph() -> Result<()> {
    if find_program("dpkg-query").is_none() {
        return check_programs(CEPH_PROGRAMS);
    }
    install_missing(CEPH)
}

/// Installs what virtiofsd is built with, too. Where there is no dpkg to ask, its build says what it lacks.
pub fn install_virtiofsd() -> Result<()> {
    match find_program("dpkg-query") {
        Some(_) => install_missing(VIRTIOFSD),
        None => Ok(()),
    }
}

fn install_missing(packages: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| installed(name).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    for (name, purpose) in packages.iter().filter(|(name, _)| missing.contains(name)) {
        eprintln!("xtask: Debian package {name} is missing ({purpose})");
    }
    apt_get(&["update".to_owned()])?;
    let mut args: Vec<String> = ["install", "-y", "--no-install-recommends"]
        .iter()
        .map(|arg| (*arg).to_owned())
        .collect();
    args.extend(
        missing
            .iter()
            .filter(|name| !QEMU.contains(name) && **name != QEMU_EXTRA)
            .map(|name| (*name).to_owned()),
    );
    let extra = missing.contains(&QEMU_EXTRA);
    if extra || missing.iter().any(|name| QEMU.contains(name)) {
        args.extend(qemu_of_one_version(extra)?);
    }
    apt_get(&args)
}

/// Names every QEMU package at the version at which the system emulator can be installed. An image may carry
/// a newer qemu-utils from backports, which conflicts with it: that one is brought down to the same version.
fn qemu_of_one_version(extra: bool) -> Result<Vec<String>> {
    let version = candidate("qemu-system-x86")?;
    let mut args = vec!["--allow-downgrades".to_owned()];
    let extra = (extra || installed(QEMU_EXTRA).is_some()).then_some(&QEMU_EXTRA);
    for name in QEMU.iter().chain(extra) {
        if installed(name).is_some_and(|present| present != version) {
            eprintln!("xtask: {name} is set to version {version}, that of qemu-system-x86");
        }
        args.push(format!("{name}={version}"));
    }
    Ok(args)
}

fn installed(package: &str) -> Option<String> {
    let output = Command::new("dpkg-query")
        .args([
            "--show",
            "--showformat=${db:Status-Status} ${Version}",
            package,
        ])
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.strip_prefix("installed ").map(str::to_owned)
}

fn candidate(package: &str) -> Result<String> {
    let output = Command::new("apt-cache")
        .args(["policy", package])
        .env("LC_ALL", "C")
        .output()
        .context("run apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "))
        .filter(|version| *version != "(none)")
        .map(str::to_owned)
        .with_context(|| {
            format!("apt offers no {package}: is the release's main section in its sources?")
        })
}

fn apt_get(args: &[String]) -> Result<()> {
    let root = rustix::process::geteuid().is_root();
    let mut command = if root {
        Command::new("apt-get")
    } else if find_program("sudo").is_some() {
        let mut command = Command::new("sudo");
        command.arg("apt-get");
        command
    } else {
        bail!(
            "packages are missing and there is no sudo: as root, run `apt-get {}`",
            args.join(" ")
        );
    };
    eprintln!(
        "xtask: {}apt-get {}",
        if root { "" } else { "sudo " },
        args.join(" ")
    );
    // Its chatter is not the data that our caller prints.
    command
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(Stdio::null());
    crate::build::check(&mut command)
}

fn check_programs(programs: &[&'static str]) -> Result<()> {
    let missing: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|name| find_program(name).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "this is not Debian, and these programs are missing: {}; install them with the system's means",
        missing.join(", ")
    )
}
