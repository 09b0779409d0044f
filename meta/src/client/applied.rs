//! What this node has applied, read without asking anybody: may be behind, and never waits for a leader. For
//! whoever must answer also when there is none, such as a report on that very state.

use std::collections::BTreeSet;

use super::Meta;
use crate::error::MetaError;
use crate::ids::{NodeId, VolumeId};
use crate::model::{Attachment, Event, Export, Filesystem, FilesystemAttachment, Lease, Volume};
use crate::openings::{self, OpenLayers};
use crate::state::tables::{
    ATTACHMENTS, EVENTS, EXPORTS, FILESYSTEM_ATTACHMENTS, FILESYSTEMS, LEASES, VOLUMES,
};

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
    /// What happened after the event `after` (0: from the oldest that is kept), oldest first, at most
    /// `limit`.
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

    /// Returns the layers that leases and attachments open to these nodes.
    pub fn open_layers(&self, nodes: &BTreeSet<NodeId>) -> Result<OpenLayers, MetaError> {
        let core = &self.meta.core;
        core.view(|view| openings::open_layers(view, nodes))
    }

    /// The lease of a volume, if it was ever granted.
    pub fn lease(&self, volume: VolumeId) -> Result<Option<Lease>, MetaError> {
        self.meta.core.view(|view| LEASES.get(view, &volume))
    }

    /// All NFS exports, by name.
    pub fn exports(&self) -> Result<Vec<Export>, MetaError> {
        self.meta.core.view(|view| EXPORTS.all(view))
    }

    /// All attachments of filesystems, of all nodes, oldest first.
    pub fn filesystem_attachments(&self) -> Result<Vec<FilesystemAttachment>, MetaError> {
        let core = &self.meta.core;
        core.view(|view| FILESYSTEM_ATTACHMENTS.all(view))
    }

    /// All filesystems, by name.
    pub fn filesystems(&self) -> Result<Vec<Filesystem>, MetaError> {
        self.meta.core.view(|view| FILESYSTEMS.all(view))
    }

    /// All attachments of volumes, of all nodes, oldest first.
    pub fn attachments(&self) -> Result<Vec<Attachment>, MetaError> {
        self.meta.core.view(|view| ATTACHMENTS.all(view))
    }
}
