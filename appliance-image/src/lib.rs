//! Builds the appliance: Debian 13 with Penstock in a disk image that boots by UEFI and by BIOS, and the file
//! that updates machines which run it.
//!
//! Begin with [`Build::run`]. [`packages`] fetches Debian's packages once, after which nothing here needs a
//! network; [`roots`] makes two trees of them, the appliance's and that of the tools which build it, so that
//! the tools' versions do not depend on the machine; [`slot`] makes what a slot holds (root filesystem,
//! verity tree, kernel); [`disk`] lays it out; [`outputs`] converts, sums and signs.
//!
//! **Reproducible**: the same sources, packages, version and key give the same bytes, but for the signatures,
//! which minisign makes with random numbers, and `SHA256SUMS`, which names one. All times are
//! `SOURCE_DATE_EPOCH`; identifiers are derived from the version or from content.
//!
//! `tree/` has the files that the appliance has beside those of its packages.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

pub mod disk;
mod esp;
mod outputs;
mod packages;
mod process;
mod roots;
pub mod signing;
mod slot;
mod tree;

pub use signing::Signer;

/// What to build an appliance of.
#[derive(Debug)]
pub struct Build<'a> {
    /// Where packages and trees are kept between builds.
    pub cache: &'a Path,
    /// Root of the sources; their `appliance-image/tree` goes into the image.
    pub source: &'a Path,
    /// The Debian package of Penstock.
    pub package: &'a Path,
    /// Version of the appliance: of the characters `A-Za-z0-9.+~-`, at most 64 of them.
    pub version: &'a str,
    /// Seconds since 1970: the time that everything in the image bears.
    pub epoch: u64,
    /// Signs what is built; its public key goes into the image, which takes only updates so signed.
    pub signer: &'a Signer,
    /// Asks the archive for newer packages first.
    pub refresh: bool,
}

/// Which files are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kinds {
    /// All that is published.
    All,
    /// The qcow2 image and the update, little compressed: for tests.
    Bootable,
    /// The update alone, little compressed: for tests.
    Update,
}

impl Build<'_> {
    /// Builds into `directory`, and names what is there.
    ///
    /// # Errors
    /// This process is not root (the trees have files of several users), a program is missing, the archive
    /// cannot be reached and the packages are not there yet, or the disk is full.
    pub fn run(&self, directory: &Path, kinds: Kinds, say: &dyn Fn(&str)) -> Result<Vec<PathBuf>> {
        ensure!(
            process::is_root()?,
            "the appliance has files of several users: build it as root"
        );
        ensure_version(self.version)?;
        std::fs::create_dir_all(self.cache)
            .with_context(|| format!("create {}", self.cache.display()))?;
        std::fs::create_dir_all(directory)
            .with_context(|| format!("create {}", directory.display()))?;
        let packages = packages::get(self.cache, self.refresh, say)?;
        let roots = roots::get(self.cache, &packages, say)?;
        let work = tempfile::Builder::new()
            .prefix("image-")
            .tempdir_in(self.cache)
            .context("make a directory to build in")?;
        let work = Work {
            directory: work.path(),
            tools: &roots.tools,
            epoch: self.epoch,
        };
        say("puts the appliance's root together");
        let tree = tree::make(self, &roots, &work)?;
        say("packs the slot: root filesystem, verity tree, kernel");
        let slot = slot::make(self, &roots, &tree, &work, kinds)?;
        let disk = match kinds {
            Kinds::Update => None,
            Kinds::All | Kinds::Bootable => Some(disk::make(&slot, self.version, &work)?),
        };
        outputs::write(self, &slot, disk.as_deref(), &work, directory, kinds, say)
    }
}

/// A place to build in, and the tools to build with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work<'a> {
    /// Seen by the tools as `/build`.
    directory: &'a Path,
    /// Root of their tree.
    tools: &'a Path,
    epoch: u64,
}

impl Work<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

/// Versions become file names and parts of kernel command lines.
fn ensure_version(version: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".+~-".contains(c);
    ensure!(
        (1..=64).contains(&version.len()) && version.chars().all(is_allowed),
        "the version '{version}' is not 1 to 64 of the characters A-Z a-z 0-9 . + ~ -"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_names_of_files() {
        for good in ["0.1.0", "0.1.0+20261124", "1~rc1-2"] {
            assert!(ensure_version(good).is_ok(), "{good}");
        }
        for bad in ["", "1 2", "../x", "1;reboot", &"1".repeat(65)] {
            assert!(ensure_version(bad).is_err(), "{bad}");
        }
    }
}
