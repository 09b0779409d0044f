//! Nodes of a cluster in one process, each with a data thread that answers the others.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use fabric::{
    ClusterView, DeviceConfig, Fabric, FabricConfig, FabricEngine, Grant, GroupView, MemberView,
    MetaRequest, Missing, Reach, StoreKind, VolumeHandle,
};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_store::file::Allocation;
use fabric_transport::control::NetConfig;
use fabric_transport::hello::Wire;
use fabric_transport::identity::{Identity, node_name};
use fabric_transport::queue_pair::pair::Offered;
use fabric_types::ids::LayerId;
use fabric_types::io::{Engine, IoResult, Op, Request, Submit, Tag};
use fabric_types::membership::{Member, ReplicaSet, ReplicaState};
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

pub const CLUSTER: [u8; 16] = [7; 16];
pub const MIB: u64 = 1 << 20;
pub const LAYER: LayerId = LayerId(5);
/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(60);
pub const PG: PgId = PgId(0);

/// A certificate authority.
pub struct Authority {
    certificate: String,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self {
            certificate,
            issuer: rcgen::Issuer::new(params, key),
        }
    }

    /// A certificate and key for a node, in PEM, valid until so long from an hour ago.
    pub fn certify(&self, node: u64, valid: Duration) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let names = vec![node_name(CLUSTER, NodeId(node))];
        let mut params = rcgen::CertificateParams::new(names).unwrap();
        params.not_before = (SystemTime::now() - Duration::from_secs(7200)).into();
        params.not_after = (SystemTime::now() - Duration::from_secs(3600) + valid).into();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        (certificate, key.serialize_pem())
    }

    /// An identity that trusts `trusted`.
    pub fn identity(&self, node: u64, trusted: &Self, valid: Duration) -> Identity {
        let (certificate, key) = self.certify(node, valid);
        let ca = trusted.certificate.as_bytes();
        Identity::from_pem(ca, certificate.as_bytes(), key.as_bytes()).unwrap()
    }

    pub fn good(&self, node: u64) -> Identity {
        self.identity(node, self, Duration::from_secs(24 * 3600))
    }
}

/// A data thread without guests.
struct Server {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Nodes that are told the same maps, and the epoch of the last one.
#[derive(Default)]
pub struct World {
    fabrics: Vec<(u64, Fabric)>,
    peers: HashMap<NodeId, SocketAddr>,
    /// What each node is told of all others, if not that they are what they are.
    pub members: HashMap<u64, HashMap<NodeId, MemberView>>,
    epoch: u64,
}

/// The layer and its lease.
fn granted(node: u64, generation: Generation) -> (LayerId, Grant) {
    let grant = Grant {
        holder: Some(NodeId(node)),
        generation,
    };
    (LAYER, grant)
}

impl World {
    /// Grants a node the next lease of the layer, and passes it to all nodes.
    pub fn grant(&mut self, node: u64) -> Generation {
        static GENERATION: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(2);
        let generation = Generation(GENERATION.fetch_add(1, Ordering::Relaxed));
        for (_, fabric) in &self.fabrics {
            fabric.set_layers([granted(node, generation)]);
        }
        generation
    }

    /// Tells every node that the only group is this one.
    pub fn set_map(&mut self, set: &ReplicaSet) {
        self.epoch += 1;
        for (id, fabric) in &self.fabrics {
            let label = fabric.devices()[0].label.device;
            fabric.set_map(ClusterView {
                epoch: Epoch(self.epoch),
                peers: self.peers.clone(),
                members: match self.members.get(id) {
                    Some(members) => members.clone(),
                    None => self.fabrics.iter().map(|(id, _)| member(*id)).collect(),
                },
                groups: vec![GroupView {
                    pg: set.pg(),
                    epoch: Epoch(self.epoch),
                    min_in_sync: set.min_in_sync(),
                    power_lost: set.power_lost(),
                    members: set.members().to_vec(),
                    device: Some(*id),
                    incoming: None,
                }],
                own_devices: vec![(*id, label)],
            });
        }
    }
}

/// What the map says of a node as it is started here.
pub fn member(node: u64) -> (NodeId, MemberView) {
    let view = MemberView {
        incarnation: Incarnation(node * 10),
        former: Vec::new(),
        reach: Reach::All,
    };
    (NodeId(node), view)
}

/// A node.
pub struct Node {
    pub fabric: Fabric,
    pub id: u64,
    world: Mutex<Arc<Mutex<World>>>,
    asked: Arc<Mutex<Vec<MetaRequest>>>,
    _dir: tempfile::TempDir,
    server: Option<Server>,
}

pub fn config(node: u64, path: std::path::PathBuf, identity: Identity, wire: Wire) -> FabricConfig {
    let device = DeviceConfig {
        path,
        missing: Missing::CreateFile {
            size_bytes: 128 * MIB,
            allocation: Allocation::Sparse,
        },
    };
    let store = StoreKind::Devices(vec![device]);
    let mut config = FabricConfig::new(NodeId(node), Incarnation(node * 10), CLUSTER, store);
    config.scrub.enabled = false;
    config.clean.enabled = false;
    config.params.buffer_bytes = 16 << 20;
    config.params.leaf_cache_bytes = 16 << 20;
    config.net = Some(NetConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        identity,
        wire,
        pairs: Offered::No("the machine that tests run on has no device".to_owned()),
    });
    config
}

impl Node {
    pub fn start(id: u64, identity: Identity, wire: Wire) -> Self {
        Self::start_as(id, identity, wire, CLUSTER)
    }

    pub fn start_as(id: u64, identity: Identity, wire: Wire, cluster: [u8; 16]) -> Self {
        Self::start_with(id, identity, wire, |config| config.cluster = cluster)
    }

    pub fn start_with(
        id: u64,
        identity: Identity,
        wire: Wire,
        configure: impl FnOnce(&mut FabricConfig),
    ) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut config = config(id, dir.path().join("device"), identity, wire);
        configure(&mut config);
        let fabric = Fabric::open(config).unwrap();
        fabric.set_layers([(LAYER, Grant::default())]);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let asks = Arc::clone(&asked);
        fabric.set_meta_sender(Box::new(move |ask| asks.lock().unwrap().push(ask)));
        let world = World {
            fabrics: vec![(id, fabric.clone())],
            ..World::default()
        };
        let mut node = Self {
            fabric,
            id,
            world: Mutex::new(Arc::new(Mutex::new(world))),
            asked,
            _dir: dir,
            server: None,
        };
        node.serve();
        node
    }

    /// Starts the thread that answers other nodes.
    pub fn serve(&mut self) {
        let mut engine = self.fabric.engine().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                engine.kick();
                engine.reap(&mut |_, _| panic!("it asked nothing"));
                wait(&engine, 20);
            }
        });
        self.server = Some(Server { stop, thread });
    }

    pub fn world(&self) -> Arc<Mutex<World>> {
        Arc::clone(&self.world.lock().unwrap())
    }

    /// With the next map, all nodes that were introduced to each other reach this one there.
    pub fn reach(&self, node: u64, address: SocketAddr) {
        let world = self.world();
        world.lock().unwrap().peers.insert(NodeId(node), address);
    }

    /// Its connections end, and nobody answers new ones.
    pub fn stop_serving(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop.store(true, Ordering::Release);
            server.thread.join().unwrap();
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.fabric.address().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_serving();
    }
}

/// Waits until the engine has something, or some milliseconds.
pub fn wait(engine: &FabricEngine, milliseconds: i64) {
    let fd = engine.wait_fd();
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: milliseconds * 1_000_000,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap();
}

/// Nodes 1, 2, … that know each other.
pub fn cluster(ca: &Authority, count: u64, wire: Wire) -> Vec<Node> {
    let nodes: Vec<_> = (1..=count)
        .map(|id| Node::start(id, ca.good(id), wire))
        .collect();
    introduce(&nodes);
    nodes
}

pub fn introduce(nodes: &[Node]) {
    let world = World {
        fabrics: nodes.iter().map(|n| (n.id, n.fabric.clone())).collect(),
        peers: nodes.iter().map(|n| (NodeId(n.id), n.address())).collect(),
        members: HashMap::new(),
        epoch: 0,
    };
    let world = Arc::new(Mutex::new(world));
    for node in nodes {
        *node.world.lock().unwrap() = Arc::clone(&world);
    }
}

/// A set of these nodes, all in sync but those in `out`.
pub fn set_of(nodes: &[u64], out: &[u64], epoch: u64) -> ReplicaSet {
    let members = nodes
        .iter()
        .map(|&node| Member {
            node: NodeId(node),
            incarnation: Incarnation(node * 10),
            state: match out.contains(&node) {
                true => ReplicaState::Out,
                false => ReplicaState::InSync,
            },
            since: Epoch(1),
        })
        .collect();
    ReplicaSet::new(PG, Epoch(epoch), 1, members)
}

/// A data thread with one volume, and guests that wait.
pub struct Guest {
    pub engine: FabricEngine,
    pub volume: VolumeHandle,
    pub actions: Vec<MetaRequest>,
    asked: Arc<Mutex<Vec<MetaRequest>>>,
    world: Arc<Mutex<World>>,
    /// What ended while the map was changed.
    ended: Vec<(u64, IoResult)>,
}

impl Guest {
    pub fn new(node: &Node, set: ReplicaSet) -> Self {
        let params = VolumeParams {
            layer: LAYER,
            size_bytes: 64 * MIB,
            generation: node.world().lock().unwrap().grant(node.id),
            epoch: Epoch(1),
            read_only: false,
            durability: Durability::Flush,
            on_full: OnFull::default(),
        };
        // Taken over while nobody else has a say: what is tested begins after that.
        let others: Vec<u64> = set.members().iter().map(|m| m.node.0).collect();
        let others: Vec<u64> = others.into_iter().filter(|&id| id != node.id).collect();
        let all: Vec<u64> = others.iter().copied().chain([node.id]).collect();
        node.world()
            .lock()
            .unwrap()
            .set_map(&set_of(&all, &others, 1));
        let volume = node.fabric.open_volume(&params).unwrap();
        let start = Instant::now();
        while !volume.is_recovered() {
            assert!(start.elapsed() < WAIT_MAX, "not taken over");
            std::thread::sleep(Duration::from_millis(1));
        }
        node.asked.lock().unwrap().clear();
        node.world().lock().unwrap().set_map(&set);
        Self {
            engine: node.fabric.engine().unwrap(),
            volume,
            actions: Vec::new(),
            asked: Arc::clone(&node.asked),
            world: node.world(),
            ended: Vec::new(),
        }
    }

    /// Starts a request; its outcome, if it is there at once.
    pub fn start(&mut self, tag: u64, op: Op, offset: u64, buffer: &mut [u8]) -> Option<IoResult> {
        let outcome = self.submit(tag, op, offset, buffer);
        self.engine.kick();
        outcome
    }

    /// Hands a request over that is yet to be kicked.
    pub fn submit(&mut self, tag: u64, op: Op, offset: u64, buffer: &mut [u8]) -> Option<IoResult> {
        let buffers = [libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        }];
        let request = Request {
            tag: Tag(tag),
            op,
            offset,
            len: buffer.len() as u64,
            buffers: if buffer.is_empty() { &[] } else { &buffers },
        };
        // SAFETY: whoever starts a request keeps its buffer until it is finished, or until the engine is
        // dropped.
        match unsafe { self.engine.submit(&self.volume, &request) } {
            Submit::Done(result) => Some(result),
            Submit::Busy => panic!("too much at once"),
            Submit::Pending => None,
        }
    }

    /// Goes on until `until` is content with what was finished.
    pub fn until(&mut self, mut until: impl FnMut(&mut Self, &[(u64, IoResult)]) -> bool) {
        let mut finished = std::mem::take(&mut self.ended);
        let start = Instant::now();
        while start.elapsed() < WAIT_MAX {
            self.engine
                .reap(&mut |tag, result| finished.push((tag.0, result)));
            self.actions.append(&mut self.asked.lock().unwrap());
            if until(self, &finished) {
                return;
            }
            wait(&self.engine, 10);
        }
        panic!("not within {WAIT_MAX:?}");
    }

    pub fn run(&mut self, op: Op, offset: u64, buffer: &mut [u8]) -> IoResult {
        self.ended.clear();
        if let Some(result) = self.start(42, op, offset, buffer) {
            return result;
        }
        let mut outcome = None;
        self.until(|_, finished| {
            outcome = finished.first().map(|(_, result)| *result);
            outcome.is_some()
        });
        outcome.unwrap()
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> IoResult {
        self.run(Op::Write { fua: false }, offset, &mut bytes.to_vec())
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut buffer = vec![0xee; len];
        self.run(Op::Read, offset, &mut buffer).unwrap();
        buffer
    }

    pub fn flush(&mut self) -> IoResult {
        self.run(Op::Flush, 0, &mut [])
    }

    pub fn set_map(&mut self, set: ReplicaSet) -> Vec<(u64, IoResult)> {
        self.world.lock().unwrap().set_map(&set);
        let mut finished = Vec::new();
        self.engine
            .reap(&mut |tag, result| finished.push((tag.0, result)));
        self.actions.append(&mut self.asked.lock().unwrap());
        self.ended.extend_from_slice(&finished);
        finished
    }
}

/// Bytes that differ from block to block.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (seed.wrapping_mul(31) ^ (at / 512) ^ at.wrapping_mul(7)) as u8)
        .collect()
}

pub fn both_wires() -> [Wire; 2] {
    [Wire::Tls, Wire::Crc]
}
