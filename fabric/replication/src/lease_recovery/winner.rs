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

/// Replicas that know the block, if none in sync does: these are no worse for that, and do not get what those
/// have. They cannot decide either, for they may have something from before they left.
pub(super) fn knows_more(
    at: usize,
    set: &ReplicaSet,
    stamps: &[[BlockStamp; BLOCKS]; REPLICAS_MAX],
) -> Vec<usize> {
    let knows = |m: &usize| !stamps[*m][at].is_unknown();
    if set.in_sync().iter().any(|m| knows(&m)) {
        return Vec::new();
    }
    set.receiving().iter().filter(knows).collect()
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
        // Who does not know the block decides nothing as long as anybody does.
        let rank = |m: usize| {
            let stamp = stamps[m][next.at];
            (!stamp.is_unknown(), stamp.version, std::cmp::Reverse(m))
        };
        let winner = candidates.iter().max_by_key(|&m| rank(m));
        if let Some(winner) = winner.filter(|_| disagree(next.at)) {
            next.winner = winner;
            return Some(next);
        }
        next.pass();
    }
    None
}

#[cfg(test)]
mod tests {
    use fabric_types::block::Holds;
    use fabric_types::membership::{Member, Members, ReplicaState};
    use fabric_types::{Epoch, Incarnation, NodeId, PgId};

    use super::*;

    #[test]
    fn replica_that_does_not_know_a_block_decides_only_if_nobody_does() {
        let member = |node| Member {
            node: NodeId(node),
            incarnation: Incarnation(1),
            state: ReplicaState::InSync,
            since: Epoch(1),
        };
        let set = ReplicaSet::new(PgId(1), Epoch(1), 1, (1..=3).map(member).collect());
        let decided = |of_members: [BlockStamp; 3], unreadable: Members| {
            let mut stamps = [[BlockStamp::default(); BLOCKS]; REPLICAS_MAX];
            for (place, stamp) in stamps.iter_mut().zip(of_members) {
                place[0] = stamp;
            }
            let current = Current::of_block(unreadable);
            next(current, &set, &stamps).map(|next| next.winner)
        };
        let (unknown, nothing) = (BlockStamp::UNKNOWN, BlockStamp::default());
        let data = BlockStamp {
            version: 7,
            crc: 1,
            holds: Holds::Data as u32,
        };
        let none = Members::NONE;
        // Even if what is known has no version.
        assert_eq!(decided([unknown, nothing, nothing], none), Some(1));
        assert_eq!(decided([unknown, nothing, data], none), Some(2));
        assert_eq!(decided([unknown; 3], none), None);
        // Nobody can read it: all get the newest that is known.
        let all = set.in_sync();
        assert_eq!(decided([unknown, data, unknown], all), Some(1));
    }
}
