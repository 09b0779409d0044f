//! Open files and directories of one mount.

use std::collections::BTreeMap;
use std::sync::Mutex;

use fuse_codec::{AccessMode, Errno, Handle};
use namespace::Ino;

use crate::buffer::{Buffer, ErrorMark};
use crate::open_inodes::{OpenGuard, OpenKind};
use crate::sync::lock;

/// Handles of a mount. A further open fails with ENFILE.
const HANDLES_MAX: usize = 1 << 20;

/// An open file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenFile {
    pub(crate) ino: Ino,
    pub(crate) kind: OpenKind,
    pub(crate) access: AccessMode,
}

/// The handles of a mount. Their numbers are counted and never used again, so that none of a closed file, or
/// of a former session of the guest, names another one.
#[derive(Default)]
pub(crate) struct Handles(Mutex<State>);

#[derive(Default)]
struct State {
    open: BTreeMap<Handle, Open>,
    last: u64,
    /// Sessions of the guest that have ended.
    sessions: u64,
}

struct Open {
    guard: OpenGuard,
    access: AccessMode,
    /// Failures of writing back that it was told of.
    told: ErrorMark,
}

/// A session of the guest, from mount to unmount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct GuestSession(pub(crate) u64);

impl Handles {
    /// The session of the guest in which requests come now.
    pub(crate) fn session(&self) -> GuestSession {
        GuestSession(lock(&self.0).sessions)
    }

    /// Opens. Fails if the guest unmounted meanwhile: nobody would close the handle.
    pub(crate) fn insert(
        &self,
        session: GuestSession,
        guard: OpenGuard,
        access: AccessMode,
        told: ErrorMark,
    ) -> Result<Handle, Errno> {
        let mut state = lock(&self.0);
        if state.sessions != session.0 {
            return Err(Errno::EIO);
        }
        if state.open.len() >= HANDLES_MAX {
            return Err(Errno::ENFILE);
        }
        state.last += 1;
        let handle = Handle(state.last);
        let open = Open {
            guard: guard.into_handle(),
            access,
            told,
        };
        state.open.insert(handle, open);
        Ok(handle)
    }

    /// Whether writing back what was written to a file has failed, told to each handle once.
    pub(crate) fn check_written(&self, handle: Handle, buffer: &Buffer) -> Result<(), Errno> {
        match lock(&self.0).open.get_mut(&handle) {
            Some(open) => buffer.check(open.guard.ino(), &mut open.told),
            None => Ok(()),
        }
    }

    /// What a handle of an inode opened.
    pub(crate) fn get(&self, handle: Handle, ino: Ino) -> Result<OpenFile, Errno> {
        let state = lock(&self.0);
        match state.open.get(&handle) {
            Some(open) if open.guard.ino() == ino => Ok(OpenFile {
                ino,
                kind: open.guard.kind(),
                access: open.access,
            }),
            _ => Err(Errno::EBADF),
        }
    }

    /// Closes a handle of an inode.
    pub(crate) fn remove(&self, handle: Handle, ino: Ino) -> Result<OpenGuard, Errno> {
        self.get(handle, ino)?;
        let removed = lock(&self.0).open.remove(&handle);
        // It may have been closed by another request just then.
        removed.map(|open| open.guard).ok_or(Errno::EBADF)
    }

    /// Closes all files because the guest has unmounted. Returns the session of its next mount.
    pub(crate) fn end_session(&self) -> GuestSession {
        let (next, closed) = {
            let mut state = lock(&self.0);
            state.sessions += 1;
            (
                GuestSession(state.sessions),
                std::mem::take(&mut state.open),
            )
        };
        drop(closed);
        next
    }
}
