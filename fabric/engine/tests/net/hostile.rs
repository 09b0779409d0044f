//! Peers that are none, or do not behave.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use fabric_transport::hello::Wire;
use fabric_types::ids::ChunkKey;
use fabric_types::io::{Engine, Op};
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Epoch, Generation, Request, RequestId, Sequence};

use super::peer::Peer;
use super::rig::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Whether node 1 can read from node 2, the only replica, or is told that it cannot be reached.
fn reaches(nodes: &[Node]) -> bool {
    introduce(nodes);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    let mut buffer = vec![0; 4096];
    if guest.start(1, Op::Read, 0, &mut buffer).is_none() {
        let mut done = false;
        guest.until(|guest, finished| {
            done = !finished.is_empty();
            done || !guest.actions.is_empty()
        });
        if !done {
            // So that the engine has nothing in flight when it is dropped.
            guest.set_map(set_of(&[1, 2], &[2], 2));
            guest.until(|_, finished| !finished.is_empty());
        }
        return done;
    }
    true
}

#[test]
fn good_certificates_are_taken() {
    let ca = Authority::new();
    assert!(reaches(&cluster(&ca, 2, Wire::Tls)));
}

#[test]
fn nodes_with_a_bad_certificate_do_not_reach_each_other() {
    let (ca, other) = (Authority::new(), Authority::new());
    let expired = Duration::ZERO;
    for wire in both_wires() {
        let pairs = [
            (
                "client of another CA",
                other.identity(1, &ca, DAY),
                ca.good(2),
            ),
            (
                "server of another CA",
                ca.good(1),
                other.identity(2, &ca, DAY),
            ),
            ("client expired", ca.identity(1, &ca, expired), ca.good(2)),
            ("server expired", ca.good(1), ca.identity(2, &ca, expired)),
            ("client named otherwise", ca.good(3), ca.good(2)),
            ("server named otherwise", ca.good(1), ca.good(3)),
        ];
        for (what, one, two) in pairs {
            let nodes = [Node::start(1, one, wire), Node::start(2, two, wire)];
            assert!(!reaches(&nodes), "{what}");
        }
    }
}

#[test]
fn nodes_of_two_clusters_under_one_ca_do_not_reach_each_other() {
    let ca = Authority::new();
    let nodes = [
        Node::start(1, ca.good(1), Wire::Tls),
        Node::start_as(2, ca.good(2), Wire::Tls, [8; 16]),
    ];
    assert!(!reaches(&nodes));
}

#[test]
fn strangers_change_nothing_for_others() {
    let ca = Authority::new();
    let nodes = cluster(&ca, 2, Wire::Tls);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    guest.write(0, &pattern(1, 4096)).unwrap();
    let address = nodes[1].address();
    // Some say nothing, and stay: half-open as far as the node can tell.
    let silent: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    // Some talk nonsense.
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[22, 3, 1, 0, 5, 1, 2, 3, 4, 5],
        &[0; 70_000],
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(garbage);
        let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
        // Cut off, whether with an alert before or not.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    for n in 0..50 {
        assert_eq!(guest.read(0, 4096), pattern(1, 4096), "{n}");
    }
    // Nor do they keep out those who come later.
    let mut later = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    assert_eq!(later.read(0, 4096), pattern(1, 4096));
    drop(silent);
}

#[test]
fn data_are_readable_on_the_wire_only_if_both_nodes_are_set_so() {
    let ca = Authority::new();
    for (one, two) in [
        (Wire::Tls, Wire::Tls),
        (Wire::Crc, Wire::Tls),
        (Wire::Crc, Wire::Crc),
    ] {
        let nodes = [
            Node::start(1, ca.good(1), one),
            Node::start(2, ca.good(2), two),
        ];
        introduce(&nodes);
        let relay = Relay::start(nodes[1].address(), usize::MAX, Afterwards::Cut);
        nodes[0].reach(2, relay.address);
        let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
        let secret = b"a sentence that a guest stores, and that is in no protocol";
        let mut block = vec![0; 4096];
        block[1000..1000 + secret.len()].copy_from_slice(secret);
        guest.write(0, &block).unwrap();
        assert_eq!(guest.read(0, 4096), block);
        drop(guest);
        let seen = relay.seen.lock().unwrap();
        let plain = seen.windows(secret.len()).filter(|w| w == secret).count();
        let both_plain = (one, two) == (Wire::Crc, Wire::Crc);
        assert_eq!(plain, if both_plain { 2 } else { 0 });
    }
}

/// A slow reader: it asks for a lot, and then its node stops reading for a while.
#[test]
fn a_peer_that_reads_slowly_holds_up_only_itself() {
    let ca = Authority::new();
    let nodes = cluster(&ca, 3, Wire::Crc);
    let set = || set_of(&[1, 2, 3], &[1, 3], 1);
    let mut slow = Guest::new(&nodes[0], set());
    slow.write(0, &pattern(1, 1 << 20)).unwrap();
    let mut buffers = vec![vec![0u8; 1 << 20]; 64];
    for (n, buffer) in buffers.iter_mut().enumerate() {
        assert!(slow.start(n as u64, Op::Read, 0, buffer).is_none());
    }
    // It is not reaped, so it does not read; another one is served all the same.
    let mut quick = Guest::new(&nodes[2], set());
    for _ in 0..20 {
        assert_eq!(quick.read(0, 1 << 20), pattern(1, 1 << 20));
    }
    slow.until(|guest, finished| {
        assert!(finished.iter().all(|(_, result)| result.is_ok()));
        guest.engine.in_flight() == 0
    });
    for buffer in &buffers {
        assert_eq!(*buffer, pattern(1, 1 << 20));
    }
}

#[test]
fn a_silent_stranger_is_cut_off_in_the_end() {
    let ca = Authority::new();
    let nodes = cluster(&ca, 1, Wire::Tls);
    let mut stream = TcpStream::connect(nodes[0].address()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut rest = Vec::new();
    // An end, not a timeout.
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn peer_that_accepts_but_stays_silent_counts_as_unreachable() {
    let ca = Authority::new();
    let node = Node::start(1, ca.good(1), Wire::Tls);
    let trap = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = trap.local_addr().unwrap();
    node.reach(2, address);
    let mut guest = Guest::new(&node, set_of(&[1, 2], &[1], 1));
    let mut buffer = vec![0; 4096];
    assert!(guest.start(1, Op::Read, 0, &mut buffer).is_none());
    guest.until(|guest, finished| {
        assert!(finished.is_empty());
        !guest.actions.is_empty()
    });
    guest.set_map(set_of(&[1, 2], &[2], 2));
    guest.until(|_, finished| !finished.is_empty());
}

/// A wire between two nodes that cuts after some bytes, or goes dead.
struct Relay {
    address: std::net::SocketAddr,
    /// What it carried, if it was to carry without end.
    seen: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What it does once a connection has carried so many bytes.
#[derive(Clone, Copy, PartialEq)]
enum Afterwards {
    Cut,
    Freeze,
}

impl Relay {
    /// The first connection carries `limit` bytes; those after it carry all.
    fn start(to: std::net::SocketAddr, limit: usize, then: Afterwards) -> Self {
        use std::sync::atomic::Ordering::SeqCst;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let seen: std::sync::Arc<std::sync::Mutex<Vec<u8>>> = std::sync::Arc::default();
        let seen_there = std::sync::Arc::clone(&seen);
        let thread = std::thread::spawn(move || {
            let mut left = Some(limit);
            let mut pairs: Vec<(TcpStream, TcpStream, Option<usize>)> = Vec::new();
            while !stopped.load(SeqCst) {
                if let Ok((stream, _)) = listener.accept() {
                    if let Ok(other) = TcpStream::connect(to) {
                        stream.set_nonblocking(true).unwrap();
                        other.set_nonblocking(true).unwrap();
                        pairs.push((stream, other, left.take()));
                    }
                }
                let mut moved = false;
                pairs.retain_mut(|(one, two, left)| {
                    if *left == Some(0) {
                        return then == Afterwards::Freeze;
                    }
                    let mut seen = seen_there.lock().unwrap();
                    carry(one, two, left, &mut moved, &mut seen)
                        && carry(two, one, left, &mut moved, &mut seen)
                });
                if !moved {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        Self {
            address,
            seen,
            stop,
            thread: Some(thread),
        }
    }
}

fn carry(
    from: &mut TcpStream,
    to: &mut TcpStream,
    left: &mut Option<usize>,
    moved: &mut bool,
    seen: &mut Vec<u8>,
) -> bool {
    let mut bytes = [0; 16384];
    let most = left.unwrap_or(bytes.len()).min(bytes.len());
    match from.read(&mut bytes[..most]) {
        Ok(0) => most == 0,
        Ok(got) => {
            *moved = true;
            if left.is_some_and(|left| left > usize::MAX / 2) {
                seen.extend_from_slice(&bytes[..got]);
            }
            if let Some(left) = left {
                *left -= got;
            }
            let mut rest = &bytes[..got];
            while !rest.is_empty() {
                match to.write(rest) {
                    Ok(sent) => rest = &rest[sent..],
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(_) => return false,
                }
            }
            true
        }
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Reads through a wire that breaks at a byte: until the node is reached, the only replica is said to be back
/// after each failure.
fn read_through(nodes: &[Node], bytes: &[u8], limit: usize, then: Afterwards) {
    let relay = Relay::start(nodes[1].address(), limit, then);
    nodes[0].reach(2, relay.address);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    let mut buffer = vec![0; bytes.len()];
    let mut answers = 0;
    let mut epoch = 1;
    if let Some(result) = guest.start(1, Op::Read, 0, &mut buffer) {
        result.unwrap();
        answers += 1;
    }
    guest.until(|guest, finished| {
        let mut more = Vec::new();
        if !guest.actions.is_empty() {
            guest.actions.clear();
            epoch += 1;
            more = guest.set_map(set_of(&[1, 2], &[1], epoch));
        }
        answers += more.len();
        answers + finished.len() > 0
    });
    assert_eq!(buffer, bytes, "cut at {limit}");
}

/// Two nodes, and what the second one holds.
fn pair(wire: Wire) -> (Vec<Node>, Vec<u8>) {
    let nodes = cluster(&Authority::new(), 2, wire);
    let bytes = pattern(3, 256 << 10);
    let mut direct = Guest::new(&nodes[1], set_of(&[1, 2], &[1], 1));
    direct.write(0, &bytes).unwrap();
    drop(direct);
    (nodes, bytes)
}

#[test]
fn connection_cut_at_any_byte_recovers_without_double_replies() {
    for wire in both_wires() {
        let (nodes, bytes) = pair(wire);
        for limit in (0..6000).step_by(397).chain([20_000, 100_000, 200_000]) {
            read_through(&nodes, &bytes, limit, Afterwards::Cut);
        }
    }
}

#[test]
fn a_connection_that_goes_dead_is_given_up_and_made_anew() {
    let (nodes, bytes) = pair(Wire::Crc);
    for limit in [1000, 100_000] {
        read_through(&nodes, &bytes, limit, Afterwards::Freeze);
    }
}

#[test]
fn requests_with_impossible_fields_end_their_connection() {
    let ca = Authority::new();
    let nodes = cluster(&ca, 2, Wire::Crc);
    // The sender is a node of the cluster.
    let known = [1, 2, 3].map(member).into_iter().collect();
    let world = nodes[1].world();
    world.lock().unwrap().members.insert(2, known);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    guest.write(0, &pattern(1, 4096)).unwrap();
    let mut block = vec![7u8; 4096];
    let list = [libc::iovec {
        iov_base: block.as_mut_ptr().cast(),
        iov_len: block.len(),
    }];
    let buffers = IoVecs {
        ptr: list.as_ptr(),
        len: 1,
    };
    let (layer, nothing) = (LAYER, IoVecs::NONE);
    let chunk = ChunkKey { layer, index: 0 };
    let write = Request {
        id: RequestId(1),
        pg: PG,
        epoch: Epoch(1),
        generation: Generation(1000),
        sequence: Sequence(1),
        watermark: Sequence(1),
        command: Command::Write {
            chunk,
            offset: 0,
            buffers,
            len: 4096,
            fua: false,
            urgent: false,
        },
    };
    let read = Command::Read {
        chunk,
        offset: 0,
        buffers,
        len: 4096,
    };
    let fence = Command::Fence {
        layer,
        buffers: nothing,
        len: 0,
    };
    let list_chunks = Command::ListChunks {
        cursor: 0,
        buffers: nothing,
        len: 0,
    };
    let impossible = [
        Request {
            generation: Generation(Generation::MAX.0 + 1),
            ..write
        },
        Request {
            generation: Generation(u64::MAX),
            command: read,
            ..write
        },
        Request {
            watermark: Sequence(Sequence::MAX.0 + 1),
            ..write
        },
        Request {
            command: fence,
            ..write
        },
        Request {
            command: list_chunks,
            ..write
        },
    ];
    for request in &impossible {
        let mut peer = Peer::connect(&ca, &nodes[1], 3);
        peer.send(request);
        let answer = peer.rest();
        assert!(answer.is_empty(), "{request:?}: {answer:?}");
        assert_eq!(guest.read(0, 4096), pattern(1, 4096), "{request:?}");
    }
}
