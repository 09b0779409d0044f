//! The devices of a running fabric.

use super::{DeviceConfig, DeviceStatus, Fabric, FabricError, Lacking, ScrubOrder, open};

impl Fabric {
    /// The devices: space, counters, scrubbing, what opening did. Empty with a null store.
    pub fn devices(&self) -> Vec<DeviceStatus> {
        self.control.as_ref().map_or_else(Vec::new, |c| c.devices())
    }

    /// Begins a pass of the scrubber over a device, from its beginning, or ends the one that is under way;
    /// false if the device is not open.
    pub fn scrub(&self, device: &[u8; 16], order: ScrubOrder) -> bool {
        let control = self.control.as_ref();
        control.is_some_and(|control| control.scrub(device, order))
    }

    /// Opens a device, formatting it where told so, while threads work on the others. Data are stored on it
    /// once a map places groups there.
    ///
    /// # Errors
    /// It cannot be opened or formatted, there were too many since the fabric was opened, or it has the null
    /// store. A file that was made stays.
    pub fn add_device(&self, device: &DeviceConfig) -> Result<DeviceStatus, FabricError> {
        let control = self.control.as_ref().ok_or(FabricError::NullStore)?;
        control.add_device(|| open::open_one(device, &self.shared.config))
    }

    /// Gives a device no new requests, and closes it as soon as those under way have ended. The caller
    /// ensures that no map names it, so that none of its data are needed.
    pub fn remove_device(&self, device: &[u8; 16]) {
        if let Some(control) = &self.control {
            control.remove_device(device);
        }
    }

    /// The devices that could not be opened and that the node goes without.
    pub fn lacking(&self) -> &[Lacking] {
        &self.lacking
    }
}
