//! What a replica is asked for when a lease is raised on it: its list of unresolved writes.

use fabric_types::Command;
use fabric_types::ids::LayerId;
use fabric_types::iov::IoVecs;
use fabric_types::message::UnresolvedEntry;
use zerocopy::{FromBytes, IntoBytes};

/// Entries of one replica's list of unresolved writes.
const LIST_ENTRIES: usize = 2048;

/// A list of unresolved writes on its way.
#[derive(Debug)]
pub(super) struct List {
    entries: Box<[UnresolvedEntry]>,
    iov: Box<libc::iovec>,
}

// SAFETY: the iovec points into memory that the list owns.
unsafe impl Send for List {}

impl List {
    pub(super) fn new() -> Self {
        let mut entries = vec![UnresolvedEntry::default(); LIST_ENTRIES].into_boxed_slice();
        let iov = Box::new(libc::iovec {
            iov_base: entries.as_mut_ptr().cast(),
            iov_len: size_of_val(&*entries),
        });
        Self { entries, iov }
    }

    pub(super) fn command(&self, layer: LayerId) -> Command {
        Command::Fence {
            layer,
            buffers: IoVecs {
                ptr: &raw const *self.iov,
                len: 1,
            },
            len: self.iov.iov_len as u32,
        }
    }

    /// What it tells, up to its end.
    pub(super) fn reported(&self) -> impl Iterator<Item = UnresolvedEntry> {
        // Read as bytes: what a peer wrote is any bytes.
        let bytes = self.entries.as_bytes();
        let entries = bytes.chunks_exact(size_of::<UnresolvedEntry>());
        let entries = entries.map_while(|bytes| UnresolvedEntry::read_from_bytes(bytes).ok());
        entries.take_while(|entry| entry.count != 0)
    }
}
