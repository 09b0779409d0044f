//! Commands whose failure says what they printed.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs to the end and returns what it printed on stdout.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {name}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let told = text
            .trim()
            .lines()
            .next_back()
            .unwrap_or("it printed nothing")
            .to_owned();
        bail!("{name}: {told} ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
