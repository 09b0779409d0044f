//! Nodes and volumes as refusals name them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, VolumeId};

/// A node or a volume in a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Named<Id> {
    /// Its number, if it was removed.
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

    fn leases(node: &NamedNode) -> Vec<Refusal> {
        let volume = || match node {
            NamedNode::Number(_) => NamedVolume::from(VolumeId(5)),
            NamedNode::Name(_) => NamedVolume::from("a"),
        };
        vec![
            Refusal::from(LeaseRefusal::Superseded {
                volume: volume(),
                current: Generation(7),
                claimed: Generation(6),
            }),
            Refusal::from(LeaseRefusal::NotHolder {
                volume: volume(),
                node: node.clone(),
                current: Generation(7),
            }),
        ]
    }

    fn volumes_and_leases(node: &NamedNode) -> Vec<Refusal> {
        let (name, socket, node) = (|| "a".to_owned(), || "/s".to_owned(), || node.clone());
        vec![
            Refusal::from(VolumeRefusal::InUse {
                name: name(),
                socket: socket(),
                node: node(),
            }),
            Refusal::from(LeaseRefusal::Held {
                volume: name(),
                holder: node(),
                generation: Generation(7),
            }),
            Refusal::from(AttachmentRefusal::SocketTaken {
                socket: socket(),
                node: node(),
                target: name(),
            }),
            Refusal::from(AttachmentRefusal::VolumeInUse {
                volume: name(),
                socket: socket(),
                node: node(),
            }),
            Refusal::from(AttachmentRefusal::OtherIncoming {
                volume: name(),
                socket: socket(),
                node: node(),
            }),
            Refusal::from(ExportRefusal::NodeUp {
                name: name(),
                node: node(),
            }),
            Refusal::from(ExportRefusal::MovedMeanwhile {
                name: name(),
                node: node(),
            }),
            Refusal::from(FilesystemRefusal::InUse {
                name: name(),
                socket: socket(),
                node: node(),
            }),
        ]
    }

    fn nodes(node: &NamedNode) -> Vec<Refusal> {
        let node = || node.clone();
        let refusals = [
            MapRefusal::NoRole { node: node() },
            MapRefusal::NodeNameTaken {
                name: "a".to_owned(),
                holder: NodeId(2),
            },
            MapRefusal::LongAddress {
                node: node(),
                text: "t".to_owned(),
            },
            MapRefusal::OtherStart {
                node: node(),
                known: Incarnation(3),
                claimed: Incarnation(4),
            },
            MapRefusal::LastNode { node: node() },
            MapRefusal::NodeServes {
                node: node(),
                socket: "/s".to_owned(),
            },
            MapRefusal::NodeInUse {
                node: node(),
                pool: "p".to_owned(),
            },
            MapRefusal::GroupNeedsNode {
                node: node(),
                group: NamespaceGroupId(1),
            },
            MapRefusal::TooFewLeft {
                node: node(),
                pool: "p".to_owned(),
                possible: 2,
                replicas: 3,
                apart: "node".to_owned(),
            },
            MapRefusal::DevicePathTaken {
                path: "/dev/x".to_owned(),
                node: node(),
                device: DeviceId(4),
            },
        ];
        let refusals = refusals.into_iter();
        refusals.map(Refusal::from).collect()
    }

    fn all(node: &NamedNode) -> impl Iterator<Item = Refusal> {
        let volumes = volumes_and_leases(node).into_iter();
        volumes.chain(leases(node)).chain(nodes(node))
    }

    #[test]
    fn refusals_are_read_as_they_were_written_with_a_name_or_a_number() {
        for node in [NamedNode::from(NodeId(2)), NamedNode::from("two")] {
            for refusal in all(&node) {
                let written = serde_json::to_string(&refusal).unwrap();
                assert_eq!(serde_json::from_str::<Refusal>(&written).unwrap(), refusal);
            }
        }
    }
}
