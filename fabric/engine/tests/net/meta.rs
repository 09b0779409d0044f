//! A cluster of nodes with the part of meta that they need: it takes out who fails, and lets in who has been
//! compared.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric::{ClusterView, Fabric, Grant, GroupView, MemberView, MetaRequest, Reach, VolumeHandle};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_transport::hello::Wire;
use fabric_types::ids::LayerId;
use fabric_types::io::Engine;
use fabric_types::membership::{Member, ReplicaState};
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId};

use super::rig::{Authority, MIB, config, wait};

/// Groups of the only pool, which has number 1.
pub const GROUPS: u64 = 16;
/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Volumes that tests use are numbered below this.
const VOLUMES_MAX: u64 = 100;

/// The layer of a volume of that pool.
pub fn layer_of(volume: u64) -> LayerId {
    LayerId(1 << 54 | volume << 26 | 1)
}

/// All groups.
pub fn all_groups() -> HashSet<PgId> {
    (0..GROUPS).map(pg).collect()
}

fn pg(index: u64) -> PgId {
    PgId(1 << 32 | index)
}

/// A process of a node.
struct Process {
    fabric: Fabric,
    incarnation: Incarnation,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    epoch: u64,
    groups: BTreeMap<PgId, (u64, Vec<Member>)>,
    nodes: BTreeMap<u64, Process>,
    addresses: HashMap<NodeId, SocketAddr>,
    asked: Vec<MetaRequest>,
    /// Newest leases by volume.
    leases: HashMap<u64, Grant>,
    min_in_sync: usize,
    /// Nobody is let in.
    closed: bool,
}

/// See the module.
pub struct Cluster {
    state: Arc<Mutex<State>>,
    ca: Authority,
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    devices: u64,
    generation: u64,
}

impl Cluster {
    /// Nodes 1, 2, … with so many devices each, all in sync.
    pub fn start(count: u64, devices: u64) -> Self {
        Self::start_with(count, devices, |_| ())
    }

    /// The same, with the size of each node's device in bytes.
    pub fn start_sized(device_bytes: &[u64]) -> Self {
        Self::start_with(device_bytes.len() as u64, 1, |config| {
            if let fabric::StoreKind::Devices(devices) = &mut config.store {
                devices[0].missing = fabric::Missing::CreateFile {
                    size_bytes: device_bytes[config.node.0 as usize - 1],
                    allocation: fabric_store::file::Allocation::Sparse,
                };
            }
        })
    }

    fn start_with(count: u64, devices: u64, configure: impl Fn(&mut fabric::FabricConfig)) -> Self {
        let state = Arc::new(Mutex::new(State {
            epoch: 0,
            groups: BTreeMap::new(),
            nodes: BTreeMap::new(),
            addresses: HashMap::new(),
            asked: Vec::new(),
            leases: HashMap::new(),
            min_in_sync: 2,
            closed: false,
        }));
        let mut cluster = Self {
            state: Arc::clone(&state),
            ca: Authority::new(),
            dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
            stop: Arc::default(),
            thread: None,
            devices,
            generation: 0,
        };
        for node in 1..=count {
            cluster.boot_with(node, &configure);
        }
        let mut locked = state.lock().unwrap();
        for index in 0..GROUPS {
            let member = |(node, process): (&u64, &Process)| Member {
                node: NodeId(*node),
                incarnation: process.incarnation,
                state: ReplicaState::InSync,
                since: Epoch(1),
            };
            let members = locked.nodes.iter().map(member).collect();
            locked.groups.insert(pg(index), (1, members));
        }
        locked.publish();
        drop(locked);
        let stop = Arc::clone(&cluster.stop);
        cluster.thread = Some(std::thread::spawn(move || {
            while !stop.load(Ordering::Acquire) {
                state.lock().unwrap().serve(devices);
                std::thread::sleep(Duration::from_millis(2));
            }
        }));
        cluster
    }

    /// Where a node's device is.
    pub fn path(&self, node: u64, device: u64) -> PathBuf {
        self.dir.path().join(format!("node-{node}-{device}"))
    }

    /// A device of a node that is made where it is to be.
    pub fn device(&self, node: u64, device: u64) -> fabric::DeviceConfig {
        fabric::DeviceConfig {
            path: self.path(node, device),
            missing: fabric::Missing::CreateFile {
                size_bytes: 256 * MIB,
                allocation: fabric_store::file::Allocation::Sparse,
            },
        }
    }

    /// Starts a node's process; with its register it is known, and in sync nowhere.
    pub fn boot(&mut self, node: u64) {
        self.boot_with(node, |_| ());
    }

    /// The same with devices that nobody makes, and that may lack.
    pub fn boot_lacking(&mut self, node: u64) {
        self.boot_with(node, |config| {
            config.may_lack = true;
            if let fabric::StoreKind::Devices(devices) = &mut config.store {
                let all = devices.iter_mut();
                all.for_each(|device| device.missing = fabric::Missing::Refuse);
            }
        });
    }

    /// Loses a device of a node that does not run.
    pub fn lose(&self, node: u64, device: u64) {
        std::fs::remove_file(self.path(node, device)).unwrap();
    }

    /// The same with a configuration of the test's.
    pub fn boot_with(&mut self, node: u64, configure: impl FnOnce(&mut fabric::FabricConfig)) {
        static STARTS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1000);
        let incarnation = Incarnation(STARTS.fetch_add(1, Ordering::Relaxed));
        let mut config = config(node, self.path(node, 0), self.ca.good(node), Wire::Tls);
        config.incarnation = incarnation;
        if let fabric::StoreKind::Devices(devices) = &mut config.store {
            for device in 1..self.devices {
                devices.push(fabric::DeviceConfig {
                    path: self.path(node, device),
                    ..devices[0].clone()
                });
            }
        }
        configure(&mut config);
        let fabric = Fabric::open(config).unwrap();
        let state = Arc::downgrade(&self.state);
        let asks = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&asks);
        fabric.set_meta_sender(Box::new(move |ask| asked.lock().unwrap().push(ask)));
        let mut engine = fabric.engine().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                engine.kick();
                engine.reap(&mut |_, _| panic!("it asked nothing"));
                wait(&engine, 5);
                let asks = std::mem::take(&mut *asks.lock().unwrap());
                if let Some(state) = state.upgrade().filter(|_| !asks.is_empty()) {
                    state.lock().unwrap().asked.extend(asks);
                }
            }
        });
        let mut state = self.state.lock().unwrap();
        let address = fabric.address().unwrap();
        state.addresses.insert(NodeId(node), address);
        let process = Process {
            fabric,
            incarnation,
            stop,
            thread: Some(thread),
        };
        state.nodes.insert(node, process);
        state.publish_leases();
    }

    /// Ends a node's process; what it acknowledged is on its devices.
    pub fn kill(&mut self, node: u64) {
        let mut state = self.state.lock().unwrap();
        let mut process = state.nodes.remove(&node).unwrap();
        state.addresses.remove(&NodeId(node));
        drop(state);
        process.stop.store(true, Ordering::Release);
        process.thread.take().unwrap().join().unwrap();
    }

    /// The fabric of a node.
    pub fn fabric(&self, node: u64) -> Fabric {
        self.state.lock().unwrap().nodes[&node].fabric.clone()
    }

    /// Opens a volume on a node under the next lease.
    pub fn open(&mut self, node: u64, volume: u64) -> VolumeHandle {
        self.generation += 1;
        let generation = Generation(self.generation);
        let mut state = self.state.lock().unwrap();
        let holder = Some(NodeId(node));
        state.leases.insert(volume, Grant { holder, generation });
        state.publish_leases();
        let epoch = Epoch(state.epoch);
        drop(state);
        let params = VolumeParams {
            layer: layer_of(volume),
            size_bytes: 64 * MIB,
            generation,
            epoch,
            read_only: false,
            durability: Durability::Flush,
            on_full: OnFull::default(),
        };
        self.fabric(node).open_volume(&params).unwrap()
    }

    /// Opens a volume on a node without a lease.
    pub fn open_for_reading(&self, node: u64, volume: u64) -> VolumeHandle {
        let params = VolumeParams {
            layer: layer_of(volume),
            size_bytes: 64 * MIB,
            generation: Generation(0),
            epoch: self.epoch(),
            read_only: true,
            durability: Durability::Flush,
            on_full: OnFull::default(),
        };
        self.fabric(node).open_for_reading(&params).unwrap()
    }

    /// Lets nobody in sync, or goes on with it.
    pub fn set_admission_closed(&self, closed: bool) {
        self.state.lock().unwrap().closed = closed;
    }

    /// Waits until all members are in sync, or these are out.
    pub fn wait_until(&self, what: &str, content: impl Fn(&[Vec<Member>]) -> bool) {
        let start = Instant::now();
        loop {
            let state = self.state.lock().unwrap();
            let groups: Vec<_> = state.groups.values().map(|(_, m)| m.clone()).collect();
            drop(state);
            if content(&groups) {
                return;
            }
            assert!(start.elapsed() < WAIT_MAX, "not {what}: {groups:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn wait_until_in_sync(&self) {
        self.wait_until("in sync", |groups| {
            let mut members = groups.iter().flatten();
            members.all(|member| member.state == ReplicaState::InSync)
        });
    }

    /// Makes a node the only member in sync, as no cluster would.
    pub fn trust_only(&self, node: u64) {
        let mut state = self.state.lock().unwrap();
        state.closed = true;
        state.min_in_sync = 1;
        state.change(|_, member, epoch| {
            let wanted = match member.node == NodeId(node) {
                true => ReplicaState::InSync,
                false => ReplicaState::Out,
            };
            if member.state != wanted {
                (member.state, member.since) = (wanted, epoch);
            }
        });
    }
}

impl Cluster {
    /// The newest map.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.state.lock().unwrap().epoch)
    }

    /// A node is no member of any group from now on.
    pub fn let_go(&self, node: u64) {
        self.state.lock().unwrap().regroup(|members, _| {
            members.retain(|member| member.node != NodeId(node));
        });
    }

    /// It is one of all groups again, out at first.
    pub fn take_in(&self, node: u64) {
        self.state.lock().unwrap().regroup(|members, since| {
            members.push(Member {
                node: NodeId(node),
                incarnation: Incarnation(0),
                state: ReplicaState::Out,
                since,
            });
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap();
        let nodes: Vec<u64> = self.state.lock().unwrap().nodes.keys().copied().collect();
        nodes.into_iter().for_each(|node| self.kill(node));
    }
}

impl State {
    /// Passes the layers and their leases to all nodes.
    fn publish_leases(&self) {
        let granted = |volume| self.leases.get(&volume).copied().unwrap_or_default();
        for process in self.nodes.values() {
            let layers = (0..VOLUMES_MAX).map(|volume| (layer_of(volume), granted(volume)));
            process.fabric.set_layers(layers);
        }
    }

    fn change(&mut self, mut change: impl FnMut(PgId, &mut Member, Epoch)) {
        let epoch = Epoch(self.epoch + 1);
        let mut any = false;
        for (pg, (changed, members)) in &mut self.groups {
            let before = members.clone();
            members
                .iter_mut()
                .for_each(|member| change(*pg, member, epoch));
            if *members != before {
                *changed = epoch.0;
                any = true;
            }
        }
        if any {
            self.epoch = epoch.0;
            self.publish();
        }
    }

    fn regroup(&mut self, change: impl Fn(&mut Vec<Member>, Epoch)) {
        self.epoch += 1;
        for (changed, members) in self.groups.values_mut() {
            *changed = self.epoch;
            change(members, Epoch(self.epoch));
        }
        self.publish();
    }

    /// Does what was asked, and begins what is to be begun.
    fn serve(&mut self, _devices: u64) {
        for ask in std::mem::take(&mut self.asked) {
            match ask {
                MetaRequest::ReportFailed { pg, node, .. }
                | MetaRequest::ReportSlow { pg, node, .. } => {
                    let in_sync = |m: &&Member| m.state == ReplicaState::InSync && m.node != node;
                    if self.groups[&pg].1.iter().any(|m| in_sync(&m)) {
                        self.set(pg, node, ReplicaState::Out);
                    }
                }
                MetaRequest::Promote { pg, since } => {
                    let syncing =
                        |m: &&Member| m.state == ReplicaState::Syncing && m.since == since;
                    let node = self.groups[&pg].1.iter().find(syncing).map(|m| m.node);
                    if let Some(node) = node {
                        self.set(pg, node, ReplicaState::InSync);
                    }
                }
            }
        }
        let starts: BTreeMap<u64, Incarnation> = self
            .nodes
            .iter()
            .map(|(n, p)| (*n, p.incarnation))
            .collect();
        let closed = self.closed;
        self.change(|_, member, epoch| {
            let start = starts.get(&member.node.0);
            let gone = start != Some(&member.incarnation);
            if gone && member.state != ReplicaState::Out {
                (member.state, member.since) = (ReplicaState::Out, epoch);
            } else if let (Some(start), ReplicaState::Out, false) = (start, member.state, closed) {
                member.incarnation = *start;
                (member.state, member.since) = (ReplicaState::Syncing, epoch);
            }
        });
    }

    fn set(&mut self, group: PgId, node: NodeId, wanted: ReplicaState) {
        self.change(|pg, member, epoch| {
            if pg == group && member.node == node {
                // From syncing to in sync nothing changes in what it is sent.
                if wanted == ReplicaState::Out {
                    member.since = epoch;
                }
                member.state = wanted;
            }
        });
    }

    fn members(&self) -> HashMap<NodeId, MemberView> {
        let view = |process: &Process| MemberView {
            incarnation: process.incarnation,
            former: Vec::new(),
            reach: Reach::All,
        };
        let nodes = self.nodes.iter();
        nodes
            .map(|(node, process)| (NodeId(*node), view(process)))
            .collect()
    }

    fn publish(&mut self) {
        self.epoch = self.epoch.max(1);
        for (node, process) in &self.nodes {
            let devices = process.fabric.devices();
            let own_devices: Vec<_> = (0..).zip(devices.iter().map(|d| d.label.device)).collect();
            let count = own_devices.len() as u64;
            let group = |(pg, (epoch, members)): (&PgId, &(u64, Vec<Member>))| GroupView {
                pg: *pg,
                epoch: Epoch(*epoch),
                min_in_sync: self.min_in_sync,
                power_lost: Epoch(0),
                members: members.clone(),
                device: members
                    .iter()
                    .any(|m| m.node == NodeId(*node))
                    .then_some(pg.0 % count.max(1)),
                incoming: None,
            };
            process.fabric.set_map(ClusterView {
                epoch: Epoch(self.epoch),
                peers: self.addresses.clone(),
                members: self.members(),
                groups: self.groups.iter().map(group).collect(),
                own_devices,
            });
        }
    }
}
