//! The image of a disk that a PC's firmware boots from: a partition table, GRUB in the gap behind it, and one
//! partition with a Debian root that holds its own kernel. Made from files alone, so that no privilege is
//! needed.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Recipe, packing};
use crate::paths::find_program;
use crate::process::run;

/// Size of the root filesystem; sparse, so it costs what it holds.
pub(super) const ROOT_MIB: u64 = 512;
/// What GRUB does, built into it.
pub(super) const CONFIG: &str = "set root=(hd0,msdos1)\n\
    linux /boot/vmlinuz console=ttyS0 panic=-1 quiet mitigations=off rig.root=/dev/vda1\n\
    initrd /boot/initrd\n\
    boot\n";
/// GRUB's modules that [`CONFIG`] needs.
const MODULES: &[&str] = &["biosdisk", "part_msdos", "ext2", "linux", "boot"];
/// Where grub-pc-bin keeps its parts.
const GRUB: &str = "/usr/lib/grub/i386-pc";
const SECTOR: usize = 512;
/// The partition begins at 1 MiB, as everywhere; the gap before it holds GRUB.
const PARTITION_SECTOR: u32 = 2048;
/// Code in front of the table in the first sector.
const TABLE_OFFSET: usize = 446;
/// Partition type of a Linux filesystem.
const TYPE_LINUX: u8 = 0x83;

/// Makes the disk `image` of the unpacked Debian `root` and the unpacked `kernel` package.
pub(super) fn make(
    recipe: &Recipe,
    work: &Path,
    root: &Path,
    kernel: &Path,
    image: &Path,
) -> Result<()> {
    let boot = root.join("boot");
    std::fs::create_dir_all(&boot)?;
    std::fs::copy(packing::find_kernel(kernel)?, boot.join("vmlinuz"))
        .context("copy the kernel into the root")?;
    packing::pack_loader(recipe, work, root, kernel, &boot.join("initrd"))?;

    let loader = boot_loader(work)?;
    let mut file = std::fs::File::create(image).context("create the boot disk")?;
    file.write_all(&loader).context("write the boot loader")?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&first_sector(&loader))
        .context("write the partition table")?;
    file.set_len(u64::from(PARTITION_SECTOR) * SECTOR as u64 + (ROOT_MIB << 20))?;
    drop(file);

    let mke2fs = find_program("mke2fs").context("mke2fs is missing: install e2fsprogs")?;
    let offset = u64::from(PARTITION_SECTOR) * SECTOR as u64;
    run(Command::new(mke2fs)
        .args(["-q", "-t", "ext4", "-F", "-L", "rig-root", "-E"])
        .arg(format!("root_owner=0:0,offset={offset}"))
        .arg("-d")
        .arg(root)
        .arg(image)
        .arg(format!("{ROOT_MIB}M")))?;
    Ok(())
}

/// GRUB's first sector and, directly behind it as that expects, its core.
fn boot_loader(work: &Path) -> Result<Vec<u8>> {
    let config = work.join("grub.cfg");
    let core = work.join("core.img");
    std::fs::write(&config, CONFIG)?;
    run(Command::new("grub-mkimage")
        .args([
            "--format=i386-pc",
            "--prefix=/boot/grub",
            "--directory",
            GRUB,
        ])
        .arg("--config")
        .arg(&config)
        .arg("--output")
        .arg(&core)
        .args(MODULES))?;
    let mut loader = std::fs::read(Path::new(GRUB).join("boot.img"))
        .context("read GRUB's first sector: install grub-pc-bin")?;
    ensure!(loader.len() == SECTOR, "GRUB's boot.img is not one sector");
    loader.extend(std::fs::read(&core)?);
    ensure!(
        loader.len() <= PARTITION_SECTOR as usize * SECTOR,
        "GRUB's core does not fit before the partition"
    );
    Ok(loader)
}

/// The loader's first sector with a table of one bootable partition (layout: the PC's master boot record).
fn first_sector(loader: &[u8]) -> Vec<u8> {
    let sectors = (ROOT_MIB << 20) / SECTOR as u64;
    let mut entry = [0u8; 16];
    entry[0] = 0x80;
    entry[4] = TYPE_LINUX;
    entry[8..12].copy_from_slice(&PARTITION_SECTOR.to_le_bytes());
    entry[12..].copy_from_slice(&(sectors as u32).to_le_bytes());
    let mut sector = loader[..SECTOR].to_vec();
    sector[TABLE_OFFSET..].fill(0);
    sector[TABLE_OFFSET..TABLE_OFFSET + entry.len()].copy_from_slice(&entry);
    sector[SECTOR - 2..].copy_from_slice(&[0x55, 0xAA]);
    sector
}
