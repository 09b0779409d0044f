//! The daemons that run on this machine. Each one keeps a file here while it lives, so that commands find it
//! without being told its data directory.
//!
//! The directory is `/run/penstock-daemons` for root and `$XDG_RUNTIME_DIR/penstock` for everybody else;
//! `PENSTOCK_RUN_DIR` overrides it. It is not `/run/penstock`: that is where the daemon's own user makes
//! attachment sockets, and this one must be root's. A daemon holds a lock (flock) on its file. The kernel
//! drops that lock with the process, so a file that `kill -9` leaves behind counts for nothing, and the next
//! daemon that starts removes it. The directory must belong to whoever reads it: a file that somebody else
//! could write would name somebody else's socket.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use rustix::fs::{FlockOperation, OFlags};
use serde::{Deserialize, Serialize};

/// Names the directory.
const RUN_DIR_ENV: &str = "PENSTOCK_RUN_DIR";
/// Files that are looked at; a machine runs far fewer daemons. What comes after them is not found, and not
/// removed.
const ENTRIES_MAX: usize = 1024;
/// Longest file that is read, in bytes: two paths and a number. A longer one counts as damaged and is
/// skipped.
const ENTRY_BYTES_MAX: u64 = 64 << 10;

/// A daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its process.
    pub pid: u32,
    /// Its data directory.
    pub data: PathBuf,
    /// Its admin socket.
    pub admin_socket: PathBuf,
}

/// This process's file. It goes when this is dropped.
#[derive(Debug)]
pub struct Registration {
    path: PathBuf,
    /// Its lock says that the process lives.
    _lock: File,
}

/// Where the files are; `None` for a user without a runtime directory, whose daemons are not listed.
pub fn directory() -> Option<PathBuf> {
    let from = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    from(RUN_DIR_ENV).or_else(|| match rustix::process::geteuid().is_root() {
        true => Some(PathBuf::from("/run/penstock-daemons")),
        false => from("XDG_RUNTIME_DIR").map(|dir| dir.join("penstock")),
    })
}

/// Lists this process until the registration is dropped, and removes the files of daemons that are gone.
pub fn register(directory: &Path, entry: &Entry) -> Result<Registration> {
    let what = || format!("list this daemon in {}", directory.display());
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .context(what)?;
    check_owner(directory)?;
    sweep(directory);
    // The file appears under its name complete and locked: nobody takes it for one that was left.
    let hidden = directory.join(format!(".{}.new", entry.pid));
    let path = directory.join(format!("{}.json", entry.pid));
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&hidden)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(&serde_json::to_vec(entry)?)?;
        std::fs::rename(&hidden, &path)?;
        io::Result::Ok(file)
    })();
    Ok(Registration {
        _lock: written.context(what)?,
        path,
    })
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Nothing is lost if it stays: without its lock it counts for nothing.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The daemons that live, in the order of their data directories. A directory that is missing lists none.
pub fn running(directory: &Path) -> Vec<Entry> {
    if check_owner(directory).is_err() {
        return Vec::new();
    }
    let files = files(directory);
    let alive = files.iter().filter_map(|path| match look(path) {
        Some((entry, true)) => Some(entry),
        _ => None,
    });
    let mut entries: Vec<Entry> = alive.collect();
    entries.sort_by(|a, b| (&a.data, a.pid).cmp(&(&b.data, b.pid)));
    entries
}

/// What a file says, and whether its daemon lives.
fn look(path: &Path) -> Option<(Entry, bool)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
        .open(path)
        .ok()?;
    let mut text = Vec::new();
    (&file).take(ENTRY_BYTES_MAX).read_to_end(&mut text).ok()?;
    let entry = serde_json::from_slice(&text).ok()?;
    let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
    Some((entry, locked == Err(rustix::io::Errno::WOULDBLOCK)))
}

fn sweep(directory: &Path) {
    for path in files(directory) {
        if let Some((_, false)) = look(&path) {
            // A file that stays does no harm.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let Ok(listed) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let paths = listed.take(ENTRIES_MAX).flatten().map(|file| file.path());
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect()
}

/// Refuses a directory that another user could write.
fn check_owner(directory: &Path) -> Result<()> {
    let found =
        std::fs::metadata(directory).context(|| format!("look at {}", directory.display()))?;
    let is_ours = found.uid() == rustix::process::geteuid().as_raw();
    if found.is_dir() && is_ours && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Denied,
        format!(
            "{} is not a directory that only this user can write",
            directory.display()
        ),
        format!("give it to this user and take the others' right to write, or set {RUN_DIR_ENV}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn entry(pid: u32, data: &str) -> Entry {
        Entry {
            pid,
            data: data.into(),
            admin_socket: Path::new(data).join("penstock.sock"),
        }
    }

    #[test]
    fn daemons_are_listed_while_they_live() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("penstock");
        assert_eq!(running(&dir), [], "there is no directory");
        let (a, b) = (entry(1, "/b"), entry(2, "/a"));
        let first = register(&dir, &a).unwrap();
        let second = register(&dir, &b).unwrap();
        assert_eq!(running(&dir), [b.clone(), a]);
        drop(first);
        assert_eq!(running(&dir), [b]);
        drop(second);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn a_file_without_a_lock_counts_for_nothing_and_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join("7.json");
        std::fs::write(&left, serde_json::to_vec(&entry(7, "/gone")).unwrap()).unwrap();
        std::fs::write(dir.path().join("8.json"), "{ not ours").unwrap();
        assert_eq!(running(dir.path()), []);
        let next = register(dir.path(), &entry(7, "/next")).unwrap();
        assert_eq!(running(dir.path()), [entry(7, "/next")]);
        drop(next);
        assert!(!left.exists());
    }

    #[test]
    fn a_directory_that_others_can_write_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let registration = register(dir.path(), &entry(1, "/a")).unwrap();
        assert_eq!(running(dir.path()).len(), 1);
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(running(dir.path()), []);
        let refused = register(dir.path(), &entry(2, "/b")).unwrap_err();
        assert!(refused.to_string().contains(RUN_DIR_ENV), "{refused}");
        drop(registration);
    }
}
