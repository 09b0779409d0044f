//! Seeds by the hundred, each another cluster with other luck.

use guest_rig::Form;
use sim::pace::Pace;
use sim::{Outcome, Plan, Sim};

/// Runs just this seed.
const SEED_VAR: &str = "PENSTOCK_SEED";
/// The long form draws so many times the seeds.
const LONG_FACTOR: u64 = 20;

/// Seeds of a test that draws `short` in its short form.
fn seeds(short: u64) -> u64 {
    Form::of_this_run().pick(short, LONG_FACTOR * short)
}

fn for_each_seed(
    from: u64,
    count: u64,
    run: impl Fn(u64) -> Result<Outcome, sim::Failure>,
) -> Vec<Outcome> {
    let only = std::env::var(SEED_VAR).ok();
    let only = only.map(|text| text.parse().expect("a seed is a number"));
    let (from, count) = only.map_or((from, count), |seed: u64| (seed, 1));
    let run = |seed| {
        run(seed).unwrap_or_else(|failure| {
            panic!(
                "{SEED_VAR}={seed} {failure}\nagain: cargo xtask sim --from {seed} --trace, with --blocks, \
                 --overlaps, --sound-disks, --usual-pace, --rough, --outages or --devices 2 if the test does"
            )
        })
    };
    (from..from + count).map(run).collect()
}

/// Guests that write whole blocks.
fn blocks(mut plan: Plan) -> Plan {
    plan.guests_do.sectors = false;
    plan
}

/// Guests that write what is being written.
fn overlapping(mut plan: Plan) -> Plan {
    plan.guests_do.overlaps = true;
    plan
}

/// What recurs is as rare as in what ships.
fn usual(mut plan: Plan) -> Plan {
    plan.pace = Some(Pace::USUAL);
    plan
}

/// Nodes of two devices.
fn two_devices(mut plan: Plan) -> Plan {
    plan.devices = 2;
    plan
}

#[test]
fn without_faults_every_request_ends_well() {
    let outcomes = for_each_seed(1, seeds(80), |seed| {
        Sim::drawn(seed, false, Plan::draw_healthy).run()
    });
    assert!(outcomes.iter().all(|o| o.ops.1 == 0));
    let refused: u32 = outcomes.iter().map(|o| o.refused).sum();
    let restored: u32 = outcomes.iter().map(|o| o.restored).sum();
    assert!(
        outcomes.len() == 1 || refused > 1_000 && restored > 0,
        "{refused} {restored}"
    );
    let ops: u64 = outcomes.iter().map(|o| o.ops.0).sum();
    let sectors: u64 = outcomes.iter().map(|o| o.sectors_read).sum();
    assert!(ops > 5_000 && sectors > 50_000, "{ops} {sectors}");
}

#[test]
fn with_faults_no_guest_sees_what_it_may_not() {
    let outcomes = for_each_seed(1, seeds(150), |seed| {
        Sim::drawn(seed, false, |rng| blocks(Plan::draw(rng))).run()
    });
    let cleaned: u64 = outcomes.iter().map(|o| o.cleaned_bytes).sum();
    let forged: u32 = outcomes.iter().map(|o| o.forged).sum();
    assert!(
        outcomes.len() == 1 || cleaned > 0 && forged > 0,
        "{cleaned} {forged}"
    );
}

/// Seeds that once found an error, by the plan that found it.
#[test]
fn what_was_found_once_is_not_found_again() {
    for seed in [215, 245, 8123, 51122] {
        for_each_seed(seed, 1, |seed| {
            Sim::drawn_on_sound_disks(seed, false, |rng| usual(Plan::draw(rng))).run()
        });
    }
    // With disks that rot.
    for seed in [
        22, 1_000_976, 1_005_594, 51_016_593, 71_003_702, 71_007_539, 71_096_771,
    ] {
        for_each_seed(seed, 1, |seed| {
            Sim::drawn(seed, false, |rng| usual(Plan::draw(rng))).run()
        });
    }
    for_each_seed(76_005_987, 1, |seed| {
        let plan = |rng: &mut _| usual(two_devices(overlapping(Plan::draw(rng))));
        Sim::drawn(seed, false, plan).run()
    });
    for_each_seed(53_022_024, 1, |seed| {
        Sim::drawn(seed, false, |rng| usual(overlapping(Plan::draw(rng)))).run()
    });
    for seed in [72_003_187, 72_001_270, 71_090_004] {
        for_each_seed(seed, 1, |seed| {
            Sim::drawn(seed, false, |rng| usual(Plan::draw_rough(rng))).run()
        });
    }
    for_each_seed(400_719, 1, |seed| {
        Sim::drawn(seed, false, |rng| usual(blocks(Plan::draw(rng)))).run()
    });
}

#[test]
fn with_faults_and_partial_writes_no_guest_sees_what_it_may_not() {
    for_each_seed(1001, seeds(100), |seed| {
        Sim::drawn(seed, false, Plan::draw).run()
    });
}

/// A full resync hides what a single node lost: here there is nobody to be brought up to date by.
#[test]
fn with_the_power_of_all_nodes_lost_no_guest_sees_what_it_may_not() {
    let outcomes = for_each_seed(3001, seeds(100), |seed| {
        Sim::drawn(seed, false, Plan::draw_outages).run()
    });
    let outages: u32 = outcomes.iter().map(|o| o.outages).sum();
    let durable: u64 = outcomes.iter().map(|o| o.durable_sectors).sum();
    assert!(
        outcomes.len() == 1 || outages > 50 && durable > 10_000,
        "{outages} {durable}"
    );
}

#[test]
fn with_two_devices_on_each_node_no_guest_sees_what_it_may_not() {
    for_each_seed(2001, seeds(60), |seed| {
        Sim::drawn(seed, false, |rng| two_devices(Plan::draw(rng))).run()
    });
}

#[test]
fn same_seed_with_two_devices_per_node_gives_the_same_trace() {
    let run = |seed| Sim::drawn(seed, false, |rng| two_devices(Plan::draw_rough(rng))).run();
    let first = for_each_seed(2001, 20, run);
    assert_eq!(first, for_each_seed(2001, 20, run));
    let one_device = for_each_seed(2001, 20, |seed| {
        Sim::drawn(seed, false, Plan::draw_rough).run()
    });
    assert_ne!(first, one_device);
}

#[test]
fn a_seed_run_twice_gives_the_same_trace() {
    let run = |seed| Sim::drawn(seed, false, |rng| blocks(Plan::draw(rng))).run();
    let first = for_each_seed(1, 10, run);
    let second = for_each_seed(1, 10, run);
    assert_eq!(first, second);
    assert_ne!(first[0].trace, first[1].trace);
}

/// Stores that are opened again and again: what recovery brings back must not depend on more than the disk.
#[test]
fn a_seed_with_many_restarts_run_twice_gives_the_same_trace() {
    let run = |seed| Sim::drawn(seed, false, Plan::draw_rough).run();
    assert_eq!(for_each_seed(130, 45, run), for_each_seed(130, 45, run));
}
