//! Files of ours for a guest's initramfs: the kernel unpacks as many archives as are joined, one over the
//! other, so a program under test comes in without building the guest anew.
//!
//! The format is cpio's "newc" (Linux, `Documentation/driver-api/early-userspace/buffer-format.rst`): for
//! each file a header of hexadecimal numbers, the name with its NUL, the bytes; name and bytes are filled up
//! to four bytes.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

const MAGIC: &str = "070701";
/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";
const ALIGNMENT: usize = 4;
const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// A file of the host that a guest gets.
#[derive(Debug, Clone)]
pub struct GuestFile {
    /// Where it is here.
    pub source: PathBuf,
    /// Where it is in the guest, without a slash in front.
    pub target: String,
}

/// Writes the initramfs `base` followed by `files` to `joined`.
pub(crate) fn join(base: &Path, files: &[GuestFile], joined: &Path) -> Result<()> {
    let mut out =
        std::fs::File::create(joined).with_context(|| format!("create {}", joined.display()))?;
    let mut base = std::fs::File::open(base).with_context(|| format!("open {}", base.display()))?;
    let bytes = std::io::copy(&mut base, &mut out).context("copy the initramfs")?;
    // cpio fills its archives up to whole blocks already.
    ensure!(
        bytes % ALIGNMENT as u64 == 0,
        "the guest's initramfs ends within a word"
    );
    out.write_all(&archive(files)?)
        .context("write the guest's files")
}

fn archive(files: &[GuestFile]) -> Result<Vec<u8>> {
    let mut archive = Vec::new();
    let mut inode = 1;
    for file in files {
        for directory in directories(&file.target) {
            entry(&mut archive, inode, DIRECTORY, directory, &[])?;
            inode += 1;
        }
        let mut content = Vec::new();
        std::fs::File::open(&file.source)
            .and_then(|mut source| source.read_to_end(&mut content))
            .with_context(|| format!("read {}", file.source.display()))?;
        entry(&mut archive, inode, PROGRAM, &file.target, &content)?;
        inode += 1;
    }
    entry(&mut archive, 0, 0, TRAILER, &[])?;
    Ok(archive)
}

/// `a/b/c` → `a`, `a/b`.
fn directories(target: &str) -> impl Iterator<Item = &str> {
    target.match_indices('/').map(|(index, _)| &target[..index])
}

fn entry(archive: &mut Vec<u8>, inode: u32, mode: u32, name: &str, content: &[u8]) -> Result<()> {
    let size = u32::try_from(content.len()).context("a file for the guest of 4 GiB or more")?;
    let links = if mode == DIRECTORY { 2 } else { 1 };
    let name_bytes = name.len() as u32 + 1;
    archive.extend(MAGIC.as_bytes());
    // inode, mode, owner, group, links, time, size, device of the file system (2), device (2), bytes of the
    // name, checksum
    let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_bytes, 0];
    for field in fields {
        archive.extend(format!("{field:08x}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    fill(archive);
    archive.extend(content);
    fill(archive);
    Ok(())
}

fn fill(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(ALIGNMENT), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpio_unpacks_what_is_packed() -> Result<()> {
        let scratch = tempfile::tempdir()?;
        let source = scratch.path().join("source");
        std::fs::write(&source, b"seven b")?;
        let files = ["usr/bin/one", "two"].map(|target| GuestFile {
            source: source.clone(),
            target: target.to_owned(),
        });
        let packed = scratch.path().join("packed");
        std::fs::write(&packed, archive(&files)?)?;
        let out = scratch.path().join("out");
        std::fs::create_dir(&out)?;
        crate::process::run(
            std::process::Command::new("cpio")
                .args(["--extract", "--make-directories", "--quiet", "-F"])
                .arg(&packed)
                .current_dir(&out),
        )?;
        for target in ["usr/bin/one", "two"] {
            assert_eq!(std::fs::read(out.join(target))?, b"seven b");
        }
        Ok(())
    }
}
