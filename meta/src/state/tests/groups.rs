//! Members of placement groups: taken out, made the authority, synced, promoted, moved.

mod authority;
mod loss;
mod recovery;
mod settings;
mod within;

use super::*;
use crate::command::{Change, Heard};
use crate::ids::Epoch;
use crate::model::{AdminState, GroupId, Member, NodeState, PlacementGroup};
use crate::refusal::{GroupRefusal, LossRefusal};

/// Three nodes with a device each, and a pool of three replicas with a volume.
fn three() -> (World, GroupId) {
    let mut world = World::ready();
    for node in [2, 3] {
        world.node(node);
        world.device(node);
    }
    let pool = PoolSpec {
        placement_groups: Some(1),
        ..PoolSpec::new("safe", 3)
    };
    let reply = world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    let Outcome::Pool(pool) = reply else {
        panic!("{reply:?}")
    };
    world
        .create_in(VolumeSpec {
            pool: Some("safe".to_owned()),
            ..VolumeSpec::new("disk", GIB)
        })
        .unwrap();
    let index = crate::ids::PgIndex(0);
    (
        world,
        GroupId {
            pool: pool.id,
            index,
        },
    )
}

impl World {
    fn group(&self, id: GroupId) -> PlacementGroup {
        let found = tables::PLACEMENT_GROUPS.get(&self.records, &(id.pool, id.index));
        found.unwrap().unwrap()
    }

    fn on(&self, id: GroupId, device: u64) -> Member {
        self.group(id).member(DeviceId(device)).unwrap().clone()
    }

    fn states(&self, id: GroupId) -> Vec<(u64, ReplicaState)> {
        let group = self.group(id);
        let mut found: Vec<_> = group
            .members
            .iter()
            .map(|member| (member.device.0, member.state))
            .collect();
        found.sort_by_key(|(device, _)| *device);
        found
    }

    fn start(&mut self, node: u64, incarnation: u64) {
        self.start_in("", node, incarnation);
    }

    /// The same as [`restart`](Self::restart) on a machine in its boot of this identity.
    fn restart_in(&mut self, boot: &str, node: u64, incarnation: u64) {
        self.start_in(boot, node, incarnation);
        self.serve(node, incarnation);
    }

    /// A start on a machine in its boot of this identity.
    fn start_in(&mut self, boot: &str, node: u64, incarnation: u64) {
        let known = tables::NODES.get(&self.records, &NodeId(node)).unwrap();
        let node = NodeSpec {
            incarnation: Incarnation(incarnation),
            boot: boot.to_owned(),
            ..NodeSpec::new(NodeId(node), known.as_ref().unwrap().name.to_string())
        };
        let replaces = known.unwrap().incarnation;
        self.run(&Command::RegisterNode {
            node,
            replaces,
            at: AT,
        })
        .unwrap();
    }

    /// The process of a node starts again, and opens its device, which has the node's number.
    fn restart(&mut self, node: u64, incarnation: u64) {
        self.start(node, incarnation);
        self.serve(node, incarnation);
    }

    fn serve(&mut self, node: u64, incarnation: u64) {
        self.run(&Command::RegisterDevice {
            device: device(node, node),
            incarnation: Incarnation(incarnation),
            at: AT,
        })
        .unwrap();
    }

    fn down(&mut self, node: u64) {
        let incarnation = tables::NODES.get(&self.records, &NodeId(node));
        let incarnation = incarnation.unwrap().unwrap().incarnation;
        self.run(&Command::SetNodeState {
            node: NodeId(node),
            incarnation,
            state: NodeState::Down,
            at: AT,
        })
        .unwrap();
    }

    fn heard(&self, nodes: &[u64]) -> Vec<Heard> {
        let heard = |node: &u64| {
            let found = tables::NODES.get(&self.records, &NodeId(*node)).unwrap();
            Heard {
                node: NodeId(*node),
                incarnation: found.unwrap().incarnation,
            }
        };
        nodes.iter().map(heard).collect()
    }

    fn report(&mut self, id: GroupId, device: u64, heard: &[u64]) -> Reply {
        let start = self.on(id, device).incarnation;
        let epoch = self.group(id).epoch;
        self.report_as(id, device, start, epoch, heard)
    }

    /// What somebody says who knows this start of the member's process and this map.
    fn report_as(
        &mut self,
        id: GroupId,
        device: u64,
        incarnation: Incarnation,
        epoch: Epoch,
        heard: &[u64],
    ) -> Reply {
        self.run(&Command::ReportFailed {
            group: id,
            device: DeviceId(device),
            incarnation,
            epoch,
            heard: self.heard(heard),
            at: AT,
        })
    }

    /// One change; the refusal if it was refused.
    fn change(&mut self, change: Change, heard: &[u64]) -> Result<(), Refusal> {
        let heard = self.heard(heard);
        let reply = self.run(&Command::Regroup {
            changes: vec![change],
            heard,
            at: AT,
        });
        match reply.unwrap() {
            Outcome::Regrouped {
                granted: 1,
                refused,
            } if refused.is_empty() => Ok(()),
            Outcome::Regrouped { mut refused, .. } => Err(refused.remove(0)),
            other => panic!("{other:?}"),
        }
    }

    fn sync(&mut self, id: GroupId, device: u64, incarnation: u64) -> Result<(), Refusal> {
        let change = Change::StartSync {
            group: id,
            device: DeviceId(device),
            incarnation: Incarnation(incarnation),
        };
        self.change(change, &[])
    }

    fn promote(&mut self, id: GroupId, device: u64) -> Reply {
        let member = self.on(id, device);
        self.run(&Command::Promote {
            group: id,
            device: DeviceId(device),
            incarnation: member.incarnation,
            since: member.since,
            at: AT,
        })
    }
}

use ReplicaState::{InSync, Out, Syncing};

fn refused<T: std::fmt::Debug>(reply: Result<T, Refusal>) -> GroupRefusal {
    match reply {
        Err(Refusal::Group(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reported_member_goes_out_only_if_another_was_heard_of() {
    let (mut world, id) = three();
    let before = world.group(id).epoch;
    let last = GroupRefusal::LastInSync {
        group: id,
        device: DeviceId(1),
    };
    assert_eq!(refused(world.report(id, 1, &[])), last);
    assert_eq!(
        refused(world.report(id, 1, &[1])),
        last,
        "its own word is none"
    );
    world.report(id, 1, &[2]).unwrap();
    assert_eq!(world.states(id), [(1, Out), (2, InSync), (3, InSync)]);
    assert!(world.group(id).epoch > before);
    let again = world.group(id);
    assert_eq!(world.report(id, 1, &[]), Ok(Outcome::Group(again)));
    world.report(id, 2, &[3]).unwrap();
    assert!(
        world.report(id, 3, &[1, 2, 3]).is_err(),
        "the last one stays"
    );
}

#[test]
fn a_report_about_another_start_or_an_earlier_stay_is_refused() {
    let (mut world, id) = three();
    let seen = world.group(id).epoch;
    world.report(id, 1, &[2]).unwrap();
    world.sync(id, 1, 0).unwrap();
    let stale = world.report_as(id, 1, Incarnation(0), seen, &[2]);
    assert!(matches!(refused(stale), GroupRefusal::StaleReport { .. }));
    let now = world.group(id).epoch;
    let other = world.report_as(id, 1, Incarnation(7), now, &[2]);
    assert!(matches!(refused(other), GroupRefusal::OtherStart { .. }));
    assert_eq!(world.on(id, 1).state, Syncing);
}

#[test]
fn restarted_member_is_promoted_only_in_its_own_sync_round() {
    let (mut world, id) = three();
    let valid = Change::Demote {
        group: id,
        device: DeviceId(3),
        incarnation: Incarnation(0),
    };
    assert!(matches!(
        refused(world.change(valid.clone(), &[1])),
        GroupRefusal::NothingWrong { .. }
    ));
    world.restart(3, 33);
    assert_eq!(
        world.states(id),
        [(1, InSync), (2, InSync), (3, InSync)],
        "a registration changes nothing by itself"
    );
    world.change(valid, &[1]).unwrap();
    assert!(
        refused(world.sync(id, 3, 0))
            .to_string()
            .contains("start 0")
    );
    world.sync(id, 3, 33).unwrap();
    let first_round = world.on(id, 3);
    assert!(matches!(
        refused(world.sync(id, 3, 33)),
        GroupRefusal::NotOut { .. }
    ));
    world.report(id, 3, &[]).unwrap();
    assert_eq!(
        world.on(id, 3).state,
        Out,
        "who is syncing needs no witness"
    );
    world.sync(id, 3, 33).unwrap();
    let late = world.run(&Command::Promote {
        group: id,
        device: DeviceId(3),
        incarnation: Incarnation(33),
        since: first_round.since,
        at: AT,
    });
    assert!(matches!(refused(late), GroupRefusal::NotSyncing { .. }));
    world.promote(id, 3).unwrap();
    assert_eq!(world.on(id, 3).state, InSync);
    let epoch = world.group(id).epoch;
    world.promote(id, 3).unwrap();
    assert_eq!(
        world.group(id).epoch,
        epoch,
        "said twice it changes nothing"
    );
}

#[test]
fn a_member_that_restarted_while_syncing_is_not_promoted() {
    let (mut world, id) = three();
    world.restart(3, 33);
    let demote = Change::Demote {
        group: id,
        device: DeviceId(3),
        incarnation: Incarnation(0),
    };
    world.change(demote, &[1]).unwrap();
    world.sync(id, 3, 33).unwrap();
    world.start(3, 34);
    assert!(matches!(
        refused(world.promote(id, 3)),
        GroupRefusal::NotServed { .. }
    ));
}

#[test]
fn who_has_no_valid_source_does_not_begin_to_sync() {
    let (mut world, id) = three();
    world.report(id, 3, &[1]).unwrap();
    world.down(1);
    world.down(2);
    assert!(matches!(
        refused(world.sync(id, 3, 0)),
        GroupRefusal::NoSource { .. }
    ));
}

#[test]
fn a_drained_node_is_left_only_when_the_others_hold_everything() {
    let (mut world, id) = three();
    let drain = |admin_state| Command::SetNodeAdminState {
        node: NodeId(2),
        admin_state,
        at: AT,
    };
    let refused = world.run(&drain(AdminState::Draining)).unwrap_err();
    assert!(
        refused.to_string().contains("could place 2 of 3 replicas"),
        "{refused}"
    );
    world.node(4);
    world.device(4);
    world.run(&drain(AdminState::Draining)).unwrap();
    let leaving = |world: &World| world.on(id, 2).leaving;
    assert!(leaving(&world));
    assert_eq!(
        world.states(id),
        [(1, InSync), (2, InSync), (3, InSync), (4, Out)]
    );
    let remove = Command::RemoveNode {
        node: NodeId(2),
        at: AT,
    };
    let refused = world.run(&remove).unwrap_err();
    assert!(matches!(
        refused,
        Refusal::Map(MapRefusal::NodeInUse { .. })
    ));
    let told = refused.to_string();
    assert!(told.contains("counts as down 3 s after"), "{told}");
    world.sync(id, 4, 0).unwrap();
    assert!(leaving(&world));
    world.promote(id, 4).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (3, InSync), (4, InSync)]);
    world.run(&remove).unwrap();
    assert_eq!(tables::DEVICES.all(&world.records).unwrap().len(), 3);
}

#[test]
fn a_drain_that_is_called_off_keeps_what_was_there() {
    let (mut world, id) = three();
    world.node(4);
    world.device(4);
    for admin_state in [AdminState::Draining, AdminState::Active] {
        world
            .run(&Command::SetNodeAdminState {
                node: NodeId(2),
                admin_state,
                at: AT,
            })
            .unwrap();
    }
    assert!(
        world.group(id).members.iter().all(|member| !member.leaving)
            || world.group(id).member(DeviceId(4)).is_some()
    );
    assert_eq!(world.group(id).in_sync().count(), 3);
}

#[test]
fn dead_node_is_removed_unless_it_holds_a_last_copy() {
    let (mut world, id) = three();
    let remove = |node| Command::RemoveNode {
        node: NodeId(node),
        at: AT,
    };
    assert!(world.run(&remove(3)).is_err(), "it is up and holds data");
    world.down(3);
    world.run(&remove(3)).unwrap();
    assert_eq!(world.states(id), [(1, InSync), (2, InSync)]);
    world.report(id, 1, &[2]).unwrap();
    world.down(2);
    assert!(matches!(
        world.run(&remove(2)),
        Err(Refusal::Loss(LossRefusal::WouldLose { .. }))
    ));
}

#[test]
fn an_older_process_cannot_register_over_a_newer_one() {
    let (mut world, _) = three();
    world.restart(2, 21);
    let late = |incarnation, replaces| Command::RegisterNode {
        node: NodeSpec {
            incarnation: Incarnation(incarnation),
            ..NodeSpec::new(NodeId(2), "node2")
        },
        replaces: Incarnation(replaces),
        at: AT,
    };
    let refused = world.run(&late(20, 0)).unwrap_err().to_string();
    assert!(
        refused.starts_with("node node2 runs as start 15, not 14"),
        "{refused}"
    );
    world.run(&late(21, 0)).unwrap();
    world.run(&late(22, 21)).unwrap();
}

#[test]
fn a_pool_that_loses_and_regains_replicas_is_told_of_in_events() {
    let (mut world, id) = three();
    world.report(id, 1, &[2]).unwrap();
    world.report(id, 2, &[3]).unwrap();
    world.sync(id, 1, 0).unwrap();
    world.promote(id, 1).unwrap();
    world.sync(id, 2, 0).unwrap();
    world.promote(id, 2).unwrap();
    let events = tables::EVENTS.all(&world.records).unwrap();
    let told: Vec<String> = events
        .iter()
        .map(|event| event.what.to_string())
        .filter(|text| text.starts_with("pool safe:"))
        .collect();
    assert_eq!(
        told,
        [
            "pool safe: placement groups lack replicas, 1 at first",
            "pool safe: writes wait for more replicas in sync, to 1 placement groups at first",
            "pool safe: no write waits for replicas",
            "pool safe: all replicas are in sync",
        ]
    );
    assert!(
        events
            .windows(2)
            .all(|two| two[0].number + 1 == two[1].number)
    );
    assert_ne!(Epoch(0), world.group(id).epoch);
}
