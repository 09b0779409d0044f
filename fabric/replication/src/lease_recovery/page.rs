//! The page whose blocks a takeover is making agree, one after another: everybody is asked what the blocks
//! are, the one that [decides](super::winner) is read, and the others get what it has.

use std::ops::Range;

use fabric_types::block::Holds;
use fabric_types::membership::{Members, REPLICAS_MAX, ReplicaSet, ReplicaState};
use fabric_types::{Command, Refusal};

use super::{BLOCKS, LOST_MAX, winner};
use crate::block_copy::{BlockCopy, Place};
use crate::groups::LeafKey;

/// Where the recovery of a page is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Current {
    /// Index of the page's set.
    set: usize,
    /// Blocks within the page.
    first: usize,
    pub(super) end: usize,
    pub(super) at: usize,
    pub(super) winner: usize,
    /// In-sync members that cannot read the block at `at`.
    pub(super) unreadable: Members,
    /// Of one at least it is the device that says so, and no checksum.
    by_device: bool,
}

impl Current {
    /// The first block of a page, which these members cannot read.
    #[cfg(test)]
    pub(super) fn of_block(unreadable: Members) -> Self {
        Self {
            set: 0,
            first: 0,
            end: 1,
            at: 0,
            winner: 0,
            unreadable,
            by_device: false,
        }
    }

    /// Nothing is left to do about the block.
    pub(super) fn pass(&mut self) {
        self.at += 1;
        self.begin_block();
    }

    fn begin_block(&mut self) {
        (self.unreadable, self.by_device) = (Members::NONE, false);
    }
}

/// The next step for a page, and the member that takes it.
#[derive(Debug)]
pub(super) enum Next {
    /// The block is read from the one that decides.
    Read(usize, Command),
    /// The others get it.
    Restore(Vec<(usize, Command)>),
    /// None in sync knows the block, and these do: it cannot be decided while they take writes.
    Undecided(Vec<usize>),
    /// The page's blocks agree.
    Over,
}

/// See the module.
#[derive(Debug)]
pub(super) struct PageRecovery {
    /// `None` between pages.
    current: Option<Current>,
    /// A replica does not have any more what it told, or not what it was to have.
    has_changed: bool,
    /// What each member has, and the block that is copied.
    copy: BlockCopy<REPLICAS_MAX, BLOCKS, 1>,
    recovered: u64,
    /// Of these, in all attempts: those whose loss was passed on, see [`LOST_MAX`].
    lost_by_device: u32,
}

impl PageRecovery {
    pub(super) fn new() -> Self {
        Self {
            current: None,
            has_changed: false,
            copy: BlockCopy::new(Place::NONE),
            recovered: 0,
            lost_by_device: 0,
        }
    }

    /// Blocks that were made to agree.
    pub(super) fn recovered(&self) -> u64 {
        self.recovered
    }

    /// The page is given up, with no answer outstanding.
    pub(super) fn give_up(&mut self) {
        self.current = None;
        self.has_changed = false;
    }

    /// Takes a page on: these blocks of it, of this set. It is to be [inspected](Self::inspect).
    pub(super) fn begin(&mut self, set: usize, leaf: LeafKey, blocks: Range<usize>) {
        self.copy.go_to(Place::of(leaf));
        self.current = Some(Current {
            set,
            first: blocks.start,
            end: blocks.end,
            at: blocks.start,
            winner: 0,
            unreadable: Members::NONE,
            by_device: false,
        });
    }

    /// The set that the page belongs to.
    pub(super) fn set_in<'a>(&self, sets: &'a [ReplicaSet]) -> &'a ReplicaSet {
        &sets[self.current().set]
    }

    /// An answer says that a replica does not have any more what it told, or not what it was to have.
    pub(super) fn note_changed(&mut self) {
        self.has_changed = true;
    }

    /// Whether an answer said so since the page was inspected last.
    pub(super) fn has_changed(&self) -> bool {
        self.has_changed
    }

    fn current(&self) -> Current {
        self.current.expect("a page is being recovered")
    }

    /// Asks everybody who takes writes what the blocks are.
    pub(super) fn inspect(&mut self, sets: &[ReplicaSet]) -> Vec<(usize, Command)> {
        self.has_changed = false;
        let mut current = self.current();
        current.at = current.first;
        current.begin_block();
        self.current = Some(current);
        let members = sets[current.set].receiving().iter();
        let blocks = current.first..current.end;
        members
            .map(|member| (member, self.copy.inspect(member, blocks.clone())))
            .collect()
    }

    /// Goes to the next block on which they do not agree.
    pub(super) fn next(&mut self, sets: &[ReplicaSet]) -> Next {
        let current = self.current();
        let set = &sets[current.set];
        let Some(next) = winner::next(current, set, self.copy.stamps()) else {
            self.current = None;
            return Next::Over;
        };
        let (at, winner) = (next.at, next.winner);
        self.current = Some(next);
        let knowing = winner::knows_more(at, set, self.copy.stamps());
        if !knowing.is_empty() {
            return Next::Undecided(knowing);
        }
        let stamp = self.copy.stamps()[winner][at];
        if stamp.holds() != Holds::Data || winner::is_lost(&next, set) {
            return Next::Restore(self.restore(sets));
        }
        Next::Read(winner, self.copy.read(at..at + 1))
    }

    /// A member cannot read the block; false if that is not to be believed.
    pub(super) fn do_without(
        &mut self,
        member: usize,
        refusal: Refusal,
        sets: &[ReplicaSet],
    ) -> bool {
        let mut current = self.current();
        current.unreadable.insert(member);
        current.by_device |= refusal != Refusal::Corrupt;
        let is_lost = winner::is_lost(&current, &sets[current.set]);
        if is_lost && current.by_device && self.lost_by_device >= LOST_MAX {
            return false;
        }
        self.current = Some(current);
        true
    }

    /// Makes the others' block what the winner's is.
    pub(super) fn restore(&mut self, sets: &[ReplicaSet]) -> Vec<(usize, Command)> {
        let current = self.current();
        let (set, at) = (&sets[current.set], current.at);
        let stamp = self.copy.stamps()[current.winner][at];
        let is_lost = winner::is_lost(&current, set);
        let has_data = stamp.holds() == Holds::Data && !is_lost;
        let mut commands = Vec::new();
        for member in set.receiving().iter() {
            let theirs = self.copy.stamps()[member][at];
            // One that is being compared is told in any case, and then knows the block for one that changes
            // in its receiving period. Else, were it compared with one that has yet to get the block, it
            // would give it up for what that one has.
            let in_sync = set.members()[member].state == ReplicaState::InSync;
            if (in_sync || is_lost) && theirs.agrees_with(&stamp) {
                continue;
            }
            let nth = has_data.then_some(0);
            let command = self.copy.restore(at, [theirs, stamp], nth);
            commands.push((member, command));
        }
        assert!(!commands.is_empty(), "somebody disagreed");
        commands
    }

    /// All replicas have the block, or know that its data are lost.
    pub(super) fn end_block(&mut self, sets: &[ReplicaSet]) {
        self.recovered += 1;
        let mut current = self.current();
        if winner::is_lost(&current, &sets[current.set]) {
            tracing::error!(
                block = self.copy.block(current.at),
                chunk = ?self.copy.chunk(),
                "no replica in sync can read the block: its data are lost"
            );
            self.lost_by_device += u32::from(current.by_device);
        }
        current.pass();
        self.current = Some(current);
    }
}
