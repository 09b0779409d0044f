//! What a person is told when something fails: one line that names the culprit and gives a hint.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What sort of failure it is; decides the HTTP status and the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The request or the configuration is wrong in itself.
    Invalid,
    /// The named thing does not exist.
    NotFound,
    /// The named thing exists, or is in use.
    Conflict,
    /// No space left.
    NoSpace,
    /// The caller may not do this.
    Denied,
    /// The daemon cannot be reached.
    Unreachable,
    /// The daemon has not started yet: the same request may be answered in a moment.
    Starting,
    /// Anything else.
    Failed,
}

/// A failure as the admin API sends it and the command line prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// What sort of failure it is.
    pub kind: Kind,
    /// What went wrong, naming the culprit.
    pub error: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Result of everything in this program that can fail.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure with a hint.
    pub fn new(kind: Kind, error: impl fmt::Display, hint: impl fmt::Display) -> Self {
        Failure {
            kind,
            error: one_line(error),
            hint: Some(one_line(hint)),
        }
    }

    /// A failure for which nothing better than its cause can be said.
    pub fn plain(kind: Kind, error: impl fmt::Display) -> Self {
        Failure {
            kind,
            error: one_line(error),
            hint: None,
        }
    }

    /// Wrong input: exit code 2.
    pub fn invalid(error: impl fmt::Display, hint: impl fmt::Display) -> Self {
        Failure::new(Kind::Invalid, error, hint)
    }

    /// The process's exit code for this failure.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Invalid => 2,
            _ => 1,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

/// Errors from libraries may span lines; ours never do.
fn one_line(text: impl fmt::Display) -> String {
    let text = text.to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Turns library errors into failures that say what was being done.
pub trait Context<T> {
    /// `what` is verb and object, as in "open /dev/sdb".
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
    /// Same, with a hint.
    fn context_hint(self, what: impl FnOnce() -> String, hint: &str) -> Result<T>;
}

impl<T> Context<T> for std::io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| {
            Failure::plain(kind_of(&e), format!("cannot {}: {}", what(), plain_io(&e)))
        })
    }

    fn context_hint(self, what: impl FnOnce() -> String, hint: &str) -> Result<T> {
        self.map_err(|e| {
            Failure::new(
                kind_of(&e),
                format!("cannot {}: {}", what(), plain_io(&e)),
                hint,
            )
        })
    }
}

/// Kind of failure that an I/O error stands for.
pub fn kind_of(e: &std::io::Error) -> Kind {
    use std::io::ErrorKind;
    match e.kind() {
        ErrorKind::NotFound => Kind::NotFound,
        ErrorKind::PermissionDenied => Kind::Denied,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Kind::NoSpace,
        ErrorKind::AlreadyExists | ErrorKind::AddrInUse => Kind::Conflict,
        _ => Kind::Failed,
    }
}

/// The error's text without Rust's "(os error 2)".
pub fn plain_io(e: &std::io::Error) -> String {
    let text = e.to_string();
    match text.find(" (os error ") {
        Some(at) => text[..at].to_lowercase(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_with_its_hint() {
        let f = Failure::invalid("bad\n  thing", "do\nthis");
        assert_eq!(f.to_string(), "bad thing; do this");
        assert_eq!(f.exit_code(), 2);
    }

    #[test]
    fn io_errors_lose_their_number() {
        let e = std::io::Error::from_raw_os_error(libc::ENOENT);
        let f = Err::<(), _>(e).context(|| "open x".into()).unwrap_err();
        assert_eq!(f.to_string(), "cannot open x: no such file or directory");
        assert_eq!(f.exit_code(), 1);
    }
}
