//! Writes that wait for space: which do, and for how long they may.

use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use api::moment::duration;
use fabric_replication::volume::OnFull;
use meta::{IMPORT_PREFIX, Meta};
use service::code::Code;
use service::found::Found;

use super::node::Node;
use super::storage::MAKE_ROOM;

/// What writes of a volume do for want of space. Those of filesystems' data fail at once: what waits is known
/// by file there, and tried again.
pub fn on_full(volume: &meta::Volume) -> OnFull {
    match volume.segment {
        Some(_) => OnFull::ERROR,
        None => OnFull {
            wait: Duration::from_secs(volume.on_full.wait_s.into()),
        },
    }
}

/// Whether the node is a cluster of its own: nobody can reach it. Its writes find space or fail.
pub fn never_waits(meta: &Meta) -> bool {
    meta.map()
        .nodes()
        .all(|node| node.control_address.is_empty())
}

/// Refuses to say how long writes wait where they do not.
pub fn refuse_wait(meta: &Meta, said: meta::OnFull) -> Result<()> {
    if said == meta::OnFull::ERROR || !never_waits(meta) {
        return Ok(());
    }
    Err(Failure::new(
        Kind::Conflict,
        "on a node that is a cluster of its own, writes that find no space fail at once",
        "leave --on-full out, or make a cluster with `penstock init`",
    ))
}

impl Node {
    /// Has open volumes do what their records say by now.
    pub(super) fn follow_on_full(&self) {
        // Whoever has it may wait long, and it is looked again soon.
        let Ok(live) = self.live.try_lock() else {
            return;
        };
        for volume in self.meta.applied().volumes().unwrap_or_default() {
            if let Some(open) = live.volumes.get(&volume.id) {
                open.handle.set_on_full(on_full(&volume));
            }
        }
    }

    /// Volumes whose writes here wait for space.
    pub(super) async fn held_problems(&self) -> Vec<Found> {
        let records = self.meta.applied().volumes().unwrap_or_default();
        let live = self.live.lock().await;
        let waiting = records.into_iter().filter_map(|volume| {
            let held = live.volumes.get(&volume.id)?.handle.held_writes();
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
