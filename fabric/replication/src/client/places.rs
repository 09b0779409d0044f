//! Where in a client's table of groups those of each pool are.

use std::ops::Range;

use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::{Epoch, PgId, placement};

use super::group_table::Group;

/// A pool's groups lie one after another, by index.
#[derive(Debug, Clone, Copy)]
struct Pool {
    number: u32,
    first: u16,
    groups: u16,
    /// Newest of its groups'.
    power_lost: Epoch,
}

/// Where in a client's table of groups those of each pool are.
#[derive(Debug, Default)]
pub(super) struct Places {
    pools: Vec<Pool>,
}

impl Places {
    /// Of a table in which no pool's groups are interrupted.
    pub(super) fn of(groups: &[Group]) -> Self {
        let mut pools: Vec<Pool> = Vec::new();
        for (at, group) in groups.iter().enumerate() {
            let (number, index) = parts(group.set.pg());
            match pools.last_mut() {
                Some(pool) if pool.number == number => {
                    assert_eq!(
                        index,
                        u32::from(pool.groups),
                        "a pool's groups have no gaps"
                    );
                    pool.groups += 1;
                    pool.power_lost = pool.power_lost.max(group.set.power_lost());
                }
                _ => pools.push(Pool {
                    number,
                    first: u16::try_from(at).expect("a client has at most 65535 groups"),
                    groups: 1,
                    power_lost: group.set.power_lost(),
                }),
            }
        }
        Self { pools }
    }

    fn pool(&self, number: u32) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.number == number)
    }

    /// Position of a group.
    pub(super) fn position(&self, pg: PgId) -> Option<usize> {
        let (number, index) = parts(pg);
        let pool = self.pool(number)?;
        let known = index < u32::from(pool.groups);
        known.then_some(usize::from(pool.first) + index as usize)
    }

    /// Whether the groups of a layer's pool are known.
    #[inline]
    pub(super) fn knows(&self, layer: LayerId) -> bool {
        self.pool(placement::pool_of(layer)).is_some()
    }

    /// Position of the group that holds a chunk.
    ///
    /// # Panics
    /// If its pool is not known.
    #[inline]
    pub(super) fn group_of(&self, chunk: ChunkKey) -> u16 {
        let pool = self
            .pool(placement::pool_of(chunk.layer))
            .expect("asked before");
        pool.first + placement::group_of(chunk, u32::from(pool.groups)) as u16
    }

    /// Positions of the groups that hold a layer's chunks.
    pub(super) fn groups_of(&self, layer: LayerId) -> Range<usize> {
        self.pool(placement::pool_of(layer)).map_or(0..0, range)
    }

    /// Under which map all replicas of some of its pool's groups had last lost power, see
    /// [`ReplicaSet::power_lost`](fabric_types::membership::ReplicaSet::power_lost).
    #[inline]
    pub(super) fn power_lost(&self, layer: LayerId) -> Epoch {
        self.pool(placement::pool_of(layer))
            .map_or(Epoch(0), |pool| pool.power_lost)
    }

    /// Positions of each pool's groups.
    pub(super) fn pools(&self) -> impl Iterator<Item = Range<usize>> {
        self.pools.iter().map(range)
    }
}

fn range(pool: &Pool) -> Range<usize> {
    let first = usize::from(pool.first);
    first..first + usize::from(pool.groups)
}

/// A group's pool and its index there.
fn parts(pg: PgId) -> (u32, u32) {
    ((pg.0 >> 32) as u32, pg.0 as u32)
}
