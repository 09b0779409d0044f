//! Files that come with a machine: a tar archive as its second disk, which the machine unpacks.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use guest_rig::paths::penstock_binary;
use guest_rig::process::run;
use packaging::{Compression, Package};
use tempfile::TempDir;

/// Files for a machine, by the names under which they lie in [`Payload::IN_MACHINE`].
#[derive(Debug)]
pub struct Payload {
    dir: TempDir,
}

impl Payload {
    /// Where the files are in a machine.
    pub const IN_MACHINE: &str = "/opt/rig";

    /// Without files.
    pub fn new() -> Result<Self> {
        let dir = tempfile::tempdir().context("make a directory for a machine's files")?;
        std::fs::create_dir(dir.path().join("files"))?;
        Ok(Self { dir })
    }

    /// The directory that becomes the archive.
    pub fn directory(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    /// Adds a file.
    pub fn with(self, source: &Path, name: &str) -> Result<Self> {
        std::fs::copy(source, self.directory().join(name))
            .with_context(|| format!("copy {}", source.display()))?;
        Ok(self)
    }

    /// Adds Penstock's package, with this version.
    pub fn with_package(self, version: &str, name: &str) -> Result<Self> {
        let packages = tempfile::tempdir().context("make a directory for a package")?;
        let package = Package {
            source: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."),
            binary: &penstock_binary()?,
            version,
            epoch: 1_700_000_000,
            compression: Compression::Fast,
        };
        let package = package.assemble(packages.path())?;
        self.with(&package, name)
    }

    /// The archive.
    pub(crate) fn archive(&self) -> Result<PathBuf> {
        let archive = self.dir.path().join("payload.tar");
        run(Command::new("tar")
            .arg("-C")
            .arg(self.directory())
            .arg("-cf")
            .arg(&archive)
            .args(["--owner=0", "--group=0", "."]))?;
        Ok(archive)
    }
}
