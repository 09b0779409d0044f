//! What of a guest request has not been sent.

use fabric_types::Epoch;

use super::link::NONE;
use crate::unflushed::FlushMark;

/// What of a request has not been sent, by its kind.
#[derive(Clone, Copy)]
pub(super) enum Unsent {
    /// Of a read or write: the first of its pieces that are cut and not sent, or `NONE`. Each names the next.
    Pieces(u32),
    /// Of a discard or write-zeroes: bytes of the volume that are not cut into pieces.
    Bytes(Rest),
    /// Of a flush: groups that it has yet to go to.
    Groups(Flush),
}

/// A range that is gone through.
#[derive(Clone, Copy)]
pub(super) struct Rest {
    pub(super) at: u64,
    pub(super) end: u64,
}

impl Unsent {
    /// The first piece that is cut and not sent.
    #[inline]
    pub(super) fn first_piece(&self) -> Option<u32> {
        match *self {
            Self::Pieces(piece) => (piece != NONE).then_some(piece),
            Self::Bytes(_) | Self::Groups(_) => None,
        }
    }

    /// Where the next piece is to be cut, if one is.
    #[inline]
    pub(super) fn next_cut(&self) -> Option<u64> {
        let rest = match self {
            Self::Pieces(_) => return None,
            Self::Bytes(rest) => rest,
            Self::Groups(flush) => &flush.rest,
        };
        (rest.at < rest.end).then_some(rest.at)
    }

    /// A piece was cut, and the next one begins here.
    #[inline]
    pub(super) fn cut_to(&mut self, next: u64) {
        if let Some(rest) = self.rest_mut() {
            rest.at = next;
        }
    }

    /// What is not cut yet is not tried.
    pub(super) fn stop_cutting(&mut self) {
        if let Some(rest) = self.rest_mut() {
            rest.at = rest.end;
        }
    }

    #[inline]
    fn rest_mut(&mut self) -> Option<&mut Rest> {
        match self {
            Self::Pieces(_) => None,
            Self::Bytes(rest) => Some(rest),
            Self::Groups(flush) => Some(&mut flush.rest),
        }
    }
}

/// Groups that a flush is sent to.
#[derive(Clone, Copy)]
enum Scope {
    /// To the first of those on the same nodes.
    Nodes {
        /// Maps that the client had taken up when it began.
        maps: u64,
        /// Some replica did not do it.
        failed_somewhere: bool,
    },
    /// To each.
    EachGroup,
}

/// A flush under way.
#[derive(Clone, Copy)]
pub(super) struct Flush {
    /// Groups that it has not been sent to.
    pub(super) rest: Rest,
    scope: Scope,
    mark: FlushMark,
}

impl Flush {
    /// Returns a flush that is sent once per node; `maps` counts the maps that this thread has applied.
    pub(super) fn to_nodes(rest: Rest, maps: u64, mark: FlushMark) -> Self {
        let scope = Scope::Nodes {
            maps,
            failed_somewhere: false,
        };
        Self { rest, scope, mark }
    }

    /// Repeats the flush for each group, beginning with `first`.
    pub(super) fn begin_with_each_group(&mut self, first: u64) {
        self.scope = Scope::EachGroup;
        self.rest.at = first;
    }

    /// Mark that decides at the end which writes the flush covered.
    pub(super) fn mark(&self) -> FlushMark {
        self.mark
    }

    /// Some replica did not do it.
    pub(super) fn note_failed(&mut self) {
        if let Scope::Nodes {
            failed_somewhere, ..
        } = &mut self.scope
        {
            *failed_somewhere = true;
        }
    }

    /// Returns true if the flush must be repeated for each group. `maps` counts the maps that this thread has
    /// applied.
    pub(super) fn is_uncertain(&self, maps: u64) -> bool {
        match self.scope {
            Scope::Nodes {
                maps: before,
                failed_somewhere,
            } => before != maps || failed_somewhere,
            Scope::EachGroup => false,
        }
    }

    /// Returns the group after the current one that the flush is sent to. `flushes` has the epoch of
    /// each group that flushes are sent to.
    pub(super) fn next(&self, flushes: &[Option<Epoch>]) -> u64 {
        let next = self.rest.at + 1;
        if let Scope::EachGroup = self.scope {
            return next;
        }
        let groups = &flushes[next as usize..self.rest.end as usize];
        let skipped = groups.iter().take_while(|flushes| flushes.is_none());
        next + skipped.count() as u64
    }
}
