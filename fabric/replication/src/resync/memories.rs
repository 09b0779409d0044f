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

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use fabric_types::Command;
use fabric_types::ids::LayerId;
use fabric_types::iov::IoVecs;
use fabric_types::message::{FenceEntry, UnresolvedEntry};

use crate::unresolved::told::ToldWrites;

/// What the source is asked of who may write a layer, and what it has told.
#[derive(Debug, Default)]
pub(super) struct Memories {
    /// Fences that it is being asked for.
    fences: BTreeMap<LayerId, Box<ReportedFence>>,
    /// All that it remembers is asked for, once all is compared.
    questions: Option<Box<Questions>>,
    /// Unresolved writes that it has told of, and that nobody has taken.
    unresolved: Vec<(LayerId, Vec<UnresolvedEntry>)>,
}

impl Memories {
    /// Writes wait for the source's fence of a layer: what to ask. `None`: it is being asked.
    pub(super) fn ask_fence(&mut self, layer: LayerId) -> Option<Command> {
        match self.fences.entry(layer) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => Some(vacant.insert(ReportedFence::new()).command(layer)),
        }
    }

    /// The source has told its fence of a layer; `None`: nobody is fenced out.
    pub(super) fn take_fence(&mut self, layer: LayerId) -> Option<FenceEntry> {
        let told = self.fences.remove(&layer)?.entry;
        (told != FenceEntry::default()).then_some(told)
    }

    /// All is compared: the source is to be asked about these layers.
    pub(super) fn begin(&mut self, layers: Vec<LayerId>) {
        self.questions = Some(Questions::new(layers.into()));
    }

    /// The next layer, and what to ask the source.
    pub(super) fn next(&mut self) -> Option<(LayerId, Command)> {
        self.questions.as_mut()?.next()
    }

    /// The source has told what it remembers of the layer that was asked about last: its fence, if it has
    /// one.
    pub(super) fn take_answer(&mut self, layer: LayerId) -> Option<FenceEntry> {
        let questions = self.questions.as_ref().expect("the source was asked");
        self.unresolved.push((layer, questions.unresolved()));
        questions.fence()
    }

    /// Unresolved writes that the source has told of since the last call.
    pub(super) fn take_unresolved(&mut self) -> Vec<(LayerId, Vec<UnresolvedEntry>)> {
        std::mem::take(&mut self.unresolved)
    }
}

/// A fence that the source tells while writes of the layer wait for it.
#[derive(Debug)]
struct ReportedFence {
    entry: FenceEntry,
    iov: libc::iovec,
}

impl ReportedFence {
    fn new() -> Box<Self> {
        let mut told = Box::new(Self {
            entry: FenceEntry::default(),
            iov: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: size_of::<FenceEntry>(),
            },
        });
        told.iov.iov_base = (&raw mut told.entry).cast();
        told
    }

    fn command(&self, layer: LayerId) -> Command {
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

/// Layers to be asked about, and the memory for an answer.
#[derive(Debug)]
struct Questions {
    left: VecDeque<LayerId>,
    answer: ToldWrites,
}

impl Questions {
    /// About these layers.
    fn new(left: VecDeque<LayerId>) -> Box<Self> {
        let answer = ToldWrites::new();
        Box::new(Self { left, answer })
    }

    /// The next layer, and what to ask the source.
    fn next(&mut self) -> Option<(LayerId, Command)> {
        let layer = self.left.pop_front()?;
        Some((layer, self.answer.command(layer)))
    }

    /// The source's fence of the layer that was asked about last, if it has one.
    fn fence(&self) -> Option<FenceEntry> {
        let told = self.answer.fence();
        (told != FenceEntry::default()).then_some(told)
    }

    /// The unresolved writes that the source remembers of it.
    fn unresolved(&self) -> Vec<UnresolvedEntry> {
        self.answer.unresolved()
    }
}
