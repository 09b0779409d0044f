//! Limits on what a session may send, and on what waits for it.
//!
//! A session that exceeds one of them loses its link ([`Limit`]): its messages are refused until it begins
//! another one. What it holds stays. A host that keeps to the protocol reaches none of them.

use crate::manager::WAITING_MAX;
use crate::message::ToManager;
use crate::settings::Settings;

/// Messages of one call, where each claim counts as one. The leader holds its lock for a few of them at a
/// time and answers the call after the last. With more, the link is closed. While hosts of the previous
/// version are in the cluster, claims count as one message: those hosts do not split them.
pub const MESSAGES_MAX: usize = 1024;

/// Grants and refusals that a session has not acknowledged. A holder waits for at most half of
/// [`WAITING_MAX`] answers, and may have received as many that it has not acknowledged yet. With more, the
/// link is closed.
pub const ANSWERS_MAX: usize = 2 * WAITING_MAX;

/// A limit that a session has exceeded. Its link is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// More than [`MESSAGES_MAX`] in one call.
    #[error("it sent more than {MESSAGES_MAX} messages and claims at once")]
    Messages,
    /// It claims more than a session can hold, or goes on claiming after its last claim.
    #[error("it claimed more capabilities than a session can hold, or claimed out of order")]
    Claims,
    /// It does not acknowledge [`ANSWERS_MAX`] answers, or recalls of as much as a session can hold.
    #[error("it asks for more and more, and does not fetch the answers")]
    Outbox,
}

impl ToManager {
    /// How much of [`MESSAGES_MAX`] the message takes up.
    pub fn weight(&self) -> usize {
        match self {
            Self::Claims(claims) | Self::SomeClaims(claims) => claims.len().max(1),
            Self::Request { .. } | Self::Dropped { .. } => 1,
        }
    }
}

impl Settings {
    /// Capabilities that a session can hold: it is refused more at twice [`Settings::capabilities_max`], and
    /// what was waiting then may still be granted.
    pub(crate) fn held_max(&self) -> usize {
        self.refused_at().saturating_add(WAITING_MAX)
    }

    /// Capabilities of a session at which its requests are refused.
    pub(crate) fn refused_at(&self) -> usize {
        self.capabilities_max.saturating_mul(2)
    }
}
