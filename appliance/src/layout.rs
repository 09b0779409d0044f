//! How an appliance's boot disk is divided, and where the boot loaders look. What builds the image and what
//! updates it both go by this.
//!
//! | partition | label | content |
//! |---|---|---|
//! | 1 | `penstock-bios` | GRUB's core, for BIOS |
//! | 2 | `penstock-esp` | EFI system partition (FAT32): systemd-boot, GRUB, both slots' kernels |
//! | 3, 4 | `penstock-root-a`, `penstock-verity-a` | slot A: EROFS and its dm-verity tree |
//! | 5, 6 | `penstock-root-b`, `penstock-verity-b` | slot B |
//! | 7 | `penstock-state` | `/var`: identity, configuration, log; made at the first boot |
//! | 8 | `penstock-data` | `/var/lib/penstock`: metadata, default device; likewise, the rest of the disk |

use std::fmt;

/// Bytes of a sector, as partition tables count.
pub const SECTOR: u64 = 512;
/// Where partitions begin and end: multiples of this many bytes.
pub const ALIGNMENT: u64 = 1 << 20;
/// Size of the partition of GRUB's core, in bytes.
pub const BIOS_BYTES: u64 = 1 << 20;
/// Size of the EFI system partition, in bytes: two slots' kernels, twice each, with room to write a third.
pub const ESP_BYTES: u64 = 384 << 20;
/// Size of a slot's root, in bytes: what it holds today, three times.
pub const ROOT_BYTES: u64 = 640 << 20;
/// Size of a slot's verity tree, in bytes; a tree needs 1/127 of its root.
pub const VERITY_BYTES: u64 = 16 << 20;
/// Size of the disk in the image, in bytes. State and data begin with what is left of it.
pub const DISK_BYTES: u64 = 8 << 30;

/// Label of the EFI system partition in the partition table.
pub const ESP_LABEL: &str = "penstock-esp";
/// Where it is mounted.
pub const ESP_MOUNT: &str = "/efi";
/// Directory of a slot's kernel, on the EFI system partition; the slot's letter follows.
pub const KERNELS: &str = "penstock";
/// Directory of GRUB's files there.
pub const GRUB: &str = "grub";
/// GRUB's environment block there: which slot to start, and which to try once.
pub const GRUB_ENVIRONMENT: &str = "grub/grubenv";
/// systemd-boot's entries there.
pub const ENTRIES: &str = "loader/entries";

/// One of the two places for a root filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The one that the image brings.
    A,
    /// The other.
    B,
}

impl Slot {
    /// The slot that this one is not.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// Its letter in names of files.
    pub fn letter(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
        }
    }

    /// Label of the partition of its root.
    pub fn root_label(self) -> String {
        format!("penstock-root-{}", self.letter())
    }

    /// Label of the partition of its verity tree.
    pub fn verity_label(self) -> String {
        format!("penstock-verity-{}", self.letter())
    }

    /// Number of the partition of its root; the verity tree's follows.
    pub fn root_partition(self) -> u32 {
        match self {
            Self::A => 3,
            Self::B => 5,
        }
    }

    /// The slot of a partition label of [`Self::root_label`].
    pub fn of_root_label(label: &str) -> Option<Self> {
        [Self::A, Self::B]
            .into_iter()
            .find(|slot| slot.root_label() == label)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "A",
            Self::B => "B",
        })
    }
}

/// An entry of systemd-boot (the Boot Loader Specification, type 1) for the unified kernel of a slot.
/// `sequence` counts installations: the highest is started, unless its tries are used up.
pub fn boot_entry(slot: Slot, version: &str, sequence: u64) -> String {
    format!(
        "title Penstock appliance {version}\nsort-key penstock\nversion {sequence}\n\
         efi /{KERNELS}/{}/penstock.efi\n",
        slot.letter()
    )
}

/// GRUB's commands that start a slot's kernel.
pub fn grub_slot(slot: Slot, command_line: &str) -> String {
    let directory = format!("/{KERNELS}/{}", slot.letter());
    format!("linux {directory}/vmlinuz {command_line}\ninitrd {directory}/initramfs\n")
}

/// GRUB's environment block: 1024 bytes, lines of `name=value`, filled up with `#`.
pub fn grub_environment(lines: &[(&str, &str)]) -> Vec<u8> {
    const BYTES: usize = 1024;
    let mut block = b"# GRUB Environment Block\n".to_vec();
    for (name, value) in lines {
        block.extend(format!("{name}={value}\n").bytes());
    }
    block.resize(BYTES, b'#');
    block
}

/// The UUIDs that a slot's partitions have, so that its kernel finds them: the root's, of the first half of
/// the root hash (64 hexadecimal digits), and the verity tree's, of the second. Source: the Discoverable
/// Partitions Specification.
pub fn partition_uuids(root_hash: &str) -> (String, String) {
    let uuid = |digits: &str| {
        let part = |from: usize, to: usize| &digits[from..to];
        [
            part(0, 8),
            part(8, 12),
            part(12, 16),
            part(16, 20),
            part(20, 32),
        ]
        .join("-")
    };
    (uuid(&root_hash[..32]), uuid(&root_hash[32..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_hash_names_both_partitions() {
        let hash = "0123456789abcdef0123456789abcdeffedcba9876543210fedcba9876543210";
        let (root, verity) = partition_uuids(hash);
        assert_eq!(root, "01234567-89ab-cdef-0123-456789abcdef");
        assert_eq!(verity, "fedcba98-7654-3210-fedc-ba9876543210");
    }

    #[test]
    fn an_environment_block_has_the_size_that_grub_expects() {
        let block = grub_environment(&[("slot", "a"), ("try", "b")]);
        assert_eq!(block.len(), 1024);
        assert!(block.starts_with(b"# GRUB Environment Block\nslot=a\ntry=b\n####"));
    }

    #[test]
    fn everything_fits_on_the_disk() {
        let used = ALIGNMENT + BIOS_BYTES + ESP_BYTES + 2 * (ROOT_BYTES + VERITY_BYTES);
        assert!(used + (2 << 30) < DISK_BYTES, "{used}");
        assert_eq!(Slot::of_root_label("penstock-root-b"), Some(Slot::B));
        assert_eq!(Slot::of_root_label("root"), None);
    }
}
