use fabric_types::NodeId;
use fabric_types::ids::{LayerId, Version};

use super::*;

fn damage_of(devices: usize) -> Damage {
    let damage = Damage::default();
    (0..devices).for_each(|_| damage.add_device());
    damage
}

fn finding(block: u32) -> ScrubFinding {
    ScrubFinding {
        layer: LayerId(3),
        chunk: 1,
        block,
        version: Version(block.into()),
        device_offset: 0,
    }
}

#[test]
fn a_block_is_listed_until_it_is_written_again() {
    let damage = damage_of(2);
    damage.on_found(1, finding(4));
    damage.on_read(1, finding(5));
    damage.on_read(1, finding(4));
    let handed = damage.take();
    let [first, second] = [4, 5].map(|block| place_of(1, &finding(block)));
    assert_eq!(handed, [first, second], "each once");
    assert!(damage.take().is_empty());
    damage.on_outcome(first, Outcome::Stuck);
    damage.on_outcome(second, Outcome::Repaired { from: NodeId(7) });
    let status = damage.statuses().remove(1);
    assert_eq!((status.bad_blocks, status.repaired_blocks), (1, 1));
    let stuck = vec![finding(4)];
    assert_eq!((status.findings, status.lost), (stuck.clone(), stuck));
    // The next pass is the next try.
    damage.on_step(1, 9, true);
    assert_eq!(damage.take(), [first]);
    damage.on_outcome(first, Outcome::Readable);
    let status = damage.statuses().remove(1);
    assert!(status.findings.is_empty());
    assert_eq!((status.lost.len(), status.passes), (0, 1));
    assert!(damage.statuses()[0].findings.is_empty());
}

#[test]
fn what_is_kept_is_bounded() {
    let damage = damage_of(1);
    for block in 0..2 * QUEUE_MAX as u32 {
        damage.on_found(0, finding(block));
    }
    assert_eq!(damage.statuses()[0].findings.len(), FINDINGS_MAX);
    assert_eq!(damage.take().len(), QUEUE_MAX);
}

#[test]
fn overwritten_block_is_struck_at_once() {
    let damage = damage_of(1);
    damage.on_found(0, finding(4));
    damage.on_found(0, finding(5));
    let bad = place_of(0, &finding(4));
    damage.on_outcome(bad, Outcome::Stuck);
    assert_eq!(damage.statuses()[0].lost, [finding(4)]);
    damage.on_healed(0, bad.chunk, bad.block);
    let status = damage.statuses().remove(0);
    assert_eq!((status.findings, status.lost), (vec![finding(5)], vec![]));
}
