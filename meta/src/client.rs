//! Typed calls for the daemon.
//!
//! Every call works on every node: writes go to the leader, and reads see everything that was acknowledged
//! before they began.

mod applied;
mod deadline;
mod exports;
mod filesystems;
mod last_known;
mod migration;
mod nodes;
mod recovery;
mod segments;
mod user;

pub use applied::Applied;
pub use last_known::Confirmed;
pub use user::{as_user, caller_uid};

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use uuid::Uuid;

use self::last_known::WithoutLeader;
use crate::command::{
    AttachmentKey, AttachmentSpec, Command, Notice, Outcome, PoolSpec, VolumeSpec,
};
use crate::error::MetaError;
use crate::ids::{
    AttachmentId, DeviceId, Epoch, Generation, Incarnation, NodeId, PoolId, UnixMillis, VolumeId,
};
use crate::layers::Layers;
use crate::map::ClusterMap;
use crate::model::{
    Attachment, Cluster, Device, Event, Export, Filesystem, FilesystemAttachment, GroupId, Lease,
    Node, OnFull, PlacementGroup, Pool, PoolHealth, Volume, VolumeState,
};
use crate::node::Core;
use crate::refusal::{MapRefusal, PoolRefusal, Refusal, VolumeRefusal};
use crate::report::{LeaderReport, NodeReport, RaftStatus};
use crate::state::tables::{
    ATTACHMENTS, CLUSTER, EVENTS, LEASES, PLACEMENT_GROUPS, POOL_HEALTH, POOLS, VOLUMES,
};
use crate::stored::{NodeStored, StoredReport};

/// A client of the metadata service. Cheap to clone.
#[derive(Clone)]
pub struct Meta {
    core: Arc<Core>,
    /// How long the caller waits for a leader, if not as long as a daemon does.
    deadline: Option<Duration>,
    /// Of a client that tells what this node knows when there is no leader.
    last_known: Option<WithoutLeader>,
    /// What it changes is forced.
    is_forced: bool,
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
    an_export: Export -> Export;
    a_filesystem: Filesystem -> Filesystem;
    a_filesystem_attachment: FilesystemAttachment -> FilesystemAttachment;
    a_group: Group -> PlacementGroup;
    an_admission: Admitted -> NodeId;
}

/// The leader runs another version that answers differently.
fn unexpected(outcome: &Outcome) -> MetaError {
    let detail =
        format!("the leader gave an answer that this version does not understand: {outcome:?}");
    MetaError::Failed { detail }
}

impl Meta {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            deadline: None,
            last_known: None,
            is_forced: false,
        }
    }

    /// The node that this client runs on.
    #[must_use]
    pub fn node_id(&self) -> NodeId {
        self.core.id
    }

    /// This start of that node's process.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.core.incarnation
    }

    /// Why this node's service is not as it should be, in one line with a hint; `None` if it is well.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.core.problem()
    }

    /// Returns when this node's service has ended, for whatever reason, or the node was removed from the
    /// cluster; it does not come back within this process.
    pub async fn ended(&self) -> MetaError {
        self.core.ended().await
    }

    // --- How the service stands

    /// How Raft stands, as far as this node knows. Waits for nobody.
    #[must_use]
    pub fn raft_status(&self) -> RaftStatus {
        self.core.raft_status()
    }

    /// Tells the leader how this node is, for people who ask any node.
    pub async fn tell(&self, word: NodeReport) -> Result<(), MetaError> {
        self.core.tell(word).await
    }

    /// What the leader has heard: which nodes when, and what they said of themselves.
    pub async fn leader_report(&self) -> Result<LeaderReport, MetaError> {
        self.core.report().await
    }

    /// Tells the leader what this node has counted of what volumes store.
    pub async fn tell_stored(&self, told: NodeStored) -> Result<(), MetaError> {
        self.core.tell_stored(told).await
    }

    /// How much data volumes hold, by what nodes have told the leader. Nothing is known of a volume that is
    /// not in it and whose pool is neither.
    pub async fn stored(&self) -> Result<StoredReport, MetaError> {
        self.core.stored().await
    }

    // --- Cluster; nodes and devices are in `nodes`

    /// The cluster.
    ///
    /// # Errors
    /// See [`MetaError`]; so for every call.
    pub async fn cluster(&self) -> Result<Cluster, MetaError> {
        let cluster = self.read(|view| CLUSTER.get(view, &())).await?;
        Ok(cluster.ok_or(Refusal::from(MapRefusal::NoCluster))?)
    }

    /// Until when this node may serve: from then on it must not, unless a later heartbeat of it was heard.
    /// Nothing before the first.
    #[must_use]
    pub fn heartbeat_valid_until(&self) -> Option<std::time::Instant> {
        *self.core.valid_until().borrow()
    }

    /// The same, to wait for changes.
    #[must_use]
    pub fn watch_heartbeat(&self) -> watch::Receiver<Option<std::time::Instant>> {
        self.core.valid_until()
    }

    /// The cluster map as this node has applied it, which may be behind: whoever is refused for an old epoch
    /// waits for a newer one with [`Meta::watch_map`].
    #[must_use]
    pub fn map(&self) -> Arc<ClusterMap> {
        Arc::clone(&self.core.map.borrow())
    }

    /// The same, to wait for changes.
    #[must_use]
    pub fn watch_map(&self) -> watch::Receiver<Arc<ClusterMap>> {
        self.core.map.clone()
    }

    /// Layers of all volumes as this node has applied them, which may be behind. Nothing is applied while
    /// they are borrowed.
    #[must_use]
    pub fn watch_layers(&self) -> watch::Receiver<Layers> {
        self.core.layers.clone()
    }

    /// Another number after every change of what [`Applied::open_layers`] tells, to wait for changes.
    #[must_use]
    pub fn watch_openings(&self) -> watch::Receiver<u64> {
        self.core.openings.clone()
    }

    /// What happened after the event `after` (0: from the oldest that is kept), oldest first, at most
    /// `limit`.
    pub async fn list_events(&self, after: u64, limit: usize) -> Result<Vec<Event>, MetaError> {
        self.read(|view| EVENTS.from(view, &after.saturating_add(1), limit))
            .await
    }

    /// Keeps an event of what this node noticed.
    pub async fn note(&self, notice: Notice) -> Result<(), MetaError> {
        let at = UnixMillis::now();
        self.propose(Command::RecordNotice { notice, at })
            .await
            .map(drop)
    }

    // --- Placement groups

    /// Says that a member failed, from a client whose map has the group at `epoch`. Granted, the group as
    /// returned is without it (*shrink before ack*). Waits shortly for a sign of life of another replica in
    /// sync.
    pub async fn report_failed(
        &self,
        group: GroupId,
        device: DeviceId,
        incarnation: Incarnation,
        epoch: Epoch,
    ) -> Result<PlacementGroup, MetaError> {
        a_group(
            self.propose(Command::ReportFailed {
                group,
                device,
                incarnation,
                epoch,
                heard: Vec::new(),
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// Says that a syncing member has compared everything in the round that began at epoch `since`.
    pub async fn promote_member(
        &self,
        group: GroupId,
        device: DeviceId,
        incarnation: Incarnation,
        since: Epoch,
    ) -> Result<PlacementGroup, MetaError> {
        a_group(
            self.propose(Command::Promote {
                group,
                device,
                incarnation,
                since,
                at: UnixMillis::now(),
            })
            .await?,
        )
    }

    /// How the placement groups of a pool are, counted.
    pub async fn pool_health(&self, pool: PoolId) -> Result<PoolHealth, MetaError> {
        let health = self.read(|view| POOL_HEALTH.get(view, &pool)).await?;
        Ok(health.unwrap_or_default())
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

    /// Gives a pool other numbers of replicas, where they are given. Copies are made in the background.
    pub async fn set_pool(
        &self,
        name: &str,
        replicas: Option<u8>,
        min_in_sync: Option<u8>,
    ) -> Result<Pool, MetaError> {
        let name = name.to_owned();
        let set = Command::SetPool {
            name,
            replicas,
            min_in_sync,
        };
        a_pool(self.propose(set).await?)
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
        let pool = self.read(|view| POOLS.get(view, name)).await?;
        Ok(pool.ok_or_else(|| {
            Refusal::from(PoolRefusal::Unknown {
                name: name.to_owned(),
            })
        })?)
    }

    /// All pools, by name.
    pub async fn list_pools(&self) -> Result<Vec<Pool>, MetaError> {
        self.read(|view| POOLS.all(view)).await
    }

    /// The placement groups of a pool, by index.
    pub async fn list_placement_groups(
        &self,
        pool: &str,
    ) -> Result<Vec<PlacementGroup>, MetaError> {
        let groups = self.read(|view| match POOLS.get(view, pool)? {
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
        let volume = self.read(|view| VOLUMES.get(view, name)).await?;
        Ok(volume.ok_or_else(|| {
            Refusal::from(VolumeRefusal::Unknown {
                name: name.to_owned(),
            })
        })?)
    }

    /// All volumes, by name, also those being deleted and those of filesystems' segments
    /// ([`Volume::segment`]).
    pub async fn list_volumes(&self) -> Result<Vec<Volume>, MetaError> {
        self.read(|view| VOLUMES.all(view)).await
    }

    /// Changes a volume's size. A smaller one needs `allow_shrink` and no attachment, and loses the data
    /// beyond: then the result has `stale_tail_end_bytes`, and the caller discards from `size_bytes` up to
    /// there in all layers and calls [`Meta::volume_tail_dropped`].
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

    /// First step of deletion: from now on nobody can attach or write the volume. The caller drops the data
    /// of all its layers and calls [`Meta::volume_data_dropped`]. Repeating it is harmless.
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

    /// Gives volume `from` the name `to` in one step. A volume that has that name takes the name `from` and
    /// begins to be deleted, as by [`Meta::delete_volume`]. Neither may be attached.
    pub async fn promote_volume(&self, from: &str, to: &str) -> Result<Volume, MetaError> {
        let (from, to) = (from.to_owned(), to.to_owned());
        a_volume(self.propose(Command::PromoteVolume { from, to }).await?)
    }

    /// Changes what a volume's writes do for want of space.
    pub async fn set_volume(&self, name: &str, on_full: OnFull) -> Result<Volume, MetaError> {
        let name = name.to_owned();
        a_volume(self.propose(Command::SetVolume { name, on_full }).await?)
    }

    /// Gives a volume that nobody uses a name that no other has.
    pub async fn rename_volume(&self, from: &str, to: &str) -> Result<Volume, MetaError> {
        let (from, to) = (from.to_owned(), to.to_owned());
        a_volume(self.propose(Command::RenameVolume { from, to }).await?)
    }

    /// What a crash may have interrupted: volumes whose deletion or shrink has begun and whose data are still
    /// to be dropped. For the daemon to finish at start.
    pub async fn list_unfinished_volumes(&self) -> Result<Vec<Volume>, MetaError> {
        let mut volumes = self.list_volumes().await?;
        volumes.retain(|volume| {
            volume.state == VolumeState::Deleting || volume.stale_tail_end_bytes.is_some()
        });
        Ok(volumes)
    }

    // --- Leases

    /// Asks for the right to write a volume. Every grant has a higher generation than all before it, also for
    /// the same node. Holds for [`crate::LEASE_DURATION`], counted from before this call, unless renewed.
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

    /// Renews a lease for [`crate::LEASE_DURATION`], counted from before this call. Refused once another
    /// generation was granted. Costs no write: only the leader's clock learns of it.
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
        self.read(|view| LEASES.get(view, &volume)).await
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
        self.read(|view| ATTACHMENTS.all(view)).await
    }

    /// The attachments that a node serves, oldest first: what its daemon restores at start.
    pub async fn list_attachments_of(&self, node: NodeId) -> Result<Vec<Attachment>, MetaError> {
        let mut attachments = self.list_attachments().await?;
        attachments.retain(|attachment| attachment.node == node);
        Ok(attachments)
    }
}
