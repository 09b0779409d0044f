//! Block devices that a process opens while it still may, for when it has given that right up.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

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
