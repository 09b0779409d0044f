//! How much data volumes hold: one copy, without what other volumes share with them or replicas add.
//!
//! A node alone looks into its own store whenever somebody asks. Of several nodes each counts what is its to
//! count, tells the leader, and asks that for the sums ([`meta::NodeStored`] says what makes them right).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::failure::Result;
use fabric::Fabric;
use fabric_types::placement;
use meta::{
    ClusterMap, LayerId, Meta, NodeId, NodeStored, PoolId, StoredReport, VolumeId, VolumeStored,
};
use service::cluster::{Cluster, REPORT_WAIT_MAX};
use service::failures::meta_failure;
use service::waiting::blocking;

use crate::storage::Storage;

/// Pause between two looks at whether something is to be told.
const PAUSE: Duration = Duration::from_secs(5);
/// What was told is told again after this, with what has changed meanwhile.
const TELL_INTERVAL: Duration = Duration::from_secs(15);
/// What does not reach the leader within this is told with the next look.
const TELL_WAIT_MAX: Duration = Duration::from_secs(5);
/// What the leader said is worth showing for so long.
const HEARD_AGE_MAX: Duration = Duration::from_secs(120);
/// Counting takes at most one part in so many of the time.
const COUNTING_SHARE: u32 = 20;
/// On a node that is alone, counting that takes less is done whenever somebody asks.
const COUNTING_SHORT: Duration = Duration::from_millis(20);

/// What volumes store, as far as it is known.
#[derive(Debug, Default)]
pub struct Used {
    volumes: BTreeMap<VolumeId, Option<u64>>,
    /// Pools whose volumes store nothing if they are not above; `None` for all.
    pools: Option<BTreeSet<PoolId>>,
}

impl Used {
    /// Nothing is known.
    fn unknown() -> Self {
        Self::of(&StoredReport::default())
    }

    fn of(report: &StoredReport) -> Self {
        Self {
            volumes: report.by_volume(),
            pools: Some(report.pools.iter().copied().collect()),
        }
    }

    /// Bytes that a volume stores, if that is known.
    pub fn bytes(&self, volume: &meta::Volume, map: &ClusterMap) -> Option<u64> {
        if let Some(bytes) = self.volumes.get(&volume.id) {
            return *bytes;
        }
        let is_known = match &self.pools {
            None => true,
            Some(known) => pool_of(volume, map).is_some_and(|pool| known.contains(&pool)),
        };
        is_known.then_some(0)
    }

    /// Whether it is known of all pools that have groups.
    fn is_complete(&self, map: &ClusterMap) -> bool {
        let is_known = |pool| {
            self.pools
                .as_ref()
                .is_none_or(|known| known.contains(&pool))
        };
        map.groups().all(|group| is_known(group.pool))
    }
}

fn pool_of(volume: &meta::Volume, map: &ClusterMap) -> Option<PoolId> {
    let pool = map.pools().find(|pool| pool.name == volume.pool);
    pool.map(|pool| pool.id)
}

/// Counts what volumes store on this node's devices, and asks for what they store in the cluster.
pub struct UsedBytes {
    cluster: Cluster,
    storage: Arc<Storage>,
    remembered: Mutex<Option<Remembered>>,
}

struct Remembered {
    used: Arc<Used>,
    at: Instant,
    /// For how long it is not asked for again.
    good_for: Duration,
}

impl UsedBytes {
    /// Nothing is counted yet.
    pub fn new(cluster: Cluster, storage: Arc<Storage>) -> Self {
        Self {
            cluster,
            storage,
            remembered: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Remembered>> {
        // Replaced as a whole.
        self.remembered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, used: Used, good_for: Duration) -> Arc<Used> {
        let used = Arc::new(used);
        *self.lock() = Some(Remembered {
            used: Arc::clone(&used),
            at: Instant::now(),
            good_for,
        });
        used
    }

    fn get(&self) -> Option<Arc<Used>> {
        let state = self.lock();
        let found = state
            .as_ref()
            .filter(|one| one.at.elapsed() <= one.good_for);
        found.map(|one| Arc::clone(&one.used))
    }
}

/// By layer, the volume that it belongs to.
type VolumesByLayer = HashMap<LayerId, (VolumeId, PoolId)>;

/// Volumes that people see, and those on their way to be seen. What segments of filesystems hold, filesystems
/// tell.
fn volumes_by_layer(meta: &Meta) -> Result<VolumesByLayer> {
    let map = meta.map();
    let mut found = HashMap::new();
    for volume in meta.applied().volumes().map_err(meta_failure)? {
        if volume.segment.is_some() {
            continue;
        }
        let pool = pool_of(&volume, &map).unwrap_or_default();
        let layers = volume.layers.iter();
        found.extend(layers.map(|layer| (*layer, (volume.id, pool))));
    }
    Ok(found)
}

/// The placement groups that a node counts, each with the device that it counts on: of several replicas the
/// first one does.
#[derive(Debug, Default, PartialEq, Eq)]
struct CountedGroups {
    devices: BTreeMap<u64, [u8; 16]>,
    /// Groups of each pool.
    sizes: BTreeMap<PoolId, u32>,
}

impl CountedGroups {
    fn of(map: &ClusterMap, node: NodeId) -> Self {
        let mut found = Self::default();
        for group in map.groups() {
            *found.sizes.entry(group.pool).or_default() += 1;
            let first = group.in_sync().find(|member| map.is_valid(member));
            let device = first.and_then(|member| map.device(member.device));
            if let Some(device) = device.filter(|device| device.node == node) {
                let group = group.id().to_u64();
                found.devices.insert(group, device.uuid.into_bytes());
            }
        }
        found
    }

    fn counts(&self, device: &[u8; 16], chunk: fabric_types::ids::ChunkKey) -> bool {
        let pool = PoolId(placement::pool_of(chunk.layer));
        let Some(groups) = self.sizes.get(&pool) else {
            return false;
        };
        self.devices.get(&placement::pg_of(chunk, *groups).0) == Some(device)
    }
}

/// What volumes store of the chunks that count.
fn count(
    fabric: &Fabric,
    volumes: &VolumesByLayer,
    counts: impl FnMut(&[u8; 16], fabric_types::ids::ChunkKey) -> bool,
) -> BTreeMap<VolumeId, (PoolId, Option<u64>)> {
    let mut found = BTreeMap::new();
    for (layer, stored) in fabric.stored(counts) {
        let Some((volume, pool)) = volumes.get(&LayerId(layer.0)) else {
            continue;
        };
        let (_, sum) = found.entry(*volume).or_insert((*pool, Some(0)));
        let bytes = (stored.uncounted_chunks == 0).then_some(stored.bytes);
        *sum = sum
            .zip(bytes)
            .map(|(sum, bytes): (u64, u64)| sum.saturating_add(bytes));
    }
    found.retain(|_, (_, bytes)| *bytes != Some(0));
    found
}

impl UsedBytes {
    /// What volumes store now. Where there is no leader that answers soon, nothing is known.
    pub async fn now(&self) -> Arc<Used> {
        if !self.cluster.has_network {
            return self.count_here().await;
        }
        let asked = tokio::time::timeout(REPORT_WAIT_MAX, self.cluster.meta.stored()).await;
        Arc::new(match asked {
            Ok(Ok(report)) => Used::of(&report),
            Ok(Err(_)) | Err(_) => Used::unknown(),
        })
    }

    /// The same as far as it is known here, without asking others.
    pub async fn as_heard(&self) -> Arc<Used> {
        match self.cluster.has_network {
            false => self.count_here().await,
            true => self.get().unwrap_or_else(|| Arc::new(Used::unknown())),
        }
    }

    /// What volumes store on a node that is alone.
    async fn count_here(&self) -> Arc<Used> {
        if let Some(used) = self.get() {
            return used;
        }
        let (meta, fabric) = (self.cluster.meta.clone(), self.storage.fabric().clone());
        let counted = blocking(move || {
            let began = Instant::now();
            let groups = CountedGroups::of(&meta.map(), meta.node_id());
            let volumes = volumes_by_layer(&meta)?;
            let counted = count(&fabric, &volumes, |device, chunk| {
                groups.counts(device, chunk)
            });
            Ok((counted, began.elapsed()))
        });
        match counted.await {
            Ok((counted, took)) => {
                let volumes = counted.into_iter();
                let volumes = volumes
                    .map(|(volume, (_, bytes))| (volume, bytes))
                    .collect();
                let pools = None;
                // Whoever has few chunks hears of every write at once.
                let good_for = match took < COUNTING_SHORT {
                    true => Duration::ZERO,
                    false => took * COUNTING_SHARE,
                };
                self.remember(Used { volumes, pools }, good_for)
            }
            Err(_) => Arc::new(Used::unknown()),
        }
    }
}

/// What this node told last.
#[derive(Default)]
struct Told {
    /// When, and how long counting took.
    counted: Option<(Instant, Duration)>,
    groups: CountedGroups,
    /// Whom, and in which term.
    leader: Option<(Option<NodeId>, u64)>,
    heard: Option<Instant>,
}

impl UsedBytes {
    /// Counts, reports to the leader and asks it for the sums while `self` is held.
    pub fn keep(self: &Arc<Self>) {
        if !self.cluster.has_network {
            return;
        }
        let weak = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut last = Told::default();
            while let Some(used) = weak.upgrade() {
                // Without a leader it is reported later; until then the bytes are unknown to others.
                if let Err(error) = used.tell(&mut last).await {
                    tracing::debug!(%error, "failed to report how much volumes hold");
                }
                used.hear(&mut last).await;
                drop(used);
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    async fn tell(&self, told: &mut Told) -> Result<()> {
        let map = self.cluster.meta.map();
        let groups = CountedGroups::of(&map, self.cluster.node_id());
        let raft = self.cluster.meta.raft_status();
        let leader = Some((raft.leader, raft.term));
        if let Some((at, took)) = told.counted {
            let (is_same, since) = (groups.devices == told.groups.devices, at.elapsed());
            let is_old = since >= TELL_INTERVAL && !(is_same && groups.devices.is_empty());
            let is_due = is_old || !is_same || leader != told.leader;
            if !is_due || since < (took * COUNTING_SHARE).min(TELL_INTERVAL) {
                return Ok(());
            }
        }
        let began = Instant::now();
        let (meta, fabric) = (self.cluster.meta.clone(), self.storage.fabric().clone());
        let (groups, counted) = blocking(move || {
            let volumes = volumes_by_layer(&meta)?;
            let counts = |device: &_, chunk| groups.counts(device, chunk);
            let counted = count(&fabric, &volumes, counts);
            Ok((groups, counted))
        })
        .await?;
        let took = began.elapsed();
        let volumes = counted.into_iter();
        let word = NodeStored {
            groups: groups.devices.keys().copied().collect(),
            volumes: volumes
                .map(|(volume, (pool, bytes))| VolumeStored {
                    volume,
                    pool,
                    bytes,
                })
                .collect(),
            is_cut: false,
        };
        let tell = tokio::time::timeout(TELL_WAIT_MAX, self.cluster.meta.tell_stored(word)).await;
        // Unless it was told, it is due again with the next look.
        let is_told = matches!(tell, Ok(Ok(())));
        told.counted = Some((began, took));
        (told.groups, told.leader) = (groups, leader.filter(|_| is_told));
        match tell {
            Ok(result) => result.map_err(meta_failure),
            Err(_) => Ok(()),
        }
    }

    /// Keeps what the leader makes of it, for metrics.
    async fn hear(&self, told: &mut Told) {
        let is_complete = || {
            let used = self.get();
            used.is_some_and(|used| used.is_complete(&self.cluster.meta.map()))
        };
        if told.heard.is_some_and(|at| at.elapsed() < TELL_INTERVAL) && is_complete() {
            return;
        }
        if let Ok(Ok(report)) =
            tokio::time::timeout(TELL_WAIT_MAX, self.cluster.meta.stored()).await
        {
            self.remember(Used::of(&report), HEARD_AGE_MAX);
            told.heard = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use fabric_types::ids::ChunkKey;
    use meta::GroupId;

    use super::*;
    use crate::cluster_map::tests::coming;

    #[test]
    fn each_group_is_counted_by_one_node_on_a_device_that_is_in_sync() {
        let map = coming().map();
        let counted = map.nodes().map(|node| CountedGroups::of(&map, node.id));
        let counted: Vec<CountedGroups> = counted.collect();
        let mut seen = BTreeSet::new();
        for (group, device) in counted.iter().flat_map(|one| &one.devices) {
            assert!(seen.insert(*group), "{group} is counted twice");
            let group = map
                .group(GroupId::from_u64(*group))
                .expect("it is in the map");
            let in_sync = group
                .in_sync()
                .filter_map(|member| map.device(member.device));
            assert!(
                in_sync
                    .map(|one| one.uuid.into_bytes())
                    .any(|id| id == *device)
            );
        }
        assert_eq!(seen.len(), map.groups().count());
        // So is each chunk, and those of pools that are not there by nobody.
        let pool = map.groups().next().expect("there are groups").pool;
        let devices: Vec<[u8; 16]> = map.devices().map(|one| one.uuid.into_bytes()).collect();
        for index in 0..500 {
            let counts = |layer| {
                let chunk = ChunkKey { layer, index };
                let counts = |one: &CountedGroups| {
                    devices
                        .iter()
                        .filter(|device| one.counts(device, chunk))
                        .count()
                };
                counted.iter().map(counts).sum::<usize>()
            };
            assert_eq!(counts(placement::layer_of(pool.0, 5, 1)), 1);
            assert_eq!(counts(placement::layer_of(placement::POOL_MAX, 5, 1)), 0);
        }
    }

    #[test]
    fn what_is_heard_is_complete_once_all_pools_with_groups_are_known() {
        let map = coming().map();
        let pool = map.pools().next().expect("there is one");
        let report = |pools: &[PoolId]| StoredReport {
            volumes: Vec::new(),
            pools: pools.to_vec(),
        };
        let known = Used::of(&report(&[pool.id]));
        assert!(known.is_complete(&map));
        assert!(!Used::of(&report(&[])).is_complete(&map));
        assert!(Used::default().is_complete(&map), "a node that is alone");
    }
}
