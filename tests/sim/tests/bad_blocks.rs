//! Blocks that replicas cannot read: repaired from another one where there is one, and told as bad where
//! there is none.

use fabric_replication::repair::queue::Outcome;
use fabric_store::testing::sim_disk::CrashKind;
use fabric_types::io::Op;
use fabric_types::membership::ReplicaState;
use sim::Sim;
use sim::queue::Span;
use sim::sim::{End, Fault};

const WRITE: Op = Op::Write { fua: false };

/// What was written again from another replica, by the client that met it or by its own node, whoever was
/// first.
fn repaired(sim: &Sim) -> Vec<(usize, u32)> {
    let by_nodes = sim
        .repair_outcomes
        .iter()
        .filter_map(|(node, block, outcome)| match outcome {
            Outcome::Repaired { .. } => Some((*node, *block)),
            _ => None,
        });
    let by_clients = sim.repaired.iter().map(|(node, _, block)| (*node, *block));
    by_clients.chain(by_nodes).collect()
}

/// A bit of one replica's copy turns over. The guest gets the data from another one, and the bad block is
/// written again.
#[test]
fn flipped_bit_is_repaired_and_reported() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    sim.pass(Span::millis(200));
    let asked_first = sim.member(0);
    sim.flip_bit(asked_first, 5);
    assert!(!sim.can_read(asked_first, 5), "the checksum tells");
    sim.read_blocks(0, 8);
    sim.pass(Span::millis(200));
    assert_eq!(repaired(&sim), [(asked_first, 5)]);
    assert!(sim.can_read(asked_first, 5));
    sim.read_blocks(0, 8);
    assert_eq!(repaired(&sim).len(), 1, "there is nothing more to repair");
    sim.end();
}

/// Each replica has another bad block in what the guest reads: none can serve it in one, and yet nothing is
/// lost.
#[test]
fn each_replica_has_another_bad_block() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    sim.pass(Span::millis(200));
    for node in 0..3 {
        sim.flip_bit(node, 2 + node as u32);
    }
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), 0);
    sim.pass(Span::millis(200));
    sim.read_blocks(1, 6);
    assert_eq!(sim.errors(), 0);
    sim.read_blocks(0, 8);
    let first = sim.member(0);
    let told = (first, 2 + first as u32);
    assert!(
        repaired(&sim).contains(&told),
        "that of the one that is asked first"
    );
    for node in 0..3 {
        // What no read has come upon.
        sim.write_blocks(2 + node, 1);
    }
    sim.end();
}

/// With no good copy left the guest gets an error, and the other blocks all the same.
#[test]
fn block_that_nobody_can_read_is_an_error() {
    let mut sim = Sim::scripted();
    sim.plan.faults.disk_errors = 1;
    sim.write_blocks(0, 8);
    sim.flush();
    sim.pass(Span::millis(200));
    for node in 0..3 {
        sim.flip_bit(node, 5);
    }
    let errors = sim.errors();
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), errors + 1);
    sim.read_blocks(0, 5);
    assert_eq!(sim.errors(), errors + 1);
    sim.write_blocks(5, 1);
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), errors + 1);
    sim.end();
}

/// Those in sync cannot give a block to one that comes back. It is in sync without it, and when one of them
/// gives the block again, it has it, too.
#[test]
fn replica_returns_though_no_device_gives_a_block() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.crash_node(2, CrashKind::Process);
    sim.write_blocks(0, 8);
    for node in [0, 1] {
        sim.spoil_block(node, 5);
    }
    sim.start_node(2);
    sim.wait_until(2, ReplicaState::InSync);
    assert!(!sim.can_read(2, 5));
    let errors = sim.errors();
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), errors + 1);
    sim.repair_disk(0);
    assert_eq!(sim.scrub(2), 1);
    sim.pass(Span::seconds(30));
    assert!(sim.can_read(2, 5), "it was written again from node 0");
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), errors + 1);
    sim.end();
}

/// One of them gives it: nobody hears of it, and it is written again.
#[test]
fn block_that_one_device_does_not_give_is_repaired() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    let asked_first = sim.member(0);
    sim.spoil_block(asked_first, 5);
    sim.read_blocks(0, 8);
    sim.pass(Span::millis(200));
    assert_eq!(sim.errors(), 0);
    assert_eq!(repaired(&sim), [(asked_first, 5)]);
    assert!(sim.can_read(asked_first, 5));
    sim.end();
}

/// A guest writes a part of a block that nobody can read. It hears so, and nobody has anything of it: all
/// stay in sync.
#[test]
fn part_of_a_lost_block_is_refused_and_takes_nobody_out() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    (0..3).for_each(|node| sim.spoil_block(node, 5));
    let epoch = sim.meta.epoch();
    for nth in 1..4 {
        let write = sim.ask(WRITE, 32, 10);
        sim.wait_for(write);
        assert_eq!(sim.errors(), nth);
    }
    assert_eq!(sim.meta.epoch(), epoch, "the map is what it was");
    sim.write_blocks(5, 1);
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), 3);
    sim.end();
}

/// The same is found by the scrubber of that replica's node, and no guest reads it.
#[test]
fn flipped_bit_found_by_scrub_is_repaired_from_another_replica() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    sim.pass(Span::millis(200));
    for node in 0..3 {
        sim.flip_bit(node, 5);
        assert_eq!(sim.scrub(node), 1);
        sim.pass(Span::millis(200));
        let (at, block, outcome) = sim.repair_outcomes[node];
        assert_eq!((at, block), (node, 5));
        assert!(matches!(outcome, Outcome::Repaired { .. }), "{outcome:?}");
        assert!(sim.can_read(node, 5));
        assert_eq!(sim.scrub(node), 0, "node {node}");
    }
    sim.read_blocks(0, 8);
    assert!(sim.repaired.is_empty(), "guests met none of it");
    sim.end();
}

/// With no good copy left it stays bad, and is told, until somebody writes it.
#[test]
fn block_that_no_replica_has_stays_bad_until_it_is_written() {
    let mut sim = Sim::scripted();
    sim.plan.faults.disk_errors = 1;
    sim.write_blocks(0, 8);
    sim.flush();
    sim.pass(Span::millis(200));
    (0..3).for_each(|node| sim.flip_bit(node, 5));
    (0..3).for_each(|node| assert_eq!(sim.scrub(node), 1));
    sim.pass(Span::seconds(20));
    sim.repair_outcomes.sort_by_key(|(node, ..)| *node);
    let stuck = [0, 1, 2].map(|node| (node, 5, Outcome::Stuck));
    assert_eq!(sim.repair_outcomes, stuck);
    sim.write_blocks(5, 1);
    sim.pass(Span::seconds(30));
    sim.repair_outcomes.drain(..3);
    sim.repair_outcomes.sort_by_key(|(node, ..)| *node);
    let readable = [0, 1, 2].map(|node| (node, 5, Outcome::Readable));
    assert_eq!(sim.repair_outcomes, readable);
    sim.read_blocks(0, 8);
    sim.end();
}

/// A replica that is not in sync repairs nothing, and is no source; when it is in sync again it is both.
#[test]
fn scrub_repairs_when_enough_replicas_are_in_sync() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    for node in [1, 2] {
        sim.crash_node(node, CrashKind::Process);
    }
    let waits = sim.ask(WRITE, 512, 64);
    sim.pass(Span::seconds(2));
    sim.flip_bit(0, 5);
    assert_eq!(sim.scrub(0), 1);
    sim.pass(Span::seconds(2));
    assert!(sim.repair_outcomes.is_empty(), "{:?}", sim.repair_outcomes);
    assert!(!sim.can_read(0, 5));
    sim.start_node(1);
    sim.wait_for(waits);
    sim.pass(Span::seconds(2));
    let from = fabric_types::NodeId(1);
    assert_eq!(sim.repair_outcomes, [(0, 5, Outcome::Repaired { from })]);
    sim.start_node(2);
    sim.wait_until(2, ReplicaState::InSync);
    sim.read_blocks(0, 8);
    sim.end();
}

/// A write is on one replica and not, or not yet, on the others. Each copy is right in itself: the scrubber
/// finds nothing.
#[test]
fn scrub_meets_unresolved_write() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    for node in [0, 1] {
        sim.on_fault(Fault::Cut(End::Host(0), End::Node(node)));
    }
    let write = sim.ask(WRITE, 0, 32);
    sim.pass(Span::millis(5));
    let (new, old) = (sim.tag_at(2, 0), sim.tag_at(0, 0));
    assert_ne!(new, old);
    for node in 0..3 {
        assert_eq!(sim.scrub(node), 0, "node {node}");
    }
    assert_eq!((sim.tag_at(2, 0), sim.tag_at(0, 0)), (new, old));
    for node in [0, 1] {
        sim.on_fault(Fault::Reconnect(End::Host(0), End::Node(node)));
    }
    sim.wait_for(write);
    sim.read_blocks(0, 8);
    sim.end();
}

/// A write is on one replica only. What is bad there cannot be repaired before the others have it; what is
/// bad elsewhere is repaired as it was, and never from the one that is ahead.
#[test]
fn scrub_repairs_beside_an_unresolved_write() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    for node in [0, 1] {
        sim.on_fault(Fault::Cut(End::Host(0), End::Node(node)));
    }
    let write = sim.ask(WRITE, 0, 32);
    sim.pass(Span::millis(5));
    let (new, old) = (sim.tag_at(2, 8), sim.tag_at(0, 8));
    assert_ne!(new, old);
    sim.flip_bit(2, 1);
    sim.flip_bit(0, 1);
    sim.flip_bit(2, 6);
    assert_eq!((sim.scrub(0), sim.scrub(1), sim.scrub(2)), (1, 0, 2));
    sim.pass(Span::millis(50));
    sim.repair_outcomes.sort_by_key(|(node, ..)| *node);
    let from = fabric_types::NodeId(1);
    let places = |told: &[(usize, u32, Outcome)]| -> Vec<(usize, u32)> {
        told.iter()
            .map(|(node, block, _)| (*node, *block))
            .collect()
    };
    assert_eq!(places(&sim.repair_outcomes), [(0, 1), (2, 6)]);
    assert_eq!(sim.repair_outcomes[0].2, Outcome::Repaired { from });
    assert_eq!(sim.tag_at(0, 8), old);
    assert!(!sim.can_read(2, 1), "nobody else has it");
    assert!(!sim.is_done(write));
    for node in [0, 1] {
        sim.on_fault(Fault::Reconnect(End::Host(0), End::Node(node)));
    }
    sim.wait_for(write);
    sim.pass(Span::seconds(3));
    assert_eq!(places(&sim.repair_outcomes[2..]), [(2, 1)]);
    assert_eq!(sim.tag_at(2, 8), new);
    sim.read_blocks(0, 8);
    sim.end();
}
