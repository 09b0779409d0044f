//! Names that people give to volumes, pools and nodes.

use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

/// Longest name, in bytes. A longer one is refused; the limit keeps names fit for host names and file names.
pub const MAX_NAME_BYTES: usize = 63;

/// A checked name: 1 to [`MAX_NAME_BYTES`] ASCII letters, digits, `-`, `_` or `.`, beginning with a letter or
/// digit.
///
/// `@`, `/` and `:` are kept out for `volume@snap`, paths and socket addresses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Why a name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum NameError {
    /// Nothing between the quotes.
    #[error("a name is empty: give 1 to {MAX_NAME_BYTES} letters, digits, '-', '_' or '.'")]
    Empty,
    /// Longer than [`MAX_NAME_BYTES`].
    #[error("name {name:?} is {length} bytes long: use at most {MAX_NAME_BYTES}")]
    TooLong {
        /// Its beginning.
        name: String,
        /// Its length in bytes.
        length: usize,
    },
    /// A character that names may not contain.
    #[error("name {name:?} contains {culprit:?}: use only letters, digits, '-', '_' and '.'")]
    BadCharacter {
        /// The name.
        name: String,
        /// The first bad character.
        culprit: char,
    },
    /// A beginning that would read as an option or a hidden file.
    #[error("name {name:?} begins with {culprit:?}: begin it with a letter or a digit")]
    BadStart {
        /// The name.
        name: String,
        /// Its first character.
        culprit: char,
    },
}

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let first = text.chars().next().ok_or(NameError::Empty)?;
        if text.len() > MAX_NAME_BYTES {
            let name = text.chars().take(MAX_NAME_BYTES / 4).collect::<String>() + "...";
            return Err(NameError::TooLong {
                name,
                length: text.len(),
            });
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if let Some(culprit) = text.chars().find(|c| !allowed(*c)) {
            return Err(NameError::BadCharacter {
                name: text.to_owned(),
                culprit,
            });
        }
        if !first.is_ascii_alphanumeric() {
            return Err(NameError::BadStart {
                name: text.to_owned(),
                culprit: first,
            });
        }
        Ok(Self(text.to_owned()))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl std::str::FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_for_hosts_and_files_are_taken() {
        for good in [
            "a",
            "0",
            "db-1",
            "Debian_12.img",
            &"x".repeat(MAX_NAME_BYTES),
        ] {
            assert_eq!(Name::parse(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn other_names_are_refused_with_the_culprit() {
        assert_eq!(Name::parse(""), Err(NameError::Empty));
        let long = "y".repeat(MAX_NAME_BYTES + 1);
        assert!(matches!(
            Name::parse(&long),
            Err(NameError::TooLong { length: 64, .. })
        ));
        for (text, culprit) in [
            ("a b", ' '),
            ("v@snap", '@'),
            ("a/b", '/'),
            ("größe", 'ö'),
            ("a\nb", '\n'),
        ] {
            let name = text.to_owned();
            assert_eq!(
                Name::parse(text),
                Err(NameError::BadCharacter { name, culprit })
            );
        }
        for (text, culprit) in [("-f", '-'), (".hidden", '.'), ("_x", '_')] {
            let name = text.to_owned();
            assert_eq!(
                Name::parse(text),
                Err(NameError::BadStart { name, culprit })
            );
        }
    }

    #[test]
    fn a_bad_name_does_not_enter_by_deserialising() {
        assert!(serde_json::from_str::<Name>("\"ok\"").is_ok());
        assert!(serde_json::from_str::<Name>("\"not ok\"").is_err());
    }
}
