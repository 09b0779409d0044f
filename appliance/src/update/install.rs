//! Writing an update into the slot that does not run.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use minisign_verify::{PublicKey, Signature};

use super::boot_loaders::BootLoaders;
use super::{MANIFEST, Manifest, Places, Record, State};
use crate::layout::{Slot, partition_uuids};
use crate::machine::Machine;
use crate::process::run;

/// Bytes read or written at once.
const PIECE: usize = 1 << 20;
/// Longest manifest, in bytes.
const MANIFEST_BYTES_MAX: u64 = 64 << 10;
/// Kernels on the EFI system partition, and their names in the archive.
const KERNELS: &[&str] = &["penstock.efi", "vmlinuz", "initramfs"];

/// What was installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Its version.
    pub version: String,
    /// Where it is.
    pub slot: Slot,
}

/// An opened update whose signature was right.
#[derive(Debug)]
pub struct Verified {
    file: File,
    /// What it is.
    pub manifest: Manifest,
}

/// Checks the signature of `file`, which lies beside it with `.minisig` behind its name.
///
/// # Errors
/// A file is missing or damaged, or the signature is not by the key that this machine's image was made with.
pub fn verify(places: &Places, file: &Path) -> Result<Verified> {
    let mut opened = File::open(file).with_context(|| format!("open {}", file.display()))?;
    let beside = signature_of(file);
    let signature = std::fs::read_to_string(&beside).with_context(|| {
        format!(
            "read the signature {}, which belongs beside the update",
            beside.display()
        )
    })?;
    let signature = Signature::decode(&signature)
        .map_err(|e| anyhow::anyhow!("{} is no signature by minisign: {e}", beside.display()))?;
    let key = std::fs::read_to_string(&places.key)
        .with_context(|| format!("read the key {}", places.key.display()))?;
    let key = PublicKey::decode(&key).map_err(|e| {
        anyhow::anyhow!("{} is no public key of minisign: {e}", places.key.display())
    })?;
    let refused = |e: minisign_verify::Error| {
        anyhow::anyhow!(
            "{} is refused: its signature is not right for this machine's key ({e}); take the file of the \
             publisher of this machine's image, whole",
            file.display()
        )
    };
    let mut verifier = key.verify_stream(&signature).map_err(refused)?;
    let mut piece = vec![0; PIECE];
    loop {
        match opened
            .read(&mut piece)
            .with_context(|| format!("read {}", file.display()))?
        {
            0 => break,
            read => verifier.update(&piece[..read]),
        }
    }
    verifier.finalize().map_err(refused)?;
    opened.rewind()?;
    let manifest = read_manifest(&mut opened)?;
    opened.rewind()?;
    Ok(Verified {
        file: opened,
        manifest,
    })
}

/// Where the signature of `file` lies.
pub(super) fn signature_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".minisig");
    name.into()
}

/// What `file` says of itself. Whoever installs it checks its signature.
///
/// # Errors
/// It is no update, or its signature does not lie beside it.
pub fn manifest(file: &Path) -> Result<Manifest> {
    let beside = signature_of(file);
    ensure!(
        beside.is_file(),
        "there is no signature {}, which belongs beside the update",
        beside.display()
    );
    let mut opened = File::open(file).with_context(|| format!("open {}", file.display()))?;
    read_manifest(&mut opened).with_context(|| format!("{} is no update", file.display()))
}

fn read_manifest(file: &mut File) -> Result<Manifest> {
    let mut archive = tar::Archive::new(file);
    let first = archive.entries()?.next().context("the update is empty")??;
    ensure!(
        first.path()?.as_os_str() == MANIFEST,
        "the update does not begin with {MANIFEST}"
    );
    let mut text = Vec::new();
    first.take(MANIFEST_BYTES_MAX).read_to_end(&mut text)?;
    Manifest::parse(&text)
}

/// Writes `update` into the other slot and has the next boot try it. `say` is told what is done.
///
/// # Errors
/// A part cannot be written, or what was written is not what the update has; the slot that runs stays.
pub fn install(
    machine: &Machine,
    places: &Places,
    update: Verified,
    say: &dyn Fn(&str),
) -> Result<Installed> {
    let Verified { file, manifest } = update;
    // Two slots with one content could not be told apart.
    ensure!(
        manifest.root_hash != places.running_root_hash()?,
        "this machine runs exactly this update already (version {})",
        manifest.version
    );
    let running = places.running_slot(partition_uuid)?;
    let slot = running.other();
    let loaders = BootLoaders { esp: &places.esp };
    let record = Record {
        version: manifest.version.clone(),
        before: places.running_version()?,
        root_hash: manifest.root_hash.clone(),
        state: State::Writing,
    };
    record.keep(machine)?;
    loaders
        .forget(slot)
        .context("tell the boot loaders to leave the other slot alone")?;
    say(&format!(
        "writes version {} into slot {slot}",
        manifest.version
    ));
    let root = places.partition(&slot.root_label())?;
    let verity = places.partition(&slot.verity_label())?;
    unpack(file, &root, &verity, &loaders.kernels(slot))?;
    say("verifies what was written");
    run(Command::new("veritysetup")
        .arg("verify")
        .args([&root, &verity])
        .arg(&manifest.root_hash))
    .context("what was written is not what the update has; the disk may be failing")?;
    name_partitions(slot, &root, &manifest.root_hash)?;
    loaders.try_once(slot, &manifest.version, &manifest.command_line)?;
    Record {
        state: State::Written,
        ..record
    }
    .keep(machine)?;
    Ok(Installed {
        version: manifest.version,
        slot,
    })
}

fn unpack(file: File, root: &Path, verity: &Path, kernels: &Path) -> Result<()> {
    std::fs::create_dir_all(kernels).with_context(|| format!("create {}", kernels.display()))?;
    let mut missing = vec!["root.erofs", "root.verity"];
    missing.extend(KERNELS);
    let mut archive = tar::Archive::new(file);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.to_string_lossy().into_owned();
        match name.as_str() {
            MANIFEST => continue,
            "root.erofs" => write_partition(&mut entry, root)?,
            "root.verity" => write_partition(&mut entry, verity)?,
            name if KERNELS.contains(&name) => write_kernel(&mut entry, kernels, name)?,
            other => bail!("the update has a part '{other}' that this version does not know"),
        }
        missing.retain(|one| *one != name);
    }
    ensure!(
        missing.is_empty(),
        "the update lacks {}",
        missing.join(", ")
    );
    Ok(())
}

fn write_partition(entry: &mut tar::Entry<'_, File>, partition: &Path) -> Result<()> {
    let mut to = File::options()
        .write(true)
        .open(partition)
        .with_context(|| format!("open {}", partition.display()))?;
    let room = to.seek(std::io::SeekFrom::End(0))?;
    to.rewind()?;
    let bytes = entry.size();
    ensure!(
        bytes <= room,
        "{} has {room} bytes, and the update needs {bytes}",
        partition.display()
    );
    copy(entry, &mut to).with_context(|| format!("write {}", partition.display()))
}

fn write_kernel(entry: &mut tar::Entry<'_, File>, kernels: &Path, name: &str) -> Result<()> {
    let path = kernels.join(name);
    // The slot before is gone already: there is no need to keep two.
    let _ = std::fs::remove_file(&path);
    let mut to = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    copy(entry, &mut to).with_context(|| format!("write {}", path.display()))
}

fn copy(from: &mut impl Read, to: &mut File) -> Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece).context("the update ends too early")? {
            0 => break,
            read => to.write_all(&piece[..read])?,
        }
    }
    to.sync_all()?;
    Ok(())
}

/// The UUID of a partition in its table.
pub(super) fn partition_uuid(partition: &Path) -> Result<String> {
    // Of the table as it is on disk: the kernel keeps what it read when the disk appeared.
    let uuid = run(Command::new("blkid")
        .args([
            "--probe",
            "--output",
            "value",
            "--match-tag",
            "PART_ENTRY_UUID",
        ])
        .arg(partition))?;
    Ok(uuid.trim().to_owned())
}

/// Names the slot's partitions after the root that they hold, by which its kernel finds them.
fn name_partitions(slot: Slot, root: &Path, root_hash: &str) -> Result<()> {
    let disk = disk_of(root)?;
    let (root_uuid, verity_uuid) = partition_uuids(root_hash);
    let number = slot.root_partition();
    for (number, uuid) in [(number, root_uuid), (number + 1, verity_uuid)] {
        // The disk is in use: the kernel need not read its table anew before the next boot.
        run(Command::new("sfdisk")
            .args([
                "--quiet",
                "--force",
                "--no-reread",
                "--no-tell-kernel",
                "--part-uuid",
            ])
            .arg(&disk)
            .args([number.to_string(), uuid]))
        .context("name the slot's partitions")?;
    }
    Ok(())
}

/// The disk that a partition like `/dev/vda5` is of.
fn disk_of(partition: &Path) -> Result<PathBuf> {
    let name = partition.file_name().context("a partition has a name")?;
    let link = Path::new("/sys/class/block").join(name);
    let real = std::fs::canonicalize(&link).with_context(|| format!("find {}", link.display()))?;
    let disk = real
        .parent()
        .and_then(Path::file_name)
        .context("a partition is of a disk")?;
    Ok(Path::new("/dev").join(disk))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(dir: &Path, parts: &[(&str, &[u8])]) -> PathBuf {
        let path = dir.join("new.update");
        let mut archive = tar::Builder::new(File::create(&path).expect("a file"));
        for (name, content) in parts {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            archive
                .append_data(&mut header, name, *content)
                .expect("appended");
        }
        archive.finish().expect("ended");
        path
    }

    fn sign(pair: &minisign::KeyPair, file: &Path) {
        let source = File::open(file).expect("a file");
        let signature =
            minisign::sign(Some(&pair.pk), &pair.sk, source, None, None).expect("signed");
        std::fs::write(format!("{}.minisig", file.display()), signature.to_string())
            .expect("written");
    }

    #[test]
    fn only_what_the_right_key_signed_is_taken() {
        let dir = tempfile::tempdir().expect("a directory");
        let pair = minisign::KeyPair::generate_unencrypted_keypair().expect("a key");
        let key = dir.path().join("key.pub");
        std::fs::write(&key, pair.pk.to_box().expect("a key").to_string()).expect("written");
        let places = Places {
            key,
            ..Places::default()
        };
        let manifest = Manifest::new("2", &"ab".repeat(32), "ro");
        let manifest_text = serde_json::to_vec(&manifest).expect("JSON");
        let file = update(dir.path(), &[(MANIFEST, &manifest_text), ("vmlinuz", b"k")]);

        let refusal = verify(&places, &file).expect_err("no signature");
        assert!(
            format!("{refusal:#}").contains("beside the update"),
            "{refusal:#}"
        );
        sign(&pair, &file);
        assert_eq!(verify(&places, &file).expect("signed").manifest, manifest);

        let mut bytes = std::fs::read(&file).expect("read");
        bytes[700] ^= 1;
        std::fs::write(&file, &bytes).expect("written");
        assert!(
            format!("{:#}", verify(&places, &file).expect_err("changed")).contains("not right")
        );
        let stranger = minisign::KeyPair::generate_unencrypted_keypair().expect("a key");
        sign(&stranger, &file);
        assert!(
            format!("{:#}", verify(&places, &file).expect_err("a stranger")).contains("not right")
        );
    }

    #[test]
    fn an_update_has_all_its_parts_and_no_other() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, verity) = (dir.path().join("root"), dir.path().join("verity"));
        for partition in [&root, &verity] {
            File::create(partition)
                .expect("made")
                .set_len(4)
                .expect("sized");
        }
        let all: [(&str, &[u8]); 6] = [
            (MANIFEST, b"{}"),
            ("root.erofs", b"root"),
            ("root.verity", b"tree"),
            ("penstock.efi", b"uki"),
            ("vmlinuz", b"kernel"),
            ("initramfs", b"fs"),
        ];
        let kernels = dir.path().join("kernels");
        let attempt = |parts: &[(&str, &[u8])]| {
            let file = File::open(update(dir.path(), parts)).expect("an update");
            unpack(file, &root, &verity, &kernels)
        };
        attempt(&all).expect("whole");
        assert_eq!(std::fs::read(&root).expect("read"), b"root");
        assert_eq!(
            std::fs::read(kernels.join("initramfs")).expect("read"),
            b"fs"
        );
        let refusal = attempt(&all[..5]).expect_err("a part is missing");
        assert!(refusal.to_string().contains("lacks initramfs"), "{refusal}");
        let refusal =
            attempt(&[("root.erofs", b"longer than its partition")]).expect_err("too long");
        assert!(refusal.to_string().contains("needs 25"), "{refusal}");
        let refusal = attempt(&[("shadow", b"x")]).expect_err("no part of an update");
        assert!(
            format!("{refusal:#}").contains("does not know"),
            "{refusal:#}"
        );
    }
}
