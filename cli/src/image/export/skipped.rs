//! The list of what an export could not read.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use api::failure::{Context, Result};
use api::size::Size;

/// The list, as it is written.
pub struct Skipped {
    path: PathBuf,
    file: BufWriter<File>,
    ranges: u64,
    bytes: u64,
}

impl Skipped {
    /// Makes the file, which must not be there yet.
    pub fn new(path: &Path) -> Result<Self> {
        let shown = || format!("create {}", path.display());
        let file = File::create_new(path).context_hint(shown, "name a new file for the list")?;
        let mut list = Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            ranges: 0,
            bytes: 0,
        };
        list.line("# what could not be read: offset and length in bytes")?;
        Ok(list)
    }

    /// These bytes could not be read.
    pub fn note(&mut self, offset: u64, len: u64) -> Result<()> {
        self.ranges += 1;
        self.bytes += len;
        self.line(&format!("{offset} {len}"))
    }

    fn line(&mut self, text: &str) -> Result<()> {
        let path = &self.path;
        writeln!(self.file, "{text}").context(|| format!("write {}", path.display()))
    }

    /// The list is whole; says what is in it.
    pub fn finish(mut self) -> Result<()> {
        let path = &self.path;
        let written = self
            .file
            .flush()
            .and_then(|()| self.file.get_ref().sync_all());
        written.context(|| format!("write {}", path.display()))?;
        match self.ranges {
            0 => eprintln!("penstock: all of it could be read"),
            ranges => eprintln!(
                "penstock: {} in {ranges} ranges could not be read and is zeroes in the copy; {} says where",
                Size(self.bytes),
                path.display()
            ),
        }
        Ok(())
    }
}
