//! What documents name is there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::build::workspace;

/// Underscores from which on a name in backticks is taken for that of a test.
const UNDERSCORES_MIN: usize = 3;

fn read(name: &str) -> String {
    std::fs::read_to_string(workspace().join(name))
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// What stands between backticks on one line.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("read a directory of the repository") {
        let path = entry.expect("read a directory of the repository").path();
        let hidden = path
            .file_name()
            .is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
        if path.is_dir() && !hidden && !path.ends_with("target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Names of all functions of the repository.
fn functions() -> BTreeSet<String> {
    let mut files = Vec::new();
    sources(workspace(), &mut files);
    let mut names = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("read a source file");
        for line in text.lines() {
            let after = line.trim_start().split_once("fn ").map(|(_, rest)| rest);
            let name = after.and_then(|rest| rest.split(['(', '<']).next());
            names.extend(name.map(str::to_owned));
        }
    }
    names
}

#[test]
fn tests_that_the_threat_model_names_exist() {
    let (text, settings, functions) = (
        read("docs/THREAT-MODEL.md"),
        read("docs/CONFIG.md"),
        functions(),
    );
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut named = 0;
    for name in quoted(&text) {
        let is_test = name.matches('_').count() >= UNDERSCORES_MIN && name.chars().all(is_word);
        if is_test && !settings.contains(name) {
            assert!(
                functions.contains(name),
                "THREAT-MODEL.md names `{name}`, which is no test"
            );
            named += 1;
        }
    }
    assert!(named > 50, "only {named} tests were found in the text");
}

#[test]
fn files_that_the_threat_model_names_exist() {
    let text = read("docs/THREAT-MODEL.md");
    let paths = quoted(&text).filter(|name| name.ends_with(".rs") && !name.contains(' '));
    for name in paths {
        let found = workspace().join(name).is_file();
        // Short forms stand beside the path of their directory.
        let short = name.matches('/').count() < 2;
        assert!(
            found || short,
            "THREAT-MODEL.md names `{name}`, which is not there"
        );
    }
}
