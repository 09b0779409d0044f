//! The store against the model, with operations that shrink: after every step everything is compared.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::history::{self, Op, hot_range};
use crate::model::{CHILD, OTHER, PLAIN};
use crate::rig::Rig;
use crate::seeds::for_each_seed;
use crate::sim_disk::CrashKind;

/// Histories per seed.
const CASES: u32 = 12;
/// Steps of a history at most.
const STEPS_MAX: usize = 40;

#[derive(Debug, Clone)]
enum Step {
    Do(Op),
    /// Submitted together, so that they overlap in time.
    Together(Vec<Op>),
    Reopen,
    Crash {
        pending: Vec<Op>,
        power: bool,
        seed: u64,
    },
}

fn range() -> impl Strategy<Value = crate::model::Range> {
    let place = (0..3usize, 0..3usize, 0..3usize);
    let extent = prop_oneof![
        4 => (0..48u32, Just(1u32)).prop_map(|(block, blocks)| (block * 8, blocks * 8)),
        3 => (0..384u32, 1..24u32),
        2 => (0..48u32, 2..9u32).prop_map(|(block, blocks)| (block * 8, blocks * 8)),
        1 => (0..8u32, 16..48u32).prop_map(|(block, blocks)| (block * 8, blocks * 8)),
    ];
    (place, extent)
        .prop_map(|((view, chunk, hot), (from, len))| hot_range(view, chunk, hot, from, len))
}

fn change() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (range(), any::<bool>()).prop_map(|(range, fua)| Op::Write { range, fua }),
        1 => (range(), any::<bool>()).prop_map(|(range, fua)| Op::Zero { range, fua }),
        1 => range().prop_map(Op::Read),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let single = prop_oneof![
        12 => change(),
        2 => Just(Op::Flush),
        1 => Just(Op::FlushByMarks),
        2 => Just(Op::Checkpoint),
        1 => Just(Op::RaiseFence(PLAIN)),
        1 => (0..3usize, 0..3usize)
            .prop_map(|(view, chunk)| Op::DropChunk(history::VIEWS[view], history::CHUNKS[chunk])),
        1 => prop_oneof![Just(Op::DropLayer(OTHER)), Just(Op::DropLayer(CHILD))],
        1 => Just(Op::Idle),
    ];
    let several = || prop::collection::vec(change(), 1..8);
    let crash =
        (several(), any::<bool>(), any::<u64>()).prop_map(|(pending, power, seed)| Step::Crash {
            pending,
            power,
            seed,
        });
    prop_oneof![
        8 => single.prop_map(Step::Do),
        3 => several().prop_map(Step::Together),
        1 => Just(Step::Reopen),
        1 => crash,
    ]
}

fn take(mut rig: Rig, step: &Step) -> Rig {
    match step {
        Step::Do(op) => history::apply(&mut rig, *op),
        Step::Together(ops) => ops.iter().for_each(|op| history::apply(&mut rig, *op)),
        Step::Reopen => return rig.reopen(1),
        Step::Crash {
            pending,
            power,
            seed,
        } => {
            pending.iter().for_each(|op| history::apply(&mut rig, *op));
            for _ in 0..seed % 8 {
                rig.step();
            }
            let kind = if *power {
                CrashKind::Power
            } else {
                CrashKind::Process
            };
            return rig.crash(kind, *seed).recover(kind, *seed);
        }
    }
    rig
}

#[test]
fn the_store_agrees_with_the_model_after_every_step() {
    for_each_seed(3, |seed| {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let config = Config {
            cases: CASES,
            failure_persistence: None,
            ..Config::default()
        };
        let mut runner = TestRunner::new_with_rng(config, rng);
        let histories = prop::collection::vec(step(), 1..STEPS_MAX);
        let outcome = runner.run(&histories, |steps| {
            let mut rig = Rig::new_small(seed);
            history::prologue(&mut rig);
            for step in &steps {
                rig = take(rig, step);
                rig.check_last_state();
            }
            Ok(())
        });
        outcome.unwrap_or_else(|e| panic!("{e}"));
    });
}
