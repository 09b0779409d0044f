//! What attachments did, and how long it took.

use api::failure::{Failure, Kind, Result};
use api::types::{Attachment, AttachmentStats, RequestStats};
use service::failures::meta_failure;
use vhost_backend::blk::RequestKind;

use crate::attachments::{Attachments, Live};
use storage::Device;

use crate::attachments::State;
use crate::sockets::{attached_on, request_stats};

impl Attachments {
    /// What the attachment of this node did that has this socket or serves the volume of this name.
    pub async fn stats(&self, target: &str) -> Result<AttachmentStats> {
        let live = self.lock().await;
        let applied = self
            .cluster
            .meta
            .applied()
            .attachments()
            .map_err(meta_failure)?;
        let attachment = match self.own(applied, target)? {
            Some(own) => own,
            // One that was made just now may not have been applied here.
            None => {
                let all = self
                    .cluster
                    .asked
                    .list_attachments()
                    .await
                    .map_err(meta_failure)?;
                let own = self.own(all.clone(), target)?;
                own.ok_or_else(|| self.not_here(&all, target))?
            }
        };
        let socket = attachment.socket.clone();
        self.stats_of(&live, attachment).ok_or_else(|| {
            Failure::new(
                Kind::Conflict,
                format!("attachment {socket} is not served"),
                "`penstock health` says why",
            )
        })
    }

    /// What each attachment did that this node serves, as far as it has applied what meta knows.
    pub async fn stats_as_applied(&self) -> Result<Vec<AttachmentStats>> {
        let live = self.lock().await;
        let own = self.own_as_applied()?.into_iter();
        Ok(own.filter_map(|a| self.stats_of(&live, a)).collect())
    }

    /// None if it is not served.
    fn stats_of(&self, live: &Live<'_>, attachment: meta::Attachment) -> Option<AttachmentStats> {
        let served = live.attached.served.get(&attachment.id)?;
        let State::Up { device, .. } = &served.state else {
            return None;
        };
        let Attachment {
            socket,
            volume,
            queues,
            state,
            queues_running,
            counters,
            ..
        } = self.shown(live, attachment);
        Some(AttachmentStats {
            volume,
            socket,
            state,
            queues,
            queues_running,
            period_ms: u64::try_from(device.age().as_millis()).unwrap_or(u64::MAX),
            in_flight: device.in_flight(),
            errors: counters.errors,
            reads: requests(device, RequestKind::Read, counters.read_bytes),
            writes: requests(device, RequestKind::Write, counters.write_bytes),
            flushes: requests(device, RequestKind::Flush, 0),
            discards: requests(device, RequestKind::Discard, 0),
        })
    }

    /// The one attachment of this node that is meant.
    fn own(&self, all: Vec<meta::Attachment>, target: &str) -> Result<Option<meta::Attachment>> {
        let own = self.cluster.node_id();
        let mut meant: Vec<_> = all
            .into_iter()
            .filter(|a| a.node == own && is_meant(a, target))
            .collect();
        match meant.len() {
            0 | 1 => Ok(meant.pop()),
            n => Err(Failure::new(
                Kind::Conflict,
                format!("volume '{target}' has {n} attachments"),
                "name the socket of the one that is meant",
            )),
        }
    }

    /// Why nothing is told of an attachment.
    fn not_here(&self, all: &[meta::Attachment], target: &str) -> Failure {
        match all.iter().find(|a| is_meant(a, target)) {
            Some(elsewhere) => {
                let name = self.cluster.meta.map().node_name(elsewhere.node);
                attached_on(target, &name)
            }
            None => Failure::new(
                Kind::NotFound,
                format!("nothing is attached as '{target}'"),
                "see `penstock attachment list`",
            ),
        }
    }
}

fn is_meant(attachment: &meta::Attachment, target: &str) -> bool {
    attachment.socket == target || attachment.target.name().as_str() == target
}

fn requests(device: &Device, kind: RequestKind, bytes: u64) -> RequestStats {
    request_stats(bytes, &device.latencies(kind))
}
