//! Backups of the metadata: one file that holds all records of a moment.
//!
//! ```text
//! penstock-metadata-backup\n
//! {"format":1, ...}\n          the header, one line of JSON
//! (records)                    a RocksDB table file, as snapshots are sent
//! (32 bytes)                   SHA-256 of all before
//! ```

use std::io;
use std::path::Path;

use ring::digest::{Digest, SHA256, digest};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Applied, Db, DbError};
use crate::ids::{NodeId, UnixMillis};
use crate::level::Level;

const MAGIC: &[u8] = b"penstock-metadata-backup\n";
const FORMAT: u32 = 1;
/// Longest header.
const HEADER_BYTES_MAX: usize = 1 << 20;
const DIGEST_BYTES: usize = 32;
/// Largest backup. Metadata of 100,000 volumes take some tens of MiB.
pub(crate) const BACKUP_BYTES_MAX: u64 = 1 << 30;

/// The cluster's authority, by which nodes are let in, as PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// Its certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

/// What a backup says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupHeader {
    format: u32,
    /// The cluster.
    pub cluster: Uuid,
    /// The node that it was taken on.
    pub node: NodeId,
    /// When it was taken.
    pub taken_at: UnixMillis,
    /// Version of the program that took it.
    pub version: String,
    /// The level that the cluster had.
    pub level: Level,
    /// Bytes of the records.
    pub records_bytes: u64,
    /// Who lets nodes in, if the node that it was taken on does. Whoever has this can make nodes.
    pub authority: Option<Authority>,
    pub(crate) applied: Applied,
}

impl BackupHeader {
    /// Whether it is of a node that never had peers: those reach a node at an address.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let mut nodes = self.applied.membership.nodes();
        nodes.all(|(_, node)| node.addr.is_empty())
    }
}

/// A backup in memory, found to be whole.
pub struct Backup {
    /// What it says of itself.
    pub header: BackupHeader,
    pub(crate) records: Vec<u8>,
}

/// Why a file is no backup that can be used.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// It is not there, or cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It does not begin as one.
    #[error("it is not a backup of metadata")]
    NotOne,
    /// Bytes are missing or changed.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// A newer program wrote it.
    #[error(
        "it has format {found}, and this version of penstock knows {FORMAT}: install a newer one"
    )]
    Newer {
        /// Its format.
        found: u32,
    },
}

impl Backup {
    /// Reads a backup and checks every byte of it.
    ///
    /// # Errors
    /// It is none, damaged, or newer than this program.
    pub fn read(path: &Path) -> Result<Self, BackupError> {
        if std::fs::metadata(path)?.len() > BACKUP_BYTES_MAX {
            return Err(BackupError::NotOne);
        }
        Self::parse(&std::fs::read(path)?)
    }

    /// The same with its bytes.
    ///
    /// # Errors
    /// As those of [`Self::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self, BackupError> {
        let damaged = |detail: &str| BackupError::Damaged(detail.to_owned());
        let rest = bytes.strip_prefix(MAGIC).ok_or(BackupError::NotOne)?;
        let end = rest
            .iter()
            .take(HEADER_BYTES_MAX)
            .position(|byte| *byte == b'\n');
        let end = end.ok_or_else(|| damaged("its header has no end"))?;
        let header: serde_json::Value =
            serde_json::from_slice(&rest[..end]).map_err(|error| damaged(&error.to_string()))?;
        match header["format"]
            .as_u64()
            .and_then(|format| u32::try_from(format).ok())
        {
            Some(FORMAT) => {}
            Some(found) => return Err(BackupError::Newer { found }),
            None => return Err(damaged("its header says no format")),
        }
        let header: BackupHeader =
            serde_json::from_value(header).map_err(|error| damaged(&error.to_string()))?;
        let rest = &rest[end + 1..];
        let expected = header.records_bytes.checked_add(DIGEST_BYTES as u64);
        if expected != Some(rest.len() as u64) {
            return Err(damaged(&format!(
                "it ends after {} bytes, and {} are expected",
                bytes.len(),
                (bytes.len() - rest.len()) as u64 + expected.unwrap_or(u64::MAX)
            )));
        }
        let (records, sum) = rest.split_at(rest.len() - DIGEST_BYTES);
        let found: Digest = digest(&SHA256, &bytes[..bytes.len() - DIGEST_BYTES]);
        if found.as_ref() != sum {
            return Err(damaged("its checksum does not match"));
        }
        Ok(Self {
            header,
            records: records.to_vec(),
        })
    }
}

impl Db {
    /// All records of this moment, as a backup.
    pub(crate) fn backup(&self, authority: Option<Authority>) -> Result<Vec<u8>, DbError> {
        let identity = self.identity()?.ok_or_else(|| DbError::Damaged {
            what: "the identity".to_owned(),
            detail: "it is missing".to_owned(),
        })?;
        // What a crash leaves of it is removed at the next start, as all that is no snapshot.
        let path = self
            .group
            .snapshots_dir()
            .join(format!("{}.backup", Uuid::new_v4()));
        let exported = self.export_records(&path);
        let records = exported.and_then(|applied| Ok((applied, std::fs::read(&path)?)));
        let removed = std::fs::remove_file(&path);
        let (applied, records) = records?;
        removed?;
        let header = BackupHeader {
            format: FORMAT,
            cluster: identity.cluster,
            node: identity.node,
            taken_at: UnixMillis::now(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            level: self.map().borrow().level(),
            records_bytes: records.len() as u64,
            authority,
            applied,
        };
        let mut bytes = MAGIC.to_vec();
        let header = serde_json::to_vec(&header);
        bytes.extend(header.expect("a header has text keys and finite numbers only"));
        bytes.push(b'\n');
        bytes.extend(records);
        let sum = digest(&SHA256, &bytes);
        bytes.extend(sum.as_ref());
        Ok(bytes)
    }

    fn export_records(&self, to: &Path) -> Result<Applied, DbError> {
        let exported = self.group.export(to, BACKUP_BYTES_MAX / 2)?;
        exported.ok_or_else(|| DbError::Damaged {
            what: "the metadata".to_owned(),
            detail: format!(
                "more than {} MiB do not fit a backup",
                BACKUP_BYTES_MAX >> 21
            ),
        })
    }
}
