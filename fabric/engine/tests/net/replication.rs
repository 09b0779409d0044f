//! Three replicas, a client on one of them.

use fabric::MetaRequest;
use fabric_transport::hello::Wire;
use fabric_types::NodeId;
use fabric_types::io::{Engine, Op};

use super::rig::*;

#[test]
fn a_write_is_on_every_replica_and_can_be_read_from_any() {
    for wire in both_wires() {
        let ca = Authority::new();
        let nodes = cluster(&ca, 3, wire);
        let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
        let cases = [
            (0, 4096),
            (4096, 512),
            (8192 + 512, 8192),
            (MIB, 1 << 20),
            (3 * MIB + 1024, 3 << 20),
        ];
        for (seed, (offset, len)) in cases.into_iter().enumerate() {
            let bytes = pattern(seed as u64, len);
            guest.write(offset, &bytes).unwrap();
            assert_eq!(guest.read(offset, len), bytes);
        }
        guest.flush().unwrap();
        // Each replica alone has it all: read by a set that has no other.
        for (epoch, node) in [(2, 2), (3, 3), (4, 1)] {
            let out: Vec<u64> = (1..=3).filter(|&other| other != node).collect();
            guest.set_map(set_of(&[1, 2, 3], &out, epoch));
            for (seed, (offset, len)) in cases.into_iter().enumerate() {
                assert_eq!(guest.read(offset, len), pattern(seed as u64, len), "{node}");
            }
        }
        assert!(guest.actions.is_empty());
    }
}

#[test]
fn many_requests_at_once_are_each_answered_once() {
    for wire in both_wires() {
        let ca = Authority::new();
        let nodes = cluster(&ca, 3, wire);
        let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
        // Far more than a connection's credits at once.
        let mut buffers: Vec<_> = (0..1500).map(|n| pattern(n, 8192)).collect();
        for (n, buffer) in buffers.iter_mut().enumerate() {
            let op = Op::Write { fua: false };
            assert!(guest.start(n as u64, op, n as u64 * 8192, buffer).is_none());
        }
        let mut answers = vec![0; buffers.len()];
        guest.until(|guest, finished| {
            if guest.engine.in_flight() == 0 {
                for (tag, result) in finished {
                    assert_eq!(*result, Ok(()));
                    answers[*tag as usize] += 1;
                }
            }
            guest.engine.in_flight() == 0
        });
        assert!(answers.iter().all(|&count| count == 1));
        guest.set_map(set_of(&[1, 2, 3], &[1, 2], 2));
        for n in 0..1500 {
            assert_eq!(guest.read(n * 8192, 8192), pattern(n, 8192));
        }
    }
}

#[test]
fn dead_replica_is_reported_and_the_write_ends_at_the_next_map() {
    for wire in both_wires() {
        let ca = Authority::new();
        let mut nodes = cluster(&ca, 3, wire);
        let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
        guest.write(0, &pattern(1, 4096)).unwrap();
        drop(nodes.remove(2));
        let mut buffer = pattern(2, 4096);
        assert!(
            guest
                .start(7, Op::Write { fua: false }, 0, &mut buffer)
                .is_none()
        );
        // Invariant *Shrink before ack*.
        guest.until(|guest, finished| {
            assert!(finished.is_empty());
            !guest.actions.is_empty()
        });
        let [MetaRequest::ReportFailed { node, .. }] = guest.actions[..] else {
            panic!("{:?}", guest.actions);
        };
        assert_eq!(node, NodeId(3));
        let finished = guest.set_map(set_of(&[1, 2, 3], &[3], 2));
        assert_eq!(finished, vec![(7, Ok(()))]);
        assert_eq!(guest.read(0, 4096), pattern(2, 4096));
    }
}

#[test]
fn reads_in_flight_to_a_node_that_dies_are_answered_by_another() {
    let ca = Authority::new();
    let mut nodes = cluster(&ca, 3, Wire::Tls);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
    guest.write(0, &pattern(1, 1 << 20)).unwrap();
    // Node 2 first: it is the first of those that may be read.
    guest.set_map(set_of(&[1, 2, 3], &[1], 2));
    let mut buffers = vec![vec![0u8; 1 << 20]; 20];
    for (n, buffer) in buffers.iter_mut().enumerate() {
        assert!(guest.start(n as u64, Op::Read, 0, buffer).is_none());
    }
    nodes[1].stop_serving();
    guest.until(|guest, finished| {
        assert!(finished.iter().all(|(_, result)| result.is_ok()));
        guest.engine.in_flight() == 0
    });
    for buffer in &buffers {
        assert_eq!(*buffer, pattern(1, 1 << 20));
    }
}

#[test]
fn a_node_that_comes_back_is_reached_again() {
    let ca = Authority::new();
    let mut nodes = cluster(&ca, 2, Wire::Tls);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    guest.write(0, &pattern(1, 4096)).unwrap();
    nodes[1].stop_serving();
    let mut buffer = vec![0; 4096];
    assert!(guest.start(1, Op::Read, 0, &mut buffer).is_none());
    guest.until(|guest, _| !guest.actions.is_empty());
    nodes[1].serve();
    // It was the only one: the read waits for a map, and is then asked again.
    let mut epoch = 2;
    let mut finished = guest.set_map(set_of(&[1, 2], &[1], epoch));
    guest.until(|guest, more| {
        finished.extend_from_slice(more);
        if finished.is_empty() && !guest.actions.is_empty() {
            guest.actions.clear();
            epoch += 1;
            finished = guest.set_map(set_of(&[1, 2], &[1], epoch));
        }
        !finished.is_empty()
    });
    assert_eq!(finished[0], (1, Ok(())));
    assert_eq!(buffer, pattern(1, 4096));
}

#[test]
fn nodes_with_different_wires_speak_tls() {
    let ca = Authority::new();
    let nodes = vec![
        Node::start(1, ca.good(1), Wire::Crc),
        Node::start(2, ca.good(2), Wire::Tls),
    ];
    introduce(&nodes);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[], 1));
    guest.write(0, &pattern(1, 65536)).unwrap();
    guest.set_map(set_of(&[1, 2], &[1], 2));
    assert_eq!(guest.read(0, 65536), pattern(1, 65536));
}

#[test]
fn blocking_reads_and_writes_reach_the_replicas() {
    let ca = Authority::new();
    let nodes = cluster(&ca, 2, Wire::Crc);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2], &[1], 1));
    let mut io = nodes[0].fabric.volume_io(&guest.volume).unwrap();
    let bytes = pattern(9, 8 << 20);
    io.write_at(0, &bytes).unwrap();
    io.flush().unwrap();
    let mut back = vec![0; 8 << 20];
    io.read_at(0, &mut back).unwrap();
    assert!(back == bytes);
    drop(io);
    assert!(guest.read(0, 4 << 20) == bytes[..4 << 20]);
}

/// Trap of DESIGN §5: three replicas could store three different blocks.
#[test]
fn replicas_stay_identical_when_a_guest_changes_a_sent_buffer() {
    let ca = Authority::new();
    let nodes = cluster(&ca, 3, Wire::Crc);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
    // So that there are connections.
    guest.write(0, &[0; 4096]).unwrap();
    let mut epoch = 2;
    for len in [512, 4096, 64 << 10] {
        let mut buffer = vec![1u8; len];
        assert_eq!(
            guest.submit(7, Op::Write { fua: false }, 0, &mut buffer),
            None
        );
        // Its checksums have been taken.
        buffer.fill(2);
        guest.engine.kick();
        // It is stored here, and on its way.
        buffer.fill(3);
        guest.until(|_, finished| finished == [(7, Ok(()))]);
        let mut seen = Vec::new();
        for node in 1..=3 {
            let out: Vec<u64> = (1..=3).filter(|&other| other != node).collect();
            guest.set_map(set_of(&[1, 2, 3], &out, epoch));
            seen.push(guest.read(0, len));
            epoch += 1;
        }
        assert!(
            seen[0] == seen[1] && seen[1] == seen[2],
            "{len}: {} {} {}",
            seen[0][0],
            seen[1][0],
            seen[2][0]
        );
        guest.set_map(set_of(&[1, 2, 3], &[], epoch));
        epoch += 1;
    }
}
