//! Errors of the database.

use std::sync::Arc;

use records::ReadError;

/// Failed access to the database.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DbError {
    /// RocksDB failed.
    #[error("metadata database: {0}")]
    Rocks(#[from] rocksdb::Error),
    /// A record could not be read.
    #[error(transparent)]
    Record(#[from] ReadError),
    /// Stored bytes make no sense.
    #[error("metadata database: {what} is damaged: {detail}")]
    Damaged {
        /// Subject.
        what: String,
        /// Error.
        detail: String,
    },
    /// The state machine refuses records.
    #[error("{0}")]
    Refused(String),
    /// A file beside the database could not be read or written.
    #[error("metadata files: {0}")]
    Io(Arc<std::io::Error>),
}

impl From<std::io::Error> for DbError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}
