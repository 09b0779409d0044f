//! The Debian package: what is in it ([`ASSETS`]), and how it is put together of a built binary.
//!
//! `dpkg-deb` writes the archive. Two packages of the same sources and the same binary have the same bytes:
//! dpkg-deb sorts the files and gives no file a later time than `SOURCE_DATE_EPOCH`, which is the time of
//! the last commit; owners are root; the compressor runs in one thread.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

/// Name of the package.
pub const NAME: &str = "penstock";
/// Lines of the package's description, the first of which is its synopsis.
const DESCRIPTION: &str = "disks for virtual machines, served over vhost-user\n \
    One daemon on each KVM host gives QEMU's guests their disks, straight out of guest memory. It stores\n \
    them in a checksummed, crash-safe chunk store, on one node or replicated over several. Guests do not\n \
    notice when the daemon is killed or upgraded.";

/// A file of the sources that the package contains.
struct Asset {
    /// Below the root of the sources.
    source: &'static str,
    /// Below the root of the system.
    target: &'static str,
    /// False: a part that these sources may not have; it is left out then.
    required: bool,
}

const fn asset(source: &'static str, target: &'static str) -> Asset {
    Asset {
        source,
        target,
        required: true,
    }
}

/// Files that are taken as they are, mode 0644. The binary, man pages, completions and the changelog come
/// besides.
const ASSETS: &[Asset] = &[
    asset(
        "packaging/systemd/penstock.service",
        "usr/lib/systemd/system/penstock.service",
    ),
    asset(
        "packaging/systemd/penstock@.service",
        "usr/lib/systemd/system/penstock@.service",
    ),
    asset(
        "packaging/systemd/penstock-nfs.socket",
        "usr/lib/systemd/system/penstock-nfs.socket",
    ),
    asset(
        "packaging/systemd/penstock-nfs.service",
        "usr/lib/systemd/system/penstock-nfs.service",
    ),
    asset(
        "packaging/systemd/sysusers.conf",
        "usr/lib/sysusers.d/penstock.conf",
    ),
    asset(
        "packaging/systemd/tmpfiles.conf",
        "usr/lib/tmpfiles.d/penstock.conf",
    ),
    asset("packaging/penstock.toml", "etc/penstock/penstock.toml"),
    asset(
        "packaging/monitoring/penstock.rules.yml",
        "usr/share/penstock/prometheus/penstock.rules.yml",
    ),
    asset(
        "packaging/monitoring/penstock.json",
        "usr/share/penstock/grafana/penstock.json",
    ),
    asset(
        "packaging/debian/copyright",
        "usr/share/doc/penstock/copyright",
    ),
    asset("docs/APPLIANCE.md", "usr/share/doc/penstock/APPLIANCE.md"),
    asset("docs/INSTALL.md", "usr/share/doc/penstock/INSTALL.md"),
    asset("docs/CONFIG.md", "usr/share/doc/penstock/CONFIG.md"),
    asset("docs/NFS.md", "usr/share/doc/penstock/NFS.md"),
    asset("docs/METRICS.md", "usr/share/doc/penstock/METRICS.md"),
    asset("docs/OPERATIONS.md", "usr/share/doc/penstock/OPERATIONS.md"),
    asset("docs/RUNBOOK.md", "usr/share/doc/penstock/RUNBOOK.md"),
    // Where QEMU's tools look for programs that serve vhost-user devices. The hook of libvirt is put into its
    // place by `penstock libvirt hook install`, when the administrator asks for it.
    Asset {
        source: "libvirt/assets/50-penstock-blk.json",
        target: "usr/share/qemu/vhost-user/50-penstock-blk.json",
        required: false,
    },
    Asset {
        source: "docs/LIBVIRT.md",
        target: "usr/share/doc/penstock/LIBVIRT.md",
        required: false,
    },
];

/// The program that `50-penstock-blk.json` names: a description of a back end has no room for a verb.
const BACK_END: (&str, &str) = (
    "usr/libexec/penstock/vhost-user-blk",
    "#!/bin/sh\nexec /usr/bin/penstock vhost-user-blk \"$@\"\n",
);

/// Files that an administrator changes, and that an upgrade leaves as they are.
const CONFFILES: &[&str] = &["/etc/penstock/penstock.toml"];
/// Scripts of the maintainer, in `packaging/debian`.
const SCRIPTS: &[&str] = &["postinst", "prerm", "postrm"];
/// Shells, and where they look for completions.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/penstock"),
    ("zsh", "usr/share/zsh/vendor-completions/_penstock"),
    ("fish", "usr/share/fish/vendor_completions.d/penstock.fish"),
];
/// What the scripts need, besides the libraries of the binary.
const DEPENDS: &str = "passwd, systemd";
/// Convert disk images for `penstock volume import`, and give block devices to the kernel.
const RECOMMENDS: &str = "qemu-utils, iproute2";
const SUGGESTS: &str = "libvirt-daemon-system, qemu-system-x86, nfs-kernel-server, xfsprogs";

const MODE_FILE: u32 = 0o644;
const MODE_PROGRAM: u32 = 0o755;

/// How the archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// xz, as Debian's own packages.
    Small,
    /// gzip at its fastest, for tests.
    Fast,
}

/// What a package is made of.
#[derive(Debug, Clone)]
pub struct Package<'a> {
    /// Root of the sources.
    pub source: &'a Path,
    /// The built `penstock`; debugging information is left out.
    pub binary: &'a Path,
    /// Version of the package, as Debian compares them.
    pub version: &'a str,
    /// Seconds since 1970: the latest time that a file in the package bears.
    pub epoch: u64,
    /// How it is compressed.
    pub compression: Compression,
}

impl Package<'_> {
    /// Name of the file.
    pub fn file_name(&self) -> String {
        format!("{NAME}_{}_{}.deb", self.version, architecture())
    }

    /// Puts the package together in `directory` and returns its path.
    pub fn assemble(&self, directory: &Path) -> Result<PathBuf> {
        let work = tempfile::tempdir().context("make a directory to assemble the package in")?;
        let root = work.path().join("root");
        let stage = Stage { root: &root };
        self.stage_files(&stage)?;
        self.stage_generated(&stage, &work)?;
        self.stage_control(&stage, &work)?;
        let packed = directory.join(self.file_name());
        let compression: &[&str] = match self.compression {
            Compression::Small => &["-Zxz", "-z6", "--threads-max=1"],
            Compression::Fast => &["-Zgzip", "-z1"],
        };
        run(Command::new("dpkg-deb")
            .arg("--root-owner-group")
            .args(compression)
            .arg("--build")
            .arg(&root)
            .arg(&packed)
            .env("SOURCE_DATE_EPOCH", self.epoch.to_string()))?;
        Ok(packed)
    }

    fn stage_files(&self, stage: &Stage<'_>) -> Result<()> {
        for asset in ASSETS {
            let source = self.source.join(asset.source);
            if asset.required || source.is_file() {
                stage.copy(&source, asset.target)?;
            }
        }
        let changelog = self.source.join("CHANGELOG.md");
        stage.copy(&changelog, "usr/share/doc/penstock/changelog")?;
        stage.compress("usr/share/doc/penstock/changelog")?;
        stage.write(BACK_END.0, BACK_END.1.as_bytes(), MODE_PROGRAM)?;
        let binary = stage.write("usr/bin/penstock", &[], MODE_PROGRAM)?;
        run(Command::new("strip")
            .args(["--strip-debug", "-o"])
            .arg(binary)
            .arg(self.binary))?;
        Ok(())
    }

    /// What the binary prints about itself.
    fn stage_generated(&self, stage: &Stage<'_>, work: &TempDir) -> Result<()> {
        let pages = work.path().join("man");
        std::fs::create_dir(&pages)?;
        run(Command::new(self.binary).args(["man", "--dir"]).arg(&pages))?;
        for page in std::fs::read_dir(&pages)? {
            let page = page?;
            let name = page.file_name();
            let name = name.to_str().context("a man page with an odd name")?;
            let section = name.rsplit('.').next().unwrap_or_default();
            let target = format!("usr/share/man/man{section}/{name}");
            stage.copy(&page.path(), &target)?;
            stage.compress(&target)?;
        }
        for (shell, target) in COMPLETIONS {
            let script = run(Command::new(self.binary).args(["completions", shell]))?;
            stage.write(target, script.as_bytes(), MODE_FILE)?;
        }
        Ok(())
    }

    fn stage_control(&self, stage: &Stage<'_>, work: &TempDir) -> Result<()> {
        let depends = libraries(&stage.root.join("usr/bin/penstock"), work.path())?;
        let (files, bytes) = stage.files()?;
        let size_kib = bytes.div_ceil(1024);
        let (version, architecture) = (self.version, architecture());
        let control = format!(
            "Package: {NAME}\nVersion: {version}\nSection: admin\nPriority: optional\n\
             Architecture: {architecture}\n\
             Maintainer: The Penstock developers <packages@penstock.invalid>\n\
             Installed-Size: {size_kib}\nDepends: {depends}, {DEPENDS}\nRecommends: {RECOMMENDS}\n\
             Suggests: {SUGGESTS}\nDescription: {DESCRIPTION}\n"
        );
        let conffiles = CONFFILES.iter().map(|path| format!("{path}\n"));
        let sums = run(Command::new("md5sum")
            .arg("--")
            .args(&files)
            .current_dir(stage.root))?;
        stage.write("DEBIAN/control", control.as_bytes(), MODE_FILE)?;
        stage.write(
            "DEBIAN/conffiles",
            conffiles.collect::<String>().as_bytes(),
            MODE_FILE,
        )?;
        stage.write("DEBIAN/md5sums", sums.as_bytes(), MODE_FILE)?;
        let debian = self.source.join("packaging/debian");
        stage.copy(&debian.join("triggers"), "DEBIAN/triggers")?;
        for script in SCRIPTS {
            let content = read(&debian.join(script))?;
            stage.write(&format!("DEBIAN/{script}"), &content, MODE_PROGRAM)?;
        }
        Ok(())
    }
}

/// Debian's word for the processor that this is built for.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The packages of the libraries that a binary needs, in the versions that have what it uses: at least those
/// of this system, if it uses what they added.
fn libraries(binary: &Path, work: &Path) -> Result<String> {
    // dpkg-shlibdeps wants to stand beside the control file of a source package.
    let beside = work.join("shlibs");
    std::fs::create_dir_all(beside.join("debian"))?;
    let control = format!("Source: {NAME}\n\nPackage: {NAME}\nArchitecture: any\n");
    std::fs::write(beside.join("debian/control"), control)?;
    let told = run(Command::new("dpkg-shlibdeps")
        .arg("-O")
        .arg(binary)
        .current_dir(&beside))?;
    let depends = told
        .lines()
        .find_map(|line| line.strip_prefix("shlibs:Depends="));
    let depends = depends.context("dpkg-shlibdeps names no package")?;
    ensure!(!depends.is_empty(), "dpkg-shlibdeps names no package");
    Ok(depends.to_owned())
}

/// The tree that becomes the package.
struct Stage<'a> {
    root: &'a Path,
}

impl Stage<'_> {
    fn write(&self, target: &str, content: &[u8], mode: u32) -> Result<PathBuf> {
        let path = self.root.join(target);
        let dir = path
            .parent()
            .context("a path below the root has a parent")?;
        std::fs::create_dir_all(dir)?;
        // Whatever the umask of whoever builds it.
        for made in dir
            .ancestors()
            .take_while(|made| made.starts_with(self.root))
        {
            std::fs::set_permissions(made, std::fs::Permissions::from_mode(MODE_PROGRAM))?;
        }
        std::fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        Ok(path)
    }

    fn copy(&self, source: &Path, target: &str) -> Result<()> {
        self.write(target, &read(source)?, MODE_FILE).map(drop)
    }

    /// Replaces a file by itself with `.gz`, without name and time inside.
    fn compress(&self, target: &str) -> Result<()> {
        run(Command::new("gzip")
            .args(["-9n"])
            .arg(self.root.join(target)))
        .map(drop)
    }

    /// All files, below the root and sorted, and their bytes.
    fn files(&self) -> Result<(Vec<PathBuf>, u64)> {
        let (mut files, mut bytes) = (Vec::new(), 0);
        let mut dirs = vec![self.root.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    dirs.push(entry.path());
                    continue;
                }
                bytes += entry.metadata()?.len();
                files.push(entry.path().strip_prefix(self.root)?.to_owned());
            }
        }
        files.sort();
        Ok((files, bytes))
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Runs a command and returns what it printed.
fn run(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .env("LC_ALL", "C")
        .output()
        .with_context(|| format!("run {:?}: is it installed?", command.get_program()))?;
    if !output.status.success() {
        let mut told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let _ = write!(told, " ({})", output.status);
        bail!("{:?}: {told}", command.get_program());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
