//! The width of lines: rustfmt breaks code, but neither comments nor strings nor Markdown.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::build::workspace;

/// Characters in a line of Rust or Markdown.
const COLUMNS_MAX: usize = 110;
/// Lines that are named before the rest is only counted.
const NAMED_MAX: usize = 50;

/// Fails if a Rust or Markdown file of the repository has a longer line. A line with an address is let
/// through, because an address cannot be broken.
pub fn check() -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "*.rs", "*.md"])
        .current_dir(workspace())
        .output()
        .context("run git, to list the files")?;
    ensure!(
        listed.status.success(),
        "git ls-files failed: {}",
        String::from_utf8_lossy(&listed.stderr).trim()
    );
    let names = String::from_utf8(listed.stdout).context("the names of all files are UTF-8")?;
    let mut too_long = Vec::new();
    for name in names.split_terminator('\0') {
        let path = workspace().join(name);
        if path.is_file() {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {name}"))?;
            too_long.extend(long_lines(Path::new(name), &text));
        }
    }
    if too_long.is_empty() {
        return Ok(());
    }
    for line in too_long.iter().take(NAMED_MAX) {
        eprintln!("{line}");
    }
    bail!(
        "{} lines are longer than {COLUMNS_MAX} columns: break them",
        too_long.len()
    );
}

fn long_lines(name: &Path, text: &str) -> Vec<String> {
    let lines = (1..).zip(text.lines());
    let widths = lines.map(|(number, line): (usize, &str)| (number, line, line.chars().count()));
    widths
        .filter(|(_, line, width)| *width > COLUMNS_MAX && !line.contains("://"))
        .map(|(number, _, width)| format!("{}:{number}: {width} columns", name.display()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_over_the_limit_are_named() {
        let fits = "x".repeat(COLUMNS_MAX);
        let text = format!("{fits}\n{fits}é\nsee https://example.org/{fits}\n");
        let found = long_lines(Path::new("a.md"), &text);
        assert_eq!(found, ["a.md:2: 111 columns"]);
    }
}
