//! Marks on this node's devices: in which groups they are in sync. A cluster that lost its metadata service
//! chooses replicas by them.

use std::collections::HashMap;
use std::time::Duration;

use api::failure::Result;
use fabric::Fabric;
use fabric_types::{Epoch, PgId};
use meta::{ClusterMap, DeviceEvidence, DeviceId, GroupId, Meta, NodeId};
use service::failures::meta_failure;
use service::waiting::blocking;
use tokio::task::JoinSet;

use crate::storage::fabric_failure;

/// Pause after a device did not take its marks.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// The groups in which a device of this node is in sync by a map, and that map's epoch of them.
fn in_sync(map: &ClusterMap, own: NodeId, device: DeviceId) -> Vec<(PgId, Epoch)> {
    let mut found = Vec::new();
    for group in map.groups() {
        let counts = |one: &meta::Member| one.node == own && one.is_in_sync() && map.is_valid(one);
        if group.member(device).is_some_and(counts) {
            found.push((PgId(group.id().to_u64()), group.epoch));
        }
    }
    found
}

/// Has the devices of this node remember in which groups they are in sync, for as long as the metadata
/// service runs (`fabric::Evidence`). Each by itself: one that hangs holds no other up.
pub async fn keep_marking(fabric: Fabric, meta: Meta) {
    let mut maps = meta.watch_map();
    let mut marking = HashMap::new();
    loop {
        let map = maps.borrow_and_update().clone();
        for device in map.devices().filter(|one| one.node == meta.node_id()) {
            let (fabric, meta) = (fabric.clone(), meta.clone());
            let of = (device.id, *device.uuid.as_bytes());
            marking.entry(device.id).or_insert_with(|| {
                let mut task = JoinSet::new();
                task.spawn(keep_marking_on(fabric, meta, of));
                task
            });
        }
        if maps.changed().await.is_err() {
            return;
        }
    }
}

async fn keep_marking_on(fabric: Fabric, meta: Meta, (device, uuid): (DeviceId, [u8; 16])) {
    let mut maps = meta.watch_map();
    let mut marked: HashMap<PgId, Epoch> = HashMap::new();
    loop {
        let map = maps.borrow_and_update().clone();
        let mut groups = in_sync(&map, meta.node_id(), device);
        groups.retain(|(pg, epoch)| marked.get(pg) != Some(epoch));
        let (on, noted) = (fabric.clone(), groups.clone());
        let mark = move || on.mark_in_sync(&uuid, &noted).map_err(fabric_failure);
        let changed = match groups.is_empty() {
            true => maps.changed().await,
            false => match blocking(mark).await {
                Ok(()) => {
                    marked.extend(groups);
                    maps.changed().await
                }
                Err(failure) => {
                    tracing::warn!(%failure, "device {device} cannot note what it is in sync in");
                    tokio::time::sleep(RETRY_PAUSE).await;
                    Ok(())
                }
            },
        };
        if changed.is_err() {
            return;
        }
    }
}

/// After a recovery, tells what the devices of this node say of their groups and layers: at each start, for a
/// device may know more than the metadata.
pub async fn report_evidence(fabric: &Fabric, meta: &Meta) -> Result<()> {
    let cluster = meta.cluster().await.map_err(meta_failure)?;
    if cluster.recovery.is_none() {
        return Ok(());
    }
    let own = |device: &meta::Device| device.node == meta.node_id();
    let devices = meta.list_devices().await.map_err(meta_failure)?;
    for device in devices.into_iter().filter(own) {
        let (fabric, uuid) = (fabric.clone(), *device.uuid.as_bytes());
        if !fabric
            .devices()
            .iter()
            .any(|open| open.label.device == uuid)
        {
            continue;
        }
        let found = blocking(move || Ok(fabric.evidence(&uuid))).await?;
        let in_sync = found.in_sync.into_iter();
        let evidence = DeviceEvidence {
            device: device.id,
            incarnation: meta.incarnation(),
            epoch: found.epoch,
            in_sync: in_sync
                .map(|(pg, epoch)| (GroupId::from_u64(pg.0), epoch))
                .collect(),
            layers: found.layers.into_iter().collect(),
        };
        meta.report_evidence(evidence).await.map_err(meta_failure)?;
        tracing::info!(device = %device.id, "told what the device says of its groups");
    }
    Ok(())
}
