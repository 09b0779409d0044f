//! What was begun and not finished: deletions, shrinks and imports that were cut, or that the store refused.
//! It is finished while guests run, and until then `health` tells what stands in the way; it never stops a
//! start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::failure::{Failure, Result};
use meta::{IMPORT_PREFIX, VolumeId, VolumeState};
use service::code::Code;
use service::failures::meta_failure;
use service::found::Found;

use crate::volumes::{Volumes, is_import_of};

/// Pause between two tries.
const PAUSE: Duration = Duration::from_secs(60);

/// Volumes with something to finish.
#[derive(Default)]
pub struct Leftovers(Mutex<BTreeMap<VolumeId, Leftover>>);

struct Leftover {
    /// Noun, for people.
    what: String,
    /// Why the last try failed.
    failure: Option<Failure>,
}

impl Leftovers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Leftover>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Goes on finishing for as long as the volumes are served.
pub fn keep_finishing(volumes: &Arc<Volumes>) {
    let weak = Arc::downgrade(volumes);
    tokio::spawn(async move {
        while let Some(volumes) = weak.upgrade() {
            volumes.finish_leftovers().await;
            drop(volumes);
            tokio::time::sleep(PAUSE).await;
        }
    });
}

impl Volumes {
    /// Notes what earlier processes left. Called before there are requests, whose own work would look the
    /// same.
    pub async fn find_leftovers(&self) -> Result<()> {
        let volumes = self
            .cluster
            .meta
            .list_volumes()
            .await
            .map_err(meta_failure)?;
        let cluster = self.cluster.meta.cluster().await.map_err(meta_failure)?;
        let restored = cluster.recovery.filter(|one| one.backup_at.is_some());
        // An import that a backup shows unfinished may have ended since: it is an operator's to delete.
        let may_be_whole = |volume: &meta::Volume| {
            let is_older = |one: &meta::Recovery| volume.created_at < one.at;
            volume.state == VolumeState::Ready && restored.as_ref().is_some_and(is_older)
        };
        let mut leftovers = self.leftovers.lock();
        for volume in volumes {
            if is_import_of(&volume.name, self.cluster.node_id()) && may_be_whole(&volume) {
                tracing::warn!(volume = %volume.name, "kept: an import that the backup shows unfinished");
            } else if is_unfinished(&volume, self.cluster.node_id()) {
                tracing::info!(volume = %volume.name, "left unfinished by an earlier process");
                let what = what(&volume);
                leftovers.insert(
                    volume.id,
                    Leftover {
                        what,
                        failure: None,
                    },
                );
            }
        }
        Ok(())
    }

    /// Notes that finishing a change of `volume` failed: it is tried again.
    pub fn left_over(&self, volume: &meta::Volume, failure: Failure) {
        let what = what(volume);
        tracing::error!(%failure, "{what} is not finished and will be tried again");
        let leftover = Leftover {
            what,
            failure: Some(failure),
        };
        self.leftovers.lock().insert(volume.id, leftover);
    }

    /// What could not be finished.
    pub fn leftover_problems(&self) -> Vec<Found> {
        let leftovers = self.leftovers.lock();
        let problem = |(id, left): (&VolumeId, &Leftover)| {
            let failure = left.failure.as_ref()?;
            let what = format!("{} is not finished: {}", left.what, failure.error);
            let hint = failure.hint.iter().map(|hint| format!("; {hint}"));
            let doing = format!("it is tried again every minute{}", hint.collect::<String>());
            Some(Found::new(Code::VolumeUnfinished, id, what, doing))
        };
        leftovers.iter().filter_map(problem).collect()
    }

    /// Tries each once.
    pub async fn finish_leftovers(&self) {
        let ids: Vec<VolumeId> = self.leftovers.lock().keys().copied().collect();
        for id in ids {
            match self.finish(id).await {
                Ok(true) => {
                    self.leftovers.lock().remove(&id);
                }
                Ok(false) => {}
                Err(failure) => {
                    if let Some(left) = self.leftovers.lock().get_mut(&id) {
                        tracing::error!(%failure, "{} is not finished", left.what);
                        left.failure = Some(failure);
                    }
                }
            }
        }
    }

    /// Finishes what there is to finish of a volume; false if that has to wait until nobody uses it.
    async fn finish(&self, id: VolumeId) -> Result<bool> {
        let mut open = self.open.lock().await;
        // Others wait for the lock, and it is tried again.
        let volumes = self
            .cluster
            .asked
            .list_volumes()
            .await
            .map_err(meta_failure)?;
        let Some(volume) = volumes.into_iter().find(|volume| volume.id == id) else {
            return Ok(true);
        };
        if open.volumes.contains_key(&id) {
            return Ok(false);
        }
        if volume.state == VolumeState::Deleting {
            self.drop_data(&volume).await?;
        } else if volume.name.starts_with(IMPORT_PREFIX) {
            let deleted = self.cluster.meta.delete_volume(&volume.name).await;
            self.drop_data(&deleted.map_err(meta_failure)?).await?;
        } else {
            self.drop_stale_tail(&mut open, &volume).await?;
        }
        Ok(true)
    }
}

fn is_unfinished(volume: &meta::Volume, node: meta::NodeId) -> bool {
    volume.state == VolumeState::Deleting
        || volume.stale_tail_end_bytes.is_some()
        || is_import_of(&volume.name, node)
}

fn what(volume: &meta::Volume) -> String {
    let name = &volume.name;
    if name.starts_with(IMPORT_PREFIX) {
        "dropping what an import left behind".to_owned()
    } else if volume.state == VolumeState::Deleting {
        format!("the deletion of volume '{name}'")
    } else {
        format!("the shrinking of volume '{name}'")
    }
}
