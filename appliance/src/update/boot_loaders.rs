//! What the two boot loaders are told, on the EFI system partition. The firmware decides which of them runs;
//! both are told the same.
//!
//! systemd-boot counts tries in the names of its entries (`penstock-b+1.conf`, then `penstock-b+0-1.conf`:
//! Automatic Boot Assessment); an entry without tries left comes last. GRUB has `try` in its environment
//! block, and forgets it as it starts that slot.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::files::{read_if_there, replace};
use crate::layout::{
    ENTRIES, GRUB_ENVIRONMENT, KERNELS, Slot, boot_entry, grub_environment, grub_slot,
};

const MODE: u32 = 0o644;

/// The mounted EFI system partition.
#[derive(Debug)]
pub(super) struct BootLoaders<'a> {
    pub(super) esp: &'a Path,
}

impl BootLoaders<'_> {
    /// Directory of a slot's kernel.
    pub(super) fn kernels(&self, slot: Slot) -> PathBuf {
        self.esp.join(KERNELS).join(slot.letter().to_string())
    }

    /// Neither starts `slot` any more; both start the other one.
    pub(super) fn forget(&self, slot: Slot) -> Result<()> {
        self.write_environment(slot.other(), None)?;
        for entry in self.entries(slot)? {
            std::fs::remove_file(&entry).with_context(|| format!("remove {}", entry.display()))?;
        }
        self.sync()
    }

    /// Both try `slot` once, and start the other one after that.
    pub(super) fn try_once(&self, slot: Slot, version: &str, command_line: &str) -> Result<()> {
        let grub = self.kernels(slot).join("grub.cfg");
        replace(&grub, grub_slot(slot, command_line).as_bytes(), MODE)?;
        let entry = boot_entry(slot, version, self.last_sequence()? + 1);
        replace(&self.entry(slot, "+1"), entry.as_bytes(), MODE)?;
        self.write_environment(slot.other(), Some(slot))?;
        self.sync()
    }

    /// Both try once again a slot that they know.
    pub(super) fn try_again(&self, slot: Slot) -> Result<()> {
        let entries = self.entries(slot)?;
        let entry = entries
            .first()
            .with_context(|| format!("slot {slot} holds nothing that starts"))?;
        let text = read_if_there(entry)?.unwrap_or_default();
        let next = format!("version {}", self.last_sequence()? + 1);
        let lines = text.lines().map(|line| {
            if line.starts_with("version ") {
                &next
            } else {
                line
            }
        });
        let text: String = lines.map(|line| format!("{line}\n")).collect();
        replace(&self.entry(slot, "+1"), text.as_bytes(), MODE)?;
        for entry in entries {
            if entry != self.entry(slot, "+1") {
                std::fs::remove_file(&entry)
                    .with_context(|| format!("remove {}", entry.display()))?;
            }
        }
        self.write_environment(slot.other(), Some(slot))?;
        self.sync()
    }

    /// Both start `slot` from now on.
    pub(super) fn keep(&self, slot: Slot) -> Result<()> {
        self.write_environment(slot, None)?;
        let counted: Vec<PathBuf> = self.entries(slot)?;
        let kept = self.entry(slot, "");
        for entry in counted.iter().filter(|entry| **entry != kept) {
            std::fs::rename(entry, &kept).with_context(|| format!("rename {}", entry.display()))?;
        }
        self.sync()
    }

    fn entry(&self, slot: Slot, tries: &str) -> PathBuf {
        self.esp
            .join(ENTRIES)
            .join(format!("penstock-{}{tries}.conf", slot.letter()))
    }

    /// systemd-boot's entries of a slot; more than one only after a loss of power.
    fn entries(&self, slot: Slot) -> Result<Vec<PathBuf>> {
        let directory = self.esp.join(ENTRIES);
        let begin = format!("penstock-{}", slot.letter());
        let mut found = Vec::new();
        let listed = std::fs::read_dir(&directory).with_context(|| {
            format!(
                "read {}: is the EFI system partition mounted?",
                directory.display()
            )
        })?;
        for entry in listed {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let rest = name
                .strip_prefix(&begin)
                .and_then(|rest| rest.strip_suffix(".conf"));
            if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('+')) {
                found.push(directory.join(name));
            }
        }
        found.sort();
        Ok(found)
    }

    /// The highest number of an installation.
    fn last_sequence(&self) -> Result<u64> {
        let mut last = 0;
        for entry in [self.entries(Slot::A)?, self.entries(Slot::B)?].concat() {
            let text = read_if_there(&entry)?.unwrap_or_default();
            let version = text.lines().find_map(|line| line.strip_prefix("version "));
            last = last.max(
                version
                    .and_then(|version| version.trim().parse().ok())
                    .unwrap_or(0),
            );
        }
        Ok(last)
    }

    fn write_environment(&self, slot: Slot, tried: Option<Slot>) -> Result<()> {
        let (slot, tried) = (
            slot.letter().to_string(),
            tried.map(|slot| slot.letter().to_string()),
        );
        let mut lines = vec![("slot", slot.as_str())];
        lines.extend(tried.as_deref().map(|tried| ("try", tried)));
        // GRUB writes to the blocks that the file has: a new file of the same length is as good.
        replace(
            &self.esp.join(GRUB_ENVIRONMENT),
            &grub_environment(&lines),
            MODE,
        )
    }

    fn sync(&self) -> Result<()> {
        let root = File::open(self.esp).context("open the EFI system partition")?;
        rustix::fs::syncfs(&root).context("write the EFI system partition")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(esp: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(esp.join(ENTRIES)).expect("entries");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("UTF-8")
            })
            .collect();
        names.sort();
        names
    }

    fn environment(esp: &Path) -> String {
        let block = std::fs::read_to_string(esp.join(GRUB_ENVIRONMENT)).expect("an environment");
        assert_eq!(block.len(), 1024);
        block
            .lines()
            .skip(1)
            .filter(|line| !line.starts_with('#'))
            .collect::<Vec<_>>()
            .join(",")
    }

    #[test]
    fn a_slot_is_tried_once_and_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let esp = dir.path();
        std::fs::create_dir_all(esp.join(ENTRIES)).expect("made");
        std::fs::write(
            esp.join(ENTRIES).join("penstock-a.conf"),
            boot_entry(Slot::A, "1", 1),
        )
        .expect("written");
        let loaders = BootLoaders { esp };
        loaders.forget(Slot::B).expect("forgotten");
        assert_eq!(environment(esp), "slot=a");
        loaders
            .try_once(Slot::B, "2", "roothash=x")
            .expect("written");
        assert_eq!(names(esp), ["penstock-a.conf", "penstock-b+1.conf"]);
        assert_eq!(environment(esp), "slot=a,try=b");
        let entry =
            std::fs::read_to_string(esp.join(ENTRIES).join("penstock-b+1.conf")).expect("read");
        assert!(entry.contains("version 2\n"), "{entry}");

        // As systemd-boot does when it tries it.
        let entries = esp.join(ENTRIES);
        std::fs::rename(
            entries.join("penstock-b+1.conf"),
            entries.join("penstock-b+0-1.conf"),
        )
        .expect("moved");
        loaders.keep(Slot::B).expect("kept");
        assert_eq!(names(esp), ["penstock-a.conf", "penstock-b.conf"]);
        assert_eq!(environment(esp), "slot=b");

        loaders.forget(Slot::A).expect("forgotten");
        assert_eq!(names(esp), ["penstock-b.conf"]);
        loaders
            .try_once(Slot::A, "1", "roothash=y")
            .expect("written");
        let entry = std::fs::read_to_string(entries.join("penstock-a+1.conf")).expect("read");
        assert!(
            entry.contains("version 3\n"),
            "an older version is newest here: {entry}"
        );
    }
}
