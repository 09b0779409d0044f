//! What happened in the cluster.

use api::failure::{Failure, Result};
use api::types::{EVENTS_TOLD, Event, EventAuthor, EventsQuery};
use meta::{EventKind, Meta};
use serde_json::Value;
use service::failures::meta_failure;

use crate::health::Health;

/// Most events in one answer: all that are kept.
const LIMIT_MAX: usize = meta::EVENTS_MAX as usize;

impl Health {
    /// Those after a number, oldest first, or the newest.
    pub async fn events(&self, query: &EventsQuery, reader: &Meta) -> Result<Vec<Event>> {
        let limit = match (query.limit, query.since_ms) {
            (Some(limit), _) => limit,
            // Whoever names a time is to have all that happened since.
            (None, Some(_)) => LIMIT_MAX,
            (None, None) => EVENTS_TOLD,
        };
        if limit == 0 || limit > LIMIT_MAX {
            return Err(Failure::invalid(
                format!("cannot list {limit} events"),
                format!("ask for 1 to {LIMIT_MAX}"),
            ));
        }
        let after = query.after.unwrap_or(0);
        let events = reader.list_events(after, LIMIT_MAX).await;
        let mut events = events.map_err(meta_failure)?;
        if let Some(since_ms) = query.since_ms {
            events.retain(|event| event.at.0 >= since_ms);
        }
        // Those that follow a number, or the newest.
        match query.after {
            Some(_) => events.truncate(limit),
            None => drop(events.drain(..events.len().saturating_sub(limit))),
        }
        Ok(events.iter().map(|event| self.event_shown(event)).collect())
    }

    fn event_shown(&self, event: &meta::Event) -> Event {
        // The record says by itself what it is about.
        let fields = serde_json::to_value(&event.what).unwrap_or_default();
        let how = match event.by.is_some_and(|by| by.forced) {
            true => ", by force",
            false => "",
        };
        let number = |name: &str| fields.get(name).and_then(Value::as_u64);
        let text = |name: &str| fields.get(name).and_then(Value::as_str).map(str::to_owned);
        Event {
            number: event.number,
            at: event.at.into(),
            subject: self.subject(&event.what),
            kind: text("kind").unwrap_or_default(),
            text: event.what.text(&self.cluster.meta.map()) + how,
            node: number("node"),
            device: number("device"),
            pool: text("pool"),
            groups: number("groups").and_then(|groups| u32::try_from(groups).ok()),
            volume: text("volume"),
            filesystem: text("filesystem"),
            by: event.by.map(|by| EventAuthor {
                node: by.node.0,
                node_name: self.cluster.meta.map().node_name(by.node),
                uid: by.uid,
                forced: by.forced,
            }),
        }
    }

    /// By its present name; what is gone has its number only.
    fn subject(&self, what: &EventKind) -> String {
        let map = self.cluster.meta.map();
        match what {
            EventKind::NodeAdmitted { node }
            | EventKind::NodeJoined { node }
            | EventKind::NodeRestarted { node }
            | EventKind::NodeUp { node }
            | EventKind::NodeDown { node }
            | EventKind::NodeReplaced { node }
            | EventKind::NodeDraining { node }
            | EventKind::NodeActive { node }
            | EventKind::NodeRemoved { node }
            | EventKind::NodeEvicted { node }
            | EventKind::DataDamaged { node, .. }
            | EventKind::DataRepaired { node, .. } => format!("node {}", map.node_name(*node)),
            EventKind::LevelRaised { .. }
            | EventKind::MetadataRecovered { .. }
            | EventKind::ReplicasChosen { .. }
            | EventKind::TokenCreated { .. }
            | EventKind::TokenRevoked
            | EventKind::UnknownForgotten => "cluster".to_owned(),
            EventKind::DeviceAdded { device, .. }
            | EventKind::DeviceFailed { device, .. }
            | EventKind::DeviceOffline { device, .. }
            | EventKind::DeviceOnline { device, .. }
            | EventKind::DeviceDraining { device, .. }
            | EventKind::DeviceActive { device, .. }
            | EventKind::DeviceRemoved { device, .. } => {
                format!("device {}", map.device_path(*device))
            }
            EventKind::PoolDegraded { pool, .. }
            | EventKind::PoolRecovered { pool }
            | EventKind::PoolWaiting { pool, .. }
            | EventKind::PoolWritable { pool }
            | EventKind::UnflushedLost { pool }
            | EventKind::DataGivenUp { pool, .. }
            | EventKind::RebalanceStarted { pool, .. }
            | EventKind::PoolCreated { pool, .. }
            | EventKind::PoolChanged { pool, .. }
            | EventKind::PoolDeleted { pool }
            | EventKind::PoolNearFull { pool, .. }
            | EventKind::PoolHasRoom { pool, .. }
            | EventKind::PoolOverCommitted { pool }
            | EventKind::PoolCovered { pool }
            | EventKind::RebalanceEnded { pool } => format!("pool {pool}"),
            EventKind::VolumeCreated { volume, .. }
            | EventKind::VolumeResized { volume, .. }
            | EventKind::VolumeRenamed { volume, .. }
            | EventKind::VolumeOnFullSet { volume, .. }
            | EventKind::VolumeReplaced { volume, .. }
            | EventKind::VolumeDeleted { volume }
            | EventKind::VolumeAttached { volume, .. }
            | EventKind::VolumeDetached { volume, .. }
            | EventKind::VolumeOffered { volume, .. }
            | EventKind::OfferWithdrawn { volume, .. }
            | EventKind::IncomingExpired { volume, .. }
            | EventKind::VolumeMoved { volume, .. }
            | EventKind::LeaseTakenOver { volume, .. } => format!("volume {volume}"),
            EventKind::ExportCreated { export, .. }
            | EventKind::ExportMoved { export, .. }
            | EventKind::ExportDeleting { export }
            | EventKind::ExportDeleted { export } => format!("NFS export {export}"),
            EventKind::FilesystemCreated { filesystem }
            | EventKind::FilesystemDeleted { filesystem }
            | EventKind::FilesystemAttached { filesystem, .. }
            | EventKind::FilesystemDetached { filesystem, .. }
            | EventKind::FilesystemLost { filesystem } => format!("filesystem {filesystem}"),
        }
    }
}
