//! Who replicates a placement group, as the cluster map of an epoch says.

use crate::{Epoch, Incarnation, NodeId, PgId};

/// Most replicas of a placement group.
pub const REPLICAS_MAX: usize = 8;

/// A set of member indexes of one [`ReplicaSet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Members(u8);

const _: () = assert!(REPLICAS_MAX <= u8::BITS as usize);

impl Members {
    /// No member.
    pub const NONE: Self = Self(0);

    /// Just this one.
    #[inline]
    pub fn only(index: usize) -> Self {
        Self(1 << index)
    }

    /// True if it has none.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// True if it has this one.
    #[inline]
    pub fn contains(self, index: usize) -> bool {
        self.0 & (1 << index) != 0
    }

    /// Adds one.
    #[inline]
    pub fn insert(&mut self, index: usize) {
        self.0 |= 1 << index;
    }

    /// Removes one; false if it was not there.
    #[inline]
    pub fn remove(&mut self, index: usize) -> bool {
        let had = self.contains(index);
        self.0 &= !(1 << index);
        had
    }

    /// In both.
    #[inline]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// In this one and not in the other.
    #[inline]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// In either.
    #[inline]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// How many.
    #[inline]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The members in order.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let index = left.trailing_zeros() as usize;
            left &= left - 1;
            Some(index)
        })
    }
}

/// State of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaState {
    /// Holds every acknowledged write.
    InSync,
    /// Receives new writes while it is brought up to date; its answers do not count.
    Syncing,
    /// Receives nothing.
    Out,
}

/// One replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// The node; of a replica that the group is coming to on another device of it, see
    /// [`incoming`](crate::incoming).
    pub node: NodeId,
    /// The start of it that the map knows; another one answering is not to be trusted.
    pub incarnation: Incarnation,
    /// Its state.
    pub state: ReplicaState,
    /// Epoch since which it has been sent every write (or nothing, if it is out). What it answered to
    /// requests of older maps says nothing about what it holds now.
    pub since: Epoch,
}

/// The replicas of a placement group: one for each node, and one more that it is [coming
/// to](crate::incoming).
#[derive(Debug, Clone)]
pub struct ReplicaSet {
    pg: PgId,
    epoch: Epoch,
    min_in_sync: usize,
    members: Vec<Member>,
    in_sync: Members,
    receiving: Members,
    sole: Option<Member>,
    power_lost: Epoch,
    /// Whose replica is nearest.
    near: Option<NodeId>,
}

impl ReplicaSet {
    /// A set. Writes wait while fewer than `min_in_sync` are in sync.
    ///
    /// # Panics
    /// If there are more members than [`REPLICAS_MAX`].
    pub fn new(pg: PgId, epoch: Epoch, min_in_sync: usize, members: Vec<Member>) -> Self {
        assert!(
            members.len() <= REPLICAS_MAX,
            "a replica set has at most {REPLICAS_MAX} members"
        );
        let mut in_sync = Members::NONE;
        let mut receiving = Members::NONE;
        for (index, member) in members.iter().enumerate() {
            match member.state {
                ReplicaState::InSync => {
                    in_sync.insert(index);
                    receiving.insert(index);
                }
                ReplicaState::Syncing => receiving.insert(index),
                ReplicaState::Out => {}
            }
        }
        let sole = match members.as_slice() {
            [only] if only.state == ReplicaState::InSync && min_in_sync <= 1 => Some(*only),
            _ => None,
        };
        Self {
            sole,
            pg,
            epoch,
            min_in_sync,
            members,
            in_sync,
            receiving,
            power_lost: Epoch(0),
            near: None,
        }
    }

    /// The same as this node sees it: its own replica is the nearest.
    #[must_use]
    pub fn near(self, node: NodeId) -> Self {
        let near = Some(node.base());
        Self { near, ..self }
    }

    /// Which of these a read is asked of first.
    #[inline]
    pub fn nearest(&self, of: Members) -> Option<usize> {
        let own = |member: &usize| self.near == Some(self.members[*member].node.base());
        of.iter().find(own).or_else(|| of.iter().next())
    }

    /// The same of a group whose replicas in sync had all lost power before the map of this epoch; 0: never.
    #[must_use]
    pub fn with_power_lost(self, power_lost: Epoch) -> Self {
        Self { power_lost, ..self }
    }

    /// The map since which writes may be missing that were acknowledged under an older one, and not flushed.
    #[inline]
    pub fn power_lost(&self) -> Epoch {
        self.power_lost
    }

    /// The same with every member at the index that its node has in `old`, whose other members stay as
    /// [`ReplicaState::Out`], so that who remembers members by index may go on. New ones take the places of
    /// such as are gone and not `busy`. `None`: there is no place left.
    #[must_use]
    pub fn aligned_with(&self, old: &Self, busy: Members) -> Option<Self> {
        let mut members = old.members.clone();
        let mut gone = Members::NONE;
        for (index, member) in members.iter_mut().enumerate() {
            match self.index_of(member.node) {
                Some(at) => *member = self.members[at],
                None => {
                    member.state = ReplicaState::Out;
                    gone.insert(index);
                }
            }
        }
        for member in &self.members {
            if old.index_of(member.node).is_some() {
                continue;
            }
            match gone.without(busy).iter().next() {
                Some(free) => {
                    gone.remove(free);
                    members[free] = *member;
                }
                None if members.len() < REPLICAS_MAX => members.push(*member),
                None => return None,
            }
        }
        let aligned = Self::new(self.pg, self.epoch, self.min_in_sync, members);
        let near = self.near;
        Some(Self { near, ..aligned }.with_power_lost(self.power_lost))
    }

    /// The group.
    pub fn pg(&self) -> PgId {
        self.pg
    }

    /// The map's version.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Fewest in-sync replicas that may acknowledge a write.
    #[inline]
    pub fn min_in_sync(&self) -> usize {
        self.min_in_sync
    }

    /// All members, by index.
    #[inline]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Those that hold every acknowledged write.
    #[inline]
    pub fn in_sync(&self) -> Members {
        self.in_sync
    }

    /// Those that are sent writes: in sync or syncing.
    #[inline]
    pub fn receiving(&self) -> Members {
        self.receiving
    }

    /// The only member, if there is one only, and it may acknowledge writes alone.
    #[inline]
    pub fn sole(&self) -> Option<&Member> {
        self.sole.as_ref()
    }

    /// Index of a node.
    #[inline]
    pub fn index_of(&self, node: NodeId) -> Option<usize> {
        self.members.iter().position(|m| m.node == node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(epoch: u64, nodes: &[u64]) -> ReplicaSet {
        let member = |&node: &u64| Member {
            node: NodeId(node),
            incarnation: Incarnation(node * 10),
            state: ReplicaState::InSync,
            since: Epoch(epoch),
        };
        let members = nodes.iter().map(member).collect();
        ReplicaSet::new(PgId(1), Epoch(epoch), 1, members)
    }

    fn nodes_of(set: &ReplicaSet) -> Vec<(u64, bool)> {
        let in_sync = |m: &Member| m.state == ReplicaState::InSync;
        set.members()
            .iter()
            .map(|m| (m.node.0, in_sync(m)))
            .collect()
    }

    #[test]
    fn a_member_keeps_its_index_through_maps() {
        let old = set(1, &[1, 2, 3]);
        let new = set(2, &[3, 4, 1])
            .aligned_with(&old, Members::only(1))
            .unwrap();
        assert_eq!(
            nodes_of(&new),
            [(1, true), (2, false), (3, true), (4, true)]
        );
        assert_eq!((new.epoch(), new.in_sync().len()), (Epoch(2), 3));
        // Nobody waits for node 2 any more: its place is free.
        let next = set(3, &[5, 1]).aligned_with(&new, Members::NONE).unwrap();
        assert_eq!(
            nodes_of(&next),
            [(1, true), (5, true), (3, false), (4, false)]
        );
    }

    #[test]
    fn a_map_waits_while_there_is_no_place_for_its_members() {
        let mut all = set(1, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let busy = (0..8).fold(Members::NONE, |all, i| all.or(Members::only(i)));
        assert!(set(2, &[9]).aligned_with(&all, busy).is_none());
        all = set(2, &[9])
            .aligned_with(&all, busy.without(Members::only(4)))
            .unwrap();
        assert_eq!(all.index_of(NodeId(9)), Some(4));
    }
}
