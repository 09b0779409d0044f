//! Seeds: every random choice of a test comes from one number that a failure prints.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Runs just this seed.
const SEED_VAR: &str = "PENSTOCK_SEED";
/// Multiplies the number of seeds.
const HISTORIES_VAR: &str = "PENSTOCK_HISTORIES";

fn env_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
    )
}

/// Runs `test` for `count` seeds, or for the one in the environment.
pub fn for_each_seed(count: u64, mut test: impl FnMut(u64)) {
    let (first, count) = match env_number(SEED_VAR) {
        Some(seed) => (seed, 1),
        None => (1, count * env_number(HISTORIES_VAR).unwrap_or(1).max(1)),
    };
    for seed in first..first + count {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(seed))) {
            eprintln!("failed with {SEED_VAR}={seed}");
            resume_unwind(panic);
        }
    }
}

/// The random source of one purpose under one seed.
pub fn rng(seed: u64, purpose: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ purpose)
}
