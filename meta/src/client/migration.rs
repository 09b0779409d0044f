//! Attachments that move between nodes.

use std::time::Duration;

use super::{Meta, a_lease, an_attachment};
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::{AttachmentId, NodeId, UnixMillis};
use crate::model::{Attachment, Lease};

impl Meta {
    /// Makes an incoming attachment on another node, which takes the place of this one as soon as the lease
    /// is given back. No guest may use it.
    pub async fn move_attachment(
        &self,
        attachment: AttachmentId,
        to: NodeId,
        socket: &str,
    ) -> Result<Attachment, MetaError> {
        let (socket, at) = (socket.to_owned(), UnixMillis::now());
        let command = Command::MoveAttachment {
            attachment,
            to,
            socket,
            at,
        };
        an_attachment(self.propose(command).await?)
    }

    /// Offers an attachment to a node, which may then create an incoming one. Replaces an earlier offer.
    pub async fn offer_attachment(
        &self,
        attachment: AttachmentId,
        to: NodeId,
        lifetime: Duration,
    ) -> Result<Attachment, MetaError> {
        let command = Command::OfferAttachment {
            attachment,
            to,
            lifetime_s: lifetime.as_secs(),
            at: UnixMillis::now(),
        };
        an_attachment(self.propose(command).await?)
    }

    /// Withdraws an offer and ends the incoming attachment that it allowed.
    pub async fn withdraw_offer(&self, attachment: AttachmentId) -> Result<Attachment, MetaError> {
        an_attachment(self.propose(Command::WithdrawOffer { attachment }).await?)
    }

    /// Makes an incoming attachment of this node replace the one on another node. Grants this node the lease
    /// of the volume for [`crate::LEASE_DURATION`], counted from before this call, and deletes the other
    /// attachment.
    ///
    /// # Errors
    /// Refused while the other node has the lease.
    pub async fn take_over_attachment(&self, attachment: AttachmentId) -> Result<Lease, MetaError> {
        let command = Command::TakeOverAttachment {
            attachment,
            expired: None,
            at: UnixMillis::now(),
        };
        a_lease(self.propose(command).await?)
    }
}
