//! A bit of one replica's device turns over, and the node repairs it by itself.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fabric::ScrubStatus;
use fabric_transport::hello::Wire;
use fabric_types::block::BLOCK_BYTES;

use super::rig::*;

/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Three nodes, whose scrubbers never rest if they are to work at all.
fn nodes(wire: Wire, scrub: bool) -> Vec<Node> {
    let ca = Authority::new();
    let node = |id| {
        Node::start_with(id, ca.good(id), wire, |config| {
            config.scrub.enabled = scrub;
            config.scrub.start_after_seconds = 0;
            config.scrub.pause_seconds = 0;
        })
    };
    let nodes: Vec<_> = (1..=3).map(node).collect();
    introduce(&nodes);
    nodes
}

/// Flips a bit of a block wherever a node's device has it.
fn flip_a_bit_of(node: &Node, block: &[u8]) {
    let path = node.fabric.devices().remove(0).path;
    let content = std::fs::read(&path).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let mut found = 0;
    for (at, there) in content.chunks(BLOCK_BYTES).enumerate() {
        if there == block {
            let flipped = [block[100] ^ 4];
            file.write_all_at(&flipped, (at * BLOCK_BYTES + 100) as u64)
                .unwrap();
            found += 1;
        }
    }
    file.sync_data().unwrap();
    assert!(found > 0, "the device has it somewhere");
}

fn status(node: &Node) -> ScrubStatus {
    node.fabric.devices().remove(0).scrub
}

fn wait_for(node: &Node, content: impl Fn(&ScrubStatus) -> bool) -> ScrubStatus {
    let start = Instant::now();
    loop {
        let status = status(node);
        if content(&status) {
            return status;
        }
        assert!(start.elapsed() < WAIT_MAX, "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn bad_block_found_by_scrub_is_repaired_without_a_guest_read() {
    for wire in both_wires() {
        let nodes = nodes(wire, true);
        let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
        let bytes = pattern(3, 64 << 10);
        guest.write(MIB, &bytes).unwrap();
        guest.flush().unwrap();
        for (epoch, bad) in [(2, 0), (4, 2)] {
            flip_a_bit_of(&nodes[bad], &bytes[5 * BLOCK_BYTES..6 * BLOCK_BYTES]);
            let status = wait_for(&nodes[bad], |status| {
                status.repaired_blocks == 1 && status.findings.is_empty()
            });
            assert!(status.bad_blocks >= 1);
            assert!(status.lost.is_empty());
            let passes = status.passes;
            let later = wait_for(&nodes[bad], |status| status.passes >= passes + 3);
            assert_eq!(later.repaired_blocks, 1, "it is repaired");
            // That replica alone has it all.
            let out: Vec<u64> = (1..=3).filter(|&n| n != nodes[bad].id).collect();
            guest.set_map(set_of(&[1, 2, 3], &out, epoch));
            assert_eq!(guest.read(MIB, bytes.len()), bytes);
            guest.set_map(set_of(&[1, 2, 3], &[], epoch + 1));
        }
        assert_eq!(status(&nodes[1]).bad_blocks, 0);
        assert!(guest.actions.is_empty(), "{:?}", guest.actions);
    }
}

#[test]
fn a_bad_block_that_a_read_meets_is_listed_until_it_is_repaired() {
    let nodes = nodes(Wire::Crc, false);
    let mut guest = Guest::new(&nodes[0], set_of(&[1, 2, 3], &[], 1));
    let bytes = pattern(4, 4096);
    guest.write(MIB, &bytes).unwrap();
    guest.flush().unwrap();
    // Nobody else is there to give it.
    guest.set_map(set_of(&[1, 2, 3], &[2, 3], 2));
    flip_a_bit_of(&nodes[0], &bytes);
    let mut buffer = vec![0; 4096];
    let read = guest.run(fabric_types::io::Op::Read, MIB, &mut buffer);
    assert_eq!(read, Err(fabric_types::io::IoError::Corrupt));
    let found = status(&nodes[0]);
    assert_eq!((found.bad_blocks, found.findings.len()), (0, 1));
    guest.set_map(set_of(&[1, 2, 3], &[], 3));
    let repaired = wait_for(&nodes[0], |status| status.findings.is_empty());
    assert_eq!(repaired.repaired_blocks, 1);
    guest.set_map(set_of(&[1, 2, 3], &[2, 3], 4));
    assert_eq!(guest.read(MIB, 4096), bytes);
}
