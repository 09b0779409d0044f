//! The lot that a device draws for a group: weighted rendezvous hashing in fixed point.
//!
//! Every device hashes itself together with the group (rendezvous hashing, Thaler and Ravishankar, "Using
//! name-based mappings to increase hit rates", 1998). The hash becomes a uniform number u in (0, 1], and the
//! device with the smallest `-ln(u) / weight` wins (the logarithmic method of Schindelhauer and Schomaker,
//! "Weighted Distributed Hash Tables", SPAA 2005): `-ln(u) / weight` is exponentially distributed with rate
//! `weight`, and the smallest of several such numbers is each one's with a probability proportional to its
//! weight. A device's lot does not depend on the others, so one that comes or goes only takes or leaves what
//! it wins.
//!
//! Floating-point logarithms differ in their last bits from one platform to the next; these integers do not.

use crate::ids::{DeviceId, PgIndex, PoolId};

/// Weights count in this unit: coarse enough that a share of a pebibyte keeps its precision, fine enough for
/// any disk.
const WEIGHT_UNIT_BYTES: u64 = 1 << 20;

/// Numbers below are fixed-point with this many bits after the point, unless they say otherwise.
const FRACTION_BITS: u32 = 56;
/// ln 2.
const LN_2: u64 = 49_946_518_145_322_874;

/// Segments that the mantissa is cut into; a series takes over within one.
const SEGMENTS: usize = 256;
/// ln(1 + i / 256).
static LN_OF_SEGMENT: [u64; SEGMENTS] = ln_of_segments();
/// 2^64 / (1 + i / 256).
static RECIPROCAL: [u64; SEGMENTS] = reciprocals();

/// How a device draws: made once for all groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceScore {
    hash: u64,
    /// 2^63 / weight.
    per_weight: u64,
}

impl DeviceScore {
    pub(super) fn new(device: DeviceId, size_bytes: u64) -> Self {
        let weight = weight(size_bytes);
        Self {
            hash: mix(device.0 ^ 0x6465_7669_6365),
            per_weight: (1 << 63) / weight,
        }
    }

    /// The lot for a group: the smallest wins.
    pub(super) fn lot(&self, group: u64) -> u128 {
        let hash = mix(group ^ self.hash);
        u128::from(minus_ln(hash)) * u128::from(self.per_weight)
    }
}

/// The weight of a device of this size.
pub(super) fn weight(size_bytes: u64) -> u64 {
    (size_bytes / WEIGHT_UNIT_BYTES).max(1)
}

/// What stands for a group in all draws.
pub(super) fn seed(pool: PoolId, group: PgIndex) -> u64 {
    mix(u64::from(pool.0) << 32 | u64::from(group.0))
}

/// Bijective mixing of 64 bits (the finaliser of SplitMix64).
pub(super) fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `-ln(u)` for u = `hash` / 2^64, taking 0 as 1.
fn minus_ln(hash: u64) -> u64 {
    let hash = hash.max(1);
    // u = mantissa / 2^(zeros + 1), the mantissa in [1, 2) with 63 bits after the point.
    let zeros = hash.leading_zeros();
    let mantissa = hash << zeros;
    let segment = (mantissa >> (63 - 8)) as usize & (SEGMENTS - 1);
    let beyond = mantissa & ((1 << (63 - 8)) - 1);
    // mantissa = (1 + segment / 256) (1 + d), and d < 2^-8 has 64 bits after the point.
    let d = times(beyond << 1, RECIPROCAL[segment]);
    let square = times(d, d);
    let cube = times(square, d);
    let ln_1_d = d - square / 2 + cube / 3 - times(cube, d) / 4;
    let ln_mantissa = LN_OF_SEGMENT[segment] + (ln_1_d >> (64 - FRACTION_BITS));
    (u64::from(zeros + 1) * LN_2).saturating_sub(ln_mantissa)
}

/// The product of two numbers with 64 bits after the point.
fn times(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

const fn reciprocals() -> [u64; SEGMENTS] {
    let mut table = [u64::MAX; SEGMENTS];
    let mut segment = 1;
    while segment < SEGMENTS {
        table[segment] = ((1_u128 << 72) / (256 + segment as u128)) as u64;
        segment += 1;
    }
    table
}

const fn ln_of_segments() -> [u64; SEGMENTS] {
    let mut table = [0; SEGMENTS];
    let mut segment = 0;
    while segment < SEGMENTS {
        let log2 = log2((256 + segment as u64) << 55);
        table[segment] = ((log2 as u128 * LN_2 as u128) >> FRACTION_BITS) as u64;
        segment += 1;
    }
    table
}

/// The binary logarithm of a number in [1, 2) with 63 bits after the point: squaring doubles the logarithm,
/// and each time the square passes 2 the next bit of the logarithm is 1.
const fn log2(mut number: u64) -> u64 {
    let mut log = 0_u64;
    let mut bit = FRACTION_BITS;
    while bit > 0 {
        bit -= 1;
        let square = (number as u128 * number as u128) >> 63;
        if square >= 1 << 64 {
            log |= 1 << bit;
            number = (square >> 1) as u64;
        } else {
            number = square as u64;
        }
    }
    log
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_one() {
        let scale = (1_u64 << FRACTION_BITS) as f64;
        let mut hash = 1_u64;
        for round in 0..10_000_u64 {
            let exact = -(hash as f64 / 2_f64.powi(64)).ln();
            let ours = minus_ln(hash) as f64 / scale;
            assert!((exact - ours).abs() < 1e-9, "{hash}: {ours} for {exact}");
            hash = (mix(hash) >> (round % 64)).max(1);
        }
        assert_eq!(minus_ln(0), minus_ln(1));
        assert!(minus_ln(u64::MAX) < 1 << 20, "{}", minus_ln(u64::MAX));
    }

    #[test]
    fn lots_are_the_same_on_every_platform() {
        let lots: Vec<u128> = (1..=3)
            .map(|id| DeviceScore::new(DeviceId(id), id << 30).lot(seed(PoolId(1), PgIndex(7))))
            .collect();
        assert_eq!(lots, LOTS);
    }

    /// Computed once: other numbers would make the nodes of a cluster disagree.
    const LOTS: [u128; 3] = [
        819_460_976_235_680_580_773_408_715_833_344,
        50_331_635_354_213_144_987_070_959_190_016,
        58_623_494_398_192_020_023_064_287_131_320,
    ];

    #[test]
    fn devices_win_in_proportion_to_their_size() {
        let drawers: Vec<DeviceScore> = (1..=4)
            .map(|id| DeviceScore::new(DeviceId(id), id << 40))
            .collect();
        let mut won = [0_u32; 4];
        for group in 0..100_000 {
            let seed = seed(PoolId(1), PgIndex(group));
            let winner = (0..4)
                .min_by_key(|index: &usize| drawers[*index].lot(seed))
                .unwrap();
            won[winner] += 1;
        }
        for (index, won) in won.into_iter().enumerate() {
            let share = 10_000 * (index as u32 + 1);
            assert!(won.abs_diff(share) < share / 25, "{won} of {share}");
        }
    }
}
