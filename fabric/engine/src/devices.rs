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

    /// Opens a device, formatting it where told so, while threads work on the others. On a node of several
    /// the map says what is stored on it. On one that is alone it gets volumes once it is
    /// [reinstated](Self::reinstate).
    ///
    /// # Errors
    /// It cannot be opened or formatted, there were too many since the fabric was opened, or it has the null
    /// store. A file that was made stays.
    pub fn add_device(&self, device: &DeviceConfig) -> Result<DeviceStatus, FabricError> {
        let control = self.control.as_ref().ok_or(FabricError::NullStore)?;
        control.add_device(|| open::open_one(device, &self.shared.config))
    }

    /// Gives a device no new requests, and closes it as soon as those under way have ended. The caller sees
    /// to it that none of its data are needed: it was [retired](Self::retire), and no map names it.
    pub fn remove_device(&self, device: &[u8; 16]) {
        if let Some(control) = &self.control {
            control.remove_device(device);
        }
    }

    /// The devices that could not be opened and that the node goes without.
    pub fn lacking(&self) -> &[Lacking] {
        &self.lacking
    }

    /// No new volume is stored on this device from now on; false, and nothing is changed, if it holds one.
    /// The caller opens no volume meanwhile. Until the next start only, when the device is to be left out. On
    /// a node of several the map says what lies where, and nothing is to be done here.
    pub fn retire(&self, device: &[u8; 16]) -> bool {
        let alone = self
            .control
            .as_ref()
            .filter(|_| self.shared.cluster.is_none());
        alone.is_none_or(|control| control.retire(device))
    }

    /// Undoes [`retire`](Self::retire).
    pub fn reinstate(&self, device: &[u8; 16]) {
        if let Some(control) = &self.control {
            control.reinstate(device);
        }
    }
}
