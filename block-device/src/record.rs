//! What the helper keeps of a device for its next process: the daemon's record of requests in flight, in a
//! file on a filesystem in memory.
//!
//! The file is there exactly while the driver's rings run. It is made, empty, before the kernel is told that
//! the device has started, and removed before it is told that the device was reset: a record never meets the
//! rings of another start. It gets its length when a daemon first connects; a daemon takes zeroes for a
//! record in which nothing is in flight.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The place of a device's record.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
}

impl Record {
    /// The record in this file, if it is there.
    pub fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// Whether the rings ran when the process before this one ended.
    pub fn is_there(&self) -> bool {
        self.path.exists()
    }

    /// The rings start: nothing is in flight.
    pub fn begin(&self) -> io::Result<()> {
        self.options().truncate(true).open(&self.path).map(drop)
    }

    /// The rings have stopped.
    pub fn end(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Opens the file. A new one gets `bytes` zeroes; one of another length is refused.
    pub fn file(&self, bytes: u64) -> io::Result<File> {
        let file = self.options().open(&self.path)?;
        match file.metadata()?.len() {
            0 => file.set_len(bytes)?,
            length if length == bytes => {}
            length => {
                return Err(io::Error::other(format!(
                    "{} has {length} bytes, and the daemon's record of requests in flight has {bytes}: it is \
                     of another version",
                    self.path.display()
                )));
            }
        }
        Ok(file)
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600);
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_lasts_from_start_to_reset() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::at(&dir.path().join("web.record"));
        assert!(!record.is_there());
        record.begin().unwrap();
        assert!(record.is_there());
        assert_eq!(record.file(4096).unwrap().metadata().unwrap().len(), 4096);
        // Another process goes on with it.
        let next = Record::at(&dir.path().join("web.record"));
        assert_eq!(next.file(4096).unwrap().metadata().unwrap().len(), 4096);
        let told = next.file(8192).unwrap_err().to_string();
        assert!(told.contains("4096") && told.contains("8192"), "{told}");
        // A start empties it.
        next.begin().unwrap();
        assert_eq!(next.file(8192).unwrap().metadata().unwrap().len(), 8192);
        next.end().unwrap();
        next.end().unwrap();
        assert!(!record.is_there());
    }
}
