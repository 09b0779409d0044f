//! Sockets that front ends connect to: made at a path, or handed over as a descriptor.
//!
//! A path is ours while we hold the lock on the file `PATH.lock` beside it. That closes the gap between looking whether
//! somebody listens and replacing the socket that a killed process left behind: of two daemons that want the same path
//! one gets an error. A program without that habit is found by connecting to it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, sockopt,
};

/// Permissions of a socket for which none are given: only the daemon's own user connects.
pub const DEFAULT_MODE: u32 = 0o600;

/// Front ends that may wait for their turn; the kernel makes further ones wait in `connect`.
const BACKLOG: i32 = 16;

/// Tries to lock a lock file that its owner removes at the same moment, before giving up.
const LOCK_TRIES: usize = 16;

/// Where to make a socket, and who may connect.
#[derive(Debug, Clone)]
pub struct SocketOptions {
    /// The path.
    pub path: PathBuf,
    /// Permission bits.
    pub mode: u32,
    /// User and group that own it; unchanged where not given.
    pub owner: (Option<u32>, Option<u32>),
}

impl SocketOptions {
    /// A socket at `path` for the daemon's own user.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            mode: DEFAULT_MODE,
            owner: (None, None),
        }
    }
}

/// Why a socket could not be made or used. Each names the culprit and the mend.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A live process listens there.
    #[error(
        "socket {0} is in use: another process listens on it; detach it there or choose another path"
    )]
    InUse(PathBuf),
    /// Another daemon holds the lock.
    #[error(
        "socket {0} is in use: another Penstock process holds {1}; stop it or choose another path"
    )]
    Locked(PathBuf, PathBuf),
    /// Something that is not a socket is in the way.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The directory is not there.
    #[error("directory {0} of the socket does not exist; create it first")]
    NoDirectory(PathBuf),
    /// Longer than a socket address holds.
    #[error("socket path {0} is too long: the kernel allows 107 bytes; choose a shorter one")]
    TooLong(PathBuf),
    /// The descriptor is not a unix stream socket.
    #[error("the file descriptor handed over is not a unix stream socket, listening or connected")]
    WrongDescriptor,
    /// The operating system refused.
    #[error("cannot {what} {path}: {source}; check the owner and permissions")]
    Os {
        /// Verb and object.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Its answer.
        #[source]
        source: io::Error,
    },
}

/// What front ends connect to.
#[derive(Debug)]
pub enum Endpoint {
    /// Serves several connections in turn.
    Listening(Listener),
    /// Serves this one connection.
    Connected(OwnedFd),
}

/// A listening socket. The path and its lock file are removed when it is dropped, if they are still ours.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// None for a descriptor that was handed over: the path then belongs to whoever made it.
    place: Option<Place>,
}

#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// Device and inode of the socket.
    identity: (u64, u64),
    /// Held for as long as the path is ours; dropped after the socket was removed.
    _lock: Lock,
}

#[derive(Debug)]
struct Lock {
    path: PathBuf,
    file: File,
}

impl Listener {
    /// Makes a socket at a path, in place of one that a killed process left behind.
    pub fn bind(options: &SocketOptions) -> Result<Self, SocketError> {
        let path = &options.path;
        let address =
            SocketAddrUnix::new(path.as_path()).map_err(|_| SocketError::TooLong(path.clone()))?;
        let lock = Lock::take(path)?;
        clear_stale(path, &address)?;
        let os = |what| move |source: Errno| os_error(what, path, source.into());
        let socket = stream_socket().map_err(os("make a socket for"))?;
        // The socket's mode before `bind` limits that of the path: nobody connects before the mode below is set.
        fchmod(&socket, Mode::empty()).map_err(os("restrict"))?;
        bind(&socket, &address).map_err(os("bind"))?;
        let metadata = fs::symlink_metadata(path).map_err(|e| os_error("examine", path, e))?;
        let listener = Self {
            socket,
            place: Some(Place {
                path: path.clone(),
                identity: identity(&metadata),
                _lock: lock,
            }),
        };
        if options.owner != (None, None) {
            std::os::unix::fs::lchown(path, options.owner.0, options.owner.1)
                .map_err(|e| os_error("set the owner of", path, e))?;
        }
        fs::set_permissions(path, Permissions::from_mode(options.mode))
            .map_err(|e| os_error("set the mode of", path, e))?;
        listen(&listener.socket, BACKLOG).map_err(os("listen on"))?;
        Ok(listener)
    }

    /// Takes the next front end, or `None` if it went away again.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(connection) => Ok(Some(connection)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(place) = &self.place else { return };
        let still_ours = fs::symlink_metadata(&place.path)
            .is_ok_and(|metadata| identity(&metadata) == place.identity);
        if still_ours {
            let _ = fs::remove_file(&place.path);
        }
    }
}

impl Endpoint {
    /// Uses a descriptor that was handed over (`--fd`).
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SocketError> {
        let wrong = |_| SocketError::WrongDescriptor;
        let domain = sockopt::socket_domain(&fd).map_err(wrong)?;
        let kind = sockopt::socket_type(&fd).map_err(wrong)?;
        if domain != AddressFamily::UNIX || kind != SocketType::STREAM {
            return Err(SocketError::WrongDescriptor);
        }
        if sockopt::socket_acceptconn(&fd).map_err(wrong)? {
            // `accept` must not block when a front end goes away between poll and accept.
            rustix::io::ioctl_fionbio(&fd, true).map_err(wrong)?;
            return Ok(Self::Listening(Listener {
                socket: fd,
                place: None,
            }));
        }
        rustix::net::getpeername(&fd).map_err(wrong)?;
        Ok(Self::Connected(fd))
    }
}

impl Lock {
    fn take(socket: &Path) -> Result<Self, SocketError> {
        let path = with_suffix(socket, ".lock");
        let os = |e: io::Error| {
            let directory = parent(socket);
            if directory.is_dir() {
                os_error("create the lock file", &path, e)
            } else {
                SocketError::NoDirectory(directory)
            }
        };
        for _ in 0..LOCK_TRIES {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .map_err(os)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    return Err(SocketError::Locked(socket.to_path_buf(), path));
                }
                Err(error) => return Err(os_error("lock", &path, error.into())),
            }
            let lock = Self {
                path: path.clone(),
                file,
            };
            // Its last owner may have removed the file between our open and our lock.
            if lock.is_in_place() {
                return Ok(lock);
            }
        }
        Err(SocketError::Locked(socket.to_path_buf(), path))
    }

    fn is_in_place(&self) -> bool {
        match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(ours), Ok(theirs)) => identity(&ours) == identity(&theirs),
            _ => false,
        }
    }
}

impl Drop for Lock {
    /// Removes the file. The lock is held until the file is closed, so nobody else's file is removed.
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that nobody listens on; anything else in the way is an error.
fn clear_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(os_error("examine", path, e)),
    };
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_path_buf()));
    }
    let probe = stream_socket().map_err(|e| os_error("probe", path, e.into()))?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => {}
        // Its queue is full, or it speaks another kind of socket: somebody is there.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            return Err(SocketError::InUse(path.to_path_buf()));
        }
        Err(error) => return Err(os_error("probe", path, error.into())),
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(os_error("remove the stale socket", path, e))
        }
        _ => {
            tracing::info!(socket = %path.display(), "removed a socket that nobody listens on");
            Ok(())
        }
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

fn with_suffix(path: &Path, suffix: impl AsRef<OsStr>) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

fn os_error(what: &'static str, path: &Path, source: io::Error) -> SocketError {
    SocketError::Os {
        what,
        path: path.to_path_buf(),
        source,
    }
}

#[cfg(test)]
mod tests;
