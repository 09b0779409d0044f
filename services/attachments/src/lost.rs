//! Attachments that this node has lost while nobody heard of it: the lease of the volume, the record, or
//! both.
//!
//! *The record is gone*: an operator forgot the attachment (`penstock detach --force` on another node), to
//! serve the volume elsewhere. Its session is closed and its socket removed; then the volume is closed, and
//! its lease given back. What waits is not waited for.
//!
//! *The lease is another's*: that node was granted it when it had run out here. The volume was
//! [revoked](fabric::VolumeHandle::revoke) when this node heard of it, so that whatever waited has
//! failed. Its sessions and the volume are closed, and what is still attached here is served again, with a
//! lease of its own, as soon as the other node lets go.
//!
//! **Why nothing goes on under the next lease.** [`renew_lease`](fabric::Fabric::renew_lease) repeats
//! what waits under the newer lease, and may: the older one was this node's until then, so nobody wrote or
//! recovered blocks in between. Here somebody did. Blocks that the holder in between left unresolved must be
//! recovered before anything is sent, which an opening does and a renewal does not. And a write that waits
//! may have been found on one replica by the other's takeover, been made part of the volume, been read, and
//! been overwritten since: repeated under a newer number it would undo what came after. Nobody was told that
//! it is done, so it may fail: the guest hears of it, and that what it believes of its disk may be outdated.
//! So the volume is opened anew, as a start does it: a new grant, older leases fenced out, lease recovery,
//! then the first request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use meta::{AttachmentId, AttachmentTarget, LEASE_DURATION, VolumeId};
use service::failures::meta_failure;

use crate::attachments::Attachments;

use crate::attachments::{State, close};

/// Pause between two looks: what is lost is noticed when leases are renewed.
const PAUSE: Duration = Duration::from_secs(3);
/// A lease that somebody holds is asked for this often. Whether it has run out is found out only so, and each
/// time costs an entry in the log of metadata.
const ASK_EVERY: Duration = LEASE_DURATION;

/// Why an attachment of this node is not served for now.
pub struct Loss {
    failure: Failure,
    /// When the lease was asked for last.
    asked: Option<Instant>,
}

impl Loss {
    /// What a person is told: why it is not served, and what becomes of it.
    pub fn describe(&self, socket: &str) -> (String, String) {
        let doing = format!(
            "it is served again as soon as that node lets the volume go; if it is not to be, `penstock \
             detach {socket}` ends it"
        );
        (self.failure.error.clone(), doing)
    }

    fn is_due(&self) -> bool {
        self.asked.is_none_or(|asked| asked.elapsed() >= ASK_EVERY)
    }
}

/// What is to be done about an attachment.
enum LossVerdict {
    /// It is not this node's any more.
    Forget,
    /// It waits for its lease.
    Close,
    /// Its lease may be free.
    ServeAgain(Box<meta::Attachment>),
}

/// Looks for as long as attachments are served. A node without a network loses nothing.
pub fn keep(attachments: &Arc<Attachments>) {
    if !attachments.cluster.has_network {
        return;
    }
    let weak = Arc::downgrade(attachments);
    tokio::spawn(async move {
        let mut told = false;
        loop {
            tokio::time::sleep(PAUSE).await;
            let Some(attachments) = weak.upgrade() else {
                return;
            };
            match attachments.look_for_losses().await {
                Ok(()) => told = false,
                // Said once: it is looked again.
                Err(failure) if !told => {
                    told = true;
                    tracing::warn!(%failure, "look for what was taken from this node");
                }
                Err(_) => {}
            }
        }
    });
}

impl Attachments {
    pub(crate) async fn look_for_losses(self: &Arc<Self>) -> Result<()> {
        for (id, verdict) in self.verdicts().await? {
            match verdict {
                LossVerdict::Forget => self.end_lost(id, true).await,
                LossVerdict::Close => self.end_lost(id, false).await,
                LossVerdict::ServeAgain(record) => self.serve_again(&record).await?,
            }
        }
        Ok(())
    }

    /// Asks the leader only if there is reason to.
    async fn verdicts(&self) -> Result<Vec<(AttachmentId, LossVerdict)>> {
        let own = self.cluster.node_id();
        let (mut ids, mut is_suspect) = (Vec::new(), false);
        let lost = {
            let live = self.lock().await;
            let lost = self.volumes.leases().lost();
            let applied = self
                .cluster
                .meta
                .applied()
                .attachments()
                .map_err(meta_failure)?;
            for (id, served) in &live.attached.served {
                ids.push((*id, served.volume, matches!(served.state, State::Lost(_))));
                let is_known = applied.iter().any(|one| one.id == *id);
                is_suspect |= !is_known
                    || lost.contains(&served.volume)
                    || matches!(served.state, State::Lost(_));
            }
            lost
        };
        if !is_suspect {
            return Ok(Vec::new());
        }
        // Read after the attachments were looked at, and to the newest: one that is not there was there, and
        // was deleted. What this node has applied may be older than the attachment.
        let records = self.cluster.asked.list_attachments_of(own).await;
        let records = records.map_err(meta_failure)?;
        let verdict = |(id, volume, waits)| {
            let record = records.iter().find(|record| record.id == id);
            let verdict = match record {
                None => LossVerdict::Forget,
                Some(record) if waits => LossVerdict::ServeAgain(Box::new(record.clone())),
                Some(_) if lost.contains(&volume) => LossVerdict::Close,
                Some(_) => return None,
            };
            Some((id, verdict))
        };
        Ok(ids.into_iter().filter_map(verdict).collect())
    }

    /// Ends what is served of an attachment, in a task of its own: the session waits for its requests in
    /// flight.
    async fn end_lost(self: &Arc<Self>, id: AttachmentId, is_forgotten: bool) {
        let mut live = self.lock().await;
        let Some(served) = live.attached.served.get_mut(&id) else {
            return;
        };
        let (volume, socket) = (served.volume, served.socket.clone());
        let session = match std::mem::replace(&mut served.state, State::Detaching) {
            State::Up { session, .. } => session,
            // Somebody ends it already.
            State::Detaching => return,
            closed @ (State::Failed(_) | State::Lost(_)) => {
                served.state = closed;
                if is_forgotten {
                    live.attached.served.remove(&id);
                }
                return;
            }
        };
        // Unless others use the volume here.
        let is_last = live
            .open
            .volumes
            .get(&volume)
            .is_some_and(|one| one.users == 1);
        let has_moved = live
            .open
            .volumes
            .get(&volume)
            .is_some_and(|one| one.waits_for_lease);
        if is_forgotten && is_last && !has_moved {
            self.volumes
                .leases()
                .give_up(volume, "its attachment here was forgotten by an operator");
        }
        if is_forgotten
            && is_last
            && has_moved
            && let Some(open) = live.open.volumes.get(&volume)
        {
            // If its guest goes on here after all, it hears of it instead of waiting for ever.
            open.handle.revoke();
        }
        match is_forgotten {
            true if has_moved => tracing::info!(
                socket,
                "the attachment has ended here: another node serves the volume"
            ),
            true => tracing::error!(
                socket,
                "an operator removed this attachment while this node was unreachable: it is closed"
            ),
            false => tracing::error!(
                socket,
                "another node has taken the lease of this volume: waiting requests have failed"
            ),
        }
        let attachments = Arc::clone(self);
        tokio::spawn(async move {
            // While its requests still fail: without a session they would wait, and the device with them.
            if is_forgotten && let Err(failure) = attachments.remove_block_device(id, true).await {
                tracing::error!(%failure, "remove a block device whose attachment was forgotten");
            }
            close(vec![session]).await;
            let mut live = attachments.lock().await;
            attachments.volumes.close_in(&mut live.open, volume).await;
            if is_forgotten {
                live.attached.served.remove(&id);
            } else if let Some(served) = live.attached.served.get_mut(&id) {
                served.state = State::Lost(Loss {
                    failure: Failure::plain(
                        Kind::Conflict,
                        "another node was granted the lease of its volume while this one was unreachable",
                    ),
                    asked: None,
                });
            }
        });
    }

    /// Serves an attachment that waits for its lease, if that may be free.
    async fn serve_again(&self, record: &meta::Attachment) -> Result<()> {
        let AttachmentTarget::Volume { name, id } = &record.target;
        let is_free = !self.is_anothers(*id).await?;
        let volume = self
            .cluster
            .asked
            .get_volume(name)
            .await
            .map_err(meta_failure)?;
        let mut live = self.lock().await;
        // It may have been detached meanwhile.
        let is_due = match live.attached.served.get(&record.id).map(|one| &one.state) {
            Some(State::Lost(loss)) => is_free || loss.is_due(),
            _ => false,
        };
        if !is_due {
            return Ok(());
        }
        let again = self.serve(&mut live, &volume, record).await;
        let Some(served) = live.attached.served.get_mut(&record.id) else {
            return Ok(());
        };
        match again {
            Ok(again) => {
                tracing::info!(socket = record.socket, "served again");
                served.state = again.state;
                served.block = again.block;
            }
            Err(failure) => {
                served.state = State::Lost(Loss {
                    failure,
                    asked: Some(Instant::now()),
                });
            }
        }
        Ok(())
    }

    /// What an attachment is that could not be served: one whose lease is another's is tried again.
    pub(crate) async fn closed(&self, volume: VolumeId, failure: Failure) -> State {
        match self.is_anothers(volume).await {
            Ok(true) => State::Lost(Loss {
                failure,
                asked: Some(Instant::now()),
            }),
            Ok(false) | Err(_) => State::Failed(failure),
        }
    }

    async fn is_anothers(&self, volume: VolumeId) -> Result<bool> {
        let lease = self
            .cluster
            .asked
            .get_lease(volume)
            .await
            .map_err(meta_failure)?;
        let holder = lease.and_then(|lease| lease.holder);
        Ok(holder.is_some_and(|holder| holder != self.cluster.node_id()))
    }
}
