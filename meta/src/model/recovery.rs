//! How metadata go on after a disaster.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::{DeviceId, Epoch, Generation, Incarnation, LayerId, UnixMillis, VolumeId};

use super::GroupId;

/// Metadata went on without what a majority of the metadata nodes had, or from a backup. What was decided in
/// between, nobody knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// Names what follows. Nodes of another history of the same cluster are not talked to.
    pub history: Uuid,
    /// When it began.
    pub at: UnixMillis,
    /// When the backup was taken that the metadata come from, if they come from one.
    pub backup_at: Option<UnixMillis>,
    /// Which replicas lack nothing is not known yet: groups with data have none in sync, and their I/O waits.
    pub chooses: bool,
    /// Volumes with numbers in these ranges (of each, the second number is the first beyond it) may have been
    /// made meanwhile: what devices hold of them is kept, until an operator gives it up.
    pub unknown: Vec<(VolumeId, VolumeId)>,
}

impl Recovery {
    /// Whether a layer is of a volume that may have been made meanwhile.
    #[must_use]
    pub fn keeps(&self, layer: LayerId) -> bool {
        let family = crate::ids::family_of(layer);
        let mut ranges = self.unknown.iter();
        ranges.any(|(first, end)| (*first..*end).contains(&family))
    }
}

/// What a device says itself of the groups and layers that it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEvidence {
    /// The device.
    pub device: DeviceId,
    /// The start of its node that looked.
    pub incarnation: Incarnation,
    /// The newest epoch that it knows.
    pub epoch: Epoch,
    /// The epoch at which it was in sync last, of each group in which it ever was.
    pub in_sync: Vec<(GroupId, Epoch)>,
    /// Layers with data or a fence on the device, each with the newest lease generation that it knows.
    pub layers: Vec<(LayerId, Generation)>,
}
