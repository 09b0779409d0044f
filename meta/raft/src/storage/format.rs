//! Names, keys and values in the database.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::DbError;
use crate::config::{LogId, StoredMembership};

pub(super) const META: &str = "meta";
pub(super) const LOG: &str = "log";
pub(super) const STATE_PREFIX: &str = "state.";
/// Prefix of the state families of all groups but the main one.
pub(super) const GROUP_STATE_PREFIX: &str = "ns.";

pub(super) const KEY_FORMAT: &[u8] = b"format";
// Of each group:
pub(super) const KEY_STATE_FAMILY: &str = "state_family";
pub(super) const KEY_VOTE: &str = "vote";
pub(super) const KEY_COMMITTED: &str = "committed";
pub(super) const KEY_PURGED: &str = "purged";

/// Key of [`Applied`] in the state family, below every record's.
pub(super) const KEY_APPLIED: &[u8] = &[0];

/// Version of the layout (`storage.rs`).
pub(super) const FORMAT: u32 = 1;

/// Position that the records have reached in the log. Stored among them, so that both change in one write.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// Last applied entry.
    pub last: Option<LogId>,
    /// Newest applied membership.
    pub membership: StoredMembership,
}

pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("stored values have text keys and finite numbers only")
}

pub(super) fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, DbError> {
    serde_json::from_slice(bytes).map_err(|error| DbError::Damaged {
        what: what.to_owned(),
        detail: error.to_string(),
    })
}
