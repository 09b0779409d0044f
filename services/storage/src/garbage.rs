//! Data of volumes that are gone, and of placement groups that moved elsewhere. Whoever deletes a volume
//! drops what its own devices hold; the other nodes find out by looking.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use api::failure::Result;
use fabric_types::PgId;
use meta::{ClusterMap, LayerId, Meta, PlacementGroup};
use service::failures::meta_failure;

use crate::storage::Storage;

/// Pause between two looks. Each goes through the names of all chunks, some hundred thousand for each TiB.
const PAUSE: Duration = Duration::from_secs(30);
/// The same while a device of this node is full, as somebody may wait for what was deleted; longer where
/// looks take long.
const PAUSE_WHEN_FULL: Duration = Duration::from_secs(3);
/// Then so many times what the last look took.
const PAUSE_TO_LOOK: u32 = 10;

/// Looks repeatedly for as long as the storage is open.
pub fn keep_dropping(meta: Meta, storage: &Arc<Storage>) {
    let weak = Arc::downgrade(storage);
    tokio::spawn(async move {
        let mut strays = 0;
        while let Some(storage) = weak.upgrade() {
            let began = Instant::now();
            match drop_garbage(&meta, &storage).await {
                Ok(0) => {}
                Ok(layers) => tracing::info!(layers, "dropped data of volumes that are gone"),
                Err(failure) => tracing::warn!(%failure, "drop data of volumes that are gone"),
            }
            match drop_strays(&meta, &storage).await {
                // A chunk that was emptied keeps its place in the store's table until a checkpoint, and is
                // met again.
                Ok(chunks) if chunks == strays => {}
                Ok(chunks) => {
                    strays = chunks;
                    tracing::info!(chunks, "dropped data that lie on other devices now");
                }
                Err(failure) => {
                    tracing::warn!(%failure, "drop data that lie on other devices now");
                }
            }
            drop(storage);
            rest(&weak, began.elapsed()).await;
        }
    });
}

/// Waits until it is time to look again, after a look that took so long.
async fn rest(storage: &Weak<Storage>, took: Duration) {
    let began = Instant::now();
    let when_full = (took * PAUSE_TO_LOOK).clamp(PAUSE_WHEN_FULL, PAUSE);
    loop {
        tokio::time::sleep(PAUSE_WHEN_FULL).await;
        let Some(storage) = storage.upgrade() else {
            return;
        };
        let is_full = storage.local().iter().any(|device| device.is_full);
        let pause = if is_full { when_full } else { PAUSE };
        if began.elapsed() >= pause {
            return;
        }
    }
}

/// Drops layers of which meta knows no volume; how many.
async fn drop_garbage(meta: &Meta, storage: &Storage) -> Result<usize> {
    let held = storage.layers().await?;
    // Asked after the devices were: a volume is known before anything of it is stored, and its layers'
    // numbers are never used again.
    let volumes = meta.list_volumes().await.map_err(meta_failure)?;
    let mut garbage = garbage(held, volumes.iter().flat_map(|volume| &volume.layers));
    let recovery = meta.cluster().await.map_err(meta_failure)?.recovery;
    garbage.retain(|layer| {
        !recovery
            .as_ref()
            .is_some_and(|recovery| recovery.keeps(*layer))
    });
    storage.drop_layers(&garbage).await?;
    Ok(garbage.len())
}

/// Drops chunks of groups that have no replica on the device any more; how many.
async fn drop_strays(meta: &Meta, storage: &Storage) -> Result<usize> {
    // The map is then no older than this moment.
    let cluster = meta.cluster().await.map_err(meta_failure)?;
    let recovery = cluster.recovery;
    if recovery.is_some_and(|one| one.chooses || !one.unknown.is_empty()) {
        // They may be of volumes that the metadata do not know.
        return Ok(0);
    }
    let map = meta.map();
    storage
        .drop_strays(map.epoch(), complete_groups(&map))
        .await
}

/// Groups that lack nothing: all replicas are in sync where they shall be, each on a node of its own, and
/// nobody else has a part.
fn complete_groups(map: &ClusterMap) -> HashSet<PgId> {
    let mut complete = HashSet::new();
    for pool in map.pools() {
        let is_complete = |group: &PlacementGroup| {
            let mut members = group.members.iter();
            let nodes: BTreeSet<_> = group.members.iter().map(|m| m.node).collect();
            nodes.len() == group.members.len()
                && group.members.len() >= usize::from(pool.replicas)
                && members.all(|m| m.is_in_sync() && !m.leaving && map.is_valid(m))
        };
        let groups = map.groups().filter(|group| group.pool == pool.id);
        complete.extend(
            groups
                .filter(|group| is_complete(group))
                .map(|group| PgId(group.id().to_u64())),
        );
    }
    complete
}

fn garbage<'a>(held: Vec<LayerId>, known: impl Iterator<Item = &'a LayerId>) -> Vec<LayerId> {
    let known: BTreeSet<&LayerId> = known.collect();
    held.into_iter()
        .filter(|layer| !known.contains(layer))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_without_missing_or_extra_members_are_stable() {
        use meta::{Command, DeviceSpec, Incarnation, NodeId, NodeSpec, PoolSpec, UnixMillis};
        use uuid::Uuid;

        const AT: UnixMillis = UnixMillis(0);
        let mut machine = meta::testing::Machine::default();
        let node = |id: u64| NodeSpec {
            incarnation: Incarnation(id * 100),
            ..NodeSpec::new(NodeId(id), format!("n{id}"))
        };
        let pool = PoolSpec {
            placement_groups: Some(8),
            ..PoolSpec::new(meta::DEFAULT_POOL, 3)
        };
        let add = |machine: &mut meta::testing::Machine, id: u64| {
            let (incarnation, replaces) = (Incarnation(id * 100), Incarnation::default());
            let node = node(id);
            let device = DeviceSpec {
                uuid: Uuid::from_u128(u128::from(id)),
                node: NodeId(id),
                path: "/dev/x".to_owned(),
                size_bytes: 1 << 40,
                class: "disk".to_owned(),
            };
            for command in [
                Command::RegisterNode {
                    node,
                    replaces,
                    at: AT,
                },
                Command::RegisterDevice {
                    device,
                    incarnation,
                    at: AT,
                },
            ] {
                machine.apply(&command).unwrap();
            }
        };
        let bootstrap = Command::Bootstrap {
            cluster: Uuid::from_u128(1),
            node: node(1),
            pool: Some(Box::new(pool)),
            at: AT,
        };
        machine.apply(&bootstrap).unwrap();
        for id in [1, 2] {
            add(&mut machine, id);
        }
        assert_eq!(
            complete_groups(&machine.map()).len(),
            0,
            "two are not three"
        );
        add(&mut machine, 3);
        assert_eq!(complete_groups(&machine.map()).len(), 8);
        let volume = Command::CreateVolume {
            uuid: Uuid::from_u128(9),
            volume: meta::VolumeSpec::new("disk", 1 << 30),
            at: AT,
        };
        machine.apply(&volume).unwrap();
        // Some groups are to move there, and nothing is there yet.
        add(&mut machine, 4);
        assert_eq!(complete_groups(&machine.map()).len(), 2);
        let down = Command::SetNodeState {
            node: NodeId(1),
            incarnation: Incarnation(100),
            state: meta::NodeState::Down,
            at: AT,
        };
        machine.apply(&down).unwrap();
        assert!(complete_groups(&machine.map()).len() <= 1);
    }

    #[test]
    fn only_what_no_volume_has_is_dropped() {
        let layers = |ids: &[u64]| ids.iter().copied().map(LayerId).collect::<Vec<_>>();
        let known = layers(&[1, 3]);
        assert_eq!(
            garbage(layers(&[1, 2, 3, 4]), known.iter()),
            layers(&[2, 4])
        );
        assert_eq!(garbage(layers(&[1]), known.iter()), layers(&[]));
    }
}
