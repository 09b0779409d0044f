//! Who is in a Raft group: its leader makes it follow the nodes in the cluster map.
//!
//! Every node has a copy of the cluster map's metadata, as a learner at least. Of those with the role `meta`
//! an odd number votes, at most [`VOTERS_MAX`]. A namespace group has voters alone, of the same nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use openraft::metrics::WaitError;
use openraft::{BasicNode, ChangeMembers};
use raft_host::{LogId, RaftHandle};
use tokio::time::timeout;

use super::Core;
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::map::ClusterMap;
use crate::model::{AdminState, Node, NodeState, Role};

/// Most nodes that vote: a change needs three of them, and two may be lost. More would make every change
/// slower.
const VOTERS_MAX: usize = 5;
/// Most nodes that vote in a namespace group. There are several groups, so all nodes with the role take part.
const NAMESPACE_VOTERS_MAX: usize = 3;
/// The leader compares group and map this often.
const INTERVAL: Duration = Duration::from_millis(500);
/// A change that is not committed in this time is looked at again, and made again if it stopped half-way.
const CHANGE_WAIT_MAX: Duration = Duration::from_secs(10);
/// A removed node's vote is waited for this long; then whoever removed it is told. Covers a change of the
/// group and an election.
const VOTE_WAIT_MAX: Duration = Duration::from_secs(20);
/// Rank of a node that votes and is leaving.
const LEAVING: u8 = 3;
/// A learner that is at most this many entries behind may vote.
const BEHIND_MAX: u64 = 1000;

/// The Raft group as its leader knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VoterGroup {
    leader: NodeId,
    voters: BTreeSet<NodeId>,
    /// A change of the voters stopped half-way: the old ones and the new ones must both agree until it is
    /// made again. It stays so when the leader was lost, or gave up waiting, in between.
    is_joint: bool,
    /// Voters and learners, with their addresses.
    nodes: BTreeMap<NodeId, String>,
    /// Learners that have nearly all entries.
    caught_up: BTreeSet<NodeId>,
}

/// A change of the group, one at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MembershipStep {
    /// A node begins to get the metadata.
    Add(NodeId, String),
    /// A node is elsewhere now.
    Move(NodeId, String),
    /// These vote from now on.
    Vote(BTreeSet<NodeId>),
    /// A node has no part in the group any more.
    Drop(NodeId),
}

/// Whom a Raft group wants as members.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MembershipPolicy {
    /// Most nodes that vote.
    voters_max: usize,
    /// Whether all nodes get the records, or only those that vote or are about to.
    all_learn: bool,
    /// Whether the leader votes though its node is being emptied. Else it leads without a vote until it is
    /// dropped, and the others elect one of them.
    leader_stays: bool,
    /// Groups that differ in this prefer different nodes.
    turn: u64,
}

impl MembershipPolicy {
    /// Of the cluster map's group.
    const OF_MAP: Self = Self {
        voters_max: VOTERS_MAX,
        all_learn: true,
        leader_stays: true,
        turn: 0,
    };

    /// Of a namespace group: three that vote, and no others.
    pub(crate) fn of_namespaces(group: NamespaceGroupId) -> Self {
        Self {
            voters_max: NAMESPACE_VOTERS_MAX,
            all_learn: false,
            leader_stays: false,
            turn: u64::from(group.0),
        }
    }
}

/// What is to be done next.
pub(crate) fn plan(
    map: &ClusterMap,
    group: &VoterGroup,
    policy: MembershipPolicy,
) -> Option<MembershipStep> {
    // Without an address nobody can be reached: a cluster of one, or somebody else sees to the group.
    if map.nodes().any(|node| node.control_address.is_empty()) {
        return None;
    }
    let voters = choose_voters(map, group, policy);
    let members = choose_members(map, group, policy);
    let belongs = |node: &Node| policy.all_learn || members.contains(&node.id);
    for node in map.nodes() {
        match group.nodes.get(&node.id) {
            None if belongs(node) => {
                return Some(MembershipStep::Add(node.id, node.control_address.clone()));
            }
            Some(address) if *address != node.control_address => {
                return Some(MembershipStep::Move(node.id, node.control_address.clone()));
            }
            None | Some(_) => {}
        }
    }
    if !voters.is_empty() && (voters != group.voters || group.is_joint) {
        return Some(MembershipStep::Vote(voters));
    }
    let has_no_part = |id: &&NodeId| map.node(**id).is_none_or(|node| !belongs(node));
    let mut gone = group.nodes.keys().filter(has_no_part);
    let gone = gone.find(|id| !group.voters.contains(id));
    gone.map(|id| MembershipStep::Drop(*id))
}

/// Who votes stays, unless it was away for long or is being emptied, and another can take its place. The
/// leader comes first.
fn choose_voters(
    map: &ClusterMap,
    group: &VoterGroup,
    policy: MembershipPolicy,
) -> BTreeSet<NodeId> {
    let ranked = rank(map, group, policy);
    let voters = voters_among(ranked.len(), policy.voters_max);
    let chosen = ranked.into_iter().take(voters);
    chosen.map(|(_, _, id)| id).collect()
}

/// Who would vote, had they all entries; and one more while there are two, which has a second copy.
fn choose_members(
    map: &ClusterMap,
    group: &VoterGroup,
    policy: MembershipPolicy,
) -> BTreeSet<NodeId> {
    let ready = VoterGroup {
        caught_up: map.nodes().map(|node| node.id).collect(),
        ..group.clone()
    };
    let ranked = rank(map, &ready, policy);
    let voters = voters_among(ranked.len(), policy.voters_max);
    let most = ranked.len().min(policy.voters_max);
    let mut ranked = ranked.into_iter();
    let mut members: BTreeSet<NodeId> = ranked.by_ref().take(voters).map(|(_, _, id)| id).collect();
    let staying = ranked.filter(|(rank, _, _)| *rank != LEAVING);
    members.extend(staying.take(most - voters).map(|(_, _, id)| id));
    members
}

/// The nodes that may vote, those first that should.
fn rank(map: &ClusterMap, group: &VoterGroup, policy: MembershipPolicy) -> Vec<(u8, u64, NodeId)> {
    let may_vote = |node: &&Node| node.roles.contains(&Role::Meta);
    let rank = |node: &Node| {
        let votes = group.voters.contains(&node.id);
        let is_leaving = node.admin_state == AdminState::Draining
            || node.state == NodeState::Down && node.admin_state == AdminState::Absent;
        let is_ready =
            node.state == NodeState::Up && !is_leaving && group.caught_up.contains(&node.id);
        match (votes, is_leaving, is_ready) {
            _ if node.id == group.leader && (policy.leader_stays || !is_leaving) => Some(0),
            (true, false, _) => Some(1),
            (false, _, true) => Some(2),
            (true, true, _) => Some(LEAVING),
            (false, _, false) => None,
        }
    };
    let all = map.nodes().filter(may_vote).count() as u64;
    let placed = map.nodes().filter(may_vote).zip(0..);
    let mut ranked: Vec<_> = placed
        .filter_map(|(node, at)| Some((rank(node)?, (at + all - policy.turn % all) % all, node.id)))
        .collect();
    ranked.sort_unstable();
    ranked
}

/// The number of voters for a number of candidates. It is odd: two voters tolerate no failure, as one does,
/// and fail twice as often.
fn voters_among(candidates: usize, voters_max: usize) -> usize {
    let most = candidates.min(voters_max);
    most.saturating_sub(1) / 2 * 2 + usize::from(most > 0)
}

/// The number of voters once all running nodes have caught up. While there are fewer, the cluster survives
/// fewer failures than its size suggests.
#[must_use]
pub fn voters_wanted(map: &ClusterMap) -> usize {
    let is_candidate = |node: &&Node| {
        node.roles.contains(&Role::Meta)
            && node.state == NodeState::Up
            && node.admin_state == AdminState::Active
    };
    voters_among(map.nodes().filter(is_candidate).count(), VOTERS_MAX)
}

/// The group of a Raft machine that leads it; nothing if it does not, or if a change is under way.
pub(crate) fn group_of(raft: &RaftHandle) -> Option<VoterGroup> {
    let metrics = raft.metrics();
    let metrics = metrics.borrow();
    // Only the leader knows how far the others are.
    let replication = metrics.replication.as_ref()?;
    // A change that is under way is waited for: Raft makes one at a time.
    if *metrics.membership_config.log_id() > metrics.last_applied {
        return None;
    }
    let membership = metrics.membership_config.membership();
    let last = metrics.last_log_index.unwrap_or(0);
    let is_near = |at: &Option<LogId>| at.is_some_and(|at| at.index + BEHIND_MAX >= last);
    Some(VoterGroup {
        leader: metrics.id,
        voters: membership.voter_ids().collect(),
        is_joint: membership.get_joint_config().len() > 1,
        nodes: membership
            .nodes()
            .map(|(id, node)| (*id, node.addr.clone()))
            .collect(),
        caught_up: replication
            .iter()
            .filter(|(_, at)| is_near(at))
            .map(|(id, _)| *id)
            .collect(),
    })
}

/// What the leader of a group is to do next that the map may follow; nothing if this machine does not lead.
pub(crate) fn next_step(
    raft: &RaftHandle,
    map: &ClusterMap,
    policy: MembershipPolicy,
) -> Option<MembershipStep> {
    plan(map, &group_of(raft)?, policy)
}

/// Changes the group that this machine leads.
pub(crate) async fn take_step(raft: &RaftHandle, step: MembershipStep) {
    tracing::info!(?step, "changing a Raft group");
    let node = |id: NodeId, address: &str| BTreeMap::from([(id, BasicNode::new(address))]);
    let change = match &step {
        MembershipStep::Add(id, address) => ChangeMembers::AddNodes(node(*id, address)),
        // Whoever answers there must show the certificate of this node, so it cannot be another.
        MembershipStep::Move(id, address) => ChangeMembers::SetNodes(node(*id, address)),
        MembershipStep::Vote(voters) => ChangeMembers::ReplaceAllVoters(voters.clone()),
        MembershipStep::Drop(id) => ChangeMembers::RemoveNodes(BTreeSet::from([*id])),
    };
    match timeout(CHANGE_WAIT_MAX, raft.change_membership(change, true)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%error, ?step, "cannot change a Raft group yet"),
        Err(_) => tracing::warn!(?step, "a Raft group takes long to change"),
    }
}

impl Core {
    /// Waits until the metadata group does not count on the vote of a node that was removed: until then the
    /// cluster may come to a halt when that node is switched off and another one fails.
    pub(crate) async fn wait_without_vote(
        &self,
        node: NodeId,
        name: String,
    ) -> Result<(), MetaError> {
        let without = move |metrics: &openraft::RaftMetrics<NodeId, BasicNode>| {
            let membership = metrics.membership_config.membership();
            membership.voter_ids().all(|voter| voter != node)
        };
        let what = "a removed node votes no more";
        match self.raft.wait(VOTE_WAIT_MAX, what, without).await {
            Ok(()) => Ok(()),
            Err(WaitError::ShuttingDown) => Err(MetaError::Stopped),
            Err(WaitError::Timeout(..)) => Err(MetaError::StillVotes { node: name }),
        }
    }
}

/// Looks after the group as long as the node lives.
pub(super) async fn keep(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let map = Arc::clone(&core.map.borrow());
        if let Some(step) = next_step(&core.raft, &map, MembershipPolicy::OF_MAP) {
            take_step(&core.raft, step).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::command::{Command, NodeSpec};
    use crate::ids::{Incarnation, UnixMillis};
    use crate::testing::Machine;

    const AT: UnixMillis = UnixMillis(0);

    fn spec(id: u64) -> NodeSpec {
        NodeSpec {
            control_address: format!("10.0.0.{id}:7470"),
            ..NodeSpec::new(NodeId(id), format!("n{id}"))
        }
    }

    fn cluster(nodes: u64) -> Machine {
        let mut machine = Machine::default();
        let (cluster, node, pool) = (Uuid::from_u128(1), spec(1), None);
        let bootstrap = Command::Bootstrap {
            cluster,
            node,
            pool,
            at: AT,
        };
        machine.apply(&bootstrap).unwrap();
        (2..=nodes).for_each(|id| register(&mut machine, spec(id)));
        machine
    }

    fn register(machine: &mut Machine, node: NodeSpec) {
        let replaces = Incarnation::default();
        let register = Command::RegisterNode {
            node,
            replaces,
            at: AT,
        };
        machine.apply(&register).unwrap();
    }

    /// Does one step after another until there is none.
    fn run_plan(machine: &Machine, group: &mut VoterGroup) -> usize {
        run_plan_of(machine, group, MembershipPolicy::OF_MAP)
    }

    fn run_plan_of(machine: &Machine, group: &mut VoterGroup, policy: MembershipPolicy) -> usize {
        let mut steps = 0;
        while let Some(step) = plan(&machine.map(), group, policy) {
            match step {
                MembershipStep::Add(id, address) => {
                    group.nodes.insert(id, address);
                    group.caught_up.insert(id);
                }
                MembershipStep::Move(id, address) => {
                    group.nodes.insert(id, address).unwrap();
                }
                MembershipStep::Vote(voters) => {
                    assert!(voters.len() % 2 == 1 && voters.len() <= VOTERS_MAX);
                    group.voters = voters;
                    group.is_joint = false;
                }
                MembershipStep::Drop(id) => {
                    group.nodes.remove(&id).unwrap();
                }
            }
            steps += 1;
            assert!(steps < 100, "it comes to no end: {group:?}");
        }
        steps
    }

    fn bootstrapped() -> VoterGroup {
        VoterGroup {
            leader: NodeId(1),
            voters: [NodeId(1)].into(),
            is_joint: false,
            nodes: [(NodeId(1), "10.0.0.1:7470".to_owned())].into(),
            caught_up: BTreeSet::new(),
        }
    }

    fn ids(ids: &[u64]) -> BTreeSet<NodeId> {
        ids.iter().copied().map(NodeId).collect()
    }

    #[test]
    fn an_odd_number_votes_and_all_have_the_metadata() {
        for (nodes, voters) in [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 5), (9, 5)] {
            let (machine, mut group) = (cluster(nodes), bootstrapped());
            assert_eq!(voters_wanted(&machine.map()), voters, "of {nodes}");
            run_plan(&machine, &mut group);
            assert_eq!(group.voters.len(), voters, "of {nodes}");
            assert_eq!(group.nodes.len() as u64, nodes);
            assert_eq!(run_plan(&machine, &mut group), 0);
        }
    }

    #[test]
    fn only_nodes_with_the_role_that_have_caught_up_vote() {
        let mut machine = cluster(3);
        let storage = NodeSpec {
            roles: [Role::Storage].into(),
            ..spec(4)
        };
        register(&mut machine, storage);
        register(&mut machine, spec(5));
        let mut group = bootstrapped();
        run_plan(&machine, &mut group);
        assert_eq!(group.voters, ids(&[1, 2, 3]));
        // One that has not got all yet waits.
        let mut group = bootstrapped();
        for id in 2..=5 {
            group.nodes.insert(NodeId(id), format!("10.0.0.{id}:7470"));
        }
        group.caught_up = ids(&[3, 4]);
        assert_eq!(plan(&machine.map(), &group, MembershipPolicy::OF_MAP), None);
        group.caught_up.insert(NodeId(5));
        let step = plan(&machine.map(), &group, MembershipPolicy::OF_MAP);
        assert_eq!(step, Some(MembershipStep::Vote(ids(&[1, 3, 5]))));
    }

    #[test]
    fn a_change_of_voters_that_stopped_half_way_is_made_again() {
        let (machine, mut group) = (cluster(3), bootstrapped());
        run_plan(&machine, &mut group);
        // Raft counts the voters of both configurations, so that their set alone looks complete.
        group.is_joint = true;
        let step = plan(&machine.map(), &group, MembershipPolicy::OF_MAP);
        assert_eq!(step, Some(MembershipStep::Vote(ids(&[1, 2, 3]))));
        assert_eq!(run_plan(&machine, &mut group), 1);
        assert!(!group.is_joint);
    }

    #[test]
    fn a_removed_node_goes_and_one_long_away_makes_room() {
        let (mut machine, mut group) = (cluster(4), bootstrapped());
        run_plan(&machine, &mut group);
        assert_eq!(group.voters, ids(&[1, 2, 3]));
        let node = NodeId(2);
        let (incarnation, state) = (Incarnation::default(), NodeState::Down);
        let down = Command::SetNodeState {
            node,
            incarnation,
            state,
            at: AT,
        };
        machine.apply(&down).unwrap();
        assert_eq!(
            plan(&machine.map(), &group, MembershipPolicy::OF_MAP),
            None,
            "it may come back"
        );
        let admin_state = AdminState::Absent;
        let absent = Command::SetNodeAdminState {
            node,
            admin_state,
            at: AT,
        };
        machine.apply(&absent).unwrap();
        run_plan(&machine, &mut group);
        assert_eq!(group.voters, ids(&[1, 3, 4]));
        machine
            .apply(&Command::RemoveNode { node, at: AT })
            .unwrap();
        run_plan(&machine, &mut group);
        let left: BTreeSet<NodeId> = group.nodes.keys().copied().collect();
        assert_eq!(left, ids(&[1, 3, 4]));
    }

    #[test]
    fn a_node_that_is_being_emptied_gives_its_vote_to_another() {
        let (mut machine, mut group) = (cluster(4), bootstrapped());
        run_plan(&machine, &mut group);
        let mut drain = |node: u64, admin_state: AdminState| {
            let (node, at) = (NodeId(node), AT);
            let command = Command::SetNodeAdminState {
                node,
                admin_state,
                at,
            };
            machine.apply(&command).unwrap();
            run_plan(&machine, &mut group);
            group.voters.clone()
        };
        assert_eq!(drain(2, AdminState::Draining), ids(&[1, 3, 4]));
        // Nobody is left to take this one.
        assert_eq!(drain(3, AdminState::Draining), ids(&[1, 3, 4]));
        assert_eq!(drain(2, AdminState::Active), ids(&[1, 2, 4]));
    }

    #[test]
    fn a_namespace_group_has_three_voters_and_nobody_else() {
        let (mut machine, policy) = (
            cluster(5),
            MembershipPolicy::of_namespaces(NamespaceGroupId(0)),
        );
        let mut group = bootstrapped();
        run_plan_of(&machine, &mut group, policy);
        assert_eq!(group.voters, ids(&[1, 2, 3]));
        let members: BTreeSet<NodeId> = group.nodes.keys().copied().collect();
        assert_eq!(members, group.voters);
        // Its leader, too, gives its vote away when its node is emptied.
        let (node, admin_state, at) = (NodeId(1), AdminState::Draining, AT);
        let command = Command::SetNodeAdminState {
            node,
            admin_state,
            at,
        };
        machine.apply(&command).unwrap();
        run_plan_of(&machine, &mut group, policy);
        assert_eq!(group.voters, ids(&[2, 3, 4]));
        // Another group begins elsewhere.
        let mut other = VoterGroup {
            leader: NodeId(3),
            voters: ids(&[3]),
            nodes: [(NodeId(3), "10.0.0.3:7470".to_owned())].into(),
            ..VoterGroup::default()
        };
        let policy = MembershipPolicy::of_namespaces(NamespaceGroupId(3));
        run_plan_of(&machine, &mut other, policy);
        assert_eq!(other.voters, ids(&[3, 4, 5]));
    }

    #[test]
    fn moved_node_is_followed_and_addressless_node_is_left_alone() {
        let (mut machine, mut group) = (cluster(3), bootstrapped());
        run_plan(&machine, &mut group);
        let elsewhere = NodeSpec {
            control_address: "10.9.9.9:7470".to_owned(),
            ..spec(3)
        };
        register(&mut machine, elsewhere);
        let step = plan(&machine.map(), &group, MembershipPolicy::OF_MAP);
        let address = "10.9.9.9:7470".to_owned();
        assert_eq!(step, Some(MembershipStep::Move(NodeId(3), address)));
        let mut alone = Machine::default();
        let (cluster, node, pool) = (Uuid::from_u128(1), NodeSpec::new(NodeId(1), "one"), None);
        let bootstrap = Command::Bootstrap {
            cluster,
            node,
            pool,
            at: AT,
        };
        alone.apply(&bootstrap).unwrap();
        assert_eq!(
            plan(
                &alone.map(),
                &VoterGroup::default(),
                MembershipPolicy::OF_MAP
            ),
            None
        );
    }
}
