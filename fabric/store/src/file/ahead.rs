//! Block devices that a process may not open itself: it opened them before it gave that right up, or somebody
//! who may hands them over.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::{DeviceError, DeviceFile, DeviceKind, open_locked};

/// Open and locked block devices, by path. Copies share them.
#[derive(Debug, Clone, Default)]
pub struct OpenedAhead(Arc<Mutex<BTreeMap<PathBuf, File>>>);

impl OpenedAhead {
    /// Opens and locks what is at a path, if it is a block device. Anything else is left to
    /// [`OpenedAhead::device`]: a file can belong to whoever is to use it, and whoever may change its
    /// directory could lead this process to another file.
    pub fn open(&self, path: &Path) -> Result<(), DeviceError> {
        if DeviceKind::at(path)? == DeviceKind::Block {
            let file = open_locked(path, DeviceKind::Block)?;
            self.lock().insert(absolute(path), file);
        }
        Ok(())
    }

    /// Takes a block device from somebody who has opened it by [`DeviceFile::open`]. The lock comes along,
    /// since it belongs to the open file, and so does what keeps other exclusive openers out, which cannot be
    /// checked here.
    ///
    /// # Errors
    /// The descriptor is not what is at the path, or cannot be read and written directly; somebody else has
    /// the lock; or there is one for this path already.
    pub fn take(&self, path: &Path, device: OwnedFd) -> Result<(), DeviceError> {
        let file = File::from(device);
        let os = |source| DeviceError::Os {
            verb: "look at",
            path: path.to_owned(),
            source,
        };
        let given = file.metadata().map_err(os)?;
        let named = std::fs::metadata(path).map_err(os)?;
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|errno| os(errno.into()))?;
        let is_same = given.file_type().is_block_device()
            && named.file_type().is_block_device()
            && given.rdev() == named.rdev();
        if !is_same || !flags.contains(OFlags::RDWR | OFlags::DIRECT) {
            return Err(DeviceError::OtherDevice(path.to_owned()));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(DeviceError::InUse(path.to_owned())),
            Err(errno) => return Err(os(errno.into())),
        }
        match self.lock().entry(absolute(path)) {
            Entry::Vacant(place) => place.insert(file),
            Entry::Occupied(_) => return Err(DeviceError::InUse(path.to_owned())),
        };
        Ok(())
    }

    /// Closes what is open for a path: who has a [`DeviceFile`] keeps it, with its lock.
    pub fn forget(&self, path: &Path) {
        self.lock().remove(&absolute(path));
    }

    /// Whether it has the device at a path.
    pub fn has(&self, path: &Path) -> bool {
        self.lock().contains_key(&absolute(path))
    }

    /// The device at a path: the one that is open already, or else opened now.
    pub fn device(&self, path: &Path) -> Result<DeviceFile, DeviceError> {
        let open = self.lock();
        match open.get(&absolute(path)) {
            None => {
                drop(open);
                DeviceFile::open(path)
            }
            Some(file) => {
                let file = file.try_clone().map_err(|source| DeviceError::Os {
                    verb: "open",
                    path: path.to_owned(),
                    source,
                })?;
                DeviceFile::of(file, path, DeviceKind::Block)
            }
        }
    }

    /// Closes them all: who has a [`DeviceFile`] keeps it, with its lock, and the others are free.
    pub fn close(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
