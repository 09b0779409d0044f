//! Nodes that come into the cluster map, leave it, or reach only what is open to them.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use fabric::{MemberView, MetaRequest, Reach};
use fabric_transport::hello::Wire;
use fabric_types::io::Op;
use fabric_types::{Incarnation, NodeId};

use super::rig::*;

/// Reads that are tried. A node that knows the newer members refuses at least one of them.
const READS_MAX: usize = 100;
/// Long enough for a request that is not held up.
const WHILE: Duration = Duration::from_millis(300);

/// Node 2 is told that these are the nodes of the cluster.
fn tell_two(nodes: &[Node], members: impl IntoIterator<Item = (NodeId, MemberView)>) {
    let world = nodes[0].world();
    let mut world = world.lock().unwrap();
    world.members.insert(2, members.into_iter().collect());
}

/// Two nodes, and a guest on node 1 whose only replica is on node 2.
fn two(wire: Wire) -> (Vec<Node>, Guest) {
    let ca = Authority::new();
    let nodes = cluster(&ca, 2, wire);
    let guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    (nodes, guest)
}

/// Reads a block from node 2 while `meanwhile` looks on; whether node 2 is reported instead.
fn read_or_report(guest: &mut Guest, mut meanwhile: impl FnMut(Duration)) -> bool {
    let mut buffer = vec![0; 4096];
    guest.actions.clear();
    let mut is_done = guest.start(1, Op::Read, 0, &mut buffer).is_some();
    let mut is_reported = false;
    let start = Instant::now();
    while !is_done && !is_reported {
        guest.until(|guest, finished| {
            meanwhile(start.elapsed());
            is_done = !finished.is_empty();
            let failed = |ask: &MetaRequest| {
                matches!(
                    ask,
                    MetaRequest::ReportFailed {
                        node: NodeId(2),
                        ..
                    }
                )
            };
            is_reported = guest.actions.iter().any(failed);
            is_done || is_reported
        });
    }
    if !is_done {
        // So that the engine has nothing in flight when it is dropped.
        guest.set_map(set_of(&[1, 2], &[2], 9));
        guest.until(|_, finished| !finished.is_empty());
    }
    is_reported
}

/// Established connections to the address that a node listens on, or from it, as the kernel counts them.
fn connections_at(end: End, node: &Node) -> usize {
    const ESTABLISHED: &str = "01";
    let port = format!(":{:04X}", node.address().port());
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let sockets = table.lines().skip(1).map(|line| {
        // Number, local address, remote address, state, ...
        let fields: Vec<&str> = line.split_whitespace().collect();
        (
            fields[1].to_owned(),
            fields[2].to_owned(),
            fields[3].to_owned(),
        )
    });
    sockets
        .filter(|(local, remote, state)| {
            let address = match end {
                End::Answers => local,
                End::Asks => remote,
            };
            state == ESTABLISHED && address.ends_with(&port)
        })
        .count()
}

/// A side of a connection.
#[derive(Clone, Copy)]
enum End {
    /// That of the node at whose address it is.
    Answers,
    /// That of the node that connected.
    Asks,
}

#[test]
fn a_node_that_leaves_the_map_is_cut_off() {
    for wire in both_wires() {
        let (nodes, mut guest) = two(wire);
        guest.write(0, &pattern(1, 4096)).unwrap();
        assert!(!read_or_report(&mut guest, |_| ()), "it has a connection");
        assert_ne!(connections_at(End::Answers, &nodes[1]), 0);
        tell_two(&nodes, [member(2)]);
        guest.set_map(set_of(&[1, 2], &[1], 2));
        // Though nothing is asked on it: requests are refused in any case, for nothing is open to strangers.
        guest.until(|_, _| connections_at(End::Answers, &nodes[1]) == 0);
        // Whatever is asked on the connection that stood, and on new ones.
        assert!(read_or_report(&mut guest, |_| ()), "it is heard still");
        guest.until(|_, _| connections_at(End::Answers, &nodes[1]) == 0);
    }
}

#[test]
fn a_connection_to_a_node_that_leaves_the_map_ends() {
    for wire in both_wires() {
        let (nodes, mut guest) = two(wire);
        guest.write(0, &pattern(1, 4096)).unwrap();
        assert_ne!(connections_at(End::Asks, &nodes[1]), 0);
        // Node 2 knows nothing of its removal yet: whoever has the newer map hangs up.
        let world = nodes[0].world();
        let members = [member(1)].into_iter().collect();
        world.lock().unwrap().members.insert(1, members);
        guest.set_map(set_of(&[1, 2], &[1], 2));
        guest.until(|_, _| connections_at(End::Asks, &nodes[1]) == 0);
    }
}

#[test]
fn a_node_that_the_map_does_not_have_yet_gets_in_with_the_next() {
    let (nodes, mut guest) = two(Wire::Tls);
    tell_two(&nodes, [member(2)]);
    guest.set_map(set_of(&[1, 2], &[1], 2));
    tell_two(&nodes, [member(1), member(2)]);
    let world = nodes[0].world();
    let mut is_told = false;
    let reported = read_or_report(&mut guest, |passed| {
        if passed > WHILE && !std::mem::replace(&mut is_told, true) {
            world.lock().unwrap().set_map(&set_of(&[1, 2], &[1], 3));
        }
    });
    assert!(!reported, "it was refused meanwhile");
}

#[test]
fn a_former_start_of_a_node_is_refused() {
    let (nodes, mut guest) = two(Wire::Tls);
    guest.write(0, &pattern(1, 4096)).unwrap();
    let (one, view) = member(1);
    let newer = MemberView {
        incarnation: Incarnation(11),
        former: vec![view.incarnation],
        ..view
    };
    tell_two(&nodes, [(one, newer), member(2)]);
    guest.set_map(set_of(&[1, 2], &[1], 2));
    // Its data thread may answer some requests before it looks at the newer members.
    assert!((0..READS_MAX).any(|_| read_or_report(&mut guest, |_| ())));
}

#[test]
fn a_host_reaches_a_layer_once_it_is_open_and_not_before() {
    for wire in both_wires() {
        let (nodes, mut guest) = two(wire);
        guest.write(0, &pattern(1, 4096)).unwrap();
        let (one, view) = member(1);
        let host = MemberView {
            reach: Reach::OpenLayers,
            ..view
        };
        tell_two(&nodes, [(one, host), member(2)]);
        guest.set_map(set_of(&[1, 2], &[1], 2));
        let open = || {
            let layers = HashMap::from([(NodeId(1), HashSet::from([LAYER]))]);
            nodes[1].fabric.set_open_layers(layers);
        };
        let mut opened = None;
        let start = Instant::now();
        let reported = read_or_report(&mut guest, |passed| {
            if passed > WHILE && opened.is_none() {
                opened = Some(start.elapsed());
                open();
            }
        });
        assert!(!reported, "it was refused for good");
        assert!(opened.is_some(), "it was read before it was open");
        assert_eq!(guest.read(0, 4096), pattern(1, 4096));
        guest.flush().unwrap();
    }
}
