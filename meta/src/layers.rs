//! The layers of all volumes, as the data path asks for them: replicas refuse requests for any other.
//!
//! A snapshot in memory, shared, that never changes, as of the cluster map ([`crate::map`]). Layers come and
//! go without a new map, so they have a snapshot of their own.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::LayerId;
use crate::model::Volume;
use crate::state::tables::VOLUMES;
use crate::state::{Read, ReadError, Writes};

/// The layers that there are, those of volumes that are being deleted among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layers {
    /// By the volume's name, as the records.
    by_volume: BTreeMap<Arc<str>, Arc<[LayerId]>>,
}

impl Layers {
    /// All of them, in no order.
    pub fn iter(&self) -> impl Iterator<Item = LayerId> {
        self.by_volume
            .values()
            .flat_map(|layers| layers.iter().copied())
    }

    /// The layers that these records hold.
    pub(crate) fn load(view: &dyn Read) -> Result<Self, ReadError> {
        let mut layers = Self::default();
        for volume in VOLUMES.all(view)? {
            layers.take(&volume);
        }
        Ok(layers)
    }

    /// The layers after these writes; nothing if the writes change none.
    pub(crate) fn with(&self, writes: &Writes) -> Result<Option<Self>, ReadError> {
        let mut changed = None;
        for (key, value) in writes {
            let Some(name) = key.strip_prefix(&[VOLUMES.prefix()]) else {
                continue;
            };
            let layers = changed.get_or_insert_with(|| self.clone());
            match value {
                Some(value) => layers.take(&VOLUMES.decode(key, value)?),
                None => layers.by_volume.retain(|known, _| known.as_bytes() != name),
            }
        }
        Ok(changed.filter(|changed| changed != self))
    }

    fn take(&mut self, volume: &Volume) {
        let (name, layers): (&str, _) = (&volume.name, volume.layers.as_slice());
        self.by_volume.insert(name.into(), layers.into());
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::command::{Command, DeviceSpec, NodeSpec, VolumeSpec};
    use crate::ids::{Incarnation, NodeId, UnixMillis, VolumeId};
    use crate::model::Volume;
    use crate::testing::Machine;
    use crate::{Outcome, Reply};

    const AT: UnixMillis = UnixMillis(0);

    fn machine() -> Machine {
        let mut machine = Machine::default();
        let bootstrap = Command::Bootstrap {
            cluster: Uuid::from_u128(1),
            node: NodeSpec {
                incarnation: Incarnation(10),
                ..NodeSpec::new(NodeId(1), "n1")
            },
            pool: None,
            at: AT,
        };
        let device = Command::RegisterDevice {
            device: DeviceSpec {
                uuid: Uuid::from_u128(1),
                node: NodeId(1),
                path: "/dev/x".to_owned(),
                size_bytes: 1 << 40,
                class: "ssd".to_owned(),
            },
            incarnation: Incarnation(10),
            at: AT,
        };
        for command in [bootstrap, device] {
            machine.apply(&command).unwrap();
        }
        machine
    }

    fn volume(reply: Reply) -> Volume {
        match reply {
            Ok(Outcome::Volume(volume)) => volume,
            other => panic!("{other:?}"),
        }
    }

    fn create(machine: &mut Machine, name: &str) -> Volume {
        let uuid = Uuid::from_bytes(std::array::from_fn(|at| {
            name.as_bytes().get(at).copied().unwrap_or_default()
        }));
        volume(machine.apply(&Command::CreateVolume {
            uuid,
            volume: VolumeSpec::new(name, 1 << 30),
            at: AT,
        }))
    }

    fn known(machine: &Machine) -> Vec<LayerId> {
        assert_eq!(*machine.layers(), machine.reloaded_layers());
        let mut layers: Vec<_> = machine.layers().iter().collect();
        layers.sort_unstable();
        layers
    }

    fn dropped(machine: &mut Machine, volume: VolumeId) {
        machine
            .apply(&Command::VolumeDataDropped { volume })
            .unwrap();
    }

    #[test]
    fn layers_are_known_from_creation_until_their_data_are_dropped() {
        let mut machine = machine();
        assert_eq!(known(&machine), []);
        let web = create(&mut machine, "web");
        let hidden = create(&mut machine, "hidden");
        let both = vec![web.layers[0], hidden.layers[0]];
        assert_eq!(known(&machine), both);
        let before = machine.layers();
        let resize = Command::ResizeVolume {
            name: "web".to_owned(),
            size_bytes: 2 << 30,
            allow_shrink: false,
        };
        machine.apply(&resize).unwrap();
        assert!(Arc::ptr_eq(&before, &machine.layers()), "nothing to tell");
        // As an import ends: the replaced volume goes under the other one's name.
        let promote = Command::PromoteVolume {
            from: "hidden".to_owned(),
            to: "web".to_owned(),
        };
        machine.apply(&promote).unwrap();
        assert_eq!(known(&machine), both);
        dropped(&mut machine, web.id);
        assert_eq!(known(&machine), [hidden.layers[0]]);
        let delete = Command::DeleteVolume {
            name: "web".to_owned(),
        };
        machine.apply(&delete).unwrap();
        assert_eq!(known(&machine), [hidden.layers[0]], "it has data yet");
        dropped(&mut machine, hidden.id);
        assert_eq!(known(&machine), []);
    }
}
