//! The leader's watch over nodes and placement groups: what it hears becomes commands.
//!
//! Pure: heartbeats, the map and the time come in, commands come out. Time is a duration since any moment on
//! the leader's monotonic clock; the wall clock is never asked. All commands are judged again by the state
//! machine, so a watch that is wrong, late or repeats itself proposes in vain and breaks nothing.
//!
//! **A new leader has heard nothing.** It gives every node the full time from the moment it began to lead,
//! and every group without an authority its full grace.

mod flap_damping;
mod lost;
mod upgrade;
mod witness;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use flap_damping::FlapDamping;
use lost::LostDevices;
pub use lost::count_devices;
use upgrade::Levels;
pub use witness::has_witness;
use witness::{Absent, is_heard};

use crate::command::{Change, Command, Heard};
use crate::ids::{DeviceId, Epoch, Incarnation, NodeId, UnixMillis};
use crate::leases::DRIFT_BOUND;
use crate::level::Level;
use crate::map::ClusterMap;
use crate::model::{AdminState, GroupId, Member, Node, NodeState, PlacementGroup, ReplicaState};
use crate::report::{FailingSync, NodeLevel};
use crate::state::group::{Presence, kept_power};
use crate::state::within::may_sync;

/// A node says this often that it lives.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);
/// A node that was heard of by the leader may serve for this long, counted from before it sent its heartbeat;
/// then it stops by itself. Long enough for metadata to elect a new leader meanwhile.
pub const HEARTBEAT_LEASE: Duration = Duration::from_secs(10);
/// A node not heard of for this long is down: where others hold its data, it is taken out.
pub const NODE_DOWN_AFTER: Duration = Duration::from_secs(3);
/// The same of a node of which somebody has reported meanwhile that it does not answer. Without that, every
/// group of a node that died is taken out by a report of its own, and each first write to one waits for that.
/// Several times
/// [`HEARTBEAT_INTERVAL`]: a node that is merely slow goes on sending heartbeats.
pub const REPORTED_DOWN_AFTER: Duration = Duration::from_secs(1);
/// A group none of whose replicas in sync is valid waits this long for all of them to come back. Longer than
/// [`HEARTBEAT_LEASE`], so whoever is missing has stopped serving by then; and not much longer, for all its
/// I/O waits.
pub const AUTHORITY_GRACE: Duration = Duration::from_secs(12);
/// The share of a node that was away for this long is given to others.
pub const NODE_REPLACE_AFTER: Duration = Duration::from_secs(600);
/// A report waits this long for a heartbeat of another replica in sync, and is judged without one then.
pub const WITNESS_WAIT_MAX: Duration = Duration::from_secs(2);
/// A heartbeat is evidence that its node is alive for this long.
const WITNESS_AGE_MAX: Duration = Duration::from_millis(750);
/// So many groups of one node are synced at a time; others wait for their turn. A group that lacks little
/// takes a few round trips and commands, so that a node with a thousand of them is back within seconds; how
/// many bytes are moved in a second is bounded by the node itself.
pub const SYNCING_PER_NODE_MAX: usize = 64;
/// Pause before a member whose sync failed is synced again; doubled with each failure up to the maximum.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// See [`BACKOFF_MIN`].
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Most changes in one command; the rest follow in more.
const CHANGES_MAX: usize = 256;

const _: () = assert!(
    AUTHORITY_GRACE.as_millis()
        > HEARTBEAT_LEASE.as_millis() + HEARTBEAT_LEASE.as_millis() / DRIFT_BOUND as u128
);
// What an operator is told: I/O waits for a lease and five seconds.
const _: () = assert!(AUTHORITY_GRACE.as_millis() < HEARTBEAT_LEASE.as_millis() + 5_000);

/// What the leader has heard and when.
#[derive(Debug, Default)]
pub struct Watch {
    /// When this node began to lead; it does not lead if absent.
    leading_since: Option<Duration>,
    heard: BTreeMap<NodeId, (Incarnation, Duration)>,
    /// Nodes reported since they were heard of last.
    reported: BTreeMap<NodeId, Incarnation>,
    /// Since when nodes are known to be down.
    down_since: BTreeMap<NodeId, Duration>,
    /// Since when groups are known to have no valid member in sync.
    without_authority_since: BTreeMap<GroupId, Duration>,
    /// Members that were seen syncing: what to learn from when they are not any more.
    syncing: BTreeMap<(GroupId, DeviceId), Incarnation>,
    backoff: BTreeMap<(GroupId, DeviceId), Backoff>,
    absent: Absent,
    falls: FlapDamping,
    lost: LostDevices,
    levels: Levels,
    /// Members that wait because their device pauses.
    fallen: Vec<(GroupId, DeviceId, Incarnation)>,
    /// Groups to look after, found in the map of this epoch.
    unwell: Vec<GroupId>,
    looked_at: Option<Epoch>,
}

/// A member whose syncing failed.
#[derive(Debug, Clone, Copy)]
struct Backoff {
    incarnation: Incarnation,
    failures: u32,
    until: Duration,
}

impl Watch {
    /// This node leads from now on, for the first time or again.
    pub fn lead(&mut self, now: Duration) {
        *self = Self {
            leading_since: Some(now),
            ..Self::default()
        };
    }

    /// This node does not lead.
    pub fn follow(&mut self) {
        *self = Self::default();
    }

    /// Whether it leads.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.leading_since.is_some()
    }

    /// For how long it has led, if it does.
    #[must_use]
    pub fn led_for(&self, now: Duration) -> Option<Duration> {
        self.leading_since.map(|since| now.saturating_sub(since))
    }

    /// A node's heartbeat came in.
    pub fn heard(&mut self, node: NodeId, incarnation: Incarnation, now: Duration) {
        if self.leads() {
            self.heard.insert(node, (incarnation, now));
            self.reported.remove(&node);
        }
    }

    /// A node said up to which feature level it knows.
    pub fn note_level(&mut self, node: NodeId, incarnation: Incarnation, level: Level) {
        if self.leads() {
            self.levels.note(node, incarnation, level);
        }
    }

    /// Up to which feature level nodes know, by their word.
    #[must_use]
    pub fn levels(&self, map: &ClusterMap) -> Vec<NodeLevel> {
        let levels = self.levels.of(map);
        let told = |(node, level)| NodeLevel { node, level };
        levels.map(told).collect()
    }

    /// Somebody says that a node does not answer.
    fn reported(&mut self, node: NodeId, incarnation: Incarnation) {
        if self.leads() {
            self.reported.insert(node, incarnation);
        }
    }

    /// A report about a member came in: its node is taken for down sooner, if it is silent.
    pub fn member_reported(&mut self, map: &ClusterMap, group: GroupId, device: DeviceId) {
        let member = map.group(group).and_then(|group| group.member(device));
        if let Some(member) = member {
            self.reported(member.node, member.incarnation);
        }
    }

    /// Who was heard of at or after a moment: the witnesses for a report that came in then.
    #[must_use]
    pub fn heard_since(&self, moment: Duration) -> Vec<Heard> {
        let heard = self.heard.iter().filter(|(_, (_, at))| *at >= moment);
        heard
            .map(|(node, (incarnation, _))| Heard {
                node: *node,
                incarnation: *incarnation,
            })
            .collect()
    }

    /// How long ago each node was heard of last.
    pub fn last_heard(&self, now: Duration) -> impl Iterator<Item = (NodeId, Duration)> {
        let heard = self.heard.iter();
        heard.map(move |(node, (_, at))| (*node, now.saturating_sub(*at)))
    }

    /// Members whose sync has failed since their device came back.
    #[must_use]
    pub fn failing(&self, now: Duration) -> Vec<FailingSync> {
        let told = |group, device, failures, until: Duration| FailingSync {
            group,
            device,
            failures,
            again_in_ms: u64::try_from(until.saturating_sub(now).as_millis()).unwrap_or(u64::MAX),
        };
        let failing = self.backoff.iter();
        let failing = failing.map(|((group, device), backoff)| {
            told(*group, *device, backoff.failures, backoff.until)
        });
        let fallen = self.fallen.iter().filter_map(|(group, device, start)| {
            let is_told = self.backoff.contains_key(&(*group, *device));
            let record = self.falls.pausing(*device, *start, now)?;
            (!is_told).then(|| told(*group, *device, record.falls, record.until))
        });
        failing.chain(fallen).collect()
    }

    /// What is to be proposed now. `at` is only written into the commands.
    pub fn plan(&mut self, map: &ClusterMap, now: Duration, at: UnixMillis) -> Vec<Command> {
        let Some(leading_since) = self.leading_since else {
            return Vec::new();
        };
        let mut commands = Vec::new();
        for node in map.nodes() {
            commands.extend(self.plan_node(map, node, leading_since, now, at));
        }
        commands.extend(self.lost.plan(map, now, at));
        commands.extend(self.levels.plan(map, at));
        self.heard.retain(|node, _| map.node(*node).is_some());
        self.reported.retain(|node, _| map.node(*node).is_some());
        let heard = self.heard_since(now.saturating_sub(WITNESS_AGE_MAX));
        for changes in self.plan_groups(map, &heard, now).chunks(CHANGES_MAX) {
            commands.push(Command::Regroup {
                changes: changes.to_vec(),
                heard: heard.clone(),
                at,
            });
        }
        commands
    }

    fn plan_node(
        &mut self,
        map: &ClusterMap,
        node: &Node,
        leading_since: Duration,
        now: Duration,
        at: UnixMillis,
    ) -> Option<Command> {
        let heard = self.heard.get(&node.id);
        let heard = heard.filter(|(incarnation, _)| *incarnation == node.incarnation);
        let last = heard.map_or(leading_since, |(_, at)| *at);
        let limit = match self.reported.get(&node.id) == Some(&node.incarnation) {
            true => REPORTED_DOWN_AFTER,
            false => NODE_DOWN_AFTER,
        };
        let is_silent = now.saturating_sub(last) >= limit;
        let state = match (node.state, is_silent) {
            (NodeState::Up, true) => Some(NodeState::Down),
            (NodeState::Down, false) if heard.is_some() => Some(NodeState::Up),
            _ => None,
        };
        if let Some(state) = state {
            return Some(Command::SetNodeState {
                node: node.id,
                incarnation: node.incarnation,
                state,
                at,
            });
        }
        if node.state == NodeState::Up {
            self.down_since.remove(&node.id);
            return None;
        }
        let since = *self.down_since.entry(node.id).or_insert(now);
        let is_over = now.saturating_sub(since) >= NODE_REPLACE_AFTER;
        // When half of the nodes are away something else is wrong, and moving all their data would not help.
        let (up, down) = count_storage(map);
        (is_over && node.keeps_data() && down < up).then_some(Command::SetNodeAdminState {
            node: node.id,
            admin_state: AdminState::Absent,
            at,
        })
    }

    fn plan_groups(&mut self, map: &ClusterMap, heard: &[Heard], now: Duration) -> Vec<Change> {
        if self.looked_at != Some(map.epoch()) {
            self.looked_at = Some(map.epoch());
            let unwell = map.groups().filter(|group| is_unwell(map, group));
            self.unwell = unwell.map(|group| group.id()).collect();
            let unwell = self.unwell.iter().filter_map(|id| map.group(*id));
            self.absent.look(map, unwell.map(Arc::as_ref), now);
            self.learn(map, now);
            self.note_falls(map, heard, now);
        }
        let mut changes = Vec::new();
        let mut waiting = Vec::new();
        for group in self.unwell.iter().filter_map(|id| map.group(*id)) {
            let id = group.id();
            let valid: Vec<&Member> = group
                .in_sync()
                .filter(|member| map.is_valid(member))
                .collect();
            if valid.is_empty() {
                let since = *self.without_authority_since.entry(id).or_insert(now);
                let is_over = now.saturating_sub(since) >= AUTHORITY_GRACE;
                changes.extend(choose_authority(map, group, is_over));
            } else {
                self.without_authority_since.remove(&id);
            }
            changes.extend(self.demote(map, group, &valid, heard));
            if !valid.is_empty() {
                waiting.extend(outsiders(map, group));
            }
            if may_let_go(map, group) {
                changes.push(Change::LetGo { group: id });
            }
        }
        changes.extend(self.start_syncs(map, waiting, now));
        changes
    }

    /// Compares what was syncing with what has become of it.
    fn learn(&mut self, map: &ClusterMap, now: Duration) {
        let mut syncing = BTreeMap::new();
        for group in self.unwell.iter().filter_map(|id| map.group(*id)) {
            for member in &group.members {
                let key = (group.id(), member.device);
                if member.state == ReplicaState::Syncing {
                    syncing.insert(key, member.incarnation);
                }
                let was = self.syncing.get(&key);
                if member.state == ReplicaState::Out && was == Some(&member.incarnation) {
                    let known = self.backoff.get(&key);
                    let known = known.filter(|known| known.incarnation == member.incarnation);
                    let failures = known.map_or(0, |known| known.failures) + 1;
                    let pause = BACKOFF_MIN.saturating_mul(1 << (failures - 1).min(16));
                    let backoff = Backoff {
                        incarnation: member.incarnation,
                        failures,
                        until: now + pause.min(BACKOFF_MAX),
                    };
                    self.backoff.insert(key, backoff);
                }
            }
        }
        self.syncing = syncing;
        let unwell: BTreeSet<GroupId> = self.unwell.iter().copied().collect();
        self.backoff.retain(|(group, _), _| unwell.contains(group));
        self.without_authority_since
            .retain(|group, _| unwell.contains(group));
    }

    /// Looks for members that were in sync and are not any more, though their node lives.
    fn note_falls(&mut self, map: &ClusterMap, heard: &[Heard], now: Duration) {
        let mut in_sync: Vec<(GroupId, DeviceId)> = Vec::new();
        for group in map.groups() {
            in_sync.extend(group.in_sync().map(|member| (group.id(), member.device)));
        }
        in_sync.sort_unstable();
        let unwell = self.unwell.iter().filter_map(|id| map.group(*id));
        let out = unwell.flat_map(|group| {
            let out =
                |member: &&Member| member.state == ReplicaState::Out && is_heard(heard, member);
            let out = group.members.iter().filter(out);
            out.map(move |member| (group.id(), member.device, member.incarnation))
        });
        self.falls.look(in_sync, out, now);
    }

    /// Members that are sent writes and are not valid; one in sync only with a witness that was heard of
    /// since that is known.
    fn demote(
        &self,
        map: &ClusterMap,
        group: &PlacementGroup,
        valid: &[&Member],
        heard: &[Heard],
    ) -> Vec<Change> {
        let alive = valid.iter().filter(|member| is_heard(heard, member));
        let last_heard = alive.filter_map(|member| self.heard.get(&member.node));
        let last_heard = last_heard.map(|(_, at)| *at).max();
        let is_witnessed = |member: &Member| {
            let absent = self.absent.since(member);
            absent.is_some_and(|since| last_heard.is_some_and(|at| at >= since))
        };
        let lost = group.members.iter().filter(|member| {
            let may_go = !member.is_in_sync() || is_witnessed(member);
            member.is_receiving() && !map.is_valid(member) && may_go
        });
        lost.map(|member| Change::Demote {
            group: group.id(),
            device: member.device,
            incarnation: member.incarnation,
        })
        .collect()
    }

    /// Members that are out begin to be synced: those of groups with the fewest replicas first, a bounded
    /// number for each node.
    fn start_syncs(
        &mut self,
        map: &ClusterMap,
        mut waiting: Vec<Outsider>,
        now: Duration,
    ) -> Vec<Change> {
        let mut busy: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (_, device) in self.syncing.keys() {
            if let Some(device) = map.device(*device) {
                *busy.entry(device.node).or_default() += 1;
            }
        }
        waiting.sort_by_key(|one| (one.in_sync, one.group, one.device));
        self.fallen.clear();
        let mut changes = Vec::new();
        for one in waiting {
            let backoff = self.backoff.get(&(one.group, one.device));
            let is_pausing = backoff.is_some_and(|backoff| {
                backoff.incarnation == one.incarnation && now < backoff.until
            });
            let fallen = self.falls.pausing(one.device, one.incarnation, now);
            if fallen.is_some() && !one.is_needed {
                self.fallen.push((one.group, one.device, one.incarnation));
                continue;
            }
            let busy = busy.entry(one.node).or_default();
            if is_pausing || *busy >= SYNCING_PER_NODE_MAX {
                continue;
            }
            *busy += 1;
            // It may have failed before it is seen in the map.
            self.syncing
                .insert((one.group, one.device), one.incarnation);
            self.looked_at = None;
            changes.push(Change::StartSync {
                group: one.group,
                device: one.device,
                incarnation: one.incarnation,
            });
        }
        changes
    }
}

/// Nodes that should hold data, up and down.
fn count_storage(map: &ClusterMap) -> (usize, usize) {
    let storage = || map.nodes().filter(|node| node.keeps_data());
    let up = storage().filter(|node| node.state == NodeState::Up).count();
    (up, storage().count() - up)
}

/// Whether there is anything to do about a group, now or later.
fn is_unwell(map: &ClusterMap, group: &PlacementGroup) -> bool {
    let is_well = |member: &Member| member.is_in_sync() && !member.leaving && map.is_valid(member);
    !group.members.iter().all(is_well)
}

fn choose_authority(
    map: &ClusterMap,
    group: &PlacementGroup,
    grace_is_over: bool,
) -> Option<Change> {
    let mut authority: Option<(bool, DeviceId, Incarnation)> = None;
    let mut are_all_back = true;
    for member in group.in_sync() {
        let Presence::Returned(node, incarnation) = map.presence(member) else {
            are_all_back = false;
            continue;
        };
        // One that kept power lacks nothing.
        let kept_power = map.node(node).is_some_and(|now| kept_power(member, now));
        if authority.is_none_or(|(best, ..)| kept_power && !best) {
            authority = Some((kept_power, member.device, incarnation));
        }
    }
    let (_, device, incarnation) = authority.filter(|_| are_all_back || grace_is_over)?;
    Some(Change::ChooseAuthority {
        group: group.id(),
        device,
        incarnation,
        after_grace: !are_all_back,
    })
}

/// A member that is out and could be synced.
struct Outsider {
    group: GroupId,
    device: DeviceId,
    node: NodeId,
    incarnation: Incarnation,
    in_sync: usize,
    /// Writes to the group wait, for want of replicas in sync.
    is_needed: bool,
}

fn outsiders(map: &ClusterMap, group: &PlacementGroup) -> Vec<Outsider> {
    let in_sync = group.in_sync().count();
    let pool = map.pool(group.pool);
    let is_needed = pool.is_some_and(|pool| in_sync < usize::from(pool.min_in_sync));
    let out = group
        .wanted()
        .filter(|member| member.state == ReplicaState::Out);
    let serving = out.filter_map(|member| {
        let device = map.device(member.device)?;
        let may = may_sync(group, device.node, device.id);
        (may && map.is_served(device)).then(|| Outsider {
            group: group.id(),
            device: device.id,
            node: device.node,
            incarnation: device.incarnation,
            in_sync,
            is_needed,
        })
    });
    serving.collect()
}

fn may_let_go(map: &ClusterMap, group: &PlacementGroup) -> bool {
    let all_hold = group.wanted().next().is_some()
        && group
            .wanted()
            .all(|member| member.is_in_sync() && map.is_valid(member));
    all_hold && group.members.iter().any(|member| member.leaving)
}

#[cfg(test)]
mod tests;
