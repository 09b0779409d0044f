//! What docs/LIBVIRT.md tells people.

use std::path::Path;

use anyhow::{Context, Result};

/// Its text.
pub fn document() -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/LIBVIRT.md");
    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}
