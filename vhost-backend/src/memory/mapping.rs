//! A shared mapping of a file descriptor that came from outside, unmapped on drop.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::MemoryError;

/// Mapped bytes of a shared file. The other side may change them at any time.
#[derive(Debug)]
pub struct Mapping {
    /// What `mmap` returned.
    base: NonNull<u8>,
    /// Length passed to `mmap`.
    mapped_bytes: usize,
    /// Offset of the first wanted byte from `base`.
    skip_bytes: usize,
}

// SAFETY: the mapping is owned by this value and reached only through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing here has interior state.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `size` bytes of `file` from `offset`, readable and writable.
    ///
    /// A file shorter than that is refused, since touching the missing pages would kill the process.
    pub fn shared(file: &OwnedFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        let needed_bytes =
            offset
                .checked_add(size)
                .filter(|_| size > 0)
                .ok_or(MemoryError::BadRegion {
                    guest: offset,
                    size,
                })?;
        let stat =
            rustix::fs::fstat(file.as_fd()).map_err(|e| os("read the size of a shared file", e))?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if file_bytes < needed_bytes {
            return Err(MemoryError::FileTooShort {
                file_bytes,
                needed_bytes,
            });
        }
        let page_bytes = rustix::param::page_size() as u64;
        let skip = offset % page_bytes;
        Self::map_at(file, offset - skip, skip, size)
            // Huge pages only map at multiples of their own size: then the file is mapped from its beginning.
            .or_else(|e| {
                if offset == skip {
                    Err(e)
                } else {
                    Self::map_at(file, 0, offset, size)
                }
            })
            .map_err(|e| os("map shared memory", e))
    }

    fn map_at(
        file: &OwnedFd,
        offset: u64,
        skip: u64,
        size: u64,
    ) -> Result<Self, rustix::io::Errno> {
        let mapped_bytes = usize::try_from(skip + size).map_err(|_| rustix::io::Errno::OVERFLOW)?;
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
        );
        // SAFETY: a new mapping at an address the kernel picks; it replaces nothing.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                access,
                flags,
                file,
                offset,
            )?
        };
        // SAFETY: exactly the mapping made above. A refusal only means that core dumps get larger.
        let _ = unsafe { madvise(base, mapped_bytes, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast::<u8>()).ok_or(rustix::io::Errno::FAULT)?;
        Ok(Self {
            base,
            mapped_bytes,
            skip_bytes: skip as usize,
        })
    }

    /// Pointer to the first wanted byte.
    pub fn start(&self) -> *mut u8 {
        // SAFETY: `skip_bytes` is smaller than the mapping.
        unsafe { self.base.as_ptr().add(self.skip_bytes) }
    }

    /// Number of bytes from [`Self::start`].
    pub fn len(&self) -> usize {
        self.mapped_bytes - self.skip_bytes
    }

    /// Never true: an empty mapping is refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `map_at` mapped; whoever keeps a pointer into it also keeps this value.
        let outcome = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        if let Err(error) = outcome {
            tracing::warn!(%error, bytes = self.mapped_bytes, "cannot unmap shared memory");
        }
    }
}

fn os(what: &'static str, errno: rustix::io::Errno) -> MemoryError {
    MemoryError::Os {
        what,
        source: io::Error::from(errno),
    }
}
