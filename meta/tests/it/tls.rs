//! Real sockets on loopback: three voters over mutual TLS, and whoever must not get in.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common::{GIB, WAIT_MAX, device, until};
use meta::net::{
    PeerReply, PeerRequest, TlsError, TlsIdentity, TlsListener, TlsServer, TlsTransport, Transport,
    TransportError,
};
use meta::pki::{ClusterCa, JoinToken, NodeKey, node_name};
use meta::{
    AccessRefusal, Command, Generation, Incarnation, Level, MetaNode, NodeId, NodeSpec,
    RaftMessage, Refusal, Role, UnixMillis, VolumeId, VolumeSpec,
};
use openraft::BasicNode;
use openraft::raft::VoteRequest;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

mod busy;
mod given_up;
mod groups;
mod hostile_host;
mod moved;
mod rig;

use rig::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_voters_go_on_when_their_leader_is_killed() {
    let mut cluster = Cluster::of_three().await;
    for (number, member) in cluster.members.iter().enumerate() {
        let spec = VolumeSpec::new(format!("disk{number}"), GIB);
        member.node().meta().create_volume(spec).await.unwrap();
    }
    let leader = cluster.leader().await;
    cluster.members[leader].kill().await;
    let other = &cluster.members[(leader + 1) % 3];
    let meta = other.node().meta();
    assert_eq!(meta.list_volumes().await.unwrap().len(), 3);
    meta.create_volume(VolumeSpec::new("after", GIB))
        .await
        .unwrap();
    assert_ne!(cluster.leader().await, leader);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn isolated_leader_is_replaced_and_silent_until_reconnected() {
    let cluster = Cluster::of_three().await;
    let leader = cluster.leader().await;
    cluster.members[leader].cut_off(true);
    let (old, other) = (
        cluster.members[leader].node().id(),
        cluster.members[(leader + 1) % 3].node(),
    );
    // A command that is on its way to the old leader at this moment has an unknown outcome.
    until(async || other.leader().await.filter(|leader| *leader != old)).await;
    let other = other.meta();
    other
        .create_volume(VolumeSpec::new("new", GIB))
        .await
        .unwrap();
    let alone = cluster.members[leader].node().meta();
    let stale = tokio::spawn(async move { alone.get_volume("new").await });
    cluster.members[leader].cut_off(false);
    assert_eq!(stale.await.unwrap().unwrap().name.as_str(), "new");
    cluster.end().await;
}

/// A node alone that listens.
async fn alone(authority: &Authority) -> (tempfile::TempDir, MetaNode, TlsServer) {
    let dir = tempfile::tempdir().unwrap();
    let node = crate::common::open(dir.path()).await;
    let listener = TlsListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.serve(authority.node(1), node.peer());
    (dir, node, server)
}

async fn ask(identity: TlsIdentity, server: SocketAddr) -> Result<PeerReply, TransportError> {
    let transport = TlsTransport::new(identity);
    let address = BasicNode::new(server.to_string());
    let call = transport.call(NodeId(1), &address, PeerRequest::ReadIndex);
    tokio::time::timeout(WAIT_MAX, call)
        .await
        .expect("no answer")
}

fn is_unreachable(answer: Result<PeerReply, TransportError>) -> String {
    match answer {
        Err(TransportError::Unreachable { detail, .. }) => detail,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_nodes_of_the_cluster_with_good_credentials_get_in() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let at = server.address();

    let stranger = Authority::new(CLUSTER);
    let forged = authority.identity(CLUSTER, 2, &stranger.credentials(2));
    assert!(matches!(forged.check(), Err(TlsError::Foreign { .. })));
    is_unreachable(ask(forged, at).await);
    let distrustful = stranger.identity(CLUSTER, 2, &authority.credentials(2));
    is_unreachable(ask(distrustful, at).await);

    let key = NodeKey::generate().unwrap();
    let past = SystemTime::now() - Duration::from_secs(7200);
    let hour = Duration::from_secs(3600);
    let certificate = authority
        .ca
        .issue_for(NodeId(2), &key.public_key(), past, hour);
    let expired = Credentials {
        certificate: certificate.unwrap(),
        key: key.to_pem(),
    };
    let expired = authority.identity(CLUSTER, 2, &expired);
    expired.check().expect("by another clock it may be good");
    is_unreachable(ask(expired, at).await);

    let impostor = authority.identity(CLUSTER, 3, &authority.credentials(2));
    let told = impostor.check().unwrap_err().to_string();
    assert!(told.contains("made for node 3"), "{told}");
    let detail = is_unreachable(ask(impostor, at).await);
    assert!(detail.contains("not for node 3"), "{detail}");

    let elsewhere = Uuid::from_u128(78);
    let other = ClusterCa::load(elsewhere, authority.ca.key_pem()).unwrap();
    let key = NodeKey::generate().unwrap();
    let credentials = Credentials {
        certificate: other.issue(NodeId(2), &key.public_key()).unwrap(),
        key: key.to_pem(),
    };
    is_unreachable(ask(authority.identity(elsewhere, 2, &credentials), at).await);

    authority.node(2).check().unwrap();
    let good = ask(authority.node(2), at).await;
    assert!(matches!(good, Ok(PeerReply::ReadIndex(Ok(_)))), "{good:?}");
    node.shutdown().await.unwrap();
}

/// A connection that is through with TLS, and may say what it likes.
async fn raw(authority: &Authority, at: SocketAddr) -> tokio_rustls::client::TlsStream<TcpStream> {
    let credentials = authority.credentials(2);
    let mut roots = rustls::RootCertStore::empty();
    let root = CertificateDer::from_pem_slice(authority.certificate.as_bytes()).unwrap();
    roots.add(root).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = vec![CertificateDer::from_pem_slice(credentials.certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes()).unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"penstock-meta".to_vec()];
    let name = ServerName::try_from(node_name(CLUSTER, NodeId(1))).unwrap();
    let stream = TcpStream::connect(at).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    connector.connect(name, stream).await.unwrap()
}

/// A good hello of node 2, which does not say its start.
fn greeting() -> Vec<u8> {
    greeting_of(0)
}

/// A hello of a start of node 2.
fn greeting_of(start: u64) -> Vec<u8> {
    let hello = serde_json::json!({
        "magic": "penstock-meta",
        "protocols": [1, 1],
        "cluster": CLUSTER,
        "node": 2,
        "incarnation": start,
        "history": null,
        "purpose": "map",
        "refused": null,
        "removed": false,
        "address": "",
    });
    let hello = hello.to_string();
    let mut greeting = u32::try_from(hello.len()).unwrap().to_be_bytes().to_vec();
    greeting.extend([0; 8]);
    greeting.extend(hello.as_bytes());
    greeting
}

/// Sends bytes, and waits until the other side ends the connection.
async fn say(mut stream: impl tokio::io::AsyncRead + AsyncWriteExt + Unpin, bytes: &[u8]) {
    // The other side may be gone before all is said.
    let _ = stream.write_all(bytes).await;
    let _ = stream.flush().await;
    let mut answer = Vec::new();
    let end = stream.read_to_end(&mut answer);
    // An abrupt end is an end, too.
    let _ = tokio::time::timeout(WAIT_MAX, end)
        .await
        .expect("the connection stays open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_bytes_close_only_the_connection_that_sent_them() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let at = server.address();
    let good = TlsTransport::new(authority.node(3));
    let address = BasicNode::new(at.to_string());
    let works = async || {
        let call = good.call(NodeId(1), &address, PeerRequest::ReadIndex);
        matches!(call.await, Ok(PeerReply::ReadIndex(Ok(_))))
    };
    assert!(works().await);

    say(TcpStream::connect(at).await.unwrap(), &[0x5a; 5000]).await;
    say(
        TcpStream::connect(at).await.unwrap(),
        b"GET / HTTP/1.1\r\n\r\n",
    )
    .await;
    say(raw(&authority, at).await, &[0xff; 64]).await;
    say(raw(&authority, at).await, &[0; 64]).await;
    // A whole frame that is no hello, then a hello beyond its bound.
    let mut frame = vec![0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    frame.extend(b"{}");
    say(raw(&authority, at).await, &frame).await;
    let mut long = 5000_u32.to_be_bytes().to_vec();
    long.extend([b' '; 5008]);
    say(raw(&authority, at).await, &long).await;

    // A good hello, then a request beyond its bound, and one that is none.
    let greeting = greeting();
    let oversized = [&greeting[..], &u32::MAX.to_be_bytes(), &[0; 8]].concat();
    say(raw(&authority, at).await, &oversized).await;
    let nonsense = [&greeting[..], &3_u32.to_be_bytes(), &[0; 8], b"???"].concat();
    say(raw(&authority, at).await, &nonsense).await;

    assert!(works().await, "on the connection that it had all the time");
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_connection_of_a_node_ends_the_first() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let greet = async || {
        let mut stream = raw(&authority, server.address()).await;
        stream.write_all(&greeting()).await.unwrap();
        stream.read_exact(&mut [0; 12]).await.unwrap();
        stream
    };
    let mut first = greet().await;
    let _second = greet().await;
    let mut rest = Vec::new();
    let end = tokio::time::timeout(WAIT_MAX, first.read_to_end(&mut rest));
    // An abrupt end is an end, too.
    let _ = end.await.expect("the connection stands");
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn credentials_that_do_not_match_are_refused_by_name() {
    let authority = Authority::new(CLUSTER);
    let (one, two) = (authority.credentials(1), authority.credentials(2));
    let ca = &authority.certificate;
    let read = |certificate: &str, key: &str| {
        let error = TlsIdentity::from_pem(CLUSTER, NodeId(1), ca, certificate, key).err();
        error.unwrap().to_string()
    };
    assert!(read(&one.certificate, "nothing").contains("private key"));
    read(&one.certificate, &two.key);
}

/// A node of the cluster that is known and was never started.
fn spec(node: u64, roles: &[Role]) -> NodeSpec {
    NodeSpec {
        roles: roles.iter().copied().collect(),
        ..NodeSpec::new(NodeId(node), format!("node{node}"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_node_is_turned_away_and_its_connection_ends() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let (meta, at) = (node.meta(), server.address());
    for id in [2, 3] {
        meta.register_node(spec(id, &[Role::Host])).await.unwrap();
    }
    let address = BasicNode::new(at.to_string());
    let (gone, stays) = (
        TlsTransport::new(authority.node(2)),
        TlsTransport::new(authority.node(3)),
    );
    let ask =
        async |way: &TlsTransport| way.call(NodeId(1), &address, PeerRequest::ReadIndex).await;
    assert!(ask(&gone).await.is_ok() && ask(&stays).await.is_ok());
    // One that says nothing after its greeting.
    let mut silent = raw(&authority, at).await;
    silent.write_all(&greeting()).await.unwrap();
    let mut answer = vec![0; 12];
    silent.read_exact(&mut answer).await.unwrap();

    meta.remove_node(NodeId(2)).await.unwrap();
    let mut rest = Vec::new();
    let end = tokio::time::timeout(WAIT_MAX, silent.read_to_end(&mut rest));
    // An abrupt end is an end, too.
    let _ = end.await.expect("the connection stands");
    // What is asked on a connection that stood may be lost; then there is none.
    let refused = until(async || match ask(&gone).await {
        Err(TransportError::Removed { target }) => Some(target),
        Ok(answer) => panic!("{answer:?}"),
        Err(_) => None,
    });
    assert_eq!(refused.await, NodeId(1));
    assert!(ask(&stays).await.is_ok());
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_former_start_is_turned_away_by_metadata() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let (meta, at) = (node.meta(), server.address());
    let register = async |start| {
        let spec = NodeSpec {
            incarnation: Incarnation(start),
            boot: "the same".to_owned(),
            ..spec(2, &[Role::Host])
        };
        meta.register_node(spec).await.unwrap();
    };
    let ask_as = async |start| ask(authority.node(2).of_start(Incarnation(start)), at).await;
    register(10).await;
    assert!(ask_as(10).await.is_ok(), "it is the present one");
    // One that says nothing after its greeting.
    let mut silent = raw(&authority, at).await;
    let hello = greeting_of(10);
    silent.write_all(&hello).await.unwrap();
    silent.read_exact(&mut [0; 12]).await.unwrap();

    register(11).await;
    let mut rest = Vec::new();
    let end = tokio::time::timeout(WAIT_MAX, silent.read_to_end(&mut rest));
    // An abrupt end is an end, too.
    let _ = end.await.expect("the connection stands");
    let detail = is_unreachable(ask_as(10).await);
    assert!(detail.contains("a newer start of node 2"), "{detail}");
    for start in [11, 12] {
        let answer = ask_as(start).await;
        assert!(answer.is_ok(), "12 has yet to register: {answer:?}");
    }
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_neither_administers_the_cluster_nor_takes_part_in_raft() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let meta = node.meta();
    meta.register_node(spec(2, &[Role::Host])).await.unwrap();
    meta.register_device(device(1)).await.unwrap();
    meta.create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    let address = BasicNode::new(server.address().to_string());
    let host = TlsTransport::new(authority.node(2));
    let ask = async |request| host.call(NodeId(1), &address, request).await;
    let propose = async |command| match ask(PeerRequest::Propose(command)).await {
        Ok(PeerReply::Propose(Ok(reply))) => reply,
        other => panic!("{other:?}"),
    };
    let at = UnixMillis(0);
    let token = Command::CreateToken {
        token: JoinToken::draw().hash(),
        roles: None,
        expires_at: UnixMillis(u64::MAX),
        at,
    };
    let refused = propose(token).await.unwrap_err();
    let refusal = matches!(refused, Refusal::Access(AccessRefusal::NeedsMeta { .. }));
    assert!(refusal, "{refused}");
    // A role that it was not granted.
    let register = Command::RegisterNode {
        node: spec(2, &[Role::Host, Role::Meta]),
        replaces: Incarnation::default(),
        at,
    };
    assert!(propose(register).await.is_err());
    let lease = |node| Command::GrantLease {
        volume: "disk".to_owned(),
        node: NodeId(node),
        expired: None,
        at,
    };
    assert!(propose(lease(1)).await.is_err());
    assert!(propose(lease(2)).await.is_ok(), "its own");
    // One that is held and could be renewed, but is not the host's.
    let other = meta.create_volume(VolumeSpec::new("other", GIB));
    let other = other.await.unwrap().id;
    let held = meta.grant_lease("other", NodeId(1)).await.unwrap();
    let own = (VolumeId(1), NodeId(2), Generation(1));
    for (volume, node, generation) in [own, (other, NodeId(1), held.generation)] {
        let renewal = PeerRequest::RenewLease {
            volume,
            node,
            generation,
        };
        let answer = ask(renewal).await;
        let renewed = matches!(answer, Ok(PeerReply::Propose(Ok(Ok(_)))));
        assert_eq!(renewed, volume == own.0, "{answer:?}");
    }
    meta.register_node(spec(3, &[Role::Host])).await.unwrap();
    for id in [2, 3] {
        let heartbeat = PeerRequest::Heartbeat {
            node: NodeId(id),
            incarnation: Incarnation::default(),
            level: Level(u32::MAX),
        };
        let answer = ask(heartbeat).await;
        let heard = matches!(answer, Ok(PeerReply::Heartbeat(Ok(_))));
        assert_eq!(heard, id == 2, "{answer:?}");
    }

    let term = meta.raft_status().term;
    let rpc = VoteRequest::new(openraft::Vote::new(term + 100, NodeId(2)), None);
    let voted = ask(PeerRequest::Raft(RaftMessage::Vote(rpc))).await;
    assert!(
        matches!(voted, Err(TransportError::Lost { .. })),
        "{voted:?}"
    );
    assert_eq!(meta.raft_status().term, term);
    assert!(ask(PeerRequest::ReadIndex).await.is_ok());
    node.shutdown().await.unwrap();
}
