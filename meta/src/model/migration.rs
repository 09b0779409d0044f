//! Attachments on their way from one node to another.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, UnixMillis};

/// Time of an offer if none is given: enough to start a migration.
pub const OFFER_TIME_DEFAULT: Duration = Duration::from_secs(10 * 60);
/// Longest time of an offer. A longer one is refused, because it would be forgotten.
pub const OFFER_TIME_MAX: Duration = Duration::from_secs(24 * 3600);
/// Longest time of an incoming attachment. One that has not taken over by then ends, and the source goes on.
/// A new offer to the same node starts the time again.
pub const INCOMING_TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// An attachment that is to take the place of the one on another node, and waits for the lease of its volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Incoming {
    /// The guest is migrated live: it takes over when the guest runs here.
    Guest,
    /// No guest is connected: it takes over at once.
    Move,
}

/// Consent that another node makes an incoming attachment for an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The only node that may accept.
    pub to: NodeId,
    /// When the offer ends, by the wall clock of the metadata leader.
    pub expires_at: UnixMillis,
}
