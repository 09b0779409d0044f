//! Volumes: meta says what there is, storage holds what is in it.

use std::sync::{Arc, OnceLock, Weak};

use api::failure::{Failure, Kind, Result};
use api::types::{Volume, VolumeCreate, VolumeResize, VolumeSet};
use meta::{Confirmed, IMPORT_PREFIX, Meta, OnFull, VolumeSpec};
use service::cluster::Cluster;
use service::failures::{done_unseen, meta_failure};
use service::view::is_listed;

use storage::{Devices, Storage, UsedBytes};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use vhost_backend::blk::SERIAL_BYTES;

use crate::leases::Leases;
use crate::leftovers::Leftovers;
use crate::open::{OpenVolumes, VolumeUsers};

/// The name of an import of this node, which no other node takes for a leftover.
pub fn import_name(node: meta::NodeId) -> String {
    format!("{IMPORT_PREFIX}{node}-{}", uuid::Uuid::new_v4().simple())
}

/// Whether a volume is an import, and maybe one that `node` has to look after.
pub fn is_import_of(name: &str, node: meta::NodeId) -> bool {
    let rest = name.strip_prefix(IMPORT_PREFIX);
    let number = rest.and_then(|rest| rest.split_once('-'));
    number.is_some_and(|(number, _)| number == node.to_string())
}

/// The volumes of the cluster, as people see and change them on this node.
pub struct Volumes {
    pub(crate) cluster: Cluster,
    pub(crate) storage: Arc<Storage>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) used: Arc<UsedBytes>,
    /// Runtime of heartbeats, on which leases are renewed.
    pub(crate) runtime: Handle,
    pub(crate) leases: Arc<Leases>,
    pub(crate) leftovers: Leftovers,
    /// Held from the first check to the last step of each change of volumes or attachments, so that meta and
    /// served volumes never disagree.
    pub(crate) open: Mutex<OpenVolumes>,
    pub(crate) users: OnceLock<Weak<dyn VolumeUsers>>,
}

impl Volumes {
    /// The volumes whose data `storage` reads and writes. Leases are renewed on `runtime`, that of
    /// heartbeats.
    pub fn new(
        cluster: Cluster,
        storage: Arc<Storage>,
        devices: Arc<Devices>,
        used: Arc<UsedBytes>,
        runtime: Handle,
    ) -> Self {
        Self {
            leases: Arc::new(Leases::new(cluster.has_network)),
            cluster,
            storage,
            devices,
            used,
            runtime,
            leftovers: Leftovers::default(),
            open: Mutex::default(),
            users: OnceLock::new(),
        }
    }

    /// The leases of open volumes.
    pub fn leases(&self) -> &Arc<Leases> {
        &self.leases
    }

    /// The cluster that the volumes belong to.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// All volumes.
    pub async fn list(&self, reader: &Meta) -> Result<Vec<Volume>> {
        let all = reader.list_volumes().await.map_err(meta_failure)?;
        let used = match reader.confirmed() {
            Confirmed::Now => self.used.now().await,
            // There is no leader that could be asked.
            Confirmed::Ago(_) | Confirmed::BeforeStart => self.used.as_heard().await,
        };
        let mut volumes = Vec::new();
        for volume in all.into_iter().filter(is_listed) {
            let used_bytes = used.bytes(&volume, &reader.map());
            volumes.push(Volume {
                used_bytes,
                ..shown(reader, volume).await?
            });
        }
        Ok(volumes)
    }

    /// One volume.
    pub async fn get(&self, name: &str) -> Result<Volume> {
        let shown = volume_by(&self.cluster.asked, name).await?;
        let volume = self
            .cluster
            .asked
            .get_volume(name)
            .await
            .map_err(meta_failure)?;
        let used_bytes = self
            .used
            .now()
            .await
            .bytes(&volume, &self.cluster.asked.map());
        Ok(Volume {
            used_bytes,
            ..shown
        })
    }

    /// Creates an empty volume.
    pub async fn create(&self, request: VolumeCreate) -> Result<Volume> {
        check_name(&request.name)?;
        let said = request.on_full_wait_s.map(|wait_s| OnFull { wait_s });
        let spec = VolumeSpec {
            pool: request.pool,
            on_full: said.unwrap_or_default(),
            ..VolumeSpec::new(request.name, request.size_bytes)
        };
        let _open = self.open.lock().await;
        let volume = self
            .cluster
            .asked
            .create_volume(spec)
            .await
            .map_err(meta_failure)?;
        shown(&self.cluster.asked, volume)
            .await
            .map_err(done_unseen)
    }

    /// Gives a volume that nobody uses a name that no other has.
    pub async fn rename(&self, name: &str, to: &str) -> Result<Volume> {
        let open = self.open.lock().await;
        let volume = self
            .cluster
            .asked
            .get_volume(name)
            .await
            .map_err(meta_failure)?;
        open.refuse_replaced(&volume)?;
        if open.volumes.contains_key(&volume.id) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("volume '{name}' cannot be renamed while it is in use"),
                format!("run `penstock detach {name}` first, or wait until its copy has ended"),
            ));
        }
        let renamed = self.cluster.asked.rename_volume(name, to).await;
        shown(&self.cluster.asked, renamed.map_err(meta_failure)?).await
    }

    /// Changes how a volume behaves, within seconds.
    pub async fn set(&self, name: &str, request: &VolumeSet) -> Result<Volume> {
        let on_full = OnFull {
            wait_s: request.on_full_wait_s,
        };
        let set = self.cluster.asked.set_volume(name, on_full).await;
        shown(&self.cluster.asked, set.map_err(meta_failure)?).await
    }

    /// Changes a volume's size. Guests learn of it at once.
    pub async fn resize(&self, name: &str, request: &VolumeResize) -> Result<Volume> {
        let mut open = self.open.lock().await;
        let before = self
            .cluster
            .asked
            .get_volume(name)
            .await
            .map_err(meta_failure)?;
        open.refuse_replaced(&before)?;
        let attached = shown(&self.cluster.asked, before.clone()).await?.attached;
        if let (true, Some(socket)) = (request.size_bytes < before.size_bytes, attached.first()) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("volume '{name}' cannot shrink while it is in use on {socket}"),
                format!("run `penstock detach {name}` first"),
            ));
        }
        if request.size_bytes < before.size_bytes && open.volumes.contains_key(&before.id) {
            return Err(copied(name));
        }
        let volume = self
            .cluster
            .asked
            .resize_volume(name, request.size_bytes, request.shrink)
            .await
            .map_err(meta_failure)?;
        if let Some(one) = open.volumes.get(&volume.id) {
            self.storage
                .resize_volume(&one.handle, volume.size_bytes)
                .await?;
        }
        if let Some(users) = self.users() {
            users.resized(volume.id);
        }
        // The cut itself is done, whatever becomes of what it cut off.
        if let Err(failure) = self.drop_stale_tail(&mut open, &volume).await {
            self.left_over(&volume, failure);
        }
        shown(&self.cluster.asked, volume)
            .await
            .map_err(done_unseen)
    }

    /// Deletes a volume and its data.
    pub async fn delete(&self, name: &str) -> Result<()> {
        let open = self.open.lock().await;
        let volume = self
            .cluster
            .asked
            .get_volume(name)
            .await
            .map_err(meta_failure)?;
        open.refuse_replaced(&volume)?;
        if open.volumes.contains_key(&volume.id) {
            // Attachments are meta's to refuse; what else keeps a volume open is a copy.
            let attached = shown(&self.cluster.asked, volume.clone()).await?.attached;
            if attached.is_empty() {
                return Err(copied(name));
            }
        }
        let volume = self
            .cluster
            .asked
            .delete_volume(name)
            .await
            .map_err(meta_failure)?;
        let dropped = self.drop_data(&volume).await;
        if let Err(failure) = &dropped {
            self.left_over(&volume, failure.clone());
        }
        dropped
    }

    /// Second half of a deletion, which may also be done by a later process.
    pub async fn drop_data(&self, volume: &meta::Volume) -> Result<()> {
        self.storage.drop_layers(&volume.layers).await?;
        self.cluster
            .meta
            .volume_data_dropped(volume.id)
            .await
            .map(drop)
            .map_err(meta_failure)
    }

    /// Second half of a shrink, likewise. Nobody may open the volume meanwhile: a handle of its new size
    /// would be shared, and nothing cut.
    pub async fn drop_stale_tail(
        &self,
        open: &mut OpenVolumes,
        volume: &meta::Volume,
    ) -> Result<()> {
        let Some(end) = volume.stale_tail_end_bytes else {
            return Ok(());
        };
        // Opened as large as it was, and cut again: that gives the space back.
        let larger = meta::Volume {
            size_bytes: end,
            ..volume.clone()
        };
        let handle = self.open_in(open, &larger).await?;
        let mut dropped = self.storage.resize_volume(&handle, volume.size_bytes).await;
        drop(handle);
        if dropped.is_ok() {
            // While the lease is held: of a host nobody else's word counts.
            let told = self.cluster.meta.volume_tail_dropped(volume.id).await;
            dropped = told.map(drop).map_err(meta_failure);
        }
        self.close_in(open, volume.id).await;
        dropped
    }
}

/// Refuses names that only segments of filesystems have: their volumes are nobody's to attach or to copy.
pub fn refuse_segment(name: &str) -> Result<()> {
    match name.starts_with('.') {
        true => Err(Failure::new(
            Kind::NotFound,
            format!("there is no volume '{name}'"),
            "see `penstock volume list`",
        )),
        false => Ok(()),
    }
}

/// One volume, for somebody with the patience of `meta`.
pub async fn volume_by(meta: &Meta, name: &str) -> Result<Volume> {
    refuse_segment(name)?;
    let volume = meta.get_volume(name).await.map_err(meta_failure)?;
    shown(meta, volume).await
}

async fn shown(meta: &Meta, volume: meta::Volume) -> Result<Volume> {
    let lease = meta.get_lease(volume.id).await.map_err(meta_failure)?;
    let attachments = meta.list_attachments().await.map_err(meta_failure)?;
    let map = meta.map();
    let attached = attachments
        .into_iter()
        .filter(|a| a.target.name() == &volume.name);
    let attached: (Vec<String>, Vec<String>) =
        attached.map(|a| (a.socket, map.node_name(a.node))).unzip();
    Ok(Volume {
        name: volume.name.to_string(),
        id: volume.uuid.to_string(),
        serial: serial(&volume),
        size_bytes: volume.size_bytes,
        used_bytes: None,
        pool: volume.pool.to_string(),
        on_full_wait_s: volume.on_full.wait_s,
        generation: lease.map_or(0, |lease| lease.generation.0),
        attached: attached.0,
        attached_on: attached.1,
    })
}

/// Why a volume that is open without being attached must be left alone.
pub fn copied(name: &str) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!("volume '{name}' is being copied"),
        "wait until the import or export is done",
    )
}

/// Names that this program keeps for itself.
pub fn check_name(name: &str) -> Result<()> {
    if name.starts_with(IMPORT_PREFIX) {
        return Err(Failure::invalid(
            format!("volume name '{name}' begins with {IMPORT_PREFIX}, which imports use"),
            "choose another name",
        ));
    }
    Ok(())
}

/// The serial by which a guest knows the volume: virtio-blk has room for 20 bytes, and a UUID has 32 digits.
pub fn serial(volume: &meta::Volume) -> String {
    let mut serial = volume.uuid.simple().to_string();
    serial.truncate(SERIAL_BYTES);
    serial
}
