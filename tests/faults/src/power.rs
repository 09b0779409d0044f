//! A device file whose power can be cut: one file in a small file system in user space, which keeps what was
//! written since the last fsync in memory.
//!
//! A cut also ends every open of the file: a write that was under way when the power went must not reach the
//! device that the next process finds.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, WriteFlags,
};

pub use crate::volatile::Survival;
use crate::volatile::{BLOCK, Volatile};

/// The one file's name.
const FILE_NAME: &str = "device";
const FILE_INODE: INodeNo = INodeNo(2);
/// The source that the mount table shows; our process's id follows.
const SOURCE_PREFIX: &str = "penstock-faults-";
/// The file never changes its size or its owner: the kernel need not ask again.
const ATTRIBUTES_VALID: Duration = Duration::from_secs(3600);
/// Threads that serve the file. Reads and writes are short copies behind one lock; a second thread keeps a
/// flush from delaying the kernel's other questions.
const THREADS: usize = 2;

/// A device file with power. Dropping it unmounts it; what was flushed is in the backing file.
#[derive(Debug)]
pub struct PoweredDevice {
    path: PathBuf,
    shared: Arc<Shared>,
    // Dropped last of what the kernel may still ask for.
    _session: BackgroundSession,
}

#[derive(Debug)]
struct Shared {
    cells: Mutex<Volatile>,
    /// Counts the cuts. A handle carries the count of its open; others are dead.
    power: AtomicU64,
}

impl PoweredDevice {
    /// Makes a device of `bytes` over the file `directory/backing`, which is used again if it is there, and
    /// mounts it at `directory/mount`.
    pub fn new(directory: &Path, bytes: u64) -> Result<Self> {
        ensure!(
            bytes > 0 && bytes % BLOCK as u64 == 0,
            "a device is a number of whole blocks of {BLOCK} bytes"
        );
        unmount_leftovers()?;
        let mount = directory.join("mount");
        std::fs::create_dir_all(&mount).context("make the mount point of a device")?;
        let backing = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(directory.join("backing"))
            .context("make the backing file of a device")?;
        backing.set_len(bytes).context("size the backing file")?;
        let shared = Arc::new(Shared {
            cells: Mutex::new(Volatile::new(backing, bytes)),
            power: AtomicU64::new(0),
        });
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName(format!("{SOURCE_PREFIX}{}", std::process::id())),
            MountOption::NoAtime,
        ];
        config.n_threads = Some(THREADS);
        let filesystem = OneFile {
            shared: Arc::clone(&shared),
        };
        let session = fuser::spawn_mount(filesystem, &mount, &config).with_context(|| {
            format!(
                "mount a file system in user space at {} (needs root and /dev/fuse)",
                mount.display()
            )
        })?;
        Ok(Self {
            path: mount.join(FILE_NAME),
            shared,
            _session: session,
        })
    }

    /// The device file, for `penstock serve --device`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Blocks written and not flushed.
    pub fn unflushed_blocks(&self) -> usize {
        self.shared.cells().unflushed()
    }

    /// Cuts the power and gives it back: unflushed blocks survive or are lost, and whoever has the file open
    /// gets errors. Returns how many blocks were lost.
    pub fn cut(&self, survival: Survival) -> Result<usize> {
        let mut cells = self.shared.cells();
        self.shared.power.fetch_add(1, Ordering::SeqCst);
        cells.cut(survival).context("cut the power of a device")
    }
}

impl Shared {
    fn cells(&self) -> MutexGuard<'_, Volatile> {
        // A panic in the middle of a copy of bytes leaves some blocks of a test device; the test has failed
        // by then.
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The content, for a handle that was opened since the last cut.
    fn powered(&self, handle: FileHandle) -> Result<MutexGuard<'_, Volatile>, Errno> {
        let cells = self.cells();
        if handle.0 == self.power.load(Ordering::SeqCst) {
            Ok(cells)
        } else {
            Err(Errno::EIO)
        }
    }
}

impl Drop for PoweredDevice {
    /// At once for whoever looks, though a process that was just killed may still have it open.
    fn drop(&mut self) {
        let mount = self.path.parent().map(|dir| dir.as_os_str().as_bytes());
        if let Some(Ok(mount)) = mount.map(std::ffi::CString::new) {
            // SAFETY: the path is a string that ends with a zero byte and lives during the call.
            unsafe { libc::umount2(mount.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// Unmounts what processes that were killed have left.
fn unmount_leftovers() -> Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("read the mount table")?;
    for line in mounts.lines() {
        let mut words = line.split(' ');
        let (Some(source), Some(target)) = (words.next(), words.next()) else {
            continue;
        };
        let Some(pid) = source.strip_prefix(SOURCE_PREFIX) else {
            continue;
        };
        if !Path::new("/proc").join(pid).exists() {
            let target = std::ffi::CString::new(target)?;
            // SAFETY: the path is a string that ends with a zero byte and lives during the call.
            unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
        }
    }
    Ok(())
}

struct OneFile {
    shared: Arc<Shared>,
}

impl OneFile {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, nlink, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o755, 2, 0),
            FILE_INODE => (FileType::RegularFile, 0o600, 1, self.shared.cells().len()),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK as u32,
            flags: 0,
        })
    }
}

impl Filesystem for OneFile {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE_INODE) {
            Some(attributes) if parent == INodeNo::ROOT && name == FILE_NAME => {
                reply.entry(&ATTRIBUTES_VALID, &attributes, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&ATTRIBUTES_VALID, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        if inode != FILE_INODE {
            return reply.error(Errno::EISDIR);
        }
        let power = self.shared.power.load(Ordering::SeqCst);
        // The page cache would survive a cut of power.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(power), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let bytes = self
            .shared
            .powered(handle)
            .and_then(|cells| cells.read(offset, size as usize).map_err(|_| Errno::EIO));
        match bytes {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .shared
            .powered(handle)
            .and_then(|mut cells| cells.write(offset, data).map_err(|_| Errno::EIO));
        match written {
            Ok(0) if !data.is_empty() => reply.error(Errno::ENOSPC),
            Ok(written) => reply.written(written as u32),
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        let flushed = self
            .shared
            .powered(handle)
            .and_then(|mut cells| cells.flush().map_err(|_| Errno::EIO));
        match flushed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // A close flushes nothing.
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        // The backing file has its length already; holes are not offered.
        let fits = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.shared.cells().len());
        if mode == 0 && fits {
            reply.ok();
        } else {
            reply.error(Errno::EOPNOTSUPP);
        }
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (FILE_INODE, FileType::RegularFile, FILE_NAME),
        ];
        if inode != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        for (index, (inode, kind, name)) in entries.into_iter().enumerate() {
            if index as u64 >= offset && reply.add(inode, index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let blocks = self.shared.cells().len() / BLOCK as u64;
        reply.statfs(blocks, 0, 0, 1, 0, BLOCK as u32, 255, BLOCK as u32);
    }
}
