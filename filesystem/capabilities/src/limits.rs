//! Limits on the messages that a session sends and on those that wait for it.
//!
//! A session that exceeds one of them loses its link ([`Limit`]): its messages are refused until it begins
//! another link. It keeps its capabilities. A host that follows the protocol reaches none of these limits.

use crate::manager::WAITING_MAX;
use crate::message::ToManager;
use crate::settings::Settings;

/// Messages of one call, where each claim counts as one. The leader holds its lock for a few of them at a
/// time and answers the call after the last. With more, the link is closed.
pub const MESSAGES_MAX: usize = 1024;

/// Grants and refusals that a session has not acknowledged. A holder waits for at most half of
/// [`WAITING_MAX`] answers, and may have received as many that it has not acknowledged yet. More of them
/// close the link.
pub const ANSWERS_MAX: usize = 2 * WAITING_MAX;

/// A limit that a session has exceeded. Its link is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// More than [`MESSAGES_MAX`] messages in one call.
    #[error("it sent more than {MESSAGES_MAX} messages and claims at once")]
    Messages,
    /// The session claims more than it can hold, or sends claims after its last claim.
    #[error("it claimed more capabilities than a session can hold, or claimed out of order")]
    Claims,
    /// The session does not acknowledge answers or recalls.
    #[error("it does not fetch the answers to its requests")]
    Outbox,
}

impl ToManager {
    /// Number of messages that this one counts for in [`MESSAGES_MAX`].
    pub fn weight(&self) -> usize {
        match self {
            Self::Claims(claims) | Self::SomeClaims(claims) => claims.len().max(1),
            Self::Request { .. } | Self::Dropped { .. } => 1,
        }
    }
}

impl Settings {
    /// Largest number of capabilities of a session: further requests are refused at twice
    /// [`Settings::capabilities_max`], and those that were waiting then may still be granted.
    pub(crate) fn held_max(&self) -> usize {
        self.refused_at().saturating_add(WAITING_MAX)
    }

    /// Number of capabilities at which the requests of a session are refused.
    pub(crate) fn refused_at(&self) -> usize {
        self.capabilities_max.saturating_mul(2)
    }
}
