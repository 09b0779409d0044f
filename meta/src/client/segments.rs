//! Volumes of filesystems' segments.

use namespace::{FilesystemId, SegmentId};
use uuid::Uuid;

use super::{Meta, a_volume};
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::UnixMillis;
use crate::model::{Name, SegmentOf, Volume};
use crate::state::tables::VOLUMES;

impl Meta {
    /// Makes the hidden volume of a segment, in its filesystem's pool. Repeating it answers with the volume
    /// that is there. Whoever writes it takes its lease by its name, as for other volumes.
    pub async fn create_segment_volume(
        &self,
        filesystem: FilesystemId,
        segment: SegmentId,
        size_bytes: u64,
    ) -> Result<Volume, MetaError> {
        let create = Command::CreateSegmentVolume {
            filesystem,
            segment,
            uuid: Uuid::new_v4(),
            size_bytes,
            at: UnixMillis::now(),
        };
        a_volume(self.propose(create).await?)
    }

    /// The volume of a segment; nothing if there is none, or none any more. Asks nobody where this node knows
    /// it already: it may then have begun to be deleted since.
    pub async fn segment_volume(
        &self,
        filesystem: FilesystemId,
        segment: SegmentId,
    ) -> Result<Option<Volume>, MetaError> {
        let name = Name::of_segment(SegmentOf {
            filesystem,
            segment,
        });
        match self.core.view(|view| VOLUMES.get(view, &name))? {
            Some(volume) => Ok(Some(volume)),
            None => self.read(|view| VOLUMES.get(view, &name)).await,
        }
    }

    /// Begins to delete the volume of a segment: nobody writes it from now on. What drops the data of deleted
    /// volumes does the rest. Repeating it is harmless.
    pub async fn delete_segment_volume(
        &self,
        filesystem: FilesystemId,
        segment: SegmentId,
    ) -> Result<(), MetaError> {
        let delete = Command::DeleteSegmentVolume {
            filesystem,
            segment,
        };
        self.propose(delete).await.map(drop)
    }
}
