//! Typing what a document tells people to type, at the machines that its prompts name.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use guest_rig::paths::penstock_binary;
use tempfile::TempDir;

use crate::document::Line;
use crate::machine::Machine;

/// Stands in documents for what `token create` printed.
const TOKEN: &str = "TOKEN";
/// Stands in documents for what the recovery or restoration of metadata printed.
const HISTORY: &str = "HISTORY";

/// A document of the project, by its path in it.
pub fn document(path: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

/// A directory for the machines' files.
pub fn scratch() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("penstock-typed-")
        .tempdir()
        .context("make a directory for the machines")
}

/// A directory in which `penstock` is the binary under test.
pub fn programs(scratch: &Path) -> Result<PathBuf> {
    let directory = scratch.join("bin");
    std::fs::create_dir(&directory)?;
    let binary = std::path::absolute(penstock_binary()?)?;
    std::os::unix::fs::symlink(binary, directory.join("penstock"))?;
    Ok(directory)
}

/// Output of commands that later commands need.
#[derive(Debug, Default)]
pub struct Placeholders {
    token: String,
    history: String,
}

/// Types each line at the machine that its prompt names; `any` is the last one. What waits for something is
/// typed again until that is so.
pub fn type_all(machines: &mut [Machine], lines: &[Line]) -> Result<()> {
    let mut placeholders = Placeholders::default();
    for line in lines {
        type_line(machines, line, &mut placeholders)?;
    }
    Ok(())
}

/// Types one line, with the output of earlier lines in place of the document's placeholders. Returns its
/// output.
pub fn type_line(
    machines: &mut [Machine],
    Line { prompt, command }: &Line,
    placeholders: &mut Placeholders,
) -> Result<String> {
    let typed = command.replace(TOKEN, &placeholders.token);
    let typed = typed.replace(HISTORY, &placeholders.history);
    let machine = match prompt.as_str() {
        "any" => machines.last_mut(),
        name => machines.iter_mut().find(|machine| machine.name() == name),
    };
    let machine = machine.with_context(|| format!("no machine for {prompt}$ {command}"))?;
    eprintln!("{prompt}$ {command}");
    let waits = [
        "penstock health",
        "penstock meta resume",
        "penstock node remove",
        "penstock pool set",
    ];
    let printed = match waits.iter().any(|verb| command.starts_with(verb)) {
        true => machine.until_ok(&typed)?,
        false => machine.ok(&typed)?,
    };
    // A process in the background may print lines before this command's output.
    let last = printed.lines().last().unwrap_or_default();
    if command.contains("token create") {
        last.clone_into(&mut placeholders.token);
    }
    if ["cluster recover", "meta restore"]
        .iter()
        .any(|verb| command.contains(verb))
    {
        last.clone_into(&mut placeholders.history);
    }
    Ok(printed)
}
