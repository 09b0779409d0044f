//! Whose content of a block the others get.
//!
//! The newest that an in-sync replica has and can read. A newer one that nobody can read was never
//! acknowledged if another in-sync replica has an older one: that one would have it, too. What none of them
//! can read is lost: all get the newest version and checksum, without data, and reads of it fail until a
//! guest writes it again. Did each keep its own, then one that returns with the newest data could not repair
//! the others. (The simulator found that: seed 1000976.)

use fabric_types::block::BlockStamp;
use fabric_types::membership::{REPLICAS_MAX, ReplicaSet};

use super::BLOCKS;
use super::page::Current;

/// Whether no replica in sync can read the block.
pub(super) fn is_lost(current: &Current, set: &ReplicaSet) -> bool {
    set.in_sync().without(current.unreadable).is_empty()
}

/// The next block of the page on which the replicas do not agree, and who decides it; `None`: there is none
/// left.
pub(super) fn next(
    current: Current,
    set: &ReplicaSet,
    stamps: &[[BlockStamp; BLOCKS]; REPLICAS_MAX],
) -> Option<Current> {
    let receiving = set.receiving();
    let first = receiving.iter().next().expect("somebody takes writes");
    let disagree = |at: usize| {
        let agrees = |m: usize| stamps[m][at].agrees_with(&stamps[first][at]);
        !receiving.iter().all(agrees)
    };
    let mut next = current;
    while next.at < next.end {
        let candidates = match is_lost(&next, set) {
            true => set.in_sync(),
            false => set.in_sync().without(next.unreadable),
        };
        let winner = candidates
            .iter()
            .max_by_key(|&m| (stamps[m][next.at].version, std::cmp::Reverse(m)));
        if let Some(winner) = winner.filter(|_| disagree(next.at)) {
            next.winner = winner;
            return Some(next);
        }
        next.pass();
    }
    None
}
