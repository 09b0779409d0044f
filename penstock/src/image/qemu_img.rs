//! Running qemu-img, which knows image formats so that we need not.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde::Deserialize;

use crate::failure::{Context, Failure, Kind, Result};

/// Program name, found in PATH.
const PROGRAM: &str = "qemu-img";

/// What `qemu-img info` tells.
#[derive(Debug, Deserialize)]
pub struct Info {
    /// Name of the format.
    pub format: String,
    /// Size that a guest sees.
    #[serde(rename = "virtual-size")]
    pub virtual_size: u64,
    #[serde(rename = "backing-filename")]
    backing: Option<String>,
    #[serde(default)]
    encrypted: bool,
    #[serde(rename = "format-specific")]
    specific: Option<Specific>,
}

#[derive(Debug, Deserialize)]
struct Specific {
    data: Option<SpecificData>,
}

#[derive(Debug, Deserialize)]
struct SpecificData {
    #[serde(rename = "data-file")]
    data_file: Option<String>,
}

#[derive(Debug, Deserialize)]
struct MapEntry {
    length: u64,
    zero: bool,
    /// Where in the file it is; compressed clusters have none.
    offset: Option<u64>,
}

/// Asks about an image.
pub fn info(path: &Path, format: Option<&str>) -> Result<Info> {
    let mut command = Command::new(PROGRAM);
    command.args(["info", "--output=json", "--force-share"]);
    if let Some(format) = format {
        command.args(["-f", format]);
    }
    let output = run(command.arg(path), path)?;
    serde_json::from_slice(&output.stdout).map_err(|e| {
        Failure::plain(
            Kind::Failed,
            format!("cannot understand `qemu-img info {}`: {e}", path.display()),
        )
    })
}

impl Info {
    /// An image may name other files of this machine, which whoever made it need not be allowed to read; and we have
    /// no key for an encrypted one.
    pub fn check_standalone(&self, path: &Path) -> Result<()> {
        let data_file = self
            .specific
            .as_ref()
            .and_then(|s| s.data.as_ref())
            .and_then(|d| d.data_file.as_ref());
        let shown = path.display();
        if let Some(other) = self.backing.as_ref().or(data_file) {
            return Err(Failure::new(
                Kind::Failed,
                format!("image {shown} needs another file, {other}"),
                format!(
                    "if you trust it, flatten it first: qemu-img convert -O qcow2 {shown} FLAT.qcow2"
                ),
            ));
        }
        if self.encrypted {
            return Err(Failure::new(
                Kind::Failed,
                format!("image {shown} is encrypted"),
                "decrypt it first with qemu-img convert",
            ));
        }
        Ok(())
    }
}

/// `qemu-img check`: the image is damaged.
const CHECK_CORRUPT: i32 = 2;
/// `qemu-img check`: clusters that nobody uses, which harms nothing.
const CHECK_LEAKS: i32 = 3;

/// Refuses a damaged image. qemu-img would read what it lacks, of one that was cut off for example, as zeroes.
pub fn check(path: &Path, format: &str) -> Result<()> {
    let mut command = Command::new(PROGRAM);
    command
        .args(["check", "-q", "--force-share", "-f", format])
        .arg(path);
    let output = output(&mut command)?;
    match output.status.code() {
        Some(0 | CHECK_LEAKS) => Ok(()),
        Some(CHECK_CORRUPT) => Err(damaged(path)),
        _ => Err(told_by(&output, path)),
    }
}

fn damaged(path: &Path) -> Failure {
    let shown = path.display();
    Failure::new(
        Kind::Failed,
        format!("image {shown} is damaged or was cut off: it refers to data that it does not hold"),
        format!("get it again; `qemu-img check {shown}` tells more"),
    )
}

/// Bytes of an image that are not known to be zero: what its raw form takes on disk. An image of which some lie behind its
/// end is refused: `check` overlooks less than a cluster.
pub fn data_bytes(path: &Path, format: &str) -> Result<u64> {
    let mut command = Command::new(PROGRAM);
    command
        .args(["map", "--output=json", "--force-share", "-f", format])
        .arg(path);
    let output = run(&mut command, path)?;
    let map: Vec<MapEntry> = serde_json::from_slice(&output.stdout).map_err(|e| {
        Failure::plain(
            Kind::Failed,
            format!("cannot understand `qemu-img map {}`: {e}", path.display()),
        )
    })?;
    let file_bytes = std::fs::metadata(path)
        .context(|| format!("look at {}", path.display()))?
        .len();
    let data = || map.iter().filter(|entry| !entry.zero);
    let end = data().filter_map(|entry| entry.offset?.checked_add(entry.length));
    // A block device tells no length here.
    if file_bytes > 0 && end.max().is_some_and(|end| end > file_bytes) {
        return Err(damaged(path));
    }
    Ok(data().map(|entry| entry.length).sum())
}

/// Writes the raw form of an image into `target`, an empty sparse file of the right size.
pub fn to_raw(path: &Path, format: &str, target: &File) -> Result<()> {
    let mut command = Command::new(PROGRAM);
    command.args([
        "convert",
        "-n",
        "--target-is-zero",
        "-f",
        format,
        "-O",
        "raw",
    ]);
    run(
        command.arg("--force-share").arg(path).arg(path_of(target)),
        path,
    )
    .map(drop)
}

/// Writes the raw bytes in `source` as a new qcow2 file.
pub fn to_qcow2(source: &File, target: &Path) -> Result<()> {
    let mut command = Command::new(PROGRAM);
    command
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(path_of(source))
        .arg(target);
    run(&mut command, target).map(drop)
}

/// A file without a name in `dir`: nothing of it is left behind however this process ends.
pub fn unnamed_file(dir: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// A name under which a child of ours can open `file`, though it may have none of its own.
fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        file.as_raw_fd()
    ))
}

fn output(command: &mut Command) -> Result<Output> {
    match command.stdin(Stdio::null()).output() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Failure::new(
            Kind::Failed,
            "qemu-img is not installed",
            "run `apt-get install qemu-utils`, or for a raw image say --format raw",
        )),
        other => other.context(|| "run qemu-img".into()),
    }
}

fn run(command: &mut Command, about: &Path) -> Result<Output> {
    let output = output(command)?;
    if output.status.success() {
        return Ok(output);
    }
    Err(told_by(&output, about))
}

fn told_by(output: &Output, about: &Path) -> Failure {
    let told = String::from_utf8_lossy(&output.stderr);
    let told = told.trim().trim_start_matches("qemu-img: ");
    Failure::plain(
        Kind::Failed,
        format!("qemu-img failed on {}: {told}", about.display()),
    )
}
