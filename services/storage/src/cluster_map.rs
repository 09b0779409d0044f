//! The cluster map as meta has it, told to the data path.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

use fabric::{ClusterView, Fabric, Grant, GroupView, MemberView, Reach};
use fabric_types::ids::LayerId;
use fabric_types::membership::{Member, REPLICAS_MAX, ReplicaState};
use fabric_types::{NodeId, PgId};
use meta::{ClusterMap, LayerChanges, Layers, LayersRevision, Meta, PlacementGroup, Role};
use tokio::sync::watch;

/// What the data path of node `own` needs of a map.
pub fn view(map: &ClusterMap, own: NodeId) -> ClusterView {
    let others = map.nodes().filter(|node| node.id != own);
    let peers: HashMap<NodeId, SocketAddr> = others
        .filter_map(|node| Some((node.id, node.data_address.parse().ok()?)))
        .collect();
    let devices = map.devices().filter(|device| device.node == own);
    let members = map.nodes().map(|node| (node.id, member(node)));
    ClusterView {
        epoch: map.epoch(),
        peers,
        members: members.collect(),
        groups: groups(map, own),
        own_devices: devices
            .map(|device| (device.id.0, *device.uuid.as_bytes()))
            .collect(),
    }
}

/// Who a node is to others.
fn member(node: &meta::Node) -> MemberView {
    let starts = node.starts.iter().copied();
    let former = starts.filter(|start| node.is_former_start(*start));
    MemberView {
        incarnation: node.incarnation,
        former: former.collect(),
        reach: match reaches_all(node) {
            true => Reach::All,
            false => Reach::OpenLayers,
        },
    }
}

/// Whether a node reaches all layers of all volumes: to bring replicas up to date, or because the cluster
/// trusts it with everything. Others reach what their leases and attachments open.
fn reaches_all(node: &meta::Node) -> bool {
    node.roles.contains(&Role::Storage) || node.roles.contains(&Role::Meta)
}

/// The groups of all pools that have members: a pool that lacks nodes has none, and no volumes either.
fn groups(map: &ClusterMap, own: NodeId) -> Vec<GroupView> {
    let mut views = Vec::new();
    for pool in map.pools() {
        let before = views.len();
        let groups = map.groups().filter(|group| group.pool == pool.id);
        for group in groups {
            let members = members(group);
            if members.is_empty() {
                // A pool is known as a whole or not at all.
                views.truncate(before);
                break;
            }
            let on = |node: NodeId| {
                let mut members = members.iter();
                members.find(|(member, _)| member.node == node)
            };
            let (here, incoming) = (on(own), on(own.incoming()));
            views.push(GroupView {
                pg: PgId(group.id().to_u64()),
                epoch: group.epoch,
                min_in_sync: usize::from(pool.min_in_sync),
                power_lost: group.power_lost,
                device: here.map(|(_, device)| device.0),
                incoming: incoming.map(|(_, device)| device.0),
                members: members.into_iter().map(|(member, _)| member).collect(),
            });
        }
    }
    views
}

/// One for each node, those in sync first, with the devices that they are on; and those that the group is
/// coming to, on nodes where another device is in sync.
fn members(group: &PlacementGroup) -> Vec<(Member, meta::DeviceId)> {
    let mut members: Vec<(Member, meta::DeviceId)> = Vec::new();
    for state in [
        ReplicaState::InSync,
        ReplicaState::Syncing,
        ReplicaState::Out,
    ] {
        for member in &group.members {
            let node = member.node;
            let is_new = members.iter().all(|(other, _)| other.node != node);
            if translated(member.state) == state && is_new && members.len() < REPLICAS_MAX {
                members.push((view_of(member, node), member.device));
            }
        }
    }
    let second = |member: &meta::Member| {
        let node = member.node;
        let shares_node = members.iter().any(|(other, device)| {
            other.node == node && other.state == ReplicaState::InSync && *device != member.device
        });
        let comes = member.state == meta::ReplicaState::Syncing && shares_node;
        comes.then(|| (view_of(member, node.incoming()), member.device))
    };
    let incoming: Vec<_> = group.members.iter().filter_map(second).collect();
    members.extend(incoming);
    members.truncate(REPLICAS_MAX);
    members
}

fn view_of(member: &meta::Member, node: NodeId) -> Member {
    Member {
        node,
        incarnation: member.incarnation,
        state: translated(member.state),
        since: member.since,
    }
}

/// The device on which the group has this member now.
pub fn device_of(map: &ClusterMap, group: meta::GroupId, node: NodeId) -> Option<meta::DeviceId> {
    let members = members(map.group(group)?);
    let mut on_node = members.iter().filter(|(member, _)| member.node == node);
    on_node.next().map(|(_, device)| *device)
}

fn translated(state: meta::ReplicaState) -> ReplicaState {
    match state {
        meta::ReplicaState::InSync => ReplicaState::InSync,
        meta::ReplicaState::Syncing => ReplicaState::Syncing,
        meta::ReplicaState::Out => ReplicaState::Out,
    }
}

/// Tells the data path of every newer map for as long as the metadata service runs. Maps that come fast are
/// skipped, all but the last.
pub async fn follow(fabric: Fabric, meta: Meta) {
    let mut maps = meta.watch_map();
    loop {
        let map = maps.borrow_and_update().clone();
        let (fabric, own) = (fabric.clone(), meta.node_id());
        // Thousands of groups take their time, and the data path's locks.
        let told = tokio::task::spawn_blocking(move || fabric.set_map(view(&map, own))).await;
        if let Err(error) = told {
            tracing::error!(%error, "tell the data path of a newer cluster map");
        }
        if maps.changed().await.is_err() {
            return;
        }
    }
}

/// Tells the data path which layers exist and who may write them, for as long as the metadata service runs.
/// Changes that come fast are told together. Leases that change are told alone: a host can have its own
/// granted again and again.
pub async fn follow_layers(fabric: Fabric, meta: Meta) {
    let mut layers = meta.watch_layers();
    let mut told = None;
    loop {
        layers.mark_unchanged();
        let (fabric, known) = (fabric.clone(), layers.clone());
        // There may be many layers, and data threads hold the lock that this takes.
        let telling = tokio::task::spawn_blocking(move || tell_layers(&fabric, &known, told));
        told = match telling.await {
            Ok(revision) => Some(revision),
            Err(error) => {
                tracing::error!(%error, "cannot tell the data path which layers exist");
                None
            }
        };
        if layers.changed().await.is_err() {
            return;
        }
    }
}

/// Tells what changed since a revision. Returns the present one.
fn tell_layers(
    fabric: &Fabric,
    known: &watch::Receiver<Layers>,
    since: Option<LayersRevision>,
) -> LayersRevision {
    // Not borrowed for longer: meanwhile the metadata service applies nothing.
    let (changes, revision) = {
        let known = known.borrow();
        (known.since(since), known.revision())
    };
    match changes {
        LayerChanges::All(all) => fabric.set_layers(all.into_iter().map(granted)),
        LayerChanges::Leases(changed) => fabric.set_grants(changed.into_iter().map(granted)),
    }
    revision
}

/// Tells the data path which layers are open to nodes that reach no others, for as long as the metadata
/// service runs. Changes that come fast are told together.
pub async fn follow_openings(fabric: Fabric, meta: Meta) {
    let (mut openings, mut maps) = (meta.watch_openings(), meta.watch_map());
    let mut before = BTreeSet::new();
    loop {
        openings.mark_unchanged();
        let map = maps.borrow_and_update().clone();
        let limited = map.nodes().filter(|node| !reaches_all(node));
        let limited: BTreeSet<NodeId> = limited.map(|node| node.id).collect();
        if !limited.is_empty() || limited != before {
            before.clone_from(&limited);
            let (fabric, meta) = (fabric.clone(), meta.clone());
            let told = tokio::task::spawn_blocking(move || {
                meta.applied()
                    .open_layers(&limited)
                    .map(|open| fabric.set_open_layers(open_layers(open)))
            });
            // What is not told stays as it was until the next change.
            match told.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "read which layers are open"),
                Err(error) => tracing::error!(%error, "tell the data path which layers are open"),
            }
        }
        let changed = tokio::select! {
            changed = openings.changed() => changed,
            changed = maps.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

/// A layer and its lease, as replicas check them.
fn granted(known: meta::LayerLease) -> (LayerId, Grant) {
    let grant = Grant {
        holder: known.holder,
        generation: known.generation,
    };
    (known.layer, grant)
}

fn open_layers(open: meta::OpenLayers) -> HashMap<NodeId, HashSet<LayerId>> {
    let nodes = open.into_iter();
    nodes
        .map(|(node, open)| (node, open.into_iter().collect()))
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use meta::testing::Machine;
    use meta::{Command, DeviceSpec, NodeSpec, PoolSpec, UnixMillis};
    use uuid::Uuid;

    use super::*;

    const AT: UnixMillis = UnixMillis(0);
    const GROUPS: usize = 8;

    fn node(id: u64) -> NodeSpec {
        NodeSpec {
            incarnation: meta::Incarnation(id * 100),
            data_address: format!("10.0.0.{id}:7471"),
            ..NodeSpec::new(NodeId(id), format!("n{id}"))
        }
    }

    fn add_device(machine: &mut Machine, node: u64) {
        let device = DeviceSpec {
            uuid: Uuid::from_u128(u128::from(node)),
            node: NodeId(node),
            path: "/dev/x".to_owned(),
            size_bytes: 1 << 40,
            class: "disk".to_owned(),
        };
        let register = Command::RegisterDevice {
            device,
            incarnation: meta::Incarnation(node * 100),
            at: AT,
        };
        machine.apply(&register).unwrap();
    }

    fn add_volume(machine: &mut Machine) {
        let volume = Command::CreateVolume {
            uuid: Uuid::from_u128(9),
            volume: meta::VolumeSpec::new("disk", 1 << 30),
            at: AT,
        };
        machine.apply(&volume).unwrap();
    }

    /// Three nodes, with devices on the first `with_devices`, and a pool of three replicas.
    fn cluster(with_devices: u64) -> Machine {
        let mut machine = Machine::default();
        let pool = PoolSpec {
            placement_groups: Some(GROUPS as u32),
            ..PoolSpec::new(meta::DEFAULT_POOL, 3)
        };
        let bootstrap = Command::Bootstrap {
            cluster: Uuid::from_u128(1),
            node: node(1),
            pool: Some(Box::new(pool)),
            at: AT,
        };
        machine.apply(&bootstrap).unwrap();
        for id in [2, 3] {
            let register = Command::RegisterNode {
                node: node(id),
                replaces: meta::Incarnation::default(),
                at: AT,
            };
            machine.apply(&register).unwrap();
        }
        (1..=with_devices).for_each(|id| add_device(&mut machine, id));
        machine
    }

    #[test]
    fn every_group_has_its_members_and_this_nodes_device() {
        let machine = cluster(3);
        let view = view(&machine.map(), NodeId(2));
        assert_eq!(view.epoch.0, machine.map().epoch().0);
        let mut peers: Vec<_> = view
            .peers
            .iter()
            .map(|(id, at)| (id.0, at.port()))
            .collect();
        peers.sort_unstable();
        assert_eq!(peers, [(1, 7471), (3, 7471)], "not itself");
        let own: Vec<u64> = view.own_devices.iter().map(|(id, _)| *id).collect();
        assert_eq!(own.len(), 1);
        assert_eq!(view.own_devices[0].1, *Uuid::from_u128(2).as_bytes());
        assert_eq!(view.groups.len(), GROUPS);
        for (index, group) in view.groups.iter().enumerate() {
            assert_eq!(group.pg.0 & 0xffff_ffff, index as u64);
            assert_eq!((group.min_in_sync, group.device), (2, Some(own[0])));
            let mut nodes: Vec<_> = group
                .members
                .iter()
                .map(|m| (m.node.0, m.incarnation.0))
                .collect();
            nodes.sort_unstable();
            assert_eq!(nodes, [(1, 100), (2, 200), (3, 300)]);
        }
    }

    /// Node 3 of three has a second device, number 4, that a group is coming to.
    pub fn coming() -> Machine {
        let mut machine = cluster(3);
        add_volume(&mut machine);
        let device = DeviceSpec {
            uuid: Uuid::from_u128(4),
            node: NodeId(3),
            path: "/dev/y".to_owned(),
            size_bytes: 1 << 40,
            class: "disk".to_owned(),
        };
        let register = Command::RegisterDevice {
            device,
            incarnation: meta::Incarnation(300),
            at: AT,
        };
        machine.apply(&register).unwrap();
        let map = machine.map();
        let moving = map.groups().find(|group| {
            let new = group.member(meta::DeviceId(4));
            new.is_some()
        });
        let sync = meta::Change::StartSync {
            group: moving.unwrap().id(),
            device: meta::DeviceId(4),
            incarnation: meta::Incarnation(300),
        };
        let regroup = Command::Regroup {
            changes: vec![sync],
            heard: Vec::new(),
            at: AT,
        };
        machine.apply(&regroup).unwrap();
        machine
    }

    #[test]
    fn group_moving_within_a_node_has_two_members_there() {
        let machine = coming();
        let map = machine.map();
        let view = view(&map, NodeId(3));
        let of_four = |group: &&GroupView| group.members.len() == 4;
        let moving: Vec<&GroupView> = view.groups.iter().filter(of_four).collect();
        let [group] = moving[..] else {
            panic!("{moving:?}");
        };
        assert_eq!((group.device, group.incoming), (Some(3), Some(4)));
        let node = NodeId(3);
        let state = |name: NodeId| {
            let member = group.members.iter().find(|member| member.node == name);
            member.unwrap().state
        };
        assert_eq!(state(node), ReplicaState::InSync);
        assert_eq!(state(node.incoming()), ReplicaState::Syncing);
        let id = meta::GroupId::from_u64(group.pg.0);
        assert_eq!(device_of(&map, id, node), Some(meta::DeviceId(3)));
        assert_eq!(
            device_of(&map, id, node.incoming()),
            Some(meta::DeviceId(4))
        );
        let others = super::view(&map, NodeId(1));
        let same = others.groups.iter().find(|other| other.pg == group.pg);
        assert_eq!(
            same.unwrap().members,
            group.members,
            "all nodes read it alike"
        );
    }

    #[test]
    fn pool_without_members_and_node_without_devices_hold_nothing() {
        assert!(view(&cluster(0).map(), NodeId(1)).groups.is_empty());
        let two = cluster(2);
        let view = view(&two.map(), NodeId(3));
        assert_eq!(view.groups.len(), GROUPS);
        let none = |group: &GroupView| group.device.is_none() && group.members.len() == 2;
        assert!(view.groups.iter().all(none));
        assert!(view.own_devices.is_empty());
    }

    #[test]
    fn members_in_sync_come_first() {
        let mut machine = cluster(3);
        add_volume(&mut machine);
        let map = machine.map();
        let first = map.groups().next().unwrap().clone();
        let lost = first.members[0].clone();
        let heard = first.members[1..].iter().map(|member| meta::Heard {
            node: member.node,
            incarnation: member.incarnation,
        });
        let report = Command::ReportFailed {
            group: first.id(),
            device: lost.device,
            incarnation: lost.incarnation,
            epoch: first.epoch,
            heard: heard.collect(),
            at: AT,
        };
        machine.apply(&report).unwrap();
        let view = view(&machine.map(), NodeId(1));
        let states: Vec<ReplicaState> = view.groups[0].members.iter().map(|m| m.state).collect();
        assert_eq!(
            states,
            [
                ReplicaState::InSync,
                ReplicaState::InSync,
                ReplicaState::Out
            ]
        );
        assert_eq!(view.groups[0].members[2].node.0, lost.node.0);
    }
}
