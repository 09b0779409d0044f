//! Calls that are given up while their connection is being made.

use std::cell::Cell;

use tokio::net::TcpListener;

use super::*;

/// A way to a server on which each piece of data takes a while.
async fn slow_way_to(server: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (from, _) = listener.accept().await.unwrap();
            let (from_reader, from_writer) = from.into_split();
            let (to_reader, to_writer) = TcpStream::connect(server).await.unwrap().into_split();
            for (mut reader, mut writer) in [(from_reader, to_writer), (to_reader, from_writer)] {
                tokio::spawn(async move {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(got @ 1..) = reader.read(&mut bytes).await {
                        tokio::time::sleep(delay).await;
                        if writer.write_all(&bytes[..got]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    address
}

/// A leader gives each heartbeat up after 100 ms. A follower that was cut off and is slow would else never be
/// reached again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_given_up_leave_the_connection_that_is_being_made() {
    const PATIENCE: Duration = Duration::from_millis(100);
    let authority = Authority::new(CLUSTER);
    let (_dir, node, server) = alone(&authority).await;
    // Handshake and greeting go there and back twice, an answer once.
    let address = slow_way_to(server.address(), PATIENCE / 3).await;
    let transport = TlsTransport::new(authority.node(2));
    let address = BasicNode::new(address.to_string());
    let given_up = Cell::new(0);
    let answer = until(async || {
        let call = transport.call(NodeId(1), &address, PeerRequest::ReadIndex);
        let answered = tokio::time::timeout(PATIENCE, call).await;
        given_up.set(given_up.get() + u32::from(answered.is_err()));
        answered.ok()
    })
    .await;
    answer.unwrap();
    assert!(given_up.get() > 0, "the way was not slow");
    drop(server);
    node.shutdown().await.unwrap();
}
