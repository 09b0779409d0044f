//! Nodes that are found where they say to be.

use meta::net::AddressSource;
use tokio::net::TcpListener;

use super::*;

/// An address at which nobody listens.
async fn dead() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().to_string()
}

async fn call(
    way: &TlsTransport,
    target: u64,
    recorded: &str,
) -> Result<PeerReply, TransportError> {
    let address = BasicNode::new(recorded);
    way.call(NodeId(target), &address, PeerRequest::ReadIndex)
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_a_node_announces_is_tried_and_leads_to_no_other_node() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let (at, old) = (server.address().to_string(), dead().await);
    let way = TlsTransport::new(authority.node(9));
    let gone = call(&way, 1, &old).await;
    assert!(matches!(gone, Err(TransportError::Gone { .. })), "{gone:?}");
    // Another address is tried at once, without a pause for the one that failed.
    way.learn(NodeId(1), &at, AddressSource::Itself);
    call(&way, 1, &old).await.unwrap();
    // Who says to be where another one is, gets that one no visitors: its certificate is looked at.
    way.learn(NodeId(2), &at, AddressSource::Itself);
    let told = is_unreachable(call(&way, 2, &old).await);
    assert!(told.contains("certificate"), "{told}");
    call(&way, 1, &old).await.unwrap();
    // That nobody listens is said only if it is so everywhere.
    way.learn(NodeId(3), &dead().await, AddressSource::Other);
    let gone = call(&way, 3, &old).await;
    assert!(matches!(gone, Err(TransportError::Gone { .. })), "{gone:?}");
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_found_at_an_address_of_which_nobody_says_whose_it_is() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let hints = vec![dead().await, server.address().to_string()];
    let way = TlsTransport::with_hints(authority.node(9), hints);
    call(&way, 1, "").await.unwrap();
    let nobody = TlsTransport::new(authority.node(9));
    is_unreachable(call(&nobody, 1, "").await);
    node.shutdown().await.unwrap();
}
