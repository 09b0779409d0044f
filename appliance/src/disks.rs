//! The disks of the machine, and whether anything is on them.
//!
//! A disk is empty if libblkid finds no signature on it, it has no partitions, nobody uses it, and its first
//! and last mebibyte are zeroes: encrypted or unknown data have no signature either.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::process::run;

/// Looked at at both ends of a disk, in bytes.
const LOOKED_AT: u64 = 1 << 20;
/// Smaller disks are none that a node takes: cards for configuration, remains of installations. In bytes.
const SMALLEST: u64 = 1 << 30;

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Its device, like `/dev/vdb`.
    pub path: PathBuf,
    /// In bytes.
    pub bytes: u64,
    /// As the disk says it; may be empty.
    pub model: String,
    /// As the disk says it; may be empty.
    pub serial: String,
    /// What is on it; nothing if it is empty.
    pub content: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Lsblk {
    blockdevices: Vec<Block>,
}

/// A line of lsblk(8).
#[derive(Debug, Deserialize)]
struct Block {
    path: PathBuf,
    size: u64,
    model: Option<String>,
    serial: Option<String>,
    #[serde(rename = "type")]
    kind: String,
    fstype: Option<String>,
    pttype: Option<String>,
    label: Option<String>,
    ro: bool,
    #[serde(default)]
    mountpoints: Vec<Option<String>>,
    #[serde(default)]
    children: Vec<Block>,
}

const COLUMNS: &str = "PATH,SIZE,MODEL,SERIAL,TYPE,FSTYPE,PTTYPE,LABEL,RO,MOUNTPOINTS";

/// All disks, in the order of their names.
///
/// # Errors
/// lsblk or wipefs cannot be run.
pub fn list() -> Result<Vec<Disk>> {
    let text = run(Command::new("lsblk").args(["--json", "--bytes", "--output", COLUMNS]))?;
    let mut disks = parse(&text)?;
    for disk in &mut disks {
        if disk.content.is_none() {
            disk.content = look(&disk.path, disk.bytes)?;
        }
    }
    Ok(disks)
}

/// The disk at `path`, which may be a link.
///
/// # Errors
/// There is no such disk, or it is no whole disk.
pub fn find(path: &Path) -> Result<Disk> {
    let real = std::fs::canonicalize(path)
        .with_context(|| format!("there is no disk {}", path.display()))?;
    let kind = std::fs::metadata(&real)?.file_type();
    ensure!(kind.is_block_device(), "{} is no disk", path.display());
    let mut disks = list()?.into_iter();
    disks
        .find(|disk| disk.path == real)
        .with_context(|| format!("{} is no whole disk", path.display()))
}

/// What lsblk knows.
fn parse(text: &str) -> Result<Vec<Disk>> {
    let listed: Lsblk = serde_json::from_str(text).context("read what lsblk printed")?;
    let disks = listed
        .blockdevices
        .into_iter()
        .filter(|block| block.kind == "disk" && !block.ro);
    let mut disks: Vec<Disk> = disks
        .map(Block::into_disk)
        .filter(|disk| disk.bytes > 0)
        .collect();
    disks.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(disks)
}

impl Block {
    fn into_disk(self) -> Disk {
        let is_mounted = self.mountpoints.iter().flatten().count() > 0;
        let content = if let Some(kind) = self.pttype.filter(|_| !self.children.is_empty()) {
            Some(format!("{} partitions ({kind})", self.children.len()))
        } else if !self.children.is_empty() {
            Some("in use by another device".to_owned())
        } else if let Some(kind) = self.fstype {
            Some(
                self.label
                    .map_or(kind.clone(), |label| format!("{kind} \"{label}\"")),
            )
        } else {
            is_mounted.then(|| "in use".to_owned())
        };
        Disk {
            path: self.path,
            bytes: self.size,
            model: self.model.unwrap_or_default().trim().to_owned(),
            serial: self.serial.unwrap_or_default().trim().to_owned(),
            content,
        }
    }
}

/// What is on a disk that lsblk knows nothing of.
fn look(path: &Path, bytes: u64) -> Result<Option<String>> {
    let found = run(Command::new("wipefs")
        .args(["--no-act", "--noheadings", "--output", "TYPE"])
        .arg(path))?;
    if let Some(kind) = found.lines().map(str::trim).find(|line| !line.is_empty()) {
        return Ok(Some(kind.to_owned()));
    }
    let disk = match File::open(path) {
        Ok(disk) => disk,
        Err(e) => return Ok(Some(format!("unreadable: {e}"))),
    };
    match ends_are_zeroes(&disk, bytes) {
        Ok(true) => Ok(None),
        Ok(false) => Ok(Some("unknown data".to_owned())),
        Err(e) => Ok(Some(format!("unreadable: {e}"))),
    }
}

fn ends_are_zeroes(disk: &File, bytes: u64) -> std::io::Result<bool> {
    let length = LOOKED_AT.min(bytes);
    let mut buffer = Vec::new();
    disk.take(length).read_to_end(&mut buffer)?;
    if buffer.iter().any(|byte| *byte != 0) {
        return Ok(false);
    }
    let mut end = vec![0; buffer.len()];
    disk.read_exact_at(&mut end, bytes - length)?;
    Ok(end.iter().all(|byte| *byte == 0))
}

/// The disks that `all-empty` means.
pub fn all_empty(disks: &[Disk]) -> Vec<&Disk> {
    disks
        .iter()
        .filter(|disk| disk.content.is_none() && disk.bytes >= SMALLEST)
        .collect()
}

/// A line for people: path, size, model, and what is on it.
pub fn describe(disk: &Disk) -> String {
    let gib = disk.bytes as f64 / f64::from(1 << 30);
    let model = if disk.model.is_empty() {
        "no model"
    } else {
        &disk.model
    };
    let content = disk.content.as_deref().unwrap_or("empty");
    format!(
        "{}  {gib:.1} GiB  {model} {}  {content}",
        disk.path.display(),
        disk.serial
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LSBLK: &str = r#"{"blockdevices":[
        {"path":"/dev/vdb","size":4294967296,"model":null,"serial":"data-1","type":"disk","fstype":null,
         "pttype":null,"label":null,"ro":false,"mountpoints":[null]},
        {"path":"/dev/vda","size":8589934592,"model":"QEMU ","serial":null,"type":"disk","fstype":null,
         "pttype":"gpt","label":null,"ro":false,"mountpoints":[null],"children":[
           {"path":"/dev/vda1","size":1048576,"model":null,"serial":null,"type":"part","fstype":null,
            "pttype":"gpt","label":null,"ro":false,"mountpoints":[null]}]},
        {"path":"/dev/vdc","size":1073741824,"model":null,"serial":null,"type":"disk","fstype":"xfs",
         "pttype":null,"label":"old","ro":false,"mountpoints":[null]},
        {"path":"/dev/sr0","size":366592,"model":null,"serial":null,"type":"rom","fstype":"iso9660",
         "pttype":null,"label":"cidata","ro":false,"mountpoints":[null]}]}"#;

    #[test]
    fn a_disk_with_anything_on_it_is_not_empty() {
        let disks = parse(LSBLK).expect("disks");
        let names: Vec<_> = disks.iter().map(|disk| disk.path.to_str()).collect();
        assert_eq!(
            names,
            [Some("/dev/vda"), Some("/dev/vdb"), Some("/dev/vdc")]
        );
        assert_eq!(disks[0].content.as_deref(), Some("1 partitions (gpt)"));
        assert_eq!(disks[2].content.as_deref(), Some("xfs \"old\""));
        let empty = all_empty(&disks);
        assert_eq!(empty.len(), 1);
        assert_eq!(
            describe(empty[0]),
            "/dev/vdb  4.0 GiB  no model data-1  empty"
        );
    }

    #[test]
    fn data_without_a_signature_are_data() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("disk");
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path);
        let file = file.expect("a file");
        file.set_len(8 << 20).expect("sized");
        assert!(ends_are_zeroes(&file, 8 << 20).expect("read"));
        file.write_all_at(b"x", (8 << 20) - 1).expect("written");
        assert!(!ends_are_zeroes(&File::open(&path).expect("open"), 8 << 20).expect("read"));
        assert!(ends_are_zeroes(&File::open(&path).expect("open"), 4 << 20).expect("read"));
    }
}
