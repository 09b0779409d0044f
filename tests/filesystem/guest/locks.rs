//! Locks of a file: by flock(2), and of all its bytes by fcntl(2).

use std::fs::{File, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::mark;

/// Takes both, and holds them from when the mark is made until somebody removes it.
pub fn hold(path: &Path, mark: &Path) -> Result<String> {
    let file = open(path)?;
    match take(&file)? {
        (true, true) => {}
        (by_flock, by_fcntl) => bail!("free: by flock {by_flock}, by fcntl {by_fcntl}"),
    }
    mark::hold(mark)?;
    Ok(String::new())
}

/// "free" if both can be taken, "held" if neither can.
pub fn look(path: &Path) -> Result<String> {
    match take(&open(path)?)? {
        (true, true) => Ok("free".to_owned()),
        (false, false) => Ok("held".to_owned()),
        (by_flock, by_fcntl) => bail!("free: by flock {by_flock}, by fcntl {by_fcntl}"),
    }
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}

/// Whether each of them was taken; they last as long as the file is open.
fn take(file: &File) -> Result<(bool, bool)> {
    let operation = FlockOperation::NonBlockingLockExclusive;
    let taken = |result: rustix::io::Result<()>| match result {
        Ok(()) => Ok(true),
        // fcntl(2) says either, flock(2) the first.
        Err(Errno::WOULDBLOCK | Errno::ACCESS) => Ok(false),
        Err(error) => Err(error),
    };
    Ok((
        taken(flock(file, operation)).context("flock")?,
        taken(fcntl_lock(file, operation)).context("fcntl")?,
    ))
}
