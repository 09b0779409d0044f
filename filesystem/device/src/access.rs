//! What the device answers itself, by looking at an operation alone.

use fuse_codec::{AccessMode, Agreed, Errno, OpenFlags, Operation};

/// The error that an operation gets without anybody being asked.
#[inline]
pub(crate) fn refusal(
    operation: &Operation<'_>,
    read_only: bool,
    agreed: &Agreed,
) -> Option<Errno> {
    match operation {
        // Locks are the guest's own and were not agreed.
        Operation::Getlk(_)
        | Operation::Setlk { .. }
        | Operation::Ioctl(_)
        | Operation::Poll(_)
        | Operation::Unsupported(_) => Some(Errno::ENOSYS),
        _ if !read_only => None,
        _ if changes(operation) => Some(Errno::EROFS),
        // The kernel opens by itself from now on.
        Operation::Open { .. } if agreed.zero_message_open() => Some(Errno::ENOSYS),
        Operation::Opendir { .. } if agreed.zero_message_opendir() => Some(Errno::ENOSYS),
        // Nothing was written that a close could tell of; the kernel sends no more of them.
        Operation::Flush { .. } => Some(Errno::ENOSYS),
        _ => None,
    }
}

/// Whether an operation may change the filesystem.
fn changes(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Open { flags, .. } => opens_for_change(*flags),
        Operation::Setattr(_)
        | Operation::Symlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Unlink { .. }
        | Operation::Rmdir { .. }
        | Operation::Rename { .. }
        | Operation::Link { .. }
        | Operation::Create(_)
        | Operation::Tmpfile(_)
        | Operation::Write(_)
        | Operation::Setxattr(_)
        | Operation::Removexattr { .. }
        | Operation::Fallocate(_)
        | Operation::CopyFileRange(_) => true,
        _ => false,
    }
}

fn opens_for_change(flags: OpenFlags) -> bool {
    flags.access() != AccessMode::Read || flags.truncate()
}
