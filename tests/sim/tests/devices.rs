//! Nodes of two devices.

use fabric_store::testing::sim_disk::CrashKind;
use sim::Sim;
use sim::node::DeviceAt;
use sim::queue::Span;
use sim::sim::Fault;

/// Blocks of a chunk.
const CHUNK_BLOCKS: u64 = 1024;

/// A chunk of the volume on each of a node's devices.
fn chunk_on_each(sim: &Sim, node: usize) -> [u64; 2] {
    [0, 1].map(|device| {
        let mut chunks = 0..sim.plan.chunks as u32;
        let chunk = chunks.find(|chunk| sim.home(node, *chunk) == DeviceAt { node, device });
        u64::from(chunk.expect("the groups are spread over both devices"))
    })
}

#[test]
fn a_flush_is_one_of_all_devices() {
    let mut sim = Sim::scripted_with_devices(2);
    for chunk in chunk_on_each(&sim, 0) {
        sim.write_blocks(chunk * CHUNK_BLOCKS, 8);
    }
    sim.flush();
    (0..3).for_each(|node| sim.crash_node(node, CrashKind::Power));
    sim.pass(Span::millis(100));
    (0..3).for_each(|node| sim.start_node(node));
    for chunk in chunk_on_each(&sim, 0) {
        sim.read_blocks(chunk * CHUNK_BLOCKS, 8);
    }
    sim.end();
}

#[test]
fn a_slow_device_does_not_hold_up_the_one_beside_it() {
    let mut sim = Sim::scripted_with_devices(2);
    let [on_first, on_second] = chunk_on_each(&sim, 0);
    sim.on_fault(Fault::Slow(DeviceAt::first_of(0), 1000));
    let waits = sim.ask(
        fabric_types::io::Op::Write { fua: false },
        on_first * CHUNK_BLOCKS * 8,
        8,
    );
    sim.write_blocks(on_second * CHUNK_BLOCKS, 1);
    assert!(!sim.is_done(waits));
    sim.wait_for(waits);
    sim.end();
}

/// A block that is bad on one device is found, and repaired, on the device that its group is on.
#[test]
fn the_scrubber_looks_at_all_devices() {
    let mut sim = Sim::scripted_with_devices(2);
    for chunk in chunk_on_each(&sim, 0) {
        sim.write_blocks(chunk * CHUNK_BLOCKS, 8);
    }
    sim.flush();
    sim.pass(Span::seconds(1));
    for chunk in chunk_on_each(&sim, 0) {
        sim.flip_bit_of(0, chunk as u32, 5);
    }
    assert_eq!(sim.scrub(0), 2);
    sim.pass(Span::seconds(5));
    assert_eq!(sim.scrub(0), 0);
    sim.end();
}
