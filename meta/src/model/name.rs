//! Names that people give to volumes, pools and nodes.

use std::fmt;
use std::ops::Deref;

use namespace::{FilesystemId, SegmentId};
use serde::{Deserialize, Deserializer, Serialize};

use super::SegmentOf;

/// Longest name, in bytes. A longer one is refused; the limit keeps names fit for host names and file names.
pub const MAX_NAME_BYTES: usize = 63;

const SEGMENT_PREFIX: &str = ".segment-";

/// A checked name: 1 to [`MAX_NAME_BYTES`] ASCII letters, digits, `-`, `_` or `.`, beginning with a letter or
/// digit.
///
/// `@`, `/` and `:` are kept out for `volume@snap`, paths and socket addresses.
///
/// Volumes that hold segments of filesystems have names like `.segment-3-17`, which nobody can give: only the
/// state machine makes them, and they are read back from records.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(into = "String")]
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

    /// The name of a segment's volume.
    pub(crate) fn of_segment(of: SegmentOf) -> Self {
        let prefix = Self::segment_prefix(of.filesystem);
        Self(format!("{prefix}{}", of.segment.0))
    }

    /// What the names of all segments' volumes of a filesystem begin with, and no other name.
    pub(crate) fn segment_prefix(filesystem: FilesystemId) -> String {
        format!("{SEGMENT_PREFIX}{}-", filesystem.0)
    }

    /// The segment whose volume has this name; nothing if somebody gave it.
    pub(crate) fn segment_of(&self) -> Option<SegmentOf> {
        Self::segment(&self.0)
    }

    fn segment(text: &str) -> Option<SegmentOf> {
        let (filesystem, segment) = text.strip_prefix(SEGMENT_PREFIX)?.split_once('-')?;
        let of = SegmentOf {
            filesystem: FilesystemId(filesystem.parse().ok()?),
            segment: SegmentId(segment.parse().ok()?),
        };
        (Self::of_segment(of).0 == text).then_some(of)
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

/// A name from a record or a message, also one that only the state machine makes.
impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match Self::segment(&text) {
            Some(of) => Ok(Self::of_segment(of)),
            None => Self::parse(&text).map_err(serde::de::Error::custom),
        }
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
    fn a_segments_name_is_read_back_and_never_given() {
        let of = SegmentOf {
            filesystem: FilesystemId(3),
            segment: SegmentId(u64::MAX),
        };
        let name = Name::of_segment(of);
        assert_eq!(&*name, ".segment-3-18446744073709551615");
        assert!(name.starts_with(&Name::segment_prefix(FilesystemId(3))));
        assert!(!name.starts_with(&Name::segment_prefix(FilesystemId(31))));
        assert!(name.len() <= MAX_NAME_BYTES);
        let text = serde_json::to_string(&name).unwrap();
        assert_eq!(serde_json::from_str::<Name>(&text).unwrap(), name);
        assert!(Name::parse(&name).is_err());
        assert!(Name::try_from(name.as_str().to_owned()).is_err());
        for bad in [
            ".segment-",
            ".segment-1",
            ".segment-1-",
            ".segment-01-2",
            ".segment-1-2-3",
        ] {
            let read = serde_json::from_str::<Name>(&format!("{bad:?}"));
            assert!(read.is_err(), "{bad}");
        }
    }

    #[test]
    fn a_bad_name_does_not_enter_by_deserialising() {
        assert!(serde_json::from_str::<Name>("\"ok\"").is_ok());
        assert!(serde_json::from_str::<Name>("\"not ok\"").is_err());
    }
}
