//! Typed calls for the daemon.
//!
//! Every call works on every node: writes go to the leader, and reads see everything that was acknowledged before they
//! began.

use std::sync::Arc;

use uuid::Uuid;

use crate::command::{
    AttachmentKey, AttachmentSpec, Command, DeviceSpec, NodeSpec, Outcome, PoolSpec, VolumeSpec,
};
use crate::error::MetaError;
use crate::ids::{AttachmentId, DeviceId, Generation, NodeId, UnixMillis, VolumeId};
use crate::model::{
    Attachment, Cluster, Device, DeviceState, Lease, Node, PlacementGroup, Pool, Volume,
    VolumeState,
};
use crate::node::Core;
use crate::refusal::{MapRefusal, PoolRefusal, Refusal, VolumeRefusal};
use crate::state::tables::{
    ATTACHMENTS, CLUSTER, DEVICES, LEASES, NODES, PLACEMENT_GROUPS, POOLS, VOLUMES,
};

/// A client of the metadata service. Cheap to clone.
#[derive(Clone)]
pub struct Meta {
    core: Arc<Core>,
}

macro_rules! outcomes {
    ($($function:ident: $variant:ident -> $type:ty;)*) => {$(
        fn $function(outcome: Outcome) -> Result<$type, MetaError> {
            match outcome {
                Outcome::$variant(value) => Ok(value),
                other => Err(unexpected(&other)),
            }
        }
    )*};
}

outcomes! {
    a_node: Node -> Node;
    a_device: Device -> Device;
    a_pool: Pool -> Pool;
    a_volume: Volume -> Volume;
    a_lease: Lease -> Lease;
    an_attachment: Attachment -> Attachment;
}

/// The leader runs another version that answers differently.
fn unexpected(outcome: &Outcome) -> MetaError {
    let detail =
        format!("the leader gave an answer that this version does not understand: {outcome:?}");
    MetaError::Failed { detail }
}

impl Meta {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    pub(crate) async fn propose(&self, command: Command) -> Result<Outcome, MetaError> {
        Ok(self.core.propose(command).await??)
    }

    /// Why this node's service is not as it should be, in one line with the mend; `None` if it is well.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.core.problem()
    }

    // --- Cluster, nodes, devices

    /// The cluster.
    ///
    /// # Errors
    /// See [`MetaError`]; so for every call.
    pub async fn cluster(&self) -> Result<Cluster, MetaError> {
        let cluster = self.core.read(|view| CLUSTER.get(view, &())).await?;
        Ok(cluster.ok_or(Refusal::from(MapRefusal::NoCluster))?)
    }

    /// Adds a node to the map, or changes its name and roles.
    pub async fn register_node(&self, node: NodeSpec) -> Result<Node, MetaError> {
        a_node(
            self.propose(Command::RegisterNode {
                node,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// All nodes.
    pub async fn list_nodes(&self) -> Result<Vec<Node>, MetaError> {
        self.core.read(|view| NODES.all(view)).await
    }

    /// Adds a device, or says that it is back, maybe at another path or with another size.
    pub async fn register_device(&self, device: DeviceSpec) -> Result<Device, MetaError> {
        a_device(
            self.propose(Command::RegisterDevice {
                device,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Says whether a device can hold data.
    pub async fn set_device_state(
        &self,
        device: DeviceId,
        state: DeviceState,
    ) -> Result<Device, MetaError> {
        a_device(
            self.propose(Command::SetDeviceState { device, state })
                .await?,
        )
    }

    /// Forgets a device that holds no data of volumes.
    pub async fn remove_device(&self, device: DeviceId) -> Result<Device, MetaError> {
        a_device(self.propose(Command::RemoveDevice { device }).await?)
    }

    /// All devices.
    pub async fn list_devices(&self) -> Result<Vec<Device>, MetaError> {
        self.core.read(|view| DEVICES.all(view)).await
    }

    // --- Pools

    /// Makes a pool.
    pub async fn create_pool(&self, pool: PoolSpec) -> Result<Pool, MetaError> {
        a_pool(
            self.propose(Command::CreatePool {
                pool,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Forgets a pool without volumes.
    pub async fn delete_pool(&self, name: &str) -> Result<Pool, MetaError> {
        a_pool(
            self.propose(Command::DeletePool {
                name: name.to_owned(),
            })
            .await?,
        )
    }

    /// The pool of this name.
    pub async fn get_pool(&self, name: &str) -> Result<Pool, MetaError> {
        let pool = self.core.read(|view| POOLS.get(view, name)).await?;
        Ok(pool.ok_or_else(|| {
            Refusal::from(PoolRefusal::Unknown {
                name: name.to_owned(),
            })
        })?)
    }

    /// All pools, by name.
    pub async fn list_pools(&self) -> Result<Vec<Pool>, MetaError> {
        self.core.read(|view| POOLS.all(view)).await
    }

    /// The placement groups of a pool, by index.
    pub async fn list_placement_groups(
        &self,
        pool: &str,
    ) -> Result<Vec<PlacementGroup>, MetaError> {
        let groups = self.core.read(|view| match POOLS.get(view, pool)? {
            Some(pool) => PLACEMENT_GROUPS.all_below(view, &pool.id).map(Some),
            None => Ok(None),
        });
        Ok(groups.await?.ok_or_else(|| {
            Refusal::from(PoolRefusal::Unknown {
                name: pool.to_owned(),
            })
        })?)
    }

    // --- Volumes

    /// Makes a volume.
    pub async fn create_volume(&self, volume: VolumeSpec) -> Result<Volume, MetaError> {
        let (uuid, at) = (Uuid::new_v4(), UnixMillis::now());
        a_volume(
            self.propose(Command::CreateVolume { uuid, volume, at })
                .await?,
        )
    }

    /// The volume of this name.
    pub async fn get_volume(&self, name: &str) -> Result<Volume, MetaError> {
        let volume = self.core.read(|view| VOLUMES.get(view, name)).await?;
        Ok(volume.ok_or_else(|| {
            Refusal::from(VolumeRefusal::Unknown {
                name: name.to_owned(),
            })
        })?)
    }

    /// All volumes, by name, also those being deleted.
    pub async fn list_volumes(&self) -> Result<Vec<Volume>, MetaError> {
        self.core.read(|view| VOLUMES.all(view)).await
    }

    /// Changes a volume's size. A smaller one needs `allow_shrink` and no attachment, and loses the data beyond: then
    /// the result has `stale_tail_end_bytes`, and the caller discards from `size_bytes` up to there in all layers and
    /// calls [`Meta::volume_tail_dropped`].
    pub async fn resize_volume(
        &self,
        name: &str,
        size_bytes: u64,
        allow_shrink: bool,
    ) -> Result<Volume, MetaError> {
        let name = name.to_owned();
        a_volume(
            self.propose(Command::ResizeVolume {
                name,
                size_bytes,
                allow_shrink,
            })
            .await?,
        )
    }

    /// Says that what a shrink cut off is discarded: the volume may grow again.
    pub async fn volume_tail_dropped(&self, volume: VolumeId) -> Result<Volume, MetaError> {
        a_volume(self.propose(Command::VolumeTailDropped { volume }).await?)
    }

    /// First step of deletion: from now on nobody can attach or write the volume. The caller drops the data of all its
    /// layers and calls [`Meta::volume_data_dropped`]. Repeating it is harmless.
    pub async fn delete_volume(&self, name: &str) -> Result<Volume, MetaError> {
        a_volume(
            self.propose(Command::DeleteVolume {
                name: name.to_owned(),
            })
            .await?,
        )
    }

    /// Second step of deletion: the data are gone, and the name is free again. Repeating it is harmless.
    pub async fn volume_data_dropped(&self, volume: VolumeId) -> Result<(), MetaError> {
        self.propose(Command::VolumeDataDropped { volume })
            .await
            .map(|_| ())
    }

    /// Gives volume `from` the name `to` in one step. A volume that has that name takes the name `from` and begins to be
    /// deleted, as by [`Meta::delete_volume`]. Neither may be attached.
    pub async fn promote_volume(&self, from: &str, to: &str) -> Result<Volume, MetaError> {
        let (from, to) = (from.to_owned(), to.to_owned());
        a_volume(self.propose(Command::PromoteVolume { from, to }).await?)
    }

    /// What a crash may have interrupted: volumes whose deletion or shrink has begun and whose data are still to be
    /// dropped. For the daemon to finish at start.
    pub async fn list_unfinished_volumes(&self) -> Result<Vec<Volume>, MetaError> {
        let mut volumes = self.list_volumes().await?;
        volumes.retain(|volume| {
            volume.state == VolumeState::Deleting || volume.stale_tail_end_bytes.is_some()
        });
        Ok(volumes)
    }

    // --- Leases

    /// Asks for the right to write a volume. Every grant has a higher generation than all before it, also for the same
    /// node. Holds for [`crate::LEASE_DURATION`], counted from before this call, unless renewed.
    pub async fn grant_lease(&self, volume: &str, node: NodeId) -> Result<Lease, MetaError> {
        let (volume, at) = (volume.to_owned(), UnixMillis::now());
        a_lease(
            self.propose(Command::GrantLease {
                volume,
                node,
                expired: None,
                at,
            })
            .await?,
        )
    }

    /// Renews a lease for [`crate::LEASE_DURATION`], counted from before this call. Refused once another generation was
    /// granted. Costs no write: only the leader's clock learns of it.
    pub async fn renew_lease(
        &self,
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    ) -> Result<Lease, MetaError> {
        a_lease(self.core.renew_lease(volume, node, generation).await??)
    }

    /// Gives a lease back, so that another node need not wait. The generation stays.
    pub async fn release_lease(
        &self,
        volume: VolumeId,
        node: NodeId,
        generation: Generation,
    ) -> Result<Lease, MetaError> {
        a_lease(
            self.propose(Command::ReleaseLease {
                volume,
                node,
                generation,
            })
            .await?,
        )
    }

    /// The lease of a volume, if it was ever granted.
    pub async fn get_lease(&self, volume: VolumeId) -> Result<Option<Lease>, MetaError> {
        self.core.read(|view| LEASES.get(view, &volume)).await
    }

    // --- Attachments

    /// Records that a socket serves a volume. A read-only volume gives a read-only attachment.
    pub async fn create_attachment(
        &self,
        attachment: AttachmentSpec,
    ) -> Result<Attachment, MetaError> {
        an_attachment(
            self.propose(Command::CreateAttachment {
                attachment,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Keeps whether a guest switched the write cache of its disk off.
    pub async fn set_write_through(
        &self,
        attachment: AttachmentId,
        on: bool,
    ) -> Result<Attachment, MetaError> {
        an_attachment(
            self.propose(Command::SetWriteThrough { attachment, on })
                .await?,
        )
    }

    /// Forgets an attachment.
    pub async fn delete_attachment(
        &self,
        attachment: AttachmentKey,
    ) -> Result<Attachment, MetaError> {
        an_attachment(
            self.propose(Command::DeleteAttachment { attachment })
                .await?,
        )
    }

    /// All attachments of all nodes, oldest first.
    pub async fn list_attachments(&self) -> Result<Vec<Attachment>, MetaError> {
        self.core.read(|view| ATTACHMENTS.all(view)).await
    }

    /// The attachments that a node serves, oldest first: what its daemon restores at start.
    pub async fn list_attachments_of(&self, node: NodeId) -> Result<Vec<Attachment>, MetaError> {
        let mut attachments = self.list_attachments().await?;
        attachments.retain(|attachment| attachment.node == node);
        Ok(attachments)
    }
}
