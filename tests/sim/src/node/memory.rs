//! The memory that a command names, wherever it is.

use fabric::proto::Command;
use fabric::store::device::IoVecs;

/// What a command does with its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It has none.
    None,
    /// It is read.
    Source(usize),
    /// It is filled.
    Destination(usize),
}

/// What a command does with its memory.
pub fn usage(command: &Command) -> Use {
    match *command {
        Command::Write { len, .. } | Command::Restore { len, .. } => Use::Source(len as usize),
        Command::Read { len, .. }
        | Command::Inspect { len, .. }
        | Command::ListChunks { len, .. }
        | Command::Fence { len, .. }
        | Command::TellFence { len, .. } => Use::Destination(len as usize),
        Command::Zero { .. } | Command::Flush { .. } | Command::Join => Use::None,
    }
}

/// The command's list of buffers.
pub fn buffers_of(command: &mut Command) -> Option<&mut IoVecs> {
    match command {
        Command::Write { buffers, .. }
        | Command::Restore { buffers, .. }
        | Command::Read { buffers, .. }
        | Command::Inspect { buffers, .. }
        | Command::ListChunks { buffers, .. }
        | Command::Fence { buffers, .. }
        | Command::TellFence { buffers, .. } => Some(buffers),
        Command::Zero { .. } | Command::Flush { .. } | Command::Join => None,
    }
}

fn list_of(iovecs: &IoVecs) -> &[libc::iovec] {
    // SAFETY: whoever made the command keeps the list until it is answered, and the caller has not answered it.
    unsafe { std::slice::from_raw_parts(iovecs.ptr, iovecs.len as usize) }
}

/// The data that a command stores, as they are now.
pub fn pick_up(mut command: Command) -> Box<[u8]> {
    let Use::Source(len) = usage(&command) else {
        return Box::default();
    };
    let mut bytes = Vec::with_capacity(len);
    if let Some(buffers) = buffers_of(&mut command).filter(|_| len > 0) {
        for part in list_of(buffers) {
            // SAFETY: the memory stays until the command is answered.
            let part =
                unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) };
            bytes.extend_from_slice(part);
        }
    }
    bytes.into()
}

/// Puts what a command found where it is wanted.
pub fn put_down(mut command: Command, data: &[u8]) {
    let Use::Destination(_) = usage(&command) else {
        return;
    };
    let Some(buffers) = buffers_of(&mut command) else {
        return;
    };
    let mut rest = data;
    for part in list_of(buffers) {
        let (now, later) = rest.split_at(part.iov_len);
        // SAFETY: the memory stays until the command is answered, and nobody else looks at it meanwhile.
        let to =
            unsafe { std::slice::from_raw_parts_mut(part.iov_base.cast::<u8>(), part.iov_len) };
        to.copy_from_slice(now);
        rest = later;
    }
}
