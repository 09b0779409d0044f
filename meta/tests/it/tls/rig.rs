//! Nodes on loopback with certificates of one authority, each behind a relay that can be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use meta::net::{
    BoxFuture, PeerReply, PeerRequest, TlsIdentity, TlsListener, TlsServer, TlsTransport,
    Transport, TransportError,
};
use meta::pki::{ClusterCa, NodeKey};
use meta::{GroupCall, GroupReply, MetaConfig, MetaNode, NodeId, NodeSpec, RaftTuning, Start};
use openraft::BasicNode;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use uuid::Uuid;

use crate::common::{device, until};

pub(super) const CLUSTER: Uuid = Uuid::from_u128(77);

/// An authority with its certificate.
pub(super) struct Authority {
    pub(super) ca: ClusterCa,
    pub(super) certificate: String,
}

/// A node's credentials, as PEM.
pub(super) struct Credentials {
    pub(super) certificate: String,
    pub(super) key: String,
}

impl Authority {
    pub(super) fn new(cluster: Uuid) -> Self {
        let (ca, certificate) = ClusterCa::generate(cluster).unwrap();
        Self { ca, certificate }
    }

    pub(super) fn credentials(&self, node: u64) -> Credentials {
        let key = NodeKey::generate().unwrap();
        let certificate = self.ca.issue(NodeId(node), &key.public_key()).unwrap();
        Credentials {
            certificate,
            key: key.to_pem(),
        }
    }

    /// Who says that it is `node` of `cluster`, trusts this authority and shows these credentials.
    pub(super) fn identity(
        &self,
        cluster: Uuid,
        node: u64,
        credentials: &Credentials,
    ) -> TlsIdentity {
        let (ca, certificate, key) = (
            &self.certificate,
            &credentials.certificate,
            &credentials.key,
        );
        TlsIdentity::from_pem(cluster, NodeId(node), ca, certificate, key).unwrap()
    }

    pub(super) fn node(&self, node: u64) -> TlsIdentity {
        self.identity(CLUSTER, node, &self.credentials(node))
    }
}

/// The way out of a node, which can be closed.
pub(super) struct EnrolmentEndpoint {
    pub(super) inner: TlsTransport,
    pub(super) closed: Arc<AtomicBool>,
}

impl Transport for EnrolmentEndpoint {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        if self.closed.load(Ordering::Relaxed) {
            let detail = "closed".to_owned();
            return Box::pin(async move { Err(TransportError::Unreachable { target, detail }) });
        }
        self.inner.call(target, address, request)
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        if self.closed.load(Ordering::Relaxed) {
            let detail = "closed".to_owned();
            return Box::pin(async move { Err(TransportError::Unreachable { target, detail }) });
        }
        self.inner.call_group(target, address, call)
    }
}

/// The way in to a node: passes bytes on until it is cut, which ends all connections.
pub(super) struct Relay {
    pub(super) address: SocketAddr,
    pub(super) cut: tokio::sync::watch::Sender<bool>,
}

impl Relay {
    pub(super) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, is_cut) = tokio::sync::watch::channel(false);
        tokio::spawn(async move {
            loop {
                let (mut from, _) = listener.accept().await.unwrap();
                let mut is_cut = is_cut.clone();
                if is_cut.has_changed().is_err() {
                    return;
                }
                tokio::spawn(async move {
                    let Ok(mut to) = TcpStream::connect(target).await else {
                        return;
                    };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                        _ = is_cut.wait_for(|cut| *cut) => {}
                    }
                });
            }
        });
        Self { address, cut }
    }
}

pub(super) struct Member {
    pub(super) node: Option<MetaNode>,
    pub(super) server: Option<TlsServer>,
    pub(super) relay: Relay,
    pub(super) is_cut: Arc<AtomicBool>,
}

impl Member {
    pub(super) fn node(&self) -> &MetaNode {
        self.node.as_ref().unwrap()
    }

    pub(super) fn cut_off(&self, cut: bool) {
        self.is_cut.store(cut, Ordering::Relaxed);
        self.relay.cut.send_replace(cut);
    }

    pub(super) async fn kill(&mut self) {
        self.server = None;
        self.cut_off(true);
        self.node.take().unwrap().shutdown().await.unwrap();
    }
}

pub(super) struct Cluster {
    pub(super) dir: tempfile::TempDir,
    pub(super) members: Vec<Member>,
}

impl Cluster {
    pub(super) async fn member(
        dir: &std::path::Path,
        authority: &Authority,
        id: u64,
        start: Start,
    ) -> Member {
        Self::member_that(dir, authority, id, start, false).await.0
    }

    /// A member whose address is in the map, so that the leader gives it a part in the groups.
    pub(super) async fn member_that(
        dir: &std::path::Path,
        authority: &Authority,
        id: u64,
        start: Start,
        says_address: bool,
    ) -> (Member, NodeSpec) {
        Self::begin(dir, authority, id, start, (says_address, None)).await
    }

    /// The same, with a runtime for the groups.
    pub(super) async fn member_on(
        dir: &std::path::Path,
        authority: &Authority,
        id: u64,
        start: Start,
        groups: Option<Handle>,
    ) -> (Member, NodeSpec) {
        Self::begin(dir, authority, id, start, (true, groups)).await
    }

    pub(super) async fn begin(
        dir: &std::path::Path,
        authority: &Authority,
        id: u64,
        start: Start,
        (says_address, group_runtime): (bool, Option<Handle>),
    ) -> (Member, NodeSpec) {
        let incarnation = meta::draw_incarnation();
        let identity = authority.node(id).of_start(incarnation);
        let listener = TlsListener::bind("127.0.0.1:0").await.unwrap();
        let relay = Relay::to(listener.address()).await;
        let is_cut = Arc::new(AtomicBool::new(false));
        let mut spec = NodeSpec {
            incarnation,
            ..NodeSpec::new(NodeId(id), format!("node{id}"))
        };
        if says_address {
            spec.control_address = relay.address.to_string();
        }
        let config = MetaConfig {
            node: spec.clone(),
            address: relay.address.to_string(),
            history: None,
            start,
            tuning: RaftTuning {
                heartbeat: Duration::from_millis(50),
                election_timeout: Duration::from_millis(400),
                ..RaftTuning::default()
            },
            transport: Arc::new(EnrolmentEndpoint {
                inner: TlsTransport::new(identity.clone()),
                closed: Arc::clone(&is_cut),
            }),
            group_runtime,
        };
        let node = MetaNode::open(dir.join(id.to_string()), config)
            .await
            .unwrap();
        let server = Some(listener.serve(identity, node.peer()));
        let member = Member {
            node: Some(node),
            server,
            relay,
            is_cut,
        };
        (member, spec)
    }

    pub(super) async fn of_three() -> Self {
        let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new(CLUSTER));
        let one = Self::member(dir.path(), &authority, 1, Start::NewCluster).await;
        one.node().meta().register_device(device(1)).await.unwrap();
        let cluster = one.node().cluster_uuid();
        let mut members = vec![one];
        for id in [2, 3] {
            let member = Self::member(dir.path(), &authority, id, Start::Join { cluster }).await;
            let address = member.relay.address.to_string();
            members[0]
                .node()
                .add_learner(NodeId(id), &address)
                .await
                .unwrap();
            members.push(member);
        }
        let voters = [1, 2, 3].map(NodeId).into();
        members[0].node().set_voters(voters).await.unwrap();
        // All nodes register by their heartbeats, and ask for nothing before.
        let one = members[0].node().meta();
        until(async || {
            let nodes = one.list_nodes().await.unwrap();
            let registered = nodes.iter().filter(|node| node.incarnation.0 != 0);
            (registered.count() == 3).then_some(())
        })
        .await;
        Self { dir, members }
    }

    /// The position of the member that leads.
    pub(super) async fn leader(&self) -> usize {
        until(async || {
            for (index, member) in self.members.iter().enumerate() {
                if let Some(node) = &member.node {
                    if node.leader().await == Some(node.id())
                        && !member.is_cut.load(Ordering::Relaxed)
                    {
                        return Some(index);
                    }
                }
            }
            None
        })
        .await
    }

    pub(super) async fn end(self) {
        for mut member in self.members {
            if let Some(node) = member.node.take() {
                node.shutdown().await.unwrap();
            }
        }
        drop(self.dir);
    }
}
