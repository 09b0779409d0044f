//! Offers of attachments to other nodes.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Consent that another node takes over an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Offer {
    /// Name of the only node that may create an incoming attachment.
    pub to: String,
    /// End of the offer, in milliseconds since 1970.
    pub expires_at_ms: u64,
}

/// Request to offer an attachment to another node. The offer replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OfferCreate {
    /// Socket of the attachment, or the name of its volume.
    pub target: String,
    /// Name or number of the node that may create an incoming attachment.
    pub to: String,
    /// Lifetime of the offer in seconds, at most a day.
    #[serde(default = "lifetime_default")]
    pub lifetime_s: u64,
}

/// Query to withdraw an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OfferQuery {
    /// Socket of the attachment that was offered, or the name of its volume.
    pub target: String,
}

/// An attachment whose offer was made or withdrawn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Offered {
    /// Name of the volume.
    pub volume: String,
    /// The vhost-user socket.
    pub socket: String,
    /// Name of the node that serves it.
    pub node: String,
    /// The offer; absent after its withdrawal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offer: Option<Offer>,
}

fn lifetime_default() -> u64 {
    meta::OFFER_TIME_DEFAULT.as_secs()
}
