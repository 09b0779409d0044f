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
    /// Behind the table page that was compared last in this pass.
    table_page: u32,
}

impl Scrubber {
    /// The next leaf to be read; `None` at the end of a pass.
    fn begin_leaf(&mut self, map: &Map) -> Option<LeafPlace> {
        let place = self.cursor.next_stored(map, |_| true);
        match place {
            Some(_) => self.is_busy = true,
            None => *self = Self::default(),
        }
        place
    }

    /// Whether this pass comes to the table page only now.
    pub(super) fn begins_table_page(&mut self, page: u32) -> bool {
        let is_new = page >= self.table_page;
        self.table_page = self.table_page.max(page + 1);
        is_new
    }

    /// A leaf that is being read is still waited for.
    pub(super) fn restart(&mut self) {
        *self = Self {
            is_busy: self.is_busy,
            ..Self::default()
        };
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
        self.verify_pages(&place);
        self.start_unordered(PartKind::Scrub, &place);
        ScrubStep::Reading
    }
}
