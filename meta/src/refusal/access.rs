//! Why a node may not ask for something.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::model::Role;

/// Refusals about what a node may do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessRefusal {
    /// It takes the role `meta`.
    #[error(
        "node '{node}' has the role {} and may not {action}: run this on a node with the role meta ({})",
        Role::list(roles), run_on.join(", ")
    )]
    NeedsMeta {
        /// Who asked.
        node: String,
        /// Its roles.
        roles: BTreeSet<Role>,
        /// What it asked for.
        action: String,
        /// Nodes that may.
        run_on: Vec<String>,
    },
    /// A change in somebody else's name, or one that nobody asks for.
    #[error("a node changes things in its own name, and only what people ask for")]
    NoSuchAuthor,
    /// A notice that is too long, or of several lines.
    #[error("this is nothing that a node may have kept as an event")]
    NoSuchNotice,
}
