//! The data directory: who owns it, and what lies where in it.

use std::fs::{DirBuilder, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use rustix::fs::FlockOperation;
use vhost_backend::session::socket::{SocketError, open_lock_file};

use crate::StoreKind;

/// Mode of directories made here: volumes' data are nobody else's business.
const DIR_MODE: u32 = 0o700;

/// A data directory that belongs to this process until it ends, however it ends.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Its lock falls with the process.
    _lock: File,
}

impl DataDir {
    /// Creates the directory if need be, and takes it.
    pub fn take(path: &Path) -> Result<Self> {
        make_dir(path)?;
        let lock_path = path.join("lock");
        let opened = open_lock_file(rustix::fs::CWD, &lock_path, &lock_path);
        let mut lock = opened.map_err(|e| cannot_lock(path, e))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(taken(path, &mut lock)),
            Err(e) => {
                return Err(std::io::Error::from(e))
                    .context(|| format!("lock {}", lock_path.display()));
            }
        }
        // The number is for people only; the lock alone decides.
        let pid = format!("{}\n", std::process::id());
        lock.set_len(0)
            .and_then(|()| lock.rewind())
            .and_then(|()| lock.write_all(pid.as_bytes()))
            .context(|| format!("write {}", lock_path.display()))?;
        Ok(DataDir {
            path: path.into(),
            _lock: lock,
        })
    }

    /// The default device file.
    pub fn default_device(&self) -> PathBuf {
        default_device_in(&self.path)
    }
}

/// The default device file of a data directory.
pub fn default_device_in(data: &Path) -> PathBuf {
    data.join("devices/0.img")
}

/// Where meta keeps its database.
pub fn meta(data: &Path, store: StoreKind) -> PathBuf {
    data.join(match store {
        StoreKind::File => "meta",
        // Volumes that drop everything must never be taken for real ones, nor the other way round.
        StoreKind::Null => "meta-null",
    })
}

/// Makes a directory and its parents.
pub fn make_dir(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(path)
        .context_hint(
            || format!("create directory {}", path.display()),
            "choose a data directory that this user can write, with --data DIR",
        )
}

fn cannot_lock(path: &Path, error: SocketError) -> Failure {
    let SocketError::Os { source, .. } = error else {
        return Failure::plain(Kind::Conflict, error);
    };
    let failed: Result<()> = Err(source).context_hint(
        || format!("use data directory {}", path.display()),
        "choose one that this user can write, with --data DIR",
    );
    failed.expect_err("it was an error")
}

fn taken(path: &Path, lock: &mut File) -> Failure {
    let mut pid = String::new();
    // An unreadable number only makes the message shorter.
    let _ = lock.read_to_string(&mut pid);
    let who = match pid.trim() {
        "" => String::new(),
        pid => format!(" (process {pid})"),
    };
    Failure::new(
        Kind::Conflict,
        format!(
            "data directory {} is in use by another daemon{who}",
            path.display()
        ),
        "stop that daemon, or choose another directory with --data DIR",
    )
}

#[cfg(test)]
mod tests {
    use api::lock::holder;

    use super::*;

    #[test]
    fn a_data_directory_has_one_owner_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let first = DataDir::take(&path).unwrap();
        let refused = DataDir::take(&path).unwrap_err();
        assert_eq!(refused.kind, Kind::Conflict);
        assert!(
            refused
                .error
                .contains(&format!("process {}", std::process::id())),
            "{refused}"
        );
        assert_eq!(holder(&path), Some(std::process::id()));
        drop(first);
        assert_eq!(holder(&path), None);
        DataDir::take(&path).unwrap();
    }

    #[test]
    fn a_lock_that_is_no_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (lock, elsewhere) = (dir.path().join("lock"), dir.path().join("elsewhere"));
        let fifo = || {
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, &lock, kind, mode, 0).unwrap();
        };
        let link = || std::os::unix::fs::symlink(&elsewhere, &lock).unwrap();
        for plant in [&fifo as &dyn Fn(), &link] {
            plant();
            let path = dir.path().to_owned();
            let (told, tells) = std::sync::mpsc::channel();
            // A thread of its own: to open a FIFO may take for ever.
            std::thread::spawn(move || drop(told.send(DataDir::take(&path))));
            let taken = tells.recv_timeout(std::time::Duration::from_secs(10));
            let refused = taken.expect("it waits for nobody").unwrap_err();
            assert_eq!(refused.kind, Kind::Conflict);
            assert!(refused.error.contains("is not a regular file"), "{refused}");
            std::fs::remove_file(&lock).unwrap();
        }
        assert!(!elsewhere.exists());
    }
}
