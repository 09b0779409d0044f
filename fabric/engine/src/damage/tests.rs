use fabric_types::NodeId;
use fabric_types::ids::{LayerId, Version};

use super::*;

fn damage_of(devices: usize, has_peers: bool) -> Damage {
    let damage = Damage::new(has_peers);
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
    let damage = damage_of(2, true);
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
    assert_eq!((status.findings, status.stuck), (vec![finding(4)], 1));
    // The next pass is the next try.
    damage.on_step(1, 9, true);
    assert_eq!(damage.take(), [first]);
    damage.on_outcome(first, Outcome::Readable);
    let status = damage.statuses().remove(1);
    assert!(status.findings.is_empty());
    assert_eq!((status.stuck, status.passes), (0, 1));
    assert!(damage.statuses()[0].findings.is_empty());
}

#[test]
fn standalone_node_lists_findings_and_repairs_nothing() {
    let damage = damage_of(1, false);
    damage.on_found(0, finding(4));
    damage.on_found(0, finding(4));
    damage.on_read(0, finding(5));
    assert!(damage.take().is_empty());
    let status = damage.statuses().remove(0);
    let listed = vec![finding(4), finding(5)];
    assert_eq!((status.bad_blocks, status.findings), (2, listed));
}

#[test]
fn what_is_kept_is_bounded() {
    let damage = damage_of(1, true);
    for block in 0..2 * QUEUE_MAX as u32 {
        damage.on_found(0, finding(block));
    }
    assert_eq!(damage.statuses()[0].findings.len(), FINDINGS_MAX);
    assert_eq!(damage.take().len(), QUEUE_MAX);
}

#[test]
fn overwritten_block_is_struck_at_once() {
    for has_peers in [true, false] {
        let damage = damage_of(1, has_peers);
        damage.on_found(0, finding(4));
        damage.on_found(0, finding(5));
        let bad = place_of(0, &finding(4));
        damage.on_outcome(bad, Outcome::Stuck);
        let lost = damage.statuses().remove(0).lost;
        // Alone, nobody could give the other one either.
        assert_eq!(lost.len(), if has_peers { 1 } else { 2 });
        damage.on_healed(0, bad.chunk, bad.block);
        let status = damage.statuses().remove(0);
        assert_eq!((status.findings, status.stuck), (vec![finding(5)], 0));
        assert_eq!(status.lost.len(), usize::from(!has_peers));
    }
}

#[test]
fn standalone_node_strikes_what_a_whole_pass_has_not_met_again() {
    let damage = damage_of(1, false);
    damage.on_found(0, finding(4));
    damage.on_found(0, finding(5));
    damage.on_step(0, 9, true);
    assert_eq!(damage.statuses()[0].findings.len(), 2, "found in this pass");
    damage.on_found(0, finding(5));
    damage.on_step(0, 9, false);
    damage.on_step(0, 9, true);
    assert_eq!(damage.statuses()[0].findings, [finding(5)]);
    damage.on_step(0, 9, true);
    assert_eq!(damage.statuses()[0].findings, []);
}
