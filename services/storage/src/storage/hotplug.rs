//! Devices that are added and removed while the daemon runs.

use std::path::Path;

use api::failure::Result;
use fabric::{DeviceConfig, DeviceStatus};
use meta::Meta;
use service::failures::meta_failure;
use service::waiting::blocking;
use uuid::Uuid;

use crate::marks;

use super::{Storage, fabric_failure, spec};

impl Storage {
    /// Opens a device, or makes it. It takes data once the cluster knows it:
    /// [`register_added`](Self::register_added). Its identity.
    pub async fn add(&self, device: DeviceConfig) -> Result<Uuid> {
        let path = device.path.clone();
        let fabric = self.fabric.clone();
        let opened = blocking(move || fabric.add_device(&device).map_err(fabric_failure)).await?;
        tracing::info!(path = %path.display(), "{}", opened.report);
        let id = Uuid::from_bytes(opened.label.device);
        self.forget_left_out(&path);
        self.count_first_use(id).await;
        self.unregistered().push(id);
        Ok(id)
    }

    /// Gives a device no new requests, and closes it. Not to be called while any of its data are needed.
    pub fn remove(&self, device: Uuid) {
        self.unregistered().retain(|one| *one != device);
        self.fabric.remove_device(device.as_bytes());
    }

    /// What was wrong with a device at the start is past.
    pub fn forget_left_out(&self, path: &Path) {
        self.left_out().retain(|one| one.path != path);
    }

    /// Whether the cluster does not know all devices yet that were added.
    pub fn has_unregistered(&self) -> bool {
        !self.unregistered().is_empty()
    }

    /// Tells the cluster of the devices that were added and that it does not know yet, and has them take
    /// data. The caller sees to it that none is removed meanwhile.
    pub async fn register_added(&self, meta: &Meta) -> Result<()> {
        let added = self.unregistered().clone();
        let devices = self.fabric.devices().into_iter();
        let is_added = |one: &DeviceStatus| added.contains(&Uuid::from_bytes(one.label.device));
        for device in devices.filter(is_added) {
            let known = meta.register_device(spec(&device, meta.node_id())).await;
            let known = known.map_err(meta_failure)?;
            tracing::info!(path = known.path, number = %known.id, "device in service");
        }
        marks::report_evidence(&self.fabric, meta).await?;
        for id in added {
            self.unregistered().retain(|one| *one != id);
        }
        Ok(())
    }

    /// From now on an earlier copy of the device is refused. A device that hangs delays only its own
    /// addition.
    async fn count_first_use(&self, device: Uuid) {
        let Some(mut uses) = self.lock_uses().take() else {
            return;
        };
        let fabric = self.fabric.clone();
        let raised = blocking(move || {
            uses.raise_of(&fabric, |one| *one == device.into_bytes());
            Ok(uses)
        });
        match raised.await {
            Ok(uses) => *self.lock_uses() = Some(uses),
            Err(failure) => tracing::error!(%failure, "count the uses of a device"),
        }
    }
}
