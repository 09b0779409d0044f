//! Volumes that are open on this node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use meta::VolumeId;
use storage::Handle;
use tokio::sync::MutexGuard;

use crate::volumes::Volumes;

/// Number of checks of a closing node for copies that have ended, and the pause between them: five seconds in
/// all.
const COPIES_LOOKS_MAX: usize = 100;
const COPIES_PAUSE: Duration = Duration::from_millis(50);

/// Attachments, as far as volumes depend on them. Called with the lock of open volumes held.
pub trait VolumeUsers: Send + Sync {
    /// Notifies a volume's guests of its new size.
    fn resized(&self, volume: VolumeId);

    /// Socket of a guest that is connected to a volume and may write it.
    fn writer(&self, volume: VolumeId) -> Option<String>;
}

/// Volumes that are open now.
#[derive(Default)]
pub struct OpenVolumes {
    /// Volumes that are attached or being copied.
    pub volumes: BTreeMap<VolumeId, OpenVolume>,
    /// Volumes that an import is going to replace.
    pub(crate) replaced: BTreeSet<VolumeId>,
}

/// A volume that is attached or being copied.
pub struct OpenVolume {
    /// Handle that data threads work with.
    pub handle: Handle,
    /// Attachments and copies that use it.
    pub users: usize,
    /// Copies among them that were given up, and wait for their last request to end.
    given_up: usize,
    /// The lease is another node's, for the volume's attachment moves: requests wait.
    pub waits_for_lease: bool,
}

impl Volumes {
    /// Locks the open volumes. A change of volumes or attachments holds the lock from the first check to the
    /// last step.
    pub async fn lock(&self) -> MutexGuard<'_, OpenVolumes> {
        self.open.lock().await
    }

    /// Sets who uses volumes; once.
    pub fn set_users(&self, users: Weak<dyn VolumeUsers>) {
        assert!(self.users.set(users).is_ok(), "users are set once");
    }

    pub(crate) fn users(&self) -> Option<Arc<dyn VolumeUsers>> {
        self.users.get().and_then(Weak::upgrade)
    }

    /// Waits until imports and exports have ended, which they do when their streams are cut.
    pub async fn wait_for_copies(&self) {
        for _ in 0..COPIES_LOOKS_MAX {
            if self.open.lock().await.volumes.is_empty() {
                return;
            }
            tokio::time::sleep(COPIES_PAUSE).await;
        }
        tracing::warn!(
            "gave up waiting for the end of a copy; the store recovers at the next start"
        );
    }

    /// Opens a volume for one more user, with a new lease if it is the first.
    pub async fn open_volume(&self, volume: &meta::Volume) -> Result<Handle> {
        let mut open = self.open.lock().await;
        self.open_in(&mut open, volume).await
    }

    /// Same, for a caller that holds the lock.
    pub async fn open_in(&self, open: &mut OpenVolumes, volume: &meta::Volume) -> Result<Handle> {
        if let Some(one) = open.volumes.get_mut(&volume.id) {
            if self.leases.lost().contains(&volume.id) {
                return Err(Failure::new(
                    Kind::Conflict,
                    format!(
                        "volume '{}' is being closed here: its lease is another node's",
                        volume.name
                    ),
                    "repeat this in a moment",
                ));
            }
            if one.waits_for_lease {
                return Err(migrating(&volume.name));
            }
            if one.is_given_up() {
                return Err(Failure::new(
                    Kind::Conflict,
                    format!("an export of volume '{}' is being given up", volume.name),
                    "repeat this in a moment",
                ));
            }
            one.users += 1;
            return Ok(one.handle.clone());
        }
        let handle = self.open_leased(volume).await?;
        let one = OpenVolume {
            handle: handle.clone(),
            users: 1,
            given_up: 0,
            waits_for_lease: false,
        };
        open.volumes.insert(volume.id, one);
        Ok(handle)
    }

    /// Opens a volume whose lease is another node's, for an attachment that waits for it.
    pub async fn open_without_lease(
        &self,
        open: &mut OpenVolumes,
        volume: &meta::Volume,
    ) -> Result<Handle> {
        if open.volumes.contains_key(&volume.id) {
            return Err(migrating(&volume.name));
        }
        let handle = {
            let epoch = self.cluster.meta.map().epoch();
            self.storage.open_without_lease(volume, epoch).await?
        };
        let one = OpenVolume {
            handle: handle.clone(),
            users: 1,
            given_up: 0,
            waits_for_lease: true,
        };
        open.volumes.insert(volume.id, one);
        Ok(handle)
    }

    /// Ends one use.
    pub async fn close_volume(&self, volume: &meta::Volume) {
        let mut open = self.open.lock().await;
        self.close_in(&mut open, volume.id).await;
    }

    /// Same, for a caller that holds the lock.
    pub async fn close_in(&self, open: &mut OpenVolumes, id: VolumeId) {
        let Some(one) = open.volumes.get_mut(&id) else {
            return;
        };
        one.users -= 1;
        if one.users > 0 {
            if one.is_given_up() {
                // Nobody else is left.
                one.handle.revoke();
            }
            return;
        }
        open.volumes.remove(&id);
        self.leases.give_back(&self.cluster.meta, id).await;
    }
}

impl OpenVolume {
    /// Returns true if only copies use it that were given up and cannot end.
    fn is_given_up(&self) -> bool {
        self.given_up > 0 && self.users == self.given_up
    }

    /// One of the users is a copy that is given up: its requests end once nobody else uses the volume.
    pub fn give_up(&mut self) {
        self.given_up += 1;
        if self.is_given_up() {
            self.handle.revoke();
        }
    }

    /// Such a copy has ended.
    pub fn note_given_up_ended(&mut self) {
        self.given_up -= 1;
    }
}

impl OpenVolumes {
    /// Refuses to change a volume while an import replaces it: the change would be undone, or apply to the
    /// wrong content.
    pub fn refuse_replaced(&self, volume: &meta::Volume) -> Result<()> {
        if !self.replaced.contains(&volume.id) {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Conflict,
            format!("volume '{}' is being replaced by an import", volume.name),
            "wait until the import is done, or stop it",
        ))
    }
}

/// Why nothing else is done with a volume whose attachment moves.
fn migrating(name: &str) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!("volume '{name}' is being migrated between nodes"),
        "wait until the migration is done, or was called off",
    )
}
