//! Files for a machine: a read-only disk, which is never empty.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use guest_rig::paths::find_program;
use guest_rig::process::run;

/// Where a machine finds them once it ran [`MOUNT`].
pub const PLACE: &str = "/run/payload";
/// Makes the machine find them.
pub const MOUNT: &str =
    "mkdir -p /run/payload && mount -o ro /dev/disk/by-label/payload /run/payload";

/// Makes the disk `to` of `files`.
pub(crate) fn make(files: &[PathBuf], to: &Path, directory: &Path) -> Result<()> {
    let tree = directory.join("payload");
    std::fs::create_dir_all(&tree)?;
    let mut bytes = 0;
    for file in files {
        let name = file.file_name().context("a file has a name")?;
        bytes += std::fs::copy(file, tree.join(name))
            .with_context(|| format!("copy {}", file.display()))?;
    }
    let mke2fs = find_program("mke2fs").context("mke2fs is missing: install e2fsprogs")?;
    run(Command::new(mke2fs)
        .args(["-q", "-t", "ext4", "-F", "-m", "0", "-L", "payload", "-d"])
        .arg(&tree)
        .arg(to)
        .arg(format!("{}M", (bytes >> 20) * 11 / 10 + 32)))?;
    std::fs::remove_dir_all(&tree).context("remove the files' copies")
}
