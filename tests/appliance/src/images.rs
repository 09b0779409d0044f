//! Images of the appliance with the binary under test, built once for it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use appliance_image::{Build, Kinds, Signer};
use guest_rig::Form;
use guest_rig::paths::{cache_root, penstock_binary};
use guest_rig::process::run;
use packaging::{Compression, Package};
use rustix::fs::{FlockOperation, flock};

/// The version that machines begin with.
pub const FIRST: &str = "1";
/// A version that is as good.
pub const SECOND: &str = "2";
/// A version whose daemon does not start; for the long forms of tests.
pub const UNWELL: &str = "3";
/// Time of everything in the images, in seconds since 1970.
const EPOCH: u64 = 1_700_000_000;
/// What makes [`UNWELL`] so: no daemon, and a check that does not wait long for it.
const NO_DAEMON: &str = "[Service]\nExecStart=\nExecStart=/bin/false\nRestart=no\n";
const SHORT_CHECK: &str =
    "[Service]\nExecStart=\nExecStart=/usr/bin/penstock update check-boot --limit 30\n";
/// Directories of images of other binaries that are kept.
const KEPT: usize = 1;

/// Where the images are.
#[derive(Debug, Clone)]
pub struct Images {
    directory: PathBuf,
    signing_key: PathBuf,
}

impl Images {
    /// Those of the binary under test, which are built if they are not there.
    ///
    /// # Errors
    /// This process is not root, or as [`Build::run`].
    pub fn get() -> Result<Self> {
        let cache = cache_root()?.join("appliance");
        std::fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
        let lock = std::fs::File::create(cache.join("test-lock")).context("open a lock")?;
        flock(&lock, FlockOperation::LockExclusive).context("lock the cache of images")?;
        let directory = cache.join(format!("test-{:016x}", identity()?));
        let images = Self {
            signing_key: cache.join("test-signing.key"),
            directory,
        };
        if !images.directory.is_dir() {
            images.build(&cache)?;
            forget_others(&cache, &images.directory)?;
        }
        Ok(images)
    }

    /// The image to boot, of [`FIRST`].
    pub fn qcow2(&self) -> PathBuf {
        self.file(FIRST, "qcow2")
    }

    /// The update to `version`.
    pub fn update(&self, version: &str) -> PathBuf {
        self.file(version, "update")
    }

    fn file(&self, version: &str, kind: &str) -> PathBuf {
        self.directory
            .join(format!("penstock-appliance-{version}.{kind}"))
    }

    fn build(&self, cache: &Path) -> Result<()> {
        let say = |line: &str| eprintln!("rig: {line}");
        say("builds images of the appliance once for this binary, which takes minutes");
        let work = tempfile::Builder::new()
            .prefix("test-images-")
            .tempdir_in(cache)
            .context("make a directory for images")?;
        let package = Package {
            source: &source(),
            binary: &penstock_binary()?,
            version: env!("CARGO_PKG_VERSION"),
            epoch: EPOCH,
            compression: Compression::Fast,
        };
        let package = package.assemble(work.path())?;
        let signer = Signer::open(&self.signing_key, &say)?;
        let out = work.path().join("images");
        let mut wanted = vec![(FIRST, source()), (SECOND, source())];
        if Form::of_this_run() == Form::Long {
            wanted.push((UNWELL, unwell_tree(work.path())?));
        }
        for (version, tree) in wanted {
            let build = Build {
                cache,
                source: &tree,
                package: &package,
                version,
                epoch: EPOCH,
                signer: &signer,
                refresh: false,
            };
            let kinds = match version {
                FIRST => Kinds::Bootable,
                _ => Kinds::Update,
            };
            build.run(&out, kinds, &say)?;
        }
        std::fs::rename(&out, &self.directory).context("move the images into place")
    }
}

/// Root of the sources.
fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Sources whose appliance cannot be well.
fn unwell_tree(work: &Path) -> Result<PathBuf> {
    let root = work.join("unwell");
    let from = source().join("appliance-image");
    std::fs::create_dir_all(root.join("appliance-image"))?;
    run(std::process::Command::new("cp")
        .arg("-r")
        .arg(from.join("tree"))
        .arg(root.join("appliance-image")))?;
    let units = root.join("appliance-image/tree/usr/lib/systemd/system");
    std::fs::write(units.join("penstock.service.d/unwell.conf"), NO_DAEMON)?;
    let drop_ins = units.join("penstock-boot-check.service.d");
    std::fs::create_dir(&drop_ins)?;
    std::fs::write(drop_ins.join("unwell.conf"), SHORT_CHECK)?;
    Ok(root)
}

/// Changes with everything that goes into the images: the binary, the files laid over, and the builder, which
/// is in this program.
fn identity() -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    // By its link, which stays when the program is built anew meanwhile.
    let builder = PathBuf::from("/proc/self/exe");
    for file in [penstock_binary()?, builder] {
        let meta =
            std::fs::metadata(&file).with_context(|| format!("look at {}", file.display()))?;
        Form::of_this_run().word().hash(&mut hasher);
        (meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
    }
    for tree in ["appliance-image/tree", "packaging"] {
        hash_tree(&source().join(tree), &mut hasher)?;
    }
    Ok(hasher.finish())
}

fn hash_tree(directory: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    let mut entries = std::fs::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        entry.file_name().hash(hasher);
        match entry.file_type()?.is_dir() {
            true => hash_tree(&entry.path(), hasher)?,
            false => std::fs::read(entry.path())?.hash(hasher),
        }
    }
    Ok(())
}

/// Deletes images of binaries that are gone, but for the last ones: each takes a gigabyte.
fn forget_others(cache: &Path, own: &Path) -> Result<()> {
    let mut others = Vec::new();
    for entry in std::fs::read_dir(cache)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_images = name.len() == "test-".len() + 16 && name.starts_with("test-");
        if is_images && entry.path() != own {
            others.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    others.sort();
    let gone = others.len().saturating_sub(KEPT);
    for (_, path) in &others[..gone] {
        std::fs::remove_dir_all(path).with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}
