//! `penstock volume export`: a volume's data come from the daemon and land in a sparse file, or on standard
//! output.

mod skipped;

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::client::{Client, encode};
use api::extents::{Decoder, Record};
use api::failure::{Context, Failure, Kind, Result};
use api::types::Volume;
use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame, Incoming};
use indicatif::ProgressBar;
use rustix::fs::{CWD, FlockOperation, RenameFlags};

use crate::args::ImageFormat;

use super::{progress, qemu_img};

use skipped::Skipped;

/// Mode of a file that an export makes, also in place of another one: only its owner reads the copy.
const MODE: u32 = 0o600;
/// Somebody who has waited so long for data is told.
const SILENCE_TOLD: Duration = Duration::from_secs(5);
/// Zeroes written at once where a file cannot have holes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// How to export.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Format of the file.
    pub format: ImageFormat,
    /// Overwrite it.
    pub force: bool,
    /// Copy although a guest is connected.
    pub live: bool,
    /// Go on over what cannot be read, and write a list of it into this new file.
    pub skip_bad: Option<&'a Path>,
}

/// Copies `volume` into `path`.
pub async fn run(
    client: &Client,
    volume: &Volume,
    path: &Path,
    options: Options<'_>,
) -> Result<()> {
    let to_stdout = path == Path::new("-");
    if to_stdout && options.format == ImageFormat::Qcow2 {
        return Err(Failure::invalid(
            "qcow2 cannot be written to standard output",
            "name a file",
        ));
    }
    let target = if to_stdout {
        None
    } else {
        Some(Target::new(path, options.force)?)
    };
    let mut skipped = options.skip_bad.map(Skipped::new).transpose()?;
    let url = format!(
        "/v1/volumes/{}/data?live={}&skip_bad={}",
        encode(&volume.name),
        options.live,
        skipped.is_some()
    );
    let stream = client.download(&url).await?;
    let bar = progress::bar("export", volume.size_bytes);
    let mut received = Received {
        client,
        stream,
        bar: &bar,
        skipped: skipped.as_mut(),
    };
    let work = async {
        match &target {
            None => {
                let mut stdout = io::stdout().lock();
                received.take(&mut Sink::Stream(&mut stdout, 0)).await
            }
            Some(target) => target.fill(&mut received, options.format).await,
        }
    };
    let done = tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => Err(Failure::plain(Kind::Failed, "interrupted")),
    };
    bar.finish_and_clear();
    done?;
    if let Some(target) = target {
        target.keep(options.force)?;
    }
    if let Some(skipped) = skipped {
        skipped.finish()?;
    }
    Ok(())
}

/// Where a record's bytes go.
enum Sink<'a> {
    /// A new file: what is not written stays a hole.
    Sparse(&'a File),
    /// A pipe or a block device: zeroes are written, and `.1` is the position.
    Stream(&'a mut dyn Write, u64),
}

impl Sink<'_> {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Sink::Sparse(file) => file.write_all_at(bytes, at),
            Sink::Stream(out, position) => {
                zeroes(*out, position, at)?;
                out.write_all(bytes)?;
                *position += bytes.len() as u64;
                Ok(())
            }
        }
    }

    fn end(&mut self, size: u64) -> io::Result<()> {
        match self {
            Sink::Sparse(file) => {
                file.set_len(size)?;
                file.sync_all()
            }
            Sink::Stream(out, position) => {
                zeroes(*out, position, size)?;
                out.flush()
            }
        }
    }
}

fn zeroes(out: &mut dyn Write, position: &mut u64, up_to: u64) -> io::Result<()> {
    while *position < up_to {
        let len = (up_to - *position).min(ZEROES.len() as u64);
        out.write_all(&ZEROES[..len as usize])?;
        *position += len;
    }
    Ok(())
}

/// What comes from the daemon.
struct Received<'a> {
    client: &'a Client,
    stream: Incoming,
    bar: &'a ProgressBar,
    skipped: Option<&'a mut Skipped>,
}

impl Received<'_> {
    /// What comes next. Somebody who waits long is told where to look.
    ///
    /// # Errors
    /// The daemon does not answer.
    async fn next_frame(
        &mut self,
    ) -> Result<Option<std::result::Result<Frame<Bytes>, hyper::Error>>> {
        let next = self.stream.frame();
        tokio::pin!(next);
        if let Ok(next) = tokio::time::timeout(SILENCE_TOLD, &mut next).await {
            return Ok(next);
        }
        self.bar.suspend(|| {
            eprintln!(
                "penstock: no data have come for {} s; `penstock health` tells what they wait for",
                SILENCE_TOLD.as_secs()
            );
        });
        self.client.while_it_answers(next).await
    }

    /// Takes all of it in.
    async fn take(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        let cut = |e: &dyn std::fmt::Display| {
            Failure::new(
                Kind::Failed,
                format!("the daemon's stream broke: {e}"),
                "look at its log, then try again",
            )
        };
        let mut decoder = Decoder::default();
        while let Some(frame) = self.next_frame().await? {
            let Ok(bytes) = frame.map_err(|e| cut(&e))?.into_data() else {
                continue;
            };
            let mut input = &bytes[..];
            while let Some(record) = decoder.next(&mut input).map_err(|e| cut(&e))? {
                match record {
                    Record::Data(at, data) => {
                        sink.put(at, &data).context(|| "write the export".into())?;
                        self.bar.set_position(at + data.len() as u64);
                    }
                    Record::Skipped(at, len) => {
                        if let Some(skipped) = &mut self.skipped {
                            skipped.note(at, len)?;
                        }
                    }
                    Record::End(size) => sink.end(size).context(|| "write the export".into())?,
                    Record::Failure(json) => {
                        return Err(serde_json::from_slice(&json).unwrap_or_else(|_| {
                            Failure::plain(Kind::Failed, "the daemon failed")
                        }));
                    }
                }
            }
        }
        decoder.finish().map_err(|e| cut(&e))
    }
}

/// Makes a file that nobody else opens. A name that is taken, even by a link, is refused.
fn create(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(MODE)
        .open(path)
}

/// The file that an export becomes. A regular file is written beside its final name and renamed when whole; a
/// failed export leaves nothing.
struct Target {
    path: PathBuf,
    /// `None` for a block device, which is written in place.
    part: Option<PathBuf>,
}

impl Target {
    fn new(path: &Path, force: bool) -> Result<Self> {
        let existing = std::fs::metadata(path).ok().map(|m| m.file_type());
        if existing.is_some() && !force {
            return Err(exists(path));
        }
        let device = existing.is_some_and(|kind| kind.is_block_device());
        let usable = existing.is_none_or(|kind| kind.is_file() || device);
        // What a symbolic link points to is what is meant.
        let path = match existing {
            Some(_) => {
                std::fs::canonicalize(path).context(|| format!("find {}", path.display()))?
            }
            None => path.to_owned(),
        };
        let Some(name) = path.file_name().filter(|_| usable) else {
            return Err(Failure::invalid(
                format!("{} is neither a file nor a block device", path.display()),
                "name a file to write, or `-` for standard output",
            ));
        };
        let mut part = std::ffi::OsString::from(".");
        part.push(name);
        part.push(".part-");
        if !device {
            refuse_held(&path)?;
            remove_stale(&path, &part);
        }
        part.push(std::process::id().to_string());
        Ok(Target {
            part: (!device).then(|| path.with_file_name(part)),
            path,
        })
    }

    async fn fill(&self, received: &mut Received<'_>, format: ImageFormat) -> Result<()> {
        let Some(part) = &self.part else {
            return self.fill_device(received, format).await;
        };
        let shown = self.path.display();
        match format {
            ImageFormat::Raw => {
                let file = create(part).context(|| format!("create {shown}"))?;
                received.take(&mut Sink::Sparse(&file)).await
            }
            ImageFormat::Qcow2 => {
                let dir = part
                    .parent()
                    .filter(|dir| !dir.as_os_str().is_empty())
                    .unwrap_or(Path::new("."));
                let raw = qemu_img::unnamed_file(dir).context(|| format!("create {shown}"))?;
                received.take(&mut Sink::Sparse(&raw)).await?;
                let spinner = progress::spinner("convert");
                let file = create(part).context(|| format!("create {shown}"))?;
                let converted = qemu_img::to_qcow2(&raw, &file, &shown.to_string());
                spinner.finish_and_clear();
                converted?;
                file.sync_all().context(|| format!("write {shown}"))
            }
        }
    }

    async fn fill_device(&self, received: &mut Received<'_>, format: ImageFormat) -> Result<()> {
        if format != ImageFormat::Raw {
            return Err(Failure::invalid(
                "a block device takes raw only",
                "leave --format out",
            ));
        }
        let shown = self.path.display();
        // Without O_CREAT it keeps off what is mounted, or a daemon's.
        let opened = File::options()
            .write(true)
            .custom_flags(libc::O_EXCL)
            .open(&self.path);
        let busy = |e: &io::Error| e.kind() == io::ErrorKind::ResourceBusy;
        if opened.as_ref().is_err_and(busy) {
            return Err(held(&self.path));
        }
        let mut file = opened.context(|| format!("open {shown}"))?;
        received.take(&mut Sink::Stream(&mut file, 0)).await?;
        file.sync_all().context(|| format!("write {shown}"))
    }

    /// Gives the file its name.
    fn keep(self, force: bool) -> Result<()> {
        let Some(part) = &self.part else {
            return Ok(());
        };
        let flags = if force {
            RenameFlags::empty()
        } else {
            RenameFlags::NOREPLACE
        };
        match rustix::fs::renameat_with(CWD, part, CWD, &self.path, flags) {
            Err(rustix::io::Errno::EXIST) => Err(exists(&self.path)),
            other => other
                .map_err(io::Error::from)
                .context(|| format!("create {}", self.path.display())),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            // After `keep` it is gone already; after a failure nobody wants it.
            let _ = std::fs::remove_file(part);
        }
    }
}

/// Removes what exports into `path` left behind that were killed: files whose name is `prefix` and the number
/// of a process that is no more. That one cannot be removed is no reason not to export.
fn remove_stale(path: &Path, prefix: &std::ffi::OsStr) {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let Ok(entries) = std::fs::read_dir(dir.unwrap_or(Path::new("."))) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.as_bytes().strip_prefix(prefix.as_bytes());
        let pid = number.and_then(|number| std::str::from_utf8(number).ok()?.parse().ok());
        if pid.is_some_and(is_dead) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn is_dead(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid).filter(|_| pid > 0) else {
        return false;
    };
    rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}

/// Refuses to replace what a daemon holds, its device files above all: it would go on in a file without a
/// name.
fn refuse_held(path: &Path) -> Result<()> {
    let Ok(file) = File::open(path) else {
        return Ok(());
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(held(path)),
        // A file system without locks holds no daemon's files.
        _ => Ok(()),
    }
}

fn held(path: &Path) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!(
            "{} is in use by another program, or mounted",
            path.display()
        ),
        "name another file",
    )
}

fn exists(path: &Path) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!("{} exists", path.display()),
        "name another file, or overwrite it with --force",
    )
}
