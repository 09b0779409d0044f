//! Sockets that front ends connect to: made at a path, or handed over as a descriptor.
//!
//! A path is ours while we hold the lock on the file `PATH.lock` beside it. That closes the gap between
//! looking whether somebody listens and replacing the socket that a killed process left behind: of two
//! daemons that want the same path one gets an error. A program without that habit is found by connecting to
//! it. How the socket gets its owner and mode without going by a path that others can change is told in
//! `place.rs`.

mod place;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, socket_with, sockopt};

use place::{Place, identity};

pub use place::SocketFile;

/// Permissions of a socket for which none are given: only the daemon's own user connects.
pub const DEFAULT_MODE: u32 = 0o600;

/// Longest path of a socket; a longer one is refused. The kernel accepts one byte more, which front ends use
/// for the terminating zero.
pub const PATH_BYTES_MAX: usize = 107;

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

/// Why a socket could not be made or used. Each names the culprit and gives a hint.
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
    /// What was made is not there any more: somebody has put something else in its place.
    #[error(
        "{0} was replaced while the socket was made; let only trusted users write to its directory"
    )]
    Replaced(PathBuf),
    /// A lock file on which nothing can be locked.
    #[error("lock file {0} exists and is not a regular file; remove it or choose another path")]
    LockNotAFile(PathBuf),
    /// The directory is not there.
    #[error("directory {0} of the socket does not exist; create it first")]
    NoDirectory(PathBuf),
    /// Longer than a socket address holds.
    #[error(
        "socket path {0} is too long: {PATH_BYTES_MAX} bytes are allowed; choose a shorter one"
    )]
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
    /// Another one once the file was removed and made again.
    socket: Mutex<Arc<OwnedFd>>,
    /// None for a descriptor that was handed over: the path then belongs to whoever made it.
    bound: Option<Box<(SocketOptions, Mutex<Bound>)>>,
}

/// What a path is held by. The lock is held for as long as the path is ours, and dropped after the socket was
/// removed.
#[derive(Debug)]
struct Bound {
    file: SocketFile,
    lock: Lock,
}

#[derive(Debug)]
struct Lock {
    place: Place,
    file: File,
}

impl Listener {
    /// Makes a socket at a path, in place of one that a killed process left behind.
    pub fn bind(options: &SocketOptions) -> Result<Self, SocketError> {
        let place = Place::open(&options.path)?;
        let lock = Lock::take(&place)?;
        let (socket, file) = SocketFile::listen_at(place, options, BACKLOG)?;
        Ok(Self {
            socket: Mutex::new(Arc::new(socket)),
            bound: Some(Box::new((
                options.clone(),
                Mutex::new(Bound { file, lock }),
            ))),
        })
    }

    /// The socket as it is now.
    pub fn socket(&self) -> Arc<OwnedFd> {
        Arc::clone(&locked(&self.socket))
    }

    /// Makes the socket again if its file was removed, as nobody reaches it any more then. Returns whether it
    /// was. Who polls [`socket`](Self::socket) has to begin anew.
    ///
    /// # Errors
    /// It was removed and cannot be made, for one of the reasons of [`bind`](Self::bind). The next call tries
    /// again.
    pub fn restore(&self) -> Result<bool, SocketError> {
        let Some((options, bound)) = self.bound.as_deref() else {
            return Ok(false);
        };
        let mut bound = locked(bound);
        let place = Place::open(&options.path)?;
        if bound.file.is_at(&place) {
            return Ok(false);
        }
        // The directory may be another one, too.
        let lock = match bound.lock.is_at(&place.with_suffix(".lock")) {
            true => None,
            false => Some(Lock::take(&place)?),
        };
        let (socket, file) = SocketFile::listen_at(place, options, BACKLOG)?;
        *locked(&self.socket) = Arc::new(socket);
        bound.file = file;
        if let Some(lock) = lock {
            bound.lock = lock;
        }
        Ok(true)
    }

    /// Takes the next front end, or `None` if it went away again.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        match accept_with(&*self.socket(), SocketFlags::CLOEXEC) {
            Ok(connection) => Ok(Some(connection)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
                socket: Mutex::new(Arc::new(fd)),
                bound: None,
            }));
        }
        rustix::net::getpeername(&fd).map_err(wrong)?;
        Ok(Self::Connected(fd))
    }
}

impl Lock {
    fn take(socket: &Place) -> Result<Self, SocketError> {
        let place = socket.with_suffix(".lock");
        let locked = || {
            let (socket, lock) = (socket.path(), place.path());
            SocketError::Locked(socket.to_path_buf(), lock.to_path_buf())
        };
        for _ in 0..LOCK_TRIES {
            let file = open_lock_file(place.directory(), place.name(), place.path())?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(locked()),
                Err(error) => return Err(os_error("lock", place.path(), error.into())),
            }
            let lock = Self {
                place: place.clone(),
                file,
            };
            // Its last owner may have removed the file between our open and our lock.
            if lock.is_in_place() {
                return Ok(lock);
            }
        }
        Err(locked())
    }

    fn is_in_place(&self) -> bool {
        self.is_at(&self.place)
    }

    fn is_at(&self, place: &Place) -> bool {
        fstat(&self.file).is_ok_and(|ours| place.holds(identity(&ours)))
    }
}

impl Drop for Lock {
    /// Removes the file. The lock is held until the file is closed, so nobody else's file is removed.
    fn drop(&mut self) {
        if let Ok(ours) = fstat(&self.file) {
            self.place.remove(identity(&ours));
        }
    }
}

/// Opens a lock file, and creates it if need be. `shown` is its path, for people. Whatever lies there, this
/// never waits: a FIFO would have its opener wait for the other end.
pub fn open_lock_file(
    directory: impl AsFd,
    name: &Path,
    shown: &Path,
) -> Result<File, SocketError> {
    let not_a_file = || SocketError::LockNotAFile(shown.to_path_buf());
    let flags = OFlags::RDWR
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    let file = match openat(directory, name, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file,
        // A link, a directory, a socket or a device without a driver.
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO | Errno::NODEV) => return Err(not_a_file()),
        Err(error) => return Err(os_error("create the lock file", shown, error.into())),
    };
    let found = fstat(&file).map_err(|e| os_error("examine", shown, e.into()))?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(File::from(file)),
        _ => Err(not_a_file()),
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
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
