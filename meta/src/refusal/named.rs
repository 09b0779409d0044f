//! Nodes and volumes as refusals name them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, VolumeId};

/// A node or a volume in a refusal.
///
/// The previous version has a number in the place of a name, and cannot read an answer with a name. So the
/// state machine gives names from [`Level::OFFERS`](crate::Level::OFFERS) on, and this program reads both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Named<Id> {
    /// Its number: below that level, and if it was removed.
    Number(Id),
    /// Its name.
    Name(String),
}

/// A node in a refusal.
pub type NamedNode = Named<NodeId>;
/// A volume in a refusal.
pub type NamedVolume = Named<VolumeId>;

impl From<NodeId> for NamedNode {
    fn from(node: NodeId) -> Self {
        Self::Number(node)
    }
}

impl From<VolumeId> for NamedVolume {
    fn from(volume: VolumeId) -> Self {
        Self::Number(volume)
    }
}

impl<Id> From<&str> for Named<Id> {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl<Id: fmt::Display> fmt::Display for Named<Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(id) => id.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::ids::{DeviceId, Generation, Incarnation, NamespaceGroupId};
    use crate::refusal::{
        AttachmentRefusal, ExportRefusal, FilesystemRefusal, LeaseRefusal, MapRefusal, Refusal,
        VolumeRefusal,
    };

    use super::*;

    fn leases(node: &NamedNode) -> Vec<(Refusal, &'static str)> {
        let volume = || match node {
            NamedNode::Number(_) => NamedVolume::from(VolumeId(5)),
            NamedNode::Name(_) => NamedVolume::from("a"),
        };
        vec![
            (
                Refusal::from(LeaseRefusal::Superseded {
                    volume: volume(),
                    current: Generation(7),
                    claimed: Generation(6),
                }),
                r#"{"lease":{"superseded":{"volume":5,"current":7,"claimed":6}}}"#,
            ),
            (
                Refusal::from(LeaseRefusal::NotHolder {
                    volume: volume(),
                    node: node.clone(),
                    current: Generation(7),
                }),
                r#"{"lease":{"not_holder":{"volume":5,"node":2,"current":7}}}"#,
            ),
        ]
    }

    fn volumes_and_leases(node: &NamedNode) -> Vec<(Refusal, &'static str)> {
        let (name, socket, node) = (|| "a".to_owned(), || "/s".to_owned(), || node.clone());
        vec![
            (
                Refusal::from(VolumeRefusal::InUse {
                    name: name(),
                    socket: socket(),
                    node: node(),
                }),
                r#"{"volume":{"in_use":{"name":"a","socket":"/s","node":2}}}"#,
            ),
            (
                Refusal::from(LeaseRefusal::Held {
                    volume: name(),
                    holder: node(),
                    generation: Generation(7),
                }),
                r#"{"lease":{"held":{"volume":"a","holder":2,"generation":7}}}"#,
            ),
            (
                Refusal::from(AttachmentRefusal::SocketTaken {
                    socket: socket(),
                    node: node(),
                    target: name(),
                }),
                r#"{"attachment":{"socket_taken":{"socket":"/s","node":2,"target":"a"}}}"#,
            ),
            (
                Refusal::from(AttachmentRefusal::VolumeInUse {
                    volume: name(),
                    socket: socket(),
                    node: node(),
                }),
                r#"{"attachment":{"volume_in_use":{"volume":"a","socket":"/s","node":2}}}"#,
            ),
            (
                Refusal::from(AttachmentRefusal::OtherIncoming {
                    volume: name(),
                    socket: socket(),
                    node: node(),
                }),
                r#"{"attachment":{"other_incoming":{"volume":"a","socket":"/s","node":2}}}"#,
            ),
            (
                Refusal::from(ExportRefusal::NodeUp {
                    name: name(),
                    node: node(),
                }),
                r#"{"export":{"node_up":{"name":"a","node":2}}}"#,
            ),
            (
                Refusal::from(ExportRefusal::MovedMeanwhile {
                    name: name(),
                    node: node(),
                }),
                r#"{"export":{"moved_meanwhile":{"name":"a","node":2}}}"#,
            ),
            (
                Refusal::from(FilesystemRefusal::InUse {
                    name: name(),
                    socket: socket(),
                    node: node(),
                }),
                r#"{"filesystem":{"in_use":{"name":"a","socket":"/s","node":2}}}"#,
            ),
        ]
    }

    fn nodes(node: &NamedNode) -> Vec<(Refusal, &'static str)> {
        let node = || node.clone();
        let refusals = [
            (
                MapRefusal::NoRole { node: node() },
                r#"{"map":{"no_role":{"node":2}}}"#,
            ),
            (
                MapRefusal::NodeNameTaken {
                    name: "a".to_owned(),
                    holder: NodeId(2),
                },
                r#"{"map":{"node_name_taken":{"name":"a","holder":2}}}"#,
            ),
            (
                MapRefusal::LongAddress {
                    node: node(),
                    text: "t".to_owned(),
                },
                r#"{"map":{"long_address":{"node":2,"text":"t"}}}"#,
            ),
            (
                MapRefusal::OtherStart {
                    node: node(),
                    known: Incarnation(3),
                    claimed: Incarnation(4),
                },
                r#"{"map":{"other_start":{"node":2,"known":3,"claimed":4}}}"#,
            ),
            (
                MapRefusal::LastNode { node: node() },
                r#"{"map":{"last_node":{"node":2}}}"#,
            ),
            (
                MapRefusal::NodeServes {
                    node: node(),
                    socket: "/s".to_owned(),
                },
                r#"{"map":{"node_serves":{"node":2,"socket":"/s"}}}"#,
            ),
            (
                MapRefusal::NodeInUse {
                    node: node(),
                    pool: "p".to_owned(),
                },
                r#"{"map":{"node_in_use":{"node":2,"pool":"p"}}}"#,
            ),
            (
                MapRefusal::GroupNeedsNode {
                    node: node(),
                    group: NamespaceGroupId(1),
                },
                r#"{"map":{"group_needs_node":{"node":2,"group":1}}}"#,
            ),
            (
                MapRefusal::TooFewLeft {
                    node: node(),
                    pool: "p".to_owned(),
                    possible: 2,
                    replicas: 3,
                    apart: "node".to_owned(),
                },
                r#"{"map":{"too_few_left":{"node":2,"pool":"p","possible":2,"replicas":3,"apart":"node"}}}"#,
            ),
            (
                MapRefusal::DevicePathTaken {
                    path: "/dev/x".to_owned(),
                    node: node(),
                    device: DeviceId(4),
                },
                r#"{"map":{"device_path_taken":{"path":"/dev/x","node":2,"device":4}}}"#,
            ),
        ];
        let refusals = refusals.into_iter();
        refusals
            .map(|(refusal, text)| (Refusal::from(refusal), text))
            .collect()
    }

    fn all(node: &NamedNode) -> impl Iterator<Item = (Refusal, &'static str)> {
        let volumes = volumes_and_leases(node).into_iter();
        volumes.chain(leases(node)).chain(nodes(node))
    }

    /// The literals are what the previous version writes.
    #[test]
    fn refusals_with_the_number_of_a_node_are_those_of_the_previous_version() {
        let node = NamedNode::from(NodeId(2));
        for (refusal, text) in all(&node) {
            assert_eq!(serde_json::to_string(&refusal).unwrap(), text);
            assert_eq!(serde_json::from_str::<Refusal>(text).unwrap(), refusal);
        }
    }

    #[test]
    fn refusals_with_the_name_of_a_node_are_read_as_they_were_written() {
        let node = NamedNode::from("two");
        for (refusal, _) in all(&node) {
            let written = serde_json::to_string(&refusal).unwrap();
            assert_eq!(serde_json::from_str::<Refusal>(&written).unwrap(), refusal);
        }
    }

    #[test]
    fn refusals_that_name_a_node_beside_its_number_are_read_without_the_name() {
        let too_old = r#"{"map":{"too_old":{"node":2,"knows":3,"level":16}}}"#;
        let refusal: Refusal = serde_json::from_str(too_old).unwrap();
        let text = refusal.to_string();
        assert!(text.starts_with("node 2 runs a version"), "{text}");
        let roles =
            r#"{"map":{"roles_not_granted":{"node":2,"asked":["meta"],"granted":["host"]}}}"#;
        let refusal: Refusal = serde_json::from_str(roles).unwrap();
        let text = refusal.to_string();
        assert!(text.starts_with("node 2 was granted"), "{text}");
        for (refusal, begin) in [
            (
                r#"{"map":{"unknown_node":{"node":2}}}"#,
                "node 2 is not in the cluster",
            ),
            (
                r#"{"map":{"was_removed":{"node":2}}}"#,
                "node 2 was removed",
            ),
        ] {
            let refusal: Refusal = serde_json::from_str(refusal).unwrap();
            assert!(refusal.to_string().starts_with(begin), "{refusal}");
        }
    }
}
