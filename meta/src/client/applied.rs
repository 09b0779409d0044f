//! What this node has applied, read without asking anybody: may be behind, and never waits for a leader. For whoever must
//! answer also when there is none, such as a report on that very state.

use super::Meta;
use crate::error::MetaError;
use crate::model::{Attachment, Event, Volume};
use crate::state::tables::{ATTACHMENTS, EVENTS, VOLUMES};

/// See [`Meta::applied`].
pub struct Applied<'a> {
    meta: &'a Meta,
}

impl Meta {
    /// The records as this node has applied them.
    #[must_use]
    pub fn applied(&self) -> Applied<'_> {
        Applied { meta: self }
    }
}

impl Applied<'_> {
    /// What happened after the event `after` (0: from the oldest that is kept), oldest first, at most `limit`.
    ///
    /// # Errors
    /// The records cannot be read, or the service has stopped; so for every call.
    pub fn events(&self, after: u64, limit: usize) -> Result<Vec<Event>, MetaError> {
        let core = &self.meta.core;
        core.view(|view| EVENTS.from(view, &after.saturating_add(1), limit))
    }

    /// All volumes, by name, also those being deleted.
    pub fn volumes(&self) -> Result<Vec<Volume>, MetaError> {
        self.meta.core.view(|view| VOLUMES.all(view))
    }

    /// All attachments of all nodes, oldest first.
    pub fn attachments(&self) -> Result<Vec<Attachment>, MetaError> {
        self.meta.core.view(|view| ATTACHMENTS.all(view))
    }
}
