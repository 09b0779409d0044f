//! A cluster in memory, and what is told of it.

use meta::testing::Machine;
use meta::{
    Command, DeviceSpec, FailingSync, Incarnation, LastReport, LeaderReport, Level, NodeLevel,
    NodeReport, NodeSpec, Outcome, PoolSpec, ProblemReport, UnixMillis, VolumeSpec,
};
use uuid::Uuid;

use super::*;

/// When everything began.
const START: u64 = 1_700_000_000_000;
const HERE: NodeId = NodeId(1);

struct World {
    machine: Machine,
    view: View,
    at: u64,
}

impl World {
    /// Nodes with a device each, and a volume in a pool of three replicas.
    fn new(nodes: u64) -> Self {
        let mut world = World {
            machine: Machine::default(),
            view: View::default(),
            at: START,
        };
        let cluster = Uuid::from_u128(1);
        let (node, at) = (spec(1), world.now());
        world.apply(Command::Bootstrap {
            cluster,
            node,
            pool: None,
            at,
        });
        for id in 1..=nodes {
            let (node, replaces) = (spec(id), Incarnation::default());
            world.apply(Command::RegisterNode { node, replaces, at });
            let device = DeviceSpec {
                uuid: Uuid::from_u128(u128::from(id)),
                node: NodeId(id),
                path: format!("/dev/sd{id}"),
                size_bytes: 1 << 40,
                class: "ssd".to_owned(),
            };
            let incarnation = Incarnation(id);
            world.apply(Command::RegisterDevice {
                device,
                incarnation,
                at,
            });
        }
        let pool = PoolSpec {
            placement_groups: Some(8),
            ..PoolSpec::new("safe", 3)
        };
        world.apply(Command::CreatePool { pool, at });
        let volume = VolumeSpec {
            pool: Some("safe".to_owned()),
            ..VolumeSpec::new("disk", 1 << 30)
        };
        let uuid = Uuid::from_u128(9);
        let made = world.apply(Command::CreateVolume { uuid, volume, at });
        let Outcome::Volume(volume) = made else {
            panic!("{made:?}");
        };
        world.view.volumes = vec![volume];
        world.view.raft.voters = (1..=nodes).map(NodeId).collect();
        world
    }

    fn now(&self) -> UnixMillis {
        UnixMillis(self.at)
    }

    fn apply(&mut self, command: Command) -> Outcome {
        self.machine.apply(&command).unwrap()
    }

    fn down(&mut self, id: u64) {
        let at = self.now();
        self.apply(Command::SetNodeState {
            node: NodeId(id),
            incarnation: Incarnation(id),
            state: NodeState::Down,
            at,
        });
    }

    fn findings(&mut self) -> (Vec<Found>, Vec<Found>) {
        self.view.map = self.machine.map();
        self.view.events = self.machine.events();
        problems(&self.view, HERE, Moment::from(self.now()), &|_| {
            Pace::Left(90)
        })
    }
}

fn spec(id: u64) -> NodeSpec {
    NodeSpec {
        incarnation: Incarnation(id),
        ..NodeSpec::new(NodeId(id), format!("n{id}"))
    }
}

fn at(ms: u64) -> Option<Moment> {
    Some(UnixMillis(ms).into())
}

#[test]
fn nothing_is_told_of_a_cluster_that_is_well() {
    assert_eq!(World::new(3).findings(), (vec![], vec![]));
}

#[test]
fn metadata_that_rests_on_too_few_voters_is_reported() {
    let mut world = World::new(3);
    world.view.raft.voters = [NodeId(1)].into();
    let (wrong, _) = world.findings();
    let [found] = wrong.as_slice() else {
        panic!("{wrong:?}");
    };
    assert_eq!(
        found.problem.what,
        "the metadata has 1 of 3 voters: node n1"
    );
    world.view.raft.voters = (1..=3).map(NodeId).collect();
    world.view.raft.is_changing = true;
    assert_eq!(
        world.findings().0.len(),
        1,
        "the old voters are needed, too"
    );
    world.view.raft.is_changing = false;
    assert_eq!(world.findings(), (vec![], vec![]));
    // Of two nodes one votes, whichever is lost.
    let mut two = World::new(2);
    two.view.raft.voters = [NodeId(1)].into();
    let (wrong, _) = two.findings();
    assert!(
        wrong.iter().all(|found| !found.is(Code::VotersLacking)),
        "{wrong:?}"
    );
    let found = single_voter(&two.view).unwrap();
    assert!(found.is(Code::SingleVoter), "{found:?}");
    assert_eq!(
        found.problem.what,
        "the metadata has one voter, node n1: without it the whole cluster stops"
    );
    two.view.raft.is_changing = true;
    assert_eq!(
        single_voter(&two.view),
        None,
        "the other one begins to vote"
    );
    world.view.raft.voters = [NodeId(1)].into();
    assert_eq!(single_voter(&world.view), None, "others begin to vote");
}

#[test]
fn down_node_is_reported_with_its_effects_and_a_deadline() {
    let mut world = World::new(4);
    world.at += 1000;
    world.down(4);
    world.at += 60_000;
    let (wrong, background_jobs) = world.findings();
    assert_eq!(background_jobs, []);
    let node = &wrong[0].problem;
    assert_eq!(node.what, "node n4 is down");
    assert_eq!(node.since, at(START + 1000));
    assert_eq!(
        node.doing,
        "start it: in 9 min its data are rebuilt elsewhere"
    );
    // Six of eight groups, or as many as placement gave it, lack a replica meanwhile.
    let pool = &wrong[1].problem;
    assert!(
        pool.what.contains("fewer than 3 replicas in sync"),
        "{pool:?}"
    );
    assert!(pool.doing.contains("waits for node n4"), "{pool:?}");
    assert_eq!(wrong.len(), 2, "{wrong:#?}");

    let (node, at, admin_state) = (NodeId(4), world.now(), AdminState::Absent);
    world.apply(Command::SetNodeAdminState {
        node,
        admin_state,
        at,
    });
    let (wrong, _) = world.findings();
    let node = &wrong[0].problem;
    assert!(
        node.doing
            .contains("its data are being rebuilt on other nodes"),
        "{node:?}"
    );
    assert_eq!(node.eta_s, Some(90));
}

#[test]
fn stalled_writes_are_reported_and_losing_half_moves_no_data() {
    let mut world = World::new(3);
    world.down(2);
    world.down(3);
    let (wrong, _) = world.findings();
    let told: Vec<&str> = wrong.iter().map(|one| one.problem.what.as_str()).collect();
    assert_eq!(
        told,
        [
            "node n2 is down",
            "node n3 is down",
            "pool safe: writes to 8 of 8 placement groups wait, for fewer than 2 replicas are in sync",
            "pool safe: 8 of 8 placement groups have fewer than 3 replicas in sync",
        ]
    );
    assert!(wrong[0].problem.doing.contains("half of the storage nodes"));
    assert!(wrong[2].problem.doing.contains("waits for node n2, n3"));
}

#[test]
fn a_drain_is_under_way_and_not_wrong() {
    let mut world = World::new(4);
    world.at += 5000;
    let (node, at_, admin_state) = (NodeId(4), world.now(), AdminState::Draining);
    world.apply(Command::SetNodeAdminState {
        node,
        admin_state,
        at: at_,
    });
    let (wrong, background_jobs) = world.findings();
    assert_eq!(wrong, []);
    let drain = &background_jobs[0].problem;
    assert!(
        drain.what.starts_with("node n4 is being emptied, "),
        "{drain:?}"
    );
    assert_eq!((drain.since, drain.eta_s), (at(START + 5000), Some(90)));
    assert!(
        background_jobs[1]
            .problem
            .what
            .contains("move to other devices")
    );
    // Without volumes nothing has to move.
    world.view.volumes.clear();
    let (_, background_jobs) = world.findings();
    assert_eq!(background_jobs.len(), 1);
    assert_eq!(background_jobs[0].problem.what, "node n4 is empty");
    assert_eq!(background_jobs[0].problem.eta_s, None);
}

#[test]
fn devices_that_failed_or_are_not_served_are_told() {
    let mut world = World::new(4);
    world.at += 7000;
    let (device, state, at_) = (DeviceId(2), meta::DeviceState::Failed, world.now());
    world.apply(Command::SetDeviceState {
        device,
        state,
        at: at_,
    });
    let (wrong, _) = world.findings();
    assert_eq!(wrong[0].problem.what, "device /dev/sd2 of node n2 failed");
    assert_eq!(wrong[0].problem.since, at(START + 7000));
    assert!(wrong[0].problem.doing.contains("penstock device remove 2"));

    let mut world = World::new(4);
    let node = NodeSpec {
        incarnation: Incarnation(77),
        ..spec(3)
    };
    let (replaces, at_) = (Incarnation(3), world.now());
    world.apply(Command::RegisterNode {
        node,
        replaces,
        at: at_,
    });
    let (wrong, _) = world.findings();
    assert_eq!(
        wrong[0].problem.what,
        "device /dev/sd3 is not served by node n3, which is up"
    );

    world.at += 60_000;
    let (device, incarnation, at_) = (DeviceId(3), Incarnation(77), world.now());
    world.apply(Command::LoseDevice {
        device,
        incarnation,
        for_long: false,
        at: at_,
    });
    world.at += 60_000;
    let (wrong, _) = world.findings();
    let lost = &wrong[0].problem;
    assert_eq!(
        lost.what,
        "node n3 goes on without device /dev/sd3, which it cannot open"
    );
    assert_eq!(lost.since, at(START + 60_000));
    assert_eq!(
        lost.doing,
        "bring it back and restart that node; in 9 min its data are rebuilt elsewhere; `penstock device \
         remove 3` gives it up at once"
    );
}

#[test]
fn a_pool_without_room_for_its_replicas_says_what_it_needs() {
    let (wrong, _) = World::new(2).findings();
    assert_eq!(wrong.len(), 1, "{wrong:#?}");
    assert_eq!(
        wrong[0].problem.doing,
        "8 groups find no place for all replicas on different nodes: add devices"
    );
}

#[test]
fn a_pool_without_volumes_tells_that_it_lacks_nodes() {
    let told = |nodes: u64| {
        let mut world = World::new(3);
        let volume = world.view.volumes.remove(0);
        let (name, at) = (volume.name.to_string(), world.now());
        world.apply(Command::DeleteVolume { name });
        let volume = volume.id;
        world.apply(Command::VolumeDataDropped { volume });
        for id in nodes + 1..=3 {
            world.down(id);
            let node = NodeId(id);
            world.apply(Command::RemoveNode { node, at });
        }
        world.findings().0
    };
    assert_eq!(told(3), []);
    let wrong = told(2);
    assert_eq!(wrong.len(), 1, "{wrong:#?}");
    assert_eq!(
        wrong[0].problem.what,
        "pool safe: a volume made now would lack replicas: it needs 3 replicas on devices of different \
         nodes, 2 at least, and only 2 can be placed"
    );
    let doing = &wrong[0].problem.doing;
    for hint in ["penstock token create", "penstock join", "--replicas 2"] {
        assert!(doing.contains(hint), "{doing}");
    }
    let wrong = told(1);
    assert!(
        wrong[0]
            .problem
            .what
            .starts_with("pool safe: no volume can be made: "),
        "{wrong:#?}"
    );
}

#[test]
fn missing_device_is_reported_but_not_an_unneeded_default_pool() {
    let mut world = World {
        machine: Machine::default(),
        view: View::default(),
        at: START,
    };
    let at = world.now();
    let default = PoolSpec::new(meta::DEFAULT_POOL, 2);
    world.apply(Command::Bootstrap {
        cluster: Uuid::from_u128(1),
        node: spec(1),
        pool: Some(Box::new(default)),
        at,
    });
    let (wrong, _) = world.findings();
    assert_eq!(wrong.len(), 1, "{wrong:#?}");
    let what = &wrong[0].problem.what;
    assert!(
        what.contains("only 0 can be placed; no suitable device on node n1"),
        "{what}"
    );
    assert!(!wrong[0].problem.doing.contains("--replicas"), "{wrong:#?}");
    let device = DeviceSpec {
        uuid: Uuid::from_u128(1),
        node: NodeId(1),
        path: "/dev/sda".to_owned(),
        size_bytes: 1 << 40,
        class: "ssd".to_owned(),
    };
    let incarnation = Incarnation(1);
    world.apply(Command::RegisterDevice {
        device,
        incarnation,
        at,
    });
    assert_eq!(world.findings().0.len(), 1);
    let pool = PoolSpec::new("single", 1);
    world.apply(Command::CreatePool { pool, at });
    assert_eq!(world.findings().0, []);
}

#[test]
fn joined_node_that_was_never_started_is_not_reported_as_down() {
    let mut world = World::new(3);
    world.at += 2000;
    let (at_, replaces) = (world.now(), Incarnation::default());
    let (node, incarnation) = (NodeId(4), replaces);
    world.apply(Command::RegisterNode {
        node: NodeSpec::new(node, "n4"),
        replaces,
        at: at_,
    });
    let state = NodeState::Down;
    world.apply(Command::SetNodeState {
        node,
        incarnation,
        state,
        at: at_,
    });
    let (wrong, _) = world.findings();
    assert_eq!(wrong.len(), 1, "{wrong:#?}");
    let problem = &wrong[0].problem;
    assert_eq!(problem.what, "node n4 has joined and was not started yet");
    assert_eq!(problem.since, at(START + 2000));
    assert!(problem.doing.contains("penstock serve"), "{problem:?}");
}

#[test]
fn what_the_leader_heard_is_told_once_for_each_device_and_node() {
    let mut world = World::new(3);
    let failing = |index: u32, failures| FailingSync {
        group: meta::GroupId {
            pool: meta::PoolId(2),
            index: meta::PgIndex(index),
        },
        device: DeviceId(3),
        failures,
        again_in_ms: 1500,
    };
    let word = |node, ago_ms| LastReport {
        node,
        ago_ms,
        word: NodeReport {
            devices: Vec::new(),
            problems: vec![ProblemReport {
                code: "data-damaged".to_owned(),
                what: "device /dev/sdx is full".to_owned(),
                since: Some(UnixMillis(START)),
                doing: "trim in guests".to_owned(),
            }],
        },
    };
    world.view.report = LeaderReport {
        heard: Vec::new(),
        words: vec![word(HERE, 0), word(NodeId(2), 0), word(NodeId(3), 60_000)],
        failing: vec![failing(0, 3), failing(1, 5), failing(2, 1)],
        levels: Vec::new(),
    };
    let (wrong, _) = world.findings();
    let told: Vec<&str> = wrong.iter().map(|one| one.problem.what.as_str()).collect();
    assert_eq!(
        told,
        [
            "2 placement groups cannot be synced to device /dev/sd3 of node n3: up to 5 attempts failed",
            "node n2: device /dev/sdx is full",
        ]
    );
    assert!(wrong[0].problem.doing.contains("within 2 s"));
    assert_eq!(wrong[1].problem.since, at(START));
}

#[test]
fn an_upgrade_that_is_not_complete_is_told_with_who_is_missing() {
    let mut world = World::new(3);
    let newer = Level(Level::KNOWN.0 + 1);
    let levels = [(1, newer), (2, newer), (3, Level::KNOWN)];
    let levels = levels.map(|(node, level)| NodeLevel {
        node: NodeId(node),
        level,
    });
    world.view.report.levels = levels[..2].to_vec();
    let told = |world: &mut World| {
        let (wrong, background_jobs) = world.findings();
        assert_eq!(wrong, []);
        let told = background_jobs.into_iter().map(|one| one.problem.doing);
        told.collect::<Vec<_>>().join("; ")
    };
    let not_heard = told(&mut world);
    assert!(not_heard.contains("node n3 (not heard of);"), "{not_heard}");
    world.view.report.levels = levels.to_vec();
    let older = told(&mut world);
    assert!(older.contains("node n3;"), "{older}");
    // All know it, and the leader is about to raise the level.
    world.view.report.levels[2].level = newer;
    assert_eq!(told(&mut world), "");
}

#[test]
fn move_to_a_second_device_is_reported_unless_standalone() {
    let mut world = World::new(3);
    let at = world.now();
    let second = DeviceSpec {
        uuid: Uuid::from_u128(99),
        node: NodeId(3),
        path: "/dev/second".to_owned(),
        size_bytes: 1 << 40,
        class: "ssd".to_owned(),
    };
    world.apply(Command::RegisterDevice {
        device: second,
        incarnation: Incarnation(3),
        at,
    });
    let told = |world: &mut World| {
        let (wrong, background_jobs) = world.findings();
        assert_eq!(wrong, []);
        background_jobs
            .into_iter()
            .map(|one| one.problem.what)
            .next()
    };
    let what = told(&mut world).unwrap();
    assert!(what.contains("move to other devices"), "{what}");
}

/// The groups lose a replica, by reports of writes that its device refused.
fn lose(world: &mut World, device: u64) {
    let map = world.machine.map();
    let pool = meta::PoolId(2);
    for group in map.groups().filter(|group| group.pool == pool) {
        let lost = group.member(DeviceId(device)).expect("one on each");
        let heard = [1, 2, 3].map(|id| meta::Heard {
            node: NodeId(id),
            incarnation: Incarnation(id),
        });
        let at = world.now();
        world.apply(Command::ReportFailed {
            group: group.id(),
            device: lost.device,
            incarnation: lost.incarnation,
            epoch: group.epoch,
            heard: heard.into(),
            at,
        });
    }
}

#[test]
fn writes_that_wait_for_room_are_told_with_the_full_devices() {
    let mut world = World::new(3);
    lose(&mut world, 1);
    lose(&mut world, 2);
    let word = |device: u64, is_full: bool| LastReport {
        node: NodeId(device),
        ago_ms: 0,
        word: NodeReport {
            devices: vec![meta::DeviceReport {
                device: DeviceId(device),
                capacity_bytes: 1 << 40,
                used_bytes: 1 << 40,
                is_bad: false,
                is_full,
            }],
            problems: Vec::new(),
        },
    };
    let (wrong, _) = world.findings();
    let waiting = &wrong[0].problem;
    assert!(
        waiting.what.contains("8 of 8 placement groups wait"),
        "{wrong:#?}"
    );
    assert!(
        waiting.doing.contains("16 replicas wait for their turn"),
        "{wrong:#?}"
    );
    let waits = |full: u64| {
        world
            .view
            .waits_for_room("safe", &|device| device == DeviceId(full))
    };
    // The third is in sync, and not taken out because it is full.
    for full in [2, 3] {
        assert_eq!(
            waits(full).into_iter().collect::<Vec<_>>(),
            [DeviceId(full)]
        );
    }

    world.view.report.words = vec![word(1, true), word(2, false), word(3, true)];
    let (wrong, _) = world.findings();
    let doing = &wrong[0].problem.doing;
    assert!(
        doing.starts_with("device /dev/sd1 of node n1 is full: delete volumes"),
        "{doing}"
    );
    assert!(doing.contains("8 replicas wait for their turn"), "{doing}");
}

#[test]
fn recurring_problem_does_not_reuse_its_old_start_time() {
    let mut world = World::new(3);
    world.at += 1000;
    lose(&mut world, 3);
    let (wrong, _) = world.findings();
    assert_eq!(wrong[0].problem.since, at(START + 1000));
    let mut over = world.view.events.last().expect("it is degraded").clone();
    let degraded = |what: &EventKind| matches!(what, EventKind::PoolDegraded { .. });
    let recovered = |what: &EventKind| matches!(what, EventKind::PoolRecovered { .. });
    over.what = EventKind::PoolRecovered {
        pool: "safe".parse().unwrap(),
    };
    world.view.events.push(over);
    assert_eq!(world.view.since(degraded, recovered), None);
    assert!(world.view.last(degraded).is_some());
}
