//! What the data threads share of the network, and how they ask for connections.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, RwLock};
use std::thread::JoinHandle;

use super::connector::Connector;
use super::counts::AllCounters;
use super::handshake::HandshakeError;
use super::hello::{CREDIT_BYTES, CREDIT_REQUESTS, Hello, VERSIONS, Wire};
use super::identity::Identity;
use super::mail::{Bell, Mail};
pub use super::ways::{PeerWay, Ways};
use crate::net::rdma::pair::Offered;
use crate::proto::{Incarnation, NodeId};

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
pub enum Wish {
    /// Here is a data thread.
    Register {
        /// Its number.
        lane: usize,
        /// Where it is told of connections.
        mail: Arc<Mail>,
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
    /// The thread shall end.
    Stop,
}

/// The shared part.
pub struct Control {
    pub(super) identity: Identity,
    ours: Hello,
    wishes: Mutex<VecDeque<Wish>>,
    pub(super) bell: Bell,
    pairs: Offered,
    pub(super) counters: AllCounters,
    pub(super) ways: Ways,
    peers: RwLock<HashMap<NodeId, SocketAddr>>,
}

impl Control {
    /// Asks for something.
    pub fn wish(&self, wish: Wish) {
        let mut wishes = self.wishes.lock().expect("no panic under this lock");
        wishes.push_back(wish);
        drop(wishes);
        self.bell.ring();
    }

    pub(super) fn next_wish(&self) -> Option<Wish> {
        let mut wishes = self.wishes.lock().expect("no panic under this lock");
        wishes.pop_front()
    }

    /// Whether a node has an address.
    pub fn knows(&self, node: NodeId) -> bool {
        self.address_of(node).is_some()
    }

    pub(super) fn address_of(&self, node: NodeId) -> Option<SocketAddr> {
        let peers = self.peers.read().expect("no panic under this lock");
        peers.get(&node).copied()
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

/// The network of a node while it runs. Dropping it ends the connecting thread; connections that data threads have go on.
pub struct Network {
    control: Arc<Control>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Network {
    /// Listens, and starts the thread that makes connections.
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
            wishes: Mutex::default(),
            bell: Bell::new()?,
            pairs: config.pairs.clone(),
            counters: AllCounters::default(),
            ways: Ways::default(),
            peers: RwLock::default(),
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
    pub fn ways(&self) -> Vec<(NodeId, PeerWay)> {
        self.control.ways.told()
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
        self.control.wish(Wish::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic of it has been reported already.
            let _ = thread.join();
        }
    }
}
