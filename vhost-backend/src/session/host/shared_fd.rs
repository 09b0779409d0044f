//! What a descriptor from a front end must be before a data thread touches it.
//!
//! Data threads serve many guests. A descriptor on which a read, a write or a page fault can wait for
//! somebody else's goodwill (a file of a FUSE filesystem, a full blocking pipe) would let one front end stall
//! its neighbours.

use std::os::fd::OwnedFd;

use rustix::fs::{
    FileType, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fcntl_setfl, fstat, fstatfs,
};
use rustix::io::Errno;

use crate::memory::is_vduse;

/// Filesystems whose pages come from memory or a local disk: tmpfs (and memfd), hugetlbfs, ramfs, ext4, xfs,
/// btrfs.
const MEMORY_FILESYSTEMS: [i64; 6] = [
    0x0102_1994,
    0x9584_58f6,
    0x8584_58f6,
    0xef53,
    0x5846_5342,
    0x9123_683e,
];

/// A descriptor of the wrong kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FdError {
    /// Not a file that memory can come from.
    #[error(
        "shared memory must be a memfd, a file on tmpfs, hugetlbfs or a local disk, or of a VDUSE device, \
         not type {file_type:#x} on filesystem {filesystem:#x}"
    )]
    NotMemory {
        /// Type bits of its mode.
        file_type: u32,
        /// Magic number of its filesystem.
        filesystem: i64,
    },
    /// Not something to signal with.
    #[error("call and error descriptors must be eventfds, pipes or sockets")]
    NotSignal,
    /// Not something to be kicked by.
    #[error("a kick descriptor must be an eventfd")]
    NotEvent,
    /// The descriptor cannot be examined.
    #[error("cannot examine a file descriptor: {0}")]
    Os(#[from] Errno),
}

/// Checks a descriptor that is to be mapped.
pub fn check_memory(fd: &OwnedFd) -> Result<(), FdError> {
    let mode = fstat(fd)?.st_mode;
    let filesystem = fstatfs(fd)?.f_type;
    let known = MEMORY_FILESYSTEMS.contains(&filesystem);
    if is_vduse(fd) {
        return Ok(());
    }
    if FileType::from_raw_mode(mode) != FileType::RegularFile || !known {
        return Err(FdError::NotMemory {
            file_type: mode & 0o170_000,
            filesystem,
        });
    }
    Ok(())
}

/// Why a file that is to be mapped can be shortened later, if it can. Whoever then touches a missing page
/// gets SIGBUS.
pub fn why_unsealed(fd: &OwnedFd) -> Option<&'static str> {
    match fcntl_get_seals(fd) {
        _ if is_vduse(fd) => None,
        Ok(seals) if seals.contains(SealFlags::SHRINK) => None,
        // Files on tmpfs and hugetlbfs that are no memfds are made so, and so are memfds made without
        // MFD_ALLOW_SEALING.
        Ok(seals) if seals.contains(SealFlags::SEAL) => {
            Some("is a file on tmpfs or hugetlbfs, or a memfd, that cannot be sealed any more")
        }
        Ok(_) => Some("is a memfd without F_SEAL_SHRINK"),
        Err(_) => Some("is a file on a disk, which cannot be sealed"),
    }
}

/// Checks a descriptor that is to be waited for. Data threads wait for edges and never read a kick, which
/// spares a system call each time: an eventfd gives an edge for each write, but a pipe or a socket fills up
/// and gives none any more. Other anonymous inodes pass too; what they do to their own ring hurts nobody
/// else.
pub fn check_kick(fd: &OwnedFd) -> Result<(), FdError> {
    if is_anonymous(fstat(fd)?.st_mode) {
        Ok(())
    } else {
        Err(FdError::NotEvent)
    }
}

/// An eventfd is an anonymous inode, which has no file type at all.
fn is_anonymous(mode: u32) -> bool {
    mode & 0o170_000 == 0
}

/// Checks a descriptor that is to be signalled, and makes writes to it return at once.
pub fn check_signal(fd: &OwnedFd) -> Result<(), FdError> {
    let mode = fstat(fd)?.st_mode;
    let kind = FileType::from_raw_mode(mode);
    if !is_anonymous(mode) && kind != FileType::Fifo && kind != FileType::Socket {
        return Err(FdError::NotSignal);
    }
    let flags = fcntl_getfl(fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
