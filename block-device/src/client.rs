//! The daemon's end: starts the helper, and asks it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::wire::{self, Answer, Asked};

/// Why a block device was not made or removed.
#[derive(Debug, thiserror::Error)]
pub enum BlockDeviceError {
    /// Somebody uses it.
    #[error("{0}")]
    InUse(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
    /// The helper.
    #[error("the helper for block devices: {0}")]
    Helper(#[from] io::Error),
}

/// A running helper. It ends when this is dropped, and with this process.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    _child: Child,
}

impl Client {
    /// Starts the helper by `command`, which is to call [`crate::helper::run`] on descriptor
    /// [`crate::HELPER_FD`].
    pub fn start(mut command: Command) -> io::Result<Self> {
        let (socket, theirs) = wire::pair()?;
        let source = theirs.as_raw_fd();
        command.stdin(Stdio::null());
        // SAFETY: between fork and exec only async-signal-safe calls are made.
        unsafe {
            command.pre_exec(move || match libc::dup2(source, crate::HELPER_FD) {
                // A descriptor that is there already stays as it was: closed on exec.
                _ if source == crate::HELPER_FD => match libc::fcntl(source, libc::F_SETFD, 0) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                },
                ..0 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let child = command.spawn()?;
        Ok(Self {
            socket,
            _child: child,
        })
    }

    /// Whether the helper has ended. Its devices wait then, for the next one.
    pub fn has_ended(&self) -> bool {
        // Not by waiting for the child: a confined process may not.
        let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
        let now = Timespec::default();
        let polled = poll(&mut socket, Some(&now));
        polled.is_ok() && socket[0].revents().contains(PollFlags::HUP)
    }

    /// How block devices are made here (`vduse` or `nbd`), or why they cannot be. Waits.
    pub fn probe(&self) -> Result<String, BlockDeviceError> {
        match self.ask(&Asked::Probe)? {
            (Answer::Interface(interface), _) => Ok(interface),
            (answer, _) => Err(io::Error::other(format!("unexpected answer {answer:?}")).into()),
        }
    }

    /// The socket, listening, by which the device `key` will connect. Waits.
    pub fn listen(&self, key: &str) -> Result<OwnedFd, BlockDeviceError> {
        let (_, fd) = self.ask(&Asked::Listen {
            key: key.to_owned(),
        })?;
        fd.ok_or_else(|| io::Error::other("no socket came with its answer").into())
    }

    /// Makes the device `key` and `link` to it, or goes on with one that is there; returns what the kernel
    /// calls it (`/dev/vdb`). Its volume must be served by now. Waits for the kernel, up to a minute.
    pub fn serve(&self, key: &str, link: &str) -> Result<String, BlockDeviceError> {
        let (key, link) = (key.to_owned(), link.to_owned());
        match self.ask(&Asked::Serve { key, link })? {
            (Answer::Device(device), _) => Ok(device),
            (answer, _) => Err(io::Error::other(format!("unexpected answer {answer:?}")).into()),
        }
    }

    /// Removes the device, unless it is mounted and not `force`d. Waits for its requests.
    pub fn remove(&self, key: &str, force: bool) -> Result<(), BlockDeviceError> {
        let key = key.to_owned();
        self.ask(&Asked::Remove { key, force }).map(drop)
    }

    fn ask(&self, asked: &Asked) -> Result<(Answer, Option<OwnedFd>), BlockDeviceError> {
        match wire::ask(self.socket.as_fd(), asked)? {
            (
                Answer::Failed {
                    error,
                    in_use: true,
                },
                _,
            ) => Err(BlockDeviceError::InUse(error)),
            (Answer::Failed { error, .. }, _) => Err(BlockDeviceError::Failed(error)),
            done => Ok(done),
        }
    }
}
