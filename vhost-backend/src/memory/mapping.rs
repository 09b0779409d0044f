//! A shared mapping of a file descriptor that came from outside, unmapped on drop.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::MemoryError;

/// Magic number of hugetlbfs, whose files are mapped in whole huge pages.
const HUGETLBFS: i64 = 0x9584_58f6;

/// Magic number of the file system of anonymous inodes.
const ANON_INODES: i64 = 0x0904_1934;
/// What `/proc/self/fd` says of the memory of a VDUSE device (Linux, `drivers/vdpa/vdpa_user`).
const VDUSE_MEMORY: &[u8] = b"anon_inode:[vduse-domain]";

/// Whether a file is the memory of a VDUSE device. It has no size; the kernel names its parts, and only root
/// can have it.
pub fn is_vduse(file: &OwnedFd) -> bool {
    let is_anonymous = rustix::fs::fstatfs(file).is_ok_and(|told| told.f_type == ANON_INODES);
    let link = || rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), []);
    is_anonymous && link().is_ok_and(|name| name.as_bytes() == VDUSE_MEMORY)
}

/// What is mapped so that a range of a file is.
#[derive(Debug, Clone, Copy)]
struct Extent {
    /// Where in the file it begins, at a page.
    offset: u64,
    /// Bytes before the range.
    skip_bytes: usize,
    /// Bytes in all: whole pages.
    mapped_bytes: usize,
}

impl Extent {
    fn of(file: &OwnedFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        let bad = || MemoryError::BadRegion {
            guest: offset,
            size,
        };
        let end = offset.checked_add(size).filter(|_| size > 0);
        let needed_bytes = end.ok_or_else(bad)?;
        let stat = rustix::fs::fstat(file).map_err(|e| os("read the size of a shared file", e))?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if file_bytes < needed_bytes && !is_vduse(file) {
            return Err(MemoryError::FileTooShort {
                file_bytes,
                needed_bytes,
            });
        }
        let page_bytes = page_bytes(file)?;
        let skip = offset % page_bytes;
        let mapped = (skip + size).checked_next_multiple_of(page_bytes);
        let mapped = mapped.and_then(|bytes| usize::try_from(bytes).ok());
        Ok(Self {
            offset: offset - skip,
            skip_bytes: skip as usize,
            mapped_bytes: mapped.ok_or_else(bad)?,
        })
    }
}

/// Bytes of the pages in which a file is mapped, and unmapped again.
fn page_bytes(file: &OwnedFd) -> Result<u64, MemoryError> {
    let filesystem =
        rustix::fs::fstatfs(file).map_err(|e| os("examine the file system of a shared file", e))?;
    let huge = u64::try_from(filesystem.f_bsize).ok();
    let huge = huge.filter(|bytes| filesystem.f_type == HUGETLBFS && bytes.is_power_of_two());
    Ok(huge.unwrap_or(rustix::param::page_size() as u64))
}

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
    /// Bytes that [`Self::shared`] maps for this range: whole pages. It fails where that would, as far as can
    /// be told.
    pub fn bytes_for(file: &OwnedFd, offset: u64, size: u64) -> Result<u64, MemoryError> {
        Ok(Extent::of(file, offset, size)?.mapped_bytes as u64)
    }

    /// Maps `size` bytes of `file` from `offset`, readable and writable.
    ///
    /// A file shorter than that is refused, since touching the missing pages would kill the process.
    pub fn shared(file: &OwnedFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        let extent = Extent::of(file, offset, size)?;
        Self::map_at(file, extent).map_err(|e| os("map shared memory", e))
    }

    fn map_at(file: &OwnedFd, extent: Extent) -> Result<Self, rustix::io::Errno> {
        let Extent {
            offset,
            skip_bytes,
            mapped_bytes,
        } = extent;
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
            skip_bytes,
        })
    }

    /// Pointer to the first wanted byte.
    pub fn start(&self) -> *mut u8 {
        // SAFETY: `skip_bytes` is smaller than the mapping.
        unsafe { self.base.as_ptr().add(self.skip_bytes) }
    }

    /// Bytes that are mapped, those before [`Self::start`] included.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes as u64
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

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// Whether this process has a mapping that begins there.
    fn is_mapped(at: *const u8) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines()
            .any(|line| line.starts_with(&format!("{:x}-", at.addr())))
    }

    #[test]
    fn huge_pages_are_mapped_from_the_one_before_and_unmapped() {
        let huge = 2 << 20;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = memfd_create("huge", flags).unwrap();
        ftruncate(&file, 64 * huge).unwrap();
        // No page of it is touched: the machine may have none.
        let mapping = Mapping::shared(&file, 63 * huge + 4096, 8192).unwrap();
        assert_eq!(mapping.mapped_bytes(), huge, "nothing of what lies before");
        let base = mapping.base.as_ptr();
        assert_eq!(mapping.start().addr() - base.addr(), 4096);
        assert!(is_mapped(base));
        drop(mapping);
        assert!(!is_mapped(base), "it is not lost");
    }
}
