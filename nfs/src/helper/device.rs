//! Volumes as block devices of this machine: what they hold, and a file system for those that hold nothing.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::wire::Signature;

use super::command::{run, succeed};
use super::{HelperError, Result, check_name};

/// Where the block devices of volumes are.
const LINKS: &str = "/dev/penstock";
/// Bytes at the beginning that are zeroes if a volume holds nothing.
const HEAD_BYTES: u64 = 1 << 20;
/// The same at its end, where some formats have a copy of what they are.
const TAIL_BYTES: u64 = 64 << 10;
/// blkid's exit status for no signature.
const NOTHING_FOUND: i32 = 2;
/// The same for several that contradict each other.
const AMBIVALENT: i32 = 8;

/// The block device of a volume.
pub fn of(volume: &str) -> Result<PathBuf> {
    check_name(volume)?;
    let link = Path::new(LINKS).join(volume);
    let missing =
        |error: std::io::Error| HelperError::io(format!("find {}", link.display()), &error);
    let device = link.canonicalize().map_err(missing)?;
    let is_block = device
        .metadata()
        .is_ok_and(|found| found.file_type().is_block_device());
    match is_block && device.starts_with("/dev") {
        true => Ok(device),
        false => Err(HelperError::new(
            format!("{} is no block device", link.display()),
            "attach the volume with --block",
        )),
    }
}

/// What a device holds.
pub fn inspect(device: &Path) -> Result<Signature> {
    let path = device.to_string_lossy();
    let probed = run("blkid", ["-p", "-o", "export", &path])?;
    match probed.code {
        Some(0) => Ok(signature(&probed.text)),
        Some(AMBIVALENT) => Ok(Signature::Other("several signatures".into())),
        Some(NOTHING_FOUND) if is_blank(device)? => Ok(Signature::Empty),
        Some(NOTHING_FOUND) => Ok(Signature::Other("data of an unknown kind".into())),
        _ => Err(HelperError::new(
            format!(
                "blkid cannot read {}: {}",
                device.display(),
                probed.complaint
            ),
            "look at the kernel's log (dmesg)",
        )),
    }
}

fn signature(export: &str) -> Signature {
    let value = |key: &str| {
        let mut lines = export.lines();
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    };
    match (value("TYPE"), value("PTTYPE")) {
        (Some("xfs"), None) => Signature::Xfs,
        (Some(other), _) => Signature::Other(other.to_owned()),
        (None, Some(table)) => Signature::Other(format!("a partition table ({table})")),
        (None, None) => Signature::Other("data of an unknown kind".into()),
    }
}

fn is_blank(device: &Path) -> Result<bool> {
    let read = || -> std::io::Result<bool> {
        let mut file = File::open(device)?;
        let bytes = file.seek(SeekFrom::End(0))?;
        let mut part = Vec::new();
        for (start, length) in [
            (0, HEAD_BYTES.min(bytes)),
            (bytes.saturating_sub(TAIL_BYTES), TAIL_BYTES.min(bytes)),
        ] {
            part.clear();
            file.seek(SeekFrom::Start(start))?;
            (&mut file).take(length).read_to_end(&mut part)?;
            if part.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    read().map_err(|e| HelperError::io(format!("read {}", device.display()), &e))
}

/// Makes a file system on a device that holds nothing.
pub fn format(device: &Path) -> Result<()> {
    match inspect(device)? {
        Signature::Empty => {}
        Signature::Xfs => return Ok(()),
        Signature::Other(found) => {
            return Err(HelperError::new(
                format!("{} holds {found}", device.display()),
                "export another volume",
            ));
        }
    }
    // Nothing is to be discarded on a device of zeroes.
    succeed("mkfs.xfs", ["-q", "-K", &device.to_string_lossy()]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_told_apart() {
        assert_eq!(
            signature("DEVNAME=/dev/vdb\nUUID=1\nTYPE=xfs\nUSAGE=filesystem"),
            Signature::Xfs
        );
        assert_eq!(signature("TYPE=ext4"), Signature::Other("ext4".into()));
        let table = Signature::Other("a partition table (gpt)".into());
        assert_eq!(signature("DEVNAME=/dev/vdb\nPTUUID=1\nPTTYPE=gpt"), table);
        assert!(matches!(
            signature("TYPE=xfs\nPTTYPE=dos"),
            Signature::Other(_)
        ));
        assert!(matches!(signature(""), Signature::Other(_)));
    }

    #[test]
    fn only_zeroes_at_both_ends_are_blank() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        assert!(is_blank(&path).unwrap());
        std::os::unix::fs::FileExt::write_all_at(&file, b"x", (8 << 20) - 1).unwrap();
        assert!(!is_blank(&path).unwrap());
        std::fs::write(&path, b"\0\0x").unwrap();
        assert!(!is_blank(&path).unwrap());
    }
}
