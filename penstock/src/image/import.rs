//! `penstock volume import`: an image's data travel to the daemon, its holes and zeroes do not.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use hyper::body::Bytes;
use indicatif::ProgressBar;
use tokio::sync::mpsc;

use crate::api::client::{Client, encode};
use crate::api::extents;
use crate::api::types::{Status, Volume};
use crate::cli::ImageFormat;
use crate::commands::ask;
use crate::failure::{Context, Failure, Kind, Result};
use crate::size::Size;

use super::{body, progress, qemu_img, sparse};

/// Volumes are made of sectors; a shorter image is filled up with zeroes.
const SECTOR_BYTES: u64 = 512;

/// Fills volume `name` from `path`.
pub async fn run(
    client: &Client,
    name: &str,
    path: &Path,
    pool: Option<String>,
    format: Option<ImageFormat>,
    yes: bool,
) -> Result<Volume> {
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
    let source = open(path, format, &status.data)?;
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
    ask::confirm(
        &format!("replace the content of volume '{name}'{resized}"),
        yes,
    )?;
    if !is_same {
        eprintln!("penstock: volume {name} goes from {old} to {new}, the size of the image");
    }
    Ok(())
}

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
    let read = reader.await.map_err(|e| Failure::plain(Kind::Failed, e))?;
    bar.finish_and_clear();
    match (answer, read) {
        // The daemon only saw the stream being cut; the reader knows why.
        (Err(_), Err(Stop::Failed(failure))) => Err(failure),
        (answer, _) => answer,
    }
}

/// Why sending ended early.
enum Stop {
    Failed(Failure),
    /// The daemon takes no more; its answer tells why.
    Refused,
}

impl From<io::Error> for Stop {
    fn from(e: io::Error) -> Self {
        Stop::Failed(
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
) -> Result<(), Stop> {
    let put = |bytes: Bytes| sender.blocking_send(bytes).map_err(|_| Stop::Refused);
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
        Err(Stop::Failed(failure)) => {
            let error = format!("{}: {}", source.shown, failure.error);
            Err(Stop::Failed(Failure::plain(failure.kind, error)))
        }
        Err(stop) => Err(stop),
    }
}

/// Opens an image as raw bytes; what is not raw is converted into a file without a name first.
fn open(path: &Path, format: Option<ImageFormat>, data_dir: &Path) -> Result<Source> {
    // An absolute path is never taken for a protocol (`nbd:…`) or an option by qemu-img.
    let path = std::fs::canonicalize(path).context(|| format!("open image {}", path.display()))?;
    let shown = path.display().to_string();
    refuse_no_image(&path)?;
    let file = File::open(&path).context(|| format!("open image {shown}"))?;
    let format = match format {
        Some(ImageFormat::Raw) => "raw".to_owned(),
        Some(ImageFormat::Qcow2) => "qcow2".to_owned(),
        None => qemu_img::info(&path, None)?.format,
    };
    match format.as_str() {
        "raw" => {
            let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
                .map_err(io::Error::from)
                .context(|| format!("read image {shown}"))?;
            let source = Source { file, bytes, shown };
            check_not_empty(&source)?;
            Ok(source)
        }
        "qcow2" => convert(path, data_dir, shown),
        other => Err(Failure::new(
            Kind::Failed,
            format!("image {shown} is in format {other}, which import does not take"),
            format!("convert it first: qemu-img convert -O qcow2 {shown} IMAGE.qcow2"),
        )),
    }
}

/// Before it is opened: opening a FIFO waits for a writer, and what has no size has no end.
fn refuse_no_image(path: &Path) -> Result<()> {
    let shown = path.display();
    let found = std::fs::metadata(path).context(|| format!("open image {shown}"))?;
    let kind = found.file_type();
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

fn check_not_empty(source: &Source) -> Result<()> {
    if source.bytes == 0 {
        return Err(Failure::invalid(
            format!("image {} is empty", source.shown),
            "name an image with content",
        ));
    }
    Ok(())
}

fn convert(path: PathBuf, data_dir: &Path, shown: String) -> Result<Source> {
    let info = qemu_img::info(&path, Some("qcow2"))?;
    info.check_standalone(&path)?;
    qemu_img::check(&path, "qcow2")?;
    let needed = qemu_img::data_bytes(&path, "qcow2")?;
    let temporary = std::env::temp_dir();
    let (file, dir) = match qemu_img::unnamed_file(data_dir) {
        Ok(file) => (file, data_dir),
        Err(_) => {
            let file = qemu_img::unnamed_file(&temporary)
                .context(|| format!("create a temporary file in {}", temporary.display()))?;
            (file, temporary.as_path())
        }
    };
    check_free(dir, needed)?;
    file.set_len(info.virtual_size)
        .context(|| format!("create a temporary file in {}", dir.display()))?;
    let spinner = progress::spinner("convert");
    let converted = qemu_img::to_raw(&path, "qcow2", &file);
    spinner.finish_and_clear();
    converted?;
    let source = Source {
        file,
        bytes: info.virtual_size,
        shown,
    };
    check_not_empty(&source)?;
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
