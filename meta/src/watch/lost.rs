//! Devices that their nodes could not open and go on without: after the time after which a node that is away
//! is replaced, their share is given to others.

use std::collections::BTreeMap;
use std::time::Duration;

use super::NODE_REPLACE_AFTER;
use crate::command::Command;
use crate::ids::{DeviceId, Incarnation, UnixMillis};
use crate::map::ClusterMap;
use crate::model::{Device, DeviceState, Node, NodeState};
use crate::state::group::is_served;

/// Since when devices are known to be missing, in which start of their node: the next one gets the whole time
/// to open them.
#[derive(Debug, Default)]
pub(super) struct LostDevices {
    since: BTreeMap<DeviceId, (Incarnation, Duration)>,
}

/// Devices that nodes which are up serve, and those that such nodes go on without.
#[must_use]
pub fn count_devices(map: &ClusterMap) -> (usize, usize) {
    let (mut served, mut missing) = (0, 0);
    for (device, node) in of_nodes_up(map) {
        served += usize::from(is_served(device, node));
        missing += usize::from(device.state != DeviceState::Online);
    }
    (served, missing)
}

fn of_nodes_up(map: &ClusterMap) -> impl Iterator<Item = (&Device, &Node)> {
    let of_nodes = map
        .devices()
        .filter_map(|device| Some((device, map.node(device.node)?)));
    of_nodes.filter(|(_, node)| node.state == NodeState::Up && node.keeps_data())
}

impl LostDevices {
    /// What is to be proposed now.
    pub(super) fn plan(&mut self, map: &ClusterMap, now: Duration, at: UnixMillis) -> Vec<Command> {
        let missing: Vec<(DeviceId, Incarnation)> = of_nodes_up(map)
            .filter(|(device, _)| device.state == DeviceState::Offline)
            .map(|(device, node)| (device.id, node.incarnation))
            .collect();
        let mut since = BTreeMap::new();
        for (device, start) in missing {
            let known = self.since.get(&device);
            let known = known.filter(|(known, _)| *known == start);
            since.insert(device, known.copied().unwrap_or((start, now)));
        }
        self.since = since;
        let (served, missing) = count_devices(map);
        // When half of them are missing something else is wrong, and moving all their data would not help.
        if missing >= served {
            return Vec::new();
        }
        let is_over = |since: Duration| now.saturating_sub(since) >= NODE_REPLACE_AFTER;
        let over = self.since.iter().filter(|(_, (_, since))| is_over(*since));
        over.map(|(device, (start, _))| Command::LoseDevice {
            device: *device,
            incarnation: *start,
            for_long: true,
            at,
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::command::{DeviceSpec, NodeSpec};
    use crate::ids::NodeId;
    use crate::testing::Machine;

    const AT: UnixMillis = UnixMillis(0);

    fn start(machine: &mut Machine, node: u64, incarnation: u64) {
        let known = machine.map();
        let replaces = known.node(NodeId(node)).map(|node| node.incarnation);
        let spec = NodeSpec {
            incarnation: Incarnation(incarnation),
            ..NodeSpec::new(NodeId(node), format!("n{node}"))
        };
        machine
            .apply(&Command::RegisterNode {
                node: spec,
                replaces: replaces.unwrap_or_default(),
                at: AT,
            })
            .unwrap();
    }

    fn serve(machine: &mut Machine, node: u64, incarnation: u64) {
        let device = DeviceSpec {
            uuid: Uuid::from_u128(u128::from(node)),
            node: NodeId(node),
            path: "/dev/x".to_owned(),
            size_bytes: 1 << 40,
            class: "ssd".to_owned(),
        };
        machine
            .apply(&Command::RegisterDevice {
                device,
                incarnation: Incarnation(incarnation),
                at: AT,
            })
            .unwrap();
    }

    /// Nodes with a device each, whose number is theirs.
    fn cluster(nodes: u64) -> Machine {
        let mut machine = Machine::default();
        let node = NodeSpec {
            incarnation: Incarnation(10),
            ..NodeSpec::new(NodeId(1), "n1")
        };
        machine
            .apply(&Command::Bootstrap {
                cluster: Uuid::from_u128(1),
                node,
                pool: None,
                at: AT,
            })
            .unwrap();
        for node in 1..=nodes {
            start(&mut machine, node, node * 10);
            serve(&mut machine, node, node * 10);
        }
        machine
    }

    fn lose(device: u64, incarnation: u64) -> Command {
        Command::LoseDevice {
            device: DeviceId(device),
            incarnation: Incarnation(incarnation),
            for_long: false,
            at: AT,
        }
    }

    #[test]
    fn long_missing_device_fails_and_a_restart_resets_the_wait() {
        let mut machine = cluster(3);
        let mut lost = LostDevices::default();
        start(&mut machine, 3, 31);
        machine.apply(&lose(3, 31)).unwrap();
        let mut now = Duration::ZERO;
        assert_eq!(lost.plan(&machine.map(), now, AT), []);
        now += NODE_REPLACE_AFTER - Duration::from_secs(1);
        assert_eq!(lost.plan(&machine.map(), now, AT), []);
        // Its node starts once more, and does not tell of its devices yet.
        start(&mut machine, 3, 32);
        now += Duration::from_secs(10);
        assert_eq!(lost.plan(&machine.map(), now, AT), []);
        now += NODE_REPLACE_AFTER;
        let planned = lost.plan(&machine.map(), now, AT);
        assert_eq!(planned.len(), 1, "{planned:?}");
        machine.apply(&planned[0]).unwrap();
        let state = |machine: &Machine| machine.map().device(DeviceId(3)).unwrap().state;
        assert_eq!(state(&machine), DeviceState::Failed);
        assert_eq!(lost.plan(&machine.map(), now, AT), []);
        // It is opened after all.
        serve(&mut machine, 3, 32);
        assert_eq!(state(&machine), DeviceState::Online);
        assert!(machine.apply(&planned[0]).is_ok());
        assert_eq!(
            state(&machine),
            DeviceState::Online,
            "a plan that came too late"
        );
    }

    #[test]
    fn when_half_of_the_devices_are_missing_none_is_given_up() {
        let mut machine = cluster(2);
        let mut lost = LostDevices::default();
        machine.apply(&lose(2, 20)).unwrap();
        assert_eq!(count_devices(&machine.map()), (1, 1));
        for now in [Duration::ZERO, NODE_REPLACE_AFTER * 2] {
            assert_eq!(lost.plan(&machine.map(), now, AT), []);
        }
    }
}
