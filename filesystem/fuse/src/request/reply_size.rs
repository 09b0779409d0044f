//! How long a reply can be, so that a request without room for it is refused before anything is done.

use super::{Operation, Request};
use crate::names::TARGET_BYTES_MAX;
use crate::wire;

/// Bytes of `fuse_out_header`.
const HEADER: usize = size_of::<wire::OutHeader>();

impl Request<'_> {
    /// Most bytes of a reply, with its header; 0 where there is none. A guest that gives less room for it is
    /// answered EIO, if the header has room, and nothing is done for it.
    pub fn reply_bytes_max(&self) -> usize {
        if self.header.has_reply() {
            HEADER + self.operation.body_bytes_max()
        } else {
            0
        }
    }
}

impl Operation<'_> {
    fn body_bytes_max(&self) -> usize {
        match self {
            Self::Init(_) => size_of::<wire::InitOut>(),
            Self::Lookup { .. }
            | Self::Symlink { .. }
            | Self::Mknod { .. }
            | Self::Mkdir { .. }
            | Self::Link { .. } => size_of::<wire::EntryOut>(),
            Self::Getattr { .. } | Self::Setattr(_) => size_of::<wire::AttrOut>(),
            Self::Statx { .. } => size_of::<wire::StatxOut>(),
            Self::Readlink => TARGET_BYTES_MAX,
            Self::Open { .. } | Self::Opendir { .. } => size_of::<wire::OpenOut>(),
            Self::Create(_) | Self::Tmpfile(_) => {
                size_of::<wire::EntryOut>() + size_of::<wire::OpenOut>()
            }
            Self::Read(read) => read.size as usize,
            Self::Readdir { size, .. } => *size as usize,
            Self::Write(_) | Self::CopyFileRange(_) => size_of::<wire::WriteOut>(),
            Self::Getxattr { size: 0, .. } | Self::Listxattr { size: 0 } => {
                size_of::<wire::GetxattrOut>()
            }
            Self::Getxattr { size, .. } | Self::Listxattr { size } => *size as usize,
            Self::Statfs => size_of::<wire::StatfsOut>(),
            Self::Lseek { .. } => size_of::<wire::LseekOut>(),
            Self::Destroy
            | Self::Interrupt { .. }
            | Self::Forget { .. }
            | Self::BatchForget(_)
            | Self::Unlink { .. }
            | Self::Rmdir { .. }
            | Self::Rename { .. }
            | Self::Flush { .. }
            | Self::Release(_)
            | Self::Fsync { .. }
            | Self::Releasedir { .. }
            | Self::Fsyncdir { .. }
            | Self::Setxattr(_)
            | Self::Removexattr { .. }
            | Self::Access { .. }
            | Self::Fallocate(_)
            | Self::Syncfs => 0,
            // Answered by an error number.
            Self::Getlk(_)
            | Self::Setlk { .. }
            | Self::Ioctl(_)
            | Self::Poll(_)
            | Self::Unsupported(_) => 0,
        }
    }
}
