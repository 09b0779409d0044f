//! All mistakes of a configuration, for operators who check it before a daemon reads it.

use std::path::Path;

use api::failure::{Failure, Result};
use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue, Deserializer};

use super::{File, check_admin_socket, mistake, resolve_all, text_of};

/// Mistakes found so far.
#[derive(Debug, Default)]
pub(super) struct Mistakes(Vec<Failure>);

impl Mistakes {
    /// Adds the failure of a check. Returns the value if it succeeded.
    pub(super) fn keep<T>(&mut self, checked: Result<T>) -> Option<T> {
        checked.map_err(|failure| self.0.push(failure)).ok()
    }

    /// Adds a mistake.
    pub(super) fn add(&mut self, failure: Failure) {
        self.0.push(failure);
    }

    /// Returns an error with the mistakes, if there are any.
    pub(super) fn none(self) -> Result<(), Vec<Failure>> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(self.0),
        }
    }
}

/// Returns all mistakes of a file: those of its form by line, then those of its values.
///
/// # Errors
/// The file cannot be read.
pub fn mistakes(path: &Path) -> Result<Vec<Failure>> {
    let text = text_of(path)?;
    let (file, mut mistakes) = parse_all(&text, &path.display().to_string());
    match resolve_all(file) {
        Ok(config) => mistakes.extend(check_admin_socket(&config.admin_socket).err()),
        Err(failures) => mistakes.extend(failures),
    }
    Ok(mistakes)
}

/// Parses each key separately. Returns the keys that can be read, and the mistakes of the others.
fn parse_all(text: &str, name: &str) -> (File, Vec<Failure>) {
    let (document, mut errors) = DeTable::parse_recoverable(text);
    let mut readable = DeTable::new();
    // After a syntax error the parser cannot assign lines to keys.
    if errors.is_empty() {
        for (key, value) in document.into_inner() {
            let parts = parts(&value).into_iter().map(|part| {
                let alone = DeTable::from_iter([(key.clone(), part)]);
                file_of(alone, text).err()
            });
            let wrong: Vec<_> = parts.flatten().collect();
            if wrong.is_empty() {
                readable.insert(key, value);
            }
            errors.extend(wrong);
        }
    }
    errors.sort_by_key(|error| error.span().map(|span| span.start));
    let mut mistakes: Vec<_> = errors
        .iter()
        .map(|error| mistake(text, name, error))
        .collect();
    mistakes.dedup();
    match file_of(readable, text) {
        Ok(file) => (file, mistakes),
        Err(error) => {
            mistakes.push(mistake(text, name, &error));
            (File::default(), mistakes)
        }
    }
}

fn file_of(table: DeTable<'_>, text: &str) -> std::result::Result<File, toml::de::Error> {
    File::deserialize(Deserializer::from(Spanned::new(0..text.len(), table)))
}

/// Parts of a value that are checked independently: each key of a table, each item of a list.
fn parts<'a>(value: &Spanned<DeValue<'a>>) -> Vec<Spanned<DeValue<'a>>> {
    let part = |inner| Spanned::new(value.span(), inner);
    match value.get_ref() {
        DeValue::Table(table) if !table.is_empty() => {
            let entries = table.iter().map(|(key, value)| {
                let alone = DeTable::from_iter([(key.clone(), value.clone())]);
                part(DeValue::Table(alone))
            });
            entries.collect()
        }
        DeValue::Array(items) if !items.is_empty() => {
            let items = items.iter().map(|item| {
                let mut alone = DeArray::new();
                alone.push(item.clone());
                part(DeValue::Array(alone))
            });
            items.collect()
        }
        _ => vec![value.clone()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes_of(text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        std::fs::write(&path, text).unwrap();
        let shown = path.display().to_string();
        let mistakes = mistakes(&path).unwrap().into_iter();
        mistakes
            .map(|one| one.error.replace(&shown, "p.toml"))
            .collect()
    }

    #[test]
    fn every_mistake_of_a_file_is_found() {
        let found = mistakes_of(
            "threads = 0\n\
             threds = 1\n\
             poll = \"sometimes\"\n\
             labels = { row = \"a\", host = 3 }\n\
             roles = [\"meta\", \"king\", \"queen\"]\n\
             socket_mode = \"rw\"\n\
             listen = \"0.0.0.0\"\n\
             pool_near_full_percent = 0\n",
        );
        let expected = [
            "config p.toml line 2: unknown key `threds`",
            "config p.toml line 3: unknown variant `sometimes`",
            "config p.toml line 4: unknown key `row`",
            "config p.toml line 4: invalid type: integer `3`",
            "config p.toml line 5: unknown variant `king`",
            "config p.toml line 5: unknown variant `queen`",
            "listen: other nodes cannot reach 0.0.0.0",
            "socket_mode 'rw' is not a mode",
            "threads = 0 is out of range",
            "pool_near_full_percent = 0",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}: not {expected}");
        }
        assert!(
            mistakes_of("threads = 1\ndevices = [\"/a\", { path = \"/b\", size = \"1G\" }]")
                .is_empty()
        );
    }

    #[test]
    fn a_syntax_error_is_reported_alone() {
        let found = mistakes_of("threads = \nthreds = 1\npoll = \"never\" \"always\"\n");
        assert!(found[0].starts_with("config p.toml line 1: "), "{found:#?}");
        assert!(
            found.iter().all(|one| !one.contains("threds")),
            "{found:#?}"
        );
    }

    #[test]
    fn a_value_of_another_type_is_one_mistake() {
        for text in [
            "threads = [1, 2]",
            "threads = { a = 1, b = 2 }",
            "threads = []",
        ] {
            let found = mistakes_of(text);
            assert_eq!(found.len(), 1, "{found:#?}");
            assert!(found[0].contains("expected usize"), "{found:#?}");
        }
    }
}
