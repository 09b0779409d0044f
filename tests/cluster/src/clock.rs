//! Wall clocks that jump: a library that is preloaded into a daemon and adds an offset out of a file.
//! Monotonic time is left alone, as it is by whoever sets a clock.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use guest_rig::process::run;

/// The library's source.
const SOURCE: &str = include_str!("../preload/shift_clock.rs");
/// Named by the library too.
const FILE_ENV: &str = "PENSTOCK_RIG_CLOCK";

/// Builds the library in `directory`.
pub(crate) fn build(directory: &Path) -> Result<PathBuf> {
    let library = directory.join("libshift_clock.so");
    let source = directory.join("shift_clock.rs");
    std::fs::write(&source, SOURCE).context("write the library that shifts clocks")?;
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc)
        .args(["--edition", "2024", "-O", "--crate-type", "cdylib", "-o"])
        .arg(&library)
        .arg(&source)
        .current_dir(directory))?;
    Ok(library)
}

/// A node's clock: a file with an offset in seconds.
#[derive(Debug)]
pub(crate) struct Clock {
    file: PathBuf,
}

impl Clock {
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        let clock = Self {
            file: directory.join("clock"),
        };
        clock.set(0)?;
        Ok(clock)
    }

    /// What a daemon's environment needs.
    pub(crate) fn env(&self, library: &Path) -> Vec<(String, OsString)> {
        vec![
            ("LD_PRELOAD".to_owned(), library.into()),
            (FILE_ENV.to_owned(), self.file.clone().into()),
        ]
    }

    /// Makes it jump to `seconds` after the machine's.
    pub(crate) fn set(&self, seconds: i64) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.file)
            .context("open a clock's file")?;
        // In place: the daemon has it mapped.
        file.write_all_at(&seconds.to_ne_bytes(), 0)
            .context("set a clock")
    }
}
