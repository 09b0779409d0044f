//! The simulator notices mistakes: each is made on purpose, and some seed of a few fails.

use std::panic::{AssertUnwindSafe, catch_unwind};

use clap::ValueEnum;
use guest_rig::Form;
use sim::{Mutation, Plan, Sim};

/// Seeds that a mistake may go unnoticed for. Most show within ten; a watermark forgotten, or an old map
/// taken, needs a rare chain of events.
const SEEDS_MAX: u64 = 700;

fn run(seed: u64, mutation: Mutation) -> Result<(), String> {
    let draw = |rng: &mut _| {
        let mut plan = match mutation.needs_outages() {
            true => Plan::draw_outages(rng),
            false => Plan::draw_rough(rng),
        };
        plan.make_mistake(mutation);
        plan
    };
    let ran = catch_unwind(AssertUnwindSafe(|| {
        Sim::drawn_on_sound_disks(seed, false, draw).run()
    }));
    match ran {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(failure)) => Err(failure.to_string()),
        Err(_) => Err("an assertion".to_owned()),
    }
}

#[test]
fn each_mistake_is_noticed_by_some_seed() {
    let is_long = Form::of_this_run() == Form::Long;
    let mistakes = Mutation::value_variants().iter();
    let mut unnoticed = Vec::new();
    for mutation in mistakes.filter(|one| is_long || !one.is_rare()) {
        let mut seeds = 1..=SEEDS_MAX;
        let caught = seeds.find_map(|seed| Some((seed, run(seed, *mutation).err()?)));
        let name = mutation.to_possible_value().expect("it has a name");
        let name = name.get_name().to_owned();
        match caught {
            Some((seed, what)) => {
                let what: String = what.chars().take(100).collect();
                println!("{name:26} seed {seed:3}  {what}");
            }
            None => unnoticed.push(name),
        }
    }
    assert!(unnoticed.is_empty(), "nobody noticed {unnoticed:?}");
}
