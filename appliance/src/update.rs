//! Updates: the slot that does not run is written, tried once, and kept if the machine is well with it.
//!
//! The order makes every loss of power harmless. The boot loaders forget the other slot before a byte of it
//! is written, and hear of it again when it was verified; then they try it once, by themselves going back
//! to the slot before. Only [`boot_check`] makes it the one that is started from then on.

mod boot_check;
mod boot_loaders;
pub mod cluster;
mod install;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::files::{read_if_there, replace};
use crate::layout::Slot;
use crate::machine::Machine;

pub use boot_check::{Outcome, boot_check};
pub use install::{Installed, install, manifest, verify};

/// First member of an update's archive.
pub const MANIFEST: &str = "manifest.json";
/// The form of updates that this version writes and reads.
const FORMAT: u32 = 1;

/// What an update is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The form of the archive.
    pub format: u32,
    /// Version of the appliance.
    pub version: String,
    /// At the top of the root's verity tree: 64 hexadecimal digits.
    pub root_hash: String,
    /// What the kernel is told.
    pub command_line: String,
}

impl Manifest {
    /// Of an update in this version's form.
    pub fn new(version: &str, root_hash: &str, command_line: &str) -> Self {
        Self {
            format: FORMAT,
            version: version.to_owned(),
            root_hash: root_hash.to_owned(),
            command_line: command_line.to_owned(),
        }
    }

    fn parse(text: &[u8]) -> Result<Self> {
        let manifest: Self =
            serde_json::from_slice(text).context("the update's manifest is damaged")?;
        ensure!(
            manifest.format == FORMAT,
            "the update is of form {}, this version reads form {FORMAT}: update to a version between first",
            manifest.format
        );
        ensure!(
            manifest.root_hash.len() == 64
                && manifest.root_hash.bytes().all(|b| b.is_ascii_hexdigit()),
            "the update's root hash is none"
        );
        ensure!(
            !manifest.command_line.contains('\n'),
            "the update's command line has several lines"
        );
        Ok(manifest)
    }
}

/// The last update, as the machine remembers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version that was installed.
    pub version: String,
    /// Version that ran then.
    pub before: String,
    /// Hash of the root that was installed.
    pub root_hash: String,
    /// How far it is.
    pub state: State,
}

/// How far an update is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The slot is being written; the boot loaders do not know it.
    Writing,
    /// The next boot tries it.
    Written,
    /// It runs, and stays.
    Good,
    /// The machine went back to the version before.
    FellBack,
}

const RECORD: &str = "update.json";

impl Record {
    /// The last update, if there was one.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn load(machine: &Machine) -> Result<Option<Self>> {
        let text = read_if_there(&machine.path(RECORD))?;
        text.map(|text| serde_json::from_str(&text).context("the record of the last update"))
            .transpose()
    }

    fn keep(&self, machine: &Machine) -> Result<()> {
        replace(
            &machine.path(RECORD),
            &serde_json::to_vec_pretty(self)?,
            0o644,
        )
    }
}

/// Where the parts of this machine are; tests have others.
#[derive(Debug, Clone)]
pub struct Places {
    /// Mounted EFI system partition.
    pub esp: PathBuf,
    /// Directory of links to the boot disk's partitions, by label.
    pub partitions: PathBuf,
    /// The kernel's command line.
    pub command_line: PathBuf,
    /// os-release(5) of the running system.
    pub release: PathBuf,
    /// Public key that updates are signed for.
    pub key: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            esp: crate::layout::ESP_MOUNT.into(),
            partitions: "/dev/penstock-boot".into(),
            command_line: "/proc/cmdline".into(),
            release: "/usr/lib/os-release".into(),
            key: "/usr/share/penstock/update-key.pub".into(),
        }
    }
}

impl Places {
    /// The hash of the root that runs.
    ///
    /// # Errors
    /// This is no appliance.
    pub fn running_root_hash(&self) -> Result<String> {
        let line = std::fs::read_to_string(&self.command_line)
            .context("read the kernel's command line")?;
        let hash = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("roothash="));
        hash.map(str::to_owned)
            .context("this machine does not run the appliance: its kernel has no roothash")
    }

    /// The version that runs.
    ///
    /// # Errors
    /// This is no appliance.
    pub fn running_version(&self) -> Result<String> {
        let text = std::fs::read_to_string(&self.release).context("read os-release")?;
        let version = text
            .lines()
            .find_map(|line| line.strip_prefix("IMAGE_VERSION="));
        version
            .map(|version| version.trim_matches('"').to_owned())
            .context("this machine does not run the appliance: its os-release has no IMAGE_VERSION")
    }

    fn partition(&self, label: &str) -> Result<PathBuf> {
        let link = self.partitions.join(label);
        std::fs::canonicalize(&link)
            .with_context(|| format!("this machine's boot disk has no partition {label}"))
    }

    /// The slot that runs: the one whose partition is named by the running root's hash.
    fn running_slot(&self, uuid_of: impl Fn(&Path) -> Result<String>) -> Result<Slot> {
        let (root, _) = crate::layout::partition_uuids(&self.running_root_hash()?);
        for slot in [Slot::A, Slot::B] {
            if uuid_of(&self.partition(&slot.root_label())?)?.eq_ignore_ascii_case(&root) {
                return Ok(slot);
            }
        }
        anyhow::bail!("no partition of the boot disk holds the root that runs (UUID {root})")
    }
}

/// Has the next boot try the slot that does not run, once.
///
/// # Errors
/// There is nothing in it that was kept, or the EFI system partition cannot be written.
pub fn try_other_slot(places: &Places) -> Result<Slot> {
    let slot = places.running_slot(install::partition_uuid)?.other();
    boot_loaders::BootLoaders { esp: &places.esp }.try_again(slot)?;
    Ok(slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_of_another_form_is_refused() {
        let mut manifest = Manifest::new("2", &"a".repeat(64), "root=/dev/mapper/root");
        let text = serde_json::to_vec(&manifest).expect("JSON");
        assert_eq!(Manifest::parse(&text).expect("a manifest"), manifest);
        manifest.format = 2;
        let text = serde_json::to_vec(&manifest).expect("JSON");
        assert!(
            Manifest::parse(&text)
                .expect_err("form 2")
                .to_string()
                .contains("form 2")
        );
        manifest = Manifest::new("2", "xyz", "");
        let text = serde_json::to_vec(&manifest).expect("JSON");
        assert!(Manifest::parse(&text).is_err());
    }

    #[test]
    fn the_running_slot_is_the_one_of_the_running_hash() {
        let dir = tempfile::tempdir().expect("a directory");
        let hash = "0123456789abcdef0123456789abcdef".repeat(2);
        std::fs::write(
            dir.path().join("cmdline"),
            format!("ro roothash={hash} quiet\n"),
        )
        .expect("written");
        for label in ["penstock-root-a", "penstock-root-b"] {
            std::fs::write(dir.path().join(label), "").expect("written");
        }
        let places = Places {
            partitions: dir.path().into(),
            command_line: dir.path().join("cmdline"),
            ..Places::default()
        };
        let uuid = |path: &Path| {
            let is_b = path.ends_with("penstock-root-b");
            Ok(if is_b {
                "01234567-89AB-CDEF-0123-456789ABCDEF"
            } else {
                "0"
            }
            .to_owned())
        };
        assert_eq!(places.running_slot(uuid).expect("a slot"), Slot::B);
        assert!(places.running_slot(|_| Ok(String::new())).is_err());
    }
}
