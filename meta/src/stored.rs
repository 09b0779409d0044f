//! How much data volumes hold, as nodes count it: for people, never for decisions. In the leader's memory
//! only; a new leader has it again within seconds.
//!
//! Of the replicas of a placement group one counts: the first that is in sync and there, by the map that its
//! node has. Each node tells which groups it has counted, and what volumes store in them. What is told at
//! different moments under different maps may have a group twice, or not at all; so the sums of a pool are
//! right only if every group of it is in what exactly one node told. When a group has just come to another
//! node they are not, for some seconds, and the leader answers with the last ones that were.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, PoolId, VolumeId};
use crate::model::GroupId;

/// Most volumes in what one node tells. With more it tells of the first ones, and of volumes that it leaves
/// out nothing is known.
pub const STORED_VOLUMES_MAX: usize = 1 << 14;
/// Most groups in what one node tells; a node that counts more is not heard.
pub const STORED_GROUPS_MAX: usize = 1 << 16;
/// What a node told counts for so long; it is repeated far more often.
const TOLD_AGE_MAX: Duration = Duration::from_secs(120);
/// Sums that were right count for so long while there are no newer ones.
const SUMS_AGE_MAX: Duration = Duration::from_secs(600);
/// A volume that is not in sums of this age may have been made, or written for the first time, since.
const ABSENT_AGE_MAX: Duration = Duration::from_secs(60);

/// What a node has counted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStored {
    /// Placement groups whose chunks it has counted, by [`GroupId::to_u64`].
    pub groups: Vec<u64>,
    /// What volumes store in these groups. A volume that stores nothing is left out.
    pub volumes: Vec<VolumeStored>,
    /// Volumes were left out that do store something.
    pub is_cut: bool,
}

/// What a volume stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStored {
    /// The volume.
    pub volume: VolumeId,
    /// Its pool.
    pub pool: PoolId,
    /// Bytes of data, one copy; `None` if some of it is not counted yet.
    pub bytes: Option<u64>,
}

impl NodeStored {
    /// What is told, within its bounds.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.is_cut |= self.volumes.len() > STORED_VOLUMES_MAX;
        self.volumes.truncate(STORED_VOLUMES_MAX);
        if self.groups.len() > STORED_GROUPS_MAX {
            // With a group less than it has counted it would be wrong.
            self.groups = Vec::new();
            self.volumes = Vec::new();
        }
        self.groups.sort_unstable();
        self.groups.dedup();
        // A truncated list keeps its memory, and the leader keeps the lists of all nodes.
        self.volumes.shrink_to_fit();
        self.groups.shrink_to_fit();
        self
    }
}

/// What the leader makes of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredReport {
    /// What volumes store.
    pub volumes: Vec<VolumeStored>,
    /// Pools with all groups counted. Their volumes that are not in `volumes` store nothing.
    pub pools: Vec<PoolId>,
}

impl StoredReport {
    /// What each volume stores, to look many up.
    #[must_use]
    pub fn by_volume(&self) -> BTreeMap<VolumeId, Option<u64>> {
        let volumes = self.volumes.iter();
        volumes.map(|one| (one.volume, one.bytes)).collect()
    }
}

/// What nodes have told the leader.
#[derive(Debug, Default)]
pub(crate) struct StoredReports {
    told: BTreeMap<NodeId, (Instant, NodeStored)>,
    sums: BTreeMap<PoolId, Sums>,
}

/// What the volumes of a pool stored at a moment at which every group was counted once.
#[derive(Debug)]
struct Sums {
    at: Instant,
    volumes: BTreeMap<VolumeId, Option<u64>>,
    is_cut: bool,
}

impl StoredReports {
    /// Takes what a node tells, which is [bounded](NodeStored::bounded). Returns its last report: to free it
    /// takes a while.
    pub(crate) fn take(
        &mut self,
        node: NodeId,
        told: NodeStored,
        now: Instant,
    ) -> Option<NodeStored> {
        let before = self.told.insert(node, (now, told));
        before.map(|(_, told)| told)
    }

    /// Adds up the counts of the nodes that are up. `groups` are all groups of the cluster.
    pub(crate) fn add_up(
        &mut self,
        groups: impl Iterator<Item = GroupId>,
        is_up: impl Fn(NodeId) -> bool,
        now: Instant,
    ) {
        let is_fresh = |at: Instant, most| now.saturating_duration_since(at) <= most;
        self.told
            .retain(|node, (at, _)| is_up(*node) && is_fresh(*at, TOLD_AGE_MAX));
        let mut counted: BTreeMap<u64, u32> = BTreeMap::new();
        let told = self.told.values().flat_map(|(_, told)| &told.groups);
        told.for_each(|group| *counted.entry(*group).or_default() += 1);
        let mut pools: BTreeMap<PoolId, bool> = BTreeMap::new();
        for group in groups {
            let is_once = counted.get(&group.to_u64()) == Some(&1);
            *pools.entry(group.pool).or_insert(true) &= is_once;
        }
        self.sums
            .retain(|pool, sums| pools.contains_key(pool) && is_fresh(sums.at, SUMS_AGE_MAX));
        let is_cut = self.told.values().any(|(_, told)| told.is_cut);
        let right = pools.into_iter().filter(|(_, is_right)| *is_right);
        let mut right: BTreeMap<PoolId, Sums> = right
            .map(|(pool, _)| {
                let volumes = BTreeMap::new();
                let at = now;
                (
                    pool,
                    Sums {
                        at,
                        volumes,
                        is_cut,
                    },
                )
            })
            .collect();
        for one in self.told.values().flat_map(|(_, told)| &told.volumes) {
            if let Some(sums) = right.get_mut(&one.pool) {
                let sum = sums.volumes.entry(one.volume).or_insert(Some(0));
                *sum = sum
                    .zip(one.bytes)
                    .map(|(sum, bytes)| sum.saturating_add(bytes));
            }
        }
        self.sums.append(&mut right);
    }

    /// What is known.
    pub(crate) fn report(&self, now: Instant) -> StoredReport {
        let mut report = StoredReport::default();
        for (pool, sums) in &self.sums {
            let age = now.saturating_duration_since(sums.at);
            if !sums.is_cut && age <= ABSENT_AGE_MAX {
                report.pools.push(*pool);
            }
            let volumes = sums.volumes.iter().map(|(volume, bytes)| VolumeStored {
                volume: *volume,
                pool: *pool,
                // A part of them may have been left out.
                bytes: bytes.filter(|_| !sums.is_cut),
            });
            report.volumes.extend(volumes);
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PgIndex;

    const POOL: PoolId = PoolId(2);

    fn group(index: u32) -> GroupId {
        GroupId {
            pool: POOL,
            index: PgIndex(index),
        }
    }

    fn told(groups: &[u32], bytes: &[(u64, Option<u64>)]) -> NodeStored {
        NodeStored {
            groups: groups.iter().map(|index| group(*index).to_u64()).collect(),
            volumes: bytes
                .iter()
                .map(|(volume, bytes)| VolumeStored {
                    volume: VolumeId(*volume),
                    pool: POOL,
                    bytes: *bytes,
                })
                .collect(),
            is_cut: false,
        }
    }

    struct World {
        reports: StoredReports,
        now: Instant,
        down: Option<NodeId>,
    }

    impl World {
        fn new() -> Self {
            let (reports, now, down) = (StoredReports::default(), Instant::now(), None);
            Self { reports, now, down }
        }

        fn take(&mut self, node: u64, told: NodeStored) {
            self.reports.take(NodeId(node), told.bounded(), self.now);
        }

        /// Bytes of volumes 1 and 2; `None` where they are unknown.
        fn known(&mut self) -> [Option<u64>; 2] {
            let groups = (0..4).map(group);
            let is_up = |node| Some(node) != self.down;
            self.reports.add_up(groups, is_up, self.now);
            let report = self.reports.report(self.now);
            let by_volume = report.by_volume();
            let is_pool_known = report.pools.contains(&POOL);
            [1, 2].map(|volume| match by_volume.get(&VolumeId(volume)) {
                Some(bytes) => *bytes,
                None => is_pool_known.then_some(0),
            })
        }
    }

    #[test]
    fn sums_are_known_once_every_group_is_counted_and_only_then() {
        let mut world = World::new();
        assert_eq!(world.known(), [None, None]);
        world.take(1, told(&[0, 2], &[(1, Some(10)), (2, Some(5))]));
        assert_eq!(world.known(), [None, None]);
        world.take(2, told(&[1, 3], &[(1, Some(7))]));
        assert_eq!(world.known(), [Some(17), Some(5)]);
        world.take(2, told(&[1, 3], &[(1, None)]));
        assert_eq!(world.known(), [None, Some(5)], "not all of it is counted");
        world.take(2, told(&[1, 3], &[]));
        world.take(1, told(&[0, 2], &[(1, Some(10))]));
        assert_eq!(world.known(), [Some(10), Some(0)]);
    }

    #[test]
    fn groups_that_move_leave_the_last_sums_until_all_are_counted_once_again() {
        let mut world = World::new();
        world.take(1, told(&[0, 1, 2], &[(1, Some(30))]));
        world.take(2, told(&[3], &[(1, Some(10))]));
        assert_eq!(world.known(), [Some(40), Some(0)]);
        // Group 2 comes to node 2, which is the first to know.
        world.take(2, told(&[2, 3], &[(1, Some(25))]));
        assert_eq!(world.known(), [Some(40), Some(0)], "not 55");
        world.take(1, told(&[0, 1], &[(1, Some(15))]));
        assert_eq!(world.known(), [Some(40), Some(0)]);
        // Node 1 goes down, and the others have its groups.
        world.down = Some(NodeId(1));
        assert_eq!(world.known(), [Some(40), Some(0)], "not 25");
        world.take(2, told(&[0, 2, 3], &[(1, Some(33))]));
        assert_eq!(
            world.known(),
            [Some(40), Some(0)],
            "nobody has counted group 1"
        );
        world.take(3, told(&[1], &[(1, Some(8))]));
        assert_eq!(world.known(), [Some(41), Some(0)]);
        // Groups that nobody counts any more are forgotten at length.
        world.down = Some(NodeId(3));
        world.now += SUMS_AGE_MAX;
        assert_eq!(
            world.known(),
            [Some(41), None],
            "it may have been written since"
        );
        world.now += Duration::from_secs(1);
        assert_eq!(world.known(), [None, None]);
    }

    #[test]
    fn what_is_told_is_bounded_and_what_is_left_out_is_unknown() {
        let mut world = World::new();
        let volumes = 2..STORED_VOLUMES_MAX as u64 + 3;
        let many: Vec<_> = volumes.map(|volume| (volume, Some(1))).collect();
        world.take(1, told(&[0, 1, 2, 3], &many));
        let (_, kept) = &world.reports.told[&NodeId(1)];
        assert_eq!(
            (kept.volumes.len(), kept.is_cut),
            (STORED_VOLUMES_MAX, true)
        );
        assert_eq!(world.known(), [None, None]);
        let groups: Vec<u32> = (0..=STORED_GROUPS_MAX as u32).collect();
        world.take(1, told(&groups, &[(1, Some(1))]));
        assert_eq!(world.reports.told[&NodeId(1)].1, NodeStored::default());
        // More than the limit are not even sorted.
        world.take(1, told(&vec![1; STORED_GROUPS_MAX + 1], &[(1, Some(1))]));
        assert_eq!(world.reports.told[&NodeId(1)].1, NodeStored::default());
    }
}
