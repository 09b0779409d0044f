//! The state of members under any commands in any order.

use std::collections::BTreeMap;

use proptest::prelude::*;
use uuid::Uuid;

use super::super::group::{Presence, presence};
use super::super::tables::{self, DEVICES, NODES, PLACEMENT_GROUPS, POOLS};
use super::super::tests::World;
use super::AT;
use crate::command::{Change, Command, DeviceSpec, Heard, Lost, NodeSpec, PoolSpec, VolumeSpec};
use crate::ids::{DeviceId, Epoch, Incarnation, NodeId};
use crate::model::{
    AdminState, DeviceState, FailureDomain, GroupId, Member, NodeState, PlacementGroup,
    ReplicaState,
};

/// What is done next; numbers choose among what there is.
#[derive(Debug, Clone)]
enum Op {
    Restart {
        node: u64,
        with_devices: bool,
    },
    State {
        node: u64,
        up: bool,
    },
    AdminState {
        node: u64,
        admin_state: AdminState,
    },
    RemoveNode {
        node: u64,
        is_lost: bool,
    },
    AddDevice {
        node: u64,
    },
    DeviceState {
        device: usize,
        state: DeviceState,
    },
    DrainDevice {
        device: usize,
        on: bool,
    },
    RemoveLost {
        device: usize,
    },
    Report {
        group: usize,
        member: usize,
        stale: bool,
        heard: u8,
    },
    Demote {
        group: usize,
        member: usize,
        heard: u8,
    },
    ChooseAuthority {
        group: usize,
        member: usize,
        after_grace: bool,
    },
    StartSync {
        group: usize,
        member: usize,
        old: bool,
    },
    Promote {
        group: usize,
        member: usize,
        old: bool,
    },
    LetGo {
        group: usize,
    },
    SetPool {
        replicas: u8,
        min_in_sync: Option<u8>,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let node = || 1..6_u64;
    let (group, member) = (|| 0..4_usize, || 0..4_usize);
    let admin_state = prop_oneof![
        Just(AdminState::Active),
        Just(AdminState::Absent),
        Just(AdminState::Draining)
    ];
    let state = prop_oneof![
        Just(DeviceState::Online),
        Just(DeviceState::Offline),
        Just(DeviceState::Failed)
    ];
    prop_oneof![
        4 => (node(), prop::bool::weighted(0.8))
            .prop_map(|(node, with_devices)| Op::Restart { node, with_devices }),
        4 => (node(), any::<bool>()).prop_map(|(node, up)| Op::State { node, up }),
        1 => (node(), admin_state).prop_map(|(node, admin_state)| Op::AdminState { node, admin_state }),
        1 => (node(), any::<bool>()).prop_map(|(node, is_lost)| Op::RemoveNode { node, is_lost }),
        1 => node().prop_map(|node| Op::AddDevice { node }),
        1 => (0..8_usize, state).prop_map(|(device, state)| Op::DeviceState { device, state }),
        1 => (0..8_usize, any::<bool>()).prop_map(|(device, on)| Op::DrainDevice { device, on }),
        1 => (0..8_usize).prop_map(|device| Op::RemoveLost { device }),
        6 => (group(), member(), prop::bool::weighted(0.1), any::<u8>())
            .prop_map(|(group, member, stale, heard)| Op::Report { group, member, stale, heard }),
        4 => (group(), member(), any::<u8>())
            .prop_map(|(group, member, heard)| Op::Demote { group, member, heard }),
        4 => (group(), member(), any::<bool>())
            .prop_map(|(group, member, after_grace)| Op::ChooseAuthority { group, member, after_grace }),
        10 => (group(), member(), prop::bool::weighted(0.1))
            .prop_map(|(group, member, old)| Op::StartSync { group, member, old }),
        10 => (group(), member(), prop::bool::weighted(0.1))
            .prop_map(|(group, member, old)| Op::Promote { group, member, old }),
        2 => group().prop_map(|group| Op::LetGo { group }),
        1 => (1..5_u8, prop::option::of(1..4_u8))
            .prop_map(|(replicas, min_in_sync)| Op::SetPool { replicas, min_in_sync }),
    ]
}

/// A pool with data, on three nodes of five.
struct Cluster {
    world: World,
    starts: u64,
    devices: u64,
}

impl Cluster {
    fn new() -> Self {
        let world = World::ready();
        let mut cluster = Self {
            world,
            starts: 0,
            devices: 100,
        };
        for node in [2, 3] {
            cluster.run(Op::Restart {
                node,
                with_devices: false,
            });
            cluster.run(Op::AddDevice { node });
        }
        let pool = PoolSpec {
            placement_groups: Some(4),
            failure_domain: FailureDomain::Node,
            ..PoolSpec::new("safe", 3)
        };
        cluster
            .world
            .run(&Command::CreatePool { pool, at: AT })
            .unwrap();
        let volume = VolumeSpec {
            pool: Some("safe".to_owned()),
            ..VolumeSpec::new("disk", 4096)
        };
        let uuid = Uuid::from_u128(9);
        cluster
            .world
            .run(&Command::CreateVolume {
                uuid,
                volume,
                at: AT,
            })
            .unwrap();
        cluster
    }

    fn groups(&self) -> Vec<PlacementGroup> {
        let pool = POOLS.get(&self.world.records, "safe").unwrap().unwrap();
        PLACEMENT_GROUPS
            .all_below(&self.world.records, &pool.id)
            .unwrap()
    }

    fn member(&self, group: usize, member: usize) -> Option<(GroupId, Member)> {
        let groups = self.groups();
        let group = &groups[group % groups.len()];
        let member = group.members.get(member % group.members.len().max(1))?;
        Some((group.id(), member.clone()))
    }

    fn heard(&self, mask: u8) -> Vec<Heard> {
        let nodes = NODES.all(&self.world.records).unwrap();
        let heard = |node: &crate::model::Node| Heard {
            node: node.id,
            incarnation: node.incarnation,
        };
        nodes
            .iter()
            .filter(|node| mask >> node.id.0 & 1 == 1)
            .map(heard)
            .collect()
    }

    fn incarnation(&self, node: u64) -> Incarnation {
        NODES
            .get(&self.world.records, &NodeId(node))
            .unwrap()
            .map_or(Incarnation::default(), |node| node.incarnation)
    }

    fn serving(&self, device: DeviceId) -> Incarnation {
        DEVICES
            .get(&self.world.records, &device)
            .unwrap()
            .map_or(Incarnation::default(), |device| device.incarnation)
    }

    fn regroup(&mut self, change: Change, heard: u8) -> Option<Command> {
        Some(Command::Regroup {
            changes: vec![change],
            heard: self.heard(heard),
            at: AT,
        })
    }

    /// The commands of an operation.
    fn commands(&mut self, op: &Op) -> Vec<Command> {
        if let Op::Restart { node, with_devices } = *op {
            return self.restart(node, with_devices);
        }
        self.command(op).into_iter().collect()
    }

    fn restart(&mut self, node: u64, with_devices: bool) -> Vec<Command> {
        self.starts += 1;
        let spec = NodeSpec {
            incarnation: Incarnation(self.starts),
            ..NodeSpec::new(NodeId(node), format!("node{node}"))
        };
        let replaces = self.incarnation(node);
        let mut commands = vec![Command::RegisterNode {
            node: spec,
            replaces,
            at: AT,
        }];
        for device in DEVICES.all(&self.world.records).unwrap() {
            if with_devices && device.node.0 == node {
                let device = DeviceSpec {
                    uuid: device.uuid,
                    node: device.node,
                    path: device.path,
                    size_bytes: device.size_bytes,
                    class: device.class.to_string(),
                };
                commands.push(Command::RegisterDevice {
                    device,
                    incarnation: Incarnation(self.starts),
                    at: AT,
                });
            }
        }
        commands
    }

    fn command(&mut self, op: &Op) -> Option<Command> {
        match *op {
            Op::Restart { .. } => None,
            Op::State { node, up } => Some(Command::SetNodeState {
                node: NodeId(node),
                incarnation: self.incarnation(node),
                state: if up { NodeState::Up } else { NodeState::Down },
                at: AT,
            }),
            Op::AdminState { node, admin_state } => Some(Command::SetNodeAdminState {
                node: NodeId(node),
                admin_state,
                at: AT,
            }),
            Op::RemoveNode { node, is_lost } => Some(match is_lost {
                false => Command::RemoveNode {
                    node: NodeId(node),
                    at: AT,
                },
                true => Command::RemoveLost {
                    lost: Lost::Node(NodeId(node)),
                    at: AT,
                },
            }),
            Op::RemoveLost { device } => Some(Command::RemoveLost {
                lost: Lost::Device(DeviceId(device as u64)),
                at: AT,
            }),
            Op::AddDevice { node } => {
                self.devices += 1;
                let device = DeviceSpec {
                    uuid: Uuid::from_u128(u128::from(self.devices)),
                    node: NodeId(node),
                    path: format!("/dev/{}", self.devices),
                    size_bytes: 1 << 40,
                    class: "ssd".to_owned(),
                };
                Some(Command::RegisterDevice {
                    device,
                    incarnation: Incarnation::default(),
                    at: AT,
                })
            }
            Op::DeviceState { device, state } => Some(Command::SetDeviceState {
                device: DeviceId(device as u64),
                state,
                at: AT,
            }),
            Op::DrainDevice { device, on } => Some(Command::DrainDevice {
                device: DeviceId(device as u64),
                on,
                at: AT,
            }),
            Op::SetPool {
                replicas,
                min_in_sync,
            } => Some(Command::SetPool {
                name: "safe".to_owned(),
                replicas: Some(replicas),
                min_in_sync,
            }),
            _ => self.group_command(op),
        }
    }

    fn group_command(&mut self, op: &Op) -> Option<Command> {
        match *op {
            Op::Report {
                group,
                member,
                stale,
                heard,
            } => {
                let (group, member) = self.member(group, member)?;
                let epoch = match stale {
                    true => Epoch(member.since.0.saturating_sub(1)),
                    false => member.since,
                };
                Some(Command::ReportFailed {
                    group,
                    device: member.device,
                    incarnation: member.incarnation,
                    epoch,
                    heard: self.heard(heard),
                    at: AT,
                })
            }
            Op::Demote {
                group,
                member,
                heard,
            } => {
                let (group, member) = self.member(group, member)?;
                let (device, incarnation) = (member.device, member.incarnation);
                let change = Change::Demote {
                    group,
                    device,
                    incarnation,
                };
                self.regroup(change, heard)
            }
            Op::ChooseAuthority {
                group,
                member,
                after_grace,
            } => {
                let (group, member) = self.member(group, member)?;
                let change = Change::ChooseAuthority {
                    group,
                    device: member.device,
                    incarnation: self.serving(member.device),
                    after_grace,
                };
                self.regroup(change, 0)
            }
            Op::StartSync { group, member, old } => {
                let (group, member) = self.member(group, member)?;
                let incarnation = match old {
                    true => member.incarnation,
                    false => self.serving(member.device),
                };
                let change = Change::StartSync {
                    group,
                    device: member.device,
                    incarnation,
                };
                self.regroup(change, 0)
            }
            Op::Promote { group, member, old } => {
                let (group, member) = self.member(group, member)?;
                Some(Command::Promote {
                    group,
                    device: member.device,
                    incarnation: member.incarnation,
                    since: Epoch(member.since.0 - u64::from(old)),
                    at: AT,
                })
            }
            Op::LetGo { group } => {
                let (group, _) = self.member(group, 0)?;
                self.regroup(Change::LetGo { group }, 0)
            }
            _ => None,
        }
    }

    /// Does it, and checks each command against the invariants.
    fn run(&mut self, op: Op) {
        for command in self.commands(&op) {
            let before = self.world.clone();
            let _ = self.world.run(&command);
            if POOLS.get(&before.records, "safe").unwrap().is_some() {
                self.check(&before, &command);
            }
        }
    }

    fn check(&self, before: &World, command: &Command) {
        let pool = POOLS.get(&before.records, "safe").unwrap().unwrap();
        let olds = PLACEMENT_GROUPS
            .all_below(&before.records, &pool.id)
            .unwrap();
        let olds: BTreeMap<GroupId, PlacementGroup> =
            olds.into_iter().map(|group| (group.id(), group)).collect();
        let epoch = tables::CLUSTER
            .get(&self.world.records, &())
            .unwrap()
            .unwrap()
            .epoch;
        let holds_data = tables::VOLUMES_BY_POOL
            .first_below(&before.records, &pool.id)
            .unwrap()
            .is_some();
        for new in self.groups().iter().filter(|_| holds_data) {
            let old = &olds[&new.id()];
            if old == new {
                continue;
            }
            assert!(new.epoch > old.epoch, "{old:?} became {new:?}");
            assert_eq!(new.epoch, epoch);
            assert!(
                old.in_sync().next().is_none() || new.in_sync().next().is_some(),
                "{command:?} left {new:?}"
            );
            for member in new.in_sync() {
                check_in_sync(before, old, member, command);
            }
        }
        self.check_health();
    }

    /// What is counted along is what a recount gives.
    fn check_health(&self) {
        let pool = POOLS.get(&self.world.records, "safe").unwrap().unwrap();
        let health = tables::POOL_HEALTH
            .get(&self.world.records, &pool.id)
            .unwrap()
            .unwrap_or_default();
        let groups = self.groups();
        let degraded = groups
            .iter()
            .filter(|group| group.in_sync().count() < usize::from(pool.replicas));
        assert_eq!(health.degraded as usize, degraded.count());
        let waiting = groups
            .iter()
            .filter(|group| group.in_sync().count() < usize::from(pool.min_in_sync));
        assert_eq!(health.waiting as usize, waiting.count());
        let moving = groups
            .iter()
            .filter(|group| group.members.iter().any(|member| member.leaving));
        assert_eq!(health.moving as usize, moving.count());
    }
}

/// Where a member in sync comes from.
fn check_in_sync(before: &World, old: &PlacementGroup, member: &Member, command: &Command) {
    let was = old.member(member.device);
    let start = (member.node, member.incarnation);
    if let Command::RemoveLost { .. } = command
        && !was.is_some_and(Member::is_in_sync)
    {
        return check_heir(before, old, member, command);
    }
    match was {
        Some(was) if was.is_in_sync() && (was.node, was.incarnation) == start => {}
        Some(was) if was.is_in_sync() => {
            let chooses = matches!(
                command,
                Command::Regroup { .. } | Command::RegisterDevice { .. }
            );
            assert!(chooses, "{command:?} trusted another start");
            for other in old.in_sync() {
                let presence = presence(&before.records, other).unwrap();
                assert_ne!(presence, Presence::Valid, "{other:?} needed no replacement");
            }
        }
        Some(was) => {
            assert_eq!(
                was.state,
                ReplicaState::Syncing,
                "{command:?} let {was:?} in"
            );
            assert_eq!(
                (was.node, was.incarnation, was.since),
                (start.0, start.1, member.since)
            );
            assert!(matches!(command, Command::Promote { device, .. } if *device == member.device));
        }
        None => panic!("{command:?} let the new member {member:?} in"),
    }
}

/// Who takes over where all members in sync are given up: nobody is valid, and nobody who is there was in
/// sync longer.
fn check_heir(before: &World, old: &PlacementGroup, heir: &Member, command: &Command) {
    let is_lost = |member: &Member| match command {
        Command::RemoveLost {
            lost: Lost::Device(device),
            ..
        } => member.device == *device,
        Command::RemoveLost {
            lost: Lost::Node(node),
            ..
        } => {
            let device = DEVICES.get(&before.records, &member.device).unwrap();
            device.is_some_and(|device| device.node == *node)
        }
        _ => false,
    };
    for other in old.in_sync() {
        let presence = presence(&before.records, other).unwrap();
        assert_ne!(presence, Presence::Valid, "{other:?} needed no heir");
    }
    let until = |member: Option<&Member>| member.map(|one| one.in_sync_until);
    for other in old.members.iter().filter(|one| !is_lost(one)) {
        assert!(until(old.member(heir.device)) >= until(Some(other)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whoever_is_trusted_holds_every_acknowledged_write(ops in prop::collection::vec(op(), 0..120)) {
        let mut cluster = Cluster::new();
        for op in ops {
            cluster.run(op);
        }
    }
}
