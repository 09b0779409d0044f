//! The fuzz targets on random input, and rings that are wrong in one certain way.

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn any_ring_content_stays_inside_guest_memory(data in proptest::collection::vec(any::<u8>(), 0..2000)) {
        super::ring(&data);
    }

    #[test]
    fn any_split_ring_has_the_chains_that_virtio_queue_finds(
        data in proptest::collection::vec(any::<u8>(), 0..2000),
    ) {
        super::oracle(&data);
    }

    #[test]
    fn any_request_is_refused_or_sound_and_the_queue_still_stops(
        data in proptest::collection::vec(any::<u8>(), 0..4000),
    ) {
        super::blk(&data);
    }
}

/// A target that stops at the first check it meets would find nothing.
#[test]
fn the_targets_get_past_the_first_checks() {
    let mut state = 1u64;
    let mut bytes = || {
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..3000).map(|_| next()).collect::<Vec<u8>>()
    };
    let inputs: Vec<_> = (0..1000).map(|_| bytes()).collect();
    // A bit of the first byte chooses the kind of ring.
    let (packed, split): (Vec<_>, Vec<_>) = inputs.into_iter().partition(|data| data[0] & 16 != 0);
    agrees_with_virtio_queue_about_something(&split);
    for inputs in [split, packed] {
        gets_past_the_first_checks(&inputs);
    }
}

fn gets_past_the_first_checks(inputs: &[Vec<u8>]) {
    let chains: usize = inputs.iter().map(|data| super::ring(data)).sum();
    let reaches: Vec<_> = inputs.iter().map(|data| super::blk(data)).collect();
    let requests: usize = reaches.iter().map(|reach| reach.requests).sum();
    let changes: usize = reaches.iter().map(|reach| reach.changes_half_way).sum();
    assert!(
        chains > 200 && requests > 50 && changes > 20,
        "{chains} chains, {requests} requests, {changes} changes half way"
    );
}

fn agrees_with_virtio_queue_about_something(inputs: &[Vec<u8>]) {
    let reaches: Vec<_> = inputs.iter().map(|data| super::oracle(data)).collect();
    let sum = |of: fn(&super::OracleReach) -> usize| reaches.iter().map(of).sum::<usize>();
    let (same, refused) = (sum(|reach| reach.same), sum(|reach| reach.refused));
    let (stricter, interrupts) = (sum(|reach| reach.stricter), sum(|reach| reach.interrupts));
    assert!(
        same > 200 && refused > 20 && stricter > 20 && interrupts > 100,
        "{same} the same, {refused} refused, {stricter} by ours alone, {interrupts} interrupts"
    );
}
