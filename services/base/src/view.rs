//! The cluster at a moment, as services look at it, and how placement groups are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::failure::{Failure, Kind, Result};
use api::moment::Moment;
use api::types;
use config::SpaceWarnings;
use meta::{
    AdminState, ClusterMap, DeviceId, DeviceReport, DeviceState, Event, EventKind, LeaderReport,
    Member, NodeId, NodeReport, NodeState, PlacementGroup, Pool, PoolId, RaftStatus, ReplicaState,
};

use crate::found::Work;

/// A node's word counts for this long; it is repeated far more often.
const WORD_AGE_MAX_MS: u64 = 30_000;

/// The cluster at a moment.
#[derive(Default)]
pub struct View {
    /// The map.
    pub map: Arc<ClusterMap>,
    /// All volumes.
    pub volumes: Vec<meta::Volume>,
    /// All attachments.
    pub attachments: Vec<meta::Attachment>,
    /// Events, oldest first; may be empty while there is no problem.
    pub events: Vec<Event>,
    /// Reports that the leader received; empty while no leader answers.
    pub report: LeaderReport,
    /// How Raft stands, as far as this node knows.
    pub raft: RaftStatus,
    /// Fill levels from which a pool is reported.
    pub space_warnings: SpaceWarnings,
}

impl View {
    /// Returns true if the map shows no problem and no background work.
    pub fn is_well(&self) -> bool {
        let is_well = |node: &meta::Node| {
            node.state == NodeState::Up && node.admin_state == AdminState::Active
        };
        let is_used = |device: &meta::Device| self.map.is_served(device) && !device.draining;
        let nodes = self.map.nodes().all(is_well);
        nodes && self.map.devices().all(is_used) && work(self).is_empty()
    }

    /// Pools that have volumes: nobody misses copies in the others.
    pub fn pools_in_use(&self) -> BTreeSet<PoolId> {
        let names: BTreeSet<&str> = self.volumes.iter().map(|v| v.pool.as_str()).collect();
        let in_use = self.map.pools().filter(|p| names.contains(p.name.as_str()));
        in_use.map(|pool| pool.id).collect()
    }

    /// A node by name or number.
    pub fn node(&self, name: &str) -> Result<&meta::Node> {
        let by_name = self.map.nodes().find(|node| node.name.as_str() == name);
        let by_number = || self.map.node(NodeId(name.parse().ok()?));
        by_name.or_else(by_number).ok_or_else(|| {
            Failure::new(
                Kind::NotFound,
                format!("there is no node '{name}'"),
                "see `penstock node list`",
            )
        })
    }

    /// Returns the name of a node.
    pub fn node_name(&self, id: NodeId) -> String {
        self.map.node_name(id)
    }

    /// Returns the path of a device with the name of its node.
    pub fn device_name(&self, id: DeviceId) -> String {
        match self.map.device(id) {
            Some(device) => format!("{} of node {}", device.path, self.node_name(device.node)),
            None => format!("{id}"),
        }
    }

    /// When the last of these events happened.
    pub fn last(&self, is_meant: impl Fn(&EventKind) -> bool) -> Option<Moment> {
        let found = self.events.iter().rev().find(|event| is_meant(&event.what));
        found.map(|event| event.at.into())
    }

    /// When what goes on began: the last event that `begins` it, unless one that `ends` it came after.
    pub fn since(
        &self,
        begins: impl Fn(&EventKind) -> bool,
        ends: impl Fn(&EventKind) -> bool,
    ) -> Option<Moment> {
        let mut latest = self.events.iter().rev();
        let found = latest.find(|event| begins(&event.what) || ends(&event.what))?;
        begins(&found.what).then(|| found.at.into())
    }

    /// Returns true if a node is down.
    pub fn is_down(&self, id: NodeId) -> bool {
        let node = self.map.node(id);
        node.is_some_and(|node| node.state == NodeState::Down)
    }

    /// Since when a node is up or down.
    pub fn node_since(&self, id: NodeId) -> Option<Moment> {
        self.last(|what| {
            matches!(what, EventKind::NodeUp { node }
                | EventKind::NodeDown { node }
                | EventKind::NodeJoined { node }
                | EventKind::NodeRestarted { node } if *node == id)
        })
    }

    /// Returns the recent reports of nodes.
    pub fn words(&self) -> impl Iterator<Item = (NodeId, &NodeReport)> {
        let words = self.report.words.iter();
        words
            .filter(|one| one.ago_ms <= WORD_AGE_MAX_MS)
            .map(|one| (one.node, &one.word))
    }

    /// Returns the recent reports of nodes on their devices.
    pub fn device_words(&self) -> BTreeMap<DeviceId, DeviceReport> {
        let words = self.words().flat_map(|(_, word)| &word.devices);
        words.map(|word| (word.device, *word)).collect()
    }

    /// Groups with a member on one of these devices; `left` counts only those that hold data.
    pub fn held(&self, is_meant: impl Fn(DeviceId) -> bool) -> Held {
        let in_use = self.pools_in_use();
        let mut held = Held::default();
        for group in self.map.groups() {
            held.total += 1;
            if group.members.iter().any(|m| is_meant(m.device)) {
                held.groups += 1;
                held.left += usize::from(in_use.contains(&group.pool));
            }
        }
        held
    }

    /// Counts the groups with a member on a node.
    pub fn held_by(&self, node: NodeId) -> Held {
        let devices = self.devices_of(node);
        self.held(|device| devices.contains(&device))
    }

    /// Devices of a node.
    pub fn devices_of(&self, node: NodeId) -> BTreeSet<DeviceId> {
        let devices = self.map.devices().filter(|device| device.node == node);
        devices.map(|device| device.id).collect()
    }

    /// Devices that a pool may use.
    pub fn usable<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = &'a meta::Device> {
        self.map.devices().filter(move |device| {
            let fits = pool
                .device_class
                .as_ref()
                .is_none_or(|c| *c == device.class);
            let node = self.map.node(device.node);
            fits && device.state != DeviceState::Failed
                && !device.draining
                && node.is_some_and(meta::Node::keeps_data)
        })
    }

    /// How full the fullest device of a pool is, if any is heard of.
    pub fn fullest<'a>(
        &'a self,
        pool: &'a Pool,
        words: &BTreeMap<DeviceId, DeviceReport>,
    ) -> Option<Fullest<'a>> {
        let heard = self.usable(pool).filter_map(|device| {
            let word = words.get(&device.id)?;
            let percent = word
                .used_bytes
                .saturating_mul(100)
                .checked_div(word.capacity_bytes)?;
            Some(Fullest {
                device,
                percent: u8::try_from(percent.min(100)).unwrap_or(100),
                word: *word,
            })
        });
        heard.max_by_key(|fullest| fullest.percent)
    }

    /// Returns the provisioned bytes of a pool, all copies counted, and the capacity of its devices in bytes.
    pub fn provisioned(&self, pool: &Pool) -> (u64, u64) {
        let volumes = self.volumes.iter();
        let of_pool = volumes.filter(|volume| volume.pool == pool.name && is_listed(volume));
        let sizes = of_pool.map(|volume| volume.size_bytes);
        let provisioned = sizes.fold(0, u64::saturating_add);
        let devices = self.usable(pool).map(|device| device.size_bytes);
        let capacity = devices.fold(0, u64::saturating_add);
        (
            provisioned.saturating_mul(u64::from(pool.replicas)),
            capacity,
        )
    }

    /// Returns true if more is provisioned in a pool than its devices hold.
    pub fn is_over_committed(&self, pool: &Pool) -> bool {
        let (provisioned, capacity) = self.provisioned(pool);
        provisioned > capacity && capacity > 0
    }

    /// The groups of a pool, counted. A member that is not there does not count as in sync.
    pub fn groups_of(&self, pool: &Pool) -> types::Groups {
        let mut counts = types::Groups::default();
        for group in self.map.groups().filter(|group| group.pool == pool.id) {
            let in_sync = self.present(group);
            counts.total += 1;
            counts.in_sync += usize::from(in_sync >= usize::from(pool.replicas));
            counts.degraded += usize::from(in_sync < usize::from(pool.replicas));
            counts.waiting += usize::from(in_sync < usize::from(pool.min_in_sync));
            let is = |state| group.members.iter().any(|m| m.state == state);
            counts.syncing += usize::from(is(ReplicaState::Syncing));
            counts.moving += usize::from(group.members.iter().any(|m| m.leaving));
        }
        counts
    }

    /// Full devices that writes to the pool wait for: those of replicas in sync, for none is taken out for
    /// being full, and those of replicas that groups with too few in sync lack. Those of nodes that are away
    /// may be back soon.
    pub fn waits_for_room(
        &self,
        pool: &str,
        is_full: &dyn Fn(DeviceId) -> bool,
    ) -> BTreeSet<DeviceId> {
        let Some(pool) = self.map.pools().find(|one| one.name.as_str() == pool) else {
            return BTreeSet::new();
        };
        let mut full = BTreeSet::new();
        for group in self.map.groups().filter(|group| group.pool == pool.id) {
            let lacks = self.present(group) < usize::from(pool.min_in_sync);
            let lacking = self.lacking(group).filter(|_| lacks);
            let members = group.in_sync().chain(lacking);
            let devices = members.filter_map(|member| self.map.device(member.device));
            let served = devices.filter(|device| self.map.is_served(device));
            full.extend(served.map(|device| device.id).filter(|id| is_full(*id)));
        }
        full
    }

    /// Members of a group that are to be in sync and are not.
    pub fn lacking<'a>(&'a self, group: &'a PlacementGroup) -> impl Iterator<Item = &'a Member> {
        let lacks = |member: &&Member| !(member.is_in_sync() && self.map.is_valid(member));
        group.wanted().filter(lacks)
    }

    /// Copies of a group that are in sync and there.
    pub fn present(&self, group: &PlacementGroup) -> usize {
        let present = group.in_sync().filter(|m| self.map.is_valid(m));
        present.count()
    }
}

/// The device of a pool that is the first to be full.
#[derive(Debug, Clone, Copy)]
pub struct Fullest<'a> {
    /// The device.
    pub device: &'a meta::Device,
    /// How much of it is in use.
    pub percent: u8,
    /// Report of its node.
    pub word: DeviceReport,
}

/// Groups on some devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// All groups of the cluster.
    pub total: usize,
    /// Those with a member there.
    pub groups: usize,
    /// Those of them that hold data.
    pub left: usize,
}

/// A node's part in the metadata service.
pub fn part(raft: &RaftStatus, node: NodeId) -> types::MetaPart {
    if raft.leader == Some(node) {
        types::MetaPart::Leader
    } else if raft.voters.contains(&node) {
        types::MetaPart::Voter
    } else if raft.learners.contains(&node) {
        types::MetaPart::Learner
    } else {
        types::MetaPart::None
    }
}

/// Returns the background work, and the number of groups left for each.
pub fn work(view: &View) -> BTreeMap<Work, usize> {
    let mut left = BTreeMap::new();
    for node in view
        .map
        .nodes()
        .filter(|node| node.admin_state != AdminState::Active)
    {
        left.insert(Work::Node(node.id), view.held_by(node.id).left);
    }
    for device in view.map.devices().filter(|device| device.draining) {
        let held = view.held(|id| id == device.id);
        left.insert(Work::Device(device.id), held.left);
    }
    let in_use: BTreeSet<PoolId> = view.pools_in_use();
    for pool in view.map.pools().filter(|pool| in_use.contains(&pool.id)) {
        let groups = view.groups_of(pool);
        // While nothing is synced, health says what that waits for.
        if groups.degraded > 0 && groups.syncing > 0 {
            left.insert(Work::Sync(pool.id), groups.degraded);
        }
        if groups.moving > 0 {
            left.insert(Work::Move(pool.id), groups.moving);
        }
    }
    left
}

/// Returns true if lists show the volume: it is neither being deleted, nor an import under way, nor a
/// segment of a filesystem.
pub fn is_listed(volume: &meta::Volume) -> bool {
    volume.state == meta::VolumeState::Ready
        && volume.segment.is_none()
        && !volume.name.starts_with(meta::IMPORT_PREFIX)
}
