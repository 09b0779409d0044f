//! `cargo xtask demo`: the main job for real, and a table of what was done and measured.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

mod appliance;
mod several;
mod single;
mod sources;
mod table;
mod tree;

/// Runs the demonstration with one node, or with several.
pub fn run(nodes: u8) -> Result<()> {
    match nodes {
        1 => single::run(),
        _ => several::run(nodes),
    }
}

/// Runs the demonstration of the appliance.
pub fn run_appliance() -> Result<()> {
    appliance::run()
}

fn say(line: &str) {
    eprintln!("demo: {line}");
}

fn tool(name: &str) -> Result<Command> {
    let path = guest_rig::paths::find_program(name)
        .with_context(|| format!("{name} is missing: install e2fsprogs"))?;
    Ok(Command::new(path))
}

fn path_str(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}
