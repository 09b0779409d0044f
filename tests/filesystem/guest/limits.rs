//! As much as there may be of something.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use filesystem_rig::names::{DIGITS, name};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, mkdirat, mknodat, openat, unlinkat};
use rustix::io::Errno;

use crate::random::Random;

/// Most of them wait for the lock that the guest's kernel has for each directory.
const THREADS: u64 = 4;
/// One in so many names is looked up by itself.
const LOOKED_UP: u64 = 997;
/// Bytes of a file that fills the pool.
const FILL_BYTES: u64 = 1 << 20;
/// No pool of a test has room for so many.
const FILL_FILES_MAX: u64 = 8192;

pub fn names(step: &str, dir: &Path, count: u64) -> Result<String> {
    match step {
        "make" => {
            std::fs::create_dir(dir)?;
            let mode = Mode::from_raw_mode(0o644);
            in_threads(count, |index| {
                // Not opened, which would take some requests more.
                Ok(mknodat(
                    CWD,
                    dir.join(os_name(index)),
                    FileType::RegularFile,
                    mode,
                    0,
                )?)
            })?;
        }
        "check" => {
            check_names(dir, count)?;
            for index in (0..count).step_by(LOOKED_UP as usize) {
                let metadata = std::fs::symlink_metadata(dir.join(os_name(index)))?;
                ensure!(metadata.is_file() && metadata.nlink() == 1);
            }
            let none = std::fs::symlink_metadata(dir.join(os_name(count)));
            ensure!(none.is_err(), "there is one too many");
        }
        "remove" => {
            in_threads(count, |index| {
                std::fs::remove_file(dir.join(os_name(index)))
            })?;
            check_names(dir, 0)?;
            std::fs::remove_dir(dir)?;
        }
        _ => bail!("no such step"),
    }
    Ok(String::new())
}

fn os_name(index: u64) -> OsString {
    OsString::from_vec(name(index))
}

/// A listing has each name exactly once.
fn check_names(dir: &Path, count: u64) -> Result<()> {
    let mut seen = vec![false; count as usize];
    for entry in std::fs::read_dir(dir)? {
        let found = entry?.file_name();
        let digits = found.as_bytes().get(..DIGITS).context("a short name")?;
        let index: u64 = std::str::from_utf8(digits)?.parse()?;
        ensure!(found == os_name(index), "{found:?} is listed");
        let seen = seen.get_mut(index as usize).context("it was not made")?;
        ensure!(!*seen, "{found:?} is listed twice");
        *seen = true;
    }
    let missing = seen.iter().position(|seen| !seen);
    ensure!(missing.is_none(), "name {missing:?} is not listed");
    Ok(())
}

fn in_threads(count: u64, work: impl Fn(u64) -> std::io::Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let mine = (thread..count).step_by(THREADS as usize);
                scope.spawn(move || mine.into_iter().try_for_each(work))
            })
            .collect();
        for thread in threads {
            thread.join().expect("it does not panic")?;
        }
        Ok(())
    })
}

fn open_at(at: &OwnedFd, name: &str) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// Directories in each other. Their paths are far too long to be written down.
pub fn deep(step: &str, dir: &Path, levels: u32) -> Result<String> {
    if step == "make" {
        std::fs::create_dir(dir)?;
    }
    let mut at: OwnedFd = File::open(dir)?.into();
    for level in 0..levels {
        if step == "make" {
            mkdirat(&at, "d", Mode::from_raw_mode(0o755))
                .with_context(|| format!("make level {level}"))?;
        }
        at = open_at(&at, "d").with_context(|| format!("open level {level}"))?;
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    match step {
        "make" => {
            let file = openat(&at, "bottom", flags, Mode::from_raw_mode(0o644))?;
            File::from(file).write_all(&levels.to_le_bytes())?;
        }
        "check" => {
            let stat = rustix::fs::statat(&at, "bottom", AtFlags::empty())?;
            ensure!(stat.st_size == 4, "the file at the bottom differs");
            let top = rustix::fs::fstat(climb(at, levels, |_, _| Ok(()))?)?;
            let is_top = top.st_ino == std::fs::metadata(dir)?.ino();
            ensure!(is_top, "`..` leads elsewhere");
        }
        "remove" => {
            unlinkat(&at, "bottom", AtFlags::empty())?;
            climb(at, levels, |at, level| {
                unlinkat(at, "d", AtFlags::REMOVEDIR)
                    .with_context(|| format!("remove level {level}"))
            })?;
            std::fs::remove_dir(dir)?;
        }
        _ => bail!("no such step"),
    }
    Ok(String::new())
}

/// Goes up by `..`, and does something at each level.
fn climb(
    mut at: OwnedFd,
    levels: u32,
    mut work: impl FnMut(&OwnedFd, u32) -> Result<()>,
) -> Result<OwnedFd> {
    for level in (0..levels).rev() {
        at = open_at(&at, "..").with_context(|| format!("leave level {level}"))?;
        work(&at, level)?;
    }
    Ok(at)
}

/// Gives a file as many names as it may have, which are `max`, and takes all but one away.
pub fn links(dir: &Path, max: u64) -> Result<String> {
    std::fs::create_dir(dir)?;
    let first = dir.join("0");
    File::create_new(&first)?.write_all(b"one")?;
    for link in 1..max {
        std::fs::hard_link(&first, dir.join(link.to_string()))
            .with_context(|| format!("link {link}"))?;
    }
    ensure!(std::fs::metadata(&first)?.nlink() == max);
    let refused = std::fs::hard_link(&first, dir.join("more"));
    let code = refused.err().and_then(|error| error.raw_os_error());
    ensure!(
        code == Some(Errno::MLINK.raw_os_error()),
        "one more: {code:?}"
    );
    in_threads(max - 1, |link| {
        std::fs::remove_file(dir.join((link + 1).to_string()))
    })?;
    ensure!(std::fs::metadata(&first)?.nlink() == 1);
    std::fs::hard_link(&first, dir.join("again"))?;
    std::fs::remove_dir_all(dir)?;
    Ok(String::new())
}

/// Writes files until there is no room; prints how many there was room for.
pub fn fill(dir: &Path) -> Result<String> {
    std::fs::create_dir(dir)?;
    let mut random = Random::new(7);
    for index in 0..FILL_FILES_MAX {
        let content = random.bytes(FILL_BYTES);
        let path = dir.join(OsStr::from_bytes(format!("{index:05}").as_bytes()));
        let write = || -> std::io::Result<()> {
            let mut file = File::create_new(&path)?;
            file.write_all(&content)?;
            file.sync_all()
        };
        match write() {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(Errno::NOSPC.raw_os_error()) => {
                return Ok(format!("{index}\n"));
            }
            Err(error) => return Err(error).with_context(|| format!("write file {index}")),
        }
    }
    bail!("there was room for {FILL_FILES_MAX} files")
}
