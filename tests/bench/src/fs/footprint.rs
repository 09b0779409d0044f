//! What a tree of small files takes, and what reading it costs a daemon whose caches are empty: without a
//! guest, on a daemon of its own.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use guest_rig::paths::penstock_binary;
use guest_rig::{Daemon, DaemonOptions};
use serde::Serialize;

use super::host::HostTree;
use super::peers::Namespace;
use super::say;
use crate::usage::resident_bytes;

/// Bytes of each file.
const FILE_BYTES: u64 = 1024;
const FILESYSTEM: &str = "small";

/// What was measured.
#[derive(Debug, Serialize)]
pub struct Footprint {
    files: u64,
    file_bytes: u64,
    /// Files made in a second, as many at a time as a ring holds.
    made_per_second: f64,
    /// Resident memory of the daemon, which holds metadata and store: without files, with all of them made,
    /// and when it was started again, before anybody asked.
    resident_bytes: [u64; 3],
    /// The metadata's directory without files, and with them.
    metadata_bytes: [u64; 2],
    /// Bytes in use on the device, likewise.
    stored_bytes: [u64; 2],
    /// With empty caches.
    stat: Cost,
    /// After that, with empty caches of data: a file's blocks in random order.
    open: Cost,
}

/// What a pass over all files took.
#[derive(Debug, Serialize)]
pub struct Cost {
    seconds: f64,
    /// To the namespace's leader.
    questions: f64,
    /// Of the store, map pages among them.
    device_reads: f64,
    map_page_reads: f64,
}

/// Makes the tree below `directory` and measures.
pub fn measure(files: u64, directory: &Path) -> Result<Footprint> {
    // Blocks of 4 KiB, the log beside them, and room.
    let size = format!("{}M", 2048 + files / 64);
    let options = DaemonOptions::new(penstock_binary()?, &["--device-size", &size]);
    let mut daemon = Daemon::start_with(&directory.join("small"), options)?;
    daemon.cli(&["fs", "create", FILESYSTEM])?;
    let mut tree = HostTree::mount(&attach(&daemon)?, FILE_BYTES)?;
    let empty = Sizes::of(&daemon)?;
    say(&format!(
        "makes {files} files of {FILE_BYTES} bytes without a guest"
    ));
    let begun = std::time::Instant::now();
    tree.make(files)?;
    let made_per_second = files as f64 / begun.elapsed().as_secs_f64();
    let made = Sizes::of(&daemon)?;

    drop(tree);
    daemon.stop()?;
    daemon.start_again()?;
    // Its attachments are there again.
    let mut tree = HostTree::mount(&socket(&daemon), FILE_BYTES)?;
    let restarted = Sizes::of(&daemon)?;
    say("reads them with empty caches");
    let stat = cost(&daemon, || tree.stat(files).map(|timed| timed.elapsed))?;
    let open = cost(&daemon, || tree.open(files, 1).map(|timed| timed.elapsed))?;
    drop(tree);
    daemon.stop()?;
    Ok(Footprint {
        files,
        file_bytes: FILE_BYTES,
        made_per_second,
        resident_bytes: [empty.resident, made.resident, restarted.resident],
        metadata_bytes: [empty.metadata, restarted.metadata],
        stored_bytes: [empty.stored, made.stored],
        stat,
        open,
    })
}

fn socket(daemon: &Daemon) -> PathBuf {
    daemon.data().join("fs-small.sock")
}

fn attach(daemon: &Daemon) -> Result<PathBuf> {
    let socket = socket(daemon);
    let path = socket.to_str().context("the data directory is not UTF-8")?;
    daemon.cli(&[
        "attach", "fs", FILESYSTEM, "--socket", path, "--tag", "small",
    ])?;
    Ok(socket)
}

struct Sizes {
    resident: u64,
    metadata: u64,
    stored: u64,
}

impl Sizes {
    fn of(daemon: &Daemon) -> Result<Self> {
        Ok(Self {
            resident: resident_bytes(daemon.pid()?)?,
            metadata: bytes_below(&daemon.data().join("meta"))?,
            stored: daemon.used_bytes()?,
        })
    }
}

/// Bytes of all files below a directory, as the filesystem stores them.
fn bytes_below(directory: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;

    let mut bytes = 0;
    let listed = std::fs::read_dir(directory);
    for entry in listed.with_context(|| format!("list {}", directory.display()))? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += match metadata.is_dir() {
            true => bytes_below(&entry.path())?,
            false => metadata.blocks() * 512,
        };
    }
    Ok(bytes)
}

fn cost(daemon: &Daemon, pass: impl FnOnce() -> Result<std::time::Duration>) -> Result<Cost> {
    let counters = || -> Result<[f64; 3]> {
        Ok([
            Namespace::of(daemon)?.questions,
            daemon.metric("penstock_store_device_reads_total")?,
            daemon.metric("penstock_store_map_cache_misses_total")?,
        ])
    };
    let before = counters()?;
    let seconds = pass()?.as_secs_f64();
    let after = counters()?;
    Ok(Cost {
        seconds,
        questions: after[0] - before[0],
        device_reads: after[1] - before[1],
        map_page_reads: after[2] - before[2],
    })
}

impl Footprint {
    /// Prints it.
    pub fn print(&self) {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let grown = |[before, after]: [u64; 2]| after.saturating_sub(before);
        let for_file = |bytes: u64| bytes as f64 / self.files as f64;
        let [empty, made, restarted] = self.resident_bytes;
        println!(
            "\n{} files of {} bytes, without a guest",
            self.files, self.file_bytes
        );
        println!(
            "made                    {:>9.0} a second",
            self.made_per_second
        );
        println!(
            "memory of the daemon    {:>9.1} MiB without files, {:.1} MiB when all were made, {:.1} MiB \
             started again",
            mib(empty),
            mib(made),
            mib(restarted)
        );
        for (name, bytes) in [
            ("metadata on disk", grown(self.metadata_bytes)),
            ("space of the pool", grown(self.stored_bytes)),
        ] {
            println!(
                "{name:<23} {:>9.1} MiB more, {:.0} bytes for a file",
                mib(bytes),
                for_file(bytes)
            );
        }
        for (name, cost) in [
            ("stat, empty caches", &self.stat),
            ("open, no data cached", &self.open),
        ] {
            println!(
                "{name:<23} {:>9.0} a second; {:.2} questions for 100 names, {:.3} device reads for a file, \
                 {:.3} of them map pages",
                self.files as f64 / cost.seconds,
                cost.questions * 100.0 / self.files as f64,
                cost.device_reads / self.files as f64,
                cost.map_page_reads / self.files as f64
            );
        }
    }
}
