//! What is published: images for hypervisors and for disks, the update, sums and signatures.

use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use appliance::update::{MANIFEST, Manifest};

use crate::process::run;
use crate::signing::sha256_of_file;
use crate::slot::Slot;
use crate::{Build, Kinds, Work};

/// Description of the machine in the OVA.
const OVF: &str = include_str!("appliance.ovf");

/// Writes the files of `kinds` into `directory`, and names them. There is a `disk` unless only the update is
/// wanted.
pub(crate) fn write(
    build: &Build<'_>,
    slot: &Slot,
    disk: Option<&Path>,
    work: &Work<'_>,
    directory: &Path,
    kinds: Kinds,
    say: &dyn Fn(&str),
) -> Result<Vec<PathBuf>> {
    let target =
        |suffix: &str| directory.join(format!("penstock-appliance-{}{suffix}", build.version));
    let comment = format!("version:{}", build.version);
    say("writes the update");
    let update = target(".update");
    write_update(build, slot, &update)?;
    let signature = build.signer.sign(&update, &comment)?;
    let mut all = vec![update, signature];
    let Some(disk) = disk else { return Ok(all) };
    say("writes the qcow2 image");
    let qcow2 = target(".qcow2");
    write_qcow2(disk, &qcow2, kinds)?;
    all.insert(0, qcow2);
    if kinds == Kinds::All {
        say("writes the raw image and the OVA");
        let (raw, ova) = (target(".raw.zst"), target(".ova"));
        work.script(
            "zstd --quiet --force -19 -T2 --long=27 /build/disk.raw -o /build/disk.raw.zst",
        )?;
        std::fs::copy(work.path("disk.raw.zst"), &raw).context("copy the raw image")?;
        write_ova(build, disk, work, &ova)?;
        all.extend([raw, ova]);
        let sums = write_sums(&all, directory)?;
        all.extend([sums.clone(), build.signer.sign(&sums, &comment)?]);
    }
    Ok(all)
}

fn write_qcow2(disk: &Path, target: &Path, kinds: Kinds) -> Result<()> {
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
    if kinds == Kinds::All {
        convert.args(["-c", "-o", "compression_type=zstd"]);
    }
    run(convert.arg(disk).arg(target))?;
    Ok(())
}

/// A tar archive: the manifest first, so that a reader knows what comes. Its parts are compressed themselves.
fn write_update(build: &Build<'_>, slot: &Slot, target: &Path) -> Result<()> {
    let manifest = Manifest::new(build.version, &slot.root_hash, &slot.command_line);
    let manifest = serde_json::to_vec_pretty(&manifest)?;
    let file = File::create(target).with_context(|| format!("create {}", target.display()))?;
    let mut archive = tar::Builder::new(std::io::BufWriter::new(file));
    let header = |bytes: u64| {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes);
        header.set_mode(0o644);
        header.set_mtime(build.epoch);
        header
    };
    archive.append_data(
        &mut header(manifest.len() as u64),
        MANIFEST,
        manifest.as_slice(),
    )?;
    let parts = [
        ("root.erofs", &slot.root),
        ("root.verity", &slot.verity),
        ("penstock.efi", &slot.uki),
        ("vmlinuz", &slot.kernel),
        ("initramfs", &slot.initramfs),
    ];
    for (name, path) in parts {
        let part = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let bytes = part.metadata()?.len();
        archive.append_data(&mut header(bytes), name, part)?;
    }
    archive
        .into_inner()
        .context("end the update")?
        .into_inner()
        .context("write the update")?;
    Ok(())
}

/// An OVA is a tar archive of the description, its manifest of sums, and the disk (DSP0243).
fn write_ova(build: &Build<'_>, disk: &Path, work: &Work<'_>, target: &Path) -> Result<()> {
    let name = format!("penstock-appliance-{}", build.version);
    let vmdk = work.path("disk.vmdk");
    run(Command::new("qemu-img")
        .args([
            "convert",
            "-f",
            "raw",
            "-O",
            "vmdk",
            "-o",
            "subformat=streamOptimized",
        ])
        .arg(disk)
        .arg(&vmdk))?;
    fix_content_id(&vmdk)?;
    let ovf = OVF
        .replace("@NAME@", &name)
        .replace("@VERSION@", build.version)
        .replace("@FILE_BYTES@", &std::fs::metadata(&vmdk)?.len().to_string())
        .replace("@DISK_BYTES@", &appliance::layout::DISK_BYTES.to_string());
    let ovf_path = work.path("appliance.ovf");
    std::fs::write(&ovf_path, ovf)?;
    let mut sums = String::new();
    for (suffix, path) in [("ovf", &ovf_path), ("vmdk", &vmdk)] {
        writeln!(sums, "SHA256({name}.{suffix})= {}", sha256_of_file(path)?)?;
    }
    let sums_path = work.path("appliance.mf");
    std::fs::write(&sums_path, sums)?;
    let file = File::create(target).with_context(|| format!("create {}", target.display()))?;
    let mut archive = tar::Builder::new(file);
    for (suffix, path) in [("ovf", &ovf_path), ("mf", &sums_path), ("vmdk", &vmdk)] {
        let part = File::open(path)?;
        let mut header = tar::Header::new_ustar();
        header.set_size(part.metadata()?.len());
        header.set_mode(0o644);
        header.set_mtime(build.epoch);
        archive.append_data(&mut header, format!("{name}.{suffix}"), part)?;
    }
    archive.finish().context("write the OVA")
}

/// qemu-img draws the number that tells one content of a disk from the next; nobody asks for it in an image
/// that was never written to, and two builds shall agree.
fn fix_content_id(vmdk: &Path) -> Result<()> {
    const KEY: &[u8] = b"\nCID=";
    const DIGITS: usize = 8;
    use std::os::unix::fs::FileExt;
    let file = File::options().read(true).write(true).open(vmdk)?;
    let mut head = vec![0; 64 << 10];
    let read = file.read_at(&mut head, 0)?;
    let at = head[..read]
        .windows(KEY.len())
        .position(|window| window == KEY)
        .context("the VMDK has no descriptor")?
        + KEY.len();
    let digits = head[at..]
        .iter()
        .take_while(|byte| byte.is_ascii_hexdigit())
        .count();
    file.write_all_at(&b"50454e53"[..digits.min(DIGITS)], at as u64)
        .context("write the VMDK")
}

fn write_sums(files: &[PathBuf], directory: &Path) -> Result<PathBuf> {
    let target = directory.join("SHA256SUMS");
    let mut lines = String::new();
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        writeln!(lines, "{}  {name}", sha256_of_file(file)?)?;
    }
    std::fs::write(&target, lines).with_context(|| format!("write {}", target.display()))?;
    Ok(target)
}
