//! Compressed images: detection and decompression.
//!
//! An image is decompressed into an unnamed file: nothing is sent to the daemon before the last checksum is
//! verified, and the content may be a qcow2 image, which needs random access.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileExt;

use api::failure::{Context, Failure, Kind, Result, plain_io};
use api::size::Size;
use api::sparse::data_runs;
use lzma_rust2::XzReader;

mod streams;

use streams::Streams;

/// Bytes read from the image, and written, at once.
const PIECE_BYTES: usize = 1 << 20;
/// Largest memory of an xz stream in KiB; `xz -9` needs a quarter of it. A stream that requires more is
/// refused.
const XZ_MEMORY_KIB_MAX: u32 = 256 << 10;
/// Largest window of a zstd frame, as a power of two: 128 MiB, the limit of `zstd` itself. A frame with a
/// larger window is refused.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
/// Part of libzstd's message for a frame with a larger window.
const ZSTD_TOO_LARGE: &str = "too much memory";

/// Compression formats that import supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// gzip.
    Gzip,
    /// xz.
    Xz,
    /// Zstandard.
    Zstd,
    /// bzip2.
    Bzip2,
}

impl Compression {
    /// Detects a compression from the first bytes of a file, at least 10.
    pub fn of(head: &[u8]) -> Option<Self> {
        let is_bzip2 = || {
            let block = [
                &[0x31, 0x41, 0x59, 0x26, 0x53, 0x59],
                &[0x17, 0x72, 0x45, 0x38, 0x50, 0x90],
            ];
            head.starts_with(b"BZh")
                && matches!(head[3], b'1'..=b'9')
                && block.iter().any(|begin| head[4..].starts_with(*begin))
        };
        match head {
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Self::Xz),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            _ if is_bzip2() => Some(Self::Bzip2),
            _ => None,
        }
    }

    /// Name of the format, which is also the name of its program.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
        }
    }

    fn reader<'a, R: Read + 'a>(self, from: BufReader<R>) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::Gzip => Box::new(Streams::gzip(from)),
            Self::Xz => Box::new(XzReader::new_mem_limit(from, true, XZ_MEMORY_KIB_MAX)),
            Self::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(from)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
            Self::Bzip2 => Box::new(Streams::bzip2(from)),
        })
    }
}

/// Limits of a decompressed image. An image that exceeds one is refused.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest size in bytes.
    pub bytes_max: u64,
    /// Space in bytes that must stay free on the target's filesystem.
    pub reserve_bytes: u64,
}

/// An open compressed image.
#[derive(Debug)]
pub struct Packed<'a> {
    /// The file, read from its beginning.
    pub file: &'a File,
    /// Name in error messages.
    pub shown: &'a str,
    /// Format of the compression.
    pub compression: Compression,
}

impl Packed<'_> {
    /// Decompresses into `target`, an empty file; zeroes become holes. Returns the size. `passed` receives
    /// the number of compressed bytes read so far.
    ///
    /// # Errors
    /// The image is damaged or truncated, or exceeds `limits`. `target` then holds a part of it.
    pub fn expand(&self, target: &File, limits: Limits, passed: impl FnMut(u64)) -> Result<u64> {
        let source = Source {
            file: self.file,
            at: 0,
            passed,
        };
        let from = BufReader::with_capacity(PIECE_BYTES, source);
        let mut from = self
            .compression
            .reader(from)
            .map_err(|e| self.failure(&e))?;
        let (mut piece, mut bytes) = (vec![0; PIECE_BYTES], 0_u64);
        loop {
            let count = fill(&mut from, &mut piece).map_err(|e| self.failure(&e))?;
            if count == 0 {
                break;
            }
            if limits.bytes_max - bytes < count as u64 {
                return Err(self.too_long(limits.bytes_max));
            }
            data_runs(bytes, &piece[..count], |at, run| {
                self.check_space(target, run.len() as u64, limits)?;
                let written = target.write_all_at(run, at);
                written.context(|| format!("write what image {} decompresses to", self.shown))
            })?;
            bytes += count as u64;
        }
        let sized = target.set_len(bytes);
        sized.context(|| format!("write what image {} decompresses to", self.shown))?;
        Ok(bytes)
    }

    /// Describes a failed read.
    fn failure(&self, e: &io::Error) -> Failure {
        let (shown, name) = (self.shown, self.compression.name());
        if e.raw_os_error().is_some() {
            let error = format!("cannot read image {shown}: {}", plain_io(e));
            return Failure::plain(Kind::Failed, error);
        }
        let text = e.to_string();
        if e.kind() == ErrorKind::OutOfMemory || text.contains(ZSTD_TOO_LARGE) {
            let limit = match self.compression {
                Compression::Xz => u64::from(XZ_MEMORY_KIB_MAX) << 10,
                _ => 1 << ZSTD_WINDOW_LOG_MAX,
            };
            return Failure::new(
                Kind::Failed,
                format!(
                    "image {shown} needs more memory to decompress by {name} than its limit, {}",
                    Size(limit)
                ),
                "if you trust it, decompress it yourself and import the result",
            );
        }
        let what = match e.kind() {
            ErrorKind::UnexpectedEof => format!("was cut off: its {name} data are incomplete"),
            _ => format!("is damaged: its {name} data cannot be decompressed: {text}"),
        };
        let again = format!("download it again; check it with `{name} -t {shown}`");
        Failure::new(Kind::Failed, format!("image {shown} {what}"), again)
    }

    fn too_long(&self, bytes_max: u64) -> Failure {
        Failure::new(
            Kind::Failed,
            format!(
                "image {} decompresses to more than {}",
                self.shown,
                Size(bytes_max)
            ),
            "this is the largest size of a volume",
        )
    }

    fn check_space(&self, target: &File, needed: u64, limits: Limits) -> Result<()> {
        let stat = rustix::fs::fstatvfs(target)
            .map_err(io::Error::from)
            .context(|| format!("find out the space left for image {}", self.shown))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free >= needed.saturating_add(limits.reserve_bytes) {
            return Ok(());
        }
        Err(Failure::new(
            Kind::NoSpace,
            format!(
                "no space to decompress image {}: {} are free where it is written, and {} stay free",
                self.shown,
                Size(free),
                Size(limits.reserve_bytes)
            ),
            "free some space; a user who cannot write to the data directory can set TMPDIR to another \
             filesystem",
        ))
    }
}

/// Reads a file from its beginning, regardless of its position.
struct Source<'a, F> {
    file: &'a File,
    at: u64,
    passed: F,
}

impl<F: FnMut(u64)> Read for Source<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = loop {
            match self.file.read_at(buffer, self.at) {
                // After an error in a header the gzip decoder reports the end of the data.
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.at += count as u64;
        (self.passed)(self.at);
        Ok(count)
    }
}

/// Fills a buffer. A shorter result means the end of the stream.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match from.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests;
