//! Layers of all volumes, and which node may write them. Replicas refuse requests for any other layer, and
//! changes by any other node.
//!
//! Layers and leases come and go without a new cluster map, so they are followed apart from it. Any host can
//! have its own leases granted again and again. So one lease that changes costs no more than that: it changes
//! one entry here, and is passed on alone. Only a change of the layers themselves is passed on as a whole.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::ids::{Generation, LayerId, NodeId, VolumeId};
use crate::model::{Lease, Volume};
use crate::state::tables::{LEASES, VOLUMES};
use crate::state::{Read, ReadError, Writes};

/// A layer and its newest lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerLease {
    /// The layer.
    pub layer: LayerId,
    /// Node that may write the layer. `None` for a layer whose lease was released or never granted, and for a
    /// sealed layer.
    pub holder: Option<NodeId>,
    /// Number of grants so far.
    pub generation: Generation,
}

/// Holder and generation of a lease.
type Held = (Option<NodeId>, Generation);

/// Number of changes so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayersRevision(u64);

/// Changes since a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerChanges {
    /// All layers, in no order: some were created or removed.
    All(Vec<LayerLease>),
    /// Layers whose lease changed, in the order of the last changes.
    Leases(Vec<LayerLease>),
}

/// All existing layers, including those of volumes that are being deleted.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// By the volume's name, as the records.
    by_volume: BTreeMap<Arc<str>, (VolumeId, Arc<[LayerId]>)>,
    /// Layer that writes of each volume go to.
    tops: BTreeMap<VolumeId, LayerId>,
    /// Each lease with the revision of its last change.
    leases: BTreeMap<VolumeId, (Held, LayersRevision)>,
    /// Volumes by the revision in which their lease changed last.
    lease_changes: BTreeMap<LayersRevision, VolumeId>,
    /// Revision of the last change of the layers themselves.
    layers_changed: LayersRevision,
    revision: LayersRevision,
}

/// Changed records of volumes and leases, decoded.
#[derive(Debug, Default)]
pub(crate) struct LayerWrites {
    volumes: Vec<Volume>,
    /// Names.
    removed_volumes: Vec<String>,
    leases: Vec<Lease>,
    removed_leases: Vec<VolumeId>,
}

impl LayerWrites {
    /// Decodes the writes that matter here.
    pub(crate) fn of(writes: &Writes) -> Result<Self, ReadError> {
        let mut found = Self::default();
        for (key, value) in writes {
            let Some((&table, rest)) = key.split_first() else {
                continue;
            };
            if table == VOLUMES.prefix() {
                match value {
                    Some(value) => found.volumes.push(VOLUMES.decode(key, value)?),
                    None => found
                        .removed_volumes
                        .push(String::from_utf8_lossy(rest).into_owned()),
                }
            } else if table == LEASES.prefix() {
                match (value, rest.try_into()) {
                    (Some(value), _) => found.leases.push(LEASES.decode(key, value)?),
                    (None, Ok(id)) => found.removed_leases.push(VolumeId(u64::from_be_bytes(id))),
                    (None, Err(_)) => {}
                }
            }
        }
        Ok(found)
    }
}

impl Layers {
    /// Number of changes so far.
    #[must_use]
    pub fn revision(&self) -> LayersRevision {
        self.revision
    }

    /// Returns all layers, in no order.
    pub fn iter(&self) -> impl Iterator<Item = LayerLease> {
        self.by_volume.values().flat_map(|(volume, layers)| {
            let held = self.held(*volume);
            layers.iter().enumerate().map(move |(nth, layer)| {
                // Writes go to the first layer alone.
                let held = if nth == 0 { held } else { Held::default() };
                layer_lease(*layer, held)
            })
        })
    }

    /// Returns what changed since a revision; everything if there is none. The work grows with the number of
    /// leases that changed, unless layers were created or removed.
    #[must_use]
    pub fn since(&self, revision: Option<LayersRevision>) -> LayerChanges {
        let Some(revision) = revision.filter(|known| *known >= self.layers_changed) else {
            return LayerChanges::All(self.iter().collect());
        };
        let later = (Bound::Excluded(revision), Bound::Unbounded);
        let changed = self.lease_changes.range(later);
        let changed = changed.filter_map(|(_, volume)| {
            let layer = self.tops.get(volume)?;
            Some(layer_lease(*layer, self.held(*volume)))
        });
        LayerChanges::Leases(changed.collect())
    }

    /// Reads the layers that these records hold.
    pub(crate) fn load(view: &dyn Read) -> Result<Self, ReadError> {
        let mut layers = Self::default();
        layers.apply(&LayerWrites {
            volumes: VOLUMES.all(view)?,
            leases: LEASES.all(view)?,
            ..LayerWrites::default()
        });
        Ok(layers)
    }

    /// Takes over changed records. Returns whether that changes anything.
    pub(crate) fn apply(&mut self, writes: &LayerWrites) -> bool {
        let before = self.revision;
        let mut is_changed = false;
        for name in &writes.removed_volumes {
            is_changed |= self.by_volume.remove(name.as_str()).is_some();
        }
        for volume in &writes.volumes {
            is_changed |= self.take(volume);
        }
        for volume in &writes.removed_leases {
            if let Some((_, changed)) = self.leases.remove(volume) {
                self.lease_changes.remove(&changed);
                is_changed = true;
            }
        }
        if is_changed {
            self.revision.0 += 1;
            self.layers_changed = self.revision;
            let volumes = self.by_volume.values();
            let tops = volumes.filter_map(|(id, layers)| Some((*id, *layers.first()?)));
            self.tops = tops.collect();
        }
        for lease in &writes.leases {
            self.take_lease(lease);
        }
        self.revision != before
    }

    /// Replaces all layers. Whoever follows them gets all of them.
    pub(crate) fn replace(&mut self, by: Self) {
        let revision = self.revision;
        *self = by;
        // Revisions are never used twice.
        self.revision = LayersRevision(revision.0 + self.revision.0 + 1);
        self.layers_changed = self.revision;
    }

    fn held(&self, volume: VolumeId) -> Held {
        let lease = self.leases.get(&volume);
        lease.map(|(held, _)| *held).unwrap_or_default()
    }

    /// Returns whether the layers of a volume are others now.
    fn take(&mut self, volume: &Volume) -> bool {
        let (name, layers): (&str, _) = (&volume.name, volume.layers.as_slice());
        let known = self.by_volume.get(name);
        if known.is_some_and(|(id, known)| (*id, &known[..]) == (volume.id, layers)) {
            return false;
        }
        self.by_volume
            .insert(name.into(), (volume.id, layers.into()));
        true
    }

    fn take_lease(&mut self, lease: &Lease) {
        let held = (lease.holder, lease.generation);
        let known = self.leases.get(&lease.volume);
        if known.is_some_and(|(known, _)| *known == held) {
            return;
        }
        self.revision.0 += 1;
        let former = self.leases.insert(lease.volume, (held, self.revision));
        if let Some((_, changed)) = former {
            self.lease_changes.remove(&changed);
        }
        self.lease_changes.insert(self.revision, lease.volume);
    }
}

fn layer_lease(layer: LayerId, (holder, generation): Held) -> LayerLease {
    LayerLease {
        layer,
        holder,
        generation,
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

    /// All layers, which are those of the records.
    fn all(machine: &Machine) -> Vec<LayerLease> {
        let sorted = |layers: &Layers| {
            let mut all: Vec<_> = layers.iter().collect();
            all.sort_unstable();
            all
        };
        let all = sorted(machine.layers());
        assert_eq!(all, sorted(&machine.reloaded_layers()));
        all
    }

    fn known(machine: &Machine) -> Vec<LayerId> {
        let layers = all(machine);
        let mut layers: Vec<_> = layers.iter().map(|known| known.layer).collect();
        layers.sort_unstable();
        layers
    }

    fn lease(machine: &Machine) -> (Option<NodeId>, u64) {
        let layers = all(machine);
        let [known] = layers[..] else {
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
        let before = machine.layers().revision();
        let resize = Command::ResizeVolume {
            name: "web".to_owned(),
            size_bytes: 2 << 30,
            allow_shrink: false,
        };
        machine.apply(&resize).unwrap();
        assert_eq!(machine.layers().revision(), before, "nothing to tell");
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
        assert_eq!(lease(&machine), (None, 0), "deleted with its volume");
    }

    fn grant(volume: &str) -> Command {
        Command::GrantLease {
            volume: volume.to_owned(),
            node: NodeId(1),
            expired: None,
            at: AT,
        }
    }

    #[test]
    fn a_lease_that_changes_is_passed_on_alone() {
        let mut machine = machine();
        let web = create(&mut machine, "web");
        for number in 0..100 {
            create(&mut machine, &format!("disk{number}"));
        }
        let all = machine.layers().since(None);
        assert!(
            matches!(&all, LayerChanges::All(all) if all.len() == 101),
            "{all:?}"
        );
        let start = machine.layers().revision();
        let nothing = LayerChanges::Leases(Vec::new());
        assert_eq!(machine.layers().since(Some(start)), nothing);
        let held = |generation| LayerLease {
            layer: web.layers[0],
            holder: Some(NodeId(1)),
            generation: Generation(generation),
        };
        // A host has it granted again and again.
        for generation in 1..=1000 {
            let before = machine.layers().revision();
            machine.apply(&grant("web")).unwrap();
            let changed = LayerChanges::Leases(vec![held(generation)]);
            assert_eq!(machine.layers().since(Some(before)), changed);
            assert_eq!(
                machine.layers().since(Some(start)),
                changed,
                "the last of them"
            );
        }
        machine.apply(&grant("disk7")).unwrap();
        let changed = machine.layers().since(Some(start));
        let [first, second] = match &changed {
            LayerChanges::Leases(changed) => [changed[0], changed[1]],
            LayerChanges::All(_) => panic!("{changed:?}"),
        };
        assert_eq!((first, second.generation), (held(1000), Generation(1)));
        create(&mut machine, "another");
        let changed = machine.layers().since(Some(start));
        assert!(matches!(&changed, LayerChanges::All(all) if all.contains(&held(1000))));
    }

    #[test]
    fn layers_that_are_replaced_are_passed_on_as_a_whole() {
        let mut machine = machine();
        create(&mut machine, "web");
        machine.apply(&grant("web")).unwrap();
        let mut layers = machine.layers().clone();
        let before = layers.revision();
        layers.replace(machine.reloaded_layers());
        let all = layers.since(Some(before));
        assert!(matches!(all, LayerChanges::All(_)), "{all:?}");
        let nothing = LayerChanges::Leases(Vec::new());
        assert_eq!(layers.since(Some(layers.revision())), nothing);
    }
}
