//! Volumes: meta says what there is, storage holds what is in it.

use api::failure::{Failure, Kind, Result};
use api::types::{Volume, VolumeCreate, VolumeResize, VolumeSet};
use meta::{Confirmed, Meta, OnFull, VolumeSpec};
use service::failures::{done_unseen, meta_failure};
use service::view::is_listed;

use super::attachments::serial;
use super::full;
use super::node::{Live, Node};
use super::storage::Handle;

pub use meta::IMPORT_PREFIX;

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

/// A volume that is attached or being copied.
pub struct OpenVolume {
    /// What data threads work with.
    pub handle: Handle,
    /// Attachments and copies that use it.
    pub users: usize,
    /// Copies among them that were given up, and wait for their last request to end.
    given_up: usize,
    /// The lease is another node's, for the volume's attachment moves: requests wait.
    pub waits_for_lease: bool,
}

impl Node {
    /// All volumes.
    pub async fn volumes(&self, reader: &Meta) -> Result<Vec<Volume>> {
        let all = reader.list_volumes().await.map_err(meta_failure)?;
        let used = match reader.confirmed() {
            Confirmed::Now => self.used().await,
            // There is no leader that could be asked.
            Confirmed::Ago(_) | Confirmed::BeforeStart => self.used_as_heard().await,
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
    pub async fn volume(&self, name: &str) -> Result<Volume> {
        let shown = volume_by(&self.asked, name).await?;
        let volume = self.asked.get_volume(name).await.map_err(meta_failure)?;
        let used_bytes = self.used().await.bytes(&volume, &self.asked.map());
        Ok(Volume {
            used_bytes,
            ..shown
        })
    }

    /// Creates an empty volume.
    pub async fn volume_create(&self, request: VolumeCreate) -> Result<Volume> {
        check_name(&request.name)?;
        let said = request.on_full_wait_s.map(|wait_s| OnFull { wait_s });
        if let Some(said) = said {
            full::refuse_wait(&self.meta, said)?;
        }
        let spec = VolumeSpec {
            pool: request.pool,
            on_full: said.unwrap_or_default(),
            ..VolumeSpec::new(request.name, request.size_bytes)
        };
        let _live = self.live.lock().await;
        let volume = self.asked.create_volume(spec).await.map_err(meta_failure)?;
        shown(&self.asked, volume).await.map_err(done_unseen)
    }

    /// Gives a volume that nobody uses a name that no other has.
    pub async fn volume_rename(&self, name: &str, to: &str) -> Result<Volume> {
        let live = self.live.lock().await;
        let volume = self.asked.get_volume(name).await.map_err(meta_failure)?;
        live.refuse_replaced(&volume)?;
        if live.volumes.contains_key(&volume.id) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("volume '{name}' cannot be renamed while it is in use"),
                format!("run `penstock detach {name}` first, or wait until its copy has ended"),
            ));
        }
        let renamed = self.asked.rename_volume(name, to).await;
        shown(&self.asked, renamed.map_err(meta_failure)?).await
    }

    /// Changes how a volume behaves, within seconds.
    pub async fn volume_set(&self, name: &str, request: &VolumeSet) -> Result<Volume> {
        let on_full = OnFull {
            wait_s: request.on_full_wait_s,
        };
        full::refuse_wait(&self.meta, on_full)?;
        let set = self.asked.set_volume(name, on_full).await;
        shown(&self.asked, set.map_err(meta_failure)?).await
    }

    /// Changes a volume's size. Guests learn of it at once.
    pub async fn volume_resize(&self, name: &str, request: &VolumeResize) -> Result<Volume> {
        let mut live = self.live.lock().await;
        let before = self.asked.get_volume(name).await.map_err(meta_failure)?;
        live.refuse_replaced(&before)?;
        let attached = shown(&self.asked, before.clone()).await?.attached;
        if let (true, Some(socket)) = (request.size_bytes < before.size_bytes, attached.first()) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("volume '{name}' cannot shrink while it is in use on {socket}"),
                format!("run `penstock detach {name}` first"),
            ));
        }
        if request.size_bytes < before.size_bytes && live.volumes.contains_key(&before.id) {
            return Err(copied(name));
        }
        let volume = self
            .asked
            .resize_volume(name, request.size_bytes, request.shrink)
            .await
            .map_err(meta_failure)?;
        if let Some(open) = live.volumes.get(&volume.id) {
            self.storage
                .resize_volume(&open.handle, volume.size_bytes)
                .await?;
        }
        for served in live.attachments.values().filter(|s| s.volume == volume.id) {
            served.notify_resize();
        }
        // The cut itself is done, whatever becomes of what it cut off.
        if let Err(failure) = self.drop_stale_tail(&mut live, &volume).await {
            self.left_over(&volume, failure);
        }
        shown(&self.asked, volume).await.map_err(done_unseen)
    }

    /// Deletes a volume and its data.
    pub async fn volume_delete(&self, name: &str) -> Result<()> {
        let live = self.live.lock().await;
        let volume = self.asked.get_volume(name).await.map_err(meta_failure)?;
        live.refuse_replaced(&volume)?;
        if live.volumes.contains_key(&volume.id) {
            // Attachments are meta's to refuse; what else keeps a volume open is a copy.
            let attached = shown(&self.asked, volume.clone()).await?.attached;
            if attached.is_empty() {
                return Err(copied(name));
            }
        }
        let volume = self.asked.delete_volume(name).await.map_err(meta_failure)?;
        let dropped = self.drop_data(&volume).await;
        if let Err(failure) = &dropped {
            self.left_over(&volume, failure.clone());
        }
        dropped
    }

    /// Second half of a deletion, which may also be done by a later process.
    pub(super) async fn drop_data(&self, volume: &meta::Volume) -> Result<()> {
        self.storage.drop_layers(&volume.layers).await?;
        self.meta
            .volume_data_dropped(volume.id)
            .await
            .map(drop)
            .map_err(meta_failure)
    }

    /// Second half of a shrink, likewise. Nobody may open the volume meanwhile: a handle of its new size
    /// would be shared, and nothing cut.
    pub(super) async fn drop_stale_tail(
        &self,
        live: &mut Live,
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
        let handle = self.open_in(live, &larger).await?;
        let mut dropped = self.storage.resize_volume(&handle, volume.size_bytes).await;
        drop(handle);
        if dropped.is_ok() {
            // While the lease is held: of a host nobody else's word counts.
            let told = self.meta.volume_tail_dropped(volume.id).await;
            dropped = told.map(drop).map_err(meta_failure);
        }
        self.close_in(live, volume.id).await;
        dropped
    }

    /// Opens a volume for one more user, with a new lease if it is the first.
    pub(super) async fn open_volume(&self, volume: &meta::Volume) -> Result<Handle> {
        let mut live = self.live.lock().await;
        self.open_in(&mut live, volume).await
    }

    /// Same, for whoever holds `live` already.
    pub(super) async fn open_in(&self, live: &mut Live, volume: &meta::Volume) -> Result<Handle> {
        if let Some(open) = live.volumes.get_mut(&volume.id) {
            if self.leases.lost().contains(&volume.id) {
                return Err(Failure::new(
                    Kind::Conflict,
                    format!(
                        "volume '{}' is being closed here: its lease is another node's",
                        volume.name
                    ),
                    "repeat this in a moment",
                ));
            }
            if open.waits_for_lease {
                return Err(migrating(&volume.name));
            }
            if open.is_given_up() {
                return Err(Failure::new(
                    Kind::Conflict,
                    format!("an export of volume '{}' is being given up", volume.name),
                    "repeat this in a moment",
                ));
            }
            open.users += 1;
            return Ok(open.handle.clone());
        }
        let handle = self.open_leased(volume).await?;
        let open = OpenVolume {
            handle: handle.clone(),
            users: 1,
            given_up: 0,
            waits_for_lease: false,
        };
        live.volumes.insert(volume.id, open);
        Ok(handle)
    }

    /// Opens a volume whose lease is another node's, for an attachment that waits for it.
    pub(super) async fn open_without_lease(
        &self,
        live: &mut Live,
        volume: &meta::Volume,
    ) -> Result<Handle> {
        if live.volumes.contains_key(&volume.id) {
            return Err(migrating(&volume.name));
        }
        let handle = {
            let epoch = self.meta.map().epoch();
            self.storage.open_without_lease(volume, epoch).await?
        };
        let open = OpenVolume {
            handle: handle.clone(),
            users: 1,
            given_up: 0,
            waits_for_lease: true,
        };
        live.volumes.insert(volume.id, open);
        Ok(handle)
    }

    /// Ends one use.
    pub(super) async fn close_volume(&self, volume: &meta::Volume) {
        let mut live = self.live.lock().await;
        self.close_in(&mut live, volume.id).await;
    }

    /// Same, for whoever holds `live` already.
    pub(super) async fn close_in(&self, live: &mut Live, id: meta::VolumeId) {
        let Some(open) = live.volumes.get_mut(&id) else {
            return;
        };
        open.users -= 1;
        if open.users > 0 {
            if open.is_given_up() {
                // Nobody else is left.
                open.handle.revoke();
            }
            return;
        }
        live.volumes.remove(&id);
        self.leases.give_back(&self.meta, id).await;
    }
}

impl OpenVolume {
    /// Whether nobody wants it but copies that were given up and cannot end.
    fn is_given_up(&self) -> bool {
        self.given_up > 0 && self.users == self.given_up
    }

    /// One of the users is a copy that is given up: its requests end once nobody else uses the volume.
    pub(super) fn give_up(&mut self) {
        self.given_up += 1;
        if self.is_given_up() {
            self.handle.revoke();
        }
    }

    /// Such a copy has ended.
    pub(super) fn note_given_up_ended(&mut self) {
        self.given_up -= 1;
    }
}

impl Live {
    /// What is done to a volume while an import replaces it would be undone, or be done to the wrong content.
    pub(super) fn refuse_replaced(&self, volume: &meta::Volume) -> Result<()> {
        if !self.replaced.contains(&volume.id) {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Conflict,
            format!("volume '{}' is being replaced by an import", volume.name),
            "wait until the import is done, or stop it",
        ))
    }
}

/// Refuses names that only segments of filesystems have: their volumes are nobody's to attach or to copy.
pub(super) fn refuse_segment(name: &str) -> Result<()> {
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
pub(super) async fn volume_by(meta: &Meta, name: &str) -> Result<Volume> {
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
        on_full_wait_s: (!full::never_waits(meta)).then_some(volume.on_full.wait_s),
        generation: lease.map_or(0, |lease| lease.generation.0),
        attached: attached.0,
        attached_on: attached.1,
    })
}

/// Why nothing else is done with a volume whose attachment moves.
fn migrating(name: &str) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!("volume '{name}' is being migrated between nodes"),
        "wait until the migration is done, or was called off",
    )
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
