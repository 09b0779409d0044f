//! Why a node may not join.

use serde::{Deserialize, Serialize};

/// Most join tokens that are neither used nor expired; more are refused.
pub const MAX_TOKENS: usize = 64;

/// Refusals about joining.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinRefusal {
    /// No such token.
    #[error(
        "this join token is not known, or was used already: make a new one with `penstock token create` on a node of the cluster; if an \
         earlier try with it ended half-way, `penstock health` tells of a node that has joined and was not started yet: forget that with `penstock node remove`"
    )]
    UnknownToken,
    /// Its time is over.
    #[error(
        "this join token has expired: make a new one with `penstock token create` on a node of the cluster"
    )]
    ExpiredToken,
    /// [`MAX_TOKENS`].
    #[error("there are {MAX_TOKENS} open join tokens already: use them, or wait until they expire")]
    TooManyTokens,
}
