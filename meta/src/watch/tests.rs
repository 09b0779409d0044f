//! Nodes that fall silent, come back and restart, on a clock that only this file moves.

mod pauses;

use uuid::Uuid;

use super::*;
use crate::command::{DeviceSpec, NodeSpec, Outcome, PoolSpec, VolumeSpec};
use crate::model::{DeviceState, EventKind};
use crate::testing::Machine;

const AT: UnixMillis = UnixMillis(7);
const STEP: Duration = HEARTBEAT_INTERVAL;

/// A cluster of several nodes with one device each, and its leader's watch.
struct World {
    machine: Machine,
    watch: Watch,
    now: Duration,
    /// Start of each node's process; those that are silent are absent.
    alive: BTreeMap<u64, u64>,
    /// Whether syncing members are promoted as soon as they are seen.
    syncs_succeed: bool,
}

impl World {
    fn new(nodes: u64, replicas: u8, groups: u32) -> Self {
        let mut world = Self {
            machine: Machine::default(),
            watch: Watch::default(),
            now: Duration::from_secs(1000),
            alive: BTreeMap::new(),
            syncs_succeed: true,
        };
        let node = spec(1, 0);
        let cluster = Uuid::from_u128(1);
        world.apply(&Command::Bootstrap {
            cluster,
            node,
            pool: None,
            at: AT,
        });
        for node in 1..=nodes {
            world.start(node, node * 100);
        }
        let pool = PoolSpec {
            placement_groups: Some(groups),
            ..PoolSpec::new("safe", replicas)
        };
        world.apply(&Command::CreatePool { pool, at: AT });
        let volume = VolumeSpec {
            pool: Some("safe".to_owned()),
            ..VolumeSpec::new("disk", 4096)
        };
        let uuid = Uuid::from_u128(2);
        world.apply(&Command::CreateVolume {
            uuid,
            volume,
            at: AT,
        });
        world.watch.lead(world.now);
        world
    }

    fn apply(&mut self, command: &Command) -> Outcome {
        let reply = self.machine.apply(command);
        reply.unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"))
    }

    /// A process starts, registers and opens its device.
    fn start(&mut self, node: u64, incarnation: u64) {
        self.register(node, incarnation);
        self.open_device(node);
    }

    fn register(&mut self, node: u64, incarnation: u64) {
        let known = self.machine.map();
        let replaces = known.node(NodeId(node)).map(|node| node.incarnation);
        self.apply(&Command::RegisterNode {
            node: spec(node, incarnation),
            replaces: replaces.unwrap_or_default(),
            at: AT,
        });
        self.alive.insert(node, incarnation);
    }

    fn open_device(&mut self, node: u64) {
        let device = DeviceSpec {
            uuid: Uuid::from_u128(u128::from(node)),
            node: NodeId(node),
            path: format!("/dev/{node}"),
            size_bytes: 1 << 40,
            class: "ssd".to_owned(),
        };
        let incarnation = Incarnation(self.alive[&node]);
        self.apply(&Command::RegisterDevice {
            device,
            incarnation,
            at: AT,
        });
    }

    /// Somebody says that a member failed it.
    fn report(&mut self, group: GroupId, member: &Member, heard: Vec<Heard>) {
        let epoch = self.machine.map().epoch();
        self.apply(&Command::ReportFailed {
            group,
            device: member.device,
            incarnation: member.incarnation,
            epoch,
            heard,
            at: AT,
        });
    }

    /// One interval: heartbeats, then what the watch plans, then what the replicas make of it.
    fn step(&mut self) -> Vec<Command> {
        self.now += STEP;
        for (node, incarnation) in &self.alive {
            let (node, incarnation) = (NodeId(*node), Incarnation(*incarnation));
            self.watch.heard(node, incarnation, self.now);
        }
        let commands = self.watch.plan(&self.machine.map(), self.now, AT);
        for command in &commands {
            if let Outcome::Regrouped { refused, .. } = self.apply(command) {
                assert_eq!(refused, [], "the watch knows the rules");
            }
        }
        let map = self.machine.map();
        for group in map.groups() {
            for member in &group.members {
                let alive = self.alive.get(&member.node.0) == Some(&member.incarnation.0);
                if member.state == ReplicaState::Syncing && alive && self.syncs_succeed {
                    self.apply(&Command::Promote {
                        group: group.id(),
                        device: member.device,
                        incarnation: member.incarnation,
                        since: member.since,
                        at: AT,
                    });
                }
            }
        }
        commands
    }

    fn run(&mut self, time: Duration) -> Vec<Command> {
        let until = self.now + time;
        let mut commands = Vec::new();
        while self.now < until {
            commands.extend(self.step());
        }
        commands
    }

    fn state(&self, node: u64) -> NodeState {
        self.machine.map().node(NodeId(node)).unwrap().state
    }

    /// Members of the pool with data, by what they are.
    fn count(&self, state: ReplicaState) -> usize {
        let map = self.machine.map();
        let pool = map.pools().find(|pool| *pool.name == *"safe").unwrap().id;
        let groups = map.groups().filter(|group| group.pool == pool);
        groups
            .flat_map(|group| group.members.clone())
            .filter(|member| member.state == state)
            .count()
    }
}

fn spec(node: u64, incarnation: u64) -> NodeSpec {
    NodeSpec {
        incarnation: Incarnation(incarnation),
        ..NodeSpec::new(NodeId(node), format!("node{node}"))
    }
}

#[test]
fn nothing_is_done_while_all_is_well() {
    let mut world = World::new(3, 3, 8);
    assert_eq!(world.run(Duration::from_secs(3600)), []);
}

#[test]
fn a_silent_node_goes_down_after_its_time_and_is_taken_out() {
    let mut world = World::new(3, 3, 8);
    world.run(Duration::from_secs(5));
    world.alive.remove(&3);
    world.run(NODE_DOWN_AFTER - STEP);
    assert_eq!(world.state(3), NodeState::Up);
    world.run(STEP * 2);
    assert_eq!(world.state(3), NodeState::Down);
    assert_eq!(
        (
            world.count(ReplicaState::InSync),
            world.count(ReplicaState::Out)
        ),
        (16, 8)
    );
    // It was only cut off: the same process comes back, and is synced all the same.
    world.alive.insert(3, 300);
    world.run(Duration::from_secs(2));
    assert_eq!(world.state(3), NodeState::Up);
    assert_eq!(world.count(ReplicaState::InSync), 24);
}

#[test]
fn a_new_leader_gives_every_node_its_full_time() {
    let mut world = World::new(3, 3, 8);
    world.alive.remove(&3);
    world.run(NODE_DOWN_AFTER - STEP);
    world.watch.lead(world.now);
    world.run(NODE_DOWN_AFTER - STEP);
    assert_eq!(world.state(3), NodeState::Up);
    world.watch.follow();
    world.run(Duration::from_secs(60));
    assert_eq!(
        world.state(3),
        NodeState::Up,
        "who does not lead does nothing"
    );
    world.watch.lead(world.now);
    world.run(NODE_DOWN_AFTER + STEP);
    assert_eq!(world.state(3), NodeState::Down);
}

#[test]
fn a_silent_node_that_is_reported_goes_down_sooner() {
    let mut world = World::new(3, 3, 8);
    world.run(Duration::from_secs(5));
    world.alive.remove(&3);
    world.run(STEP);
    world.watch.reported(NodeId(3), Incarnation(300));
    world.run(REPORTED_DOWN_AFTER - STEP * 2);
    assert_eq!(world.state(3), NodeState::Up);
    world.run(STEP * 2);
    assert_eq!(world.state(3), NodeState::Down);
    assert_eq!(
        world.count(ReplicaState::Out),
        8,
        "all of its groups at once"
    );
}

#[test]
fn a_report_about_a_member_is_about_its_node() {
    let mut world = World::new(3, 3, 8);
    world.run(Duration::from_secs(5));
    world.alive.remove(&3);
    world.run(STEP);
    let map = world.machine.map();
    let mut groups = map.groups();
    let group = groups.find(|group| group.members.len() == 3).unwrap();
    let member = group.members.iter().find(|m| m.node == NodeId(3));
    let member = member.expect("three nodes, three replicas");
    assert!(!has_witness(&map, group.id(), member.device, &[]));
    let other = group.members.iter().find(|m| m.node == NodeId(1));
    let heard = other.map(|m| Heard {
        node: m.node,
        incarnation: m.incarnation,
    });
    let heard: Vec<Heard> = heard.into_iter().collect();
    assert!(has_witness(&map, group.id(), member.device, &heard));
    let id = group.id();
    world.watch.member_reported(&map, id, member.device);
    world.run(REPORTED_DOWN_AFTER);
    assert_eq!(world.state(3), NodeState::Down);
}

#[test]
fn a_report_means_nothing_once_the_node_is_heard_of_again() {
    let mut world = World::new(3, 3, 8);
    world.run(Duration::from_secs(5));
    world.watch.reported(NodeId(3), Incarnation(300));
    world.run(STEP);
    // It goes away later, and nobody has reported that.
    world.alive.remove(&3);
    // One of an older start is no report of this one.
    world.watch.reported(NodeId(3), Incarnation(299));
    world.run(NODE_DOWN_AFTER - STEP);
    assert_eq!(world.state(3), NodeState::Up);
    world.run(STEP * 2);
    assert_eq!(world.state(3), NodeState::Down);
}

#[test]
fn a_restarted_node_is_out_and_synced_again() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    world.start(2, 201);
    let commands = world.run(Duration::from_secs(3));
    assert!(!commands.is_empty());
    assert_eq!(world.count(ReplicaState::InSync), 24);
    let map = world.machine.map();
    let trusted = map.groups().flat_map(|group| &group.members);
    assert!(
        trusted
            .filter(|one| one.node.0 == 2)
            .all(|one| one.incarnation.0 == 201)
    );
    assert_eq!(world.run(Duration::from_secs(60)), []);
}

#[test]
fn who_restarted_without_its_device_waits_for_it() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    world.register(2, 201);
    world.run(Duration::from_secs(3));
    assert_eq!(world.count(ReplicaState::Out), 8);
    world.open_device(2);
    world.run(Duration::from_secs(3));
    assert_eq!(world.count(ReplicaState::InSync), 24);
}

#[test]
fn after_a_restart_of_all_nobody_waits_for_the_grace() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    for node in 1..=3 {
        world.start(node, node * 100 + 1);
    }
    assert_eq!(
        world.count(ReplicaState::InSync),
        8,
        "one authority each, at once"
    );
    world.run(Duration::from_secs(3));
    assert_eq!(world.count(ReplicaState::InSync), 24);
}

#[test]
fn who_does_not_come_back_is_waited_for_and_then_left_behind() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    world.start(1, 101);
    world.start(2, 201);
    world.alive.remove(&3);
    world.run(NODE_DOWN_AFTER + STEP);
    assert_eq!(world.state(3), NodeState::Down);
    // Node 3 was in sync until it was down; the others are out, with it as their only valid source before.
    let left = world.count(ReplicaState::InSync);
    world.run(AUTHORITY_GRACE - Duration::from_secs(1));
    assert!(world.count(ReplicaState::InSync) >= left.min(8));
    world.run(Duration::from_secs(5));
    let map = world.machine.map();
    for group in map.groups().filter(|group| group.members.len() == 3) {
        assert!(group.in_sync().count() >= 1, "{group:?}");
    }
}

/// Seed 400719 of the simulator with bad blocks.
#[test]
fn who_may_have_died_first_is_no_witness() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    // Node 3 was heard of just now, and is gone for good; the others lose power and are back at once.
    world.alive.remove(&3);
    world.register(1, 101);
    world.register(2, 201);
    world.run(STEP * 3);
    assert_eq!(world.count(ReplicaState::InSync), 24);
    world.open_device(1);
    world.open_device(2);
    world.run(NODE_DOWN_AFTER + AUTHORITY_GRACE + Duration::from_secs(5));
    assert_eq!(world.count(ReplicaState::InSync), 16);
}

#[test]
fn one_of_two_restarted_nodes_has_authority_only_after_grace() {
    let mut world = World::new(2, 2, 4);
    world.run(STEP);
    // Both lose power at once; one comes back.
    world.alive.clear();
    world.run(NODE_DOWN_AFTER + STEP);
    world.start(1, 101);
    world.run(AUTHORITY_GRACE - Duration::from_secs(5));
    let trusted = |world: &World| {
        let map = world.machine.map();
        let members = map.groups().flat_map(|group| group.members.clone());
        members
            .filter(|one| one.is_in_sync() && one.incarnation.0 == 101)
            .count()
    };
    let sole = trusted(&world);
    world.run(Duration::from_secs(10));
    assert!(trusted(&world) >= sole + 4);
    // The other comes back and is synced from it.
    world.start(2, 201);
    world.run(Duration::from_secs(5));
    assert_eq!(world.count(ReplicaState::InSync), 8);
}

#[test]
fn only_so_many_groups_of_a_node_are_synced_at_a_time() {
    let mut world = World::new(3, 3, 64);
    world.run(STEP);
    world.syncs_succeed = false;
    world.start(3, 301);
    world.run(STEP * 3);
    assert_eq!(world.count(ReplicaState::Syncing), SYNCING_PER_NODE_MAX);
    world.run(Duration::from_secs(10));
    assert_eq!(world.count(ReplicaState::Syncing), SYNCING_PER_NODE_MAX);
    world.syncs_succeed = true;
    world.run(Duration::from_secs(5));
    assert_eq!(world.count(ReplicaState::InSync), 192);
}

#[test]
fn a_node_that_was_cut_off_returns_at_once() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    for start in 0..3 {
        world.alive.remove(&3);
        world.run(Duration::from_secs(10));
        assert_eq!(world.count(ReplicaState::InSync), 16, "{start}");
        world.alive.insert(3, 300);
        world.run(STEP * 4);
        assert_eq!(world.count(ReplicaState::InSync), 24, "{start}");
    }
}

#[test]
fn absent_node_is_replaced_and_takes_its_share_on_return() {
    let mut world = World::new(4, 3, 16);
    world.run(STEP);
    world.alive.remove(&4);
    world.run(NODE_REPLACE_AFTER - Duration::from_secs(1));
    let held = |world: &World, node: u64| {
        let map = world.machine.map();
        let members = map.groups().flat_map(|group| group.members.clone());
        members
            .filter(|one| map.device(one.device).unwrap().node.0 == node)
            .count()
    };
    assert!(held(&world, 4) > 0);
    world.run(NODE_DOWN_AFTER + Duration::from_secs(10));
    assert_eq!(held(&world, 4), 0);
    assert_eq!(world.count(ReplicaState::InSync), 48);
    world.start(4, 401);
    world.run(Duration::from_secs(30));
    assert!(held(&world, 4) >= 8);
    assert_eq!(world.count(ReplicaState::InSync), 48);
}

#[test]
fn when_most_nodes_are_away_nobody_is_replaced() {
    let mut world = World::new(4, 3, 16);
    world.run(STEP);
    for node in [2, 3, 4] {
        world.alive.remove(&node);
    }
    let commands = world.run(NODE_REPLACE_AFTER * 2);
    let replaced = commands
        .iter()
        .any(|command| matches!(command, Command::SetNodeAdminState { .. }));
    assert!(!replaced);
}

#[test]
fn a_failed_device_is_given_up_and_its_groups_move() {
    let mut world = World::new(4, 3, 16);
    world.run(STEP);
    world.apply(&Command::SetDeviceState {
        device: DeviceId(2),
        state: DeviceState::Failed,
        at: AT,
    });
    world.run(Duration::from_secs(10));
    let map = world.machine.map();
    assert!(
        map.groups()
            .all(|group| group.member(DeviceId(2)).is_none() || group.members.len() == 1)
    );
    assert_eq!(world.count(ReplicaState::InSync), 48);
}

#[test]
fn a_clock_that_leaps_only_makes_nodes_seem_silent() {
    let mut world = World::new(3, 3, 8);
    world.run(Duration::from_secs(5));
    // A leader that was stopped for an hour: it hears all in the same moment as it looks.
    world.now += Duration::from_secs(3600);
    assert_eq!(world.step(), []);
    // One that looks before it hears takes nobody out: no witness is heard of either.
    world.now += Duration::from_secs(3600);
    for command in world.watch.plan(&world.machine.map(), world.now, AT) {
        world.apply(&command);
    }
    assert_eq!(world.count(ReplicaState::InSync), 24);
    world.run(Duration::from_secs(5));
    assert_eq!(world.count(ReplicaState::InSync), 24);
    assert_eq!(world.state(3), NodeState::Up);
}

#[test]
fn a_heartbeat_of_an_older_process_counts_for_nothing() {
    let mut world = World::new(3, 3, 8);
    world.run(STEP);
    world.start(3, 301);
    world.alive.insert(3, 300);
    world.run(NODE_DOWN_AFTER + STEP);
    assert_eq!(world.state(3), NodeState::Down);
}

#[test]
fn a_map_made_of_changes_is_the_map_that_is_read_anew() {
    let mut world = World::new(4, 3, 16);
    world.run(Duration::from_secs(1));
    world.alive.remove(&2);
    world.run(NODE_REPLACE_AFTER + Duration::from_secs(20));
    world.apply(&Command::RemoveNode {
        node: NodeId(2),
        at: AT,
    });
    world.apply(&Command::CreatePool {
        pool: PoolSpec::new("more", 1),
        at: AT,
    });
    world.apply(&Command::DeletePool {
        name: "more".to_owned(),
    });
    let reloaded = world.machine.reloaded();
    assert_eq!(
        format!("{:?}", world.machine.map()),
        format!("{reloaded:?}")
    );
    let events = world.machine.events();
    let told = |what: &EventKind| events.iter().any(|event| event.what == *what);
    for node in [2].map(NodeId) {
        assert!(told(&EventKind::NodeDown { node }));
        assert!(told(&EventKind::NodeReplaced { node }));
        assert!(told(&EventKind::NodeRemoved { node }));
    }
}
