//! Why a node may not join.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::model::{Role, Token};

/// Most join tokens that are neither used nor expired; more are refused.
pub const MAX_TOKENS: usize = 64;

/// Refusals about joining.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinRefusal {
    /// No such token.
    #[error(
        "this join token is not known, or was used already: make a new one with `penstock token create` on a \
         node of the cluster; if an \
         earlier try with it ended half-way, `penstock health` tells of a node that has joined and was not \
         started yet: forget that with `penstock node remove`"
    )]
    UnknownToken,
    /// Its time is over.
    #[error(
        "this join token has expired: make a new one with `penstock token create` on a node of the cluster; \
         if it was made just now, compare the clocks of the cluster's nodes"
    )]
    ExpiredToken,
    /// [`MAX_TOKENS`].
    #[error("there are {MAX_TOKENS} open join tokens already: use them, or wait until they expire")]
    TooManyTokens,
    /// No open token is meant.
    #[error("there is no such open join token: it was used or revoked; see `penstock token list`")]
    NothingToRevoke,
    /// The node asks for more than its token grants.
    #[error(
        "this join token grants the roles {}, and the node asks for {}: join with `--roles {}`, or make \
         another token with \
         `penstock token create --roles {}`",
        Role::list(granted),
        Role::list(asked),
        Role::list(granted),
        Role::list(asked)
    )]
    RolesNotGranted {
        /// What the node asks for.
        asked: BTreeSet<Role>,
        /// What the token grants.
        granted: BTreeSet<Role>,
    },
    /// A token for no role.
    #[error("a join token must grant at least one of the roles meta, storage, host, nfs")]
    NoRoles,
}

impl JoinRefusal {
    /// Refuses roles that a token does not grant.
    pub(crate) fn check_roles(token: &Token, asked: &BTreeSet<Role>) -> Result<(), Self> {
        match asked.is_subset(&token.roles) {
            true => Ok(()),
            false => Err(Self::RolesNotGranted {
                asked: asked.clone(),
                granted: token.roles.clone(),
            }),
        }
    }
}
