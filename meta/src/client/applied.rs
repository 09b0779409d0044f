//! What this node has applied, read without asking anybody: may be behind, and never waits for a leader. For
//! whoever must answer also when there is none, such as a report on that very state.

use std::collections::{BTreeMap, BTreeSet};

use namespace::FilesystemId;

use super::Meta;
use crate::error::MetaError;
use crate::ids::{LayerId, NodeId, VolumeId};
use crate::model::{
    Attachment, AttachmentTarget, Event, Export, Filesystem, FilesystemAttachment, Lease, Volume,
};
use crate::state::tables::{
    ATTACHMENTS, EVENTS, EXPORTS, FILESYSTEM_ATTACHMENTS, FILESYSTEMS, LEASES, VOLUMES,
};

/// The layers that are open to each node.
pub type OpenLayers = BTreeMap<NodeId, BTreeSet<LayerId>>;

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

    /// The layers that leases and attachments open for these nodes: those of the volumes that they are of,
    /// and those of all segments of a filesystem that is attached. Who writes one needs its lease besides.
    pub fn open_layers(&self, nodes: &BTreeSet<NodeId>) -> Result<OpenLayers, MetaError> {
        self.meta.core.view(|view| {
            let mut opened: BTreeMap<VolumeId, BTreeSet<NodeId>> = BTreeMap::new();
            let leases = LEASES.all(view)?.into_iter();
            let leases = leases.filter_map(|lease| Some((lease.volume, lease.holder?)));
            let attachments = ATTACHMENTS.all(view)?.into_iter().map(|attachment| {
                let AttachmentTarget::Volume { id, .. } = attachment.target;
                (id, attachment.node)
            });
            for (volume, node) in leases.chain(attachments) {
                if nodes.contains(&node) {
                    opened.entry(volume).or_default().insert(node);
                }
            }
            let mut mounted: BTreeMap<FilesystemId, BTreeSet<NodeId>> = BTreeMap::new();
            for mount in FILESYSTEM_ATTACHMENTS.all(view)? {
                if nodes.contains(&mount.node) {
                    let on = mounted.entry(mount.filesystem).or_default();
                    on.insert(mount.node);
                }
            }
            let mut layers = OpenLayers::new();
            for volume in VOLUMES.all(view)? {
                let mut to = opened.remove(&volume.id).unwrap_or_default();
                // Any file of a filesystem may lie in any of its segments.
                let of = volume.segment.and_then(|of| mounted.get(&of.filesystem));
                to.extend(of.into_iter().flatten());
                for node in to {
                    let open = layers.entry(node).or_default();
                    open.extend(volume.layers.iter().copied());
                }
            }
            Ok(layers)
        })
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
