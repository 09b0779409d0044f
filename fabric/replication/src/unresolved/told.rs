//! Asking another replica what it remembers of a layer, and the memory for its answer.

use fabric_types::Command;
use fabric_types::ids::LayerId;
use fabric_types::iov::IoVecs;
use fabric_types::message::{FenceEntry, UnresolvedEntry};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Entries that a replica tells of a layer one by one.
const ENTRIES: usize = 1024;

/// What the replica answers.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Answer {
    fence: FenceEntry,
    entries: [UnresolvedEntry; ENTRIES],
}

/// Memory that a request in flight points into; it stays where it is.
#[derive(Debug)]
struct Memory {
    answer: Answer,
    iov: libc::iovec,
}

/// See the module. While a command is in flight its memory is in use.
#[derive(Debug)]
pub(crate) struct ToldWrites {
    memory: Box<Memory>,
}

// SAFETY: the iovec points into memory that the machine owns, in the same box.
unsafe impl Send for ToldWrites {}

impl ToldWrites {
    /// Nothing is told yet.
    pub(crate) fn new() -> Self {
        let mut memory = Box::new(Memory {
            answer: Answer {
                fence: FenceEntry::default(),
                entries: [UnresolvedEntry::default(); ENTRIES],
            },
            iov: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: size_of::<Answer>(),
            },
        });
        memory.iov.iov_base = (&raw mut memory.answer).cast();
        Self { memory }
    }

    /// What to ask.
    pub(crate) fn command(&self, layer: LayerId) -> Command {
        Command::TellFence {
            layer,
            buffers: IoVecs {
                ptr: &raw const self.memory.iov,
                len: 1,
            },
            len: size_of::<Answer>() as u32,
        }
    }

    /// The fence that the replica has.
    pub(crate) fn fence(&self) -> FenceEntry {
        self.memory.answer.fence
    }

    /// The unresolved writes that it remembers.
    pub(crate) fn unresolved(&self) -> Vec<UnresolvedEntry> {
        let entries = self.memory.answer.entries.iter();
        entries
            .take_while(|entry| entry.count > 0)
            .copied()
            .collect()
    }
}
