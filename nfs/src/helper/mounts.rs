//! File systems of exports: where they are mounted, and notes of what each is.
//!
//! ```text
//! DIR/exports/            a file system of its own in memory: what clients see as `/`
//! DIR/exports/NAME        the file system of an export
//! DIR/notes/NAME.json     the export, from before it is mounted until after it is unmounted
//! ```

use std::ffi::{CString, c_ulong};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::plan::ExportPlan;

use super::{HelperError, Result, check_name};

/// Project quotas; and a file system that was taken out of sight and is still busy does not keep its own next
/// mount away, whose device is another.
const OPTIONS: &str = "prjquota,nouuid";
/// A mount that the NFS server has just let go of is busy for a moment.
const BUSY_WAIT_MAX: Duration = Duration::from_secs(10);
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// Names of exports lie in it, and nothing else.
const ROOT_OPTIONS: &str = "size=1m,mode=755";

/// The mount points below a directory.
#[derive(Debug, Clone)]
pub struct Mounts {
    dir: PathBuf,
}

impl Mounts {
    pub fn below(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    /// What clients see as `/`.
    pub fn root(&self) -> PathBuf {
        self.dir.join("exports")
    }

    /// Where an export is mounted.
    pub fn point(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    fn note_path(&self, name: &str) -> PathBuf {
        self.dir.join("notes").join(format!("{name}.json"))
    }

    /// The export of this name that is, or is about to be, mounted.
    pub fn note(&self, name: &str) -> Result<ExportPlan> {
        check_name(name)?;
        read_note(&self.note_path(name)).ok_or_else(|| {
            HelperError::new(
                format!("export '{name}' is not on this machine"),
                "see `penstock nfs export list`",
            )
        })
    }

    /// All of them, by name.
    pub fn notes(&self) -> Vec<ExportPlan> {
        let entries = std::fs::read_dir(self.dir.join("notes"))
            .into_iter()
            .flatten();
        let notes = entries.filter_map(|entry| read_note(&entry.ok()?.path()));
        let mut notes: Vec<ExportPlan> = notes.collect();
        notes.sort_by(|a, b| a.name.cmp(&b.name));
        notes
    }

    pub fn is_mounted(&self, name: &str) -> bool {
        is_mount_point(&self.point(name))
    }

    /// Bytes of a mounted file system, and those that are free.
    pub fn space(&self, name: &str) -> Option<(u64, u64)> {
        let told = rustix::fs::statvfs(self.point(name))
            .ok()
            .filter(|_| self.is_mounted(name))?;
        Some((told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize))
    }

    pub fn mount(&self, plan: &ExportPlan, device: &Path) -> Result<()> {
        self.make_root()?;
        let point = self.point(&plan.name);
        let note = self.note_path(&plan.name);
        let written = serde_json::to_vec(plan).map_err(io::Error::from);
        let written = written.and_then(|bytes| std::fs::write(&note, bytes));
        written.map_err(|e| HelperError::io(format!("write {}", note.display()), &e))?;
        if is_mount_point(&point) {
            return Ok(());
        }
        make_dir(&point, 0o755)?;
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        let mounted = mount(&device.to_string_lossy(), &point, "xfs", flags, OPTIONS);
        mounted.map_err(|error| {
            let _ = std::fs::remove_file(&note);
            let _ = std::fs::remove_dir(&point);
            HelperError::new(
                format!("cannot mount volume '{}': {error}", plan.volume),
                "look at the kernel's log (dmesg)",
            )
        })
    }

    fn make_root(&self) -> Result<()> {
        make_dir(&self.dir, 0o700)?;
        make_dir(&self.dir.join("notes"), 0o700)?;
        let root = self.root();
        make_dir(&root, 0o755)?;
        if is_mount_point(&root) {
            return Ok(());
        }
        // A file system of its own, so that no handle of a client leads to anything beside the exports.
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        let mounted = mount("penstock-exports", &root, "tmpfs", flags, ROOT_OPTIONS);
        mounted.map_err(|e| HelperError::io(format!("mount {}", root.display()), &e))
    }

    /// Unmounts, and forgets the export. False if it is busy.
    pub fn unmount(&self, name: &str) -> Result<bool> {
        let point = self.point(name);
        let begin = Instant::now();
        while is_mount_point(&point) {
            match unmount(&point, 0) {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    if begin.elapsed() > BUSY_WAIT_MAX {
                        return Ok(false);
                    }
                    std::thread::sleep(BUSY_PAUSE);
                }
                done => {
                    done.map_err(|e| HelperError::io(format!("unmount {}", point.display()), &e))?
                }
            }
        }
        self.forget(name);
        Ok(true)
    }

    /// Unmounts what is busy as far as it can be: nobody finds it any more, and the file system ends with its
    /// last user.
    pub fn take_out_of_sight(&self, name: &str) -> Result<()> {
        let point = self.point(name);
        if is_mount_point(&point) {
            let done = unmount(&point, libc::MNT_DETACH);
            done.map_err(|e| HelperError::io(format!("unmount {}", point.display()), &e))?;
            tracing::error!(
                export = name,
                "its file system is busy and was detached; writes to it fail from now on"
            );
        }
        self.forget(name);
        Ok(())
    }

    fn forget(&self, name: &str) {
        let _ = std::fs::remove_dir(self.point(name));
        let _ = std::fs::remove_file(self.note_path(name));
    }
}

fn read_note(path: &Path) -> Option<ExportPlan> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Makes a directory; one that is there stays as it is.
pub fn make_dir(dir: &Path, mode: u32) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(mode).create(dir);
    made.map_err(|e| HelperError::io(format!("make directory {}", dir.display()), &e))?;
    // Whatever the umask of whoever started this.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
    let set = std::fs::set_permissions(dir, mode);
    set.map_err(|e| HelperError::io(format!("set the mode of {}", dir.display()), &e))
}

/// Whether something is mounted there, as the kernel tells it.
pub fn is_mount_point(path: &Path) -> bool {
    let told = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The names of exports need no escapes.
    let points = told.lines().filter_map(|line| line.split(' ').nth(4));
    points.into_iter().any(|point| Path::new(point) == path)
}

/// Mounts a file system.
pub fn mount(source: &str, at: &Path, kind: &str, flags: c_ulong, options: &str) -> io::Result<()> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::other);
    let (source, at) = (text(source.as_bytes())?, text(at.as_os_str().as_bytes())?);
    let (kind, options) = (text(kind.as_bytes())?, text(options.as_bytes())?);
    // SAFETY: all strings end with a zero and live until the call returns.
    let done = unsafe {
        libc::mount(
            source.as_ptr(),
            at.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn unmount(at: &Path, flags: i32) -> io::Result<()> {
    let at = CString::new(at.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: the string ends with a zero and lives until the call returns.
    match unsafe { libc::umount2(at.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_found_again_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = Mounts::below(dir.path());
        std::fs::create_dir_all(dir.path().join("notes")).unwrap();
        let plan = ExportPlan {
            name: "data".into(),
            volume: "v".into(),
            fsid: "1".into(),
            clients: vec!["10.0.0.0/24".parse().unwrap()],
            read_only: false,
            root_squash: true,
            address: Some("10.0.0.9/24".parse().unwrap()),
        };
        std::fs::write(mounts.note_path("data"), serde_json::to_vec(&plan).unwrap()).unwrap();
        std::fs::write(mounts.note_path("torn"), "{").unwrap();
        assert_eq!(mounts.notes(), std::slice::from_ref(&plan));
        assert_eq!(mounts.note("data").unwrap(), plan);
        assert!(!mounts.is_mounted("data"));
        assert!(
            mounts.unmount("data").unwrap(),
            "what is not mounted is unmounted"
        );
        assert!(mounts.note("data").is_err());
    }

    #[test]
    fn mount_points_are_told_from_directories() {
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self")));
    }
}
