//! Space that is kept for the metadata in the file system under them: a file that holds nothing. It goes when
//! the file system is full, so that the node starts, votes, and deletes. Nothing new is made until the
//! ballast is there again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

/// Its size, in bytes: several times what a database that was full wants before it goes on.
const BYTES: u64 = 64 << 20;
/// On a small file system it is one in so many bytes.
const SHARE: u64 = 16;
/// It goes when less than one in so many of its bytes is free beside it, and comes back when so many times
/// its size are.
const MARGIN: u64 = 4;

static WAS_TOLD: AtomicBool = AtomicBool::new(false);

/// Bytes of the file system under `dir`: all of it, and what is free.
fn space(dir: &Path) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::statvfs(dir)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok((bytes(stat.f_blocks), bytes(stat.f_bavail)))
}

fn path(dir: &Path) -> PathBuf {
    dir.join("ballast")
}

/// Whether the ballast of the metadata in `dir` is gone, and there is no room for it.
pub(super) fn is_wanting(dir: &Path) -> bool {
    !path(dir).exists()
        && space(dir).is_ok_and(|(total, free)| free < MARGIN * BYTES.min(total / SHARE))
}

/// Gives its space back; whether there was any.
pub(super) fn drop_it(dir: &Path) -> bool {
    let path = path(dir);
    match fs::remove_file(&path) {
        Ok(()) => {
            tracing::warn!(
                path = %path.display(),
                "the file system is full: the space that is kept for metadata is in use"
            );
            true
        }
        Err(_) => false,
    }
}

/// Looks how much is free: drops the ballast, or makes it again. To be called before the database is opened,
/// and every second from then on.
pub(super) fn tend(dir: &Path) {
    // Where it cannot be told, writes tell.
    let Ok((total, free)) = space(dir) else {
        return;
    };
    let bytes = BYTES.min(total / SHARE);
    match path(dir).exists() {
        true if free < bytes / MARGIN => drop(drop_it(dir)),
        false if free > bytes * MARGIN => {
            // The same again every second says nothing more.
            if let Err(error) = make(dir, bytes)
                && !WAS_TOLD.swap(true, Ordering::Relaxed)
            {
                tracing::warn!(
                    dir = %dir.display(), %error,
                    "no space is kept for metadata: they will not be changed while the file system is full"
                );
            }
        }
        _ => {}
    }
}

/// A file that was cut short by a crash is made again: it has another name until it is whole.
fn make(dir: &Path, bytes: u64) -> io::Result<()> {
    let new = dir.join("ballast.new");
    let file: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(&new)?;
    let made = fallocate(&file, FallocateFlags::empty(), 0, bytes)
        .map_err(io::Error::from)
        .and_then(|()| fs::rename(&new, path(dir)));
    if made.is_err() {
        // What it took is wanted elsewhere; an error of this says nothing more.
        let _ = fs::remove_file(&new);
    }
    made
}
