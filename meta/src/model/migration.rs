//! Attachments that move from one node to another.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, UnixMillis};

/// Default lifetime of an offer, enough to start a migration.
pub const OFFER_TIME_DEFAULT: Duration = Duration::from_secs(10 * 60);
/// Longest lifetime of an offer. A longer one is refused, because operators would forget the offer.
pub const OFFER_TIME_MAX: Duration = Duration::from_secs(24 * 3600);
/// Longest lifetime of an incoming attachment. One that has not taken over by then ends, and the source
/// continues. A new offer to the same node restarts this time.
pub const INCOMING_TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// An attachment that waits for the lease of its volume, to replace the attachment on another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Incoming {
    /// Live migration: takes over when the guest runs on this node.
    Guest,
    /// Move without a connected guest: takes over at once.
    Move,
}

/// Consent that another node creates an incoming attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The only node that may accept.
    pub to: NodeId,
    /// End of the offer, by the wall clock of the metadata leader.
    pub expires_at: UnixMillis,
}
