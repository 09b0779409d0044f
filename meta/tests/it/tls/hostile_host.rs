//! A host that tries to take a volume of another node.

use std::net::SocketAddr;

use meta::refusal::{AttachmentRefusal, LeaseRefusal};
use meta::{
    Attachment, AttachmentKey, AttachmentOptions, AttachmentSpec, Incoming, Lease, Meta, NodeState,
    Outcome, Reply,
};

use super::*;

/// The node that serves the volume, and the hostile host.
const VICTIM: NodeId = NodeId(1);
const HOST: NodeId = NodeId(2);
/// A node that is down.
const ABSENT: NodeId = NodeId(3);

fn attachment(node: NodeId, incoming: Option<Incoming>) -> AttachmentSpec {
    AttachmentSpec {
        volume: "disk".to_owned(),
        node,
        socket: "/run/disk.sock".to_owned(),
        queues: 1,
        read_only: false,
        options: AttachmentOptions {
            incoming,
            ..AttachmentOptions::default()
        },
    }
}

/// Creates a volume that is attached on the victim, which holds its lease.
async fn volume_in_use(meta: &Meta) -> (Attachment, Lease) {
    meta.register_node(spec(HOST.0, &[Role::Host]))
        .await
        .unwrap();
    meta.register_device(device(1)).await.unwrap();
    meta.create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    let source = meta.create_attachment(attachment(VICTIM, None)).await;
    let lease = meta.grant_lease("disk", VICTIM).await;
    (source.unwrap(), lease.unwrap())
}

struct Host {
    transport: TlsTransport,
    address: BasicNode,
}

impl Host {
    fn new(authority: &Authority, server: SocketAddr) -> Self {
        Self {
            transport: TlsTransport::new(authority.node(HOST.0)),
            address: BasicNode::new(server.to_string()),
        }
    }

    async fn propose(&self, command: Command) -> Reply {
        let request = PeerRequest::Propose(command);
        match self.transport.call(VICTIM, &self.address, request).await {
            Ok(PeerReply::Propose(Ok(reply))) => reply,
            other => panic!("{other:?}"),
        }
    }

    async fn attach_incoming(&self, at: u64) -> Reply {
        self.propose(Command::CreateAttachment {
            attachment: attachment(HOST, Some(Incoming::Guest)),
            at: UnixMillis(at),
        })
        .await
    }

    async fn grant_lease(&self, expired: Option<Generation>) -> Reply {
        self.propose(Command::GrantLease {
            volume: "disk".to_owned(),
            node: HOST,
            expired,
            at: UnixMillis::now(),
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_cannot_take_a_volume_without_an_offer() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let meta = node.meta();
    let (_, lease) = volume_in_use(&meta).await;
    let host = Host::new(&authority, server.address());
    let mut got = Vec::new();
    if host.attach_incoming(UnixMillis::now().0).await.is_ok() {
        got.push("an incoming attachment");
    }
    if host.grant_lease(Some(lease.generation)).await.is_ok() {
        got.push("a lease that it claims has run out");
    }
    // The victim stops using the volume. The attachment stays.
    let released = meta.release_lease(lease.volume, VICTIM, lease.generation);
    released.await.unwrap();
    if host.grant_lease(None).await.is_ok() {
        got.push("the lease of an attached volume");
    }
    assert_eq!(got, [""; 0]);
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_takes_over_an_offered_volume_by_the_clock_of_the_leader() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let meta = node.meta();
    let (source, lease) = volume_in_use(&meta).await;
    let host = Host::new(&authority, server.address());
    let offer = meta.offer_attachment(source.id, HOST, Duration::from_secs(1));
    let offer = offer.await.unwrap().offer.unwrap();
    while UnixMillis::now() < offer.expires_at {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The host claims a time before the end of the offer. The leader ignores it and soon removes the expired
    // offer.
    let refused = host.attach_incoming(0).await.unwrap_err();
    let is_expected = matches!(
        refused,
        Refusal::Attachment(
            AttachmentRefusal::OfferExpired { .. } | AttachmentRefusal::NotOffered { .. }
        )
    );
    assert!(is_expected, "{refused}");

    let offer = meta.offer_attachment(source.id, HOST, Duration::from_secs(600));
    offer.await.unwrap();
    let Ok(Outcome::Attachment(incoming)) = host.attach_incoming(u64::MAX).await else {
        panic!("the volume was offered");
    };
    let end = incoming.expires_at.unwrap();
    assert!(end.0 < u64::MAX / 2, "no deadline: {end:?}");
    // The victim holds its lease. The host's claim that it has run out is ignored.
    let take_over = || Command::TakeOverAttachment {
        attachment: incoming.id,
        expired: Some(lease.generation),
        at: UnixMillis(0),
    };
    let held = host.propose(take_over()).await.unwrap_err();
    let is_expected = matches!(held, Refusal::Lease(LeaseRefusal::Held { .. }));
    assert!(is_expected, "{held}");
    assert!(host.grant_lease(Some(lease.generation)).await.is_err());
    assert_eq!(
        meta.get_lease(lease.volume).await.unwrap(),
        Some(lease.clone())
    );
    // A host cannot offer the victim's attachment or withdraw its offer.
    let offered = Command::OfferAttachment {
        attachment: source.id,
        to: HOST,
        lifetime_s: 60,
        at: UnixMillis::now(),
    };
    for command in [
        offered,
        Command::WithdrawOffer {
            attachment: source.id,
        },
    ] {
        let refused = host.propose(command).await.unwrap_err();
        let is_expected = matches!(refused, Refusal::Access(AccessRefusal::NeedsMeta { .. }));
        assert!(is_expected, "{refused}");
    }

    let released = meta.release_lease(lease.volume, VICTIM, lease.generation);
    released.await.unwrap();
    host.propose(take_over()).await.unwrap();
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_takes_no_volume_of_a_node_that_is_down() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let meta = node.meta();
    for id in [HOST, ABSENT] {
        let registered = meta.register_node(spec(id.0, &[Role::Host])).await;
        registered.unwrap();
    }
    meta.register_device(device(1)).await.unwrap();
    meta.create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    let attached = meta.create_attachment(attachment(ABSENT, None)).await;
    let attached = attached.unwrap();
    let lease = meta.grant_lease("disk", ABSENT).await.unwrap();
    until(async || {
        let is_down = meta.map().node(ABSENT)?.state == NodeState::Down;
        is_down.then_some(())
    })
    .await;
    let host = Host::new(&authority, server.address());
    let by_socket = AttachmentKey::Socket {
        node: ABSENT,
        socket: attached.socket.clone(),
    };
    for attachment in [AttachmentKey::Id(attached.id), by_socket] {
        let delete = Command::DeleteAttachment { attachment };
        let refused = host.propose(delete).await.unwrap_err();
        let told = matches!(refused, Refusal::Access(AccessRefusal::NeedsMeta { .. }));
        assert!(told, "{refused}");
    }
    assert!(host.grant_lease(Some(lease.generation)).await.is_err());
    assert_eq!(meta.get_lease(lease.volume).await.unwrap(), Some(lease));
    // An operator forgets it on a node with the role `meta`.
    let forgotten = meta.delete_attachment(AttachmentKey::Id(attached.id));
    forgotten.await.unwrap();
    node.shutdown().await.unwrap();
}
