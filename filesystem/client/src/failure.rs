//! Why something is not done.

use fuse_codec::Errno;

use crate::backend::{ApplyError, Unavailable};

/// As much of an answer as is logged.
const LOGGED_CHARS_MAX: usize = 120;

/// Why an operation of the namespace has no outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It is refused, and changed nothing.
    Refused(namespace::Error),
    /// The session was ended, and nothing was done in it.
    SessionOver,
    /// The pool has no room for the data, and nothing was done. The guest gets ENOSPC.
    PoolFull,
    /// It may have been done, or cannot be. The guest gets this error.
    Failed(Errno),
}

impl Failure {
    pub(crate) const EIO: Self = Self::Failed(Errno::EIO);

    /// An answer that does not fit what was asked: the leader runs another version.
    pub(crate) fn unfit(answer: &dyn std::fmt::Debug) -> Self {
        let answer = format!("{answer:?}");
        let answer: String = answer.chars().take(LOGGED_CHARS_MAX).collect();
        tracing::warn!(answer, "the metadata group answered something else");
        Self::EIO
    }
}

impl From<Unavailable> for Failure {
    fn from(_: Unavailable) -> Self {
        Self::EIO
    }
}

impl From<ApplyError> for Failure {
    fn from(error: ApplyError) -> Self {
        match error {
            ApplyError::Unavailable(_) => Self::EIO,
            ApplyError::NoSpace => Self::Failed(Errno::ENOSPC),
        }
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno)
    }
}

impl From<Failure> for Errno {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(error) => errno_of(error),
            Failure::SessionOver => Self::EIO,
            Failure::PoolFull => Self::ENOSPC,
            Failure::Failed(errno) => errno,
        }
    }
}

/// The error that a guest gets for a refusal.
fn errno_of(error: namespace::Error) -> Errno {
    use namespace::Error as Refusal;
    match error {
        // Of the client's own doing, or of others for too long: nothing that a program could act upon.
        Refusal::Changed | Refusal::OutOfSequence | Refusal::TooManyGaps | Refusal::TooManyOpen => {
            Errno::EIO
        }
        other => Errno::new(other.errno()).unwrap_or(Errno::EIO),
    }
}
