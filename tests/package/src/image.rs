//! The root filesystems of Debian releases, each built once into the cache.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use guest_rig::Recipe;
use guest_rig::image::DISKS;
use guest_rig::paths::{find_program, guest_cache};
use guest_rig::process::{fetch, run};
use rustix::fs::{FlockOperation, flock};

/// Where packages come from.
const MIRROR: &str = "http://deb.debian.org/debian";
/// What a host has that Penstock is installed on: systemd, and the libraries that the package depends on.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,udev,passwd,init-system-helpers,libibverbs1,libstdc++6,\
                        util-linux,procps,iproute2,e2fsprogs";
/// What a host of guests has besides.
const LIBVIRT: &str = "libvirt-daemon-system,libvirt-clients,libvirt-daemon-driver-qemu,qemu-system-x86,\
                       qemu-utils,apparmor";
/// Left out of the image.
const EXCLUDED: [&str; 3] = [
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
];
/// Size of the filesystem; sparse, so it costs what it holds.
const ROOT_MIB: u32 = 4096;
/// The rig's channel into the machine.
const AGENT: &str = include_str!("../machine/agent.sh");
const AGENT_UNIT: &str = include_str!("../machine/rig-agent.service");
/// Where the initramfs of the rig goes on.
const INIT: &str = "#!/bin/sh\nexec /lib/systemd/systemd\n";
/// Counts changes of how the images are built that the texts above do not show.
const FORMAT: u32 = 1;

/// A release of Debian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Release {
    /// Debian 12.
    Bookworm,
    /// Debian 13.
    Trixie,
}

/// What a machine has besides Debian's base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Equipment {
    /// Nothing: the package must do without libvirt.
    Bare,
    /// libvirt and QEMU, confined by AppArmor.
    Libvirt,
}

impl Equipment {
    fn packages(self) -> String {
        match self {
            Self::Bare => PACKAGES.to_owned(),
            Self::Libvirt => format!("{PACKAGES},{LIBVIRT}"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bare => "host",
            Self::Libvirt => "libvirt",
        }
    }
}

impl Release {
    /// Its name in the archive.
    pub fn suite(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        }
    }

    /// The guest whose kernel it runs: of Debian 13 one that makes block devices of volumes.
    pub fn guest(self) -> &'static Recipe {
        match self {
            Self::Bookworm => &DISKS,
            Self::Trixie => &block_rig::RECIPE,
        }
    }

    /// Its root filesystem, from the cache, or built there.
    pub fn root(self, equipment: Equipment) -> Result<PathBuf> {
        let cache = guest_cache()?;
        let mut hasher = DefaultHasher::new();
        let packages = equipment.packages();
        (FORMAT, &packages, AGENT, AGENT_UNIT, INIT, ROOT_MIB, self).hash(&mut hasher);
        let root = cache.join(format!(
            "{}-{}-{:016x}.raw",
            equipment.name(),
            self.suite(),
            hasher.finish()
        ));
        if root.is_file() {
            return Ok(root);
        }
        ensure!(
            rustix::process::geteuid().is_root(),
            "the root filesystem of a machine with systemd has files of several users: build it as root once"
        );
        std::fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
        let lock = std::fs::File::create(cache.join("host-lock")).context("open a lock")?;
        flock(&lock, FlockOperation::LockExclusive).context("lock the cache of machines")?;
        if !root.is_file() {
            eprintln!(
                "rig: building a machine of Debian {} once into {} (a minute or two)",
                self.suite(),
                root.display()
            );
            let work = tempfile::tempdir_in(&cache).context("make a directory to build in")?;
            let built = self
                .build(&packages, work.path())
                .context("build the machine")?;
            std::fs::rename(built, &root).context("move the machine into place")?;
        }
        Ok(root)
    }

    fn build(self, packages: &str, work: &Path) -> Result<PathBuf> {
        let (tarball, tree, image) = (
            work.join("root.tar"),
            work.join("root"),
            work.join("root.raw"),
        );
        let without = EXCLUDED.map(|path| format!("--dpkgopt=path-exclude={path}"));
        fetch(|| {
            run(Command::new("mmdebstrap")
                .args(["--variant=minbase", &format!("--include={packages}")])
                .args(&without)
                .args(["--aptopt=APT::Install-Recommends \"false\"", self.suite()])
                .arg(&tarball)
                .arg(MIRROR))
        })?;
        std::fs::create_dir(&tree)?;
        run(Command::new("tar")
            .arg("-C")
            .arg(&tree)
            .arg("-xf")
            .arg(&tarball)
            .args(["--exclude=./dev/*", "--numeric-owner", "--same-owner"]))?;
        for (path, content) in [
            ("sbin/rig-init", INIT),
            ("usr/sbin/rig-agent", AGENT),
            ("etc/systemd/system/rig-agent.service", AGENT_UNIT),
            ("etc/hostname", "rig\n"),
            // Made anew by the first boot, as on any machine.
            ("etc/machine-id", ""),
        ] {
            install(&tree, path, content)?;
        }
        std::fs::create_dir_all(tree.join("etc/systemd/system/sysinit.target.wants"))?;
        std::os::unix::fs::symlink(
            "../rig-agent.service",
            tree.join("etc/systemd/system/sysinit.target.wants/rig-agent.service"),
        )?;
        let mke2fs = find_program("mke2fs").context("mke2fs is missing: install e2fsprogs")?;
        run(Command::new(mke2fs)
            .args(["-q", "-t", "ext4", "-F", "-d"])
            .arg(&tree)
            .arg(&image)
            .arg(format!("{ROOT_MIB}M")))?;
        Ok(image)
    }
}

fn install(tree: &Path, path: &str, content: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let target = tree.join(path);
    std::fs::write(&target, content).with_context(|| format!("write {}", target.display()))?;
    let is_program = path.contains("sbin/");
    let mode = if is_program { 0o755 } else { 0o644 };
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(mode))?;
    Ok(())
}
