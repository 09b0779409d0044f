//! Stores into a shared mapping of a file, for others to see when they are published.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use crate::mark;

/// What publishes the stores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Publish {
    Msync,
    Munmap,
}

/// Makes the file `bytes` of this letter by stores into a mapping. The mark is made when they are published;
/// until somebody removes it, the file stays open, whose close might publish them otherwise, and is mapped
/// unless the end of the mapping is what published them.
pub fn fill(path: &Path, bytes: usize, letter: u8, by: Publish, mark: &Path) -> Result<String> {
    let file = open(path, false)?;
    file.set_len(bytes as u64)?;
    let at = map(&file, bytes).context("mmap")?;
    // SAFETY: a mapping of `bytes` bytes begins at `at`. Nothing else uses it, and it is not used after
    // `munmap`.
    unsafe {
        ptr::write_bytes(at.cast::<u8>(), letter, bytes);
        match by {
            Publish::Msync => msync(at, bytes, MsyncFlags::SYNC).context("msync")?,
            Publish::Munmap => munmap(at, bytes).context("munmap")?,
        }
    }
    mark::hold(mark)?;
    Ok(String::new())
}

/// Whether a file that is open for appending can be mapped as shared: "mapped", after a store into it was
/// published, or "no device".
pub fn appended(path: &Path, letter: u8) -> Result<String> {
    let file = open(path, true)?;
    let bytes = usize::try_from(file.metadata()?.len())?;
    let at = match map(&file, bytes) {
        Ok(at) => at,
        Err(Errno::NODEV) => return Ok("no device".to_owned()),
        Err(error) => return Err(error).context("mmap"),
    };
    // SAFETY: as in `fill`.
    unsafe {
        ptr::write_bytes(at.cast::<u8>(), letter, bytes);
        munmap(at, bytes).context("munmap")?;
    }
    Ok("mapped".to_owned())
}

/// Maps the first `bytes` bytes as shared.
fn map(file: &File, bytes: usize) -> rustix::io::Result<*mut c_void> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an address at which nothing is mapped.
    unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }
}

fn open(path: &Path, append: bool) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .append(append)
        .create(true)
        .truncate(false)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}
