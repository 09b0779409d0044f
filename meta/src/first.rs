//! A node that was alone becomes the first of a cluster: its metadata get the address by which others reach
//! it. What they say of volumes, devices and filesystems stays as it is.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use fabric_types::ids::ChunkKey;
use fabric_types::{PgId, placement};
use uuid::Uuid;

use crate::command::Command;
use crate::error::OpenError;
use crate::ids::{DeviceId, Epoch, NodeId, UnixMillis};
use crate::map::ClusterMap;
use crate::model::{Device, PlacementGroup};
use crate::recovery::{RecoveryError, groups_voted_in, open};
use crate::state::settle;
use crate::state::tables::DEVICES;
use crate::storage::{Db, DbError};

/// What a node has that is alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alone {
    /// The cluster that it is. It keeps this identity.
    pub cluster: Uuid,
    /// The node.
    pub node: NodeId,
    /// The history of its metadata, after a recovery.
    pub history: Option<Uuid>,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// What the node has whose metadata are in `dir`; nothing if there are none. Changes nothing.
///
/// # Errors
/// They are in use or damaged, or those of a node of a cluster of several.
pub fn look(dir: &Path) -> Result<Option<Alone>, RecoveryError> {
    if !Db::exists(dir) {
        return Ok(None);
    }
    let db = open(dir)?;
    let Some(identity) = db.identity()? else {
        // Its first start was cut short before anything was in them.
        return Ok(None);
    };
    let mut members = db.group.members()?.into_iter();
    if members.any(|(node, address)| node != identity.node || !address.is_empty()) {
        let (dir, found) = (dir.to_owned(), identity.node);
        return Err(OpenError::OneOfSeveral { dir, found }.into());
    }
    refuse_unapplied((&db, dir))?;
    Ok(Some(Alone {
        cluster: identity.cluster,
        node: identity.node,
        history: identity.history,
        devices: db.read(|view| Ok::<_, DbError>(DEVICES.all(view)?))?,
    }))
}

/// Where a node that was alone is to have its data as the first of a cluster: each chunk on the device of its
/// placement group.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Its devices.
    pub devices: Vec<Device>,
    /// Epoch of the map.
    pub epoch: Epoch,
    /// Groups of each pool.
    pools: HashMap<u32, u32>,
    /// The device of each group.
    homes: HashMap<PgId, DeviceId>,
}

impl Layout {
    /// The layout that a node which is alone is to have, by the metadata in `dir`, and whether it is alone
    /// still. Changes nothing.
    ///
    /// # Errors
    /// There are none, they are in use or damaged.
    pub fn read(dir: &Path) -> Result<(Self, bool), RecoveryError> {
        let db = open(dir)?;
        let identity = db.identity()?.ok_or_else(|| RecoveryError::NoMetadata {
            dir: dir.to_owned(),
        })?;
        let is_alone = db.group.members()? == alone(identity.node);
        if is_alone {
            refuse_unapplied((&db, dir))?;
        }
        let map = db.read(|view| Ok::<_, DbError>(ClusterMap::load(view)?))?;
        Ok((Self::planned(&map, identity.node), is_alone))
    }

    /// The same by a map of the node while it is alone.
    pub(crate) fn planned(map: &ClusterMap, node: NodeId) -> Self {
        Self::by(map, node, settle::home)
    }

    /// Where the data are, by a map of the node as one of several: each group on the device that is in sync.
    #[must_use]
    pub fn of(map: &ClusterMap, node: NodeId) -> Self {
        Self::by(map, node, settle::in_sync)
    }

    fn by(
        map: &ClusterMap,
        node: NodeId,
        home: fn(&PlacementGroup, &[Device]) -> Option<DeviceId>,
    ) -> Self {
        let of_node = map.devices().filter(|device| device.node == node);
        let devices: Vec<Device> = of_node.cloned().collect();
        let pools = map.pools().map(|pool| (pool.id.0, pool.placement_groups));
        let home = |group: &Arc<PlacementGroup>| {
            let home = home(group, &devices)?;
            Some((PgId(group.id().to_u64()), home))
        };
        Self {
            epoch: map.epoch(),
            pools: pools.collect(),
            homes: map.groups().filter_map(home).collect(),
            devices,
        }
    }

    /// Identity of the device that a chunk belongs on; nothing for one of a pool that does not exist.
    #[must_use]
    pub fn device_of(&self, chunk: ChunkKey) -> Option<[u8; 16]> {
        let groups = self.pools.get(&placement::pool_of(chunk.layer))?;
        let home = self.homes.get(&placement::pg_of(chunk, *groups))?;
        let device = self.devices.iter().find(|device| device.id == *home)?;
        Some(*device.uuid.as_bytes())
    }

    /// The groups on a device.
    pub fn groups_on(&self, device: &[u8; 16]) -> impl Iterator<Item = PgId> {
        let mut known = self.devices.iter();
        let found = known.find(|known| known.uuid.as_bytes() == device);
        let id = found.map(|device| device.id);
        let homes = self.homes.iter();
        homes.filter_map(move |(group, home)| (Some(*home) == id).then_some(*group))
    }
}

/// Refuses records that lag behind the log, as they may after a loss of power: what they say of devices and
/// groups is not what the next start makes of them.
fn refuse_unapplied((db, dir): (&Db, &Path)) -> Result<(), OpenError> {
    let corrupt = corrupt(dir);
    let applied = db.read(|view| view.applied()).map_err(corrupt)?.last;
    match db.group.last_entry().map_err(corrupt)? > applied {
        true => Err(OpenError::Unapplied {
            dir: dir.to_owned(),
        }),
        false => Ok(()),
    }
}

fn corrupt(dir: &Path) -> impl Fn(DbError) -> OpenError + Copy {
    |error| OpenError::Corrupt {
        dir: dir.to_owned(),
        detail: error.to_string(),
    }
}

fn alone(node: NodeId) -> BTreeMap<NodeId, String> {
    BTreeMap::from([(node, String::new())])
}

/// Gives a node that was alone the address by which others reach it; nothing happens to others. For a start
/// of the first node of a cluster, before its groups run. A crash may come at any time: the next start does
/// what is left. `is_spread`: each chunk is on the device that [`Layout`] says.
///
/// # Errors
/// The node has several devices, and its data are not spread over them.
pub(crate) fn give_address(
    (db, dir): (&Db, &Path),
    node: NodeId,
    address: &str,
    is_spread: bool,
) -> Result<(), OpenError> {
    let corrupt = corrupt(dir);
    if db.group.members().map_err(corrupt)? != alone(node) {
        return Ok(());
    }
    refuse_unapplied((db, dir))?;
    let devices = db.read(|view| Ok::<_, DbError>(DEVICES.all(view)?));
    let devices = devices.map_err(corrupt)?.len();
    if devices > 1 && !is_spread {
        let dir = dir.to_owned();
        return Err(OpenError::NotSpread { dir, devices });
    }
    let settles = (devices > 1).then(|| Command::SettleGroups {
        node,
        at: UnixMillis::now(),
    });
    // The metadata's own group last: it says whether all of it is done.
    let give = || {
        for (_, group) in groups_voted_in(db, node)? {
            group.go_on_alone(node, address, None)?;
            group.flush_wal()?;
        }
        db.group.go_on_alone(node, address, settles)?;
        db.group.flush_wal()
    };
    give().map_err(corrupt)
}
