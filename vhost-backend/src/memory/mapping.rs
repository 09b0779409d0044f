//! A shared mapping of a file descriptor that came from outside, unmapped on drop.
//!
//! `vm-memory` checks the bounds of what is read and written there. It does not map the file itself: its
//! `MmapRegion` keeps the descriptor open for as long as the mapping, of which one front end could make us
//! hold [`super::MAX_REGIONS`], and unmaps as many bytes as were asked for, which fails for huge pages.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use vm_memory::{MmapRegion, VolatileMemory, VolatileSlice};

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
    /// Bytes of the range.
    bytes: usize,
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
            bytes: usize::try_from(size).map_err(|_| bad())?,
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
    /// What `mmap` returned. It does not unmap by itself.
    pages: MmapRegion,
    /// Offset of the first wanted byte.
    skip_bytes: usize,
    /// Number of wanted bytes.
    bytes: usize,
}

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
            bytes,
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
        let (access, flags) = (access.bits() as i32, flags.bits() as i32);
        // SAFETY: the mapping made above, which lives as long as the value that is made here.
        let pages = unsafe { MmapRegion::build_raw(base.cast(), mapped_bytes, access, flags) };
        Ok(Self {
            pages: pages.map_err(|_| rustix::io::Errno::FAULT)?,
            skip_bytes,
            bytes,
        })
    }

    /// The wanted bytes.
    pub fn slice(&self) -> VolatileSlice<'_> {
        self.pages
            .get_slice(self.skip_bytes, self.bytes)
            .expect("the range is inside the pages that were mapped for it")
    }

    /// Pointer to the first wanted byte.
    pub fn start(&self) -> *mut u8 {
        self.slice().ptr_guard_mut().as_ptr()
    }

    /// Bytes that are mapped, those before [`Self::start`] included.
    pub fn mapped_bytes(&self) -> u64 {
        self.pages.size() as u64
    }

    /// Number of bytes from [`Self::start`].
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never true: an empty mapping is refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `map_at` mapped; whoever keeps a pointer into it also keeps this value.
        let outcome = unsafe { munmap(self.pages.as_ptr().cast(), self.pages.size()) };
        if let Err(error) = outcome {
            tracing::warn!(%error, bytes = self.pages.size(), "cannot unmap shared memory");
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
        let base = mapping.pages.as_ptr();
        assert_eq!(mapping.start().addr() - base.addr(), 4096);
        assert!(is_mapped(base));
        drop(mapping);
        assert!(!is_mapped(base), "it is not lost");
    }
}
