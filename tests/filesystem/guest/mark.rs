//! A file by which a program that runs in the background and its test wait for each other.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// Makes it, and waits until somebody has removed it.
pub fn hold(mark: &Path) -> Result<()> {
    std::fs::write(mark, b"").with_context(|| format!("make {}", mark.display()))?;
    while mark.exists() {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
