//! Who asks for a change, and what nodes notice.

use serde::{Deserialize, Serialize};

use super::Command;
use crate::ids::{NodeId, UnixMillis};
use crate::model::{Author, EventKind, Name};

/// What a node noticed and everybody may want to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Notice {
    /// So much of a pool's space is in use that somebody should see to it. By the leader.
    PoolNearFull {
        /// The pool.
        pool: Name,
        /// How much; 100: writes find no space on one of its devices.
        percent: u8,
    },
    /// A pool has room again. By the leader.
    PoolHasRoom {
        /// The pool.
        pool: Name,
        /// How much of its space is in use.
        percent: u8,
    },
    /// The volumes of a pool may grow to more than its devices hold. By the leader.
    PoolOverCommitted {
        /// The pool.
        pool: Name,
    },
    /// The devices of a pool hold all that its volumes may grow to, again. By the leader.
    PoolCovered {
        /// The pool.
        pool: Name,
    },
    /// Blocks of a device cannot be read, or have a wrong checksum.
    DataDamaged {
        /// Which, in words; at most [`Notice::TEXT_MAX`] bytes.
        what: String,
        /// The node that noticed.
        node: NodeId,
    },
    /// All blocks of a device that were damaged have been written again.
    DataRepaired {
        /// Which device, in words; at most [`Notice::TEXT_MAX`] bytes.
        what: String,
        /// The node that noticed.
        node: NodeId,
    },
}

impl Notice {
    /// Longest text of a notice, in bytes.
    pub const TEXT_MAX: usize = 1024;

    /// The event that is kept of it.
    #[must_use]
    pub fn event(&self) -> EventKind {
        match self.clone() {
            Self::PoolNearFull { pool, percent } => EventKind::PoolNearFull { pool, percent },
            Self::PoolHasRoom { pool, percent } => EventKind::PoolHasRoom { pool, percent },
            Self::PoolOverCommitted { pool } => EventKind::PoolOverCommitted { pool },
            Self::PoolCovered { pool } => EventKind::PoolCovered { pool },
            Self::DataDamaged { what, node } => EventKind::DataDamaged { what, node },
            Self::DataRepaired { what, node } => EventKind::DataRepaired { what, node },
        }
    }

    /// Whether its text is no longer than it may be, and one line: it is printed on terminals.
    pub(crate) fn is_fit(&self) -> bool {
        match self {
            Self::PoolNearFull { .. }
            | Self::PoolHasRoom { .. }
            | Self::PoolOverCommitted { .. }
            | Self::PoolCovered { .. } => true,
            Self::DataDamaged { what, .. } | Self::DataRepaired { what, .. } => {
                what.len() <= Self::TEXT_MAX && !what.contains(char::is_control)
            }
        }
    }
}

impl Command {
    /// The change itself, whoever wants it.
    pub(crate) fn change(&self) -> &Self {
        match self {
            Self::Authored { command, .. } => command,
            other => other,
        }
    }

    /// Who wants it, if that is said.
    pub(crate) fn author(&self) -> Option<Author> {
        match self {
            Self::Authored { by, .. } => Some(*by),
            _ => None,
        }
    }

    /// The same with who wants it, if it is something that people ask for.
    #[must_use]
    pub(crate) fn by(self, by: Author, at: UnixMillis) -> Self {
        match self.is_administrative() {
            true => Self::Authored {
                by,
                at,
                command: Box::new(self),
            },
            false => self,
        }
    }

    /// Whether people ask for it, so that it may come with an author. What the leader looks into, and what
    /// nodes say by themselves, does not.
    pub(crate) fn is_administrative(&self) -> bool {
        matches!(
            self,
            Self::SetNodeAdminState { .. }
                | Self::RemoveNode { .. }
                | Self::EvictNode { .. }
                | Self::RemoveLost { .. }
                | Self::CreateToken { .. }
                | Self::RevokeToken { .. }
                | Self::RegisterDevice { .. }
                | Self::DrainDevice { .. }
                | Self::RemoveDevice { .. }
                | Self::CreatePool { .. }
                | Self::SetPool { .. }
                | Self::DeletePool { .. }
                | Self::CreateVolume { .. }
                | Self::ResizeVolume { .. }
                | Self::DeleteVolume { .. }
                | Self::PromoteVolume { .. }
                | Self::RenameVolume { .. }
                | Self::SetVolume { .. }
                | Self::CreateAttachment { .. }
                | Self::DeleteAttachment { .. }
                | Self::MoveAttachment { .. }
                | Self::OfferAttachment { .. }
                | Self::WithdrawOffer { .. }
                | Self::CreateExport { .. }
                | Self::AssignExport { planned: true, .. }
                | Self::DeleteExport { .. }
                | Self::CreateFilesystem { .. }
                | Self::DeleteFilesystem { .. }
                | Self::CreateFilesystemAttachment { .. }
                | Self::DeleteFilesystemAttachment { .. }
                | Self::ChooseReplicas { .. }
                | Self::ForgetUnknown { .. }
        )
    }
}
