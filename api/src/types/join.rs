//! Letting nodes in.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Makes a join token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenCreate {
    /// How long it can be used, in seconds.
    pub lifetime_s: u64,
    /// Roles that the node may have: `meta`, `storage`, `host`, `nfs`. Only `host` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roles: Option<Vec<String>>,
}

/// A join token that was made and not used, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OpenToken {
    /// The beginning of its SHA-256, by which it is revoked.
    pub id: String,
    /// The roles that the node may have.
    pub roles: Vec<String>,
    /// When it was made, in milliseconds since 1970.
    pub created_at_ms: u64,
    /// When it ends, likewise.
    pub expires_at_ms: u64,
}

/// A join token: a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// By what it is revoked.
    pub id: String,
    /// What `penstock join` takes.
    pub token: String,
    /// When it ends, in milliseconds since 1970.
    pub expires_at_ms: u64,
    /// The roles that the node may have.
    pub roles: Vec<String>,
}
