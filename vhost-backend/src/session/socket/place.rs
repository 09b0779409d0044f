//! A name in a directory that was opened once, and the socket made there.
//!
//! Whoever can write to the directory can put something else in the socket's place between two system calls:
//! a symbolic link, say, to a file whose owner and mode the daemon would then change. So no step after the
//! first goes by a path. The directory is opened once, and the socket is made, found and removed relative to
//! it. Its owner and mode are set through a descriptor of the socket itself, once that was seen to be what
//! this process has made.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, chmodat, chownat, fchmod, fstat, linkat, open,
    openat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, bind, connect, listen};
use rustix::process::{Gid, Uid, geteuid};

use super::{PATH_BYTES_MAX, SocketError, SocketOptions, os_error, stream_socket};

/// Bits of a mode that say who may do what.
const PERMISSION_BITS: u32 = 0o7777;
/// What chown takes for "leave it".
const NO_ID: u32 = u32::MAX;

/// Device and inode of a file.
pub(super) type Identity = (u64, u64);

/// A name in an open directory.
#[derive(Debug, Clone)]
pub(super) struct Place {
    directory: Arc<OwnedFd>,
    name: OsString,
    /// For people.
    path: PathBuf,
}

impl Place {
    /// The place that a path names now. What becomes of the path later does not matter.
    pub(super) fn open(path: &Path) -> Result<Self, SocketError> {
        if path.as_os_str().len() > PATH_BYTES_MAX {
            return Err(SocketError::TooLong(path.to_path_buf()));
        }
        let Some(name) = path.file_name() else {
            return Err(SocketError::NotASocket(path.to_path_buf()));
        };
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match open(parent, flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR) => {
                return Err(SocketError::NoDirectory(parent.to_path_buf()));
            }
            Err(error) => return Err(os_error("open the directory of", path, error.into())),
        };
        Ok(Self {
            directory: Arc::new(directory),
            name: name.to_owned(),
            path: path.to_path_buf(),
        })
    }

    /// The name with a suffix, in the same directory.
    pub(super) fn with_suffix(&self, suffix: impl AsRef<OsStr>) -> Self {
        let mut name = self.name.clone();
        name.push(&suffix);
        self.beside(name)
    }

    /// Returns the place of another name in the same directory.
    fn beside(&self, name: OsString) -> Self {
        Self {
            directory: Arc::clone(&self.directory),
            path: self.path.with_file_name(&name),
            name,
        }
    }

    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    pub(super) fn name(&self) -> &Path {
        Path::new(&self.name)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&self, what: &'static str) -> impl Fn(Errno) -> SocketError {
        move |error| os_error(what, &self.path, error.into())
    }

    /// A path to it that leads through the open directory: `bind` and `connect` take no descriptor of one.
    fn through_directory(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd())).join(&self.name)
    }

    /// What is there now. Links are not followed.
    fn open_inode(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(&self.directory, &self.name, flags, Mode::empty())
    }

    /// Whether the file with this identity is there now.
    pub(super) fn holds(&self, wanted: Identity) -> bool {
        statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|found| identity(&found) == wanted)
    }

    /// Removes the file with this identity, if it is there. Somebody who puts another file there at this very
    /// moment loses that one.
    pub(super) fn remove(&self, wanted: Identity) {
        if self.holds(wanted) {
            let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
        }
    }

    /// Removes a socket that nobody listens on; anything else in the way is an error.
    fn clear_stale(&self) -> Result<(), SocketError> {
        let inode = match self.open_inode() {
            Ok(inode) => inode,
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(self.failed("examine")(error)),
        };
        let found = fstat(&inode).map_err(self.failed("examine"))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
            return Err(SocketError::NotASocket(self.path.clone()));
        }
        let probe = stream_socket().map_err(self.failed("probe"))?;
        let address = SocketAddrUnix::new(through(&inode)).map_err(self.failed("probe"))?;
        match connect(&probe, &address) {
            Err(Errno::CONNREFUSED | Errno::NOENT) => {}
            // Its queue is full, or it speaks another kind of socket: somebody is there.
            Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
                return Err(SocketError::InUse(self.path.clone()));
            }
            Err(error) => return Err(self.failed("probe")(error)),
        }
        if self.holds(identity(&found)) {
            match unlinkat(&self.directory, &self.name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(self.failed("remove the stale socket")(error)),
            }
        }
        tracing::info!(socket = %self.path.display(), "removed a socket that nobody listens on");
        Ok(())
    }

    /// Makes a socket here to which nobody may connect yet, not even its owner. It may have been replaced
    /// since.
    fn make_socket(&self) -> Result<OwnedFd, SocketError> {
        let socket = stream_socket().map_err(self.failed("make a socket for"))?;
        // The kernel gives the file no permission that the socket lacks when it is bound.
        fchmod(&socket, Mode::empty()).map_err(self.failed("restrict"))?;
        match SocketAddrUnix::new(self.through_directory()) {
            Ok(address) => self.bind(&socket, &address)?,
            Err(_) => self.bind_by_short_name(&socket)?,
        }
        Ok(socket)
    }

    fn bind(&self, socket: &OwnedFd, address: &SocketAddrUnix) -> Result<(), SocketError> {
        bind(socket, address).map_err(|error| match error {
            Errno::ADDRINUSE => SocketError::Replaced(self.path.clone()),
            error => self.failed("bind")(error),
        })
    }

    /// Binds a socket when the path through the open directory is longer than an address: binds a short name
    /// in the same directory, creates a hard link with the right name, and removes the short name. Unlike a
    /// rename, a link never moves or replaces a file that another process put there.
    fn bind_by_short_name(&self, socket: &OwnedFd) -> Result<(), SocketError> {
        let short = self.beside(self.short_name());
        // A process that was killed between the two steps below leaves the short name behind.
        short.clear_stale()?;
        let address =
            SocketAddrUnix::new(short.through_directory()).map_err(self.failed("bind"))?;
        short.bind(socket, &address)?;
        let inode = short.open_made()?;
        let made = identity(&fstat(&inode).map_err(self.failed("examine"))?);
        let follow = AtFlags::SYMLINK_FOLLOW;
        let linked = linkat(CWD, through(&inode), &self.directory, &self.name, follow);
        short.remove(made);
        linked.map_err(|error| match error {
            Errno::EXIST => SocketError::Replaced(self.path.clone()),
            error => self.failed("bind")(error),
        })
    }

    /// Returns a name that fits into an address and depends on the socket's name: two sockets may be made at
    /// once.
    fn short_name(&self) -> OsString {
        // FNV-1a. A process that makes two names collide only affects its own sockets.
        let hash = self.name.as_bytes().iter();
        let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        OsString::from(format!(".{hash:016x}"))
    }

    /// Opens what [`Self::make_socket`] has made: a socket of this process's user without any permission.
    /// Nobody else can make one, and this process makes it so for this moment only.
    fn open_made(&self) -> Result<OwnedFd, SocketError> {
        let replaced = || SocketError::Replaced(self.path.clone());
        let inode = self.open_inode().map_err(|_| replaced())?;
        let found = fstat(&inode).map_err(|_| replaced())?;
        let is_ours = FileType::from_raw_mode(found.st_mode) == FileType::Socket
            && found.st_mode & PERMISSION_BITS == 0
            && found.st_uid == geteuid().as_raw();
        is_ours.then_some(inode).ok_or_else(replaced)
    }

    /// Gives the socket its owner and mode.
    fn grant(&self, inode: &OwnedFd, options: &SocketOptions) -> Result<(), SocketError> {
        let user = options.owner.0.filter(|id| *id != NO_ID).map(Uid::from_raw);
        let group = options.owner.1.filter(|id| *id != NO_ID).map(Gid::from_raw);
        if user.is_some() || group.is_some() {
            chownat(inode, "", user, group, AtFlags::EMPTY_PATH)
                .map_err(self.failed("set the owner of"))?;
        }
        // `fchmod` takes no such descriptor. This link of /proc leads to the inode, not to whatever has its
        // name.
        let mode = Mode::from_raw_mode(options.mode);
        chmodat(CWD, through(inode), mode, AtFlags::empty()).map_err(self.failed("set the mode of"))
    }
}

/// A socket at a path. Its file is removed when this is dropped, if it is still there.
#[derive(Debug)]
pub struct SocketFile {
    place: Place,
    identity: Identity,
}

impl SocketFile {
    /// Makes a socket that listens, in place of one that nobody listens on. Up to `backlog` clients may wait
    /// for their turn.
    pub fn listen(options: &SocketOptions, backlog: i32) -> Result<(OwnedFd, Self), SocketError> {
        Self::listen_at(Place::open(&options.path)?, options, backlog)
    }

    pub(super) fn listen_at(
        place: Place,
        options: &SocketOptions,
        backlog: i32,
    ) -> Result<(OwnedFd, Self), SocketError> {
        place.clear_stale()?;
        let socket = place.make_socket()?;
        let inode = place.open_made()?;
        let found = fstat(&inode).map_err(place.failed("examine"))?;
        let file = Self {
            identity: identity(&found),
            place,
        };
        file.place.grant(&inode, options)?;
        listen(&socket, backlog).map_err(file.place.failed("listen on"))?;
        Ok((socket, file))
    }

    /// Whether it is there now.
    pub(super) fn is_at(&self, place: &Place) -> bool {
        place.holds(self.identity)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.place.remove(self.identity);
    }
}

pub(super) fn identity(found: &Stat) -> Identity {
    (found.st_dev, found.st_ino)
}

/// A path that leads to an open file, whatever has become of its name.
fn through(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & PERMISSION_BITS
    }

    #[test]
    fn what_was_put_in_the_place_of_a_new_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("disk.sock"), dir.path().join("victim"));
        fs::write(&victim, "").unwrap();
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
        let plants: [&dyn Fn(); 4] = [
            &|| symlink(&victim, &path).unwrap(),
            &|| drop(fs::write(&path, "")),
            // A socket that clients may use already is none that was made just now.
            &|| drop(std::os::unix::net::UnixListener::bind(&path).unwrap()),
            &|| (),
        ];
        for plant in plants {
            let place = Place::open(&path).unwrap();
            let _socket = place.make_socket().unwrap();
            assert_eq!(mode(&path), 0);
            fs::remove_file(&path).unwrap();
            plant();
            assert!(matches!(place.open_made(), Err(SocketError::Replaced(told)) if told == path));
            let _ = fs::remove_file(&path);
        }
        assert_eq!(mode(&victim), 0o600);
    }

    #[test]
    fn a_socket_keeps_its_access_when_its_name_is_swapped() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("disk.sock"), dir.path().join("victim"));
        let away = dir.path().join("away");
        fs::write(&victim, "").unwrap();
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
        let place = Place::open(&path).unwrap();
        let _socket = place.make_socket().unwrap();
        let inode = place.open_made().unwrap();
        fs::rename(&path, &away).unwrap();
        symlink(&victim, &path).unwrap();
        let us = geteuid().as_raw();
        // Only root gives a socket away.
        let owner = if us == 0 { 65_000 } else { us };
        let options = SocketOptions {
            mode: 0o666,
            owner: (Some(owner), None),
            ..SocketOptions::new(&path)
        };
        place.grant(&inode, &options).unwrap();
        assert_eq!((mode(&victim), mode(&away)), (0o600, 0o666));
        let uid = |path: &Path| fs::symlink_metadata(path).unwrap().uid();
        assert_eq!((uid(&victim), uid(&away)), (us, owner));
    }

    /// A path of 107 bytes with a file name longer than what fits after `/proc/self/fd/N/`.
    fn longest(dir: &Path) -> PathBuf {
        let path = dir.join("x".repeat(PATH_BYTES_MAX - 1 - dir.as_os_str().len()));
        let through = Place::open(&path).unwrap().through_directory();
        assert!(
            SocketAddrUnix::new(through).is_err(),
            "it is not long enough"
        );
        path
    }

    /// A directory with a path so short that file names in it can be long.
    fn short_dir() -> tempfile::TempDir {
        tempfile::Builder::new()
            .prefix("p")
            .rand_bytes(4)
            .tempdir_in("/tmp")
            .unwrap()
    }

    #[test]
    fn a_socket_with_a_long_name_replaces_no_existing_file() {
        let dir = short_dir();
        let path = longest(dir.path());
        let plants: [&dyn Fn(&Path); 3] = [
            &|path| symlink("/etc/passwd", path).unwrap(),
            &|path| fs::write(path, "precious").unwrap(),
            &|path| drop(std::os::unix::net::UnixListener::bind(path).unwrap()),
        ];
        for plant in plants {
            plant(&path);
            let before = fs::symlink_metadata(&path).unwrap().ino();
            let place = Place::open(&path).unwrap();
            let made = place.make_socket();
            assert!(matches!(made, Err(SocketError::Replaced(named)) if named == path));
            assert_eq!(fs::symlink_metadata(&path).unwrap().ino(), before);
            // The short name is removed too.
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn only_a_stale_socket_at_the_short_name_is_replaced() {
        let dir = short_dir();
        let options = SocketOptions::new(longest(dir.path()));
        let place = Place::open(&options.path).unwrap();
        let short = dir.path().join(place.short_name());
        let listen = || SocketFile::listen(&options, 1);
        fs::write(&short, "precious").unwrap();
        assert!(matches!(listen(), Err(SocketError::NotASocket(named)) if named == short));
        assert_eq!(fs::read_to_string(&short).unwrap(), "precious");
        fs::remove_file(&short).unwrap();
        let theirs = std::os::unix::net::UnixListener::bind(&short).unwrap();
        assert!(matches!(listen(), Err(SocketError::InUse(named)) if named == short));
        // Left behind as by a process that was killed.
        drop(theirs);
        let (_socket, file) = listen().unwrap();
        assert_eq!(mode(&options.path), 0o600);
        assert!(!short.exists());
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_is_swapped_for_another_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = (dir.path().join("run"), dir.path().join("theirs"));
        fs::create_dir(&ours).unwrap();
        fs::create_dir(&theirs).unwrap();
        let options = SocketOptions::new(ours.join("disk.sock"));
        let place = Place::open(&options.path).unwrap();
        let moved = dir.path().join("moved");
        fs::rename(&ours, &moved).unwrap();
        symlink(&theirs, &ours).unwrap();
        let (_socket, file) = SocketFile::listen_at(place, &options, 1).unwrap();
        assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0);
        assert_eq!(mode(&moved.join("disk.sock")), 0o600);
        drop(file);
        assert_eq!(fs::read_dir(&moved).unwrap().count(), 0);
    }
}
