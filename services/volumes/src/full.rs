//! Writes that wait for space: which do, and for how long they may.

use std::sync::Arc;

use api::moment::duration;
use meta::IMPORT_PREFIX;
use service::code::Code;
use service::found::Found;
use service::pace::LOOK_PAUSE;
use storage::{MAKE_ROOM, on_full};

use crate::volumes::Volumes;

/// Keeps the limits of open volumes as their records have them, for as long as volumes are served.
pub(crate) fn keep_following(volumes: &Arc<Volumes>) {
    let weak = Arc::downgrade(volumes);
    tokio::spawn(async move {
        while let Some(volumes) = weak.upgrade() {
            volumes.follow_on_full();
            drop(volumes);
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    });
}

impl Volumes {
    /// Sets the limits of open volumes to those in their records.
    pub fn follow_on_full(&self) {
        for volume in self.cluster.meta.applied().volumes().unwrap_or_default() {
            if let Some(handle) = self.leases.handle(volume.id) {
                handle.set_on_full(on_full(&volume));
            }
        }
    }

    /// Volumes whose writes here wait for space.
    pub fn held_problems(&self) -> Vec<Found> {
        let records = self.cluster.meta.applied().volumes().unwrap_or_default();
        // Writes of filesystems' data do not wait: see `on_full`.
        let volumes = records.into_iter().filter(|one| one.segment.is_none());
        let waiting = volumes.filter_map(|volume| {
            let held = self.leases.handle(volume.id)?.held_writes();
            if held.pieces == 0 {
                return None;
            }
            let wait_s = u64::from(volume.on_full.wait_s);
            let (of, then) = match volume.name.as_str().starts_with(IMPORT_PREFIX) {
                true => (
                    "an import".to_owned(),
                    "the import gives up soon".to_owned(),
                ),
                false => (
                    format!("volume '{}'", volume.name),
                    format!("each fails after {}", duration(wait_s)),
                ),
            };
            let writes = match held.pieces {
                1 => "1 write waits".to_owned(),
                more => format!("{more} writes wait"),
            };
            Some(Found::new(
                Code::WritesWait,
                &volume.name,
                format!(
                    "{of}: {writes} for space, the first since {}",
                    duration(held.longest.as_secs())
                ),
                format!("{MAKE_ROOM}; {then}"),
            ))
        });
        waiting.collect()
    }
}
