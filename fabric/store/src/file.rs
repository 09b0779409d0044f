//! Opening the device: a raw block device, or a file that stands for one.
//!
//! Both are opened with `O_DIRECT`, so that a completed write is in the device and not in this machine's page
//! cache, and exclusively, so that two daemons never write one store.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{
    FallocateFlags, FlockOperation, StatxFlags, fallocate, flock, ioctl_blksszget, statx,
};
use rustix::io::Errno;

use super::device::{BLOCK_BYTES, ReadAt, SyncDevice};
use reads::Reads;

/// How long opening waits for a lock that a killed daemon still holds: its io_uring keeps the file open until
/// the requests in flight have ended. After it the device is taken to be in use.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Pause between two tries for the lock.
const LOCK_POLL: Duration = Duration::from_millis(20);

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A block device.
    Block,
    /// A regular file.
    File,
}

impl DeviceKind {
    /// Of what is at a path.
    fn at(path: &Path) -> Result<Self, DeviceError> {
        let found = std::fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DeviceError::Missing(path.to_owned()),
            _ => DeviceError::Os {
                verb: "look at",
                path: path.to_owned(),
                source: error,
            },
        })?;
        if found.file_type().is_block_device() {
            Ok(DeviceKind::Block)
        } else if found.is_file() {
            Ok(DeviceKind::File)
        } else {
            Err(DeviceError::Kind(path.to_owned()))
        }
    }
}

/// How a file gets its space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// All at once: the store can never fail for want of space in the file system.
    Preallocated,
    /// All at once, and every block written with zeroes. Takes as long as writing the file, and spares the
    /// file system a change of its own metadata at the first write to each block, which costs a third of the
    /// write rate at depth 1 until the log has been everywhere once.
    Written,
    /// As written. While the file system is full, requests that need more of it fail for want of space, as on
    /// a full store.
    Sparse,
}

/// Why a device was not opened or created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Another process has it.
    #[error("device {} is in use by another process; stop the other daemon, or unmount it, or name another \
        device", .0.display())]
    InUse(PathBuf),
    /// There is something at the path already.
    #[error("{} exists already; name another path, or remove it if its data are not needed", .0.display())]
    Exists(PathBuf),
    /// There is nothing at the path.
    #[error("device {} does not exist", .0.display())]
    Missing(PathBuf),
    /// Neither a block device nor a regular file.
    #[error("{} is neither a block device nor a regular file", .0.display())]
    Kind(PathBuf),
    /// What was handed over for it is another device, or was opened in another way.
    #[error("the open device that was handed over is not {}, or was not opened for direct reading and \
        writing", .0.display())]
    OtherDevice(PathBuf),
    /// The file system cannot do direct I/O.
    #[error("the file system of {} refuses direct I/O (O_DIRECT); put the store on ext4, xfs or btrfs, or on \
        a block device", .0.display())]
    NoDirectIo(PathBuf),
    /// The file system cannot preallocate.
    #[error("the file system of {} cannot preallocate; use a sparse store, or ext4, xfs or \
        btrfs", .0.display())]
    NoPreallocation(PathBuf),
    /// The file system is full.
    #[error("no space for {size_bytes} bytes at {}; free some or make the store smaller", .path.display())]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// Wanted.
        size_bytes: u64,
    },
    /// Sectors larger than a block.
    #[error("device {} has sectors of {sector_bytes} bytes, more than {BLOCK_BYTES} are not \
        supported", .path.display())]
    SectorSize {
        /// Where.
        path: PathBuf,
        /// Its sectors.
        sector_bytes: u32,
    },
    /// The operating system refused.
    #[error("cannot {verb} device {}: {source}", .path.display())]
    Os {
        /// What was tried.
        verb: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// An open device.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    path: PathBuf,
    kind: DeviceKind,
    capacity_bytes: u64,
    /// For several reads at a time, on handles that have it. Nobody locks it: the device is shared, its reads
    /// are not.
    reads: Option<Mutex<Reads>>,
}

impl DeviceFile {
    /// Opens an existing device or file and locks it.
    pub fn open(path: &Path) -> Result<Self, DeviceError> {
        let kind = DeviceKind::at(path)?;
        Self::of(open_locked(path, kind)?, path, kind)
    }

    /// A device that is open and locked.
    fn of(file: File, path: &Path, kind: DeviceKind) -> Result<Self, DeviceError> {
        let os = |verb| {
            move |source| DeviceError::Os {
                verb,
                path: path.to_owned(),
                source,
            }
        };
        let capacity_bytes = match kind {
            DeviceKind::File => file.metadata().map_err(os("look at"))?.len(),
            // A block device's size is where its end is.
            DeviceKind::Block => rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
                .map_err(|errno| os("measure")(errno.into()))?,
        };
        check_sectors(&file, path, kind)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            kind,
            capacity_bytes: capacity_bytes - capacity_bytes % BLOCK_BYTES as u64,
            reads: None,
        })
    }

    /// Creates a file to serve as device, then opens it. Nothing is left behind if that fails.
    pub fn create(
        path: &Path,
        size_bytes: u64,
        allocation: Allocation,
    ) -> Result<Self, DeviceError> {
        let os = |verb| {
            move |source| DeviceError::Os {
                verb,
                path: path.to_owned(),
                source,
            }
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => DeviceError::Exists(path.to_owned()),
                _ => os("create")(error),
            })?;
        let made = make_room(&file, path, size_bytes, allocation)
            .and_then(|()| sync_parent(path).map_err(os("make durable the entry of")))
            .and_then(|()| Self::open(path));
        if made.is_err() {
            // The error at hand says more than a failing removal would.
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Whatever is at the path, for tests of the executor: it is neither locked nor looked at.
    ///
    /// # Errors
    /// It cannot be opened.
    #[cfg(feature = "testing")]
    pub fn unchecked(path: &Path) -> io::Result<Self> {
        Ok(Self {
            file: OpenOptions::new().read(true).write(true).open(path)?,
            path: path.to_owned(),
            kind: DeviceKind::File,
            capacity_bytes: 0,
            reads: None,
        })
    }

    /// One more handle on the open device, which makes several reads at a time; it shares the lock with the
    /// first.
    fn second(&self) -> io::Result<Self> {
        let file = self.try_clone()?;
        let reads = Some(Mutex::new(Reads::new(&file)?));
        Ok(Self {
            file,
            path: self.path.clone(),
            kind: self.kind,
            capacity_bytes: self.capacity_bytes,
            reads,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Closes it. Others may open the device from now on, also while the kernel still has it open for
    /// somebody: only a block device that it has open exclusively waits for that.
    pub fn close(self) {
        // Else the lock goes with the last descriptor.
        if let Err(error) = flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!(%error, device = %self.path.display(), "unlock a device");
        }
    }

    /// A second descriptor of the same open file, for another thread.
    pub fn try_clone(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

impl From<DeviceFile> for OwnedFd {
    /// The lock stays with it.
    fn from(device: DeviceFile) -> Self {
        device.file.into()
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl SyncDevice for DeviceFile {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn write_at(&mut self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn read_many(&mut self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        match &mut self.reads {
            Some(together) => together
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .make(reads),
            None => reads
                .iter_mut()
                .try_for_each(|read| self.file.read_exact_at(read.buf, read.offset)),
        }
    }

    fn handle(&self) -> Option<Box<dyn SyncDevice + Send>> {
        // Without one everything works, one read after the other.
        let handle = self.second().inspect_err(
            |error| tracing::debug!(%error, device = %self.path.display(), "no second device handle"),
        );
        Some(Box::new(handle.ok()?))
    }
}

fn open_locked(path: &Path, kind: DeviceKind) -> Result<File, DeviceError> {
    let mut flags = libc::O_DIRECT | libc::O_CLOEXEC;
    if kind == DeviceKind::Block {
        // On a block device O_EXCL without O_CREAT keeps mounts and other exclusive openers out.
        flags |= libc::O_EXCL;
    }
    let start = Instant::now();
    loop {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path)
            .and_then(|file| {
                flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                Ok(file)
            });
        let error = match opened {
            Ok(file) => return Ok(file),
            Err(error) => error,
        };
        match Errno::from_io_error(&error) {
            Some(Errno::WOULDBLOCK | Errno::BUSY) if start.elapsed() < LOCK_WAIT => {
                std::thread::sleep(LOCK_POLL);
            }
            Some(Errno::WOULDBLOCK | Errno::BUSY) => {
                return Err(DeviceError::InUse(path.to_owned()));
            }
            Some(Errno::INVAL) => return Err(DeviceError::NoDirectIo(path.to_owned())),
            _ => {
                return Err(DeviceError::Os {
                    verb: "open",
                    path: path.to_owned(),
                    source: error,
                });
            }
        }
    }
}

fn check_sectors(file: &File, path: &Path, kind: DeviceKind) -> Result<(), DeviceError> {
    let sector_bytes = match kind {
        DeviceKind::Block => ioctl_blksszget(file).map_err(|errno| DeviceError::Os {
            verb: "ask the sector size of",
            path: path.to_owned(),
            source: errno.into(),
        })?,
        // Not every file system tells; one that does not fails the first unaligned request instead.
        DeviceKind::File => match statx(
            file,
            "",
            rustix::fs::AtFlags::EMPTY_PATH,
            StatxFlags::DIOALIGN,
        ) {
            Ok(told) if told.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
                if told.stx_dio_offset_align == 0 {
                    return Err(DeviceError::NoDirectIo(path.to_owned()));
                }
                told.stx_dio_offset_align
            }
            _ => 0,
        },
    };
    if sector_bytes as usize > BLOCK_BYTES {
        return Err(DeviceError::SectorSize {
            path: path.to_owned(),
            sector_bytes,
        });
    }
    Ok(())
}

fn make_room(
    file: &File,
    path: &Path,
    size_bytes: u64,
    allocation: Allocation,
) -> Result<(), DeviceError> {
    let result = match allocation {
        Allocation::Sparse => file.set_len(size_bytes),
        Allocation::Preallocated | Allocation::Written => {
            fallocate(file, FallocateFlags::empty(), 0, size_bytes).map_err(Into::into)
        }
    };
    let result = match allocation {
        Allocation::Written => result.and_then(|()| write_zeroes(path, size_bytes)),
        Allocation::Preallocated | Allocation::Sparse => result,
    };
    let synced = result.and_then(|()| file.sync_all());
    synced.map_err(|source| match Errno::from_io_error(&source) {
        Some(Errno::NOSPC | Errno::FBIG | Errno::DQUOT) => DeviceError::NoSpace {
            path: path.to_owned(),
            size_bytes,
        },
        Some(Errno::OPNOTSUPP) => DeviceError::NoPreallocation(path.to_owned()),
        _ => DeviceError::Os {
            verb: "allocate",
            path: path.to_owned(),
            source,
        },
    })
}

/// Bytes per write of zeroes.
const ZEROES_BYTES: usize = 1 << 20;

/// Memory aligned for direct I/O.
#[repr(align(4096))]
struct Zeroes([u8; ZEROES_BYTES]);

/// Past the page cache, so that creating a large store does not push everything else out of it.
fn write_zeroes(path: &Path, size_bytes: u64) -> io::Result<()> {
    static ZEROES: Zeroes = Zeroes([0; ZEROES_BYTES]);
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    let whole = size_bytes - size_bytes % BLOCK_BYTES as u64;
    for offset in (0..whole).step_by(ZEROES_BYTES) {
        let len = (whole - offset).min(ZEROES_BYTES as u64) as usize;
        file.write_all_at(&ZEROES.0[..len], offset)?;
    }
    Ok(())
}

/// Makes the new file's directory entry durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    File::open(parent)?.sync_all()
}

mod ahead;
mod reads;

pub use ahead::OpenedAhead;

#[cfg(test)]
mod tests;
