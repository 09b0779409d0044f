//! What others lost data by, and what guests were promised: each a fixed scenario.

use fabric_store::testing::sim_disk::CrashKind;
use fabric_types::io::Op;
use fabric_types::membership::ReplicaState;
use sim::Sim;
use sim::node::DeviceAt;
use sim::queue::Span;
use sim::sim::{End, Fault};

const WRITE: Op = Op::Write { fua: false };

/// DRBD 145: a bitmap was cleared on both sides, and what differed was never copied. Here nobody keeps a
/// bitmap: a replica that misses writes twice, dying in the middle of the first comparison, is compared in
/// full.
#[test]
fn drbd_145_bitmap_cleared_both_sides_say_clean() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 32);
    sim.crash_node(2, CrashKind::Process);
    sim.write_blocks(0, 16);
    assert_eq!(
        sim.state(2),
        ReplicaState::Out,
        "before the write was acknowledged"
    );
    sim.start_node(2);
    sim.wait_until(2, ReplicaState::Syncing);
    // Its round has begun, and with it this side's notes of what it is sent.
    sim.write_blocks(20, 1);
    sim.crash_node(2, CrashKind::Process);
    sim.write_blocks(24, 4);
    sim.start_node(2);
    sim.wait_until(2, ReplicaState::InSync);
    sim.read_blocks(0, 32);
    sim.end();
}

/// Mayastor 1713: two replicas came back one after the other, and the one with older data was rebuilt from.
#[test]
fn mayastor_1713_two_nodes_return() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.crash_node(1, CrashKind::Process);
    sim.write_blocks(0, 8);
    sim.crash_node(2, CrashKind::Process);
    let waits = sim.ask(WRITE, 0, 64);
    sim.pass(Span::seconds(2));
    assert!(!sim.is_done(waits), "one copy is fewer than two");
    // The one that missed most returns first.
    sim.start_node(1);
    sim.wait_for(waits);
    assert_eq!(sim.state(1), ReplicaState::InSync);
    sim.start_node(2);
    sim.wait_until(2, ReplicaState::InSync);
    sim.read_blocks(0, 8);
    sim.end();
}

#[test]
fn power_loss_of_all_unflushed_differs() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 8);
    sim.flush();
    sim.write_blocks(0, 4);
    sim.write_blocks(8, 4);
    for node in 0..3 {
        sim.crash_node(node, CrashKind::Power);
    }
    sim.pass(Span::millis(100));
    for node in 0..3 {
        sim.start_node(node);
    }
    for node in 0..3 {
        sim.wait_until(node, ReplicaState::InSync);
    }
    sim.read_blocks(0, 16);
    sim.read_blocks(0, 16);
    sim.end();
}

/// A write reached one replica only; that one leaves, and the write is never acknowledged with it in the set.
#[test]
fn returning_replica_holds_unacknowledged_write() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 1);
    for node in [0, 1] {
        sim.on_fault(Fault::Cut(End::Host(0), End::Node(node)));
    }
    let alone = sim.ask(WRITE, 0, 8);
    sim.pass(Span::millis(5));
    assert!(sim.tag_at(2, 0) != sim.tag_at(0, 0), "only node 2 has it");
    sim.crash_node(2, CrashKind::Process);
    // The host dies with it: nobody sends that write again.
    for node in 0..3 {
        for direction in [
            (End::Host(0), End::Node(node)),
            (End::Node(node), End::Host(0)),
        ] {
            sim.on_fault(Fault::Cut(direction.0, direction.1));
        }
    }
    sim.wait_until(2, ReplicaState::Out);
    sim.start_node(2);
    sim.wait_until(2, ReplicaState::InSync);
    sim.pass(Span::millis(10));
    assert_eq!(sim.tag_at(2, 0), sim.tag_at(0, 0), "it is forgotten");
    assert!(!sim.is_done(alone));
    sim.end();
}

#[test]
fn meta_leader_lost_during_shrink() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 1);
    sim.on_fault(Fault::Leaderless(Span::seconds(3)));
    sim.crash_node(2, CrashKind::Power);
    let waits = sim.ask(WRITE, 0, 8);
    sim.pass(Span::seconds(2));
    assert!(!sim.is_done(waits), "nobody could commit the smaller set");
    assert_eq!(sim.state(2), ReplicaState::InSync);
    sim.wait_for(waits);
    assert_eq!(sim.state(2), ReplicaState::Out);
    sim.read_blocks(0, 1);
    sim.start_node(2);
    sim.end();
}

/// A host that reaches one replica only, the minority, is not served writes by it.
#[test]
fn minority_side_serves_nothing() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 1);
    for node in [1, 2] {
        for other in [End::Host(0), End::Meta, End::Node(0)] {
            sim.on_fault(Fault::Cut(End::Node(node), other));
            sim.on_fault(Fault::Cut(other, End::Node(node)));
        }
    }
    let waits = sim.ask(WRITE, 0, 8);
    sim.pass(Span::seconds(5));
    assert!(!sim.is_done(waits), "one copy is fewer than two");
    sim.end();
}

#[test]
fn one_slow_replica() {
    let mut sim = Sim::scripted();
    sim.write_blocks(0, 1);
    sim.on_fault(Fault::Slow(DeviceAt::first_of(2), 100_000));
    let start = sim.now;
    sim.write_blocks(0, 8);
    assert_eq!(
        sim.state(2),
        ReplicaState::Out,
        "a write does not wait for it for ever"
    );
    assert!(sim.now.since(start) < Span::seconds(3));
    sim.on_fault(Fault::Slow(DeviceAt::first_of(2), 1));
    sim.end();
}

/// The old holder's write has reached one replica, the rest of it is on its way when another host takes over.
/// What one replica has the others get, and what arrives late is refused.
#[test]
fn lease_moves_while_writes_in_flight() {
    let mut sim = Sim::scripted_with_hosts(2);
    sim.write_blocks(0, 8);
    for node in [0, 1] {
        sim.on_fault(Fault::Cut(End::Host(0), End::Node(node)));
    }
    let before = sim.tag_at(0, 0);
    sim.ask(WRITE, 0, 8);
    sim.ask(WRITE, 16, 8);
    sim.pass(Span::millis(5));
    let left_behind = sim.tag_at(2, 0);
    assert_ne!(left_behind, before, "node 2 has it, and nobody else");
    sim.wrest(0, 1);
    sim.wait_for_lease();
    assert_eq!(sim.recovered_blocks, 2);
    for node in 0..3 {
        assert_eq!(sim.tag_at(node, 0), left_behind, "node {node}");
    }
    sim.read_blocks(0, 8);
    sim.write_blocks(0, 1);
    let newest = sim.tag_at(0, 0);
    for node in [0, 1] {
        sim.on_fault(Fault::Reconnect(End::Host(0), End::Node(node)));
    }
    sim.pass(Span::millis(20));
    for node in 0..3 {
        assert_eq!(sim.tag_at(node, 0), newest, "node {node}");
        assert_eq!(sim.tag_at(node, 16), sim.tag_at(2, 16), "node {node}");
    }
    sim.read_blocks(0, 8);
    sim.end();
}

/// What the old holder left on one replica cannot be read there any more. It was never acknowledged: the
/// others' older one holds.
#[test]
fn lease_moves_and_what_is_newest_cannot_be_read() {
    let mut sim = Sim::scripted_with_hosts(2);
    sim.write_blocks(0, 8);
    let before = sim.tag_at(0, 0);
    for node in [0, 1] {
        sim.on_fault(Fault::Cut(End::Host(0), End::Node(node)));
    }
    sim.ask(WRITE, 0, 8);
    sim.ask(WRITE, 16, 8);
    sim.pass(Span::millis(5));
    let left_behind = sim.tag_at(2, 16);
    sim.flip_bit(2, 0);
    sim.wrest(0, 1);
    sim.wait_for_lease();
    assert_eq!(
        sim.state(2),
        ReplicaState::InSync,
        "one bad block is no reason"
    );
    for node in 0..3 {
        assert_eq!(sim.tag_at(node, 0), before, "node {node}");
        assert_eq!(sim.tag_at(node, 16), left_behind, "node {node}");
    }
    sim.read_blocks(0, 8);
    sim.end();
}

/// No device gives the block any more, and none says that it is anything but one block: the lease moves all
/// the same.
#[test]
fn lease_moves_and_no_device_gives_a_block() {
    let mut sim = Sim::scripted_with_hosts(2);
    sim.write_blocks(0, 8);
    for node in [0, 1] {
        sim.on_fault(Fault::Cut(End::Host(0), End::Node(node)));
    }
    sim.ask(WRITE, 0, 8);
    sim.pass(Span::millis(5));
    assert_ne!(sim.tag_at(2, 0), sim.tag_at(0, 0), "only node 2 has it");
    (0..3).for_each(|node| sim.spoil_block(node, 0));
    sim.wrest(0, 1);
    sim.wait_for_lease();
    for node in [0, 1] {
        sim.on_fault(Fault::Reconnect(End::Host(0), End::Node(node)));
    }
    let errors = sim.errors();
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), errors + 1, "the data are lost");
    sim.read_blocks(1, 7);
    assert_eq!(sim.errors(), errors + 1);
    sim.write_blocks(0, 1);
    sim.read_blocks(0, 8);
    assert_eq!(sim.errors(), errors + 1);
    sim.end();
}

/// The host dies, and with it what it had sent to one replica: another host's guest sees it or not, and then
/// never the other.
#[test]
fn host_dies_with_writes_in_flight() {
    let mut sim = Sim::scripted_with_hosts(2);
    sim.write_blocks(0, 8);
    sim.on_fault(Fault::Cut(End::Host(0), End::Node(1)));
    sim.ask(WRITE, 0, 64);
    sim.pass(Span::millis(5));
    sim.crash_host(0);
    sim.start_host(0);
    sim.wait_for_lease();
    sim.read_blocks(0, 8);
    sim.crash_node(0, CrashKind::Power);
    sim.read_blocks(0, 8);
    sim.start_node(0);
    sim.end();
}

/// A member is gone for good. Another node takes its place, is compared and brought up to date; writes go on
/// meanwhile.
#[test]
fn member_leaves_for_good_and_is_replaced() {
    let mut sim = Sim::scripted_with_nodes(4, 0);
    sim.write_blocks(0, 32);
    let lost = sim.member(2);
    sim.lose_node(lost);
    sim.write_blocks(0, 8);
    sim.pass(Span::seconds(8));
    sim.wait_until_whole();
    assert!(!sim.is_member(lost));
    sim.write_blocks(4, 8);
    // The newcomer alone has to have all of it.
    let newcomer = sim.member(2);
    for nth in 0..2 {
        let node = sim.member(nth);
        sim.on_fault(Fault::Slow(DeviceAt::first_of(node), 10_000));
    }
    sim.read_blocks(0, 32);
    assert_ne!(newcomer, lost);
    for nth in 0..2 {
        let node = sim.member(nth);
        sim.on_fault(Fault::Slow(DeviceAt::first_of(node), 1));
    }
    sim.end();
}

#[test]
fn node_is_emptied_while_its_guests_write() {
    let mut sim = Sim::scripted_with_nodes(4, 0);
    sim.write_blocks(0, 32);
    let emptied = sim.member(0);
    sim.on_fault(Fault::Drain(emptied));
    while sim.is_member(emptied) {
        sim.write_blocks(0, 4);
        sim.read_blocks(0, 32);
    }
    sim.wait_until_whole();
    sim.read_blocks(0, 32);
    sim.end();
}

#[test]
fn cluster_grows_and_a_second_loss_is_borne() {
    let mut sim = Sim::scripted_with_nodes(4, 1);
    sim.write_blocks(0, 16);
    let lost = sim.member(1);
    sim.lose_node(lost);
    sim.write_blocks(8, 16);
    sim.on_fault(Fault::Join(3));
    sim.pass(Span::seconds(8));
    sim.wait_until_whole();
    assert!(sim.is_member(3) && !sim.is_member(lost));
    let other = sim.member(0);
    sim.crash_node(other, CrashKind::Power);
    sim.write_blocks(0, 8);
    sim.read_blocks(0, 32);
    sim.start_node(other);
    sim.end();
}

/// Each replica would be sent other bytes. None takes what does not fit the checksum, and all get a copy.
#[test]
fn guest_changes_buffer_in_flight() {
    let mut sim = Sim::scripted_with_slow_pickup();
    sim.write_blocks(0, 8);
    for round in 0..20 {
        let write = sim.ask(WRITE, 0, 64);
        sim.pass(Span(20 * round));
        if !sim.is_done(write) {
            sim.change_buffer(write);
        }
        sim.wait_for(write);
        for block in 0..8 {
            let tags = [0, 1, 2].map(|node| sim.tag_at(node, block * 8));
            assert!(tags.iter().all(|tag| *tag == tags[0]), "{tags:?}");
        }
    }
    sim.write_blocks(0, 8);
    sim.end();
}

/// One replica has no space left: the write waits, and all replicas stay. Blocks that are read or discarded
/// do not wait with it, and it ends once the discard has made space.
#[test]
fn replica_disk_fills_up() {
    let mut sim = Sim::scripted_with_small_device(6 << 20);
    let (mut block, mut held) = (0, None);
    while held.is_none() && block < 2048 {
        let write = sim.ask(Op::Write { fua: false }, block * 8, 512);
        let is_done = sim.run_until(Span::seconds(5), |sim| sim.is_done(write));
        held = (!is_done).then_some(write);
        block += 64;
    }
    let held = held.expect("8 MiB on 6");
    assert!(block > 64, "there is space for some");
    assert_eq!(
        sim.state(2),
        ReplicaState::InSync,
        "it has space for what others wrote"
    );
    sim.read_blocks(0, 64);
    let discard = sim.ask(Op::Discard, 0, 4096);
    sim.wait_for(discard);
    sim.wait_for(held);
    sim.write_blocks(0, 8);
    assert_eq!((sim.errors(), sim.state(2)), (0, ReplicaState::InSync));
    sim.end();
}
