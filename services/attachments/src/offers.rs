//! Offers of attachments to other nodes: the consent that a live migration needs.

use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use api::types::{Offer, OfferCreate, OfferQuery, Offered};
use meta::Attachment;
use service::failures::meta_failure;
use service::view::View;

use crate::attachments::Attachments;

use crate::block;

impl Attachments {
    /// Offers an attachment to another node.
    pub async fn offer(&self, request: &OfferCreate) -> Result<Offered> {
        self.require_cluster("offer")?;
        let view = self.cluster.view().await?;
        let source = self.offerable(&view, &request.target)?;
        if block::is_block(&source) {
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "{} is a block device of its node, which has no guest to migrate",
                    source.socket
                ),
                "detach it there, and attach the volume on the other node",
            ));
        }
        let to = view.node(&request.to)?.id;
        let lifetime = Duration::from_secs(request.lifetime_s);
        let offered = self
            .cluster
            .asked
            .offer_attachment(source.id, to, lifetime)
            .await;
        let offered = offered.map_err(meta_failure)?;
        self.rings_changed.notify_one();
        Ok(shown(&view, offered))
    }

    /// Withdraws an offer and ends the incoming attachment that it allowed.
    pub async fn withdraw(&self, query: &OfferQuery) -> Result<Offered> {
        self.require_cluster("offer")?;
        let view = self.cluster.view().await?;
        let source = self.offerable(&view, &query.target)?;
        let withdrawn = self.cluster.asked.withdraw_offer(source.id).await;
        let withdrawn = withdrawn.map_err(meta_failure)?;
        self.rings_changed.notify_one();
        Ok(shown(&view, withdrawn))
    }

    /// Finds the attachment to offer: one of this node if there is one. Only an administrator may offer
    /// another node's; the leader of the metadata checks that.
    fn offerable(&self, view: &View, target: &str) -> Result<Attachment> {
        let own = self.cluster.node_id();
        let is_meant = |a: &&Attachment| {
            (a.socket == target || a.target.name().as_str() == target)
                && a.options.incoming.is_none()
        };
        let meant = view.attachments.iter().filter(is_meant).cloned();
        let (mut here, mut elsewhere): (Vec<_>, Vec<_>) = meant.partition(|a| a.node == own);
        let found = match here.is_empty() {
            true => &mut elsewhere,
            false => &mut here,
        };
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => Err(Failure::new(
                Kind::NotFound,
                format!("nothing is attached as '{target}'"),
                "see `penstock attachment list --all`",
            )),
            n => Err(Failure::new(
                Kind::Conflict,
                format!("'{target}' names {n} attachments"),
                "only the sole attachment of a volume can be offered: detach the others first",
            )),
        }
    }
}

fn shown(view: &View, attachment: Attachment) -> Offered {
    Offered {
        volume: attachment.target.name().to_string(),
        socket: attachment.socket,
        node: view.node_name(attachment.node),
        offer: attachment.offer.map(|offer| Offer {
            to: view.node_name(offer.to),
            expires_at_ms: offer.expires_at.0,
        }),
    }
}
