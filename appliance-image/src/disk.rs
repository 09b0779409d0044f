//! The whole disk: partition table, GRUB's core, EFI system partition, slot A. Slot B is empty; state and
//! data are made by the first boot.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use appliance::layout::{
    ALIGNMENT, BIOS_BYTES, DISK_BYTES, ESP_BYTES, ESP_LABEL, ROOT_BYTES, SECTOR, Slot as Place,
    VERITY_BYTES, partition_uuids,
};

use crate::slot::{Slot, uuid_of};
use crate::{Work, esp};

/// Partition types: the Discoverable Partitions Specification, and GRUB's.
const TYPE_BIOS: &str = "21686148-6449-6E6F-744E-656564454649";
const TYPE_ESP: &str = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B";
const TYPE_ROOT: &str = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709";
const TYPE_VERITY: &str = "2C7357ED-EBD2-46D9-AEC1-23D437EC2BF5";
/// GRUB's modules that its core has built in: what it takes to read `grub.cfg`, and what stands there.
const GRUB_MODULES: &str =
    "biosdisk part_gpt fat normal configfile linux boot test echo loadenv sleep reboot";
/// Code in front of the partition table in the first sector.
const BOOT_CODE_BYTES: usize = 440;
/// In GRUB's boot.img: the sector at which its core begins, 64 bits (GRUB's `i386/pc/boot.h`).
const KERNEL_SECTOR_AT: usize = 0x5c;
/// There, too: a jump that GRUB's own installer replaces by nothing for hard disks, because some firmware
/// names the wrong drive.
const DRIVE_CHECK_AT: usize = 0x66;
const NOP: u8 = 0x90;
/// In the first sector of GRUB's core: the list of what to load, whose first entry is 12 bytes before the
/// end: sector (64 bits), number of sectors (16 bits), segment (16 bits).
const BLOCK_LIST_AT: usize = 512 - 12;

/// A partition: its number is its place in the list.
struct Partition {
    label: String,
    kind: &'static str,
    uuid: String,
    bytes: u64,
    content: Option<PathBuf>,
}

/// Makes the disk, a sparse file.
pub(crate) fn make(slot: &Slot, version: &str, work: &Work<'_>) -> Result<PathBuf> {
    let core = grub_core(work).context("make GRUB's core")?;
    let image = work.path("disk.raw");
    let partitions = partitions(slot, core, esp::make(slot, version, work)?)?;
    File::create(&image)
        .and_then(|file| file.set_len(DISK_BYTES))
        .with_context(|| format!("create {}", image.display()))?;
    write_table(&image, &partitions)?;
    let mut start = ALIGNMENT;
    for partition in &partitions {
        if let Some(content) = &partition.content {
            let bytes = std::fs::metadata(content)?.len();
            ensure!(
                bytes <= partition.bytes,
                "{} is {bytes} bytes, its partition {} has {}: raise the size in appliance/src/layout.rs",
                content.display(),
                partition.label,
                partition.bytes
            );
            write_at(&image, content, start)?;
        }
        start += partition.bytes;
    }
    embed_grub(&image, work)?;
    Ok(image)
}

fn partitions(slot: &Slot, core: PathBuf, esp: PathBuf) -> Result<Vec<Partition>> {
    let (root_uuid, verity_uuid) = partition_uuids(&slot.root_hash);
    let fixed = |label: &str, kind, bytes, content| Partition {
        label: label.to_owned(),
        kind,
        uuid: uuid_of(label),
        bytes,
        content,
    };
    Ok(vec![
        fixed("penstock-bios", TYPE_BIOS, BIOS_BYTES, Some(core)),
        fixed(ESP_LABEL, TYPE_ESP, ESP_BYTES, Some(esp)),
        Partition {
            label: Place::A.root_label(),
            kind: TYPE_ROOT,
            uuid: root_uuid,
            bytes: ROOT_BYTES,
            content: Some(slot.root.clone()),
        },
        Partition {
            label: Place::A.verity_label(),
            kind: TYPE_VERITY,
            uuid: verity_uuid,
            bytes: VERITY_BYTES,
            content: Some(slot.verity.clone()),
        },
        fixed(&Place::B.root_label(), TYPE_ROOT, ROOT_BYTES, None),
        fixed(&Place::B.verity_label(), TYPE_VERITY, VERITY_BYTES, None),
    ])
}

fn write_table(image: &Path, partitions: &[Partition]) -> Result<()> {
    let mut script = format!(
        "label: gpt\nlabel-id: {}\n",
        uuid_of("penstock appliance disk")
    );
    let mut start = ALIGNMENT / SECTOR;
    for partition in partitions {
        let sectors = partition.bytes / SECTOR;
        let Partition {
            label, kind, uuid, ..
        } = partition;
        writeln!(
            script,
            "start={start}, size={sectors}, type={kind}, uuid={uuid}, name=\"{label}\""
        )?;
        start += sectors;
    }
    let mut sfdisk = Command::new("sfdisk")
        .args(["--quiet", "--no-reread", "--no-tell-kernel"])
        .arg(image)
        .stdin(Stdio::piped())
        .spawn()
        .context("start sfdisk of the package fdisk")?;
    sfdisk
        .stdin
        .take()
        .context("sfdisk has a standard input")?
        .write_all(script.as_bytes())
        .context("tell sfdisk the partitions")?;
    let status = sfdisk.wait()?;
    ensure!(status.success(), "sfdisk: {status}");
    Ok(())
}

/// Copies a file into the image, and leaves holes where it has zeroes.
fn write_at(image: &Path, content: &Path, at: u64) -> Result<()> {
    let mut from = File::open(content).with_context(|| format!("open {}", content.display()))?;
    let mut to = File::options().write(true).open(image)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = at;
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        if buffer[..read].iter().any(|byte| *byte != 0) {
            to.seek(SeekFrom::Start(at))?;
            to.write_all(&buffer[..read])?;
        }
        at += read as u64;
    }
}

/// GRUB's core, told where it lies.
fn grub_core(work: &Work<'_>) -> Result<PathBuf> {
    work.script(&format!(
        "grub-mkimage --format=i386-pc '--prefix=(,gpt2)/grub' --output=/build/core.img {GRUB_MODULES}"
    ))?;
    let path = work.path("core.img");
    let mut core = std::fs::read(&path)?;
    ensure!(core.len() > 512, "GRUB's core is {} bytes", core.len());
    let rest = core.len().div_ceil(SECTOR as usize) - 1;
    let start = ALIGNMENT / SECTOR + 1;
    core[BLOCK_LIST_AT..BLOCK_LIST_AT + 8].copy_from_slice(&start.to_le_bytes());
    core[BLOCK_LIST_AT + 8..BLOCK_LIST_AT + 10]
        .copy_from_slice(&u16::try_from(rest)?.to_le_bytes());
    std::fs::write(&path, core)?;
    Ok(path)
}

/// Puts the code that loads GRUB's core in front of the table.
fn embed_grub(image: &Path, work: &Work<'_>) -> Result<()> {
    let boot = work.tools.join("usr/lib/grub/i386-pc/boot.img");
    let mut code = std::fs::read(&boot).with_context(|| format!("read {}", boot.display()))?;
    ensure!(
        code.len() == SECTOR as usize,
        "GRUB's boot.img is not one sector"
    );
    let sector = ALIGNMENT / SECTOR;
    code[KERNEL_SECTOR_AT..KERNEL_SECTOR_AT + 8].copy_from_slice(&sector.to_le_bytes());
    code[DRIVE_CHECK_AT..DRIVE_CHECK_AT + 2].fill(NOP);
    let mut file = File::options().write(true).open(image)?;
    file.write_all(&code[..BOOT_CODE_BYTES])
        .context("write the boot code")
}
