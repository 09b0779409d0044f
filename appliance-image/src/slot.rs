//! What one of the two slots of a disk holds: the root filesystem (EROFS), its verity tree, and the kernel
//! that knows the root's hash, as one signed-for unit (UKI, for UEFI) and in parts (for BIOS).
//!
//! The hash names the partitions, too, as the Discoverable Partitions Specification has it: the root's UUID
//! is its first half, the verity tree's UUID its second. So a kernel finds the slot that it belongs to,
//! whichever of the two that is.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::roots::Roots;
use crate::signing::sha256_hex;
use crate::{Build, Kinds, Work};

/// Parts of dracut that find a root filesystem below dm-verity.
const DRACUT_MODULES: &str = "systemd systemd-initrd systemd-veritysetup systemd-udevd systemd-journald \
    systemd-tmpfiles systemd-sysctl systemd-modules-load dm rootfs-block fs-lib udev-rules base shutdown \
    dracut-systemd";
/// Kernel modules of the disks that an appliance boots from, and of the ways by which a hypervisor hands it
/// credentials: the first process reads these once, in the initramfs.
const DRIVERS: &str = "virtio_pci virtio_blk virtio_scsi sd_mod sr_mod ahci ata_piix nvme usb_storage uas \
    xhci_pci megaraid_sas mpt3sas mptspi mptsas vmw_pvscsi hv_storvsc erofs dm_mod dm_verity \
    qemu_fw_cfg dmi_sysfs";
/// What the kernel is told besides the root's hash. `rd.shell=0`: no shell in the initramfs; a root that
/// cannot be mounted within two minutes restarts the machine, which falls back to the other slot if this one
/// is new.
const COMMAND_LINE: &str = "root=/dev/mapper/root ro rootfstype=erofs systemd.gpt_auto=0 \
    systemd.machine_id=firmware console=tty0 console=ttyS0,115200 panic=30 rd.shell=0 rd.emergency=reboot \
    rd.timeout=120 quiet";
/// Bytes that EROFS compresses together.
const CLUSTER_BYTES: u32 = 65536;

/// A slot's content, below the place of work.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// EROFS.
    pub(crate) root: PathBuf,
    /// dm-verity's hash tree of it, with a superblock.
    pub(crate) verity: PathBuf,
    /// SHA-256 at the top of the tree, as 64 hexadecimal digits.
    pub(crate) root_hash: String,
    /// Unified kernel image.
    pub(crate) uki: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    /// What BIOS machines hand the kernel; the UKI has it inside.
    pub(crate) command_line: String,
}

/// Makes a slot of the appliance's tree.
pub(crate) fn make(
    build: &Build<'_>,
    roots: &Roots,
    tree: &Path,
    work: &Work<'_>,
    kinds: Kinds,
) -> Result<Slot> {
    let release = &roots.kernel_release;
    let packing = Packing::of(kinds);
    let initramfs = initramfs(roots, work, &packing).context("make the initramfs")?;
    std::fs::copy(
        roots.kernel.join("boot").join(format!("vmlinuz-{release}")),
        work.path("vmlinuz"),
    )
    .context("copy the kernel")?;
    std::fs::copy(tree.join("usr/lib/os-release"), work.path("os-release"))?;
    let level = packing.root;
    let uuid = uuid_of(&format!("root {}", build.version));
    work.script(&format!(
        "mkfs.erofs --quiet -z{level} -C{CLUSTER_BYTES} --all-time -T{} -U{uuid} \
         /build/root.erofs /build/tree",
        work.epoch
    ))
    .context("pack the root filesystem")?;
    let salt = sha256_hex(format!("salt {}", build.version).as_bytes());
    let uuid = uuid_of(&format!("verity {}", build.version));
    work.script(&format!(
        "veritysetup format --salt={salt} --uuid={uuid} --root-hash-file=/build/root.hash \
         /build/root.erofs /build/root.verity"
    ))
    .context("make the root's verity tree")?;
    let root_hash = std::fs::read_to_string(work.path("root.hash"))?
        .trim()
        .to_owned();
    ensure!(
        root_hash.len() == 64 && root_hash.bytes().all(|b| b.is_ascii_hexdigit()),
        "veritysetup wrote no SHA-256: '{root_hash}'"
    );
    let command_line = format!("{COMMAND_LINE} roothash={root_hash}");
    std::fs::write(work.path("cmdline"), &command_line)?;
    work.script(&format!(
        "ukify build --linux=/build/vmlinuz --initrd=/build/initramfs --cmdline=@/build/cmdline \
         --os-release=@/build/os-release --uname={release} --output=/build/penstock.efi"
    ))
    .context("make the unified kernel image")?;
    Ok(Slot {
        root: work.path("root.erofs"),
        verity: work.path("root.verity"),
        root_hash,
        uki: work.path("penstock.efi"),
        kernel: work.path("vmlinuz"),
        initramfs,
        command_line,
    })
}

/// How a slot is compressed.
struct Packing {
    /// The initramfs, as zstd's options.
    initramfs: &'static str,
    /// The root, as mkfs.erofs has it.
    root: &'static str,
}

impl Packing {
    /// What is published is small; what is tested is built quickly.
    fn of(kinds: Kinds) -> Self {
        match kinds {
            Kinds::All => Self {
                initramfs: "-19",
                root: "zstd,level=19",
            },
            Kinds::Bootable | Kinds::Update => Self {
                initramfs: "-1",
                root: "lz4",
            },
        }
    }
}

fn initramfs(roots: &Roots, work: &Work<'_>, packing: &Packing) -> Result<PathBuf> {
    work.script(&format!(
        "dracut --force --reproducible --no-hostonly --no-hostonly-cmdline --no-early-microcode --quiet \
         --tmpdir /build --modules '{DRACUT_MODULES}' --drivers '{DRIVERS}' --filesystems erofs \
         --compress 'zstd {} -T1' --kver {} /build/initramfs",
        packing.initramfs, roots.kernel_release
    ))?;
    Ok(work.path("initramfs"))
}

/// A UUID that `text` always has (RFC 9562, version 8: of a hash).
pub(crate) fn uuid_of(text: &str) -> String {
    let hash = sha256_hex(text.as_bytes());
    let (a, b, c, d, e) = (
        &hash[..8],
        &hash[8..12],
        &hash[13..16],
        &hash[17..20],
        &hash[20..32],
    );
    format!("{a}-{b}-8{c}-8{d}-{e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_of_texts_are_of_version_8() {
        let uuid = uuid_of("root 0.1.0");
        assert_eq!(uuid.len(), 36);
        assert_eq!(&uuid[14..15], "8");
        assert_eq!(&uuid[19..20], "8");
        assert_ne!(uuid, uuid_of("verity 0.1.0"));
    }
}
