//! Which placement group holds a chunk, told by the chunk's name alone: a replica sorts what it stores by
//! group without knowing any volume.
//!
//! A layer's number says where the layer lies. Metadata give such numbers ([`layer_of`]), and never give one
//! twice:
//!
//! | bits | what |
//! |---|---|
//! | 63..54 | pool |
//! | 53..26 | family: the number of the first of the volumes that share their placement |
//! | 25..0 | number in the family, beginning at 1 |
//!
//! Number 0 is no layer's. With a group's index in place of the family it names the group's *in-sync mark*: a
//! device keeps under it, as it keeps the fence of a layer, the epoch at which it was in sync last
//! (`engine::evidence`).
//!
//! Layers of nodes that were made before these numbers had parts have pool 0. Such a node is alone, and needs
//! no groups.
//!
//! **This is part of the on-disk contract**: any other function would look for data where they are not.

use super::PgId;
use super::ids::{ChunkKey, LayerId};

/// Bits of a layer's number in its family.
const NUMBER_BITS: u32 = 26;
/// Bits of the family.
const FAMILY_BITS: u32 = 28;
/// Bits of the pool.
const POOL_BITS: u32 = 10;

/// The last number of a pool.
pub const POOL_MAX: u32 = (1 << POOL_BITS) - 1;
/// The last number of a family.
pub const FAMILY_MAX: u64 = (1 << FAMILY_BITS) - 1;
/// The last number of a layer in its family.
pub const NUMBER_MAX: u32 = (1 << NUMBER_BITS) - 1;

/// The layer with this number in a family of volumes of a pool.
///
/// # Panics
/// Beyond [`POOL_MAX`], [`FAMILY_MAX`] or [`NUMBER_MAX`], which the metadata's state machine keeps to.
#[must_use]
pub fn layer_of(pool: u32, family: u64, number: u32) -> LayerId {
    assert!(pool <= POOL_MAX && family <= FAMILY_MAX && number <= NUMBER_MAX);
    let pool = u64::from(pool) << (FAMILY_BITS + NUMBER_BITS);
    LayerId(pool | family << NUMBER_BITS | u64::from(number))
}

/// The pool that a layer lies in; 0 for none.
#[inline]
pub fn pool_of(layer: LayerId) -> u32 {
    // Ten bits are left.
    (layer.0 >> (NUMBER_BITS + FAMILY_BITS)) as u32
}

/// The first of the volumes that share their placement with this layer.
#[inline]
pub fn family_of(layer: LayerId) -> u64 {
    layer.0 >> NUMBER_BITS & FAMILY_MAX
}

/// Which of its pool's groups holds a chunk, if the pool has `groups` of them.
#[inline]
pub fn group_of(chunk: ChunkKey, groups: u32) -> u32 {
    let mixed = mix(mix(family_of(chunk.layer)) ^ u64::from(chunk.index));
    // A remainder is smaller than its divisor.
    (mixed % u64::from(groups.max(1))) as u32
}

/// The same as the group is named in the whole cluster.
#[inline]
pub fn pg_of(chunk: ChunkKey, groups: u32) -> PgId {
    PgId(u64::from(pool_of(chunk.layer)) << 32 | u64::from(group_of(chunk, groups)))
}

/// Where a device keeps at which epoch it was in sync in a group; `None` for a group without a pool.
pub fn mark_of(pg: PgId) -> Option<LayerId> {
    let (pool, index) = (pg.0 >> 32, pg.0 & u64::from(u32::MAX));
    let fits = (1..1 << 10).contains(&pool) && index < 1 << FAMILY_BITS;
    fits.then_some(LayerId(
        pool << (NUMBER_BITS + FAMILY_BITS) | index << NUMBER_BITS,
    ))
}

/// No pool has a group of this name: under its mark a device counts how often it was opened and closed
/// (`engine::evidence`).
pub const USES: PgId = PgId((POOL_MAX as u64) << 32 | FAMILY_MAX);

/// The group whose mark this is; `None` for a layer of data.
pub fn marked(layer: LayerId) -> Option<PgId> {
    let is_mark = layer.0 & ((1 << NUMBER_BITS) - 1) == 0 && pool_of(layer) > 0;
    is_mark.then(|| PgId(u64::from(pool_of(layer)) << 32 | family_of(layer)))
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), from its first step.
#[inline]
const fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(layer: LayerId, index: u32) -> ChunkKey {
        ChunkKey { layer, index }
    }

    #[test]
    fn no_layer_has_the_name_of_a_mark() {
        for pg in [
            PgId(1 << 32),
            PgId(3 << 32 | 95),
            PgId(1023 << 32 | ((1 << 28) - 1)),
        ] {
            assert_eq!(mark_of(pg).and_then(marked), Some(pg));
            assert!(mark_of(pg.incoming()).is_none(), "it is not in sync");
        }
        assert_eq!(
            mark_of(PgId(3 << 32 | 95)),
            Some(LayerId(3 << 54 | 95 << 26)),
            "on devices"
        );
        for layer in [1, 7 << 26 | 1, 3 << 54 | 7 << 26 | 1] {
            assert_eq!(marked(LayerId(layer)), None);
        }
    }

    #[test]
    fn the_group_of_a_chunk_is_a_contract() {
        // Values computed once: data written with them would be lost by any other function.
        let layer = LayerId(3 << 54 | 7 << 26 | 1);
        assert_eq!((pool_of(layer), family_of(layer)), (3, 7));
        let groups: Vec<u32> = (0..4).map(|at| group_of(chunk(layer, at), 256)).collect();
        assert_eq!(groups, [69, 95, 37, 149]);
        assert_eq!(pg_of(chunk(layer, 1), 256), PgId(3 << 32 | 95));
    }

    #[test]
    fn layers_of_a_family_share_their_placement() {
        let (first, later) = (
            LayerId(1 << 54 | 9 << 26 | 1),
            LayerId(1 << 54 | 9 << 26 | 77),
        );
        for at in 0..100 {
            assert_eq!(pg_of(chunk(first, at), 1024), pg_of(chunk(later, at), 1024));
        }
    }

    #[test]
    fn all_parts_reach_their_limits() {
        let layer = LayerId(u64::MAX);
        assert_eq!((pool_of(layer), family_of(layer)), (1023, (1 << 28) - 1));
        assert!(group_of(chunk(layer, u32::MAX), 16_384) < 16_384);
        assert_eq!(group_of(chunk(layer, 0), 0), 0);
    }
}
