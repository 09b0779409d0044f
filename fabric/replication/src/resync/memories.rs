//! The source's memory of who may write a layer and of unresolved writes, which a replica that was compared
//! with it takes over.
//!
//! A layer may not have been written since this replica came back, and may have been taken over before: no
//! request has asked for its fence, and a writer of the lease before would find that it is not fenced here
//! alone.
//!
//! What the source has, its unresolved writes included, the replica has after the comparison. Should the
//! source then leave, and the writer die, nobody else could tell a takeover of those writes, and replicas in
//! sync would differ.

use std::collections::VecDeque;

use fabric_types::Command;
use fabric_types::ids::LayerId;
use fabric_types::iov::IoVecs;
use fabric_types::message::{FenceEntry, UnresolvedEntry};
use zerocopy::{FromBytes, IntoBytes};

/// Entries that a source tells of a layer one by one.
const ENTRIES: usize = 1024;

/// A fence that the source tells while writes of the layer wait for it.
#[derive(Debug)]
pub(super) struct ReportedFence {
    pub(super) asked: bool,
    pub(super) entry: FenceEntry,
    iov: libc::iovec,
}

impl ReportedFence {
    pub(super) fn new() -> Box<Self> {
        let mut told = Box::new(Self {
            asked: false,
            entry: FenceEntry::default(),
            iov: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: size_of::<FenceEntry>(),
            },
        });
        told.iov.iov_base = (&raw mut told.entry).cast();
        told
    }

    pub(super) fn command(&self, layer: LayerId) -> Command {
        Command::TellFence {
            layer,
            buffers: IoVecs {
                ptr: &raw const self.iov,
                len: 1,
            },
            len: size_of::<FenceEntry>() as u32,
        }
    }
}

/// What the source answers.
#[derive(Debug, FromBytes, IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)]
#[repr(C)]
struct Answer {
    fence: FenceEntry,
    entries: [UnresolvedEntry; ENTRIES],
}

/// Layers to be asked about, and the memory for an answer.
#[derive(Debug)]
pub(super) struct Memories {
    left: VecDeque<LayerId>,
    answer: Box<Answer>,
    iov: libc::iovec,
}

impl Memories {
    /// Of these layers.
    pub(super) fn new(layers: impl Iterator<Item = LayerId>) -> Box<Self> {
        let mut memories = Box::new(Self {
            left: layers.collect(),
            answer: Box::new(Answer {
                fence: FenceEntry::default(),
                entries: [UnresolvedEntry::default(); ENTRIES],
            }),
            iov: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: size_of::<Answer>(),
            },
        });
        memories.iov.iov_base = (&raw mut *memories.answer).cast();
        memories
    }

    /// The next layer, and what to ask the source.
    pub(super) fn next(&mut self) -> Option<(LayerId, Command)> {
        let layer = self.left.pop_front()?;
        let command = Command::TellFence {
            layer,
            buffers: IoVecs {
                ptr: &raw const self.iov,
                len: 1,
            },
            len: size_of::<Answer>() as u32,
        };
        Some((layer, command))
    }

    /// The source's fence of the layer that was asked about last, if it has one.
    pub(super) fn fence(&self) -> Option<FenceEntry> {
        let told = self.answer.fence;
        (told != FenceEntry::default()).then_some(told)
    }

    /// The unresolved writes that the source remembers of it.
    pub(super) fn unresolved(&self) -> Vec<UnresolvedEntry> {
        let entries = self.answer.entries.iter();
        entries
            .take_while(|entry| entry.count > 0)
            .copied()
            .collect()
    }
}
