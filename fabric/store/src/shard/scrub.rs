//! Reading everything that is mapped, leaf by leaf, before damage spreads or is needed.

use super::super::api::ScrubStep;
use super::map::{LeafCursor, LeafPlace, Map};
use super::{PartKind, ShardCore};

/// Where the scrubber is.
#[derive(Debug, Default)]
pub(super) struct Scrubber {
    cursor: LeafCursor,
    /// A leaf is being read.
    is_busy: bool,
}

impl Scrubber {
    /// The next leaf to be read; `None` at the end of a pass.
    fn begin_leaf(&mut self, map: &Map) -> Option<LeafPlace> {
        let place = self.cursor.next_stored(map, |_| true);
        match place {
            Some(_) => self.is_busy = true,
            None => self.cursor = LeafCursor::default(),
        }
        place
    }

    /// A leaf that is being read is still waited for.
    pub(super) fn restart(&mut self) {
        self.cursor = LeafCursor::default();
    }

    pub(super) fn end_leaf(&mut self) {
        self.is_busy = false;
    }
}

impl ShardCore {
    pub(super) fn step_scrub(&mut self) -> ScrubStep {
        if self.scrubber.is_busy || self.parts.free() == 0 {
            return ScrubStep::Busy;
        }
        let Some(place) = self.scrubber.begin_leaf(&self.res.map) else {
            return ScrubStep::PassDone;
        };
        self.start_unordered(PartKind::Scrub, &place);
        ScrubStep::Reading
    }
}
