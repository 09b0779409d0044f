//! `penstock volume import`: an image's data travel to the daemon, its holes and zeroes do not.

use std::fs::{File, FileType};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::client::{Client, encode};
use api::failure::{Context, Failure, Kind, Result};
use api::size::Size;
use api::types::{Status, Volume};
use api::{body, extents, sparse};
use hyper::body::Bytes;
use indicatif::ProgressBar;
use meta::model::MAX_VOLUME_BYTES;
use tokio::sync::mpsc;

use crate::args::ImageFormat;
use crate::commands::confirm;

use super::compressed::{Compression, Limits, Packed};
use super::format::{self, Detected, OtherFile, Remedy};
use super::{progress, qemu_img};

/// Volumes are made of sectors; a shorter image is filled up with zeroes.
const SECTOR_BYTES: u64 = 512;
/// Space that must stay free where an image is decompressed, because the metadata are on the same filesystem.
/// An image that would use it is refused.
const RESERVE_BYTES: u64 = 256 << 20;

/// Options of an import.
#[derive(Debug)]
pub struct Options {
    /// Pool of a new volume.
    pub pool: Option<String>,
    /// Format of the image; detected if absent.
    pub format: Option<ImageFormat>,
    /// Import a damaged qcow2 image.
    pub force: bool,
    /// Skip the confirmation.
    pub yes: bool,
}

/// Fills volume `name` from `path`.
pub async fn run(client: &Client, name: &str, path: &Path, options: Options) -> Result<Volume> {
    let Options {
        pool,
        format,
        force,
        yes,
    } = options;
    let url = format!("/v1/volumes/{}", encode(name));
    let existing: Option<Volume> = match client.get(&url).await {
        Ok(volume) => Some(volume),
        Err(failure) if failure.kind == Kind::NotFound => None,
        Err(failure) => return Err(failure),
    };
    if let Some(volume) = &existing {
        check_detached(volume)?;
    }
    let status: Status = client.get("/v1/status").await?;
    let source = open(path, format, force, &status.data)?;
    let size_bytes = source.bytes.next_multiple_of(SECTOR_BYTES);
    if let Some(volume) = &existing {
        confirm_replaced(volume, size_bytes, yes)?;
    }
    let pool = pool
        .map(|p| format!("&pool={}", encode(&p)))
        .unwrap_or_default();
    let url = format!(
        "{url}/data?size_bytes={size_bytes}&replace={}{pool}",
        // Whoever says --yes means whatever has that name by then.
        yes || existing.is_some()
    );
    upload(client, &url, source, size_bytes).await
}

fn check_detached(volume: &Volume) -> Result<()> {
    match volume.attached.first() {
        None => Ok(()),
        Some(socket) => Err(Failure::new(
            Kind::Conflict,
            format!("volume '{}' is in use on {socket}", volume.name),
            format!("run `penstock detach {}` first", volume.name),
        )),
    }
}

/// The volume takes the image's size: another one than its own is told, whoever said yes before.
fn confirm_replaced(volume: &Volume, size_bytes: u64, yes: bool) -> Result<()> {
    let name = &volume.name;
    let is_same = volume.size_bytes == size_bytes;
    // Sizes that read alike may differ.
    let [old, new] = [volume.size_bytes, size_bytes].map(|n| format!("{} ({n} bytes)", Size(n)));
    let resized = match is_same {
        true => String::new(),
        false => format!(", which has {old}, by an image of {new}"),
    };
    confirm::confirm(
        &format!("replace the content of volume '{name}'{resized}"),
        yes,
    )?;
    if !is_same {
        eprintln!("penstock: volume {name} goes from {old} to {new}, the size of the image");
    }
    Ok(())
}

/// Why reading ended is waited for so long once the daemon has answered, or does not.
const READER_WAIT: Duration = Duration::from_secs(2);

/// Raw bytes to import.
struct Source {
    file: File,
    bytes: u64,
    shown: String,
}

async fn upload(client: &Client, url: &str, source: Source, size_bytes: u64) -> Result<Volume> {
    let (sender, body) = body::channel();
    let bar = progress::bar("import", source.bytes);
    let reader_bar = bar.clone();
    let reader =
        tokio::task::spawn_blocking(move || send(&source, size_bytes, &sender, &reader_bar));
    let answer = client.upload(url, extents::MEDIA_TYPE, body).await;
    // One that is stopped leaves the reader waiting, which ends with this process.
    let read = tokio::time::timeout(READER_WAIT, reader).await;
    bar.finish_and_clear();
    match (answer, read) {
        (_, Ok(Err(panicked))) => Err(Failure::plain(Kind::Failed, panicked)),
        // The daemon only saw the stream being cut; the reader knows why.
        (Err(_), Ok(Ok(Err(ImportStop::Failed(failure))))) => Err(failure),
        (answer, _) => answer,
    }
}

/// Why sending ended early.
enum ImportStop {
    Failed(Failure),
    /// The daemon takes no more; its answer tells why.
    Refused,
}

impl From<io::Error> for ImportStop {
    fn from(e: io::Error) -> Self {
        ImportStop::Failed(
            Err::<(), _>(e)
                .context(|| "read the image".into())
                .unwrap_err(),
        )
    }
}

/// Reads the source and feeds the body. Without the end record the daemon drops what it got.
fn send(
    source: &Source,
    size_bytes: u64,
    sender: &mpsc::Sender<Bytes>,
    bar: &ProgressBar,
) -> Result<(), ImportStop> {
    let put = |bytes: Bytes| sender.blocking_send(bytes).map_err(|_| ImportStop::Refused);
    let piece = |at: u64, bytes: &[u8]| {
        let tail = bytes.len() as u64 % SECTOR_BYTES;
        if tail == 0 {
            return put(extents::data(at, bytes));
        }
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(SECTOR_BYTES as usize), 0);
        put(extents::data(at, &padded))
    };
    let read = sparse::read(&source.file, source.bytes, piece, |at| bar.set_position(at));
    match read {
        Ok(()) => put(extents::end(size_bytes)),
        Err(ImportStop::Failed(failure)) => {
            let error = format!("{}: {}", source.shown, failure.error);
            Err(ImportStop::Failed(Failure::plain(failure.kind, error)))
        }
        Err(stop) => Err(stop),
    }
}

/// Opens an image as raw bytes. Other formats are first decompressed or converted into an unnamed file.
fn open(path: &Path, format: Option<ImageFormat>, force: bool, data_dir: &Path) -> Result<Source> {
    let shown = path.display().to_string();
    let file = open_once(path)?;
    let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
        .map_err(io::Error::from)
        .context(|| format!("read image {shown}"))?;
    let mut image = Source { file, bytes, shown };
    let (format, how) = match format {
        Some(format) => (format, "as specified".to_owned()),
        None => match detected(&image)? {
            Found::Plain(format) => (format, "as detected; --format names another".to_owned()),
            Found::Compressed(compression) => {
                image = decompress(image, compression, data_dir)?;
                let name = compression.name();
                let how =
                    format!("compressed by {name}, as detected; --format raw imports it as it is");
                (inside(&image, compression)?, how)
            }
        },
    };
    let source = match format {
        ImageFormat::Raw => image,
        ImageFormat::Qcow2 => convert(image, force, data_dir)?,
    };
    check_size(&source)?;
    let name = match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    };
    eprintln!("penstock: image {} is {name}, {how}", source.shown);
    Ok(source)
}

/// Opens an image once, links followed. Whatever its path leads to afterwards, this file is what is looked
/// at, converted and read.
fn open_once(path: &Path) -> Result<File> {
    use rustix::fs::{Mode, OFlags};
    let shown = path.display();
    let opened = |from: &Path, flags| {
        rustix::fs::open(from, flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from)
            .context(|| format!("open image {shown}"))
    };
    // Opening a FIFO waits for a writer, and opening a device may do something: looked at first, without
    // opening it.
    let place = File::from(opened(path, OFlags::PATH)?);
    let found = place.metadata();
    let kind = found
        .context(|| format!("look at image {shown}"))?
        .file_type();
    refuse_no_image(path, kind)?;
    let same = format!("/proc/self/fd/{}", place.as_raw_fd());
    Ok(opened(Path::new(&same), OFlags::RDONLY)?.into())
}

/// What has no size has no end.
fn refuse_no_image(path: &Path, kind: FileType) -> Result<()> {
    let shown = path.display();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() {
        "a character device"
    } else {
        "a socket"
    };
    Err(Failure::invalid(
        format!("image {shown} is {what}"),
        "name an image file or a block device",
    ))
}

/// Detected content of an image.
enum Found {
    Plain(ImageFormat),
    Compressed(Compression),
}

/// The format that an image has by its content. A guest can write any content into a raw image: who has one
/// says so.
fn detected(image: &Source) -> Result<Found> {
    let shown = &image.shown;
    let found = format::detect(&image.file, image.bytes);
    match found.context(|| format!("read image {shown}"))? {
        Detected::Known(format) => Ok(Found::Plain(format)),
        Detected::Compressed(compression) => Ok(Found::Compressed(compression)),
        Detected::Other(what, remedy) => Err(Failure::new(
            Kind::Failed,
            format!("image {shown} is {what}, which import does not support"),
            format!(
                "{}; if it is a raw disk with such content, use --format raw",
                remedy_of(remedy, shown)
            ),
        )),
    }
}

fn remedy_of(remedy: Remedy, shown: &str) -> String {
    match remedy {
        Remedy::Convert => {
            format!("convert it first, like qemu-img convert -O qcow2 {shown} IMAGE.qcow2")
        }
        Remedy::Unpack => "unpack it first, and import the disk image in it".to_owned(),
        Remedy::Decompress => "decompress it first, and import the result".to_owned(),
        Remedy::Replace => "check where it came from".to_owned(),
    }
}

/// Detects the format of a decompressed image.
fn inside(image: &Source, compression: Compression) -> Result<ImageFormat> {
    let (shown, name) = (&image.shown, compression.name());
    let (what, hint) = match format::detect(&image.file, image.bytes) {
        Ok(Detected::Known(format)) => return Ok(format),
        Ok(Detected::Compressed(again)) => (
            format!("compressed again, by {}", again.name()),
            format!("decompress it with {name} first, and import the result"),
        ),
        Ok(Detected::Other(what, Remedy::Unpack)) => (
            what.to_owned(),
            "unpack it first, and import the disk image in it".to_owned(),
        ),
        Ok(Detected::Other(what, remedy)) => (
            what.to_owned(),
            format!(
                "decompress it with {name} first; then {}",
                remedy_of(remedy, "IMAGE")
            ),
        ),
        Err(e) => return Err(e).context(|| format!("read what image {shown} decompresses to")),
    };
    Err(Failure::new(
        Kind::Failed,
        format!("image {shown}, decompressed by {name}, is {what}, which import does not support"),
        hint,
    ))
}

/// Creates an unnamed file for the raw form of an image. Returns it and its directory.
fn scratch(data_dir: &Path) -> Result<(File, PathBuf)> {
    if let Ok(file) = qemu_img::unnamed_file(data_dir) {
        return Ok((file, data_dir.to_owned()));
    }
    let dir = std::env::temp_dir();
    let file = qemu_img::unnamed_file(&dir)
        .context(|| format!("create a temporary file in {}", dir.display()))?;
    Ok((file, dir))
}

fn decompress(image: Source, compression: Compression, data_dir: &Path) -> Result<Source> {
    let (target, _) = scratch(data_dir)?;
    let limits = Limits {
        bytes_max: MAX_VOLUME_BYTES,
        reserve_bytes: RESERVE_BYTES,
    };
    let packed = Packed {
        file: &image.file,
        shown: &image.shown,
        compression,
    };
    let bar = progress::bar("decompress", image.bytes);
    let bytes = packed.expand(&target, limits, |at| bar.set_position(at));
    bar.finish_and_clear();
    Ok(Source {
        bytes: bytes?,
        file: target,
        shown: image.shown,
    })
}

fn check_size(source: &Source) -> Result<()> {
    if source.bytes == 0 {
        return Err(Failure::invalid(
            format!("image {} is empty", source.shown),
            "name an image with content",
        ));
    }
    if source.bytes > MAX_VOLUME_BYTES {
        return Err(Failure::invalid(
            format!("image {} is a disk of {} bytes", source.shown, source.bytes),
            format!("a volume has at most {}", Size(MAX_VOLUME_BYTES)),
        ));
    }
    Ok(())
}

/// An image may refer to other files of this machine, which its author may not be allowed to read, and an
/// encrypted image needs a key that import does not have. An image that is marked corrupt is damaged, even if
/// `qemu-img check` finds nothing. Returns the `virtual_bytes` of the header.
fn check_standalone(file: &File, shown: &str, force: bool) -> Result<u64> {
    let header = format::qcow2_header(file).context(|| format!("read image {shown} as qcow2"))?;
    let other = match &header.other_file {
        None => None,
        Some(OtherFile::Backing(name)) => Some(("its backing file", name)),
        Some(OtherFile::Data(name)) => Some(("its data file", name)),
    };
    if let Some((what, name)) = other {
        return Err(Failure::new(
            Kind::Failed,
            format!("image {shown} needs another file, {what} {name}"),
            format!(
                "if you trust it, flatten it first: qemu-img convert -O qcow2 {shown} FLAT.qcow2"
            ),
        ));
    }
    if header.is_encrypted {
        return Err(Failure::new(
            Kind::Failed,
            format!("image {shown} is encrypted"),
            "decrypt it first with qemu-img convert",
        ));
    }
    if header.is_corrupt && !force {
        return Err(Failure::new(
            Kind::Failed,
            format!("image {shown} is marked corrupt: QEMU found its tables damaged"),
            format!(
                "get it again, or repair a copy: qemu-img check -r all {shown}; --force imports what can be \
                 read, and zeroes for the rest"
            ),
        ));
    }
    if header.is_corrupt {
        eprintln!(
            "penstock: image {shown} is marked corrupt: what cannot be read is imported as zeroes"
        );
    }
    Ok(header.virtual_bytes)
}

fn convert(image: Source, force: bool, data_dir: &Path) -> Result<Source> {
    let virtual_bytes = check_standalone(&image.file, &image.shown, force)?;
    let (file, dir) = scratch(data_dir)?;
    let source = Source {
        file,
        bytes: virtual_bytes,
        shown: image.shown,
    };
    // Before anything is written, and before qemu-img walks through tables for such a disk.
    check_size(&source)?;
    let image = qemu_img::Image {
        file: &image.file,
        shown: &source.shown,
        bytes: image.bytes,
        force,
    };
    let spinner = progress::spinner("convert");
    let converted = image.check().and_then(|()| {
        let needed = image.data_bytes(virtual_bytes)?;
        check_free(&dir, needed)?;
        let sized = source.file.set_len(virtual_bytes);
        sized.context(|| format!("create a temporary file in {}", dir.display()))?;
        image.to_raw(&source.file, needed)
    });
    spinner.finish_and_clear();
    converted?;
    Ok(source)
}

/// The raw form must fit where it is written.
pub fn check_free(dir: &Path, needed: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(dir)
        .map_err(io::Error::from)
        .context(|| format!("look at {}", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < needed {
        return Err(Failure::new(
            Kind::NoSpace,
            format!(
                "{} has {} free, the image's raw form takes {}",
                dir.display(),
                Size(free),
                Size(needed)
            ),
            "make room, or point TMPDIR elsewhere and run as another user than the daemon's",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn an_import_ends_when_its_daemon_is_stopped() {
        const BYTES: u64 = 16 << 20;
        let dir = tempfile::tempdir().unwrap();
        let (socket, image) = (dir.path().join("admin.sock"), dir.path().join("image"));
        std::fs::write(&image, vec![0x5a; BYTES as usize]).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        // It answers that it is there, and takes nothing after that.
        let daemon = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                .unwrap();
            listener
        });
        let client = Client::at(socket).with_timeout(Some(Duration::from_secs(1)));
        let source = Source {
            file: File::open(&image).unwrap(),
            bytes: BYTES,
            shown: "image".to_owned(),
        };
        let told = upload(&client, "/v1/volumes/a/data", source, BYTES).await;
        assert_eq!(told.unwrap_err().kind, Kind::Unreachable);
        drop(daemon.join().unwrap());
    }
}
