//! The EFI system partition: systemd-boot for UEFI, GRUB's files for BIOS, and the kernel of slot A for both.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use appliance::layout::{
    ENTRIES, ESP_BYTES, GRUB, GRUB_ENVIRONMENT, KERNELS, Slot as Place, boot_entry,
    grub_environment, grub_slot,
};

use crate::Work;
use crate::slot::Slot;

/// systemd-boot: nobody edits a kernel's command line, which would give a shell without a credential.
const LOADER: &str =
    "timeout 0\neditor no\nauto-entries no\nauto-firmware no\nsecure-boot-enroll off\n";
/// GRUB's configuration.
const GRUB_CONFIG: &str = include_str!("grub.cfg");
/// Volume number of the filesystem.
const FAT_ID: &str = "50454e53";

/// Makes the filesystem of `slot` in slot A.
pub(crate) fn make(slot: &Slot, version: &str, work: &Work<'_>) -> Result<PathBuf> {
    let root = work.path("esp");
    let place = Place::A;
    let kernels = root.join(KERNELS).join(place.letter().to_string());
    let removable = root.join("EFI/BOOT");
    for directory in [&kernels, &removable, &root.join(ENTRIES), &root.join(GRUB)] {
        std::fs::create_dir_all(directory)?;
    }
    let loader = work
        .tools
        .join("usr/lib/systemd/boot/efi/systemd-bootx64.efi");
    copy(&loader, &removable.join("BOOTX64.EFI"))?;
    copy(&slot.uki, &kernels.join("penstock.efi"))?;
    copy(&slot.kernel, &kernels.join("vmlinuz"))?;
    copy(&slot.initramfs, &kernels.join("initramfs"))?;
    let entry = format!("{ENTRIES}/penstock-{}.conf", place.letter());
    let grub_of_slot = grub_slot(place, &slot.command_line);
    let texts: [(&str, &[u8]); 5] = [
        ("loader/loader.conf", LOADER.as_bytes()),
        (&entry, &boot_entry(place, version, 1).into_bytes()),
        ("grub/grub.cfg", GRUB_CONFIG.as_bytes()),
        (GRUB_ENVIRONMENT, &grub_environment(&[("slot", "a")])),
        ("penstock/a/grub.cfg", grub_of_slot.as_bytes()),
    ];
    for (path, text) in texts {
        std::fs::write(root.join(path), text).with_context(|| format!("write {path}"))?;
    }
    let image = work.path("esp.fat");
    std::fs::File::create(&image)?.set_len(ESP_BYTES)?;
    // Times on a FAT are local: TZ is UTC there. mcopy -m keeps those of files, which are set before.
    work.script(&format!(
        "mkfs.vfat --invariant -F 32 -n PENSTOCK -i {FAT_ID} /build/esp.fat >/dev/null\n\
         find /build/esp -exec touch --no-dereference --date=@{} {{}} +\n\
         cd /build/esp && mcopy -s -m -i /build/esp.fat EFI loader grub {KERNELS} ::",
        work.epoch
    ))
    .context("make the EFI system partition")?;
    Ok(image)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("copy {} to {}", from.display(), to.display()))
}
