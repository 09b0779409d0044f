//! What the data threads share of the network, and how they ask for connections.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread::JoinHandle;

use super::connector::Connector;
use super::counts::AllCounters;
use super::handshake::HandshakeError;
use super::hello::{CREDIT_BYTES, CREDIT_REQUESTS, Hello, VERSIONS, Wire};
use super::identity::Identity;
use super::inbox::{EventFd, Inbox};
use super::members::{Access, Admission, MemberView, Members};
pub use super::peer_routes::{PeerRoute, PeerRoutes};
use fabric_types::ids::LayerId;
use fabric_types::{Incarnation, NodeId};

use crate::queue_pair::pair::Offered;

/// How a node takes part in the storage network.
#[derive(Debug, Clone)]
pub struct NetConfig {
    /// Where other nodes reach it. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Its certificates.
    pub identity: Identity,
    /// How data travel between nodes that are both set so; else under TLS.
    pub wire: Wire,
    /// Where queue pairs beside connections are made, or why there are none.
    pub pairs: Offered,
}

/// What a data thread, or the owner, wants of the connecting thread.
pub enum ConnectorCommand {
    /// Here is a data thread.
    Register {
        /// Its number.
        lane: usize,
        /// Where it is told of connections.
        inbox: Arc<Inbox>,
        /// It takes connections of other nodes.
        serves: bool,
    },
    /// It is going away.
    Unregister {
        /// Its number.
        lane: usize,
    },
    /// A data thread wants a connection.
    Dial {
        /// Its number.
        lane: usize,
        /// To whom.
        node: NodeId,
        /// It has just lost one: wait a moment before the first attempt.
        failed: bool,
    },
    /// There are other members than before: data threads shall close the connections of those that are gone.
    LookAtMembers,
    /// The thread shall end.
    Stop,
}

/// The shared part.
pub struct Control {
    pub(super) identity: Identity,
    ours: Hello,
    commands: Mutex<VecDeque<ConnectorCommand>>,
    pub(super) eventfd: EventFd,
    pairs: Offered,
    pub(super) counters: AllCounters,
    pub(super) peer_routes: PeerRoutes,
    peers: RwLock<HashMap<NodeId, SocketAddr>>,
    /// Whom this node lets in; nobody until it is told.
    members: RwLock<Members>,
    /// Counts the changes of `members`.
    members_version: AtomicU64,
}

impl Control {
    /// Asks for something.
    pub fn command(&self, command: ConnectorCommand) {
        let mut commands = self.commands.lock().expect("no panic under this lock");
        commands.push_back(command);
        drop(commands);
        self.eventfd.signal();
    }

    pub(super) fn next_command(&self) -> Option<ConnectorCommand> {
        let mut commands = self.commands.lock().expect("no panic under this lock");
        commands.pop_front()
    }

    /// Whether a node has an address.
    pub fn knows(&self, node: NodeId) -> bool {
        self.address_of(node).is_some()
    }

    pub(super) fn address_of(&self, node: NodeId) -> Option<SocketAddr> {
        let peers = self.peers.read().expect("no panic under this lock");
        peers.get(&node).copied()
    }

    /// Whether this start of a node is let in.
    pub(super) fn admit(&self, node: NodeId, incarnation: Incarnation) -> Admission {
        let members = self.members.read().expect("no panic under this lock");
        members.admit(node, incarnation)
    }

    /// Whether a node is one of the cluster.
    pub(super) fn has_member(&self, node: NodeId) -> bool {
        let members = self.members.read().expect("no panic under this lock");
        members.has(node)
    }

    /// Returns what this start of a node may access.
    pub(super) fn access(&self, node: NodeId, incarnation: Incarnation) -> Access {
        let members = self.members.read().expect("no panic under this lock");
        members.access(node, incarnation)
    }

    /// Another number once the answers to these questions are others.
    #[inline]
    pub(super) fn members_version(&self) -> u64 {
        self.members_version.load(Ordering::Acquire)
    }

    fn change_members(&self, change: impl FnOnce(&mut Members)) {
        let mut members = self.members.write().expect("no panic under this lock");
        change(&mut members);
        drop(members);
        // Behind the change: whoever sees the number finds it.
        self.members_version.fetch_add(1, Ordering::AcqRel);
        self.command(ConnectorCommand::LookAtMembers);
    }

    /// This start of this node.
    pub fn incarnation(&self) -> Incarnation {
        self.ours.incarnation
    }

    /// What this node says on a new connection, to `to` if it connects.
    pub(super) fn hello(&self, to: NodeId) -> Result<Hello, HandshakeError> {
        Ok(Hello {
            to,
            key: self.identity.random_key()?,
            ..self.ours
        })
    }

    /// Where queue pairs are made.
    pub(super) fn pairs(&self) -> &Offered {
        &self.pairs
    }

    /// A random number for jitter.
    pub(super) fn random(&self) -> u64 {
        let key = self.identity.random_key().unwrap_or_default();
        u64::from_le_bytes(*key.first_chunk().expect("a key has 16 bytes"))
    }
}

/// The network of a node while it runs. Dropping it ends the connecting thread; connections that data threads
/// have go on.
pub struct Network {
    control: Arc<Control>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Network {
    /// Listens, and starts the thread that makes connections. Nobody is let in before
    /// [`set_members`](Self::set_members).
    pub fn start(
        config: &NetConfig,
        cluster: [u8; 16],
        node: NodeId,
        incarnation: Incarnation,
    ) -> std::io::Result<Self> {
        let ours = Hello {
            versions: (*VERSIONS.start(), *VERSIONS.end()),
            cluster,
            node,
            to: NodeId(0),
            incarnation,
            wire: config.wire,
            credit_requests: CREDIT_REQUESTS,
            credit_bytes: CREDIT_BYTES,
            key: [0; 16],
            refusal: None,
        };
        let control = Arc::new(Control {
            identity: config.identity.clone(),
            ours,
            commands: Mutex::default(),
            eventfd: EventFd::new()?,
            pairs: config.pairs.clone(),
            counters: AllCounters::default(),
            peer_routes: PeerRoutes::default(),
            peers: RwLock::default(),
            members: RwLock::default(),
            members_version: AtomicU64::default(),
        });
        let listener = std::net::TcpListener::bind(config.listen).map_err(|e| {
            // Who asked says that it was to listen.
            std::io::Error::new(e.kind(), format!("{}: {e}", config.listen))
        })?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let connector = Connector::new(Arc::clone(&control), listener);
        let thread = std::thread::Builder::new()
            .name("penstock-net".into())
            .spawn(move || connector.run())?;
        Ok(Self {
            control,
            address,
            thread: Some(thread),
        })
    }

    /// The shared part.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// By which ways this node's requests to its peers go.
    pub fn peer_routes(&self) -> Vec<(NodeId, PeerRoute)> {
        self.control.peer_routes.report()
    }

    /// What has gone over the network so far.
    pub fn counters(&self) -> &AllCounters {
        &self.control.counters
    }

    /// Where queue pairs are made.
    pub fn pairs(&self) -> &Offered {
        &self.control.pairs
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The nodes of the cluster: no other is let in from now on, and connections of others are closed.
    pub fn set_members(&self, nodes: HashMap<NodeId, MemberView>) {
        self.control
            .change_members(|members| members.set_nodes(nodes));
    }

    /// Layers that are open to nodes which reach no others.
    pub fn set_open_layers(&self, open: HashMap<NodeId, HashSet<LayerId>>) {
        self.control
            .change_members(|members| members.set_open(open));
    }

    /// The nodes that there are, and where. One that is not among them any more is not connected to again.
    pub fn set_peers(&self, peers: HashMap<NodeId, SocketAddr>) {
        *self
            .control
            .peers
            .write()
            .expect("no panic under this lock") = peers;
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.control.command(ConnectorCommand::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic of it has been reported already.
            let _ = thread.join();
        }
    }
}
