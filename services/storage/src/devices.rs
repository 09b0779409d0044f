//! The devices of all nodes; adding one to this node, and removing one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::failure::{Failure, Kind, Result};
use api::types::{Device, DeviceAdd, DeviceRemoveQuery, DeviceState};
use config::{DeviceSpec, StoreKind};
use fabric::ScrubOrder;
use meta::{DeviceId, DeviceReport, Meta};
use service::cluster::Cluster;
use service::failures::{done_unseen, meta_failure};
use service::prepared::Prepared;
use service::view::View;
use service::waiting::blocking;
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::device_list::{Added, DeviceList};
use crate::selection::{self, Addition};
use crate::storage::{LocalDevice, Storage, fabric_failure};

/// The devices of the cluster, as people see and change them on this node.
pub struct Devices {
    cluster: Cluster,
    config: Prepared,
    storage: Arc<Storage>,
    /// Held while a device is added. Taken before `changing`, or not waited for.
    adding: Mutex<()>,
    /// Held for each change of the list of this node's devices.
    changing: Mutex<()>,
}

impl Devices {
    /// The devices of the node that `storage` serves.
    pub fn new(cluster: Cluster, config: Prepared, storage: Arc<Storage>) -> Self {
        Self {
            cluster,
            config,
            storage,
            adding: Mutex::default(),
            changing: Mutex::default(),
        }
    }

    /// The cluster that the devices belong to.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The devices of all nodes, and those that were added to this one and are not in service yet.
    pub async fn list(&self, reader: &Meta) -> Result<Vec<Device>> {
        let mut devices = self.shown(&self.cluster.view_by(reader).await?);
        let here = self.cluster.node_name();
        for added in DeviceList::read(&self.config.data)?.added {
            let path = added.path.display().to_string();
            if !devices
                .iter()
                .any(|one| one.path == path && one.node == here)
            {
                devices.push(self.pending(&added));
            }
        }
        Ok(devices)
    }

    /// The devices that meta knows.
    pub fn shown(&self, view: &View) -> Vec<Device> {
        let local: BTreeMap<Uuid, LocalDevice> = self.local_by_uuid();
        let words = view.device_words();
        let devices = view.map.devices();
        let shown = devices.map(|device| {
            let local = local.get(&device.uuid);
            let lost = self.storage.why_lost(device.id);
            Device {
                reason: lost.map(|one| one.failure.to_string()),
                ..device_shown(view, device, local, words.get(&device.id))
            }
        });
        shown.collect()
    }

    fn local_by_uuid(&self) -> BTreeMap<Uuid, LocalDevice> {
        let local = self.storage.local().into_iter();
        local.map(|device| (device.uuid, device)).collect()
    }

    /// How full devices are: this node's as they are, others' as they were told.
    pub fn reported_space(&self, view: &View) -> BTreeMap<DeviceId, DeviceReport> {
        let mut told = view.device_words();
        for word in self.device_words(&view.map) {
            told.insert(word.device, word);
        }
        told
    }

    /// What this node says of its devices.
    pub fn device_words(&self, map: &meta::ClusterMap) -> Vec<DeviceReport> {
        let local = self.local_by_uuid();
        let known = map.devices().filter_map(|device| {
            let local = local.get(&device.uuid)?;
            Some(DeviceReport {
                device: device.id,
                capacity_bytes: local.capacity_bytes,
                used_bytes: local.used_bytes,
                is_bad: local.is_bad,
                is_full: local.is_full,
            })
        });
        known.collect()
    }

    fn pending(&self, added: &Added) -> Device {
        Device {
            id: None,
            node: self.cluster.node_name(),
            path: added.path.display().to_string(),
            class: String::new(),
            state: DeviceState::Pending,
            reason: None,
            groups: 0,
            groups_left: None,
            capacity_bytes: added.size_bytes.unwrap_or(0),
            used_bytes: None,
            free_bytes: None,
            memory_bytes: None,
            scrub: None,
        }
    }

    /// Opens a device, or makes it, and has it take data.
    ///
    /// It is noted first, so that a start after a crash goes on with it, and the cluster is told last.
    /// Nothing else waits while a large file is made.
    pub async fn add(&self, request: &DeviceAdd) -> Result<Device> {
        let _one = self.adding.lock().await;
        let added = Added {
            path: PathBuf::from(&request.path),
            size_bytes: request.size_bytes,
        };
        let before = DeviceList::read(&self.config.data)?;
        let Addition::Now(device, _) = self.note_added(&added).await? else {
            return Ok(self.pending(&added));
        };
        let opened = self.storage.add(device).await;
        // Nobody removes it before the cluster knows it.
        let _changing = self.changing.lock().await;
        let uuid = match opened {
            Ok(uuid) => uuid,
            Err(failure) => {
                let mut list = DeviceList::read(&self.config.data)?;
                list.forget(&added.path);
                // One that was added before and could not be opened stays so.
                let mut earlier = before.added.into_iter();
                list.added
                    .extend(earlier.find(|one| one.path == added.path));
                list.write(&self.config.data)?;
                return Err(failure);
            }
        };
        if let Err(failure) = self.storage.register_added(&self.cluster.asked).await {
            // It is repeated.
            tracing::warn!(%failure, path = %added.path.display(), "tell the cluster of a device");
            return Ok(self.pending(&added));
        }
        self.device_as_it_is(uuid).await.map_err(done_unseen)
    }

    /// Takes a block device that somebody has opened, for [`add`](Self::add).
    pub fn take_device(&self, path: &Path, device: OwnedFd) -> Result<()> {
        let taken = self.config.opened.take(path, device);
        taken.map_err(|e| fabric_failure(e.into()))
    }

    /// Forgets a device that was taken. One that was added stays open.
    pub fn let_go(&self, path: &Path) {
        self.config.opened.forget(path);
    }

    /// Puts a device that can be opened or made on the list.
    async fn note_added(&self, added: &Added) -> Result<Addition> {
        // Two at a time would write each other's list away.
        let _changing = self.changing.lock().await;
        if self.config.store == StoreKind::Null {
            return Err(Failure::new(
                Kind::Conflict,
                "the null store has no devices",
                "start the daemon without --store null",
            ));
        }
        let map = self.cluster.meta.map();
        let stores_data = |node: &meta::Node| node.roles.contains(&meta::Role::Storage);
        if !map.node(self.cluster.node_id()).is_none_or(stores_data) {
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "node '{}' does not have the role storage",
                    self.cluster.node_name()
                ),
                "add storage to its roles and restart its daemon first, or add the device to another node",
            ));
        }
        let mut list = DeviceList::read(&self.config.data)?;
        self.refuse_known(&added.path, &list)?;
        let config = &self.config;
        if !config.opened.has(&added.path) {
            config.confinement.check_device(&added.path)?;
        }
        let cluster = self
            .cluster
            .asked
            .cluster()
            .await
            .map_err(meta_failure)?
            .uuid;
        let (config, spec) = (self.config.clone(), added.spec());
        let known: Vec<Uuid> = map.devices().map(|device| device.uuid).collect();
        let addition =
            blocking(move || selection::addition(&config, &spec, cluster, &known)).await?;
        if let Some(uuid) = addition.found() {
            self.refuse_copy(uuid, &added.path).await?;
        }
        if let Addition::Now(..) = addition {
            self.refuse_missing(&map, &added.path)?;
        }
        list.add(added.clone());
        list.write(&self.config.data)?;
        Ok(addition)
    }

    /// Refuses the place of a device that is missing: it may be that one, wiped.
    fn refuse_missing(&self, map: &meta::ClusterMap, path: &Path) -> Result<()> {
        let here = self.cluster.node_id();
        let mut devices = map.devices();
        let known = devices.find(|one| one.node == here && Path::new(&one.path) == path);
        known.map_or(Ok(()), |known| {
            let number = known.id;
            Err(Failure::new(
                Kind::Conflict,
                format!(
                    "device {} (number {number}) of this node is missing, and its path must stay free for it",
                    known.path
                ),
                format!(
                    "bring it back and restart the daemon, or give it up first with `penstock device remove \
                     {number}`"
                ),
            ))
        })
    }

    /// Refuses what has the identity of a device that is open.
    async fn refuse_copy(&self, uuid: Uuid, path: &Path) -> Result<()> {
        let local = self.storage.local();
        let Some(original) = local.iter().find(|one| one.uuid == uuid) else {
            return Ok(());
        };
        let (config, copy) = (self.config.clone(), path.to_owned());
        let hint = blocking(move || Ok(selection::clearing(&config, &copy))).await?;
        let (shown, original) = (path.display(), &original.path);
        Err(Failure::new(
            Kind::Conflict,
            format!("device {shown} is a copy of {original}"),
            hint,
        ))
    }

    /// Registers added devices again that could not be registered. Not while a device is being added, or its
    /// event would not name who adds it; nor without a leader, since others wait for `changing`.
    pub async fn register_added(&self) -> Result<()> {
        if !self.storage.has_unregistered() || self.cluster.meta.raft_status().leader.is_none() {
            return Ok(());
        }
        let Ok(_one) = self.adding.try_lock() else {
            return Ok(());
        };
        let _changing = self.changing.lock().await;
        self.storage.register_added(&self.cluster.asked).await
    }

    /// Refuses what is open here, or is named here by another path. One that is named by this very path and
    /// is not open may have been mended or replaced.
    fn refuse_known(&self, path: &Path, list: &DeviceList) -> Result<()> {
        let shown = path.display();
        if !path.is_absolute() {
            return Err(Failure::invalid(
                format!("device path {shown} is not absolute"),
                "give the whole path",
            ));
        }
        let same = |other: &Path| match (path.canonicalize(), other.canonicalize()) {
            (Ok(a), Ok(b)) => a == b,
            _ => path == other,
        };
        let local = self.storage.local();
        if local.iter().any(|one| same(Path::new(&one.path))) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("device {shown} is one of this node's already"),
                "see `penstock device list`",
            ));
        }
        let configured = self.config.devices.iter().map(DeviceSpec::path);
        let added = list.added.iter().map(|one| one.path.as_path());
        let mut named = configured.chain(added);
        match named.find(|other| *other != path && same(other)) {
            Some(other) => Err(Failure::new(
                Kind::Conflict,
                format!("this node knows device {shown} as {}", other.display()),
                format!(
                    "add it by that path: `penstock device add {}`",
                    other.display()
                ),
            )),
            None => Ok(()),
        }
    }

    /// Empties a device and forgets it when that is done, or calls that off. One that is not served has
    /// nothing that could be moved, and is forgotten at once where its node hears of that; if it alone has
    /// something, only if an operator gives that up.
    pub async fn remove(&self, name: &str, request: &DeviceRemoveQuery) -> Result<Device> {
        let _changing = self.changing.lock().await;
        let view = self.cluster.view().await?;
        let Some(device) = self.find_device(&view, name) else {
            return self.take_back(name);
        };
        let (id, uuid) = (device.id, device.uuid);
        if request.off {
            self.cluster
                .asked
                .drain_device(id, false)
                .await
                .map_err(meta_failure)?;
            return self.device_as_it_is(uuid).await.map_err(done_unseen);
        }
        if request.accept_data_loss {
            return self.give_up(&view, device).await;
        }
        self.refuse_last(&view, device)?;
        self.cluster
            .asked
            .drain_device(id, true)
            .await
            .map_err(meta_failure)?;
        let view = self.cluster.view().await.map_err(done_unseen)?;
        match self.forget(&view, id).await? {
            Some(mut gone) => {
                gone.state = DeviceState::Removed;
                Ok(gone)
            }
            None => self.device_as_it_is(uuid).await.map_err(done_unseen),
        }
    }

    /// Forgets a device with what only that has. Its node, if it is up, has to remember it.
    async fn give_up(&self, view: &View, device: &meta::Device) -> Result<Device> {
        let is_here = device.node == self.cluster.node_id();
        if !is_here && !view.is_down(device.node) {
            let node = view.node_name(device.node);
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "device {} is one of node '{node}', which is up",
                    device.path
                ),
                format!("run this on node '{node}'"),
            ));
        }
        let shown = self.device_as_it_is(device.uuid).await?;
        let lost = meta::Lost::Device(device.id);
        self.cluster
            .asked
            .remove_lost(lost)
            .await
            .map_err(meta_failure)?;
        if is_here {
            self.storage.remove(device.uuid);
            self.remember_removed(device)?;
        }
        Ok(Device {
            state: DeviceState::Removed,
            ..shown
        })
    }

    /// Begins a pass of the scrub over a device of this node, or ends the one that is under way.
    pub async fn scrub(&self, name: &str, run: bool) -> Result<Device> {
        // Also without a leader: it concerns this node alone.
        let view = self
            .cluster
            .view_as_applied(self.cluster.leader_report().await)?;
        let Some(device) = self.find_device(&view, name) else {
            return Err(unknown(name));
        };
        let order = match run {
            true => ScrubOrder::Start,
            false => ScrubOrder::Stop,
        };
        if !self.storage.scrub(device.uuid, order) {
            let node = view.node_name(device.node);
            return Err(Failure::new(
                Kind::Conflict,
                format!("device {} is not open on this node", device.path),
                format!("run this on node '{node}', if the device is in service there"),
            ));
        }
        let mut shown = self.shown(&view).into_iter();
        shown
            .find(|one| one.id == Some(device.id.0))
            .ok_or_else(|| unknown(name))
    }

    /// The next start leaves it alone.
    fn remember_removed(&self, device: &meta::Device) -> Result<()> {
        let mut list = DeviceList::read(&self.config.data)?;
        list.remove(device.uuid, Path::new(&device.path));
        list.write(&self.config.data).map_err(|failure| {
            let path = &device.path;
            Failure::new(
                failure.kind,
                format!("device {path} is removed, and this cannot be noted: {}", failure.error),
                "make room; until then the next start takes it in again, empty, if it is still there",
            )
        })
    }

    /// By number, or by its path on this node.
    fn find_device<'a>(&self, view: &'a View, name: &str) -> Option<&'a meta::Device> {
        let here = self.cluster.node_id();
        let number = name.parse().ok().map(DeviceId);
        let mut devices = view.map.devices();
        devices.find(|d| Some(d.id) == number || (d.node == here && d.path == name))
    }

    /// Takes back an addition that the cluster does not know: of a device that could not be opened.
    fn take_back(&self, name: &str) -> Result<Device> {
        let path = Path::new(name);
        let mut list = DeviceList::read(&self.config.data)?;
        let Some(added) = list.added.iter().find(|one| one.path == path).cloned() else {
            return Err(unknown(name));
        };
        // A device that is being made would be used without being on the list. One that is open may have been
        // registered although no answer came.
        let is_open = self.storage.local().iter().any(|one| one.path == name);
        if is_open || self.adding.try_lock().is_err() {
            return Err(Failure::new(
                Kind::Conflict,
                match is_open {
                    true => format!("the cluster has not confirmed device {name} yet"),
                    false => "this node is adding a device".to_owned(),
                },
                "repeat in a moment; `penstock device list` shows a device in service with a number",
            ));
        }
        list.forget(path);
        list.write(&self.config.data)?;
        self.storage.forget_left_out(path);
        Ok(Device {
            state: DeviceState::Removed,
            ..self.pending(&added)
        })
    }

    fn refuse_last(&self, view: &View, device: &meta::Device) -> Result<()> {
        if view.devices_of(device.node).len() > 1 || !view.map.is_served(device) {
            return Ok(());
        }
        let node = view.node_name(device.node);
        Err(Failure::new(
            Kind::Conflict,
            format!("device {} is the only one of node '{node}'", device.path),
            format!(
                "add another one first, or empty the whole node with `penstock node drain {node}`"
            ),
        ))
    }

    async fn device_as_it_is(&self, uuid: Uuid) -> Result<Device> {
        let view = self.cluster.view().await?;
        let found = view.map.devices().position(|device| device.uuid == uuid);
        let shown = found.map(|index| self.shown(&view).swap_remove(index));
        shown.ok_or_else(|| Failure::plain(Kind::NotFound, "the device was removed meanwhile"))
    }

    /// Forgets a device that is being emptied once it is empty; that of another node only while that node is
    /// down, for it has to remember it.
    pub async fn forget(&self, view: &View, id: DeviceId) -> Result<Option<Device>> {
        let Some(device) = view.map.device(id) else {
            return Ok(None);
        };
        let is_here = device.node == self.cluster.node_id();
        if !is_here && !view.is_down(device.node) {
            return Ok(None);
        }
        let shown = self.shown(view).into_iter().find(|d| d.id == Some(id.0));
        if view.held(|held| held == id).left > 0 {
            return Ok(None);
        }
        let removed = self
            .cluster
            .meta
            .remove_device(id)
            .await
            .map_err(meta_failure);
        if is_here && removed.is_ok() {
            // First: the cluster does not know it any more, whatever becomes of the list.
            self.storage.remove(device.uuid);
            self.remember_removed(device)?;
        }
        removed.map(|_| shown)
    }

    /// Forgets devices that were being emptied and are empty: this node's, and as the leader those of nodes
    /// that are down.
    pub async fn forget_emptied(&self, view: &View) -> Result<()> {
        let here = self.cluster.node_id();
        let leads = self.cluster.meta.raft_status().leader == Some(here);
        let mine =
            |d: &&meta::Device| d.draining && (d.node == here || leads && view.is_down(d.node));
        let emptied: Vec<DeviceId> = view.map.devices().filter(mine).map(|d| d.id).collect();
        for id in emptied {
            let changing = self.changing.lock().await;
            if let Some(device) = self.forget(view, id).await? {
                tracing::info!(
                    path = device.path,
                    node = device.node,
                    "device removed, empty"
                );
            }
            drop(changing);
        }
        Ok(())
    }
}

fn device_shown(
    view: &View,
    device: &meta::Device,
    local: Option<&LocalDevice>,
    word: Option<&DeviceReport>,
) -> Device {
    let held = view.held(|id| id == device.id);
    let is_bad = local.map_or_else(|| word.is_some_and(|word| word.is_bad), |one| one.is_bad);
    let used_bytes = local
        .map(|one| one.used_bytes)
        .or(word.map(|one| one.used_bytes));
    let capacity_bytes = local
        .map(|one| one.capacity_bytes)
        .or(word.map(|one| one.capacity_bytes))
        .unwrap_or(device.size_bytes);
    let state = if local.is_some_and(|one| one.is_null) {
        DeviceState::Null
    } else if device.state == meta::DeviceState::Failed {
        DeviceState::Failed
    } else if !view.map.is_served(device) {
        DeviceState::Offline
    } else if device.draining {
        DeviceState::Draining
    } else if is_bad {
        DeviceState::Degraded
    } else {
        DeviceState::Ok
    };
    Device {
        id: Some(device.id.0),
        node: view.node_name(device.node),
        path: device.path.clone(),
        class: device.class.to_string(),
        state,
        reason: None,
        groups: held.groups,
        groups_left: device.draining.then_some(held.left),
        capacity_bytes,
        used_bytes,
        free_bytes: used_bytes.map(|used| capacity_bytes.saturating_sub(used)),
        memory_bytes: local.map(|one| one.memory_bytes),
        scrub: local.map(|one| one.scrub),
    }
}

fn unknown(name: &str) -> Failure {
    Failure::new(
        Kind::NotFound,
        format!("there is no device '{name}'"),
        "see `penstock device list`; paths are those of the node that is asked",
    )
}
