//! This source tree, as data that demonstrations store.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use guest_rig::process::run as run_command;

use crate::build::workspace;

/// The files of this checkout as a tar in `scratch`, padded to whole blocks.
pub(super) fn archive(scratch: &Path) -> Result<PathBuf> {
    let archive = scratch.join("sources.tar");
    let tree = scratch.join("sources");
    std::fs::create_dir(&tree)?;
    for entry in std::fs::read_dir(workspace()).context("list the checkout")? {
        let name = entry?.file_name();
        // What is not source: the repository's history and build output.
        if name == ".git" || name == "target" {
            continue;
        }
        run_command(
            Command::new("cp")
                .args(["-r", "--no-dereference"])
                .arg(workspace().join(&name))
                .arg(&tree),
        )?;
    }
    run_command(
        Command::new("tar")
            .args(["--record-size=65536", "-C"])
            .arg(&tree)
            .arg("-cf")
            .arg(&archive)
            .arg("."),
    )?;
    Ok(archive)
}
