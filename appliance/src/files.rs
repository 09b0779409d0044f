//! Files that a loss of power leaves as they were or as they shall be.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Replaces the content of `path`. It is there whole after a loss of power, or the content before is.
pub(crate) fn replace(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    let directory = path.parent().context("a file lies in a directory")?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("create {}", directory.display()))?;
    let name = path
        .file_name()
        .context("a file has a name")?
        .to_string_lossy();
    let partial = directory.join(format!(".{name}.new"));
    let written = (|| {
        let _ = std::fs::remove_file(&partial);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&partial)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&partial, path)?;
        File::open(directory)?.sync_all()
    })();
    written.with_context(|| format!("write {}", path.display()))
}

/// The content of a text file; nothing if there is no such file.
pub(crate) fn read_if_there(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_half_written_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("below/file");
        assert_eq!(read_if_there(&path).expect("no file"), None);
        replace(&path, b"one", 0o600).expect("written");
        std::fs::write(dir.path().join("below/.file.new"), "hal").expect("written");
        replace(&path, b"two", 0o600).expect("written again");
        assert_eq!(
            read_if_there(&path).expect("a file").as_deref(),
            Some("two")
        );
    }
}
