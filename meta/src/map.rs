//! The cluster map as the data path reads it: a snapshot in memory, shared, that never changes.
//!
//! Taking one costs a reference count. A change of the map makes a new snapshot that shares what did not
//! change.

use std::collections::BTreeMap;
use std::sync::Arc;

use namespace::FilesystemId;

use crate::ids::{DeviceId, Epoch, NamespaceGroupId, NodeId, PoolId};
use crate::level::Level;
use crate::model::{
    Cluster, Device, Filesystem, GroupId, Member, NamespaceGroup, Node, PlacementGroup, Pool,
};
use crate::state::group::{Presence, is_served, presence_of};
use crate::state::tables::{
    CLUSTER, DEVICES, FILESYSTEMS, NAMESPACE_GROUPS, NODES, PLACEMENT_GROUPS, POOLS,
};
use crate::state::{Read, ReadError, Writes};

/// A version of the cluster map.
#[derive(Debug, Clone, Default)]
pub struct ClusterMap {
    cluster: Option<Arc<Cluster>>,
    nodes: BTreeMap<NodeId, Arc<Node>>,
    devices: BTreeMap<DeviceId, Arc<Device>>,
    pools: BTreeMap<PoolId, Arc<Pool>>,
    /// By pool, then by index.
    groups: BTreeMap<PoolId, Arc<Vec<Arc<PlacementGroup>>>>,
    namespace_groups: BTreeMap<NamespaceGroupId, Arc<NamespaceGroup>>,
    /// By name.
    filesystems: BTreeMap<Arc<str>, Arc<Filesystem>>,
}

impl ClusterMap {
    /// Its version; 0 before the cluster is made.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.cluster
            .as_ref()
            .map_or(Epoch::default(), |cluster| cluster.epoch)
    }

    /// What all nodes of the cluster understand.
    #[must_use]
    pub fn level(&self) -> Level {
        self.cluster().map_or(Level::FIRST, |cluster| cluster.level)
    }

    /// The cluster, once it is made.
    #[must_use]
    pub fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_deref()
    }

    /// A node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id).map(Arc::as_ref)
    }

    /// The name of a node; its number if the map does not have it.
    #[must_use]
    pub fn node_name(&self, id: NodeId) -> String {
        match self.node(id) {
            Some(node) => node.name.to_string(),
            None => id.to_string(),
        }
    }

    /// The path of a device; its number if the map does not have it.
    #[must_use]
    pub fn device_path(&self, id: DeviceId) -> String {
        match self.device(id) {
            Some(device) => device.path.clone(),
            None => id.to_string(),
        }
    }

    /// A node's record. The same one in two maps: it was not written in between.
    pub(crate) fn node_record(&self, id: NodeId) -> Option<&Arc<Node>> {
        self.nodes.get(&id)
    }

    /// All nodes, by number.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values().map(Arc::as_ref)
    }

    /// A device.
    #[must_use]
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(&id).map(Arc::as_ref)
    }

    /// All devices, by number.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.values().map(Arc::as_ref)
    }

    /// A pool.
    #[must_use]
    pub fn pool(&self, id: PoolId) -> Option<&Pool> {
        self.pools.get(&id).map(Arc::as_ref)
    }

    /// All pools, by number.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values().map(Arc::as_ref)
    }

    /// A placement group.
    #[must_use]
    pub fn group(&self, id: GroupId) -> Option<&Arc<PlacementGroup>> {
        self.groups.get(&id.pool)?.get(id.index.0 as usize)
    }

    /// All placement groups, by pool and index.
    pub fn groups(&self) -> impl Iterator<Item = &Arc<PlacementGroup>> {
        self.groups.values().flat_map(|groups| groups.iter())
    }

    /// The Raft groups that keep namespaces.
    pub fn namespace_groups(&self) -> impl Iterator<Item = &NamespaceGroup> {
        self.namespace_groups.values().map(Arc::as_ref)
    }

    /// A filesystem.
    #[must_use]
    pub fn filesystem(&self, name: &str) -> Option<&Filesystem> {
        self.filesystems.get(name).map(Arc::as_ref)
    }

    /// The name of a filesystem; its number if the map does not have it.
    #[must_use]
    pub fn filesystem_name(&self, id: FilesystemId) -> String {
        let found = self.filesystems().find(|one| one.id == id);
        found.map_or_else(|| id.0.to_string(), |one| one.name.to_string())
    }

    /// All filesystems, by name.
    pub fn filesystems(&self) -> impl Iterator<Item = &Filesystem> {
        self.filesystems.values().map(Arc::as_ref)
    }

    /// Whether a device can be used now: it is online, and the present start of its node, which is up, has
    /// it.
    #[must_use]
    pub fn is_served(&self, device: &Device) -> bool {
        let node = self.node(device.node);
        node.is_some_and(|node| is_served(device, node))
    }

    /// Whether a member's process is, as far as is known, the one that serves its device.
    #[must_use]
    pub fn is_valid(&self, member: &Member) -> bool {
        self.presence(member) == Presence::Valid
    }

    pub(crate) fn presence(&self, member: &Member) -> Presence {
        let device = self.device(member.device);
        let node = device.and_then(|device| self.node(device.node));
        presence_of(member, device, node)
    }

    /// The map that these records hold.
    pub(crate) fn load(view: &dyn Read) -> Result<Self, ReadError> {
        let mut map = Self {
            cluster: CLUSTER.get(view, &())?.map(Arc::new),
            ..Self::default()
        };
        for node in NODES.all(view)? {
            map.nodes.insert(node.id, Arc::new(node));
        }
        for device in DEVICES.all(view)? {
            map.devices.insert(device.id, Arc::new(device));
        }
        for pool in POOLS.all(view)? {
            let groups = PLACEMENT_GROUPS.all_below(view, &pool.id)?;
            let groups = groups.into_iter().map(Arc::new).collect();
            map.groups.insert(pool.id, Arc::new(groups));
            map.pools.insert(pool.id, Arc::new(pool));
        }
        for group in NAMESPACE_GROUPS.all(view)? {
            map.namespace_groups.insert(group.id, Arc::new(group));
        }
        for filesystem in FILESYSTEMS.all(view)? {
            map.take_filesystem(filesystem);
        }
        Ok(map)
    }

    /// The map after these writes; nothing if they do not touch it.
    pub(crate) fn with(&self, writes: &Writes) -> Result<Option<Self>, ReadError> {
        let tables = [
            CLUSTER.prefix(),
            NODES.prefix(),
            DEVICES.prefix(),
            POOLS.prefix(),
            PLACEMENT_GROUPS.prefix(),
            NAMESPACE_GROUPS.prefix(),
            FILESYSTEMS.prefix(),
        ];
        let mut touched = writes
            .iter()
            .filter(|(key, _)| key.first().is_some_and(|byte| tables.contains(byte)))
            .peekable();
        if touched.peek().is_none() {
            return Ok(None);
        }
        let mut map = self.clone();
        for (key, value) in touched {
            map.take(key, value.as_deref())?;
        }
        Ok(Some(map))
    }

    /// Takes one changed record. Keys come in order, so a pool comes before its groups.
    fn take(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<(), ReadError> {
        let table = key[0];
        if let Some(value) = value {
            if table == CLUSTER.prefix() {
                self.cluster = Some(Arc::new(CLUSTER.decode(key, value)?));
            } else if table == NODES.prefix() {
                let node = NODES.decode(key, value)?;
                self.nodes.insert(node.id, Arc::new(node));
            } else if table == DEVICES.prefix() {
                let device = DEVICES.decode(key, value)?;
                self.devices.insert(device.id, Arc::new(device));
            } else if table == POOLS.prefix() {
                let pool = POOLS.decode(key, value)?;
                self.groups.entry(pool.id).or_default();
                self.pools.insert(pool.id, Arc::new(pool));
            } else if table == NAMESPACE_GROUPS.prefix() {
                let group = NAMESPACE_GROUPS.decode(key, value)?;
                self.namespace_groups.insert(group.id, Arc::new(group));
            } else if table == FILESYSTEMS.prefix() {
                self.take_filesystem(FILESYSTEMS.decode(key, value)?);
            } else {
                self.take_group(PLACEMENT_GROUPS.decode(key, value)?);
            }
        } else if table == NODES.prefix() {
            self.nodes.remove(&NodeId(number(&key[1..])));
        } else if table == DEVICES.prefix() {
            self.devices.remove(&DeviceId(number(&key[1..])));
        } else if table == POOLS.prefix() {
            self.pools
                .retain(|_, pool| pool.name.as_bytes() != &key[1..]);
            let pools = &self.pools;
            self.groups.retain(|id, _| pools.contains_key(id));
        } else if table == FILESYSTEMS.prefix() {
            self.filesystems
                .retain(|name, _| name.as_bytes() != &key[1..]);
        }
        Ok(())
    }

    fn take_filesystem(&mut self, filesystem: Filesystem) {
        let name: &str = &filesystem.name;
        self.filesystems.insert(name.into(), Arc::new(filesystem));
    }

    fn take_group(&mut self, group: PlacementGroup) {
        let groups = Arc::make_mut(self.groups.entry(group.pool).or_default());
        let index = group.index.0 as usize;
        if index < groups.len() {
            groups[index] = Arc::new(group);
        } else {
            // A pool's groups are made all at once, in order.
            assert_eq!(index, groups.len(), "groups have no gaps");
            groups.push(Arc::new(group));
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}
