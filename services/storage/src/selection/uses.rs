//! Detects an older copy of a device on a node without peers: no other node has what the copy lacks, and
//! volumes would read as they were, or as zeroes.
//!
//! At each start and at each end in order, a number is raised on every device, and then in the data
//! directory. So a device never has a lower number than the directory, unless it is a copy from before. What
//! was copied since the last start cannot be told from the device after a crash.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use config::files;
use fabric::Fabric;
use uuid::Uuid;

use crate::storage::fabric_failure;

/// The record's name in the data directory.
const NAME: &str = "device-uses.json";

/// The devices of a node, and the number of each.
pub struct Uses {
    path: PathBuf,
    known: BTreeMap<Uuid, u64>,
}

impl Uses {
    /// Reads the record in a data directory; without one nothing was counted yet.
    pub fn read(data: &Path) -> Result<Self> {
        let path = data.join(NAME);
        let known = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| {
                Failure::new(
                    Kind::Failed,
                    format!("{} cannot be read: {e}", path.display()),
                    "move it away: it only tells older copies of devices",
                )
            })?,
            Err(e) if e.kind() == ErrorKind::NotFound => BTreeMap::new(),
            Err(e) => return Err(e).context(|| format!("read {}", path.display())),
        };
        Ok(Uses { path, known })
    }

    /// Refuses older copies among the devices that are open.
    pub fn check(&self, fabric: &Fabric) -> Result<()> {
        for device in fabric.devices() {
            let id = device.label.device;
            let known = self.known.get(&Uuid::from_bytes(id));
            if known.is_none_or(|known| fabric.uses(&id) >= *known) {
                continue;
            }
            let (shown, record) = (device.path.display(), self.path.display());
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "device {shown} is an older copy: this node has been started or stopped since it was \
                     made, and what was written since is not on it"
                ),
                format!(
                    "put the newest one back; to go on with what the copy has, delete {record} and start \
                     again"
                ),
            ));
        }
        Ok(())
    }

    /// Raises the number of all devices that are open. One that takes no mark keeps its number. That the
    /// record is behind is harmless.
    pub fn raise(&mut self, fabric: &Fabric) {
        self.raise_of(fabric, |_| true);
    }

    /// The same for the devices that `is_meant` selects. Devices that are not open are forgotten.
    pub fn raise_of(&mut self, fabric: &Fabric, is_meant: impl Fn(&[u8; 16]) -> bool) {
        let mut raised = BTreeMap::new();
        for device in fabric.devices() {
            let (id, uuid) = (device.label.device, Uuid::from_bytes(device.label.device));
            let known = self.known.get(&uuid).copied();
            if !is_meant(&id) {
                raised.extend(known.map(|known| (uuid, known)));
                continue;
            }
            let known = known.unwrap_or_default();
            let uses = fabric.uses(&id).max(known).saturating_add(1);
            match fabric.set_uses(&id, uses).map_err(fabric_failure) {
                Ok(()) => drop(raised.insert(uuid, uses)),
                Err(failure) => {
                    let path = device.path.display();
                    tracing::warn!(%path, %failure, "cannot count the uses of a device");
                    raised.insert(uuid, known);
                }
            }
        }
        self.known = raised;
        let text = serde_json::to_vec(&self.known).map_err(std::io::Error::other);
        let written = text.and_then(|text| files::replace(&self.path, &text));
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "cannot count the uses of devices");
        }
    }
}
