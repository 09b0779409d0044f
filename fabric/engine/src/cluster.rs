//! A node of several: what its data threads and background rounds share about the cluster, and how a newer
//! map reaches them.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use fabric_replication::groups::Groups;
use fabric_replication::replica::Peers;
use fabric_replication::unresolved::Unresolved;
use fabric_replication::watermark::LANES_MAX;
use fabric_transport::inbox::EventFd;
use fabric_transport::members::MemberView;
use fabric_types::membership::{Member, ReplicaSet};
use fabric_types::{Epoch, Incarnation, NodeId, PgId};

use self::traffic::Counters;
use super::stores::Stores;

mod pace;
pub mod requests;
pub mod takeover;
pub mod traffic;
pub mod worker;

/// The cluster map as far as the data path needs it.
#[derive(Debug, Clone)]
pub struct ClusterView {
    /// Its version.
    pub epoch: Epoch,
    /// Where the nodes are reached. One that is left out is not connected to again.
    pub peers: HashMap<NodeId, SocketAddr>,
    /// The nodes of the cluster. No other is let in.
    pub members: HashMap<NodeId, MemberView>,
    /// All placement groups of all pools.
    pub groups: Vec<GroupView>,
    /// The devices of this node: their numbers in the map, and the identities in their superblocks.
    pub own_devices: Vec<(u64, [u8; 16])>,
}

/// A placement group.
#[derive(Debug, Clone)]
pub struct GroupView {
    /// Pool and index, see [`PgId`].
    pub pg: PgId,
    /// Epoch of its last change.
    pub epoch: Epoch,
    /// Fewest in-sync replicas that may acknowledge a write.
    pub min_in_sync: usize,
    /// Its replicas: one for each node at most, and of one a second that the group is [coming
    /// to](fabric_types::incoming).
    pub members: Vec<Member>,
    /// See [`ReplicaSet::power_lost`].
    pub power_lost: Epoch,
    /// Number of this node's device that holds one of them.
    pub device: Option<u64>,
    /// Number of this node's device that the group is [coming to](fabric_types::incoming).
    pub incoming: Option<u64>,
}

/// Placement groups in which comparing this node's replicas fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyncStall {
    /// How many.
    pub groups: u32,
    /// When an attempt brought something last, or the first one began: of the group where that is longest
    /// ago. Nobody who waits for these groups should be told when they are done.
    pub since: Instant,
}

/// What the data path asks of meta. It is said again when a newer map leaves the reason in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaRequest {
    /// A replica failed a request that was made under this map: commit a map without it.
    ReportFailed {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Epoch of the group that the reporter knows.
        epoch: Epoch,
    },
    /// A replica is so slow that every write waits for it: commit a map without it until it is faster.
    ReportSlow {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Epoch of the group that the reporter knows.
        epoch: Epoch,
    },
    /// This node's replica has been compared in the round that began at `since`, and lacks nothing.
    Promote {
        /// Group.
        pg: PgId,
        /// Epoch at which it became syncing.
        since: Epoch,
    },
}

type MetaSender = Box<dyn Fn(MetaRequest) + Send + Sync>;

/// A version of the map, as replica sets.
#[derive(Debug, Clone)]
pub struct Map {
    /// Its version.
    pub epoch: Epoch,
    /// Sorted by group.
    pub sets: Arc<Vec<ReplicaSet>>,
}

/// See the module.
pub struct Cluster {
    /// This node.
    pub node: NodeId,
    /// This start of it.
    pub incarnation: Incarnation,
    /// The groups whose members this node's devices are.
    pub groups: Arc<Groups>,
    /// Requests between nodes.
    pub traffic: Arc<Counters>,
    unresolved: Arc<[Arc<Unresolved>]>,
    map: Mutex<Map>,
    changed: Condvar,
    /// Of `map`, to look at without the lock.
    epoch: AtomicU64,
    /// How often volumes were revoked.
    revocations: AtomicU64,
    eventfds: Mutex<Vec<Weak<EventFd>>>,
    meta_sender: OnceLock<MetaSender>,
    /// What all clients count their time from.
    start: Instant,
}

impl Cluster {
    /// Before the first map: nothing is served.
    pub fn new(node: NodeId, incarnation: Incarnation) -> Self {
        Self {
            node,
            incarnation,
            groups: Arc::default(),
            traffic: Arc::default(),
            unresolved: (0..LANES_MAX).map(|_| Arc::default()).collect(),
            map: Mutex::new(Map {
                epoch: Epoch(0),
                sets: Arc::default(),
            }),
            changed: Condvar::new(),
            epoch: AtomicU64::new(0),
            revocations: AtomicU64::new(0),
            eventfds: Mutex::default(),
            meta_sender: OnceLock::new(),
            start: Instant::now(),
        }
    }

    /// What the replica machine of a data thread shares with the others.
    pub fn peers_of(&self, lane: usize) -> Peers {
        Peers {
            groups: Arc::clone(&self.groups),
            unresolved: Arc::clone(&self.unresolved),
            lane,
        }
    }

    /// Where unresolved writes are remembered, in a share for each data thread.
    pub fn unresolved(&self) -> Arc<[Arc<Unresolved>]> {
        Arc::clone(&self.unresolved)
    }

    /// A layer is gone.
    pub fn forget(&self, layer: fabric_types::ids::LayerId) {
        self.unresolved.iter().for_each(|lane| lane.forget(layer));
    }

    /// When the clients' clock began.
    pub fn started(&self) -> Instant {
        self.start
    }

    /// A moment by the clients' clock; 0 if it was before their time.
    pub fn us_at(&self, moment: Instant) -> u64 {
        moment.saturating_duration_since(self.start).as_micros() as u64
    }

    /// The moment at which the clients' clock shows this.
    pub fn moment_at(&self, us: u64) -> Instant {
        self.start + Duration::from_micros(us)
    }

    /// Version of the newest map.
    #[inline]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// The newest map.
    pub fn map(&self) -> Map {
        self.map.lock().expect("no panic under this lock").clone()
    }

    /// A volume was revoked: clients end what waits of it.
    pub fn volume_revoked(&self) {
        // Before the eventfds: a thread that one wakes sees the newer count.
        self.revocations.fetch_add(1, Ordering::AcqRel);
        self.signal();
    }

    /// How often that was said.
    pub fn revocations(&self) -> u64 {
        self.revocations.load(Ordering::Acquire)
    }

    fn signal(&self) {
        let eventfds = self.eventfds.lock().expect("no panic under this lock");
        eventfds
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|eventfd| eventfd.signal());
    }

    /// An eventfd that becomes readable for every newer map and when a volume is revoked.
    pub fn subscribe(&self) -> std::io::Result<Arc<EventFd>> {
        let eventfd = Arc::new(EventFd::new()?);
        let mut eventfds = self.eventfds.lock().expect("no panic under this lock");
        eventfds.retain(|eventfd| eventfd.strong_count() > 0);
        eventfds.push(Arc::downgrade(&eventfd));
        Ok(eventfd)
    }

    /// Waits until the map is at least of this epoch; false if it is not after `patience`.
    pub fn wait_for(&self, epoch: Epoch, patience: Duration) -> bool {
        let map = self.map.lock().expect("no panic under this lock");
        let behind = |map: &mut Map| map.epoch < epoch;
        let waited = self.changed.wait_timeout_while(map, patience, behind);
        let (map, _) = waited.expect("no panic under this lock");
        map.epoch >= epoch
    }

    /// Sets what sends requests to meta; the first one stays. Data threads call it: it must neither block nor
    /// call back.
    pub fn set_meta_sender(&self, meta_sender: MetaSender) {
        if self.meta_sender.set(meta_sender).is_err() {
            tracing::error!("the fabric has a sender of requests to meta already");
        }
    }

    /// Sends a request to meta. Without a sender it is dropped.
    pub fn ask(&self, ask: MetaRequest) {
        if let Some(meta_sender) = self.meta_sender.get() {
            meta_sender(ask);
        }
    }

    /// Takes a newer map up: first the replicas', so that what clients send under it finds it known here.
    pub fn set_map(&self, view: ClusterView, stores: Option<&Stores>) {
        let mut map = self.map.lock().expect("no panic under this lock");
        if view.epoch <= map.epoch {
            return;
        }
        let devices = view.own_devices.iter();
        let local = |(number, label): &(u64, [u8; 16])| {
            let index = stores.map_or(Some(0), |stores| stores.index_of(label))?;
            Some((*number, index))
        };
        let devices: HashMap<u64, u32> = devices.filter_map(local).collect();
        let mut pools: HashMap<u64, u32> = HashMap::new();
        for group in &view.groups {
            *pools.entry(group.pg.0 >> 32).or_default() += 1;
        }
        let mut held = Vec::new();
        for group in &view.groups {
            let own = [
                (group.pg, self.node, group.device),
                (group.pg.incoming(), self.node.incoming(), group.incoming),
            ];
            for (pg, name, device) in own {
                let device = device.and_then(|number| devices.get(&number));
                let member = group.members.iter().find(|m| m.node == name);
                let (Some(member), Some(&device)) = (member, device) else {
                    continue;
                };
                let of_groups = pools[&(pg.0 >> 32)];
                self.groups.place(pg, device, of_groups, group.epoch);
                self.groups.set_member(pg, member, self.incarnation);
                held.push(pg);
            }
        }
        self.groups.keep(&held);
        self.groups.applied(view.epoch);
        let mut sets: Vec<ReplicaSet> = view
            .groups
            .into_iter()
            .map(|g| {
                let set = ReplicaSet::new(g.pg, g.epoch, g.min_in_sync, g.members);
                set.with_power_lost(g.power_lost).near(self.node)
            })
            .collect();
        sets.sort_unstable_by_key(|set| set.pg().0);
        *map = Map {
            epoch: view.epoch,
            sets: Arc::new(sets),
        };
        self.epoch.store(view.epoch.0, Ordering::Release);
        drop(map);
        self.changed.notify_all();
        self.signal();
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("node", &self.node)
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}

/// One data thread's view of the map.
pub struct MapReader {
    cluster: Arc<Cluster>,
    eventfd: Arc<EventFd>,
    seen: Epoch,
}

impl MapReader {
    /// A reader that has seen `map`.
    pub fn new(cluster: &Arc<Cluster>) -> std::io::Result<(Self, Map)> {
        let eventfd = cluster.subscribe()?;
        let map = cluster.map();
        let reader = Self {
            cluster: Arc::clone(cluster),
            eventfd,
            seen: map.epoch,
        };
        Ok((reader, map))
    }

    /// The cluster.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Signalled for every newer map, and when a volume was revoked.
    pub fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }

    /// True if [`news`](Self::news) is to be asked: there is a newer map, or the eventfd is still to be
    /// cleared.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.cluster.epoch() != self.seen || self.eventfd.is_signalled()
    }

    /// The sets that changed since the last call, if there is a newer map.
    pub fn news(&mut self) -> Option<Vec<ReplicaSet>> {
        if self.eventfd.is_signalled() {
            self.eventfd.clear();
        }
        if self.cluster.epoch() == self.seen {
            return None;
        }
        let map = self.cluster.map();
        let since = std::mem::replace(&mut self.seen, map.epoch);
        let news = map.sets.iter().filter(|set| set.epoch() > since);
        Some(news.cloned().collect())
    }

    /// What was told last was not taken up: it is told again.
    pub fn tell_again(&mut self) {
        self.seen = Epoch(0);
    }
}
