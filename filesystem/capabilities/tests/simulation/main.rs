//! A simulation: hosts with guests, leaders that come and go, clocks that drift, connections that break. A
//! checker sees whether each read is possible, and whether anybody could have answered from a cache while
//! something changed.
//!
//! `SEEDS=1000 cargo test -p fs-capabilities --test simulation` runs more seeds, `FROM=n` begins elsewhere.

mod checker;
mod clock;
mod event;
mod host;
mod leader;
mod plan;
mod tasks;
mod world;

use plan::{Mistake, Plan};
use world::{Failure, World};

/// Seeds that a mistake may go unnoticed for.
const MISTAKE_SEEDS_MAX: u64 = 300;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn seeds() -> std::ops::Range<u64> {
    let from = variable("FROM").unwrap_or(1);
    from..from + variable("SEEDS").unwrap_or(150)
}

#[test]
fn every_read_is_possible_whatever_fails() {
    let (mut reads, mut cached, mut changes, mut writes) = (0, 0, 0, 0);
    for seed in seeds() {
        let mut world = World::new(seed, |rng| Plan::draw(rng, None));
        let plan = world.plan.clone();
        let checker = match world.run() {
            Ok(checker) => checker,
            Err(failure) => panic!("seed {seed}: {failure}\n{plan:?}"),
        };
        reads += checker.reads;
        cached += checker.cached_reads;
        changes += checker.changes;
        writes += checker.writes;
    }
    println!(
        "{reads} reads, {cached} of them by guests' kernels, {changes} changes, {writes} writes"
    );
    assert!(cached > 0 && changes > 0 && writes > 0, "it does something");
}

#[test]
fn every_operation_goes_on_in_time_when_nothing_fails() {
    let mut wait_max = 0;
    for seed in seeds() {
        let mut world = World::new(seed, Plan::calm);
        match world.run() {
            Ok(checker) => wait_max = wait_max.max(checker.wait_max),
            Err(failure) => panic!("seed {seed}: {failure}\n{:?}", world.plan),
        }
    }
    println!("the longest wait was {} ms", wait_max / plan::MILLI);
    assert!(wait_max > 0, "something waited");
}

#[test]
fn each_mistake_is_noticed() {
    // That something waits for ever is not what these are about, and does not count.
    let run = |seed, mistake| {
        let mut world = World::new(seed, |rng| Plan::draw(rng, Some(mistake)));
        match world.run() {
            Err(Failure::Unsafe(what)) => Some(what),
            Err(Failure::Stuck(_)) | Ok(_) => None,
        }
    };
    let mut unnoticed = Vec::new();
    for mistake in Mistake::ALL {
        let mut seeds = 1..=MISTAKE_SEEDS_MAX;
        let caught = seeds.find_map(|seed| Some((seed, run(seed, mistake)?)));
        match caught {
            Some((seed, what)) => println!("{mistake:?}: seed {seed}, {what}"),
            None => unnoticed.push(mistake),
        }
    }
    assert!(unnoticed.is_empty(), "nobody noticed {unnoticed:?}");
}
