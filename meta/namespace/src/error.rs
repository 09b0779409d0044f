//! Why an operation is refused.

use records::ReadError;
use serde::{Deserialize, Serialize};

/// Why an operation is refused. Kept in reply slots: variants are added at the end only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Error {
    /// ENOENT.
    #[error("no such name")]
    NotFound,
    /// EEXIST.
    #[error("the name exists")]
    Exists,
    /// ENOTDIR.
    #[error("not a directory")]
    NotDirectory,
    /// EISDIR.
    #[error("a directory")]
    IsDirectory,
    /// ENOTEMPTY.
    #[error("the directory is not empty")]
    NotEmpty,
    /// EINVAL.
    #[error("invalid argument")]
    Invalid,
    /// EMLINK.
    #[error("the inode has as many links as it may have")]
    TooManyLinks,
    /// ENAMETOOLONG.
    #[error("the name is too long")]
    NameTooLong,
    /// ESTALE.
    #[error("no such inode or session")]
    Stale,
    /// EFBIG.
    #[error("larger than a file may be")]
    TooLarge,
    /// ENODATA.
    #[error("no such extended attribute")]
    NoAttribute,
    /// E2BIG.
    #[error("the value of the extended attribute is too long")]
    ValueTooLong,
    /// ERANGE.
    #[error("the name of the extended attribute is too long")]
    AttributeNameRange,
    /// ENOSPC.
    #[error("no space")]
    NoSpace,
    /// EOPNOTSUPP.
    #[error("not supported")]
    Unsupported,
    /// EPERM.
    #[error("not permitted")]
    NotPermitted,
    /// EBUSY.
    #[error("in use")]
    Busy,
    /// EMFILE.
    #[error("the session has as many segments open as it may have")]
    TooManyOpen,
    /// EPROTO.
    #[error("the sequence number is neither the slot's last nor its next")]
    OutOfSequence,
    /// ENOBUFS.
    #[error("the segment has too many ranges that were never named")]
    TooManyGaps,
    /// ELOOP.
    #[error("too many levels of directories")]
    TooDeep,
    /// EAGAIN. The inode is not as it was: the caller looks again, and repeats.
    #[error("the inode was changed meanwhile")]
    Changed,
}

impl Error {
    /// Linux's number of this error.
    pub fn errno(self) -> i32 {
        match self {
            Self::NotFound => libc::ENOENT,
            Self::Exists => libc::EEXIST,
            Self::NotDirectory => libc::ENOTDIR,
            Self::IsDirectory => libc::EISDIR,
            Self::NotEmpty => libc::ENOTEMPTY,
            Self::Invalid => libc::EINVAL,
            Self::TooManyLinks => libc::EMLINK,
            Self::NameTooLong => libc::ENAMETOOLONG,
            Self::Stale => libc::ESTALE,
            Self::TooLarge => libc::EFBIG,
            Self::NoAttribute => libc::ENODATA,
            Self::ValueTooLong => libc::E2BIG,
            Self::AttributeNameRange => libc::ERANGE,
            Self::NoSpace => libc::ENOSPC,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::NotPermitted => libc::EPERM,
            Self::Busy => libc::EBUSY,
            Self::TooManyOpen => libc::EMFILE,
            Self::OutOfSequence => libc::EPROTO,
            Self::TooManyGaps => libc::ENOBUFS,
            Self::TooDeep => libc::ELOOP,
            Self::Changed => libc::EAGAIN,
        }
    }
}

/// Why there is no answer: the caller's fault, or unreadable records.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Failure {
    /// What was asked is refused.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The records could not be read.
    #[error(transparent)]
    Records(#[from] ReadError),
}
