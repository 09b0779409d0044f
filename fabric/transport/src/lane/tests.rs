//! A lane and its inbox, without the connector.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::super::tests::handshakes::{Authority, CLUSTER, DAY};
mod queue_pair;

use super::*;
use crate::control::{NetConfig, Network};
use crate::fuzzing::{agreed, request};
use crate::hello::Wire;
use crate::members::{MemberView, Reach};
use crate::queue_pair::pair::Offered;

const PEER: NodeId = NodeId(2);

fn network(authority: &Authority, node: u64) -> Network {
    let config = NetConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        identity: authority.identity(node, authority, DAY),
        wire: Wire::Crc,
        pairs: Offered::No("this is about connections".to_owned()),
    };
    let network = Network::start(&config, CLUSTER, NodeId(node), Incarnation(10)).unwrap();
    network.set_members(members());
    network
}

/// Node 1 as [`network`] starts it, and the peer of [`agreed`] connections.
fn members() -> HashMap<NodeId, MemberView> {
    let agreed = agreed();
    let member = |(node, incarnation)| {
        let view = MemberView {
            incarnation,
            former: Vec::new(),
            reach: Reach::All,
        };
        (node, view)
    };
    [
        (NodeId(1), Incarnation(10)),
        (agreed.peer, agreed.incarnation),
    ]
    .map(member)
    .into()
}

/// A lane, and the network that knows `PEER` somewhere that nobody listens.
fn lane() -> (Network, Lane) {
    let network = network(&Authority::new(), 1);
    network.set_peers(HashMap::from([(PEER, ([127, 0, 0, 1], 1).into())]));
    // Not registered: its messages are the test's.
    let lane = Lane::new(Arc::clone(network.control()), 0, true).unwrap();
    network
        .control()
        .command(ConnectorCommand::Unregister { lane: 0 });
    (network, lane)
}

/// A connection that was agreed upon, and its other end.
fn connection() -> (UnixStream, OwnedFd, Box<Established>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let established = Established {
        agreed: agreed(),
        session: None,
        rest: Vec::new(),
    };
    (theirs, ours.into(), Box::new(established))
}

#[test]
fn connection_dead_at_handover_is_uncounted_exactly_once() {
    let (_network, mut lane) = lane();
    for _ in 0..3 {
        let (theirs, ours, established) = connection();
        drop(theirs);
        lane.inbox.served.fetch_add(1, Ordering::AcqRel);
        lane.inbox.post(InboxMessage::Accepted(ours, established));
        lane.poll();
        assert_eq!(lane.links.taken(), 0);
        assert_eq!(lane.inbox.served.load(Ordering::Acquire), 0);
    }
    let (_theirs, ours, established) = connection();
    lane.inbox.served.fetch_add(1, Ordering::AcqRel);
    lane.inbox.post(InboxMessage::Accepted(ours, established));
    lane.poll();
    assert_eq!(lane.links.taken(), 1);
    assert_eq!(lane.inbox.served.load(Ordering::Acquire), 1);
}

#[test]
fn request_waiting_for_a_dead_connection_is_lost_once() {
    let (_network, mut lane) = lane();
    let mut memory = [0; 4096];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: memory.len(),
    }];
    let read = request(1, false, 0, &list, 4096);
    assert!(lane.send(PEER, &read).is_none(), "it waits");
    let (theirs, ours, established) = connection();
    drop(theirs);
    lane.inbox
        .post(InboxMessage::Connected(PEER, ours, established));
    lane.poll();
    assert!(matches!(lane.next_event(), Some(Event::Lost(PEER))));
    assert!(lane.next_event().is_none());
    // Until it is reached again it counts as lost.
    assert!(lane.send(PEER, &read).is_some());
    let (_theirs, ours, established) = connection();
    lane.inbox
        .post(InboxMessage::Connected(PEER, ours, established));
    lane.poll();
    assert!(lane.send(PEER, &read).is_none());
    assert!(lane.next_event().is_none());
}

#[test]
fn starting_node_accepts_connections_once_a_lane_serves_them() {
    let authority = Authority::new();
    let (ours, theirs) = (network(&authority, 1), network(&authority, PEER.0));
    ours.set_peers(HashMap::from([(PEER, theirs.address())]));
    let mut asking = Lane::new(Arc::clone(ours.control()), 0, true).unwrap();
    let write = request(1, true, 0, &[], 0);
    assert!(asking.send(PEER, &write).is_none());
    let start = Instant::now();
    // Far less than after what it gives up.
    while start.elapsed() < Duration::from_millis(300) {
        asking.poll();
        assert!(asking.next_event().is_none(), "it is told of a loss");
        assert!(matches!(asking.peers[&PEER].link, LinkState::Dialing));
        std::thread::sleep(Duration::from_millis(3));
    }
    let mut serving = Lane::new(Arc::clone(theirs.control()), 0, true).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while serving.links.taken() == 0 {
        assert!(Instant::now() < deadline, "it is never connected");
        serving.poll();
        asking.poll();
        while asking.next_event().is_some() {}
    }
}
