//! Files and directories that a process refers to without an open handle, while their names are replaced or
//! removed.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, Mode, OFlags, fstat, openat, readlinkat};
use rustix::io::Errno;

/// Records of a file that is replaced: each version repeats one word.
const RECORDS: usize = 512;

/// Checks that an inode behind an O_PATH descriptor or a working directory stays when its name is removed.
pub fn stays(dir: &Path) -> Result<String> {
    replaced(dir).context("a file that is replaced")?;
    removed(dir).context("a file that is removed")?;
    symlink(dir).context("a symbolic link")?;
    working_directory(dir).context("a working directory")?;
    Ok(String::new())
}

/// Opens a name without a request for a handle to the filesystem.
fn known(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?)
}

/// Reads a file through a new open of its O_PATH descriptor.
fn content(known: &OwnedFd) -> Result<String> {
    let path = format!("/proc/self/fd/{}", known.as_raw_fd());
    let mut text = String::new();
    File::open(&path)
        .context("open")?
        .read_to_string(&mut text)
        .context("read")?;
    Ok(text)
}

fn check_nameless(known: &OwnedFd, expected: &str) -> Result<()> {
    let stat = fstat(known).context("fstat")?;
    ensure!(stat.st_nlink == 0, "{} names are left", stat.st_nlink);
    let found = content(known)?;
    ensure!(found == expected, "it holds {found:?}");
    Ok(())
}

fn replaced(dir: &Path) -> Result<()> {
    let (file, other) = (dir.join("f"), dir.join("g"));
    fs::write(&file, "old")?;
    fs::write(&other, "new")?;
    let old = known(&file)?;
    fs::rename(&other, &file)?;
    check_nameless(&old, "old")?;
    ensure!(fs::read_to_string(&file)? == "new");
    Ok(())
}

fn removed(dir: &Path) -> Result<()> {
    let file = dir.join("f");
    let old = known(&file)?;
    fs::remove_file(&file)?;
    check_nameless(&old, "new")?;
    ensure!(!file.exists());
    Ok(())
}

fn symlink(dir: &Path) -> Result<()> {
    let link = dir.join("link");
    std::os::unix::fs::symlink("target", &link)?;
    let old = known(&link)?;
    fs::remove_file(&link)?;
    let target = readlinkat(&old, "", Vec::new())?;
    ensure!(target.as_bytes() == b"target", "{target:?}");
    Ok(())
}

fn working_directory(dir: &Path) -> Result<()> {
    let directory = dir.join("d");
    fs::create_dir(&directory)?;
    std::env::set_current_dir(&directory)?;
    fs::remove_dir(&directory)?;
    let nlink = fs::metadata(".").context("stat")?.nlink();
    ensure!(nlink == 0, "{nlink} names are left");
    let names: Vec<_> = fs::read_dir(".")
        .context("open it")?
        .collect::<std::io::Result<_>>()
        .context("list it")?;
    ensure!(names.is_empty(), "{names:?}");
    let made = openat(CWD, "x", OFlags::CREATE | OFlags::WRONLY, Mode::RWXU);
    ensure!(matches!(made, Err(Errno::NOENT)), "{made:?}");
    std::env::set_current_dir("/")?;
    Ok(())
}

/// Replaces a file again and again, each time by a new one that repeats another word.
pub fn replace(path: &Path, seconds: u64) -> Result<String> {
    let until = Instant::now() + Duration::from_secs(seconds);
    let next = path.with_extension("next");
    let mut count = 0_u64;
    while Instant::now() < until {
        fs::write(&next, format!("{count:08}").repeat(RECORDS)).context("write")?;
        fs::rename(&next, path).context("rename")?;
        count += 1;
    }
    Ok(format!("{count} times replaced\n"))
}

/// Opens a file that always exists and reads it, again and again.
pub fn reopen(path: &Path, seconds: u64) -> Result<String> {
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut count, mut failed) = (0_u64, 0_u64);
    let mut last = None;
    while Instant::now() < until {
        count += 1;
        if let Err(error) = read_whole(path) {
            failed += 1;
            last = Some(error);
        }
    }
    if let Some(error) = last {
        return Err(error.context(format!("{failed} of {count} opens failed")));
    }
    Ok(format!("{count} times opened\n"))
}

fn read_whole(path: &Path) -> Result<()> {
    let mut text = String::new();
    let mut file = File::open(path).context("open")?;
    let nlink = file.metadata().context("fstat")?.nlink();
    ensure!(nlink <= 1, "{nlink} names");
    file.read_to_string(&mut text).context("read")?;
    let word = text.get(..8).context("it is empty")?;
    if text != word.repeat(RECORDS) {
        bail!("two versions in one: {} bytes from {word}", text.len());
    }
    Ok(())
}
