//! Nodes that are reached at the addresses that they announce.

use meta::net::AddressSource;
use tokio::net::TcpListener;

use super::*;

/// Returns an address without a listener.
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
async fn an_announced_address_is_tried_and_the_certificate_checked() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let (at, old) = (server.address().to_string(), dead().await);
    let way = TlsTransport::new(authority.node(9));
    let gone = call(&way, 1, &old).await;
    assert!(matches!(gone, Err(TransportError::Gone { .. })), "{gone:?}");
    // Another address is tried at once, without the pause after a failure.
    way.learn(NodeId(1), &at, AddressSource::Itself);
    call(&way, 1, &old).await.unwrap();
    // A node cannot attract another node's connections by announcing its address: the certificate is checked.
    way.learn(NodeId(2), &at, AddressSource::Itself);
    let message = is_unreachable(call(&way, 2, &old).await);
    assert!(message.contains("certificate"), "{message}");
    call(&way, 1, &old).await.unwrap();
    // "Connection refused" is reported only if all addresses refuse.
    way.learn(NodeId(3), &dead().await, AddressSource::Other);
    let gone = call(&way, 3, &old).await;
    assert!(matches!(gone, Err(TransportError::Gone { .. })), "{gone:?}");
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_found_by_a_hint_without_a_node_number() {
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    let hints = vec![dead().await, server.address().to_string()];
    let way = TlsTransport::with_hints(authority.node(9), hints);
    call(&way, 1, "").await.unwrap();
    let nobody = TlsTransport::new(authority.node(9));
    is_unreachable(call(&nobody, 1, "").await);
    node.shutdown().await.unwrap();
}
