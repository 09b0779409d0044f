//! What `penstock device add` and `remove` changed of a node's devices, kept in its data directory. The
//! configuration names devices, too; this list adds to it, and takes away what was removed although the
//! configuration still names it.
//!
//! It is a JSON file, replaced as a whole.

use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use api::size::Size;
use config::files;
use config::{DeviceSpec, SizedDevice};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The list's name in the data directory.
const NAME: &str = "device-list.json";

/// What was added and removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceList {
    /// Devices to open beside those that the configuration names.
    #[serde(default)]
    pub added: Vec<Added>,
    /// Devices to leave alone although the configuration may name them.
    #[serde(default)]
    pub removed: Vec<Removed>,
}

/// A device that was added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Added {
    /// Where it is.
    pub path: PathBuf,
    /// Size of the file that is made if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// A device that was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Removed {
    /// The identity in its label.
    pub uuid: Uuid,
    /// Where it was: nothing is made there again.
    pub path: PathBuf,
}

impl Added {
    /// As the configuration would name it.
    pub fn spec(&self) -> DeviceSpec {
        let path = self.path.clone();
        match self.size_bytes {
            Some(size) => DeviceSpec::Sized(SizedDevice {
                path,
                size: Size(size),
            }),
            None => DeviceSpec::Path(path),
        }
    }
}

impl DeviceList {
    /// Reads the list in a data directory; without one nothing was changed.
    pub fn read(data: &Path) -> Result<Self> {
        let path = data.join(NAME);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(e).context(|| format!("read {}", path.display())),
        };
        serde_json::from_slice(&text).map_err(|e| {
            Failure::new(
                Kind::Failed,
                format!(
                    "the list of added and removed devices {} cannot be read: {e}",
                    path.display()
                ),
                "correct it, or move it away and name the added devices in the configuration",
            )
        })
    }

    /// Replaces the list in a data directory, durably.
    pub fn write(&self, data: &Path) -> Result<()> {
        let path = data.join(NAME);
        let text = serde_json::to_vec_pretty(self).map_err(|e| Failure::plain(Kind::Failed, e))?;
        files::replace(&path, &text).context_hint(
            || format!("write {}", path.display()),
            "nothing was changed; make room or correct the permissions, then repeat",
        )
    }

    /// Whether a device is to be left alone.
    pub fn is_removed(&self, uuid: Uuid) -> bool {
        self.removed.iter().any(|one| one.uuid == uuid)
    }

    /// Notes that a device is added.
    pub fn add(&mut self, added: Added) {
        self.forget(&added.path);
        self.removed.retain(|one| one.path != added.path);
        self.added.push(added);
    }

    /// The addition of a device did not take place.
    pub fn forget(&mut self, path: &Path) {
        self.added.retain(|one| one.path != path);
    }

    /// Notes that a device was removed.
    pub fn remove(&mut self, uuid: Uuid, path: &Path) {
        self.forget(path);
        if !self.is_removed(uuid) {
            let path = path.to_owned();
            self.removed.push(Removed { uuid, path });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_survives_and_says_what_is_wrong_with_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(DeviceList::read(dir.path()).unwrap(), DeviceList::default());
        let added = |path: &str| Added {
            path: path.into(),
            size_bytes: Some(1 << 30),
        };
        let mut list = DeviceList {
            added: vec![added("/a"), added("/b")],
            removed: Vec::new(),
        };
        let uuid = Uuid::from_u128(7);
        list.remove(uuid, Path::new("/b"));
        list.remove(uuid, Path::new("/b"));
        list.write(dir.path()).unwrap();
        let read = DeviceList::read(dir.path()).unwrap();
        assert_eq!(read, list);
        assert_eq!((read.added.len(), read.removed.len()), (1, 1));
        assert!(read.is_removed(uuid));

        std::fs::write(dir.path().join(NAME), "{\"added\": 3}").unwrap();
        let told = DeviceList::read(dir.path()).unwrap_err();
        assert!(
            told.to_string().contains(NAME) && told.hint.is_some(),
            "{told}"
        );
    }
}
