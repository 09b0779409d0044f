//! Whose content of a block the others get.
//!
//! The newest that an in-sync replica has and can read. A newer one that nobody can read was never acknowledged if another in-sync
//! replica has an older one: that one would have it, too. What none of them can read is lost, and stays as it is: reads of it
//! fail until a guest writes it again.

use super::{BLOCKS, Current};
use crate::core::membership::{REPLICAS_MAX, ReplicaSet};
use crate::proto::message::BlockStamp;

/// The next block of the page on which the replicas do not agree, and who decides it; `None`: there is none left.
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
        let readable = set.in_sync().without(next.unreadable);
        let winner = readable
            .iter()
            .max_by_key(|&m| (stamps[m][next.at].version, std::cmp::Reverse(m)));
        if let Some(winner) = winner.filter(|_| disagree(next.at)) {
            return Some(Current { winner, ..next });
        }
        next.pass();
    }
    None
}
