//! The layers of all volumes and who may write them, as the data path asks for them: replicas refuse requests
//! for any other layer, and changes by any other node.
//!
//! A snapshot in memory, shared, that never changes, as of the cluster map ([`crate::map`]). Layers and
//! leases come and go without a new map, so they have a snapshot of their own.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::{Generation, LayerId, NodeId, VolumeId};
use crate::model::{Lease, Volume};
use crate::state::tables::{LEASES, VOLUMES};
use crate::state::{Read, ReadError, Writes};

/// A layer and its newest lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerLease {
    /// The layer.
    pub layer: LayerId,
    /// Node that may write it. `None` for a layer whose lease was released or never granted, and for a sealed
    /// one.
    pub holder: Option<NodeId>,
    /// Number of grants so far.
    pub generation: Generation,
}

/// Holder and generation of a lease.
type Held = (Option<NodeId>, Generation);

/// The layers that there are, those of volumes that are being deleted among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layers {
    /// By the volume's name, as the records.
    by_volume: BTreeMap<Arc<str>, (VolumeId, Arc<[LayerId]>)>,
    leases: BTreeMap<VolumeId, Held>,
}

impl Layers {
    /// All of them, in no order.
    pub fn iter(&self) -> impl Iterator<Item = LayerLease> {
        self.by_volume.values().flat_map(|(volume, layers)| {
            let held = self.leases.get(volume).copied().unwrap_or_default();
            layers.iter().enumerate().map(move |(nth, layer)| {
                // Writes go to the first layer alone.
                let (holder, generation) = if nth == 0 { held } else { Held::default() };
                LayerLease {
                    layer: *layer,
                    holder,
                    generation,
                }
            })
        })
    }

    /// The layers that these records hold.
    pub(crate) fn load(view: &dyn Read) -> Result<Self, ReadError> {
        let mut layers = Self::default();
        for volume in VOLUMES.all(view)? {
            layers.take(&volume);
        }
        for lease in LEASES.all(view)? {
            layers.take_lease(&lease);
        }
        Ok(layers)
    }

    /// The layers after these writes; nothing if the writes change none.
    pub(crate) fn with(&self, writes: &Writes) -> Result<Option<Self>, ReadError> {
        let mut changed = None;
        for (key, value) in writes {
            let Some((&table, rest)) = key.split_first() else {
                continue;
            };
            if table != VOLUMES.prefix() && table != LEASES.prefix() {
                continue;
            }
            let layers = changed.get_or_insert_with(|| self.clone());
            match value {
                Some(value) if table == VOLUMES.prefix() => {
                    layers.take(&VOLUMES.decode(key, value)?);
                }
                Some(value) => layers.take_lease(&LEASES.decode(key, value)?),
                None if table == VOLUMES.prefix() => {
                    layers.by_volume.retain(|known, _| known.as_bytes() != rest);
                }
                None => layers
                    .leases
                    .retain(|known, _| known.0.to_be_bytes() != *rest),
            }
        }
        Ok(changed.filter(|changed| changed != self))
    }

    fn take(&mut self, volume: &Volume) {
        let (name, layers): (&str, _) = (&volume.name, volume.layers.as_slice());
        self.by_volume
            .insert(name.into(), (volume.id, layers.into()));
    }

    fn take_lease(&mut self, lease: &Lease) {
        let held = (lease.holder, lease.generation);
        self.leases.insert(lease.volume, held);
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
        let layers = machine.layers();
        let mut layers: Vec<_> = layers.iter().map(|known| known.layer).collect();
        layers.sort_unstable();
        layers
    }

    fn lease(machine: &Machine) -> (Option<NodeId>, u64) {
        assert_eq!(*machine.layers(), machine.reloaded_layers());
        let layers = machine.layers();
        let [known] = layers.iter().collect::<Vec<_>>()[..] else {
            panic!("{layers:?}");
        };
        (known.holder, known.generation.0)
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

    #[test]
    fn each_layer_is_known_with_its_newest_lease() {
        let mut machine = machine();
        let web = create(&mut machine, "web");
        assert_eq!(lease(&machine), (None, 0));
        let grant = Command::GrantLease {
            volume: "web".to_owned(),
            node: NodeId(1),
            expired: None,
            at: AT,
        };
        for generation in 1..=2 {
            machine.apply(&grant).unwrap();
            assert_eq!(lease(&machine), (Some(NodeId(1)), generation));
        }
        let release = Command::ReleaseLease {
            volume: web.id,
            node: NodeId(1),
            generation: Generation(2),
        };
        machine.apply(&release).unwrap();
        assert_eq!(lease(&machine), (None, 2));
        let delete = Command::DeleteVolume {
            name: "web".to_owned(),
        };
        machine.apply(&delete).unwrap();
        dropped(&mut machine, web.id);
        assert_eq!(known(&machine), []);
        let anew = create(&mut machine, "web");
        assert_ne!(anew.layers, web.layers);
        assert_eq!(lease(&machine), (None, 0), "it goes with its volume");
    }
}
