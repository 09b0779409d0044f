//! The layers that leases and attachments open to nodes that may not access all layers.
//!
//! An open layer may be read. Changing it requires its lease, which replicas check by [`crate::layers`].

use std::collections::{BTreeMap, BTreeSet};

use namespace::FilesystemId;

use crate::ids::{LayerId, NodeId, VolumeId};
use crate::model::AttachmentTarget;
use crate::state::tables::{ATTACHMENTS, FILESYSTEM_ATTACHMENTS, LEASES, VOLUMES};
use crate::state::{Read, ReadError};

/// The open layers of each node.
pub type OpenLayers = BTreeMap<NodeId, BTreeSet<LayerId>>;

/// Returns the layers that these records open to these nodes:
/// - layers of a volume: to the holder of its lease, and to nodes with an attachment that serves it. An
///   incoming attachment opens nothing before its takeover, which grants the lease;
/// - layers of all segments of a filesystem: to nodes with an attachment of the filesystem.
pub(crate) fn open_layers(
    view: &dyn Read,
    nodes: &BTreeSet<NodeId>,
) -> Result<OpenLayers, ReadError> {
    let opened = opened_volumes(view, nodes)?;
    let mut mounted: BTreeMap<FilesystemId, BTreeSet<NodeId>> = BTreeMap::new();
    for mount in FILESYSTEM_ATTACHMENTS.all(view)? {
        if nodes.contains(&mount.node) {
            let on = mounted.entry(mount.filesystem).or_default();
            on.insert(mount.node);
        }
    }
    let mut layers = OpenLayers::new();
    for volume in VOLUMES.all(view)? {
        let mut to = opened.get(&volume.id).cloned().unwrap_or_default();
        // Any file of a filesystem may lie in any of its segments.
        let of = volume.segment.and_then(|of| mounted.get(&of.filesystem));
        to.extend(of.into_iter().flatten());
        for node in to {
            let open = layers.entry(node).or_default();
            open.extend(volume.layers.iter().copied());
        }
    }
    Ok(layers)
}

fn opened_volumes(
    view: &dyn Read,
    nodes: &BTreeSet<NodeId>,
) -> Result<BTreeMap<VolumeId, BTreeSet<NodeId>>, ReadError> {
    let leases = LEASES.all(view)?.into_iter();
    let leases = leases.filter_map(|lease| Some((lease.volume, lease.holder?)));
    let attachments = ATTACHMENTS.all(view)?.into_iter();
    let serving = attachments.filter(|attachment| attachment.options.incoming.is_none());
    let serving = serving.map(|attachment| {
        let AttachmentTarget::Volume { id, .. } = attachment.target;
        (id, attachment.node)
    });
    let mut opened: BTreeMap<VolumeId, BTreeSet<NodeId>> = BTreeMap::new();
    for (volume, node) in leases.chain(serving) {
        if nodes.contains(&node) {
            opened.entry(volume).or_default().insert(node);
        }
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::command::{AttachmentSpec, Command, DeviceSpec, NodeSpec, Outcome, VolumeSpec};
    use crate::ids::{Incarnation, UnixMillis};
    use crate::model::{Attachment, AttachmentOptions, Incoming, Volume};
    use crate::state::{Txn, Writes, apply};

    const AT: UnixMillis = UnixMillis(0);
    const HOST: NodeId = NodeId(2);

    #[derive(Default)]
    struct Records(BTreeMap<Vec<u8>, Vec<u8>>);

    impl Records {
        fn take(&mut self, writes: Writes) {
            for (key, value) in writes {
                match value {
                    Some(value) => self.0.insert(key, value),
                    None => self.0.remove(&key),
                };
            }
        }

        fn run(&mut self, command: &Command) -> Outcome {
            let mut txn = Txn::over(&self.0);
            let reply = apply(&mut txn, command).unwrap();
            let writes = txn.into_writes();
            self.take(writes);
            reply.unwrap()
        }

        fn set_incoming(&mut self, attachment: &Attachment, incoming: Option<Incoming>) {
            let options = AttachmentOptions {
                incoming,
                ..attachment.options.clone()
            };
            let changed = Attachment {
                options,
                ..attachment.clone()
            };
            let mut txn = Txn::over(&self.0);
            ATTACHMENTS.put(&mut txn, &attachment.id, &changed);
            let writes = txn.into_writes();
            self.take(writes);
        }

        fn open(&self) -> BTreeSet<LayerId> {
            let mut open = open_layers(&self.0, &[HOST].into()).unwrap();
            open.remove(&HOST).unwrap_or_default()
        }
    }

    /// Returns records with two nodes and a volume that no node uses.
    fn records() -> (Records, Volume) {
        let node = |id| NodeSpec {
            incarnation: Incarnation(10),
            ..NodeSpec::new(NodeId(id), format!("n{id}"))
        };
        let device = DeviceSpec {
            uuid: Uuid::from_u128(1),
            node: NodeId(1),
            path: "/dev/x".to_owned(),
            size_bytes: 1 << 40,
            class: "ssd".to_owned(),
        };
        let mut records = Records::default();
        for command in [
            Command::Bootstrap {
                cluster: Uuid::from_u128(1),
                node: node(1),
                pool: None,
                at: AT,
            },
            Command::RegisterNode {
                node: node(HOST.0),
                replaces: Incarnation(0),
                at: AT,
            },
            Command::RegisterDevice {
                device,
                incarnation: Incarnation(10),
                at: AT,
            },
        ] {
            records.run(&command);
        }
        let create = Command::CreateVolume {
            uuid: Uuid::from_u128(2),
            volume: VolumeSpec::new("web", 1 << 30),
            at: AT,
        };
        match records.run(&create) {
            Outcome::Volume(volume) => (records, volume),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn incoming_attachment_opens_nothing_before_its_takeover() {
        let (mut records, volume) = records();
        let attach = Command::CreateAttachment {
            attachment: AttachmentSpec {
                volume: "web".to_owned(),
                node: HOST,
                socket: "/run/web.sock".to_owned(),
                queues: 1,
                read_only: false,
                options: AttachmentOptions::default(),
            },
            at: AT,
        };
        let Outcome::Attachment(attachment) = records.run(&attach) else {
            panic!("no attachment");
        };
        for incoming in [Incoming::Guest, Incoming::Move] {
            records.set_incoming(&attachment, Some(incoming));
            assert_eq!(records.open(), BTreeSet::new(), "{incoming:?}");
        }
        records.set_incoming(&attachment, None);
        assert_eq!(records.open(), BTreeSet::from([volume.top_layer()]));
    }

    #[test]
    fn lease_opens_the_layers_of_its_volume_only_to_its_holder() {
        let (mut records, volume) = records();
        let grant = |node| Command::GrantLease {
            volume: "web".to_owned(),
            node,
            expired: None,
            at: AT,
        };
        let Outcome::Lease(lease) = records.run(&grant(HOST)) else {
            panic!("no lease");
        };
        assert_eq!(records.open(), BTreeSet::from([volume.top_layer()]));
        records.run(&Command::ReleaseLease {
            volume: volume.id,
            node: HOST,
            generation: lease.generation,
        });
        assert_eq!(records.open(), BTreeSet::new());
        records.run(&grant(NodeId(1)));
        assert_eq!(records.open(), BTreeSet::new());
    }
}
