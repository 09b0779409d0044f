//! What a connection makes this node hold.

use std::sync::atomic::AtomicUsize;

use tokio::io::{AsyncReadExt, duplex};

use super::*;

/// Bytes of the requests that the peer sends.
const REQUEST_BYTES: usize = 4 << 20;
/// Bytes that are on their way between the two sides.
const WIRE_BYTES: usize = 64 << 10;
/// Nothing moves any more if nothing did for so long. Too short it would only spoil the test's finding, not
/// make it pass.
const STILL: Duration = Duration::from_millis(500);

/// A request as a frame, made long by the white space that JSON allows.
fn request(number: u64) -> Vec<u8> {
    let mut frame = frame::encode(number, &PeerRequest::ReadIndex).unwrap();
    frame.resize(12 + REQUEST_BYTES, b' ');
    let bytes = u32::try_from(REQUEST_BYTES).unwrap();
    frame[..4].copy_from_slice(&bytes.to_be_bytes());
    frame
}

/// Sends requests until the other side takes no more; how many bytes it took.
async fn send_all(stream: &mut (impl AsyncWrite + Unpin), requests: u64) -> usize {
    let mut sent = 0;
    for number in 0..requests {
        let frame = request(number);
        let mut rest = &frame[..];
        while !rest.is_empty() {
            match timeout(STILL, stream.write(rest)).await {
                Ok(bytes) => rest = &rest[bytes.unwrap()..],
                Err(_) => return sent + frame.len() - rest.len(),
            }
        }
        sent += frame.len();
    }
    sent
}

type Handled = BoxFuture<'static, PeerReply>;

fn all_pass(_: &PeerRequest) -> Result<(), String> {
    Ok(())
}

#[tokio::test]
async fn requests_beyond_the_budget_are_not_read() {
    let (mut peer, stream) = duplex(WIRE_BYTES);
    // None of them is ever done.
    let handle = |_| -> Handled { Box::pin(std::future::pending()) };
    let server = tokio::spawn(answer::<AboutMap, _, _, _>(
        stream,
        Budget::new(budget::total()),
        (all_pass, handle),
    ));
    let sent = send_all(&mut peer, 64).await;
    // With the heads of its frames.
    let most = (32 << 20) + WIRE_BYTES + 64 * 12;
    assert!(sent <= most, "{sent} bytes of requests are held");
    assert!(sent >= 32 << 20, "{sent} bytes stop it already");
    server.abort();
}

#[tokio::test]
async fn long_requests_of_many_do_not_hold_up_a_heartbeat() {
    let total = budget::total();
    let mut servers = JoinSet::new();
    let mut peers = Vec::new();
    let mut held = 0;
    for _ in 0..12 {
        let (mut peer, stream) = duplex(WIRE_BYTES);
        let handle = |_| -> Handled { Box::pin(std::future::pending()) };
        servers.spawn(answer::<AboutMap, _, _, _>(
            stream,
            Budget::new(Arc::clone(&total)),
            (all_pass, handle),
        ));
        held += send_all(&mut peer, 10).await;
        peers.push(peer);
    }
    assert!(held < 258 << 20, "{held} bytes are held in all");
    let (mut peer, stream) = duplex(WIRE_BYTES);
    let handle = |_| -> Handled { Box::pin(async { PeerReply::WasRemoved(false) }) };
    servers.spawn(answer::<AboutMap, _, _, _>(
        stream,
        Budget::new(total),
        (all_pass, handle),
    ));
    frame::send(&mut peer, 7, &PeerRequest::ReadIndex)
        .await
        .unwrap();
    let reply = timeout(Duration::from_secs(60), frame::receive(&mut peer, 1 << 10));
    let (number, _): (u64, PeerReply) = reply.await.expect("it waits").unwrap();
    assert_eq!(number, 7);
}

#[tokio::test]
async fn replies_that_nobody_reads_are_held_up_to_the_budget() {
    let (mut peer, stream) = duplex(WIRE_BYTES);
    let made = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&made);
    let handle = move |_| -> Handled {
        counted.fetch_add(1, Ordering::Relaxed);
        let detail = "x".repeat(REQUEST_BYTES);
        Box::pin(async move { PeerReply::Tell(Err(crate::net::ProposeError::Failed { detail })) })
    };
    let server = tokio::spawn(answer::<AboutMap, _, _, _>(
        stream,
        Budget::new(budget::total()),
        (all_pass, handle),
    ));
    for number in 0..100 {
        // Small ones, which the budget lets through.
        let sent = frame::send(&mut peer, number, &PeerRequest::Report);
        sent.await.unwrap();
    }
    tokio::time::sleep(STILL).await;
    let most = (32 << 20) / REQUEST_BYTES + 1;
    let made_by_then = made.load(Ordering::Relaxed);
    assert!(made_by_then <= most, "{made_by_then} replies were made");
    // All are there in the end.
    let read = async {
        for _ in 0..100 {
            let head = frame::receive_head(&mut peer, FRAME_BYTES_MAX)
                .await
                .unwrap();
            let mut body = vec![0; head.bytes as usize];
            peer.read_exact(&mut body).await.unwrap();
        }
    };
    timeout(Duration::from_secs(60), read)
        .await
        .expect("it stops");
    assert_eq!(made.load(Ordering::Relaxed), 100);
    server.abort();
}
