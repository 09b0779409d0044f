//! Running qemu-img, which knows image formats so that we need not. It gets open files, never paths, and
//! runs within limits and rules ([`confined`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use api::failure::{Context, Failure, Kind, Result};
use serde::Deserialize;

use super::confined::{self, Ended, Limits};

/// Program name, found in PATH.
const PROGRAM: &str = "qemu-img";
/// Memory that qemu-img gets. At this limit it fails, and the image is refused. An image of 30 TiB with the
/// usual clusters needs half of it.
const MEMORY_BYTES_MAX: u64 = 2 << 30;
/// Heaps of qemu-img, so that its 64 threads do not each reserve a share of [`MEMORY_BYTES_MAX`].
const HEAPS_MAX: &str = "2";
/// Processor time that qemu-img gets for any image. What is longer than this and [`BYTES_PER_CPU_S`] allow
/// is refused.
const CPU_BASE: Duration = Duration::from_secs(60);
/// Bytes for which it gets one more second: less than the slowest processor decompresses.
const BYTES_PER_CPU_S: u64 = 8 << 20;
/// Longest time in which qemu-img may do nothing at all. After it, what holds the image is taken to be gone.
const STALL_MAX: Duration = Duration::from_secs(300);

/// Where a child of ours finds the file that is its standard input, and its standard output.
const INPUT: &str = "/proc/self/fd/0";
const OUTPUT: &str = "/proc/self/fd/1";

/// An open qcow2 image.
#[derive(Debug)]
pub struct Image<'a> {
    /// The file; nothing else is opened, whatever its path leads to by now.
    pub file: &'a File,
    /// How it is called in errors.
    pub shown: &'a str,
    /// Its length, or that of the block device.
    pub bytes: u64,
    /// Import what can be read of a damaged image, and zeroes for the rest.
    pub force: bool,
}

#[derive(Debug, Deserialize)]
struct ImageExtent {
    length: u64,
    zero: bool,
    /// Where in the file it is; compressed clusters have none.
    offset: Option<u64>,
}

/// `qemu-img check`: the check did not complete. The image cannot be opened ([`NOT_OPENED`]), or its
/// refcounts cannot be read, which only writing needs.
const CHECK_INCOMPLETE: i32 = 1;
/// Error of any `qemu-img` that cannot read the header or the first table.
const NOT_OPENED: &str = "Could not open";
/// `qemu-img check`: the image is damaged.
const CHECK_CORRUPT: i32 = 2;
/// `qemu-img check`: clusters that nobody uses, which harms nothing.
const CHECK_LEAKS: i32 = 3;
/// Warning of `qemu-img convert --salvage` for each sector that it fails to read.
const UNREADABLE: &str = "error while reading";

impl Image<'_> {
    /// Refuses a damaged image. Of one that was cut off, for example, qemu-img would read the missing data as
    /// zeroes.
    pub fn check(&self) -> Result<()> {
        let mut command = command(&["check", "-q", "--force-share"]);
        command.arg(self.opened()?);
        let ended = self.run(command, None, self.stored_bytes()?, &mut |_| {})?;
        let is_damaged = match ended.status.code() {
            Some(0 | CHECK_LEAKS) => false,
            Some(CHECK_CORRUPT) => true,
            Some(CHECK_INCOMPLETE) if !ended.stderr.contains(NOT_OPENED) => true,
            _ => return Err(failure_of(&ended, self.shown)),
        };
        if is_damaged && !self.force {
            return Err(self.damaged());
        }
        if is_damaged {
            eprintln!(
                "penstock: image {} is damaged: what cannot be read is imported as zeroes",
                self.shown
            );
        }
        Ok(())
    }

    /// Bytes that are not known to be zero: what the raw form takes on disk. An image of which some lie
    /// behind its end is refused: `check` overlooks less than a cluster.
    ///
    /// If the tables of an image of `virtual_bytes` cannot be read and it is imported nevertheless, the raw
    /// form may take all of them.
    pub fn data_bytes(&self, virtual_bytes: u64) -> Result<u64> {
        let mut command = command(&["map", "--output=json", "--force-share"]);
        command.arg(self.opened()?);
        let (mut data, mut end, mut wrong) = (0_u64, 0_u64, None);
        let mut line = |line: &str| match map_entry(line) {
            Ok(Some(entry)) if !entry.zero => {
                data = data.saturating_add(entry.length);
                let entry_end = entry.offset.map(|at| at.saturating_add(entry.length));
                end = end.max(entry_end.unwrap_or(0));
            }
            Ok(_) => {}
            Err(e) => wrong = Some(e),
        };
        let ended = self.run(command, None, self.stored_bytes()?, &mut line)?;
        if self.force && !ended.status.success() {
            return Ok(virtual_bytes);
        }
        succeeded(&ended, self.shown)?;
        if let Some(e) = wrong {
            let error = format!("cannot understand `qemu-img map` of {}: {e}", self.shown);
            return Err(Failure::plain(Kind::Failed, error));
        }
        if end > self.bytes && !self.force {
            return Err(self.damaged());
        }
        Ok(data)
    }

    /// Writes the raw form, which has `data_bytes` of data, into `target`, an empty sparse file of the
    /// right size.
    pub fn to_raw(&self, target: &File, data_bytes: u64) -> Result<()> {
        let mut command = command(&["convert", "-n", "--target-is-zero", "--force-share"]);
        if self.force {
            command.arg("--salvage");
        }
        command.args(["-O", "raw"]).arg(self.opened()?).arg(OUTPUT);
        let work = self.stored_bytes()?.saturating_add(data_bytes);
        let ended = self.run(command, Some(target), work, &mut |_| {})?;
        succeeded(&ended, self.shown)?;
        if ended.stderr.contains(UNREADABLE) {
            let shown = self.shown;
            eprintln!("penstock: image {shown} has data that cannot be read: imported as zeroes");
        }
        Ok(())
    }

    /// The image as qemu-img is to open it: this file, in this format, upon nothing. It guesses neither,
    /// and a backing file that the header names is not opened.
    fn opened(&self) -> Result<String> {
        let kind = self.metadata()?.file_type();
        let driver = match kind.is_block_device() {
            true => "host_device",
            false => "file",
        };
        Ok(format!(
            r#"json:{{"driver":"qcow2","backing":null,"file":{{"driver":"{driver}","filename":"{INPUT}"}}}}"#
        ))
    }

    /// What an image really takes: a length costs nothing where files have holes.
    fn stored_bytes(&self) -> Result<u64> {
        let found = self.metadata()?;
        Ok(match found.file_type().is_file() {
            true => found.blocks().saturating_mul(512).min(self.bytes),
            false => self.bytes,
        })
    }

    fn metadata(&self) -> Result<std::fs::Metadata> {
        let found = self.file.metadata();
        found.context(|| format!("look at {}", self.shown))
    }

    fn run(
        &self,
        command: Command,
        output: Option<&File>,
        work_bytes: u64,
        line: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Ended> {
        run(command, (self.file, output), work_bytes, line, self.shown)
    }

    fn damaged(&self) -> Failure {
        let shown = self.shown;
        Failure::new(
            Kind::Failed,
            format!(
                "image {shown} is damaged or was cut off: its tables are malformed, or refer to data that it \
                 does not hold"
            ),
            format!(
                "get it again; `qemu-img check {shown}` shows the damage; --force imports what can be read, \
                 and zeroes for the rest"
            ),
        )
    }
}

/// One line of `qemu-img map --output=json`, which prints one entry in each, or the bracket that ends them.
fn map_entry(line: &str) -> serde_json::Result<Option<ImageExtent>> {
    let text = line.trim_start_matches('[').trim_end_matches([',', ']']);
    match text.trim() {
        "" => Ok(None),
        text => serde_json::from_str(text).map(Some),
    }
}

/// Writes the raw bytes in `source` into `target`, an empty file, as qcow2. `shown` is what the target is
/// called in errors.
pub fn to_qcow2(source: &File, target: &File, shown: &str) -> Result<()> {
    let mut command = command(&["convert", "-f", "raw", "-O", "qcow2"]);
    command.args([INPUT, OUTPUT]);
    let found = source.metadata().context(|| format!("look at {shown}"))?;
    let bytes = found.blocks().saturating_mul(512);
    let ended = run(command, (source, Some(target)), bytes, &mut |_| {}, shown)?;
    succeeded(&ended, shown)
}

/// A file without a name in `dir`: nothing of it is left behind however this process ends.
pub fn unnamed_file(dir: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(args).env("MALLOC_ARENA_MAX", HEAPS_MAX);
    command
}

fn limits(work_bytes: u64) -> Limits {
    Limits {
        memory_bytes: MEMORY_BYTES_MAX,
        cpu: CPU_BASE + Duration::from_secs(work_bytes / BYTES_PER_CPU_S),
        stall: STALL_MAX,
    }
}

fn run(
    command: Command,
    files: (&File, Option<&File>),
    work_bytes: u64,
    line: &mut (dyn FnMut(&str) + Send),
    shown: &str,
) -> Result<Ended> {
    let limits = limits(work_bytes);
    let ended = match confined::run(command, files, limits, line) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Failure::new(
            Kind::Failed,
            "qemu-img is not installed",
            "run `apt-get install qemu-utils`; a raw image needs none",
        )),
        other => other.context(|| "run qemu-img".into()),
    }?;
    match ended.limit {
        None => Ok(ended),
        Some(limit) => Err(Failure::new(
            Kind::Failed,
            format!("qemu-img was ended on {shown}: {}", limits.describe(limit)),
            format!(
                "if you trust the image, convert it yourself, and import that: \
                 qemu-img convert -O raw {shown} IMAGE.raw"
            ),
        )),
    }
}

fn succeeded(ended: &Ended, shown: &str) -> Result<()> {
    match ended.status.success() {
        true => Ok(()),
        false => Err(failure_of(ended, shown)),
    }
}

fn failure_of(ended: &Ended, shown: &str) -> Failure {
    let told = ended.stderr.trim().trim_start_matches("qemu-img: ");
    let told = match told {
        "" => ended.status.to_string(),
        told => told.replace(INPUT, shown),
    };
    Failure::plain(Kind::Failed, format!("qemu-img failed on {shown}: {told}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_map_are_entries() {
        for (line, length) in [
            (
                r#"[{ "start": 0, "length": 7, "depth": 0, "zero": false, "data": true, "offset": 9},"#,
                7,
            ),
            (
                r#"{ "start": 7, "length": 8, "depth": 0, "zero": true, "data": false}]"#,
                8,
            ),
        ] {
            assert_eq!(map_entry(line).unwrap().unwrap().length, length);
        }
        assert!(map_entry("]").unwrap().is_none());
        assert!(map_entry("{").is_err());
    }
}
