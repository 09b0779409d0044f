//! The target on random input. Since it makes of most input requests that are nearly right, that reaches far.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::replica;

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn hostile_requests_are_refused_or_executed_and_nothing_else(
        data in proptest::collection::vec(any::<u8>(), 0..3000),
    ) {
        replica(&data);
    }
}

/// Random bytes that were changed in few places share what came before: as the fuzzer's do.
#[test]
fn hostile_requests_that_differ_in_little_are_survived() {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    for _ in 0..8 {
        let mut data: Vec<u8> = (0..random.random_range(200..4000))
            .map(|_| random.random())
            .collect();
        for _ in 0..10 {
            replica(&data);
            for _ in 0..random.random_range(1..6) {
                let at = random.random_range(0..data.len());
                data[at] = random.random();
            }
        }
    }
}

/// A target that stops at the first check it meets would find nothing.
#[test]
fn the_target_gets_past_the_first_checks() {
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let mut sum = super::Reach::default();
    for _ in 0..50 {
        let data: Vec<u8> = (0..4000).map(|_| random.random()).collect();
        let reach = replica(&data);
        sum.requests += reach.requests;
        sum.by_queue_pair += reach.by_queue_pair;
        sum.done += reach.done;
        sum.restarts += reach.restarts;
    }
    assert!(
        sum.requests > 1000 && sum.by_queue_pair > 200 && sum.done > 200 && sum.restarts > 20,
        "{sum:?}"
    );
}
