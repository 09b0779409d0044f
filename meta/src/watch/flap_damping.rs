//! Replicas in sync that are taken out though their node lives: the device is full, slow or at fault. What
//! they lack they may get at once, to fail again with the next write, and each time guests wait for a change
//! of the map. So a device pauses longer before each return, with all its replicas, until it has kept its
//! place for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{DeviceId, Incarnation};
use crate::model::GroupId;

/// Pause after the first fall; doubled with each further one up to the maximum. During the pause nothing
/// returns, so whatever else falls meanwhile belongs to the same cause.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// See [`PAUSE_MIN`].
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A device that has kept its place for so long after a pause is as good as any.
const FORGIVEN_AFTER: Duration = Duration::from_secs(120);

/// What is held against a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    incarnation: Incarnation,
    /// Falls in a row.
    pub(super) falls: u32,
    /// No replica of the device begins to be synced before.
    pub(super) until: Duration,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FlapDamping {
    devices: BTreeMap<DeviceId, Record>,
    /// Members in sync when the map was looked at last, in order.
    in_sync: Vec<(GroupId, DeviceId)>,
}

impl FlapDamping {
    /// The map has changed: these members are in sync, in order of groups and then of devices, and `out` are
    /// out though the start of their node that they took writes in lives.
    pub(super) fn look(
        &mut self,
        in_sync: Vec<(GroupId, DeviceId)>,
        out: impl Iterator<Item = (GroupId, DeviceId, Incarnation)>,
        now: Duration,
    ) {
        for (group, device, incarnation) in out {
            if self.in_sync.binary_search(&(group, device)).is_ok() {
                self.fell(device, incarnation, now);
            }
        }
        self.in_sync = in_sync;
        self.devices
            .retain(|_, record| now < record.until + FORGIVEN_AFTER);
    }

    fn fell(&mut self, device: DeviceId, incarnation: Incarnation, now: Duration) {
        let known = self.devices.get(&device);
        let known = known.filter(|known| known.incarnation == incarnation);
        if known.is_some_and(|known| now < known.until) {
            return;
        }
        let falls = known.map_or(0, |known| known.falls) + 1;
        let pause = PAUSE_MIN.saturating_mul(1 << (falls - 1).min(16));
        let record = Record {
            incarnation,
            falls,
            until: now + pause.min(PAUSE_MAX),
        };
        self.devices.insert(device, record);
    }

    /// What is held against the device in this start of its node, if it pauses.
    pub(super) fn pausing(
        &self,
        device: DeviceId,
        incarnation: Incarnation,
        now: Duration,
    ) -> Option<&Record> {
        let record = self.devices.get(&device)?;
        (record.incarnation == incarnation && now < record.until).then_some(record)
    }
}
