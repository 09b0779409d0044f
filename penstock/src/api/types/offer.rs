//! Offers of attachments to other nodes.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Consent that another node takes the place of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Offer {
    /// Name of the only node that may make an incoming attachment.
    pub to: String,
    /// When the offer ends, in milliseconds since 1970.
    pub expires_at_ms: u64,
}

/// Offers an attachment to another node, in place of an earlier offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OfferCreate {
    /// Socket of the attachment, or the name of its volume.
    pub target: String,
    /// Name or number of the node that may make an incoming attachment.
    pub to: String,
    /// How long the offer stands, in seconds; at most a day.
    #[serde(default = "lifetime_default")]
    pub lifetime_s: u64,
}

/// Query of the withdrawal of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OfferQuery {
    /// Socket of the attachment that was offered, or the name of its volume.
    pub target: String,
}

/// An attachment that was offered, or is not any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Offered {
    /// Name of the volume.
    pub volume: String,
    /// The vhost-user socket.
    pub socket: String,
    /// Name of the node that serves it.
    pub node: String,
    /// The offer; absent once it is withdrawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offer: Option<Offer>,
}

fn lifetime_default() -> u64 {
    meta::OFFER_TIME_DEFAULT.as_secs()
}
