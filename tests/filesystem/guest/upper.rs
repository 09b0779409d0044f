//! System calls that an overlay filesystem makes in its upper layer.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, fstat, linkat, mknodat, openat,
    renameat_with,
};
use rustix::io::Errno;

/// Checks files without a name, and renames that leave whiteouts. The directory is empty before and after.
pub fn serves(dir: &Path) -> Result<String> {
    temporary(dir).context("a file without a name")?;
    never_linked(dir).context("a file that is never linked")?;
    whiteouts(dir).context("a whiteout")?;
    let left = fs::read_dir(dir)?.count();
    ensure!(left == 0, "{left} names are left");
    Ok(String::new())
}

fn unnamed(dir: &Path, more: OFlags) -> Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | more;
    let file = openat(CWD, dir, flags, Mode::from_raw_mode(0o640)).context("open it")?;
    Ok(file.into())
}

/// Gives an open file one more name.
fn link(file: &File, name: &Path) -> Result<(), Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(CWD, path.as_str(), CWD, name, AtFlags::SYMLINK_FOLLOW)
}

fn links(file: &impl AsFd) -> Result<u64> {
    Ok(fstat(file)?.st_nlink)
}

fn temporary(dir: &Path) -> Result<()> {
    let mut file = unnamed(dir, OFlags::empty())?;
    file.write_all(b"scratch")?;
    file.sync_all()?;
    ensure!(links(&file)? == 0 && fs::read_dir(dir)?.count() == 0);
    let metadata = file.metadata()?;
    ensure!(metadata.len() == 7 && metadata.mode() & 0o7777 == 0o640);
    let (first, second) = (dir.join("first"), dir.join("second"));
    link(&file, &first).context("its first name")?;
    ensure!(links(&file)? == 1, "{} links", links(&file)?);
    ensure!(fs::metadata(&first)?.ino() == metadata.ino());
    link(&file, &second).context("its second name")?;
    ensure!(fs::metadata(&first)?.nlink() == 2);
    file.write_all(b" and more")?;
    ensure!(fs::read_to_string(&second)? == "scratch and more");
    fs::remove_file(&first)?;
    fs::remove_file(&second)?;
    let again = link(&file, &first);
    ensure!(again == Err(Errno::NOENT), "linked again: {again:?}");
    let mut text = String::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_string(&mut text)?;
    ensure!(text == "scratch and more", "it holds {text:?}");
    Ok(())
}

fn never_linked(dir: &Path) -> Result<()> {
    let file = unnamed(dir, OFlags::EXCL)?;
    let linked = link(&file, &dir.join("f"));
    ensure!(linked == Err(Errno::NOENT), "it was linked: {linked:?}");
    Ok(())
}

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> Result<(), Errno> {
    renameat_with(CWD, from, CWD, to, flags)
}

/// Checks that a name leads to a whiteout, also by the type that its directory lists.
fn check_whiteout(dir: &Path, name: &str) -> Result<()> {
    let metadata = fs::symlink_metadata(dir.join(name))?;
    ensure!(metadata.file_type().is_char_device(), "{name} is no device");
    let (device, mode) = (metadata.rdev(), metadata.mode() & 0o7777);
    ensure!(device == 0 && mode == 0, "device {device:x}, mode {mode:o}");
    let listed = fs::read_dir(dir)?.find(|entry| {
        let entry = entry.as_ref();
        entry.is_ok_and(|entry| entry.file_name() == name)
    });
    let listed = listed.context("it is not listed")??;
    ensure!(
        listed.file_type()?.is_char_device(),
        "it is listed otherwise"
    );
    Ok(())
}

fn whiteouts(dir: &Path) -> Result<()> {
    let at = |name: &str| dir.join(name);
    let whiteout = RenameFlags::WHITEOUT;
    fs::write(at("f"), "content")?;
    fs::write(at("taken"), "other")?;
    fs::create_dir(at("d"))?;
    let kept = rename(&at("f"), &at("taken"), whiteout | RenameFlags::NOREPLACE);
    ensure!(kept == Err(Errno::EXIST), "{kept:?}");
    let exchanged = rename(&at("f"), &at("taken"), whiteout | RenameFlags::EXCHANGE);
    ensure!(exchanged == Err(Errno::INVAL), "{exchanged:?}");
    rename(&at("f"), &at("taken"), whiteout).context("rename over a file")?;
    ensure!(fs::read_to_string(at("taken"))? == "content");
    check_whiteout(dir, "f")?;
    rename(&at("taken"), &at("d/f"), whiteout | RenameFlags::NOREPLACE)
        .context("rename into a directory")?;
    check_whiteout(dir, "taken")?;
    rename(&at("d"), &at("e"), whiteout).context("rename a directory")?;
    check_whiteout(dir, "d")?;
    ensure!(fs::read_to_string(at("e/f"))? == "content");
    // As an overlay filesystem makes one itself.
    let device = FileType::CharacterDevice;
    mknodat(CWD, at("made"), device, Mode::empty(), 0).context("make one")?;
    check_whiteout(dir, "made")?;
    for name in ["f", "taken", "d", "made", "e/f"] {
        fs::remove_file(at(name)).with_context(|| format!("remove {name}"))?;
    }
    fs::remove_dir(at("e"))?;
    Ok(())
}
